"""Late imports: modules that a user names, and names that a package loads when they are first used.

An error in a user's module becomes one line that says what was raised, and where.
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from praxis_lite.common.errors import UserError, did_you_mean
from praxis_lite.common.moved import current_name

# Code in these folders, or installed by a package manager, is not the user's own.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (_PACKAGE + os.sep, os.path.dirname(os.path.abspath(os.__file__)) + os.sep)
_LONGEST_CODE = 80  # Characters of a line of code in a message.
_INSTALLED = {'site-packages', 'dist-packages'}


class MissingModuleError(UserError):
  """No module has this name."""


def import_module(name: str, shown: str = '') -> ModuleType:
  """Imports a module; raises MissingModuleError if it does not exist, or a UserError if importing it fails.

  Messages call it `shown`, by default its name.
  """
  try:
    return importlib.import_module(name)
  except Exception as error:
    # If an import *inside* the module fails, `error.name` is neither the requested module nor one of its packages.
    if isinstance(error, ModuleNotFoundError) and f'{name}.'.startswith(f'{error.name}.'):
      raise MissingModuleError(f'there is no module {error.name!r}') from error
    raise import_failure(shown or name, error) from error


class LazyNames(NamedTuple):
  """What a package needs to define for the names that `lazy_names` loads."""

  get: Callable[[str], Any]
  list_all: Callable[[], list[str]]
  names: list[str]


def lazy_names(package: str, modules: Mapping[str, str]) -> LazyNames:
  """Returns the `__getattr__`, `__dir__` and `__all__` of a package that loads names when they are first used.

  `modules` maps the full name of a module to the names that it defines, separated by spaces. The last part of the
  module's own name stands for the module itself.
  """
  homes = {name: module for module, names in modules.items() for name in names.split()}

  def get(name: str) -> Any:
    if name not in homes:
      raise AttributeError(f'module {package!r} has no attribute {name!r}')
    module = importlib.import_module(homes[name])
    return module if homes[name].endswith(f'.{name}') else getattr(module, name)

  return LazyNames(get, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes))


def import_failure(name: str, error: Exception) -> UserError:
  """Returns the error for a `name` that cannot be imported: it says what `error` was raised, and where."""
  where = _where(error)
  return UserError(f'cannot import {name}: {_describe(error)}{f" ({where})" if where else ""}')


def user_code_error(error: Exception) -> UserError | None:
  """Returns the error that says what the user's own code has raised, and where; None if no such code was running."""
  lines = _user_lines(error)
  if not lines:
    return None
  file, line = lines[-1]
  what = _describe(error)
  if what == type(error).__name__:  # For example an assert without a message.
    what += f' in `{linecache.getline(file, line).strip()}`'
  ours = 'praxis_lite: '
  notes = ''.join(f', {note.removeprefix(ours)}' for note in getattr(error, '__notes__', ()) if note.startswith(ours))
  return UserError(f'{what} ({short_path(file)}:{line}){textwrap.shorten(notes, 300)}')


def _describe(error: Exception) -> str:
  """Returns the class and the message of an exception on one line, with a suggestion for a misspelt name."""
  if isinstance(error, UserError):
    return str(error)
  message = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().partition('\n')[0]
  text = f'{type(error).__name__}: {message}' if message else type(error).__name__
  if isinstance(error, SyntaxError) and error.text and error.text.strip():
    text += f': `{textwrap.shorten(error.text, _LONGEST_CODE)}`'
  meant = _perhaps_meant(error)
  return f'{text}.{meant}' if meant else text


def _perhaps_meant(error: Exception) -> str:
  """Returns a suggestion for the misspelt or old name that an exception is about; '' if no known name is close."""
  name = getattr(error, 'name', None)
  if isinstance(error, ModuleNotFoundError) and name is not None and current_name(name) != name:
    return f' It is {current_name(name)} now'
  if isinstance(error, ImportError) and (wanted := re.match(r"cannot import name '(\w+)'", str(error))):
    old = f'{name}.{wanted[1]}'
    return f' It is {current_name(old)} now' if current_name(old) != old else _where_defined(wanted[1], name)
  if not isinstance(error, NameError | AttributeError) or name is None:
    return ''
  if isinstance(error, NameError):
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    known = {*frame.f_locals, *frame.f_globals, *frame.f_builtins}
    return did_you_mean(name, known)
  if isinstance(error.obj, dict) and name in error.obj:
    return f' An entry of a dict is read as [{name!r}]'
  return did_you_mean(name, (n for n in dir(error.obj) if not n.startswith('_')))


def _where_defined(wanted: str, module: str | None) -> str:
  """Returns a sentence with the one or two modules of this package that define a function or class.

  Returns '' if no module or more than two define it, or if `module`, from which it was imported, is in another package.
  """
  package = __name__.partition('.')[0]
  if module is None or module.partition('.')[0] != package:
    return ''
  definition = re.compile(rf'^(?:def|class) {wanted}\b', re.MULTILINE)
  found = []
  for folder, _, names in os.walk(_PACKAGE, followlinks=True):  # In a clone, some of its packages are links.
    for file in (Path(folder, name) for name in names if name.endswith('.py') and not name.startswith('_')):
      with contextlib.suppress(OSError):
        if definition.search(file.read_text('utf-8', errors='replace')):
          found.append('.'.join((package, *file.relative_to(_PACKAGE).with_suffix('').parts)))
  return f' It is in {" and in ".join(sorted(found))}' if 0 < len(found) < 3 else ''


def short_path(path: str) -> str:
  """Returns `path` relative to the working directory if it is below it."""
  below = os.path.relpath(path) if os.path.isabs(path) else path
  return path if below.startswith(os.pardir) else below


def _where(error: Exception) -> str:
  """Returns `file:line` of the last line of the user's code that ran, or else of any code; '' if no line is known."""
  if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith('<'):
    return f'{short_path(error.filename)}:{error.lineno}'  # A SyntaxError's traceback has only the compiler's frames.
  for file, line in _user_lines(error)[-1:] or ([] if isinstance(error, SyntaxError) else _lines(error)[-1:]):
    return f'{short_path(file)}:{line}'
  return ''


def _lines(error: Exception) -> list[tuple[str, int]]:
  """Returns (file, line) of each call in the traceback of an exception, the innermost last."""
  frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
  return [(file, line) for file, line in frames if not file.startswith('<')]


def _user_lines(error: Exception) -> list[tuple[str, int]]:
  return [(file, line) for file, line in _lines(error) if not is_library(file)]


def calling_line() -> str:
  """Returns the line that called the caller of this function, such as ' (mine.py:12)'; '' if it is a library's."""
  frame = sys._getframe(2)
  file = frame.f_code.co_filename
  return '' if file.startswith('<') or is_library(file) else f' ({short_path(file)}:{frame.f_lineno})'


def is_library(file: str) -> bool:
  """Whether a code file is not the user's own: it belongs to this package or to Python, or was installed."""
  return file.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(file.split(os.sep))
