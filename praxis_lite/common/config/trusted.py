"""What a config from a file may name. Anyone may have written the file, so most of Python is refused.

Building a config calls what it names, with arguments from the same file. So only these are imported and returned:

    praxis_lite           Configurables, values (dataclasses, named tuples, enums), functions in `_OWN_ROOMS`
    optax                 what it exports
    jax.nn, jax.lax, ...  functions that compute, and dtypes of jax.numpy, numpy and ml_dtypes
    Flax, Equinox, Haiku  classes of modules and initializers, and functions that name an initializer's axes
    builtins              types of plain values, and a few functions without side effects
    loaded modules        Configurables, such as those of a notebook; nothing is imported
    trusted modules       any class and function that is defined in them

In `module:a.b.c`, a and b must be classes of the named module, and c must be defined in the package of that module. For
example, `praxis_lite.common.importing:os.system` and `my_module:system` are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Collection
from importlib import metadata
from types import FunctionType, ModuleType

import numpy as np

from praxis_lite.common.config.configurable import Configurable
from praxis_lite.common.config.references import attribute_of, is_named
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.importing import import_module
from praxis_lite.common.moved import current_name


class UntrustedError(ConfigError):
  """A file names something that may not be imported.

  Attributes:
    module: the module that it names.
  """

  def __init__(self, message: str, module: str):
    super().__init__(message)
    self.module = module


_REFERENCE = re.compile(r'(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)')

# Functions in these packages and modules only compute, or read the package's own data; others may write files.
_OWN = 'praxis_lite'
_OWN_ROOMS = ('experiments', 'layers', 'models', 'tasks', 'training.learning', 'sharding.weights')
_OWN_FUNCTIONS = {'praxis_lite.inputs.text:stdlib_files'}
_JAX_MODULES = ('jax.lax', 'jax.nn', 'jax.nn.initializers', 'jax.numpy')
# Packages whose import names differ from their names for pip.
_USED = {'jaxlib', 'orbax', 'tensorflow', 'tensorstore', 'google', 'etils', 'yaml', 'flax', 'torch', 'absl', 'rich'}
_DTYPE_PACKAGES = ('numpy', 'ml_dtypes')
# Packages of other libraries that a `ForeignLayer` calls, and functions of them that only wrap an initializer.
_MODULE_PACKAGES = ('flax.core.meta', 'flax.linen', 'flax.nnx', 'equinox.nn', 'haiku')
_WRAPPERS = ('with_partitioning', 'with_logical_partitioning')
_BUILTINS: frozenset[object] = frozenset(
  {bool, bytes, complex, dict, enumerate, float, frozenset, int, list, range, reversed, set, slice, str, tuple, zip}
  | {abs, all, any, len, max, min, pow, round, sorted, sum}
)


def import_trusted(reference: str, trusted: Collection[str] = ()) -> object:
  """Returns the class or function that `module:qualname` names, possibly in one of the `trusted` modules or packages.

  Raises:
    UntrustedError: the list at the top of this file does not allow it.
    UserError: no such name exists, or importing its module fails.
  """
  match = _REFERENCE.fullmatch(current_name(reference)) if isinstance(reference, str) else None
  if match is None:
    raise UserError(f'{reference!r} is not of the form module:Name')
  module, name = match.group('module', 'name')
  if _is_in(module, trusted):
    found = _lookup(import_module(module), name)
    if is_named(found) and _is_in(_home(found), {module.partition('.')[0], *trusted}):
      return found
  elif _is_public(module) and _is_in(module, _MODULE_PACKAGES):
    found = _lookup(import_module(module), name)
    if _is_module_class(found, module) or ('.' not in name and name in _WRAPPERS):
      return found
  elif _is_public(module) and module.partition('.')[0] in (_OWN, 'optax', 'jax', 'builtins', *_DTYPE_PACKAGES):
    found = _lookup(import_module(module), name)
    if _is_allowed(module, name, found):
      return found
  elif module in sys.modules:
    with contextlib.suppress(UserError):
      found = _lookup(sys.modules[module], name)
      if isinstance(found, type) and issubclass(found, Configurable):
        return found
  else:
    raise UntrustedError(f'{module} is not one of the packages that a recorded config may name', module)
  raise UntrustedError(f'{reference} is not something that a recorded config may name', module)


def is_of_others(module: str) -> bool:
  """Whether a module belongs to Python or to a dependency of praxis_lite, so that a user must not declare it trusted.

  Trusting such a module would allow a file to call anything in it, such as `os.system`.
  """
  package = module.partition('.')[0].replace('-', '_')
  if package in sys.stdlib_module_names or package in (_OWN, 'pip', 'setuptools', 'wheel', 'pkg_resources'):
    return package != '__main__'
  required: set[str] = set()
  with contextlib.suppress(metadata.PackageNotFoundError):
    for requirement in metadata.requires(_OWN) or ():
      required.add(re.split(r'[^\w.-]', requirement, maxsplit=1)[0].lower().replace('-', '_'))
  return package.lower() in required or package in _USED


def _is_allowed(module: str, name: str, found: object) -> bool:
  """Whether an object of a package that is always trusted is harmless to call with any arguments."""
  package = module.partition('.')[0]
  if package == 'builtins':
    return any(found is allowed for allowed in _BUILTINS)
  if package in _DTYPE_PACKAGES:
    return isinstance(found, type) and issubclass(found, np.generic)
  if package == 'jax':
    computes = is_named(found) and _is_in(_home(found), {'jax'}) and module in _JAX_MODULES
    # Functions of jax.numpy that read and write files are plain functions; those that compute are compiled.
    return computes and not (module == 'jax.numpy' and isinstance(found, FunctionType))
  if not is_named(found) or not _is_in(_home(found), {package}):
    return False
  if package == _OWN and not _is_own_class(found):
    rooms = {f'{_OWN}.{room}' for room in _OWN_ROOMS}
    is_method_of_value = inspect.ismethod(found) and isinstance(found.__self__, type) and _is_value(found.__self__)
    is_function = isinstance(found, FunctionType) and '.' not in name and not name.startswith('_')
    return is_method_of_value or (is_function and (f'{module}:{name}' in _OWN_FUNCTIONS or _is_in(_home(found), rooms)))
  return True


def _is_module_class(found: object, module: str) -> bool:
  """Whether an object is a subclass of `Module`, or an initializer, that the package of `module` itself defines."""
  package = module.partition('.')[0]
  bases = found.__mro__ if isinstance(found, type) and _is_in(_home(found), {package}) else ()
  is_initializer = bool(bases) and module == 'haiku.initializers'
  return is_initializer or any(base.__name__ == 'Module' and _is_in(base.__module__, {package}) for base in bases)


def _is_own_class(found: object) -> bool:
  return isinstance(found, type) and (issubclass(found, Configurable) or _is_value(found))


def _is_value(cls: type) -> bool:
  """Whether a class is a dataclass, a named tuple or an enum."""
  return dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum) or (issubclass(cls, tuple) and cls is not tuple)


def _lookup(module: ModuleType, name: str) -> object:
  """Returns the object with a qualified name in a module; all parts but the last must be classes."""
  value: object = module
  for part in name.split('.'):
    if part.startswith('__') or not (value is module or isinstance(value, type)):
      raise UntrustedError(
        f'{module.__name__}:{name} is not something that a recorded config may name', module.__name__
      )
    value = attribute_of(value, part)
  return value


def _home(found: object) -> str:
  """Returns the module in which an object was defined."""
  owner = found.__self__ if inspect.ismethod(found) else found
  return getattr(owner, '__module__', None) or ''


def _is_in(module: str, packages: Collection[str]) -> bool:
  return any(module == package or module.startswith(f'{package}.') for package in packages)


def _is_public(module: str) -> bool:
  return not any(part.startswith('_') for part in module.split('.'))
