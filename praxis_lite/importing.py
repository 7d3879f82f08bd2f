"""Importing modules that a user names: what goes wrong becomes one line that says what was raised and where."""

from __future__ import annotations

import importlib
import os
import traceback
from types import ModuleType

from praxis_lite.errors import UserError

# Code in these folders, or installed by a package manager, is not the user's own.
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, os.__file__))
_INSTALLED = {'site-packages', 'dist-packages'}


class MissingModuleError(UserError):
  """There is no module of that name."""


def import_module(name: str) -> ModuleType:
  """Imports a module; raises MissingModuleError if there is none, or UserError, which says what it raises and where."""
  try:
    return importlib.import_module(name)
  except Exception as error:
    # A missing import *inside* the module names another module than the one asked for and its packages.
    if isinstance(error, ModuleNotFoundError) and f'{name}.'.startswith(f'{error.name}.'):
      raise MissingModuleError(f'there is no module {error.name!r}') from error
    raise import_failure(name, error) from error


def import_failure(name: str, error: Exception) -> UserError:
  """Returns the error that says that `name` cannot be imported, because `error` was raised, and where."""
  where = _where(error)
  message = error.msg if isinstance(error, SyntaxError) else str(error)
  return UserError(f'cannot import {name}: {type(error).__name__}: {message}{f" ({where})" if where else ""}')


def short_path(path: str) -> str:
  """Returns `path` relative to the working directory if it is below it."""
  below = os.path.relpath(path) if os.path.isabs(path) else path
  return path if below.startswith(os.pardir) else below


def _where(error: Exception) -> str:
  """Returns `file:line` of the last line of the user's own code that ran, or of any code if none of it did."""
  if isinstance(error, SyntaxError):  # Its traceback is that of the compiler.
    return f'{short_path(error.filename)}:{error.lineno}' if error.filename else ''
  frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
  files = [(file, line) for file, line in frames if not file.startswith('<')]
  for file, line in [f for f in files if not is_library(f[0])][-1:] or files[-1:]:
    return f'{short_path(file)}:{line}'
  return ''


def is_library(file: str) -> bool:
  """Whether a file of code is not the user's own: of this package, of Python, or installed."""
  return file.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(file.split(os.sep))
