"""Configs as JSON, there and back without loss.

    {"$config": "praxis_lite.training.task:SingleTask", "name": "lm", "model": {"$config": ...}, ...}

A config is written with the fields that are set on it; defaults come from the code that reads it. The record of a run
also has the defaults of the code that wrote it, which are used if they differ from today's. Values that JSON lacks are
written as objects whose key says what they are:

    $config     a config: the reference of its target, then its fields; "$args" has positional arguments by index, and
                in a record "$defaults" has the fields that are not set
    $tuple      list of entries                $dict       list of [key, value], where a key is not a plain string
    $set        list of entries                $frozenset  list of entries
    $float      "nan", "inf" or "-inf"         $bytes      base64
    $ref        function or class, as module:qualname
    $dtype      an np.dtype, by name           $scalar     [dtype, value] of a NumPy scalar
    $array      [dtype, shape, base64]         $path       a pathlib path
    $enum       [class, member]                $object     dataclass or named tuple: its class, then its fields
    $partial    [function, args, keywords]     $required   true

Anyone may have written a file, so reading imports only what `trusted.py` lists, and building calls nothing else.
A config that occurs twice is read back as two equal ones.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import functools
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.common.config.base import Config, config_values, field_names, target
from praxis_lite.common.config.configurable import REQUIRED, Configurable
from praxis_lite.common.config.references import is_named, reference
from praxis_lite.common.config.text import child_path, raise_as_config_error, to_text
from praxis_lite.common.config.trusted import UntrustedError, import_trusted
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.files import plain_dtype
from praxis_lite.common.foreign_text import LEFT_OUT, is_secret, remove_secrets

Json = Any  # What `json.loads` returns: None, bool, int, float, str, and lists and dicts of them.


def to_json(config: object) -> str:
  """Returns `config`, or a dict, list or tuple of configs, as JSON.

  Raises:
    ConfigError: it holds something that cannot be read back, such as a lambda; the message names its path.
  """
  return json.dumps(_Writer().write(config, ''), indent=2, allow_nan=False)


def from_json(text: str, trusted: Collection[str] = ()) -> object:
  """Returns what `to_json` has written.

  Args:
    text: JSON, possibly written by anyone.
    trusted: modules and packages whose code may be imported and called too, in addition to what `trusted.py` lists.

  Raises:
    UntrustedError: `text` names something from another module.
    ConfigError: `text` is not the JSON of a config, or names something that cannot be imported or a field that no
      longer exists; the message names its path.
  """
  try:
    encoded = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f'config: not JSON: {error}') from None
  return decode(encoded, trusted)[0]


def encode_readable(roots: Mapping[str, object], lost: dict[str, str]) -> Json:
  """Returns what `to_json` writes, with defaults, as nested lists and dicts.

  REQUIRED replaces values that could not be read back. It also replaces large arrays, because a config is not a place
  for data. Secrets are replaced by `***`. `lost` receives the reason for each field that was replaced, by its path.
  """
  return _Writer(lost).write_roots(roots)


class OtherFields(NamedTuple):
  """How the fields of today's classes differ from those in a record, by their paths."""

  gone: list[str]  # Fields whose recorded value was a default, and that the class no longer has.
  new: list[str]  # Fields that the class did not have when the record was written.
  unreadable: list[str]  # Fields whose recorded value was a default that names something that no longer exists.


def decode(
  encoded: Json, trusted: Collection[str] = (), edited: Collection[str] | None = None
) -> tuple[object, OtherFields]:
  """Returns the value of parsed JSON from `to_json` or `encode_readable`, and how today's classes differ from it.

  Args:
    encoded: the JSON, possibly written by anyone.
    trusted: as for `from_json`.
    edited: paths of the fields whose values were not defaults. Today's classes must have these fields, but may lack the
      others. None means that all fields were edited.

  Raises:
    UntrustedError, ConfigError: as `from_json`.
  """
  reader = _Reader(trusted, edited)
  try:
    return reader.read(encoded, ''), reader.other
  except RecursionError:
    raise ConfigError('config: nested too deeply') from None


# -------------------------------------------------------------------- writing

_MOST_ARRAY_BYTES = 1 << 20  # `encode_readable` replaces larger arrays by REQUIRED.


class _Writer:
  """Writes values. A field that cannot be written raises an error; with `lost`, REQUIRED replaces it."""

  def __init__(self, lost: dict[str, str] | None = None):
    self._lost = lost  # See `encode_readable`.

  def write_roots(self, roots: Mapping[str, object]) -> Json:
    written: dict[str, Json] = {}
    for name, root in roots.items():
      entries = [self._field(v, child_path(name, i)) for i, v in enumerate(root)] if isinstance(root, list) else None
      written[name] = self._field(root, name) if entries is None else entries
    return written

  def _remove_secrets(self, text: str, path: str) -> str:
    """Returns `text` without secrets; if it had any, notes `path` in `lost`."""
    kept = LEFT_OUT if text and is_secret(path) else remove_secrets(text)
    if kept != text and self._lost is not None:
      self._lost[path] = f'its secret; where it is used, give it again, as in --set {path}=...'
    return kept

  def write(self, value: Any, path: str) -> Json:
    kind = type(value)
    if value is REQUIRED:
      return {'$required': True}
    if kind is str:
      return value if self._lost is None else self._remove_secrets(value, path)
    if kind in (type(None), bool, int):
      return value
    if kind is float:
      return value if math.isfinite(value) else {'$float': repr(value)}
    if kind is list:
      return self._entries(value, path)
    if kind is tuple:
      return {'$tuple': self._entries(value, path)}
    if kind is dict:
      if all(type(k) is str and not k.startswith('$') for k in value):
        return self._fields(value, path)
      return {'$dict': [[self.write(k, path), self.write(v, child_path(path, k))] for k, v in value.items()]}
    if isinstance(value, Config):
      return self._config(value, path)
    if isinstance(value, enum.Enum):
      member = value.value if isinstance(value, enum.Flag) else value.name
      return {'$enum': [_reference(kind, path), member]}
    if kind in (set, frozenset):
      return {f'${kind.__name__}': self._entries(sorted(value, key=repr), path)}
    if kind is bytes:
      return {'$bytes': base64.b64encode(value).decode()}
    if isinstance(value, np.dtype):
      return {'$dtype': _dtype(value, path)}
    if isinstance(value, np.generic):
      return {'$scalar': [_dtype(value.dtype, path), base64.b64encode(value.tobytes()).decode()]}
    if kind is np.ndarray and not value.dtype.hasobject:
      return {'$array': self._array(value, path)}
    if isinstance(value, pathlib.Path):
      return {'$path': str(value)}
    if isinstance(value, functools.partial):
      arguments = [self._entries(value.args, path), self._fields(value.keywords, path)]
      return {'$partial': [self.write(value.func, path), *arguments]}
    if isinstance(value, tuple) and hasattr(value, '_fields'):
      return {'$object': _reference(kind, path), **self._fields(dict(zip(value._fields, value)), path)}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Configurable)):
      fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
      return {'$object': _reference(kind, path), **self._fields(fields, path)}
    if is_named(value):
      return {'$ref': _reference(value, path)}
    raise ConfigError(f'{path or "config"}: a value of type {kind.__qualname__} cannot be written as JSON')

  def _config(self, config: Config, path: str) -> Json:
    called, values, given = target(config), config_values(config), config.__arguments__
    written: dict[str, Json] = {'$config': _reference(called, path)}
    if positional := {k: v for k, v in given.items() if isinstance(k, int)}:
      written['$args'] = self._fields(positional, path)
    written |= {k: self._field(v, child_path(path, k)) for k, v in given.items() if isinstance(k, str)}
    if self._lost is not None:
      unset = {k: v for k, v in values.items() if isinstance(k, str) and k not in given}
      written['$defaults'] = {k: _encode_default(v, child_path(path, k)) for k, v in unset.items()}
    return written

  def _field(self, value: object, path: str) -> Json:
    try:
      return self.write(value, path)
    except ConfigError as error:
      if self._lost is None:
        raise
      self._lost[path] = str(error)
      return {'$required': True}

  def _fields(self, fields: Mapping[Any, object], path: str) -> dict[str, Json]:
    return {str(k): self.write(v, child_path(path, k)) for k, v in fields.items()}

  def _entries(self, values: Iterable[object], path: str) -> list[Json]:
    return [self.write(v, child_path(path, i)) for i, v in enumerate(values)]

  def _array(self, array: np.ndarray, path: str) -> list[Json]:
    if self._lost is not None and array.nbytes > _MOST_ARRAY_BYTES:
      raise ConfigError(f'{path}: an array of {array.nbytes / 2**20:.1f} MiB; give a function that returns it instead')
    return [_dtype(array.dtype, path), list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _encode_default(value: object, path: str) -> Json:
  """Returns the JSON of a default, or of REQUIRED if the default could not be read back."""
  lost: dict[str, str] = {}
  encoded = _Writer(lost)._field(value, path)
  return _UNKNOWN if lost else encoded


_UNKNOWN: Json = {'$required': True}


def _reference(value: object, path: str) -> str:
  with raise_as_config_error(path, 'cannot be written as JSON: '):
    return reference(value)


def _dtype(dtype: np.dtype, path: str) -> str:
  for name in (dtype.name, dtype.str):  # `dtype.str` also has the byte order, but is not right for bfloat16.
    with contextlib.suppress(ValueError, AttributeError):
      if plain_dtype(name) == dtype:
        return name
  raise ConfigError(f'{path or "config"}: NumPy data of dtype {dtype} cannot be written as JSON')


# -------------------------------------------------------------------- reading


class _Reader:
  """Reads values. Anyone may have written their JSON, so no type in it is assumed."""

  def __init__(self, trusted: Collection[str], edited: Collection[str] | None = None):
    self.other = OtherFields([], [], [])
    self._trusted = trusted
    self._edited = edited
    self._readers: dict[str, Callable[[dict[str, Json], str], Any]] = {
      '$config': self._config,
      '$object': self._object,
      '$tuple': lambda e, path: tuple(self._entries(e['$tuple'], path)),
      '$dict': self._dict,
      '$set': lambda e, path: set(self._entries(e['$set'], path)),
      '$frozenset': lambda e, path: frozenset(self._entries(e['$frozenset'], path)),
      '$float': lambda e, path: float(e['$float']),
      '$bytes': lambda e, path: base64.b64decode(e['$bytes']),
      '$ref': lambda e, path: self._import(e['$ref'], path),
      '$dtype': lambda e, path: plain_dtype(e['$dtype']),
      '$scalar': lambda e, path: _array(e['$scalar'][0], (), e['$scalar'][1])[()],
      '$array': lambda e, path: _array(*e['$array']),
      '$path': lambda e, path: pathlib.Path(e['$path']),
      '$enum': self._enum,
      '$partial': self._partial,
      '$required': lambda e, path: REQUIRED,
    }

  def read(self, encoded: Json, path: str) -> Any:
    if isinstance(encoded, list):
      return self._entries(encoded, path)
    if not isinstance(encoded, dict):
      return encoded
    tag = next((k for k in encoded if k.startswith('$') and k != '$args'), None)
    if tag is None:
      return self._fields(encoded, path)
    if tag not in self._readers:
      raise ConfigError(f'{path or "config"}: unknown entry {tag!r}; known: {", ".join(self._readers)}')
    try:
      return self._readers[tag](encoded, path)
    except ConfigError:
      raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
      raise ConfigError(f'{path or "config"}: cannot be read from JSON: {error}') from error

  def _entries(self, encoded: list[Json], path: str) -> list[Any]:
    return [self.read(v, child_path(path, i)) for i, v in enumerate(encoded)]

  def _fields(self, encoded: dict[str, Json], path: str) -> dict[str, Any]:
    return {k: self.read(v, child_path(path, k)) for k, v in encoded.items() if not k.startswith('$')}

  def _config(self, encoded: dict[str, Json], path: str) -> Config:
    fn_or_cls = self._import(encoded['$config'], path)
    known = field_names(fn_or_cls) if self._edited is not None else None
    unknown = [k for k in encoded if known is not None and k not in known and not k.startswith('$')]
    gone = [name for name in unknown if not self._is_edited(child_path(path, name))]
    self.other.gone.extend(child_path(path, name) for name in gone)
    fields = self._fields({k: v for k, v in encoded.items() if k not in gone}, path)
    positional = {int(k): self.read(v, child_path(path, int(k))) for k, v in encoded.get('$args', {}).items()}
    with raise_as_config_error(path):
      config: Config = Config(fn_or_cls, **fields)
    if positional:
      named = dict(config.__arguments__)
      config.__arguments__.clear()
      config.__arguments__.update(positional | named)
    if '$defaults' in encoded:
      self._set_other_defaults(config, encoded, path)
    return config

  def _is_edited(self, path: str) -> bool:
    """Whether the field at `path`, or a field below it, had another value than its default when it was written."""
    return any(other == path or other.startswith((f'{path}.', f'{path}[')) for other in self._edited or ())

  def _set_other_defaults(self, config: Config, encoded: dict[str, Json], path: str) -> None:
    """Sets each unset field of a config to its recorded default, if that differs from today's default."""
    today, recorded = config_values(Config(target(config))), encoded['$defaults']
    known = (*recorded, *encoded)
    self.other.new.extend(child_path(path, k) for k in today if isinstance(k, str) and k not in known)
    for name, value in recorded.items():
      where = child_path(path, name)
      if value == _UNKNOWN or name in encoded:
        continue
      if name not in today:
        self.other.gone.append(where)
        continue
      if _encode_default(today[name], where) == value:  # Not read: code that only a default names need not be trusted.
        continue
      try:
        default = self.read(value, where)
      except UntrustedError:
        raise
      except ConfigError:
        self.other.unreadable.append(where)
        continue
      if to_text(default) != to_text(today[name]):
        setattr(config, name, default)

  def _object(self, encoded: dict[str, Json], path: str) -> object:
    cls, fields = self._import(encoded['$object'], path), self._fields(encoded, path)
    is_value = isinstance(cls, type) and (hasattr(cls, '_fields') or dataclasses.is_dataclass(cls))
    if not is_value or issubclass(cls, Configurable):
      raise ConfigError(f'{path or "config"}: {encoded["$object"]} is neither a dataclass nor a named tuple')
    with raise_as_config_error(path):
      return cls(**fields)

  def _dict(self, encoded: dict[str, Json], path: str) -> dict[Any, Any]:
    pairs = [(self.read(k, path), v) for k, v in encoded['$dict']]
    return {k: self.read(v, child_path(path, k)) for k, v in pairs}

  def _enum(self, encoded: dict[str, Json], path: str) -> object:
    name, member = encoded['$enum']
    cls = self._import(name, path)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
      raise ConfigError(f'{path or "config"}: {name} is not an enum')
    return cls(member) if issubclass(cls, enum.Flag) else cls[member]

  def _partial(self, encoded: dict[str, Json], path: str) -> object:
    function, args, keywords = encoded['$partial']
    return functools.partial(self.read(function, path), *self._entries(args, path), **self._fields(keywords, path))

  def _import(self, name: str, path: str) -> Any:
    try:
      return import_trusted(name, self._trusted)
    except UntrustedError as error:
      raise UntrustedError(f'{path or "config"}: {error}', error.module) from None
    except UserError as error:
      raise ConfigError(f'{path or "config"}: cannot import {name!r}: {error}') from None


def _array(dtype: str, shape: Sequence[int], data: str) -> np.ndarray:
  return np.frombuffer(base64.b64decode(data), plain_dtype(dtype)).reshape(shape).copy()
