"""Configs as JSON, there and back without loss.

    {"$config": "praxis_lite.task:SingleTask", "name": "lm", "model": {"$config": ...}, ...}

A config is written with the fields that are set on it; defaults come from the code that reads it. Values that JSON
lacks are objects with a key that says what they are:

    $config     a config: the reference of its target, then its fields; "$args" has positional arguments by index
    $tuple      list of entries                $dict       list of [key, value], where a key is not a plain string
    $set        list of entries                $frozenset  list of entries
    $float      "nan", "inf" or "-inf"         $bytes      base64
    $ref        function or class, as module:qualname
    $dtype      an np.dtype, by name           $scalar     [dtype, value] of a NumPy scalar
    $array      [dtype, shape, base64]         $path       a pathlib path
    $enum       [class, member]                $object     dataclass or named tuple: its class, then its fields
    $partial    [function, args, keywords]     $required   true

Reading imports what the references name, so read only files that you would run. A config that occurs twice is read back
as two equal ones.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.config import REQUIRED, Config, Configurable, target
from praxis_lite.config.references import import_reference, is_named, reference
from praxis_lite.config.text import as_config_error, child_path
from praxis_lite.errors import ConfigError


def to_json(config: object) -> str:
  """Returns `config`, or a dict, list or tuple of configs, as JSON.

  Raises:
    ConfigError: it holds something that cannot be read back, such as a lambda; the message names its path.
  """
  return json.dumps(_encode(config, ''), indent=2, allow_nan=False)


def from_json(text: str) -> object:
  """Returns what `to_json` has written.

  Raises:
    ConfigError: `text` is not JSON of a config, or names something that cannot be imported or a field that no longer
      exists; the message names its path.
  """
  try:
    encoded = json.loads(text)
  except json.JSONDecodeError as error:
    raise ConfigError(f'config: not JSON: {error}') from None
  return _decode(encoded, '')


# -------------------------------------------------------------------- writing


def _encode(value: Any, path: str) -> object:
  kind = type(value)
  if value is REQUIRED:
    return {'$required': True}
  if kind in (type(None), bool, int, str):
    return value
  if kind is float:
    return value if math.isfinite(value) else {'$float': repr(value)}
  if kind is list:
    return _encode_all(value, path)
  if kind is tuple:
    return {'$tuple': _encode_all(value, path)}
  if kind is dict:
    if all(type(k) is str and not k.startswith('$') for k in value):
      return _encode_fields(value, path)
    return {'$dict': [[_encode(k, path), _encode(v, child_path(path, k))] for k, v in value.items()]}
  if isinstance(value, Config):
    return _encode_config(value, path)
  if isinstance(value, enum.Enum):
    member = value.value if isinstance(value, enum.Flag) else value.name
    return {'$enum': [_reference(kind, path), member]}
  if kind in (set, frozenset):
    return {f'${kind.__name__}': _encode_all(sorted(value, key=repr), path)}
  if kind is bytes:
    return {'$bytes': base64.b64encode(value).decode()}
  if isinstance(value, np.dtype):
    return {'$dtype': _dtype(value, path)}
  if isinstance(value, np.generic):
    return {'$scalar': [_dtype(value.dtype, path), base64.b64encode(value.tobytes()).decode()]}
  if kind is np.ndarray and not value.dtype.hasobject:
    data = base64.b64encode(value.tobytes()).decode()
    return {'$array': [_dtype(value.dtype, path), list(value.shape), data]}
  if isinstance(value, pathlib.Path):
    return {'$path': str(value)}
  if isinstance(value, functools.partial):
    arguments = [_encode_all(value.args, path), _encode_fields(value.keywords, path)]
    return {'$partial': [_encode(value.func, path), *arguments]}
  if isinstance(value, tuple) and hasattr(value, '_fields'):
    return {'$object': _reference(kind, path), **_encode_fields(dict(zip(value._fields, value)), path)}
  if dataclasses.is_dataclass(value) and not isinstance(value, (type, Configurable)):
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return {'$object': _reference(kind, path), **_encode_fields(fields, path)}
  if is_named(value):
    return {'$ref': _reference(value, path)}
  raise ConfigError(f'{path or "config"}: a value of type {kind.__qualname__} cannot be written as JSON')


def _encode_config(config: Config, path: str) -> dict[str, object]:
  positional = {k: v for k, v in config.__arguments__.items() if isinstance(k, int)}
  named = {k: v for k, v in config.__arguments__.items() if isinstance(k, str)}
  args = {'$args': _encode_fields(positional, path)} if positional else {}
  return {'$config': _reference(target(config), path), **args, **_encode_fields(named, path)}


def _encode_fields(fields: Mapping[Any, object], path: str) -> dict[str, object]:
  return {str(k): _encode(v, child_path(path, k)) for k, v in fields.items()}


def _encode_all(values: Iterable[object], path: str) -> list[Any]:
  return [_encode(v, child_path(path, i)) for i, v in enumerate(values)]


def _reference(value: object, path: str) -> str:
  with as_config_error(path, 'cannot be written as JSON: '):
    return reference(value)


def _dtype(dtype: np.dtype, path: str) -> str:
  for name in (dtype.name, dtype.str):  # Only the second has the byte order; only the first knows bfloat16.
    with contextlib.suppress(TypeError, AttributeError):
      if _dtype_of(name) == dtype:
        return name
  raise ConfigError(f'{path or "config"}: NumPy data of dtype {dtype} cannot be written as JSON')


# -------------------------------------------------------------------- reading


def _decode(encoded: object, path: str) -> Any:
  if isinstance(encoded, list):
    return _decode_all(encoded, path)
  if not isinstance(encoded, dict):
    return encoded
  tag = next((k for k in encoded if k.startswith('$') and k != '$args'), None)
  if tag is None:
    return _decode_fields(encoded, path)
  if tag not in _DECODERS:
    raise ConfigError(f'{path or "config"}: unknown entry {tag!r}; known: {", ".join(_DECODERS)}')
  try:
    return _DECODERS[tag](encoded, path)
  except ConfigError:
    raise
  except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
    raise ConfigError(f'{path or "config"}: cannot be read from JSON: {error}') from error


def _decode_all(encoded: list[Any], path: str) -> list[Any]:
  return [_decode(v, child_path(path, i)) for i, v in enumerate(encoded)]


def _decode_fields(encoded: dict[str, Any], path: str) -> dict[str, Any]:
  return {k: _decode(v, child_path(path, k)) for k, v in encoded.items() if not k.startswith('$')}


def _decode_config(encoded: dict[str, Any], path: str) -> Config:
  fn_or_cls, fields = _imported(encoded['$config'], path), _decode_fields(encoded, path)
  positional = {int(k): _decode(v, child_path(path, int(k))) for k, v in encoded.get('$args', {}).items()}
  with as_config_error(path):
    config: Config = Config(fn_or_cls, **fields)
  if positional:
    named = dict(config.__arguments__)
    config.__arguments__.clear()
    config.__arguments__.update(positional | named)
  return config


def _decode_object(encoded: dict[str, Any], path: str) -> object:
  cls, fields = _imported(encoded['$object'], path), _decode_fields(encoded, path)
  with as_config_error(path):
    return cls(**fields)


def _decode_dict(encoded: dict[str, Any], path: str) -> dict[Any, Any]:
  pairs = [(_decode(k, path), v) for k, v in encoded['$dict']]
  return {k: _decode(v, child_path(path, k)) for k, v in pairs}


def _decode_enum(encoded: dict[str, Any], path: str) -> object:
  name, member = encoded['$enum']
  cls = _imported(name, path)
  return cls(member) if issubclass(cls, enum.Flag) else cls[member]


def _decode_partial(encoded: dict[str, Any], path: str) -> object:
  function, args, keywords = encoded['$partial']
  return functools.partial(_decode(function, path), *_decode_all(args, path), **_decode_fields(keywords, path))


def _array(dtype: str, shape: Sequence[int], data: str) -> np.ndarray:
  return np.ndarray(shape, _dtype_of(dtype), base64.b64decode(data)).copy()


def _imported(name: str, path: str) -> Any:
  with as_config_error(path, f'cannot import {name!r}: '):
    return import_reference(name)


def _dtype_of(name: str) -> np.dtype:
  import ml_dtypes  # noqa: F401  By which NumPy knows bfloat16 and the like.

  return np.dtype(name)


_DECODERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
  '$config': _decode_config,
  '$object': _decode_object,
  '$tuple': lambda e, path: tuple(_decode_all(e['$tuple'], path)),
  '$dict': _decode_dict,
  '$set': lambda e, path: set(_decode_all(e['$set'], path)),
  '$frozenset': lambda e, path: frozenset(_decode_all(e['$frozenset'], path)),
  '$float': lambda e, path: float(e['$float']),
  '$bytes': lambda e, path: base64.b64decode(e['$bytes']),
  '$ref': lambda e, path: _imported(e['$ref'], path),
  '$dtype': lambda e, path: _dtype_of(e['$dtype']),
  '$scalar': lambda e, path: _array(e['$scalar'][0], (), e['$scalar'][1])[()],
  '$array': lambda e, path: _array(*e['$array']),
  '$path': lambda e, path: pathlib.Path(e['$path']),
  '$enum': _decode_enum,
  '$partial': _decode_partial,
  '$required': lambda e, path: REQUIRED,
}
