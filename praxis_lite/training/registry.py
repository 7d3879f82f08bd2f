"""The registry of experiments: finds classes by their full names, or by any unique ending of a full name.

@registry.register
class StdlibLm(BaseExperiment): ...                in experiments/lm.py

registry.get('praxis_lite.experiments.lm.StdlibLm')   the full name: module and class
registry.get('lm.StdlibLm')                           an ending of a full name that no other experiment has
registry.get('StdlibLm')
registry.get('my_package.my_module.MyExperiment')     any importable module; the class need not be registered
registry.get('path/to/file.py:MyExperiment')          a file
"""

from __future__ import annotations

import ast
import difflib
import glob
import importlib.util
import os
import pkgutil
import re
import sys
import zlib
from collections.abc import Iterable
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar

from praxis_lite.common.errors import UserError, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.importing import MissingModuleError, import_failure, import_module, short_path

if TYPE_CHECKING:
  from praxis_lite.training.experiment import BaseExperiment

ExperimentT = TypeVar('ExperimentT', bound=type)

# The packages whose modules `load_all` imports: the built-in one, and `experiments` in the working directory.
_BUILT_IN, _OWN = 'praxis_lite.experiments', 'experiments'
PACKAGES = (_BUILT_IN, _OWN)
_BUILT_IN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'experiments')


class _Entry(NamedTuple):
  """A registered class, and the code object of its module, which is a new one each time that the module runs."""

  experiment: type[BaseExperiment]
  code: CodeType


_entries: dict[str, _Entry] = {}


def register(experiment: ExperimentT) -> ExperimentT:
  """Class decorator: registers an experiment by its full name. Importing its module again replaces the class.

  Raises:
    UserError: the class is not an experiment, or another class is registered by the same full name.
  """
  checked = _checked_experiment(experiment, getattr(experiment, '__qualname__', repr(experiment)))
  name, code = full_name(experiment), sys._getframe(1).f_code
  known = _entries.get(name)
  if known is not None and known.experiment is not checked:
    files = [os.path.realpath(c.co_filename) for c in (known.code, code)]
    # A module that runs again has the same file, but a new code object. Each notebook cell has its own file.
    if known.code is code or (files[0] != files[1] and experiment.__module__ != '__main__'):
      where = ' and '.join(sorted({*map(short_path, files)}))
      raise UserError(f'two experiments are registered as {name}, in {where}; rename one')
  _entries[name] = _Entry(checked, code)
  return experiment


def get(name: str) -> type[BaseExperiment]:
  """Returns the experiment class with this name.

  Args:
    name: a full name, a unique ending of one, `module.Class` or `module:Class` of an importable module, or
      `path/to/file.py:Class`. After a colon, the class may be left out if the module has only one experiment.

  Raises:
    UserError: no experiment has this name, and the message lists similar names; several have it, and the message lists
      them; or importing the module fails, and the message says what was raised, and where.
  """
  if name in _entries:
    return _entries[name].experiment
  module, colon, cls = name.partition(':')
  if module.endswith('.py'):
    return _experiment_in(_load_file(module), cls)
  if colon and (not module or '/' in module):
    raise UserError(f'{name!r} names no Python file; write path/to/file.py:MyExperiment')
  if not colon:
    module, _, cls = name.rpartition('.')
  missing: UserError | None = None
  if module:
    try:
      return _experiment_in(import_module(_canonical(module)), cls)
    except (MissingModuleError, _MissingExperimentError) as error:
      missing = error  # `name` may still be the ending of a full name.
  problems = load_all()
  found = _matches(name.replace(':', '.'))
  if len(found) == 1:
    return _entries[found[0]].experiment
  if found:
    raise UserError(f'{name!r} is the name of {len(found)} experiments: {", ".join(sorted(found))}; write more of it')
  if isinstance(missing, _MissingExperimentError):
    raise missing
  raise UserError(_not_found(name, problems))


def load_module(name: str) -> str:
  """Imports a module, or the module in `path/to/file.py`, and returns the name under which it is imported.

  Raises UserError if the module does not exist, or importing it fails.
  """
  return (_load_file(name) if name.endswith('.py') else import_module(_canonical(name))).__name__


def names() -> list[str]:
  """Returns the sorted full names of the registered experiments; call `load_all` first to include all of `PACKAGES`."""
  return sorted(_entries)


def names_in_sources() -> list[str]:
  """Returns the short names of the experiments in the sources of `PACKAGES`, sorted, without importing anything.

  Only finds classes with the decorator `register` at the top level of modules, which is enough for shell completion.
  """
  return sorted({*_docs_in_sources(_BUILT_IN_FOLDER), *_docs_in_sources(os.path.abspath(_OWN))})


class Summaries(NamedTuple):
  """The first docstring lines of experiments by short names, and the errors of modules that cannot be imported."""

  by_name: dict[str, str]
  problems: list[str]


def summaries() -> Summaries:
  """Returns the summaries of all experiments, sorted by full names, without importing JAX.

  Those of this package are read from its sources. The user's package is imported, so that experiments that its code
  registers in other ways are found, and errors in it are reported.
  """
  docs: dict[str, str] = {}
  problems: list[str] = []
  for package in dict.fromkeys(map(_canonical, PACKAGES)):
    if package == _BUILT_IN:
      docs |= {f'{package}.{name}': doc for name, doc in _docs_in_sources(_BUILT_IN_FOLDER).items()}
    else:
      problems += _load(package)
  docs |= {name: entry.experiment.__doc__ or '' for name, entry in _entries.items()}
  return Summaries({short_name(name, docs): docs[name].strip().partition('\n')[0] for name in sorted(docs)}, problems)


def _docs_in_sources(folder: str) -> dict[str, str]:
  """Returns, by module and name, the docstrings of the classes in a folder that have the decorator `register`."""
  found: dict[str, str] = {}
  for file in glob.glob(os.path.join(glob.escape(folder), '**', '[!_]*.py'), recursive=True):
    module = os.path.relpath(file, folder).removesuffix('.py').replace(os.sep, '.')
    for c in _classes_in(file):
      if 'register' in {ast.unparse(decorator).rpartition('.')[2] for decorator in c.decorator_list}:
        found[f'{module}.{c.name}'] = ast.get_docstring(c) or ''
  return found


def full_name(experiment: type) -> str:
  """Returns the name of an experiment in the registry: its module and class."""
  return f'{_canonical(experiment.__module__)}.{experiment.__qualname__}'


def short_name(name: str, among: Iterable[str] | None = None) -> str:
  """Returns the shortest ending of a full name that belongs to no other name in `among`.

  `among` are by default the registered names. The ending has at least a module and a class. If no ending is unique, it
  is the full name.
  """
  parts = name.split('.')
  endings = ('.'.join(parts[start:]) for start in range(len(parts) - 2, 0, -1))
  return next((ending for ending in endings if len(_matches(ending, among)) == 1), name)


def load_all() -> list[str]:
  """Imports all modules of `PACKAGES`, which register their experiments.

  Returns, for each module that cannot be imported, a line that says which error was raised, and where.
  """
  return [problem for package in dict.fromkeys(map(_canonical, PACKAGES)) for problem in _load(package)]


def _load(package: str) -> list[str]:
  try:
    return _load_package(import_module(package))
  except UserError as error:
    # The user may have no package of experiments.
    return [] if package != _BUILT_IN and isinstance(error, MissingModuleError) else [str(error)]


def _load_package(package: ModuleType) -> list[str]:
  problems = []
  for found in pkgutil.iter_modules(getattr(package, '__path__', ()), f'{package.__name__}.'):
    if not found.name.rpartition('.')[2].startswith('_'):
      try:
        module = import_module(found.name)
        if found.ispkg:
          problems += _load_package(module)
      except UserError as error:
        problems.append(str(error))
  return problems


def _matches(ending: str, among: Iterable[str] | None = None) -> list[str]:
  return [full for full in (_entries if among is None else among) if f'.{full}'.endswith(f'.{ending}')]


def _canonical(module: str) -> str:
  """Returns the name under which to import a module, so that no file is imported under two names."""
  # In a checkout, praxis_lite/experiments is a link to the top-level `experiments`, which may be on sys.path too.
  is_link = module.split('.')[0] == _OWN and _origin(_OWN) == _origin(_BUILT_IN)
  return f'{_BUILT_IN}{module.removeprefix(_OWN)}' if is_link else module


def _origin(module: str) -> str | None:
  """Returns the file that importing `module` executes, with symbolic links resolved; None if there is no file."""
  if module in sys.modules:
    file = getattr(sys.modules[module], '__file__', None)
  else:
    try:
      file = getattr(importlib.util.find_spec(module), 'origin', None)
    except Exception as error:  # Importing a parent package failed.
      raise import_failure(module, error) from error
  return os.path.realpath(file) if file else None


def _load_file(path: str) -> ModuleType:
  """Imports a Python file, as a module of its package if it is in one, otherwise under the name of the file."""
  file = os.path.realpath(path)
  if not os.path.isfile(file):
    raise UserError(f'there is no file {path!r}')
  if os.path.getsize(file) == 0 and os.path.basename(file) != '__init__.py':
    raise UserError(f'{path} is empty')
  folder, name = os.path.dirname(file), re.sub(r'\W', '_', os.path.splitext(os.path.basename(file))[0])
  while os.path.isfile(os.path.join(folder, '__init__.py')):
    folder, name = os.path.dirname(folder), f'{os.path.basename(folder)}.{name}'
  if folder not in map(os.path.realpath, sys.path):
    sys.path.append(folder)  # The file may import other files in its folder.
  if _origin(_canonical(name)) == file:
    return import_module(_canonical(name), short_path(file))
  return _load_as(f'{name}_{zlib.crc32(file.encode()):08x}', file)  # Another module already has the plain name.


def _load_as(name: str, file: str) -> ModuleType:
  if name in sys.modules:
    return sys.modules[name]
  spec = importlib.util.spec_from_file_location(name, file)
  if spec is None or spec.loader is None:
    raise UserError(f'{short_path(file)} is not a Python file')
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    del sys.modules[name]
    raise import_failure(short_path(file), error) from error
  return module


class _MissingExperimentError(UserError):
  """Raised if a module has no experiment with the given name."""


def _experiment_in(module: ModuleType, name: str) -> type[BaseExperiment]:
  """Returns the experiment with a qualified name in a module; for the name '', the only experiment of the module."""
  known = {key: v for key, v in vars(module).items() if _is_experiment(v) and v.__module__ == module.__name__}
  if not name and len(known) == 1:
    return next(iter(known.values()))
  value: object = module
  for part in name.split('.'):
    value = getattr(value, part, None)
  if value is None:
    where = short_path(getattr(module, '__file__', None) or module.__name__)
    several = f'has {number_of(len(known), "experiment")}; name one of them after a colon'
    missing, close = f'has no experiment {name!r}' if name else several, did_you_mean(name, known)
    raise _MissingExperimentError(f'{where} {missing}.{close} Its experiments: {", ".join(known) or "none"}.')
  return _checked_experiment(value, f'{module.__name__}.{name}')


def _is_experiment(value: object) -> TypeGuard[type[BaseExperiment]]:
  methods = ('task', 'datasets', 'validate')  # BaseExperiment defines validate.
  return isinstance(value, type) and all(callable(getattr(value, method, None)) for method in methods)


def _checked_experiment(value: object, name: str) -> type[BaseExperiment]:
  if not _is_experiment(value):
    raise UserError(
      f'{name} is not an experiment: derive a class from BaseExperiment and define its methods task and datasets'
    )
  return value


def _classes_in(file: str) -> list[ast.ClassDef]:
  """Returns the classes at the top level of a Python file; [] if it cannot be read."""
  try:
    with open(file, encoding='utf-8') as source:
      tree = ast.parse(source.read())
  except (OSError, SyntaxError, ValueError):
    return []
  return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _not_found(name: str, problems: list[str]) -> str:
  endings = [short_name(full) for full in _entries]
  by_class = {short.rpartition('.')[2].lower(): short for short in endings}
  near = difflib.get_close_matches(name, endings, n=3, cutoff=0.6)
  near += [by_class[c] for c in difflib.get_close_matches(name.rpartition('.')[2].lower(), by_class, n=3, cutoff=0.6)]
  wanted = re.split('[.:]', name)[-1].lower()
  in_files = [(file, node.name) for file in sorted(glob.glob('*.py')) for node in _classes_in(file)]
  own = [f'{file}:{cls}' for file, cls in in_files if cls.lower() == wanted]
  near = list(dict.fromkeys([*own, *near]))[:3]
  hint = f' Did you mean {" or ".join(near)}?' if near else ''
  also = ''.join(f' Not loaded: {problem}.' for problem in problems)
  group = f' {name}' if any(name in short for short in endings) else ''
  return f'there is no experiment {name!r}.{hint} `praxis-lite list{group}` prints them all.{also}'
