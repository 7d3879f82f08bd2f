"""Configs: trees of hyperparameters that are edited first and instantiated later.

`Config` is `fiddle.Config` with three additions. Template fields are filled in when the config is created, so they can
be edited at once. The error about a misspelt field suggests the nearest name. And `instantiate` does not build the
configs nested in a `Configurable`: they are templates, which the object builds itself once it knows the missing values.

    class FeedForward(Layer):
      hidden_dims: int = REQUIRED
      norm_tpl: Config = template(RMSNorm)

    ff = Config(FeedForward, hidden_dims=64)
    ff.norm_tpl.epsilon = 1e-5
    layer = ff.instantiate()

Paths are edited in `overrides.py`, text dumps and diffs are made in `text.py`, JSON in `json.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import fiddle as fdl
from fiddle import history

from praxis_lite.common.config.configurable import REQUIRED, Configurable, not_by_name
from praxis_lite.common.config.editing import CodePlace, check_keeps_edit, copy_edits, note_edit, place_of_edit
from praxis_lite.common.config.fields_at_fault import name_config, name_field_at_fault
from praxis_lite.common.errors import ConfigError, UnknownFieldError, did_you_mean

T = TypeVar('T')

_NOWHERE = CodePlace()

# Functions that are called before an object of a Configurable class is built, with the class, the values of its fields,
# and its path. They raise ConfigError if something is wrong. Modules that depend on this one add functions to the list.
field_checks: list[Callable[[type[Configurable], dict[str | int, Any], str], None]] = []


class Config(fdl.Config[T], Generic[T]):
  """The arguments for a later call of a class or function, editable as attributes.

      config = Config(Linear, input_dims=8)
      config.output_dims = 16
      layer = config.instantiate()         # Linear(input_dims=8, output_dims=16)

  Setting or reading a field that the target does not have raises `UnknownFieldError`.
  """

  def __init__(self, fn_or_cls: Callable[..., T] | type[T], /, *args: object, **kwargs: object):
    if isinstance(fn_or_cls, Configurable):
      kind = type(fn_or_cls).__name__
      raise ConfigError(f'Config takes the class {kind}, not an object of it; write Config({kind}, ...)')
    with history.suspend_tracking():
      known = field_names(fn_or_cls)
      for name in kwargs:
        if known is not None and name not in known:
          raise unknown_field(fn_or_cls, name, place=place_of_edit(None))
      if args and isinstance(fn_or_cls, type) and issubclass(fn_or_cls, Configurable):
        raise ConfigError(not_by_name(fn_or_cls))
      if args:
        super().__init__(fn_or_cls, *args, **kwargs)
      else:
        self._copy_state(_bare_config(fn_or_cls), {})
        for name, value in kwargs.items():
          setattr(self, name, value)
      self._fill_defaults()

  def __setattr__(self, name: str, value: object) -> None:
    check_keeps_edit(self, name, value)
    with history.suspend_tracking():
      try:
        super().__setattr__(name, value)
      except (AttributeError, TypeError):
        raise unknown_field(target(self), name, below=self, place=place_of_edit(self)) from None
    note_edit(self, name)

  def __getattr__(self, name: str) -> Any:
    try:
      return super().__getattr__(name)
    except AttributeError:
      if name.startswith('__'):
        raise
      if name in (field_names(self) or ()):
        return REQUIRED
      raise unknown_field(target(self), name, below=self, place=place_of_edit(self)) from None

  def __delattr__(self, name: str) -> None:
    with history.suspend_tracking():
      super().__delattr__(name)
      self._fill_defaults()

  def _fill_defaults(self) -> None:
    """Sets each unset field that has a default factory to a new default, which `__arguments__` then holds."""
    made = {name: make() for name, make in _default_factories(target(self)) if name not in self.__arguments__}
    self.__arguments__.update(made)
    note_edit(self, *made)

  def __eq__(self, other: object) -> bool:
    """Whether both configs would make the same call, with defaults for fields that are not set."""
    # This takes one pass; the number of Fiddle's own passes grows with the depth.
    if self is other:
      return True
    if not isinstance(other, Config):
      return NotImplemented
    if target(self) != target(other):
      return False
    if self.__arguments__.keys() == other.__arguments__.keys():
      return self.__arguments__ == other.__arguments__
    return config_values(self) == config_values(other)

  __hash__ = None  # type: ignore[assignment]  # A config is mutable, and comparable by value.

  def __deepcopy__(self, memo: dict[int, object]) -> Self:
    for value in self.__arguments__.values():
      _share_arrays(value, memo)
    copied = object.__new__(type(self))
    copied._copy_state(self, copy.deepcopy(self.__arguments__, memo))
    copy_edits(copied)
    return copied

  def _copy_state(self, other: fdl.Config, arguments: dict[str | int, object]) -> None:
    """Copies everything that Fiddle keeps in another config into this one, except the arguments and the target."""
    self.__dict__.update(other.__dict__)
    for name in ('__argument_history__', '__argument_tags__'):  # Usually empty, so deepcopy is skipped.
      value = other.__dict__[name]
      self.__dict__[name] = copy.deepcopy(value) if value else copy.copy(value)
    self.__dict__['__arguments__'] = arguments

  def set(self, **fields: object) -> Self:
    """Sets fields in place and returns the config, for chaining."""
    for name, value in fields.items():
      setattr(self, name, value)
    return self

  def clone(self, **fields: object) -> Self:
    """Returns an independent copy, with `fields` set in it. Arrays are shared: they may be large."""
    with history.suspend_tracking():
      return copy.deepcopy(self).set(**fields)

  def instantiate(self, **fields: object) -> T:
    """Calls the target with the fields of this config, overridden by `fields`.

    A `Configurable` gets the configs nested in the fields unbuilt (as copies that share their arrays), because it
    builds its templates itself. For other callables, such as optax transformations, nested configs are built first.

    Raises:
      ConfigError: a REQUIRED field is not set, or a field of a `Configurable` has a value of another type than its
        annotation.
    """
    return build_at('', self, **fields)


def build_at(path: str, config: Config[T], /, **fields: object) -> T:
  """Returns `config.instantiate(**fields)`; its errors name `path`, such as 'lm.softmax', instead of the class."""
  build: Any = target(config)
  keep_nested = isinstance(build, type) and issubclass(build, Configurable)
  name = getattr(build, '__qualname__', str(build))
  where = path or (build._config_path if keep_nested else '') or name
  values = config_values(config) | fields
  missing = sorted(str(key) for key, value in values.items() if value is REQUIRED)
  if missing:
    owner = '' if where == name else f' (a field of {name})'
    hint = _missing_hint(build, missing[0])
    raise ConfigError(f'{where}.{missing[0]}: a value is required but not set{owner}{hint}')
  arguments = dict(config.__arguments__, **fields)
  convert = _copy_nested if keep_nested else functools.partial(map_nested, Config.instantiate)
  positional = [convert(arguments[i]) for i in sorted(k for k in arguments if isinstance(k, int))]
  try:
    for check in field_checks if keep_nested else ():
      check(build, values, where)
    built: T = build(*positional, **{k: convert(v) for k, v in arguments.items() if isinstance(k, str)})
  except ConfigError as error:
    name_field_at_fault(error, build, values, where)
    name_config(error, config, where)
    raise
  return built


def _missing_hint(build: Any, field: str) -> str:
  """Returns the end of a message about a field without a value: how to set it, or how to declare it as a child."""
  hint = field_type_hints(build).get(field)
  if field in (told := getattr(build, '_how_to_set', {})):
    return f'; {told[field]}'
  if getattr(build, '_set_up_in', '') != 'setup' or not (isinstance(hint, type) and issubclass(hint, Configurable)):
    return ''
  return f'; if setup() creates it, declare it as {field}: {hint.__name__} = child()'


def template(fn_or_cls: Callable[..., T] | Config[T], /, **fields: object) -> Config[T]:
  """Returns a dataclass field whose default is a new `Config(fn_or_cls, **fields)`.

      class Block(Layer):
        norm_tpl: Config = template(RMSNorm)         # users of Block may edit it, or replace its class

  `fn_or_cls` may be a `Config` too: then the default is a clone of it.
  """
  if isinstance(fn_or_cls, Config):
    base = fn_or_cls
    return dataclasses.field(default_factory=lambda: base.clone(**fields))
  # Each config gets copies of nested configs. If they were shared, editing one would change others and the default.
  return dataclasses.field(default_factory=lambda: Config(fn_or_cls, **_copy_nested(fields)))


instantiate = Config.instantiate
"""Calls the target of a config: `instantiate(config)` is `config.instantiate()`."""


def target(config: Config[T]) -> Callable[..., T]:
  """Returns the class or function that `config` is a call of."""
  return fdl.get_callable(config)


def map_nested(fn: Callable[[Config], object], value: object) -> object:
  """Returns `value` with `fn` applied to its outermost configs, which may be in lists, tuples and dicts."""
  if isinstance(value, Config):
    return fn(value)
  if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
    return type(value)(map_nested(fn, v) for v in value)
  if isinstance(value, dict):
    return {k: map_nested(fn, v) for k, v in value.items()}
  return value


def nested_configs(config: Config) -> list[Config]:
  """Returns `config` and all configs in its fields; an outer config precedes those inside it."""
  found: list[Config] = []
  map_nested(found.append, list(config.__arguments__.values()))
  return [config, *(inner for outer in found for inner in nested_configs(outer))]


def config_values(config: Config) -> dict[str | int, Any]:
  """Returns all fields of `config` in the order of their declaration, including defaults.

  A parameter that has no default and is not set is REQUIRED. The keys of positional-only arguments are their positions.
  """
  values = fdl.ordered_arguments(config, include_defaults=True, include_unset=True)
  return {key: REQUIRED if value is fdl.NO_VALUE else value for key, value in values.items()}


def fill_required(config: Config) -> Config:
  """Returns a copy of `config` in which required values that are missing, such as paths of files, are placeholders."""
  config = config.clone()
  for name, value in config_values(config).items():
    if not isinstance(name, str) or name == 'batch_size':
      continue
    if value is REQUIRED:
      setattr(config, name, 'not-set')
    elif isinstance(value, Config):
      setattr(config, name, fill_required(value))
  return config


def field_names(config: Config | Callable[..., object]) -> list[str] | None:
  """Returns the field names of a config, or of a class or function; None if it accepts any keyword."""
  try:
    parameters = _bare_config(target(config) if isinstance(config, Config) else config).__signature_info__.parameters
  except (ValueError, TypeError):
    return None
  return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else list(parameters)


def unknown_field(
  fn_or_cls: Callable[..., object],
  name: str | int,
  path: str | None = None,
  below: Config | None = None,
  place: CodePlace = _NOWHERE,
) -> UnknownFieldError:
  """Returns the error for a field `name` that a class or function does not have, or for an index instead of a field.

  `path` is the path of the config if an override named the field; otherwise None. Overrides may leave out the ending
  _tpl of a field. `below` is a config: the message suggests configs nested in it that have the field; None suggests no
  such configs. `place` is where Python code named the field.
  """
  known = field_names(fn_or_cls) or []
  spellings = known if path is None else [*known, *(n.removesuffix('_tpl') for n in known)]
  what = getattr(fn_or_cls, '__qualname__', repr(fn_or_cls))
  where = f'{path or place.path} ({what})' if path or place.path else what
  line = f' ({place.line})' if place.line else ''
  plain = inspect.getattr_static(fn_or_cls, str(name), None)  # None if the class has no such attribute.
  if not (plain is None or callable(plain) or hasattr(plain, '__get__') or str(name).startswith('_')):
    return UnknownFieldError(
      f'{where} has no field {name!r}: its attribute of this name has no type annotation. Write '
      f'{name}: {type(plain).__name__} = {plain!r} in the class{line}'
    )
  inner = {} if below is None else below.__arguments__
  deeper = [f"'{k}.{name}'" for k, v in inner.items() if isinstance(v, Config) and name in (field_names(v) or ())]
  close = f' Did you mean {" or ".join(deeper)}?' if 0 < len(deeper) < 4 else did_you_mean(str(name), spellings)
  fields = f'Its fields: {", ".join(known)}.' if known else 'It has no fields.'
  return UnknownFieldError(f'{where} has no field {shown_key(name)}.{close} {fields}{line}')


def shown_key(key: str | int) -> str:
  """Returns a field, dict key or index as messages show it."""
  return f'[{key}]' if isinstance(key, int) else repr(key)


def field_type_hints(fn_or_cls: Callable[..., Any]) -> dict[str, Any]:
  """Returns the annotations of the fields of a config's target, without annotations that cannot be resolved."""
  if isinstance(fn_or_cls, type) and dataclasses.is_dataclass(fn_or_cls):
    annotated: list[Any] = list(fn_or_cls.__mro__)
  else:
    annotated = [inspect.unwrap(fn_or_cls.__init__ if isinstance(fn_or_cls, type) else fn_or_cls)]  # type: ignore[misc]
  hints: dict[str, Any] = {}
  for owner in reversed(annotated):
    module = sys.modules.get(getattr(owner, '__module__', None) or '')
    names = {**getattr(owner, '__dict__', {}), **getattr(owner, '__globals__', getattr(module, '__dict__', {}))}
    for name, annotation in inspect.get_annotations(owner).items():
      hints.pop(name, None)
      # One by one, because some cannot be resolved, such as names that are imported only for type checkers.
      stand_in = type('_', (), {'__annotations__': {name: annotation}})
      with contextlib.suppress(NameError, TypeError, AttributeError, SyntaxError):
        hints.update(typing.get_type_hints(stand_in, names))
  return hints


def _copy_nested(value: Any) -> Any:
  if not isinstance(value, (Config, list, dict)):
    return value
  memo: dict[int, Any] = {}
  _share_arrays(value, memo)
  with history.suspend_tracking():
    return copy.deepcopy(value, memo)


def _share_arrays(value: object, memo: dict[int, Any]) -> None:
  """Fills `memo` so that a deep copy of `value` shares the arrays in its lists, tuples and dicts."""
  if isinstance(value, (list, tuple, dict)):
    for entry in value.values() if isinstance(value, dict) else value:
      _share_arrays(entry, memo)
  elif hasattr(type(value), '__array__'):
    memo[id(value)] = value


def _bare_config(fn_or_cls: Callable[..., object]) -> fdl.Config:
  """Returns Fiddle's config of `fn_or_cls` without any field set. It is cached, because it has to read annotations."""
  with history.suspend_tracking():
    try:
      return _cached_config(fn_or_cls)
    except TypeError:  # `fn_or_cls` cannot be hashed; or it is not callable, and Fiddle raises the error.
      return fdl.Config(fn_or_cls)


_cached_config = functools.lru_cache(maxsize=1024)(fdl.Config)


def _default_factories(fn_or_cls: object) -> list[tuple[str, Callable[[], Any]]]:
  fields = dataclasses.fields(fn_or_cls) if isinstance(fn_or_cls, type) and dataclasses.is_dataclass(fn_or_cls) else ()
  return [(f.name, f.default_factory) for f in fields if f.init and f.default_factory is not dataclasses.MISSING]
