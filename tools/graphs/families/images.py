"""Convolutions, windows and pads."""

from __future__ import annotations

import functools
import math

from tools.graphs.drawing import DrawnOperation, Graph, NotDrawn
from tools.graphs.families.register import Families, family, shuffle
from tools.graphs.programs import Line

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


def _reshape_to_image(g: Graph, spatial: int) -> tuple[str, Line, tuple[int, ...]]:
  """Returns a value as rows, channels and pixels: the text of a reshape if the value has another rank."""
  x = g.pick(1, 4)
  if len(x.shape) == spatial + 2:
    return x.name, x, x.shape
  n = math.prod(x.shape)
  shape = []
  for _ in range(spatial + 1):
    divisors = [d for d in (1, 2, 3, 4, 5, 6, 8) if n % d == 0]
    shape.append(int(g.one(*divisors)))
    n //= shape[-1]
  shape.append(n)
  shape = [shape[i] for i in g.rng.permutation(len(shape))]
  return f'{x.name}.reshape({tuple(shape)})', x, tuple(shape)


@_family(4)
def _convolution(g: Graph) -> DrawnOperation:
  """Draws groups of channels or of rows, strides, both dilations, negative padding, and dimensions in any order."""
  spatial = g.one(1, 1, 2, 2)
  text, x, shape = _reshape_to_image(g, spatial)
  names = 'HW'[:spatial]
  lhs = shuffle(g, 'NC' + names)
  rhs, out = shuffle(g, 'IO' + names), shuffle(g, 'NC' + names)
  sizes = dict(zip(lhs, shape))
  rows, channels = sizes['N'], sizes['C']
  features = batches = 1
  if g.chance(0.4):
    features = g.one(*[d for d in range(1, channels + 1) if channels % d == 0])
  elif g.chance(0.2):
    batches = g.one(*[d for d in range(1, rows + 1) if rows % d == 0])
  if batches > 4 or channels > 24:
    raise NotDrawn
  filters = features * batches * g.one(1, 2, 3)
  window = {c: g.one(1, 2, 3) for c in names}
  w_sizes = {'I': channels // features, 'O': filters, **window}
  w = g.array([w_sizes[c] for c in rhs])
  padding = g.one("'SAME'", "'VALID'", repr([(g.one(-1, 0, 1, 2), g.one(0, 1, 2)) for _ in names]))
  stride = tuple(g.one(1, 1, 2, 3) for _ in names)
  lhs_dilation = tuple(g.one(1, 1, 1, 2) for _ in names)
  rhs_dilation = tuple(g.one(1, 1, 1, 2) for _ in names)
  call = (
    f'lax.conv_general_dilated({text}, {w.name}, {stride}, {padding}, lhs_dilation={lhs_dilation}, '
    f'rhs_dilation={rhs_dilation}, dimension_numbers={(lhs, rhs, out)}, feature_group_count={features}, '
    f'batch_group_count={batches})'
  )
  return DrawnOperation(call, g.bound(x) * 3 * math.prod(window.values()) * (channels // features))


@_family(1)
def _transposed_convolution(g: Graph) -> DrawnOperation:
  text, x, shape = _reshape_to_image(g, 1)
  w = g.array((g.one(1, 2, 3), shape[-1], g.one(1, 2, 3, 4)))
  stride, padding = (g.one(1, 2, 3),), g.one('SAME', 'VALID')
  call = f"lax.conv_transpose({text}, {w.name}, {stride}, '{padding}', dimension_numbers=('NHC', 'HIO', 'NHC'))"
  return DrawnOperation(call, g.bound(x) * 9 * shape[-1])


@_family(2.5)
def _windows(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  window = tuple(g.one(1, 1, 2, 3) for _ in x.shape)
  strides = tuple(g.one(1, 1, 2) for _ in x.shape)
  form = g.one('add', 'max', 'min', 'pool')
  if form == 'pool':
    padding = g.one('SAME', 'VALID')
    text = f"lax.reduce_window({x.name}, -jnp.inf, lax.max, {window}, {strides}, '{padding}')"
    return DrawnOperation(text, g.bound(x))
  first = {'add': '0.', 'max': '-jnp.inf', 'min': 'jnp.inf'}[form]
  padding = repr([(g.one(0, 0, min(1, k - 1)), g.one(0, min(1, k - 1))) for k in window])
  dilation = '' if form != 'add' or g.chance(0.7) else f', window_dilation={tuple(g.one(1, 2) for _ in window)}'
  call = f'lax.reduce_window({x.name}, {first}, lax.{form}, {window}, {strides}, {padding}{dilation})'
  return DrawnOperation(call, g.bound(x) * (math.prod(window) if form == 'add' else 1))


@_family(2)
def _pad(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  config = [(g.one(-1, 0, 0, 1, 2), g.one(-1, 0, 0, 1, 3), g.one(0, 0, 0, 1, 2)) for _ in x.shape]
  return DrawnOperation(f'lax.pad({x.name}, jnp.zeros((), {x.name}.dtype), {config})', g.bound(x))


@_family(1)
def _pad_by_mode(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  widths = [(g.one(0, 1, 2), g.one(0, 1)) for _ in x.shape]
  return DrawnOperation(
    f"jnp.pad({x.name}, {widths}, mode='{g.one('edge', 'reflect', 'wrap', 'symmetric')}')", g.bound(x)
  )
