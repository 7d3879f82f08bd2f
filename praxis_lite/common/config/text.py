"""Text dumps of configs, designed to be read, searched and diffed.

    task: praxis_lite.training.task.SingleTask                      a config, with its class
    task.model.num_layers = 6                              a field, by its full path
    task.model.norm_tpl: praxis_lite.layers.RMSNorm        a nested config, with its fields below
    task.model.params_init = WeightInit('gaussian', 0.02)
    task.train.inputs_split_mapping.map_2d = ('data', None)
    datasets[0].batch_size = 12

Fields are in the order of their declaration and include defaults, so that a golden file shows a changed default. The
keys of a dict are sorted, except those of the root. Each line has its full path, so a line diff needs no context. The
left side of `=` is a path for `overrides.py`. Passwords are left out; see `foreign_text.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from praxis_lite.common.config.base import Config, config_values, target
from praxis_lite.common.config.configurable import REQUIRED
from praxis_lite.common.config.references import dotted_name, is_named
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.foreign_text import LEFT_OUT, is_secret, remove_secrets

if TYPE_CHECKING:
  import numpy as np

_IDENTIFIER = re.compile(r'[A-Za-z_]\w*')
_ADDRESS = re.compile(r' at 0x[0-9a-f]+')
_MAX_ARRAY_ENTRIES = 16
_PLAIN = (type(None), bool, int, float, str, bytes, complex, range)


def to_text(config: object, name: str = '') -> str:
  """Returns the dump of a config, or of a dict or list of configs: lines joined by newlines, without a final newline.

  All lines begin with `name`, the path of `config` itself.
  """
  return '\n'.join(_line(path, entry) for path, entry in _entries(config, name, is_root=True))


def to_text_of_changes(config: object, name: str = '') -> str:
  """Returns the lines of `to_text` that differ from the defaults of the classes in it.

  A config whose class is not the default one has a line with its class, and lines that differ from that class's
  defaults.
  """
  return '\n'.join(_line(path, entry) for path, entry, _ in _changes(config, name, is_root=True))


def changed_fields(config: object) -> dict[str, tuple[str, str]]:
  """Returns what the lines of `to_text_of_changes` say: by path, the value and the default, or '' without a default."""
  return {path: (entry[1], default) for path, entry, default in _changes(config, '', is_root=True)}


def configs_by_path(config: object, name: str = '') -> dict[str, Config]:
  """Returns, by path, `config` itself or the configs in the dict or list `config`, and all configs nested in them."""
  found = {name: config} if isinstance(config, Config) else {}
  for key, child in _parts(config, is_root=True)[1].items():
    found |= configs_by_path(child, child_path(name, key))
  return found


def diff(old: object, new: object, name: str = '') -> list[str]:
  """Returns the differences of two configs, one per line, in the order of the dumps; [] if they are equal.

  task.model.num_layers: 6 -> 8          changed: a value, or the class of a config
  + task.model.norm_tpl.scale = 1.0      only in `new`
  - task.model.dropout = 0.1             only in `old`
  """
  return _diff(dict(_entries(old, name, is_root=True)), dict(_entries(new, name, is_root=True)))


def diff_texts(old: str, new: str, folded: bool = False) -> list[str]:
  """Returns the result of `diff` for two dumps made by `to_text`.

  With `folded`, a nested config that only one of them has becomes one line:

    + task.model.norm_tpl: praxis_lite.layers.RMSNorm, 12 fields
  """
  before, after = _entries_of(old), _entries_of(new)
  return _diff(_fold(before, after), _fold(after, before)) if folded else _diff(before, after)


def fields_of(text: str) -> dict[str, str]:
  """Returns the right side of each line of a dump by its path: values of fields, and classes of configs."""
  return {path: value for path, (_, value) in _entries_of(text).items()}


_LINE = re.compile(r'(?P<path>.*?)(?P<sign> = |: )(?P<rest>.*)')


def _entries_of(text: str) -> dict[str, _Entry]:
  return {m['path']: (m['sign'], m['rest']) for m in map(_LINE.match, text.splitlines()) if m}


def _diff(before: Mapping[str, _Entry], after: Mapping[str, _Entry]) -> list[str]:
  lines = []
  for path in _merge_paths(list(before), list(after)):
    if path not in before:
      lines.append(f'+ {_line(path, after[path])}')
    elif path not in after:
      lines.append(f'- {_line(path, before[path])}')
    elif before[path] != after[path]:
      lines.append(f'{path or "(root)"}: {before[path][1]} -> {after[path][1]}')
  return lines


def _fold(entries: Mapping[str, _Entry], others: Mapping[str, _Entry]) -> dict[str, _Entry]:
  """Returns `entries`, shortened: a config that `others` lacks is one entry, with the number of its fields."""
  kept: dict[str, _Entry] = {}
  below: dict[str, list[str]] = {}
  folding: str | None = None
  for path, (sign, value) in entries.items():  # The entries below a config follow it.
    if folding is not None and path.startswith((f'{folding}.', f'{folding}[')):
      below[folding] += [path] if sign == ' = ' else []
      continue
    kept[path] = (sign, value)
    folding = path if sign == ': ' and others.get(path, ('', ''))[0] != ': ' else None
    if folding is not None:
      below[folding] = []
  for path, fields in below.items():
    if fields:
      kept[path] = (': ', f'{kept[path][1]}, {number_of(len(fields), "field")}')
  return kept


def child_path(path: str, key: str | int) -> str:
  """Returns the path of the field, dict key or index `key` in the container at `path`."""
  if isinstance(key, str) and _IDENTIFIER.fullmatch(key):
    return f'{path}.{key}' if path else key
  return f'{path}[{key!r}]'


@contextlib.contextmanager
def raise_as_config_error(path: str, prefix: str = '') -> Iterator[None]:
  """Turns a `UserError` raised inside into a `ConfigError` whose message begins with `path` and `prefix`."""
  try:
    yield
  except UserError as error:
    raise ConfigError(f'{path or "config"}: {prefix}{error}') from None


def format_value(value: Any) -> str:
  """Returns `value` on one line, without passwords in URLs; the text is the same in every process."""
  kind = type(value)
  if kind is str:
    return repr(remove_secrets(value))
  if kind in _PLAIN or value is REQUIRED:
    return repr(value)
  if isinstance(value, enum.Enum):
    return f'{kind.__qualname__}.{value.name}'
  if kind is tuple:
    return f'({_join_values(value)}{"," if len(value) == 1 else ""})'
  if kind is list:
    return f'[{_join_values(value)}]'
  if kind is dict:
    entries = sorted((format_value(k), format_value(v)) for k, v in value.items())
    return f'{{{", ".join(f"{k}: {v}" for k, v in entries)}}}'
  if kind in (set, frozenset):
    return f'{kind.__name__}({", ".join(sorted(map(format_value, value)))})'
  if isinstance(value, Config):
    return f'Config({", ".join([dotted_name(target(value)), *_keywords(value.__arguments__)])})'
  if (dtype := dtype_name(value)) is not None:
    return dtype
  if isinstance(value, functools.partial):
    return f'partial({", ".join([_join_values([value.func, *value.args]), *_keywords(value.keywords)])})'
  if isinstance(value, tuple) and hasattr(value, '_fields'):
    return f'{kind.__qualname__}({", ".join(_keywords(dict(zip(value._fields, value))))})'
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = [f for f in dataclasses.fields(value) if f.init]
    by_position = len(fields) <= 3 and not any(f.kw_only for f in fields)
    values = {f.name: getattr(value, f.name) for f in fields}
    return f'{kind.__qualname__}({_join_values(values.values()) if by_position else ", ".join(_keywords(values))})'
  if isinstance(value, pathlib.PurePath):
    return f'Path({remove_secrets(value.as_posix())!r})'
  if kind.__module__ == 'numpy' and kind.__name__ == 'ndarray':
    return _format_array(value)
  if is_named(value):
    return dotted_name(value)
  return ' '.join(_ADDRESS.sub('', repr(value)).split())


def dtype_name(value: object) -> str | None:
  """Returns the name of a dtype given as `jnp.float32`, `np.float32` or `np.dtype('float32')`; otherwise None."""
  import numpy as np

  if isinstance(value, type):
    if issubclass(value, np.generic):
      return value.__name__.rstrip('_')
    value = getattr(value, 'dtype', None)  # jnp.float32 is a class with its dtype as an attribute.
  return value.name if isinstance(value, np.dtype) else None


_NOTHING = object()
_Entry = tuple[str, str]  # The separator and the right side of a line: ' = ' and a value, or ': ' and a class.


def _line(path: str, entry: _Entry) -> str:
  return f'{path}{entry[0]}{entry[1]}' if path else entry[1]


def _entries(value: object, path: str, is_root: bool = False) -> Iterator[tuple[str, _Entry]]:
  """Yields (path, entry) of the lines of `value`."""
  entry, children = _parts(value, is_root)
  if entry is not None:
    yield path, _hide_secret(entry, value, path)
  for key, child in children.items():
    yield from _entries(child, child_path(path, key))


def _changes(
  value: object, path: str, is_root: bool = False, default: object = _NOTHING
) -> Iterator[tuple[str, _Entry, str]]:
  """Yields (path, entry, default as text) of the lines of `value` that differ from `default`."""
  entry, children = _parts(value, is_root)
  default_entry, defaults = _parts(default)
  if entry is not None and entry != default_entry:
    shown = default_entry or (' = ', format_value(default))
    text = '' if default is _NOTHING else _hide_secret(shown, default, path)[1]
    yield path, _hide_secret(entry, value, path), text
    if isinstance(value, Config):
      _, defaults = _parts(Config(target(value)))
  is_other_kind = isinstance(default, Config) and not isinstance(value, Config)
  if is_other_kind or not defaults.keys() <= children.keys():  # If the default has no entry, all lines are changes.
    defaults = {}
  for key, child in children.items():
    yield from _changes(child, child_path(path, key), default=defaults.get(key, _NOTHING))


def _parts(value: object, is_root: bool = False) -> tuple[_Entry | None, Mapping[Any, object]]:
  """Returns a pair: the line of `value` itself, or None without one; and a dict of the values in it that have lines."""
  if isinstance(value, Config):
    return (': ', dotted_name(target(value))), config_values(value)
  if type(value) is dict and value and (all(map(_is_plain_key, value)) or _holds_config(value)):
    return None, value if is_root else dict(sorted(value.items(), key=lambda item: format_value(item[0])))
  if isinstance(value, (list, tuple)) and _holds_config(value):
    return None, dict(enumerate(value))
  return (' = ', format_value(value)), {}


def _hide_secret(entry: _Entry, value: object, path: str) -> _Entry:
  is_left_out = isinstance(value, str) and value and is_secret(path)
  return (' = ', repr(LEFT_OUT)) if is_left_out else entry


def _is_plain_key(key: object) -> bool:
  return isinstance(key, str) and _IDENTIFIER.fullmatch(key) is not None


def _holds_config(value: object) -> bool:
  if isinstance(value, Config):
    return True
  if isinstance(value, dict):
    return any(map(_holds_config, value.values()))
  return isinstance(value, (list, tuple)) and any(map(_holds_config, value))


def _merge_paths(old: list[str], new: list[str]) -> list[str]:
  """Returns the union of the paths, in the order of `old`; a new path comes after its predecessor in `new`."""
  known, merged, position = set(old), dict[str, None](), 0
  for path in new:
    if path in known:
      while path not in merged:
        merged[old[position]] = None
        position += 1
    merged[path] = None
  return list(merged | dict.fromkeys(old))


def _keywords(values: Mapping[str, object]) -> list[str]:
  return [f'{name}={format_value(value)}' for name, value in values.items()]


def _join_values(values: Iterable[object]) -> str:
  return ', '.join(map(format_value, values))


def _format_array(value: np.ndarray) -> str:
  if value.size <= _MAX_ARRAY_ENTRIES:
    return f'array({value.tolist()!r}, {value.dtype.name})'
  checksum = 0 if value.dtype.hasobject else zlib.crc32(value.tobytes())
  return f'array({value.dtype.name}{list(value.shape)}, crc32={checksum:08x})'
