"""Errors that the user can fix: one clear message, and no traceback on the command line."""

from __future__ import annotations

import contextlib
import difflib
import enum
import re
from collections.abc import Iterable, Iterator, Sequence

from praxis_lite.common.other_names import OUR_NAMES


class UserError(ValueError):
  """Bad input. The message says where it is, what is wrong, and what would be right.

  Attributes:
    exit_code: the exit code of a process that this error ends.
  """

  exit_code = 2


class ConfigError(UserError):
  """A config is incomplete or inconsistent."""


class UnknownFieldError(ConfigError, AttributeError):
  """A config has no field with this name."""


class RangeError(ConfigError):
  """A field has a value out of its range, or makes a weight without entries.

  A layer that got the value from another layer does not know which field the user has set. So the layers around it
  change the message (`config/fields_at_fault.py`).

  Attributes:
    expected: what would be right, such as 'at least 1'.
    field: the name of the field; '' if only the weight is known.
    weight: path and shape of the weight, as messages show them; '' if the error is about a field.
  """

  def __init__(self, message: str, value: object, expected: str, field: str = '', weight: str = ''):
    super().__init__(message)
    self.value, self.expected, self.field, self.weight = value, expected, field, weight


class ShardingFault(enum.StrEnum):
  """Kinds of `ShardingError`."""

  UNKNOWN_AXIS = 'unknown axis'
  AXIS_TWICE = 'axis used twice'
  WRONG_RANK = 'wrong rank'
  NO_INPUT_MAPPING = 'missing input mapping'
  OTHER = 'invalid sharding'


class ShardingError(UserError):
  """A split mapping, spec or mesh is invalid.

  Attributes:
    fault: the kind of error.
  """

  def __init__(self, message: str, fault: ShardingFault = ShardingFault.OTHER):
    super().__init__(message)
    self.fault = fault


class DataError(UserError):
  """Input data is missing, empty or unreadable."""


class HungInputError(DataError):
  """A read of input data does not end. The run may be restarted from its last checkpoint."""

  exit_code = 75  # Like `LostHostError`.


class NumericsError(UserError):
  """A step computes wrong results on its devices."""


class CheckpointError(UserError):
  """A checkpoint is missing or belongs to another model."""


FAULTY_DEVICE_CODE = 76  # A process exits with this code if its run must not be restarted on the same devices.


class LostHostError(UserError):
  """Another process of the run died, hangs or never started. The run may be restarted from its last checkpoint."""

  exit_code = 75  # EX_TEMPFAIL in sysexits.h: a failure after which one may try again.


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's message, or the name of its class if it has none."""
  return (str(error).strip() or type(error).__name__).splitlines()[0]


def error_summary(error: BaseException) -> str:
  """Returns the class of an error and the first line of its message, without the request of TensorStore."""
  if not str(error).strip():
    return type(error).__name__
  # TensorStore appends its request: thousands of characters of JSON.
  message = re.split(r' \[tensorstore_spec|\. See full TensorStore', first_line(error))[0]
  return f'{type(error).__name__}: {message}'


def first_lines(lines: Sequence[str], most: int = 20) -> list[str]:
  """Returns the first `most` lines, and if there are more, a line that says how many are left out."""
  return [*lines[:most], f'and {len(lines) - most} more'] if len(lines) > most else list(lines)


def first_names(names: Sequence[str], most: int = 3) -> str:
  """Returns the first `most` names, separated by commas, and how many more there are: 'a, b, c and 2 more'."""
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more


@contextlib.contextmanager
def prefix_errors(path: str, field: str | None = None) -> Iterator[None]:
  """Prepends the path of a config to the message of a `UserError` raised inside.

  If a message begins with `field`, it continues the path: 'learner.x: wrong' becomes 'task.train.learner.x: wrong'.
  Otherwise, a colon separates them: 'task.train: wrong'.
  """
  try:
    yield
  except UserError as error:
    text = str(error)
    continues = field is not None and text.startswith((f'{field}.', f'{field}:'))
    error.args = (f'{path}.{text}' if continues else f'{path}: {text}',)
    raise


def check_choice(where: str, value: object, choices: Sequence[str]) -> None:
  """Raises a ConfigError that names the field `where` and the nearest choice, unless `value` is one of `choices`."""
  if value not in choices:
    expected = ' or '.join(filter(None, (', '.join(map(repr, choices[:-1])), repr(choices[-1]))))
    raise ConfigError(f'{where}: expected {expected}, got {value!r}.{did_you_mean(str(value), choices)}')


def check_range(
  where: str,
  value: float | Sequence[float] | None,
  *,
  least: float | None = None,
  above: float | None = None,
  below: float | None = None,
) -> None:
  """Raises a RangeError that names the field `where` if `value`, or an entry of it, is out of range; accepts None."""
  values = value if isinstance(value, Sequence) else [] if value is None else [value]
  limits = [
    *([] if least is None else [(f'at least {least}', lambda x: x >= least)]),
    *([] if above is None else [(f'more than {above}', lambda x: x > above)]),
    *([] if below is None else [(f'less than {below}', lambda x: x < below)]),
  ]
  wrong = [x for x in values if not all(fits(x) for _, fits in limits)]
  if wrong:
    expected, each = ' and '.join(text for text, _ in limits), ' each' if isinstance(value, Sequence) else ''
    message = f'{where}: expected {expected}{each}, got {value}'
    raise RangeError(message, wrong[0], expected, field=where.rpartition('.')[2])


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
  """Returns " Did you mean 'x'?" for the closest of `known`, or the empty string if no name is close.

  If another library uses `name` for one of `known`, that one is the closest. Names are close if their similarity ratio
  (`difflib`) is at least `cutoff`.
  """
  known = list(known)
  same = [ours for ours in (name.lower(), *OUR_NAMES.get(name.lower(), ())) if ours in known]
  close = same or difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
  return f" Did you mean '{close[0]}'?" if close else ''
