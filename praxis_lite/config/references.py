"""References: functions and classes by name, as config dumps, JSON, overrides and the registry write them.

    reference(jax.nn.gelu)                    'jax.nn:gelu'        can be imported to the same object, or raises
    dotted_name(jax.nn.gelu)                  'jax.nn.gelu'        for people; never raises
    import_reference('jax.nn.gelu')           the function         takes both spellings

Libraries define much of what they export in private modules (`jax._src.nn.functions`), which move between releases. The
public module that exports the object is named instead, so that dumps and files outlive an upgrade.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeGuard

from praxis_lite.errors import UserError, did_you_mean

_REFERENCE = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*([.:][A-Za-z_]\w*)(\.[A-Za-z_]\w*)*')


def is_named(value: object) -> TypeGuard[Callable[..., object]]:
  """Whether `value` is a function, class or other callable that carries a name of its own."""
  return callable(value) and isinstance(getattr(value, '__name__', None), str)


def looks_like_reference(text: str) -> bool:
  """Whether `text` has the form `package.module.Name` or `module:Name`."""
  return _REFERENCE.fullmatch(text) is not None


def reference(value: object) -> str:
  """Returns `module:qualname` of a function or class.

  Raises:
    UserError: importing that name would not give `value` back: a lambda, a function within a function, a method of an
      object.
  """
  module, name = _module_and_name(value)
  if '<lambda>' in name:
    raise UserError('a lambda has no name to be found by; define it as a function in a module')
  if '<locals>' in name:
    raise UserError(f'{name} is defined inside a function, where no import reaches it; define it in a module')
  if not _is_same(_lookup(sys.modules.get(module), name), value):
    raise UserError(f'{module}:{name} is not where {value!r} is found')
  return f'{module}:{name}'


def dotted_name(value: object) -> str:
  """Returns `module.qualname` of a function or class, without the module for builtins."""
  module, name = _module_and_name(value)
  return name if module in ('builtins', '') else f'{module}.{name}'


def import_reference(text: str) -> Any:
  """Returns what `package.module.Name` or `package.module:Name` names.

  Raises:
    UserError: there is no such module or name, or importing the module fails.
  """
  if ':' in text:
    module, _, name = text.partition(':')
    return _attribute(import_module(module), name, text)
  parts = text.split('.')
  for split in range(len(parts) - 1, 0, -1):
    module = '.'.join(parts[:split])
    try:
      found = import_module(module)
    except MissingModuleError:
      if split > 1:
        continue
      raise
    return _attribute(found, '.'.join(parts[split:]), text)
  raise UserError(f'{text!r} names no module; write package.module.Name')


class MissingModuleError(UserError):
  """There is no module of that name."""


def import_module(name: str) -> ModuleType:
  """Imports a module.

  Raises:
    MissingModuleError: it does not exist.
    UserError: it exists and raises while it is imported; the message says what and where.
  """
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    # A missing import *inside* the module names another module than the one asked for and its packages.
    if error.name is not None and (name == error.name or name.startswith(f'{error.name}.')):
      raise MissingModuleError(f'there is no module {error.name!r}') from error
    raise import_failure(name, error) from error
  except Exception as error:
    raise import_failure(name, error) from error


def import_failure(name: str, error: Exception) -> UserError:
  """Returns the message about a module that raised `error` while it was imported."""
  where = _where(error)
  message = error.msg if isinstance(error, SyntaxError) else str(error)
  return UserError(f'cannot import {name}: {type(error).__name__}: {message}{f" ({where})" if where else ""}')


def short_path(path: str) -> str:
  """Returns `path` relative to the working directory if it is below it."""
  below = os.path.relpath(path) if os.path.isabs(path) else path
  return path if below.startswith(os.pardir) else below


def _where(error: Exception) -> str:
  if isinstance(error, SyntaxError):  # Its traceback is that of the compiler.
    return f'{short_path(error.filename)}:{error.lineno}' if error.filename else ''
  frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
  files = [(file, line) for file, line in frames if not file.startswith('<')]
  # The last line of the user's own code says more than the depth of a library.
  for file, line in [f for f in files if not _is_library(f[0])][-1:] or files[-1:]:
    return f'{short_path(file)}:{line}'
  return ''


def _is_library(file: str) -> bool:
  prefixes = (os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.__file__))
  return file.startswith(tuple(p + os.sep for p in prefixes)) or bool(
    {'site-packages', 'dist-packages'} & {*file.split(os.sep)}
  )


def _attribute(module: object, name: str, text: str) -> object:
  value = module
  for part in name.split('.'):
    if not hasattr(value, part):
      where = getattr(value, '__name__', text)
      raise UserError(f'{where} has no {part!r}.{did_you_mean(part, (n for n in dir(value) if n[:1] != "_"))}')
    value = getattr(value, part)
  return value


def _module_and_name(value: object) -> tuple[str, str]:
  owner = getattr(value, '__self__', None)
  if inspect.ismethod(value) and isinstance(owner, type):  # A class method, perhaps inherited.
    module, name = _module_and_name(owner)
    return module, f'{name}.{value.__name__}'
  module = getattr(value, '__module__', None) or ''
  name = getattr(value, '__qualname__', None) or getattr(value, '__name__', None) or type(value).__qualname__
  if '<' not in name and any(part.startswith('_') and part != '__main__' for part in module.split('.')):
    return _public_module(module, name), name
  return module, name


@functools.cache
def _public_module(module: str, name: str) -> str:
  value = _lookup(sys.modules.get(module), name)
  package, head = module.split('.')[0], name.split('.')[0]
  exporting = [
    other
    for other, loaded in list(sys.modules.items())
    if (other == package or other.startswith(f'{package}.'))
    and not any(part.startswith('_') for part in other.split('.'))
    and head in (getattr(loaded, '__dict__', None) or ())
    and _lookup(loaded, name) is value
  ]
  return min(exporting, key=lambda m: (m.count('.'), m), default=module)


def _lookup(module: object, name: str) -> object:
  value = module
  for part in name.split('.'):
    value = getattr(value, part, None)
  return value


def _is_same(found: object, value: object) -> bool:
  return found is value or (inspect.ismethod(value) and found == value)


__all__ = [
  'MissingModuleError',
  'dotted_name',
  'import_failure',
  'import_module',
  'import_reference',
  'is_named',
  'looks_like_reference',
  'reference',
  'short_path',
]
