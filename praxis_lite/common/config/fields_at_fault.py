"""Which field an error is about: the outermost one that has the value, and the line of code that has set it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import fiddle as fdl

from praxis_lite.common.config.configurable import REQUIRED
from praxis_lite.common.config.editing import line_of_edit
from praxis_lite.common.errors import ConfigError, RangeError, UserError


def name_field_at_fault(
  error: ConfigError, build: Callable[..., object], values: Mapping[str | int, object], where: str
) -> None:
  """Lets the message of an error name the field that has passed on a value that is out of range.

  So a message about `model_dims = 0` names the field of the model, not a weight or a layer that it was passed on to.

  Args:
    error: raised while `build` was called.
    build, values: a class, and the values of its fields.
    where: the path of its config.
  """
  if not isinstance(error, RangeError) or _is_set_below(error, list(values.values())):
    return
  field, bracket, _ = error.field.partition('[')
  # The message names the entry of the field already, or the field of the object by the object's own name.
  if field in values and (bracket or str(error).startswith(f'{values.get("name")}.{field}:')):
    return
  changed = {
    name: value
    for name, value in values.items()
    if isinstance(name, str) and value is not REQUIRED and getattr(build, name, REQUIRED) is not value
  }
  names = [name for name, value in changed.items() if any(_is_same(x, error.value) for x in _numbers(value))]
  if not names and error.weight:  # The size of a weight may be a multiple of a field.
    names = [name for name, value in changed.items() if any(isinstance(x, int) and x < 1 for x in _numbers(value))]
  if error.field in names:
    names = [error.field]
  if len(names) == 1:
    value = changed[names[0]]
    if isinstance(value, int):
      error.value = value
    error.field, each = names[0], ' each' if isinstance(value, tuple) else ''
    made = f'; it makes {error.weight}' if error.weight else ''
    error.args = (f'{where}.{error.field}: expected {error.expected}{each}, got {value}{made}',)


def name_config(error: UserError, config: fdl.Config, where: str) -> None:
  """Changes a message that begins with a field of a config, after its class or its path: adds the path and the line.

  Args:
    error: raised while an object was built from `config`.
    where: the path of the config.

  The line is where the user's code sets the field.
  """
  text, kind = str(error), getattr(config.__fn_or_cls__, '__qualname__', where)
  found = re.match(rf'(?:{re.escape(where)}|{re.escape(kind)})\.(\w+)(?=[: .\[])', text)
  if not found or found[1] not in config.__signature_info__.parameters:
    return
  line = '' if text[found.end()] == '.' else line_of_edit(config, found[1])
  shown = f' ({line})' if line and not re.search(r'\([^()]+:\d+\)$', text) else ''
  error.args = (f'{where}.{found[1]}{text[found.end() :]}{shown}',)


def _is_set_below(error: RangeError, value: object) -> bool:
  """Whether a config in `value` sets the field that is at fault itself, so that no other field has passed it on."""
  if isinstance(value, fdl.Config):
    field = error.field.partition('[')[0]
    is_this = any(_is_same(x, error.value) for x in _numbers(value.__arguments__.get(field)))
    return bool(field) and (is_this or _is_set_below(error, list(value.__arguments__.values())))
  if isinstance(value, dict):
    return _is_set_below(error, list(value.values()))
  return isinstance(value, list | tuple) and any(_is_set_below(error, entry) for entry in value)


def _numbers(value: object) -> Iterator[int | float]:
  """Yields a number, or the numbers in a tuple."""
  for x in value if isinstance(value, tuple) else (value,):
    if isinstance(x, int | float) and not isinstance(x, bool):
      yield x


def _is_same(x: int | float, wrong: object) -> bool:
  return type(x) is type(wrong) and x == wrong
