"""Where the user's code edits a config: the line of code, and the path of the config from a variable of that code."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import fiddle as fdl

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.importing import is_library, short_path

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class CodePlace(NamedTuple):
  """A path such as 'task.model', and a line such as 'mine.py:12'; each is empty if unknown."""

  path: str = ''
  line: str = ''


def place_of_edit(config: fdl.Config | None) -> CodePlace:
  """Returns where the user's code is editing or making a config; an empty `CodePlace` if the caller is a library.

  The path begins with the name of a variable of the code. If the variable holds the config of a task, the path begins
  with 'task' instead, as in 'task.model'. If the variable holds the configs of an experiment, or a layer, the path
  begins with the name of one of their fields.
  """
  frame = sys._getframe(1)
  while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
    frame = frame.f_back
  file = frame.f_code.co_filename
  if is_library(file):
    return CodePlace()
  variables = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
  variables |= frame.f_locals
  paths = [] if config is None else [path for pair in variables.items() for path in _paths_from(*pair, config)]
  line = '' if file.startswith('<') else f'{short_path(file)}:{frame.f_lineno}'
  return CodePlace(max(paths, key=len, default=''), line)


def note_edit(config: fdl.Config, *fields: str) -> None:
  """Records the line of code that is setting fields of a config, except while a class makes one of its templates."""
  frame, is_override = sys._getframe(1), False
  while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
    if frame.f_code.co_name == '<lambda>':  # A template of a class makes the config.
      return
    is_override |= frame.f_code.co_filename == _OVERRIDES
    frame = frame.f_back
  file = _OVERRIDE if is_override else frame.f_code.co_filename
  edit = _Edit(file, frame.f_lineno, _owner.get() is not None)
  config.__dict__.setdefault(_EDITS, {}).update(dict.fromkeys(fields, edit))


def copy_edits(config: fdl.Config) -> None:
  """Copies the record of edited lines in `config`, which a copied config at first shares with the original."""
  if _EDITS in config.__dict__:
    config.__dict__[_EDITS] = dict(config.__dict__[_EDITS])


def line_of_edit(config: fdl.Config, field: str) -> str:
  """Returns the line of the user's code that set a field of a config, such as 'mine.py:12'; '' if no such line did."""
  edit = _edit_of(config, field)
  if edit is None or edit.file.startswith('<') or is_library(edit.file):
    return ''
  return f'{short_path(edit.file)}:{edit.line}'


def _edit_of(config: fdl.Config, field: str) -> _Edit | None:
  found: _Edit | None = config.__dict__.get(_EDITS, {}).get(field)
  return found


@contextlib.contextmanager
def set_up(owner: Any) -> Iterator[None]:
  """Marks a block in which the layer `owner` fills in the templates of its children.

  Inside the block, replacing a number, string or bool that the user has set raises ConfigError; see `check_keeps_edit`.
  """
  token = _owner.set(owner)
  try:
    yield
  finally:
    _owner.reset(token)


def check_keeps_edit(config: fdl.Config, field: str, value: object) -> None:
  """Raises ConfigError if a layer that is being set up replaces a value that the user set in a child's template."""
  owner, edit = _owner.get(), _edit_of(config, field)
  if owner is None or edit is None or edit.in_setup or (edit.file != _OVERRIDE and is_library(edit.file)):
    return
  old = config.__arguments__.get(field)
  if not isinstance(old, bool | int | float | str) or type(old) is not type(value) or old == value:
    return
  kind = config.__fn_or_cls__
  templates = {name: v for name, v in vars(owner).items() if isinstance(v, fdl.Config) and v.__fn_or_cls__ is kind}
  above = [name for name, template in templates.items() if _edit_of(template, field) is edit]
  path = f'{owner.path_name}.{above[0]}' if len(above) == 1 else kind.__qualname__
  line = line_of_edit(config, field)
  same = f'; set {owner.path_name}.{field} instead' if getattr(owner, field, None) == value else ''
  raise ConfigError(
    f'{path}.{field} = {old!r}{f" ({line})" if line else ""} has no effect: {type(owner).__qualname__} sets it to '
    f'{value!r}{same}'
  )


class _Edit(NamedTuple):
  """The file and line that set a field, and whether a layer was filling in the templates of its children."""

  file: str
  line: int
  in_setup: bool


_EDITS = '__edits__'  # The key in the dict of a config that has an `_Edit` for each field.
_OVERRIDES, _OVERRIDE = os.path.join(_HERE, 'overrides.py'), '<an override by path>'
_owner: contextvars.ContextVar[Any] = contextvars.ContextVar('owner', default=None)  # The layer that is being set up.


def _paths_from(name: str, value: object, wanted: fdl.Config) -> Iterator[str]:
  if isinstance(value, type(wanted)):
    yield from _paths(getattr(value.__fn_or_cls__, '_config_path', '') or name, value, wanted)
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):  # The configs of an experiment, or a layer.
    for field in dataclasses.fields(value):  # A child not made yet is not in `__dict__`.
      yield from _paths(field.name, getattr(value, '__dict__', {}).get(field.name), wanted)


def _paths(path: str, value: object, wanted: fdl.Config) -> Iterator[str]:
  if value is wanted:
    yield path
  elif isinstance(value, type(wanted)):
    for key, entry in value.__arguments__.items():
      yield from _paths(f'{path}.{key}', entry, wanted)
  elif isinstance(value, list | tuple | dict):
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
      yield from _paths(f'{path}[{key!r}]', entry, wanted)
