"""References: names of functions and classes in dumps, JSON and overrides of configs.

    reference(jax.nn.gelu)                    'jax.nn:gelu'        imports back to the same object, otherwise raises
    dotted_name(jax.nn.gelu)                  'jax.nn.gelu'        for people; never raises
    import_reference('jax.nn.gelu')           the function         accepts both spellings

Libraries define many exported objects in private modules (`jax._src.nn.functions`), which move between releases. These
functions name the public module that exports the object, so that dumps and files can still be read after an upgrade.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

from praxis_lite.common.errors import UserError, did_you_mean
from praxis_lite.common.importing import MissingModuleError, import_module

_REFERENCE = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*([.:][A-Za-z_]\w*)(\.[A-Za-z_]\w*)*')


def is_named(value: object) -> TypeGuard[Callable[..., object]]:
  """Whether `value` is a function, class or other callable with a `__name__`."""
  return callable(value) and isinstance(getattr(value, '__name__', None), str)


def looks_like_reference(text: str) -> bool:
  """Whether `text` has the form `package.module.Name` or `module:Name`."""
  return _REFERENCE.fullmatch(text) is not None


def reference(value: object) -> str:
  """Returns `module:qualname` of a function or class.

  Raises:
    UserError: importing that name would not return `value`: a lambda, a function defined inside a function, a method of
      an object.
  """
  module, name = _module_and_name(value)
  if '<lambda>' in name:
    raise UserError('a lambda has no name to import it by; define it as a function in a module')
  if '<locals>' in name:
    raise UserError(f'{name} is defined inside a function, so it cannot be imported; define it in a module')
  found = _lookup(sys.modules.get(module), name)
  if found is not value and not (inspect.ismethod(value) and found == value):
    raise UserError(f'{module}:{name} is not {value!r}, so importing that name would return something else')
  return f'{module}:{name}'


def dotted_name(value: object) -> str:
  """Returns `module.qualname` of a function or class, without the module for builtins."""
  module, name = _module_and_name(value)
  return name if module in ('builtins', '') else f'{module}.{name}'


def import_reference(text: str) -> object:
  """Returns the object that `text` names; raises UserError if no such object exists, or importing its module fails."""
  if ':' in text:
    module, _, name = text.partition(':')
    return functools.reduce(attribute_of, name.split('.'), import_module(module))
  parts = text.split('.')
  for split in range(len(parts) - 1, 0, -1):
    try:
      return functools.reduce(attribute_of, parts[split:], import_module('.'.join(parts[:split])))
    except MissingModuleError:
      if split == 1:
        raise
  raise UserError(f'{text!r} names no module; write package.module.Name')


def attribute_of(value: Any, name: str) -> Any:
  """Returns an attribute of a module or class; raises UserError, which suggests the nearest name, if there is none."""
  if not hasattr(value, name):
    where = getattr(value, '__name__', repr(value))
    raise UserError(f'{where} has no {name!r}.{did_you_mean(name, (n for n in dir(value) if n[:1] != "_"))}')
  return getattr(value, name)


def _module_and_name(value: object) -> tuple[str, str]:
  owner = getattr(value, '__self__', None)
  if inspect.ismethod(value) and isinstance(owner, type):  # A class method, possibly inherited.
    module, name = _module_and_name(owner)
    return module, f'{name}.{value.__name__}'
  module = getattr(value, '__module__', None) or ''
  name = getattr(value, '__qualname__', None) or getattr(value, '__name__', None) or type(value).__qualname__
  if '<' not in name and any(part.startswith('_') and part != '__main__' for part in module.split('.')):
    return _public_module(module, name), name
  return module, name


@functools.cache
def _public_module(module: str, name: str) -> str:
  """Returns the shortest public module of the same package that exports `name`, or `module` if there is none."""
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
  return functools.reduce(lambda value, part: getattr(value, part, None), name.split('.'), module)
