"""Reading and editing configs by path.

    apply_overrides({'task': task, 'datasets': datasets}, [
      'task.model.num_layers=6',                                a field
      'task.model.softmax.num_classes=300',                     a field of softmax_tpl; _tpl may be left out
      'task.model.params_init.scale=0.01',                      a field of a frozen dataclass, which is replaced
      'task.train.inputs_split_mapping.map_2d=(data, None)',    a dict key
      'datasets[0].batch_size=8',                               an index, or [*] for all entries
      'datasets[1]=None',                                       removes that entry, after all overrides are applied
      'task.train.learner.optimizer=optax.sgd',                 another class or function; shared fields are kept
    ])

Values are checked against the annotations of the fields; `values.py` says how they are read.
"""

from __future__ import annotations

import ast
import collections.abc
import copy
import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from praxis_lite.common.config.base import (
  Config,
  config_values,
  field_names,
  field_type_hints,
  shown_key,
  target,
  unknown_field,
)
from praxis_lite.common.config.configurable import REQUIRED
from praxis_lite.common.config.hints import members_of
from praxis_lite.common.config.literals import unclosed_bracket
from praxis_lite.common.config.text import child_path, fields_of, raise_as_config_error, to_text
from praxis_lite.common.config.values import Text, describe_value, fit
from praxis_lite.common.errors import ConfigError, UnknownFieldError, did_you_mean, first_lines
from praxis_lite.common.other_names import OUR_NAMES

_ALL = '*'
_SEGMENT = re.compile(r"""\.?(?P<name>[^.\[\]=\s]+)|\[\s*(?:(?P<index>-?\d+|\*)|(?P<key>'[^']*'|"[^"]*"))\s*\]""")


def apply_overrides(root: object, overrides: Iterable[str]) -> object:
  """Applies overrides, `path=value`, in place and in order: the last of several for one path wins. Returns `root`.

  `root` is a config, or a dict of named configs and lists of configs.

  Raises:
    UnknownFieldError: a path does not exist; the message lists those that end in the same name.
    ConfigError: an override has no `=`, or a value has the wrong type.
  """
  for override in [overrides] if isinstance(overrides, str) else overrides:
    segments, rest = _parse(override)
    if not rest.startswith('=') or not segments:
      hint = _index_hint(root, segments, rest) or 'write path=value, as in task.train.num_train_steps=100'
      raise ConfigError(f'{override!r} is not an override; {hint}')
    try:
      _set(root, segments, Text(rest[1:].strip()))
    except UnknownFieldError as error:
      raise UnknownFieldError(_suggest_paths(root, segments, str(error))) from None
  for configs in root.values() if isinstance(root, dict) else ():
    if isinstance(configs, list):  # Removes entries only now, so that indices in overrides refer to the original list.
      configs[:] = [config for config in configs if config is not None]
  return root


def _index_hint(root: object, segments: list[str | int], rest: str) -> str:
  """Returns what to write instead of a name in brackets, with which `rest`, the unread end of a path, begins; or ''.

  For 'datasets[train].batch_size=8', the text has the index of the entry whose `name` is 'train', if there is one.
  """
  word = re.match(r'\[\s*(\w+)\s*\]', rest)
  if word is None or not segments:
    return ''
  entries = root.get(segments[0]) if isinstance(root, dict) and len(segments) == 1 else None
  named = [i for i, entry in enumerate(entries or ()) if getattr(entry, 'name', None) == word[1]]
  which = f'{segments[0]}[{named[0]}] for this one' if named else 'a number'
  return f'{word[0]} is no index; write {which}, or [*] for all entries, or a key of a dict in quotes'


def _suggest_paths(root: object, segments: list[str | int], message: str) -> str:
  """Returns the message about a wrong path; if existing paths end in a similar name, the message suggests them."""
  if ' has no entry [' in message:  # An index is too large; the message needs no suggestion.
    return message
  name = next((str(s) for s in reversed(segments) if isinstance(s, str) and s != _ALL), '')
  values = fields_of(to_text(root))
  by_name: dict[str, list[str]] = {}
  for path in sorted(values, key=lambda path: path.count('.')):
    by_name.setdefault(path.rpartition('.')[2].removesuffix('_tpl'), []).append(path)
  close = [name.removesuffix('_tpl')]
  before = _DID_YOU_MEAN.search(message)
  elsewhere = [path for path in by_name.get(close[0], ()) if path.startswith(str(segments[0]))]
  if before and elsewhere and f'has no field {name!r}' in message and before[1] not in OUR_NAMES.get(name.lower(), ()):
    message, before = _DID_YOU_MEAN.sub('', message), None  # The same name elsewhere is nearer than a similar name.
  if close[0] not in by_name and before is None:
    close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.75)
  found = [path for near in close for path in by_name.get(near, ())]
  # Required fields of templates are not suggested, because parents fill them in; users set required fields of inputs.
  found = [path for path in found if values[path] != repr(REQUIRED) or path.startswith('datasets[')] or found
  if before is not None:  # The message has corrected one name: only suggest paths with that name.
    found = [path for path in found if re.search(rf'(^|\.){re.escape(before[1])}(_tpl)?([.[]|$)', path)]
    message = _DID_YOU_MEAN.sub('', message) if found else message
  found = [path for path in found if path.startswith(str(segments[0]))] or found
  if not found:
    return message
  merged = [re.sub(r'\[\d+\]', f'[{_ALL}]', path) for path in found]
  shown = [path if merged.count(pattern) == 1 else pattern for path, pattern in zip(found, merged)]
  end = '' if message.endswith(('.', '?')) else '.'
  return f'{message}{end} Did you mean {", ".join(first_lines(list(dict.fromkeys(shown)), _MOST_SHOWN))}?'


_MOST_SHOWN = 3
_DID_YOU_MEAN = re.compile(r" Did you mean '([^']*)'\?")


def set_by_path(root: object, path: str, value: object) -> None:
  """Sets the field, dict key or index at `path`, which is written as in a text dump of `root`.

  If a config is expected, `value` may also be a class or function, or its name. For the rest, see `apply_overrides`.
  """
  _set(root, _parsed_path(path), value)


def get_by_path(root: object, path: str) -> object:
  """Returns the value at `path`, or its default if it is not set; raises UnknownFieldError if no such path exists."""
  here, value = '', root
  for segment in _parsed_path(path):
    slot = _slot(value, segment, here, Any)
    here, value = slot.path, slot.value
  return value


def alternatives(override: str) -> list[str]:
  """Returns the overrides that `path=a,b,c` stands for in a sweep: one for each value.

  Commas outside of brackets and quotes separate the values, so a tuple needs its parentheses, and a string with a comma
  its quotes: `task.ici_mesh_shape=(1,2),(2,1)` has two values.

  Raises ConfigError if there is no `=`, or a value is empty.
  """
  override = override.strip()
  segments, rest = _parse(override)
  if not rest.startswith('=') or not segments:
    hint = _index_hint({}, segments, rest) or 'write path=value, or path=value,value to vary it'
    raise ConfigError(f'{override!r} is not an override; {hint}')
  first, *parts = rest[1:].split(',')
  values = [first]
  for part in parts:
    if unclosed_bracket(values[-1]):
      values[-1] += f',{part}'
    else:
      values.append(part)
  if opened := unclosed_bracket(values[-1]):
    raise ConfigError(f'{override!r}: {opened} is not closed')
  values = [value.strip() for value in values]
  if len(values) > 1 and not all(values):
    raise ConfigError(f'{override!r}: a value between commas is empty; write a tuple as (a, b)')
  return [f'{override.removesuffix(rest).strip()}={value}' for value in values]


# -------------------------------------------------------------------- paths


def _parse(text: str) -> tuple[list[str | int], str]:
  """Splits `a.b[0]=v` into the segments of its path, and the rest from `=` on."""
  segments: list[str | int] = []
  text = text.strip()
  position = 0
  while match := _SEGMENT.match(text, position):
    name, index, key = match.group('name', 'index', 'key')
    if name is not None and (text[position] == '.') != bool(segments):
      break
    if index is not None:
      segments.append(_ALL if index == _ALL else int(index))
    else:
      segments.append(name or ast.literal_eval(key))
    position = match.end()
  return segments, text[position:].lstrip()


def _parsed_path(path: str) -> list[str | int]:
  segments, rest = _parse(path)
  if rest or not segments:
    raise ConfigError(
      f'{path!r} is not a path; write names with dots between, and indices as in datasets[0].batch_size'
    )
  return segments


class _Slot(NamedTuple):
  """A place in a container: its key in the container, its full path, its annotation, and its value."""

  key: Any
  path: str
  hint: object
  value: object


def _slot(container: object, segment: str | int, path: str, hint: object, may_be_new: bool = False) -> _Slot:
  """Returns the place that `segment` names in the container at `path`, whose annotation is `hint`.

  Raises UnknownFieldError if there is no such place.
  """
  if isinstance(container, Config):
    return _field_slot(container, target(container), segment, path)
  if isinstance(container, dict):
    if segment not in container and not may_be_new:
      names = [str(key) for key in container]
      close, known = did_you_mean(str(segment), names), ', '.join(names) or 'none'
      raise UnknownFieldError(f'{path or "the experiment"} has no entry {segment!r}.{close} Its entries: {known}.')
    return _Slot(segment, child_path(path, segment), _entry_hint(hint, 1), container.get(segment))
  if isinstance(container, (list, tuple)):
    return _index_slot(container, segment, path, hint)
  if dataclasses.is_dataclass(container) and not isinstance(container, type):
    return _field_slot(container, type(container), segment, path)
  shown = 'REQUIRED and not set' if container is REQUIRED else describe_value(container)
  raise UnknownFieldError(f'{path} is {shown}, so it has no {shown_key(segment)}; set {path} itself')


def _field_slot(container: object, fn_or_cls: Callable[..., object], segment: str | int, path: str) -> _Slot:
  names, name = field_names(fn_or_cls), str(segment)
  if names is not None and segment not in names:
    name = f'{segment}_tpl'
    if name not in names:
      raise unknown_field(fn_or_cls, segment, path)
  if not isinstance(container, Config):
    value = getattr(container, name)
  elif name in container.__arguments__:
    value = container.__arguments__[name]
  else:  # A default belongs to the class, so it is copied before something below it is set.
    value = copy.deepcopy(config_values(container).get(name))
  return _Slot(name, child_path(path, name), field_type_hints(fn_or_cls).get(name, Any), value)


def _index_slot(container: list[Any] | tuple[Any, ...], segment: str | int, path: str, hint: object) -> _Slot:
  names: tuple[str, ...] = getattr(container, '_fields', ())
  size = len(container)
  if segment in names:
    index = names.index(str(segment))
  elif isinstance(segment, int) or segment.isdigit():
    index = int(segment)
  elif segment == _ALL:
    raise UnknownFieldError(f'{path}[*]: {f"the {size} entries must be read one by one" if size else "it is empty"}')
  else:
    entries = f'{path}[0]{" or " + path + "[*]" if size > 1 else ""}'
    raise UnknownFieldError(f'{path} is a {type(container).__name__}, so it has no {segment!r}; write {entries}')
  if not -size <= index < size:
    there = f'its entries are [0] to [{size - 1}]' if size else 'it is empty'
    raise UnknownFieldError(f'{path} has no entry [{index}]; {there}')
  index %= size
  return _Slot(index, child_path(path, index), _entry_hint(hint, 0, index), container[index])


def _entry_hint(hint: object, argument: int, index: int = 0) -> object:
  """Returns the annotation of the entries of a container whose annotation is `hint`; Any if `hint` has none."""
  for member in members_of(hint):
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is tuple and argument == 0 and Ellipsis not in arguments:
      return arguments[index] if index < len(arguments) else Any
    if isinstance(origin, type) and issubclass(origin, collections.abc.Collection) and len(arguments) > argument:
      return arguments[argument]
  return Any


# -------------------------------------------------------------------- setting


def _set(root: object, segments: list[str | int], value: object) -> None:
  if not isinstance(root, dict):
    _put(root, segments, value, '', Any)
    return
  slot = _slot(root, segments[0], '', Any)
  if isinstance(slot.value, list):  # It is the caller's own list, so it is changed in place.
    rest = segments[1:]
    slot.value[:] = _put(slot.value, rest, value, slot.path, Any) if rest else _fit(value, slot, list[Config])
  elif len(segments) == 1:
    raise ConfigError(f'{slot.path} cannot be replaced as a whole; set its fields, as in {slot.path}.name=value')
  else:
    _put(slot.value, segments[1:], value, slot.path, Any)


def _put(container: object, segments: list[str | int], value: object, path: str, hint: object) -> Any:
  """Returns `container` with `value` set at the path `segments` in it; configs are edited in place, others copied."""
  if container is None and dict in [typing.get_origin(m) or m for m in members_of(hint)]:
    container = {}  # The override sets the first entry of a new dict.
  if segments[0] == _ALL and isinstance(container, (list, tuple)) and container:
    for index in range(len(container)):
      container = _put(container, [index, *segments[1:]], value, path, hint)
    return container
  slot = _slot(container, segments[0], path, hint, may_be_new=len(segments) == 1)
  rest = segments[1:]
  new = _put(slot.value, rest, value, slot.path, slot.hint) if rest else _fit(value, slot, slot.hint)
  with raise_as_config_error(slot.path):
    return _replace_slot(container, slot, new)


def _replace_slot(container: Any, slot: _Slot, value: object) -> object:
  if isinstance(container, Config):
    setattr(container, slot.key, value)
    return container
  if isinstance(container, dict):
    return container | {slot.key: value}
  if isinstance(container, (list, tuple)):
    entries = [*container[: slot.key], value, *container[slot.key + 1 :]]
    return type(container)(*entries) if hasattr(container, '_fields') else type(container)(entries)
  return dataclasses.replace(container, **{slot.key: value})


def _fit(value: object, slot: _Slot, hint: object) -> Any:
  with raise_as_config_error(slot.path):
    new = fit(value, hint, slot.value)
  if isinstance(new, Config) and isinstance(slot.value, Config) and not isinstance(value, Config):
    _carry_over(slot.value, Config(target(slot.value)), new)
  return new


def _carry_over(old: Config, untouched: Config, new: Config) -> None:
  """Copies edited fields from `old` to `new`, a config of another class; `untouched` is `old` before it was edited.

  An edited field that `new` lacks is dropped. Any other edited field is copied whole, with one exception: if it holds a
  config in both `old` and `new`, and the edit did not change the class of the config in `old`, only the edited fields
  of that config are copied, in the same way, into the config in `new`. The classes of these two configs may differ.
  """
  names = field_names(new)
  for name, value in old.__arguments__.items():
    if not isinstance(name, str) or (names is not None and name not in names):
      continue
    default, counterpart = untouched.__arguments__.get(name, _UNSET), new.__arguments__.get(name)
    if default is not _UNSET and to_text(value) == to_text(default):
      continue
    same_class = isinstance(value, Config) and isinstance(default, Config) and target(value) is target(default)
    if same_class and isinstance(counterpart, Config):
      _carry_over(value, default, counterpart)
    else:
      setattr(new, name, value)


_UNSET = object()
