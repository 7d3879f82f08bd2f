"""Mistakes in a model, as one line: which layer, which line of code, and what does not fit.

JAX says which shapes it cannot combine, but not whose. A layer knows its path and its weights, and the traceback knows
the arrays that were at hand. The original error stays the cause of the new one.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType

import jax
import numpy as np

from praxis_lite.config import Configurable
from praxis_lite.errors import ConfigError, DataError, UserError, did_you_mean
from praxis_lite.importing import is_library, short_path

# Packages and modules whose TypeError, ValueError or IndexError is about the arrays that they were called with.
_ARRAY_LIBRARIES = {'jax', 'jaxlib', 'numpy', 'opt_einsum', 'einops', 'praxis_lite.weighted'}
# What Python's and NumPy's own code says about shapes; it has no frame in a traceback.
_ABOUT_SHAPES = re.compile('values to unpack|be broadcast together|not aligned|in its core dimension|cannot reshape')
_MAX_OPERANDS = 8


class ShapesError(DataError, TypeError, IndexError):
  """Arrays of a call do not fit each other."""


class MissingEntryError(ConfigError, KeyError):
  """A batch, or another dict, has no such entry."""

  __str__ = UserError.__str__  # That of a KeyError shows the quoted message.


def explained(error: Exception, layer: object, path: str, weights: Mapping[str, tuple[int, ...]]) -> UserError | None:
  """Returns the error that explains one raised in a method of a layer; None if it is not about a dict or shapes.

  Args:
    error: the exception, while it is handled.
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
  method = f'{type(layer).__name__}.{methods[-1]}' if methods else type(layer).__name__
  whose = method if path == type(layer).__name__ else f'{path} ({method})'
  if isinstance(error, KeyError):
    return _missing_entry(error, whose, own[-1], lines) if own[-1] is frames[-1] else None
  what = str(error).strip().partition('\n')[0].rstrip(' .:')
  is_about_arrays = _handles_arrays(frames[-1]) or _ABOUT_SHAPES.search(what)
  if not is_about_arrays or isinstance(error, jax.errors.JAXTypeError):
    return None
  arrays = {name: value.shape for name, value in own[-1].f_locals.items() if _is_array(value)} | dict(weights)
  operands = ', '.join(f'{name} {list(shape)}' for name, shape in list(arrays.items())[:_MAX_OPERANDS])
  return ShapesError(f'{whose}: {what}{f"; {operands}" if operands else ""}{_where(own, lines)}')


def _missing_entry(error: KeyError, whose: str, frame: FrameType, lines: dict[FrameType, int]) -> UserError | None:
  """The error that a dict that the line of code reads has no such entry."""
  key, code = error.args[0] if error.args else None, linecache.getline(frame.f_code.co_filename, lines[frame])
  for name, value in frame.f_locals.items():
    reads = rf'\b{name}\[(?:[\'"]{re.escape(str(key))}[\'"]|[^\'"])'  # By this key, or by that of a variable.
    if isinstance(value, dict) and key not in value and re.search(reads, code):
      entries = ', '.join(map(str, value)) or 'none'
      remedy = ' The input has to yield it.' if name == 'batch' else ''
      return MissingEntryError(
        f'{whose}: the {name} has no entry {key!r}; its entries: {entries}.'
        f'{did_you_mean(str(key), map(str, value))}{remedy}{_where([frame], lines)}'
      )
  return None


def _where(own: list[FrameType], lines: Mapping[FrameType, int]) -> str:
  """The innermost line of the user's own code, also of a layer that called this one: ' (model.py:12)'."""
  for frame in [*reversed(own), *_calling_layers()]:
    if not is_library(frame.f_code.co_filename):
      return f' ({short_path(frame.f_code.co_filename)}:{lines.get(frame, frame.f_lineno)})'
  return ''


def _calling_layers() -> Iterator[FrameType]:
  """The frames of layers' methods that are being run, the innermost first."""
  frame: FrameType | None = sys._getframe(1)
  while frame is not None:
    if isinstance(frame.f_locals.get('self'), Configurable):
      yield frame
    frame = frame.f_back


def _handles_arrays(frame: FrameType) -> bool:
  module = str(frame.f_globals.get('__name__', ''))
  return not _ARRAY_LIBRARIES.isdisjoint((module, module.partition('.')[0]))


def _is_array(value: object) -> bool:
  return isinstance(value, jax.Array | np.ndarray)
