"""The registry of experiments: full names by which they are found, and short ones as long as they are unique.

@registry.register
class StdlibLm(BaseExperiment): ...                in experiments/lm.py

registry.get('experiments.lm.StdlibLm')            the full name: module and class
registry.get('lm.StdlibLm')                        any ending of it that fits no other experiment
registry.get('StdlibLm')
registry.get('my_package.my_module.MyExperiment')  a module that can be imported; the class need not be registered
registry.get('path/to/file.py:MyExperiment')       a file
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import pkgutil
import re
import sys
import zlib
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypeVar

from praxis_lite.config.references import MissingModuleError, import_failure, import_module, short_path
from praxis_lite.errors import UserError, did_you_mean

ExperimentT = TypeVar('ExperimentT', bound=type)

# The package whose modules `load_all` imports.
PACKAGE = 'experiments'


class _Entry(NamedTuple):
  """A registered class, and the code that was running when it was registered: one module body, executed once."""

  experiment: type
  code: CodeType


_entries: dict[str, _Entry] = {}


def register(experiment: ExperimentT) -> ExperimentT:
  """Class decorator: makes an experiment known by its name.

  Importing its module again replaces it.

  Raises:
    UserError: it is no experiment, or another class of that name is registered.
  """
  _check_is_experiment(experiment, getattr(experiment, '__qualname__', repr(experiment)))
  name, code = full_name(experiment), sys._getframe(1).f_code
  known = _entries.get(name)
  # A module that is executed again has the same file and, compiled anew, another code object.
  is_again = known is not None and known.code is not code and known.code.co_filename == code.co_filename
  if known is not None and known.experiment is not experiment and not is_again:
    files = ' and '.join(sorted({short_path(known.code.co_filename), short_path(code.co_filename)}))
    raise UserError(f'two experiments are registered as {name}, in {files}; rename one')
  _entries[name] = _Entry(experiment, code)
  return experiment


def get(name: str) -> Any:
  """Returns the experiment class of that name.

  Args:
    name: a full name, an ending of one that is unique, the name of a class in a module that can be imported, or
      `path/to/file.py:Class`.

  Raises:
    UserError: there is none, or several; the message says which come near. Or its module cannot be imported; the
      message says why and where.
  """
  if name in _entries:
    return _entries[name].experiment
  if ':' in name or name.endswith('.py'):
    location, _, cls = name.partition(':')
    if not location.endswith('.py') and (not location or '/' in location):
      raise UserError(f'{name!r} names no Python file; write path/to/file.py:MyExperiment')
    module = _load_file(location) if location.endswith('.py') else import_module(location)
    return _experiment_in(module, cls)
  module_name, _, cls = name.rpartition('.')
  missing: UserError | None = None
  if module_name:
    try:
      return _experiment_in(import_module(module_name), cls)
    except (MissingModuleError, _MissingExperimentError) as error:
      missing = error  # `name` may still be the ending of a registered name.
  problems = load_all()
  found = [full for full in _entries if full.endswith(f'.{name}')]
  if len(found) == 1:
    return _entries[found[0]].experiment
  if found:
    raise UserError(f'{name!r} is the name of {len(found)} experiments: {", ".join(sorted(found))}; write more of it')
  if isinstance(missing, _MissingExperimentError):
    raise missing
  raise UserError(_not_found(name, problems))


def names() -> list[str]:
  """Returns the full names of all registered experiments, sorted. `load_all` first, to have those of `experiments`."""
  return sorted(_entries)


def full_name(experiment: type) -> str:
  """Returns the name an experiment is registered by: its module and class."""
  return f'{experiment.__module__}.{experiment.__qualname__}'


def short_name(name: str) -> str:
  """Returns the shortest ending of a registered full name, of a module and class at least, that fits no other."""
  parts = name.split('.')
  for start in range(len(parts) - 2, 0, -1):
    ending = '.'.join(parts[start:])
    if sum(full == ending or full.endswith(f'.{ending}') for full in _entries) == 1:
      return ending
  return name


def load_all() -> list[str]:
  """Imports all modules of the package `experiments`, which register themselves.

  Returns:
    A line about each module that cannot be imported, with what went wrong and where. The others are there all the same.
  """
  try:
    return _load_package(import_module(PACKAGE))
  except MissingModuleError:
    return []
  except UserError as error:
    return [str(error)]


def _load_package(package: ModuleType) -> list[str]:
  problems = []
  for found in pkgutil.iter_modules(getattr(package, '__path__', ()), f'{package.__name__}.'):
    if found.name.rpartition('.')[2].startswith('_'):
      continue
    try:
      module = import_module(found.name)
    except UserError as error:
      problems.append(str(error))
      continue
    if found.ispkg:
      problems += _load_package(module)
  return problems


def _load_file(path: str) -> ModuleType:
  """Imports a Python file: as a module of its package if it is in one, otherwise by its own name."""
  file = os.path.realpath(path)
  if not os.path.isfile(file):
    raise UserError(f'there is no file {path!r}')
  folder, name = os.path.dirname(file), re.sub(r'\W', '_', os.path.splitext(os.path.basename(file))[0])
  while os.path.isfile(os.path.join(folder, '__init__.py')):
    folder, name = os.path.dirname(folder), f'{os.path.basename(folder)}.{name}'
  if folder not in map(os.path.realpath, sys.path):
    sys.path.append(folder)  # So that it can import what lies beside it.
  loaded = sys.modules.get(name)
  if loaded is None and _origin(name) == file:
    return import_module(name)
  if loaded is not None and os.path.realpath(getattr(loaded, '__file__', None) or '') == file:
    return loaded
  return _load_as(f'{name}_{zlib.crc32(file.encode()):08x}', file)  # Another module has the name.


def _origin(name: str) -> str | None:
  """The file of the module that importing `name` would give."""
  try:
    spec = importlib.util.find_spec(name)
  except Exception as error:  # A package above it raises.
    raise import_failure(name, error) from error
  return None if spec is None or spec.origin is None else os.path.realpath(spec.origin)


def _load_as(name: str, file: str) -> ModuleType:
  if name in sys.modules:
    return sys.modules[name]
  spec = importlib.util.spec_from_file_location(name, file)
  if spec is None or spec.loader is None:
    raise UserError(f'{short_path(file)} is no Python file')
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    del sys.modules[name]
    raise import_failure(short_path(file), error) from error
  return module


class _MissingExperimentError(UserError):
  """A module has no experiment of that name."""


def _experiment_in(module: ModuleType, name: str) -> Any:
  known = {
    key: value
    for key, value in vars(module).items()
    if isinstance(value, type) and _is_experiment(value) and value.__module__ == module.__name__
  }
  if not name and len(known) == 1:
    return next(iter(known.values()))
  value: Any = module
  for part in name.split('.'):
    value = getattr(value, part, None)
  if value is None:
    where = short_path(getattr(module, '__file__', None) or module.__name__)
    missing = f'has no experiment {name!r}' if name else f'has {len(known)} experiments; name one of them after a colon'
    close = did_you_mean(name, known)
    raise _MissingExperimentError(f'{where} {missing}.{close} Its experiments: {", ".join(known) or "none"}.')
  _check_is_experiment(value, f'{module.__name__}.{name}')
  return value


def _is_experiment(value: Any) -> bool:
  return callable(getattr(value, 'task', None)) and callable(getattr(value, 'datasets', None))


def _check_is_experiment(value: Any, name: str) -> None:
  if not isinstance(value, type) or not _is_experiment(value):
    raise UserError(f'{name} is no experiment: derive a class from BaseExperiment, with the methods task and datasets')


def _not_found(name: str, problems: list[str]) -> str:
  endings = {short_name(full): full for full in _entries}
  by_class = {full.rpartition('.')[2].lower(): short for short, full in endings.items()}
  near = difflib.get_close_matches(name, endings, n=3, cutoff=0.6)
  near += [by_class[c] for c in difflib.get_close_matches(name.rpartition('.')[2].lower(), by_class, n=3, cutoff=0.6)]
  near = list(dict.fromkeys(near))[:3]
  hint = f' Did you mean {" or ".join(near)}?' if near else ''
  also = ''.join(f' Not loaded: {problem}.' for problem in problems)
  return f'there is no experiment {name!r}.{hint} `praxis-lite list` prints them all.{also}'


__all__ = ['full_name', 'get', 'load_all', 'names', 'register', 'short_name']
