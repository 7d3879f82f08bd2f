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
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import NamedTuple, TypeGuard

import jax
import numpy as np

from praxis_lite.common.config import Config, Configurable, target
from praxis_lite.common.errors import ConfigError, DataError, UserError, did_you_mean
from praxis_lite.common.importing import is_library, short_path

# A TypeError, ValueError or IndexError from these packages and modules is about the arrays they were called with.
_ARRAY_LIBRARIES = {'jax', 'jaxlib', 'numpy', 'opt_einsum', 'einops', 'optax', 'chex', 'praxis_lite.common.weighted'}
# Messages about shapes from Python's and NumPy's own code, which has no frame in a traceback.
_ABOUT_SHAPES = re.compile('values to unpack|be broadcast together|not aligned|in its core dimension|cannot reshape')
_NOT_CALLABLE = re.compile(r"'(\w+)' object is not callable")
_ABOUT_INTEGERS = re.compile(r'integer.*got.*float|numpy\.integer')
_MAX_OPERANDS = 8


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


class _Needs(NamedTuple):
  """What Python needs from a traced array, and what to write instead, for errors of JAX or of Python."""

  error: type[Exception]
  message: str  # A regex.
  what: str
  remedy: str


_AT_THE_RUN = 'which is known only when the compiled step runs'
_TRACED = (
  _Needs(
    jax.errors.UnexpectedTracerError,
    '',
    'an array of an earlier call is used, which had no value beyond it',
    'keep none in attributes, lists or globals; return it, or keep it in a variable by update_var',
  ),
  _Needs(
    jax.errors.TracerBoolConversionError,
    '',
    f'Python decides by the value of an array, {_AT_THE_RUN}',
    'choose by jnp.where(condition, a, b), or branch by jax.lax.cond',
  ),
  _Needs(
    jax.errors.TracerArrayConversionError,
    '',
    f'NumPy needs the values of an array, {_AT_THE_RUN}',
    'use jax.numpy in place of numpy',
  ),
  _Needs(
    jax.errors.TracerIntegerConversionError,
    '',
    f'Python needs the value of an array, {_AT_THE_RUN}',
    'loop by jax.lax.fori_loop or jax.lax.scan, and index arrays of jax.numpy',
  ),
  _Needs(
    jax.errors.NonConcreteBooleanIndexError,
    '',
    f'the shape of the result depends on the values of a mask, {_AT_THE_RUN}',
    'use jnp.where(mask, x, 0), or give what is left out the weight zero',
  ),
  _Needs(
    TypeError,
    'Shapes must be 1D sequences of concrete values.*[Tt]racer',
    f'a shape depends on the value of an array, {_AT_THE_RUN}',
    'take sizes from x.shape, or from fields of the layer',
  ),
  _Needs(
    TypeError,
    r'format string passed to \w*Tracer',
    f'text is made of the value of an array, {_AT_THE_RUN}',
    "print it by jax.debug.print('{x}', x=x), or log it by self.add_summary",
  ),
  _Needs(
    jax.errors.ConcretizationTypeError,
    '',
    f'Python needs the value of an array, {_AT_THE_RUN}',
    'leave out float(), int(), bool() and .item(), and go on with the array',
  ),
)


def explain_error(
  error: Exception, layer: object, path: str, weights: Mapping[str, tuple[int, ...]]
) -> UserError | None:
  """Returns the error that explains one raised in a method of a layer; None if it is about something else.

  It explains: an entry that a dict lacks, shapes and dtypes that do not fit, a dict instead of an array, values that
  Python needs while a step is traced, and calls of something that is not a layer.

  Args:
    error: the exception, while it is being handled.
    layer, path: the layer, and its path as messages spell it.
    weights: the shapes of the layer's own weights.
  """
  lines = dict(traceback.walk_tb(error.__traceback__))
  frames = list(lines)
  own = [frame for frame in frames if not _handles_arrays(frame)]
  if not own:
    return None
  methods = [
    frame.f_code.co_name
    for frame in own
    if frame.f_locals.get('self') is layer and 'scoped' not in frame.f_code.co_name
  ]
  where, name = _where(own, lines), name_method(layer, path, methods[-1] if methods else '')
  if isinstance(error, KeyError):
    return _missing_entry(error, name, own[-1], lines) if own[-1] is frames[-1] else None
  if isinstance(error, AttributeError):
    found = _describe_non_array(error, own)
    return NotAnArrayError(f'{name}: {found}{where}') if found else None
  message = str(error)
  for needs in _TRACED:
    if isinstance(error, needs.error) and re.search(needs.message, message, re.DOTALL):
      return TracedValueError(f'{name}: {needs.what}{_quote_code(_code(own, lines))}; {needs.remedy}{where}')
  if called := _NOT_CALLABLE.search(message):
    remedy = _not_callable(called[1], own[-1], lines)
    return NotALayerError(f'{name}: {remedy}{where}') if remedy else None
  what = message.strip().partition('\n')[0].rstrip(' .:')
  is_about_arrays = _handles_arrays(frames[-1]) or _ABOUT_SHAPES.search(what)
  if not is_about_arrays or isinstance(error, jax.errors.JAXTypeError):
    return None
  is_about_dtypes = _ABOUT_INTEGERS.search(what) is not None
  arrays = {n: x for n, x in own[-1].f_locals.items() if _is_array(x)} | _entries_read(own[-1], lines)
  operands = [f'{n} {x.dtype if is_about_dtypes else ""}{list(x.shape)}' for n, x in arrays.items()]
  operands += [] if is_about_dtypes else [f'{n} {list(shape)}' for n, shape in weights.items() if n not in arrays]
  remedy = '; have the input yield integers, or cast by x.astype(jnp.int32)' if is_about_dtypes else ''
  shown = f'; {", ".join(operands[:_MAX_OPERANDS])}' if operands else ''
  return ShapesError(f'{name}: {what}{shown}{remedy}{where}')


def name_method(layer: object, path: str, method: str) -> str:
  """Returns a layer's method as messages name it: 'lm.softmax (Softmax.logits)', or 'MyModel.logits' at the root."""
  name = f'{type(layer).__name__}.{method}' if method else type(layer).__name__
  return name if path == type(layer).__name__ else f'{path} ({name})'


def missing_return_hint(method: Callable[..., object]) -> str:
  """Returns what is wrong with a method that has returned None, and where its code is; begins with a verb."""
  code = inspect.unwrap(method).__code__
  return f'returned None; does it lack a return? ({short_path(code.co_filename)}:{code.co_firstlineno})'


def _missing_entry(
  error: KeyError, name_method: str, frame: FrameType, lines: dict[FrameType, int]
) -> UserError | None:
  """Returns the error that a dict, which the line of code reads, lacks an entry."""
  key, code = error.args[0] if error.args else None, _code([frame], lines)
  for name, value in frame.f_locals.items():
    reads = rf'\b{name}\[(?:[\'"]{re.escape(str(key))}[\'"]|[^\'"])'  # By this key, or by a variable.
    if isinstance(value, dict) and key not in value and re.search(reads, code):
      entries = ', '.join(map(str, value)) or 'none'
      remedy = ' The input has to yield it.' if name == 'batch' else ''
      return MissingEntryError(
        f'{name_method}: the {name} has no entry {key!r}; its entries: {entries}.'
        f'{did_you_mean(str(key), map(str, value))}{remedy}{_where([frame], lines)}'
      )
  return None


def _describe_non_array(error: AttributeError, own: list[FrameType]) -> str | None:
  """Returns what an argument is that a layer's code uses like an array; None if there is no such argument."""
  value = error.obj
  if not isinstance(value, dict | list | tuple) or not hasattr(jax.Array, error.name or ''):
    return None
  argument = next((n for frame in reversed(own) for n, v in frame.f_locals.items() if v is value), 'its input')
  entries = [f'{argument}[{key!r}]' for key, x in value.items() if _is_array(x)] if isinstance(value, dict) else []
  entries.sort(key=lambda entry: 'weights' in entry)  # Last: all batches have weights, and few layers mean them.
  remedy = f'; pass one of its entries, such as {entries[0]}' if entries else ''
  return f'{argument} is a {type(value).__name__}, where an array is expected{remedy}'


def _not_callable(kind: str, frame: FrameType, lines: Mapping[FrameType, int]) -> str | None:
  """Returns what to do about an object of class `kind` that a layer's code calls; None if it is not an attribute."""
  layer, code = frame.f_locals.get('self'), _code([frame], lines)
  attributes = {n: v for n, v in getattr(layer, '__dict__', {}).items() if re.search(rf'\bself\.{n}\b', code)}
  for name, value in attributes.items():
    several = value if isinstance(value, list | tuple) else [value]
    if kind == 'Config' and any(isinstance(v, Config) for v in several):
      built = next(getattr(target(v), '__name__', '...') for v in several if isinstance(v, Config))
      child = re.sub('_tpl$', '', name)
      form = f'self.create_child({child!r}, Config({built}, ...))'
      if isinstance(value, list | tuple):
        form = f'self.create_children({child!r}, templates=[Config({built}, ...), ...])'
      return f'self.{name} is a Config, which describes a layer and is none; build it in setup() by {form}'
    if kind in ('list', 'tuple') and type(value).__name__ == kind:
      return f'self.{name} is a {kind}; call each of its layers: for layer in self.{name}: x = layer(x)'
    if isinstance(value, Configurable) and type(value).__name__ == kind:
      return f'{kind} has no method __call__; define it, as in def __call__(self, x)'
  return None


def _entries_read(frame: FrameType, lines: Mapping[FrameType, int]) -> dict[str, jax.Array | np.ndarray]:
  """Returns the arrays in dicts that the line of code reads, such as batch['labels']."""
  found: dict[str, jax.Array | np.ndarray] = {}
  for name, _, key in re.findall(r'\b(\w+)\[([\'"])(.*?)\2\]', _code([frame], lines)):
    entries = frame.f_locals.get(name)
    if isinstance(entries, dict) and _is_array(x := entries.get(key)):
      found[f'{name}[{key!r}]'] = x
  return found


def _where(own: Iterable[FrameType], lines: Mapping[FrameType, int]) -> str:
  """Returns the innermost line of the user's own code, also in a layer that called this one: ' (model.py:12)'."""
  for frame in _users(own):
    return f' ({short_path(frame.f_code.co_filename)}:{lines.get(frame, frame.f_lineno)})'
  return ''


def _code(own: Iterable[FrameType], lines: Mapping[FrameType, int]) -> str:
  """Returns the text of that line, or of a library's line if no frame is in the user's code."""
  own = list(own)
  frame = next(_users(own), own[-1])
  return linecache.getline(frame.f_code.co_filename, lines.get(frame, frame.f_lineno)).strip()


def _quote_code(code: str) -> str:
  return f', in `{code}`' if code else ''


def _users(own: Iterable[FrameType]) -> Iterator[FrameType]:
  """Yields those of the frames, and of the running methods of layers, that are in the user's code; innermost first."""
  frames = [*reversed(list(own)), *_calling_layers()]
  return (frame for frame in frames if not is_library(frame.f_code.co_filename))


def _calling_layers() -> Iterator[FrameType]:
  """Yields the frames of layers' methods that are running, the innermost first."""
  frame: FrameType | None = sys._getframe(1)
  while frame is not None:
    if isinstance(frame.f_locals.get('self'), Configurable):
      yield frame
    frame = frame.f_back


def _handles_arrays(frame: FrameType) -> bool:
  module = str(frame.f_globals.get('__name__', ''))
  return not _ARRAY_LIBRARIES.isdisjoint((module, module.partition('.')[0]))


def _is_array(value: object) -> TypeGuard[jax.Array | np.ndarray]:
  return isinstance(value, jax.Array | np.ndarray)
