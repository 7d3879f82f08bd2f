"""Values of overrides: parses text, and converts a value to the annotated type of its field.

Text is read as a Python literal, in which names inside containers need no quotes: `(data, mdl)` is `('data', 'mdl')`.
Text that is not a literal is a string. `fit` then converts the value to the annotated type if nothing is lost: an int
to a float, a list to a tuple, and a name to an enum's member. Where the type is a config or a callable, it imports the
class or function that a text names.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import numbers
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praxis_lite.common.config.base import Config, field_checks, field_names, field_type_hints, target
from praxis_lite.common.config.configurable import REQUIRED, Configurable
from praxis_lite.common.config.hints import (
  accepts_config,
  describe_hint,
  is_callable_hint,
  is_config,
  is_configurable,
  is_dtype_hint,
  is_value_class,
  members_of,
)
from praxis_lite.common.config.literals import BRACKETS, lone_quote, read_literal, unclosed_bracket
from praxis_lite.common.config.references import import_reference, is_named, looks_like_reference
from praxis_lite.common.config.text import format_value
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.figures import number_of


class Text(str):
  """The right side of an override, not parsed yet."""


class MismatchError(Exception):
  """A value does not fit its field; the message says what would fit."""


def fit(value: object, hint: object, current: object) -> object:
  """Returns `value` converted to fit a field.

  Args:
    value: any value, or `Text`.
    hint: the resolved annotation of the field; Any accepts everything.
    current: the present value of the field.

  Raises:
    ConfigError: it has the wrong type, or names something that cannot be imported.
  """
  text = str(value) if isinstance(value, Text) else None
  if text is not None:
    if quote := lone_quote(text):
      raise ConfigError(f'a quote is not closed: {text}; write {quote}text{quote}, or text without quotes')
    value = read_literal(text, [kind for kind in (*members_of(hint), type(current)) if is_value_class(kind)])
    if isinstance(value, float) and 'e' in text.lower() and value.is_integer() and _only_int(hint):
      value = int(value)  # `num_train_steps=1e5`
  try:
    takes_tuple = any(typing.get_origin(member) is tuple for member in members_of(hint))
    if takes_tuple and isinstance(value, str) and value[:1] in BRACKETS and unclosed_bracket(value):
      raise MismatchError(describe_hint(hint))  # Even if the field accepts text too.
    return _fit(value, hint, current)
  except MismatchError as mismatch:
    if text in ('None', 'null') and str in members_of(hint):
      raise ConfigError(f'expected {mismatch}, got {text}; as text, it is written "\'{text}\'"') from None
    if text is not None and value is not text:  # `name=123`, where a string is expected.
      with contextlib.suppress(MismatchError):
        return _fit(text, hint, current)
    raise ConfigError(
      f'expected {mismatch}, got {describe_value(value)}{_guess_meaning(value, hint, current)}'
    ) from None


def _only_int(hint: object) -> bool:
  members = members_of(hint)
  return int in members and not {float, Any} & set(members)


def _guess_meaning(value: object, hint: object, current: object) -> str:
  """Returns a guess of what was meant by a value that does not fit, as the end of a message; '' without a guess."""
  if callable(value):
    taken = [args[0] for member in members_of(hint) if (args := typing.get_args(member)) and isinstance(args[0], list)]
    if taken:
      return f'; it must take {number_of(len(taken[0]), "argument")}'
  if isinstance(value, str) and value[:1] in BRACKETS and unclosed_bracket(value):
    return f'; {unclosed_bracket(value)} is not closed'
  if isinstance(value, str) and value.isidentifier() and isinstance(current, Config):
    # Looks for the name in the packages of the present class: `adam` in place of optax.adamw means optax.adam.
    packages = list(itertools.accumulate(str(target(current).__module__).split('.'), '{}.{}'.format))
    for cutoff in (1.0, 0.8):
      for module in map(sys.modules.get, packages):
        known = {name.lower(): name for name in dir(module) if not name.startswith('_')}
        close = [known[name] for name in difflib.get_close_matches(value.lower(), known, cutoff=cutoff)]
        for name in (value, *close):
          if is_named(getattr(module, name, None)):
            return f'. Did you mean {getattr(module, "__name__", "")}.{name}?'
    return ''
  if isinstance(current, Config) and not isinstance(value, str | Config):
    own = getattr(target(current), '__annotations__', {})
    if names := [name for name in field_names(current) or () if name in own]:
      return f'; this is a config: set its fields, such as {", ".join(names[:3])}'
  if isinstance(current, Config) and target(current) in members_of(hint):
    return f'; set its fields, such as {", ".join(itertools.islice(field_names(current) or (), 3))}'
  with contextlib.suppress(MismatchError, ConfigError):
    if tuple in [typing.get_origin(member) for member in members_of(hint)]:
      _convert((value,), hint)
      if hint == tuple[Any, ...] and isinstance(value, str) and not value.isidentifier():  # An object, as text.
        return '; configs of classes of your own are set in Python'
      return f'; a tuple of one is written ({format_value(value)},)'
  if isinstance(value, tuple) and value:
    with contextlib.suppress(MismatchError, ConfigError):
      for each in value:
        _convert(each, hint)
      return '; `praxis-lite sweep` tries several values'
  return ''


def check_types(cls: type[Configurable], values: Mapping[str | int, object], path: str) -> None:
  """Raises ConfigError if a value does not have the annotated type of its field, which messages call `path.field`.

  Checks only plain annotations: numbers, strings, tuples, lists and dicts of them, dtypes, initializers, configs. None
  is always accepted where it is the default of the field.
  """
  make: Callable[..., object] = cls
  for name, hint in _plain_hints(make).items():
    value = values[name]
    is_default = getattr(cls, name, REQUIRED) is value
    if is_default and value is None:
      continue
    try:
      _convert(value, hint)
    except MismatchError as mismatch:
      given = f'{_given(value)}, the default of {cls.__qualname__}' if is_default else _given(value)
      if type(value).__name__.startswith('GradientTransformation') and accepts_config(hint):
        given = f'{given}, which optax returns; write the function, as in Config(optax.adam)'
      elif is_named(value) and accepts_config(hint):
        write = f'{name}: Config = template({value.__name__})' if is_default else f'Config({value.__name__}, ...)'
        given = f'{given}; write {write}'
      elif isinstance(value, str) and accepts_config(hint):
        given = f'{given}; write Config(...) of the function or class, as in Config(optax.adam)'
      elif inspect.isfunction(value):
        given = f'{given}; a function of the step belongs in a field that takes one, such as learner.schedule'
      raise ConfigError(f'{path}.{name}: expected {mismatch}, got {given}') from None


field_checks.append(check_types)


def _given(value: object) -> str:
  """Returns what `describe_value` returns if that is short; otherwise the type. For a config, returns its class."""
  if isinstance(value, Config):
    return f'the config of {getattr(target(value), "__qualname__", target(value))}'
  text = describe_value(value)
  return text if len(text) < 80 else type(value).__name__


_PLAIN = (int, float, bool, str, types.NoneType)


@functools.cache
def _plain_hints(cls: Callable[..., object]) -> dict[str, object]:
  hints = field_type_hints(cls)
  return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init and _is_plain(hints.get(f.name, Any))}  # type: ignore


def _is_plain(hint: object) -> bool:
  members = members_of(hint)
  if is_dtype_hint(members):
    return True
  if len(members) > 1:
    return all(map(_is_plain, members))
  if typing.get_origin(hint) in (tuple, list, dict):
    return all(a in (Any, Ellipsis, *_PLAIN) for a in typing.get_args(hint))
  return hint in _PLAIN or is_config(hint) or is_configurable(hint) or is_value_class(hint)


def describe_value(value: object) -> str:
  """Returns a value as messages show it, with its type in parentheses; None as 'None'."""
  return 'None' if value is None else f'{format_value(value)} ({type(value).__name__})'


def _fit(value: object, hint: object, current: object) -> object:
  if value is REQUIRED or isinstance(value, Config):
    return value if value is REQUIRED else _convert(value, hint)
  members = members_of(hint)
  takes_config = isinstance(current, Config) or any(map(is_config, members))
  takes_callable = any(map(is_callable_hint, members)) or (is_named(current) and Any in members)
  if isinstance(value, str) and looks_like_reference(value) and (takes_config or takes_callable):
    with contextlib.suppress(*([UserError] if str in members or (Any in members and not takes_config) else [])):
      found = import_reference(value)
      return _config_of(found) if takes_config else _convert(found, hint)
  if takes_config and is_named(value):
    return _config_of(value)
  if not takes_config:
    return _convert(value, hint)
  with contextlib.suppress(MismatchError):
    if hint is not Any or value is None:
      return _convert(value, hint)
  raise MismatchError(
    describe_hint(hint) if is_configurable(hint) else 'the name of a class or function, such as package.module.Class'
  )


def _config_of(target: object) -> Config:
  if isinstance(target, Config):
    return target.clone()
  if not is_named(target):
    raise MismatchError('the name of a class or function')
  return Config(target)


def _convert(value: Any, hint: Any) -> object:
  """Returns `value` converted to the type `hint`; raises MismatchError if it cannot be converted."""
  members = members_of(hint)
  if Any in members:
    return value
  built = target(value) if isinstance(value, Config) else None
  if isinstance(built, type) and any(is_configurable(member) and issubclass(built, member) for member in members):
    return value  # The annotation is the class that the field's config builds.
  if is_dtype_hint(members):
    return _checked_dtype(value, none_allowed=types.NoneType in members)
  if len(members) > 1:
    if type(value) in members:
      return value
    for member in members:
      with contextlib.suppress(MismatchError):
        return _convert(value, member)
    raise MismatchError(describe_hint(hint))
  hint = members[0]
  origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
  if hint in _NUMBERS:
    if not isinstance(value, _NUMBERS[hint]) or isinstance(value, bool):
      raise MismatchError(describe_hint(hint))
    return value if isinstance(value, hint) else hint(value)
  if origin in (tuple, list) and isinstance(value, (tuple, list)) and not hasattr(value, '_fields'):
    return origin(_convert_entries(value, origin, arguments, hint))
  if origin is dict and isinstance(value, dict) and len(arguments) == 2:
    return {_convert(k, arguments[0]): _convert(v, arguments[1]) for k, v in value.items()}
  if isinstance(hint, type) and issubclass(hint, enum.Enum) and not isinstance(value, hint):
    return _member(hint, value)
  if (origin in _SEQUENCES and isinstance(value, (str, bytes))) or not _passes(value, hint):
    raise MismatchError(describe_hint(hint))
  return value


# NumPy registers its types as these.
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, complex: numbers.Complex}
# A string is a sequence too, but is not accepted as one.
_SEQUENCES = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


def _convert_entries(value: Sequence[object], origin: object, arguments: tuple[Any, ...], hint: object) -> list[Any]:
  with contextlib.suppress(MismatchError):
    if not arguments:
      return list(value)
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
      return [_convert(v, arguments[0]) for v in value]
    if len(arguments) == len(value):
      return [_convert(v, h) for v, h in zip(value, arguments)]
  raise MismatchError(describe_hint(hint))


def _member(cls: type[enum.Enum], value: object) -> object:
  if isinstance(value, str) and (name := value.removeprefix(f'{cls.__name__}.')) in cls.__members__:
    return cls[name]
  with contextlib.suppress(ValueError):
    return cls(value)
  raise MismatchError(f'one of {", ".join(cls.__members__)}')


def _checked_dtype(value: Any, none_allowed: bool) -> object:
  from jax.numpy import dtype

  if value is None and none_allowed:
    return value
  with contextlib.suppress(TypeError):
    if value is not None and dtype(value):
      return value
  short = {'bf16': 'bfloat16', 'fp16': 'float16', 'f16': 'float16', 'fp32': 'float32', 'f32': 'float32'}
  names = short.get(value, '') if isinstance(value, str) else ''
  raise MismatchError(f'the name of a dtype, such as {names or "float32, bfloat16, float16, int32"}')


def _passes(value: Any, hint: Any) -> bool:
  """Whether a value has the type `hint`. A hint that is no class, or is a protocol, accepts all values."""
  members = members_of(hint)
  if len(members) > 1:
    return any(_passes(value, member) for member in members)
  hint = types.NoneType if members[0] is None else members[0]
  origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
  if origin is typing.Literal:
    return any(type(value) is type(choice) and value == choice for choice in arguments)
  if origin is collections.abc.Callable:
    return callable(value) and _takes(value, arguments)
  if hint in _NUMBERS:
    return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
  try:
    if not isinstance(value, origin):
      return False
  except TypeError:
    return True
  if origin is type:
    return all(not isinstance(base, type) or issubclass(value, base) for base in arguments)
  if issubclass(origin, collections.abc.Mapping):
    return all(_passes(x, of) for item in value.items() for x, of in zip(item, arguments))
  if origin is tuple and arguments and arguments[-1] is not Ellipsis:
    return len(value) == len(arguments) and all(map(_passes, value, arguments))
  if issubclass(origin, collections.abc.Collection) and arguments:
    return all(_passes(x, arguments[0]) for x in value)
  return True


def _takes(function: Callable[..., object], arguments: tuple[Any, ...]) -> bool:
  """Whether a function accepts the arguments in `Callable[[...], ...]`."""
  if not arguments or not isinstance(arguments[0], list):
    return True
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return True  # Python cannot read the function's signature.
  try:
    signature.bind(*arguments[0])
  except TypeError:
    return False
  return True
