"""Text dumps of configs, made to be read, searched and diffed.

    task: praxis_lite.task.SingleTask                      a config, with its class
    task.model.num_layers = 6                              a field, by its full path
    task.model.norm_tpl: praxis_lite.layers.RMSNorm        a nested config, with its fields below
    task.model.params_init = WeightInit('gaussian', 0.02)
    task.train.inputs_split_mapping.map_2d = ('data', None)
    datasets[0].batch_size = 12

Fields are in the order of their declaration, defaults included, so that a golden file shows a changed default; the keys
of a dict are sorted, except those of the root. Each line has its full path, so a line diff needs no context. The left
side of `=` is the path that `overrides.py` takes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from praxis_lite.config import REQUIRED, Config, config_values, target
from praxis_lite.config.references import dotted_name, is_named

if TYPE_CHECKING:
  import numpy as np

_IDENTIFIER = re.compile(r'[A-Za-z_]\w*')
_ADDRESS = re.compile(r' at 0x[0-9a-f]+')
_MAX_ARRAY_ENTRIES = 16


def to_text(config: object, name: str = '') -> str:
  """Returns the dump of a config, or of a dict or list of configs: lines joined by newlines, without one at the end.

  Args:
    config: what to dump.
    name: the path of `config` itself, with which all lines begin.
  """
  return '\n'.join(_line(path, entry) for path, entry in _entries(config, name, is_root=True))


def diff(old: object, new: object, name: str = '') -> list[str]:
  """Returns the differences of two configs, a line each, in the order of the dumps; equal configs have none.

  task.model.num_layers: 6 -> 8          changed: a value, or the class of a config
  + task.model.norm_tpl.scale = 1.0      only in `new`
  - task.model.dropout = 0.1             only in `old`
  """
  before, after = dict(_entries(old, name, is_root=True)), dict(_entries(new, name, is_root=True))
  lines = []
  for path in _merged(list(before), list(after)):
    if path not in before:
      lines.append(f'+ {_line(path, after[path])}')
    elif path not in after:
      lines.append(f'- {_line(path, before[path])}')
    elif before[path] != after[path]:
      lines.append(f'{path or "(root)"}: {before[path].text} -> {after[path].text}')
  return lines


def child_path(path: str, key: str | int) -> str:
  """Returns the path of the field, dict key or index `key` of what is at `path`."""
  if isinstance(key, str) and _IDENTIFIER.fullmatch(key):
    return f'{path}.{key}' if path else key
  return f'{path}[{key!r}]'


def format_value(value: Any) -> str:
  """Returns `value` on one line; the text is the same in every process."""
  kind = type(value)
  if kind in _PLAIN or value is REQUIRED:
    return repr(value)
  if isinstance(value, enum.Enum):
    return f'{kind.__qualname__}.{value.name}'
  if kind is tuple:
    return f'({_joined(value)}{"," if len(value) == 1 else ""})'
  if kind is list:
    return f'[{_joined(value)}]'
  if kind is dict:
    entries = sorted((format_value(k), format_value(v)) for k, v in value.items())
    return f'{{{", ".join(f"{k}: {v}" for k, v in entries)}}}'
  if kind in (set, frozenset):
    return f'{kind.__name__}({", ".join(sorted(map(format_value, value)))})'
  if isinstance(value, Config):
    fields = ', '.join(f'{k}={format_value(v)}' for k, v in value.__arguments__.items())
    return f'Config({dotted_name(target(value))}{", " if fields else ""}{fields})'
  if (dtype := dtype_name(value)) is not None:
    return dtype
  if isinstance(value, functools.partial):
    arguments = [format_value(v) for v in value.args] + [f'{k}={format_value(v)}' for k, v in value.keywords.items()]
    return f'partial({", ".join([format_value(value.func), *arguments])})'
  if isinstance(value, tuple) and hasattr(value, '_fields'):
    return f'{kind.__qualname__}({", ".join(f"{k}={format_value(v)}" for k, v in zip(value._fields, value))})'
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return _format_dataclass(value)
  if isinstance(value, pathlib.PurePath):
    return f'Path({value.as_posix()!r})'
  if kind.__module__ == 'numpy' and kind.__name__ == 'ndarray':
    return _format_array(value)
  if is_named(value):
    return dotted_name(value)
  return ' '.join(_ADDRESS.sub('', repr(value)).split())


def dtype_name(value: object) -> str | None:
  """Returns the name of a dtype, spelt as `jnp.float32`, `np.float32` or `np.dtype('float32')`; None for all else."""
  import numpy as np

  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, type):
    if issubclass(value, np.generic):
      return value.__name__.rstrip('_')
    dtype = getattr(value, 'dtype', None)  # jnp.float32 is a class that has its dtype as an attribute.
    return dtype.name if isinstance(dtype, np.dtype) else None
  return None


_PLAIN = (type(None), bool, int, float, str, bytes, complex, range)


class _Entry(NamedTuple):
  """The right side of a line: a value, or the class of a config."""

  text: str
  is_config: bool


def _line(path: str, entry: _Entry) -> str:
  if not path:
    return entry.text
  return f'{path}: {entry.text}' if entry.is_config else f'{path} = {entry.text}'


def _entries(value: object, path: str, is_root: bool = False) -> Iterator[tuple[str, _Entry]]:
  """Yields (path, right side) of the lines of `value`."""
  children: object
  if isinstance(value, Config):
    yield path, _Entry(dotted_name(target(value)), True)
    children = config_values(value).items()
  elif type(value) is dict and value and (all(map(_is_plain_key, value)) or _holds_config(value)):
    children = value.items() if is_root else sorted(value.items(), key=lambda item: format_value(item[0]))
  elif isinstance(value, (list, tuple)) and _holds_config(value):
    children = enumerate(value)
  else:
    yield path, _Entry(format_value(value), False)
    return
  for key, child in children:
    yield from _entries(child, child_path(path, key))


def _is_plain_key(key: object) -> bool:
  return isinstance(key, str) and _IDENTIFIER.fullmatch(key) is not None


def _holds_config(value: object) -> bool:
  if isinstance(value, Config):
    return True
  if isinstance(value, dict):
    return any(map(_holds_config, value.values()))
  return isinstance(value, (list, tuple)) and any(map(_holds_config, value))


def _merged(old: list[str], new: list[str]) -> list[str]:
  """All paths of both, in their orders as far as these agree, new ones after the one they follow in `new`."""
  known, merged, position = set(old), dict[str, None](), 0
  for path in new:
    if path in known:
      while path not in merged:
        merged[old[position]] = None
        position += 1
    merged[path] = None
  return list(merged | dict.fromkeys(old))


def _joined(values: Iterable[object]) -> str:
  return ', '.join(map(format_value, values))


def _format_dataclass(value: Any) -> str:
  fields = [f for f in dataclasses.fields(value) if f.init]
  by_position = len(fields) <= 3 and not any(f.kw_only for f in fields)
  shown = [f'{"" if by_position else f.name + "="}{format_value(getattr(value, f.name))}' for f in fields]
  return f'{type(value).__qualname__}({", ".join(shown)})'


def _format_array(value: np.ndarray) -> str:
  shape = ', '.join(map(str, value.shape))
  if value.size <= _MAX_ARRAY_ENTRIES:
    return f'array({value.tolist()!r}, {value.dtype.name})'
  checksum = 0 if value.dtype.hasobject else zlib.crc32(value.tobytes())
  return f'array({value.dtype.name}[{shape}], crc32={checksum:08x})'


__all__ = ['child_path', 'diff', 'dtype_name', 'format_value', 'to_text']
