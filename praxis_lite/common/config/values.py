"""Values of overrides: parses text, and converts a value to the annotated type of its field.

Text is read as a Python literal, in which names inside containers need no quotes: `(data, mdl)` is `('data', 'mdl')`.
Text that is not a literal is a string. `fit` then converts the value to the annotated type if nothing is lost: an int
to a float, a list to a tuple, a name to an enum's member, and the name of a class, which is imported, to a config or
callable.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from praxis_lite.common.config.base import Config, field_checks, field_type_hints, target
from praxis_lite.common.config.configurable import REQUIRED, Configurable
from praxis_lite.common.config.references import import_reference, is_named, looks_like_reference
from praxis_lite.common.config.text import format_value
from praxis_lite.common.errors import ConfigError, UserError, did_you_mean


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
    value = _read(text, [kind for kind in (*members_of(hint), type(current)) if _is_value_class(kind)])
    if isinstance(value, float) and 'e' in text.lower() and value.is_integer() and _only_int(hint):
      value = int(value)  # `num_train_steps=1e5`
  try:
    return _fit(value, hint, current)
  except MismatchError as mismatch:
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
  if isinstance(value, str) and value.isidentifier() and isinstance(current, Config):
    # A class from the package of the present one, by its public name: `adam` in place of optax.adamw is optax.adam.
    for package in itertools.accumulate(str(target(current).__module__).split('.'), '{}.{}'.format):
      if is_named(getattr(sys.modules.get(package), value, None)):
        return f'. Did you mean {package}.{value}?'
    return ''
  with contextlib.suppress(MismatchError, ConfigError):
    if tuple in [typing.get_origin(member) for member in members_of(hint)]:
      _convert((value,), hint)
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
      if type(value).__name__.startswith('GradientTransformation') and _takes_config(hint):
        given = f'{given}, which optax returns; write the function, as in Config(optax.adam)'
      elif is_named(value) and _takes_config(hint):
        write = f'{name}: Config = template({value.__name__})' if is_default else f'Config({value.__name__}, ...)'
        given = f'{given}; write {write}'
      elif isinstance(value, str) and _takes_config(hint):
        given = f'{given}; write Config(...) of the function or class, as in Config(optax.adam)'
      elif inspect.isfunction(value):
        given = f'{given}; a function of the step belongs in a field that takes one, such as learner.schedule'
      raise ConfigError(f'{path}.{name}: expected {mismatch}, got {given}') from None


field_checks.append(check_types)


def _given(value: object) -> str:
  """Like `describe_value`, but short."""
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
  if _is_dtype_hint(members):
    return True
  if len(members) > 1:
    return all(map(_is_plain, members))
  if typing.get_origin(hint) in (tuple, list, dict):
    return all(a in (Any, Ellipsis, *_PLAIN) for a in typing.get_args(hint))
  return hint in _PLAIN or _is_config(hint) or _is_configurable(hint) or _is_value_class(hint)


def describe_value(value: object) -> str:
  """Returns a value as messages show it, with its type."""
  return 'None' if value is None else f'{format_value(value)} ({type(value).__name__})'


# -------------------------------------------------------------------- from text


_NAMES = {'none': None, 'null': None, 'true': True, 'false': False, 'inf': float('inf'), 'nan': float('nan')}


def _read(text: str, classes: list[type]) -> object:
  """Reads a literal, or a call of one of `classes` such as `WeightInit('gaussian', 0.02)`; returns other text as is."""
  if text.lower() in _NAMES:
    return _NAMES[text.lower()]
  try:
    node = ast.parse(text, mode='eval').body
    return text if isinstance(node, ast.Name) else ast.literal_eval(_Literals(classes).visit(node))
  except ConfigError:
    raise
  except (SyntaxError, ValueError, TypeError, RecursionError):
    return text


class _Literals(ast.NodeTransformer):
  """Replaces names by strings, and calls of some classes by their results; raises ValueError if no literal remains."""

  def __init__(self, classes: Sequence[type]):
    self._classes = {c.__name__: c for c in classes}

  def visit_Constant(self, node: ast.Constant) -> ast.Constant:
    if node.value is Ellipsis:
      raise ValueError('no value of a field')
    return node

  def visit_Name(self, node: ast.Name) -> ast.Constant:
    return ast.Constant(_NAMES.get(node.id.lower(), node.id))

  def visit_Call(self, node: ast.Call) -> ast.Constant:
    make = self._maker(node.func)
    args = [ast.literal_eval(self.visit(a)) for a in node.args]
    keywords = {str(k.arg): ast.literal_eval(self.visit(k.value)) for k in node.keywords}
    try:
      return ast.Constant(make(*args, **keywords))  # type: ignore[arg-type]
    except TypeError as error:
      raise ConfigError(str(error)) from None

  def _maker(self, function: ast.expr) -> Callable[..., object]:
    """Returns the class, or its class method, that a call names."""
    match function:
      case ast.Name(id=name) if name in self._classes:
        return self._classes[name]
      case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._classes:
        methods = [n for n, _ in inspect.getmembers(self._classes[name], inspect.ismethod) if n[0] != '_']
        if attribute not in methods:
          close = did_you_mean(attribute, methods)
          raise ConfigError(f'{name} has no {attribute!r}.{close} It has {", ".join(methods)}.')
        return getattr(self._classes[name], attribute)
    raise ValueError('no class that may be called')


def _is_value_class(kind: object) -> bool:
  return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore


# -------------------------------------------------------------------- to the annotation


def _fit(value: object, hint: object, current: object) -> object:
  if value is REQUIRED or isinstance(value, Config):
    return value if value is REQUIRED else _convert(value, hint)
  members = members_of(hint)
  takes_config = isinstance(current, Config) or any(map(_is_config, members))
  takes_callable = any(map(_is_callable_hint, members)) or (is_named(current) and Any in members)
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
    describe_hint(hint) if _is_configurable(hint) else 'the name of a class or function, such as package.module.Class'
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
  if isinstance(built, type) and any(_is_configurable(member) and issubclass(built, member) for member in members):
    return value  # The annotation is the class that the field's config builds.
  if _is_dtype_hint(members):
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


_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}  # NumPy registers its types as these.
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
  raise MismatchError('the name of a dtype, such as float32, bfloat16, float16, int32')


def _passes(value: object, hint: object) -> bool:
  if hint in (str, bool, bytes, types.NoneType) or _is_config(hint) or _is_value_class(hint):
    return isinstance(value, typing.get_origin(hint) or hint)  # type: ignore[arg-type]
  import typeguard

  try:
    typeguard.check_type(
      value,
      hint,
      forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
      collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
    )
  except typeguard.TypeCheckError:
    return False
  except (TypeError, NameError):
    return True  # This annotation cannot be checked.
  return True


# -------------------------------------------------------------------- annotations


def members_of(hint: object) -> list[Any]:
  """Returns the members of a union, or the annotation itself."""
  if typing.get_origin(hint) is typing.Annotated:
    return members_of(typing.get_args(hint)[0])
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return [member for argument in typing.get_args(hint) for member in members_of(argument)]
  return [hint]


def describe_hint(hint: object) -> str:
  """Returns an annotation as people write it."""
  members = members_of(hint)
  if typing.get_origin(hint) is typing.Literal:
    return f'one of {", ".join(map(repr, typing.get_args(hint)))}'
  if len(members) > 1:
    return ' | '.join(map(describe_hint, members))
  if hint is types.NoneType:
    return 'None'
  if _is_configurable(hint):
    return f'the config of {"an" if hint.__qualname__[0] in "AEIOU" else "a"} {hint.__qualname__}'
  if hint is Config:
    return 'a Config'
  if _is_callable_hint(hint):
    return 'a function or class'
  if isinstance(hint, type) and not typing.get_args(hint):
    return hint.__qualname__
  return re.sub(r'(?:\w+\.)+(?=\w)', '', str(hint))


def _is_config(hint: object) -> bool:
  origin = typing.get_origin(hint) or hint
  return isinstance(origin, type) and issubclass(origin, Config)


def _is_configurable(hint: object) -> TypeGuard[type[Configurable]]:
  return isinstance(hint, type) and issubclass(hint, Configurable)


def _takes_config(hint: object) -> bool:
  return any(_is_config(member) or _is_configurable(member) for member in members_of(hint))


def _is_callable_hint(hint: object) -> bool:
  return (typing.get_origin(hint) or hint) in (collections.abc.Callable, type)


def _is_dtype_hint(members: list[Any]) -> bool:
  """Whether the annotation contains DTypeLike. Only code that has imported JAX can contain such an annotation."""
  jax_typing = sys.modules.get('jax.typing')
  spellings = typing.get_args(jax_typing.DTypeLike) if jax_typing else ()
  return bool(spellings) and all(spelling in members for spelling in spellings)
