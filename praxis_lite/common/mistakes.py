"""Reports mistakes in a model on one line: which layer, which line of code, and what does not fit.

JAX says which shapes it cannot combine, but not where they come from. A layer knows its path and its weights, and the
traceback has the local arrays. The original error becomes the cause of the new one.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple, TypeGuard

import jax
import numpy as np

from praxis_lite.common.config import Config, Configurable, target
from praxis_lite.common.errors import ConfigError, DataError, UserError, did_you_mean
from praxis_lite.common.importing import is_library, short_path

# A TypeError, ValueError or IndexError from these packages and modules is about the arrays they were called with.
_ARRAY_LIBRARIES = {'jax', 'jaxlib', 'numpy', 'opt_einsum', 'einops', 'optax', 'chex', 'praxis_lite.common.weighted'}
# Messages about shapes that Python and NumPy raise in compiled code, which is not in tracebacks.
_ABOUT_SHAPES = re.compile('values to unpack|be broadcast together|not aligned|in its core dimension|cannot reshape')
_NOT_CALLABLE = re.compile(r"'(\w+)' object is not callable")
_ABOUT_INTEGERS = re.compile(r'integer.*got.*float|numpy\.integer')
_OPERATION = re.compile(r'^(and|or|not)(?= got )')  # Operations of JAX whose names read like words of the message.
_MAX_OPERANDS = 8
# Python's messages about arguments that do not fit a method. To find the caller of the method, the functions in
# `_OWN_FRAMES` are skipped on the stack.
_SIGNATURE = re.compile(r'(?:\w+\.)*(\w+)\(\) (got an unexpected .*|missing \d+ required .*|takes .* given)')
_OWN_FRAMES = ('_wrong_signature', 'explain_error', 'run')


class ShapesError(DataError, TypeError, IndexError):
  """The arrays in a call do not fit together."""


class MissingEntryError(ConfigError, KeyError):
  """A batch, or another dict, lacks an entry."""

  __str__ = UserError.__str__  # KeyError would quote the message.


class TracedValueError(ConfigError, TypeError):
  """Python code needs the value of an array, which is known only when the compiled step runs."""


class NotAnArrayError(DataError, AttributeError):
  """A layer was called with a dict, a list or a tuple instead of an array."""


class NotALayerError(ConfigError, TypeError):
  """Something that is not a layer was called like one."""


# Errors about traced arrays. The key is the class of the error, or a regex for the message of a TypeError. The value is
# a pair: what Python needs instead of a traced array, such as a bool for `if`; and a remedy.
_AT_THE_RUN = 'which is known only when the compiled step runs'
_TRACED: Mapping[type[Exception] | str, tuple[str, str]] = {
  jax.errors.UnexpectedTracerError: (
    'an array of an earlier call is used, which had no value beyond it',
    'keep none in attributes, lists or globals; return it, or keep it in a variable by update_var',
  ),
  jax.errors.TracerBoolConversionError: (
    f'Python decides by the value of an array, {_AT_THE_RUN}',
    'choose by jnp.where(condition, a, b), or branch by jax.lax.cond',
  ),
  jax.errors.TracerArrayConversionError: (
    f'NumPy needs the values of an array, {_AT_THE_RUN}',
    'use jax.numpy in place of numpy',
  ),
  jax.errors.TracerIntegerConversionError: (
    f'Python needs the value of an array, {_AT_THE_RUN}',
    'loop by jax.lax.fori_loop or jax.lax.scan, and index arrays of jax.numpy',
  ),
  jax.errors.NonConcreteBooleanIndexError: (
    f'the shape of the result depends on the values of a mask, {_AT_THE_RUN}',
    'use jnp.where(mask, x, 0), or give what is left out the weight zero',
  ),
  'Shapes must be 1D sequences of concrete values.*[Tt]racer': (
    f'a shape depends on the value of an array, {_AT_THE_RUN}',
    'take sizes from x.shape, or from fields of the layer',
  ),
  r'format string passed to \w*Tracer': (
    f'text is made of the value of an array, {_AT_THE_RUN}',
    "print it by jax.debug.print('{x}', x=x), or log it by self.add_summary",
  ),
  jax.errors.ConcretizationTypeError: (
    f'Python needs the value of an array, {_AT_THE_RUN}',
    'leave out float(), int(), bool() and .item(), and go on with the array',
  ),
}


class _Place(NamedTuple):
  """A line of code that was running."""

  frame: FrameType
  line: int

  @property
  def file(self) -> str:
    return self.frame.f_code.co_filename

  @property
  def code(self) -> str:
    return linecache.getline(self.file, self.line).strip()

  @property
  def is_about_arrays(self) -> bool:
    """Whether this line is in an array library; an error of such a library is about the arrays that it got."""
    module = str(self.frame.f_globals.get('__name__', ''))
    return not _ARRAY_LIBRARIES.isdisjoint((module, module.partition('.')[0]))


def is_about_arrays(error: Exception) -> bool:
  """Whether an error that is being handled says that arrays do not fit: it comes from code of an array library."""
  *_, last = traceback.walk_tb(error.__traceback__)
  return _Place(*last).is_about_arrays or _ABOUT_SHAPES.search(str(error)) is not None


def explain_error(
  error: Exception, layer: object, path: str, weights: Mapping[str, tuple[int, ...]]
) -> UserError | None:
  """Returns the error that explains one raised in a method of a layer; None if it is about something else.

  It explains: an entry that a dict lacks, shapes and dtypes that do not fit, a dict instead of an array, values that
  Python needs while a step is traced, and calls of something that is not a layer. Call it while the exception is being
  handled. `path` is the layer's path as messages spell it, and `weights` has the shapes of the layer's own weights.
  """
  places = [_Place(*place) for place in traceback.walk_tb(error.__traceback__)]
  own = [place for place in places if not place.is_about_arrays]
  if not own:
    return None
  codes = [frame.f_code.co_name for frame, _ in own if frame.f_locals.get('self') is layer]
  name = name_method(layer, path, next((code for code in reversed(codes) if 'scoped' not in code), ''))
  # The user's own line, which may be in a layer that called this one.
  shown = next((place for place in [*reversed(own), *_running_methods()] if not is_library(place.file)), None)
  where = f' ({short_path(shown.file)}:{shown.line})' if shown else ''
  if isinstance(error, KeyError):
    missing = _missing_entry(error, own[-1]) if own[-1] is places[-1] else None
    return MissingEntryError(f'{name}: {missing}{where}') if missing else None
  if isinstance(error, AttributeError):
    found = _describe_non_array(error, own)
    return NotAnArrayError(f'{name}: {found}{where}') if found else None
  message = str(error)
  if isinstance(error, TypeError) and (found := _wrong_signature(message, layer, places)):
    return ConfigError(f'{name_method(layer, path, "")}: {found}')
  for kind, (what, remedy) in _TRACED.items():
    if _is_of_kind(error, message, kind):
      code = (shown or own[-1]).code
      return TracedValueError(f'{name}: {what}{f", in `{code}`" if code else ""}; {remedy}{where}')
  if called := _NOT_CALLABLE.search(message):
    found = _not_callable(called[1], own[-1])
    return NotALayerError(f'{name}: {found}{where}') if found else None
  what = _OPERATION.sub(r"operation '\1'", message.strip().partition('\n')[0].rstrip(' .:'))
  if not is_about_arrays(error) or isinstance(error, jax.errors.JAXTypeError):
    return None
  arrays = {n: x for n, x in own[-1].frame.f_locals.items() if _is_array(x)} | _entries_read(own[-1])
  if _ABOUT_INTEGERS.search(what):
    remedy = '; have the input yield integers, or cast by x.astype(jnp.int32)'
    operands = [f'{n} {x.dtype}{list(x.shape)}' for n, x in arrays.items()]
  else:
    remedy = _fitting_field(what, layer, weights, own[-1].code)
    operands = [f'{n} {list(x.shape)}' for n, x in arrays.items()]
    operands += [f'{n} {list(shape)}' for n, shape in weights.items() if n not in arrays]
  operands_shown = f'; {", ".join(operands[:_MAX_OPERANDS])}' if operands else ''
  return ShapesError(f'{name}: {what}{operands_shown}{remedy}{where}')


def _is_of_kind(error: Exception, message: str, kind: type[Exception] | str) -> bool:
  if isinstance(kind, type):
    return isinstance(error, kind)
  return isinstance(error, TypeError) and re.search(kind, message, re.DOTALL) is not None


def _wrong_signature(message: str, layer: object, places: list[_Place]) -> str | None:
  """Returns what is wrong with the arguments of a user's method that the library calls; None for other errors."""
  found = _SIGNATURE.match(message)
  method = found and getattr(type(layer), found[1], None)
  callers = [frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name not in _OWN_FRAMES]
  if not found or not method or len(places) > 1 or not _is_of_user(layer) or not callers:
    return None
  caller = callers[0].f_locals.get('self')
  if not isinstance(caller, Configurable) or not is_library(callers[0].f_code.co_filename):
    return None
  return f'{found[1]}() {found[2]}, as {type(caller).__name__} calls it; declare its arguments {defined_at(method)}'


def _fitting_field(what: str, layer: object, weights: Mapping[str, tuple[int, ...]], code: str) -> str:
  """Returns the field that decides a size in a message about shapes, with the value that fits; '' unless it is clear.

  The field belongs to the layer, or to the outermost layer around it that has a field of this name and value. `code` is
  the line at fault. If a matrix of a user's own layer would fit transposed, or if the line should not transpose it, the
  result says that instead.
  """
  sizes = next((found.groups() for pattern in _TWO_SIZES if (found := re.search(pattern, what))), ())
  layers = [layer, *(place.frame.f_locals['self'] for place in _running_methods())]
  for new, old in (map(int, sizes), map(int, reversed(sizes))) if sizes else ():
    shapes = [tuple(shape) for shape in weights.values() if old in shape]
    if 'broadcast' in what:  # The two sizes may belong to other arrays.
      shapes = [shape for shape in shapes if str(shape) in what and 1 not in (new, old)]
    if not shapes:
      continue
    named = [name for name in weights if re.search(rf'\b{re.escape(name)}\b', code)] or weights
    if turned := [name for name in named if weights[name] == (old, new) and _is_of_user(layer)]:
      return f'; {" or ".join(turned)} would fit as [{new}, {old}]'
    if plain := [name for name in named if weights[name] == (new, old) and f'{name}.T' in code]:
      return f'; {plain[0]} would fit without .T'
    others = [name for name, shape in weights.items() if name not in named and shape[:1] == (new,) and len(shape) == 2]
    if len(others) == 1 and '@' in code and _is_of_user(layer):
      return f'; {others[0]} would fit'
    at_hand = [(owner, field) for owner in layers if (field := _field_of_size(owner, old))]
    same = [(owner, field) for owner, field in at_hand if field[0] == at_hand[0][1][0]]
    if same:
      owner, (name, value) = same[-1]
      shown = new if isinstance(value, int) else tuple(new if i == len(value) - 2 else n for i, n in enumerate(value))
      return f'; {getattr(owner, "path_name", type(owner).__name__)}.{name} = {shown} would fit'
  return ''


def _is_of_user(layer: object) -> bool:
  module = sys.modules.get(type(layer).__module__)
  return not is_library(getattr(module, '__file__', None) or '')


def _field_of_size(layer: object, size: int) -> tuple[str, int | tuple[int, ...]] | None:
  """Returns a pair: the name of the field that sets the size of a layer's inputs, and the field's value.

  Returns None if it is not clear which field this is.
  """
  names = getattr(type(layer), '__dataclass_fields__', {}) if isinstance(layer, Configurable) else {}
  fields = {name: getattr(layer, name, None) for name in names}
  found = {name: value for name, value in fields.items() if value == size}
  found |= {n: v for n, v in fields.items() if n == 'filter_shape' and isinstance(v, tuple) and v[-2] == size}
  if len(found) > 1:  # The size is wrong for the input, not for the output.
    found = {name: value for name, value in found.items() if name.startswith('in')}
  return next(iter(found.items())) if len(found) == 1 else None


# How messages name two sizes that differ.
_TWO_SIZES = (
  r'got \((\d+),\) and \((\d+),\)$',
  r'broadcasting: .*\b(\d+),?\), \((?:\d+, )*(\d+),?\)',
  r'but (\d+) // \d+ != (\d+)',
  r'\(size (\d+) is different from (\d+)\)',
  r'operand \d+ \((\d+)\) does not match previous terms \((\d+)\)',
)


def name_method(layer: object, path: str, method: str) -> str:
  """Returns a layer's method as messages name it: 'lm.softmax (Softmax.logits)', or 'MyModel.logits' at the root."""
  name = f'{type(layer).__name__}.{method}' if method else type(layer).__name__
  return name if path == type(layer).__name__ else f'{path} ({name})'


def missing_return_hint(method: Callable[..., object]) -> str:
  """Returns the second half of a message about a method that returned None, and says where the method's code is.

  The caller's message begins with the name of the method.
  """
  return f'returned None; does it lack a return? {defined_at(method)}'


def defined_at(method: Callable[..., object]) -> str:
  """Returns where the code of a method is, in parentheses."""
  code = inspect.unwrap(method).__code__
  return f'({short_path(code.co_filename)}:{code.co_firstlineno})'


def check_arguments(method: Callable[..., object], where: str, arguments: Mapping[str, object]) -> None:
  """Raises ConfigError if a method, perhaps of a user's subclass, does not take these arguments by name.

  `where` names the method in the message.
  """
  parameters = inspect.signature(method).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return
  if missing := [name for name in arguments if name not in {p.name for p in parameters}]:
    plural = 's' * (len(missing) > 1)
    form = ', '.join(f'{name}=None' for name in arguments)
    raise ConfigError(
      f'{where} lacks the argument{plural} {", ".join(missing)}; define it as {method.__name__}(self, *, {form}), or '
      f'with **rows {defined_at(method)}'
    )


def _missing_entry(error: KeyError, place: _Place) -> str | None:
  """Returns a message if a line of code reads an entry that a dict lacks; None if the error is about something else."""
  key = error.args[0] if error.args else None
  for name, value in place.frame.f_locals.items():
    reads = rf'\b{name}\[(?:[\'"]{re.escape(str(key))}[\'"]|[^\'"])'  # The line reads this key, or a key in a variable.
    if isinstance(value, dict) and key not in value and re.search(reads, place.code):
      entries = ', '.join(map(str, value)) or 'none'
      is_batch = name == 'batch' or 'weights' in value
      remedy = ' The input, or the rows given to predict, must have it.' if is_batch else ''
      what = f'the batch{f", {name}," * (name != "batch")}' if is_batch else name
      meant = did_you_mean(str(key), map(str, value))
      return f'{what} has no entry {key!r}; its entries: {entries}.{meant}{remedy}'
  return None


def _describe_non_array(error: AttributeError, own: list[_Place]) -> str | None:
  """Returns a message if a layer's code uses a dict, list or tuple like an array; None for other errors."""
  value = error.obj
  if not isinstance(value, dict | list | tuple) or not hasattr(jax.Array, error.name or ''):
    return None
  argument = next((n for place in reversed(own) for n, v in place.frame.f_locals.items() if v is value), 'its input')
  entries = [f'{argument}[{key!r}]' for key, x in value.items() if _is_array(x)] if isinstance(value, dict) else []
  entries.sort(key=lambda entry: 'weights' in entry)  # Weights last: every batch has them, and few layers read them.
  remedy = f'; pass one of its entries, such as {entries[0]}' if entries else ''
  return f'{argument} is a {type(value).__name__}, where an array is expected{remedy}'


def _not_callable(kind: str, place: _Place) -> str | None:
  """Returns what to do if a layer's code calls an attribute of class `kind`, which is no layer; None if unknown."""
  attributes = getattr(place.frame.f_locals.get('self'), '__dict__', {})
  for name, value in attributes.items():
    if not re.search(rf'\bself\.{name}\b', place.code):
      continue
    is_several = isinstance(value, list | tuple)
    configs = [v for v in (value if is_several else [value]) if isinstance(v, Config)]
    if kind == 'Config' and configs:
      config, child = f'Config({getattr(target(configs[0]), "__name__", "...")}, ...)', name.removesuffix('_tpl')
      several = f'create_children({child!r}, templates=[{config}, ...])'
      form = several if is_several else f'create_child({child!r}, {config})'
      return f'self.{name} is the Config of a layer, not a layer; build it in setup() by self.{form}'
    if kind in ('list', 'tuple') and type(value).__name__ == kind:
      return f'self.{name} is a {kind}; call each of its layers: for layer in self.{name}: x = layer(x)'
    if isinstance(value, Configurable) and type(value).__name__ == kind:
      return missing_call(type(value))
  return None


def missing_call(cls: type) -> str:
  """Returns what to do about a class of layers without `__call__`."""
  given = '; that is the name of forward here' if hasattr(cls, 'forward') else ''
  return f'{cls.__name__} has no method __call__; define it, as in def __call__(self, x){given}'


def _entries_read(place: _Place) -> dict[str, jax.Array | np.ndarray]:
  """Returns the arrays in dicts that a line of code reads, such as batch['labels']."""
  found: dict[str, jax.Array | np.ndarray] = {}
  for name, _, key in re.findall(r'\b(\w+)\[([\'"])(.*?)\2\]', place.code):
    entries = place.frame.f_locals.get(name)
    if isinstance(entries, dict) and _is_array(x := entries.get(key)):
      found[f'{name}[{key!r}]'] = x
  return found


def _running_methods() -> Iterator[_Place]:
  """Yields the current line of each running method of a layer, the innermost first."""
  for frame, line in traceback.walk_stack(sys._getframe()):
    if isinstance(frame.f_locals.get('self'), Configurable):
      yield _Place(frame, line)


def _is_array(value: object) -> TypeGuard[jax.Array | np.ndarray]:
  return isinstance(value, jax.Array | np.ndarray)
