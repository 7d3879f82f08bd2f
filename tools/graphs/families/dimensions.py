"""Sums, parts and copies along a dimension, and shapes."""

from __future__ import annotations

import functools
import math

from tools.graphs.drawing import DrawnOperation, Graph
from tools.graphs.families.register import Families, family

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


@_family(2)
def _cumulative(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis, reverse = g.axis(x), g.chance(0.3)
  form = g.one('cumsum', 'cumsum', 'cummax', 'cummin', 'scan')
  if form == 'scan':
    text = f'lax.associative_scan(jnp.add, {x.name}, axis={axis}, reverse={reverse})'
  else:
    text = f'lax.{form}({x.name}, axis={axis}, reverse={reverse})'
  return DrawnOperation(text, g.bound(x) * (x.shape[axis] if form in ('cumsum', 'scan') else 1))


@_family(3)
def _reduction(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axes = tuple(i for i in range(len(x.shape)) if g.chance(0.5)) or (0,)
  form = g.one('sum', 'sum', 'max', 'min', 'any')
  keep = g.chance(0.4)
  text = f'jnp.{form}({x.name}, axis={axes}, keepdims={keep})'
  if form == 'any':
    text = f'jnp.any({x.name} > 0, axis={axes}, keepdims={keep}).astype({x.name}.dtype)'
  n = math.prod(x.shape[i] for i in axes)
  return DrawnOperation(text, g.bound(x) * n if form == 'sum' else g.bound(x))


@_family(1.5)
def _concatenate(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  shape = [*x.shape]
  shape[axis] = g.size()
  y = g.pick(shape=shape)
  return DrawnOperation(f'jnp.concatenate([{x.name}, {y.name}, {x.name}][:{g.one(2, 3)}], axis={axis})', g.bound(x, y))


@_family(1)
def _stack(g: Graph) -> DrawnOperation:
  x = g.pick(0, 3)
  y = g.pick(shape=x.shape)
  return DrawnOperation(f'jnp.stack([{x.name}, {y.name}], axis={g.rng.integers(len(x.shape) + 1)})', g.bound(x, y))


@_family(2)
def _slice(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  index = []
  for n in x.shape:
    start = int(g.rng.integers(0, n))
    index.append(g.one(':', f'{start}:', f'{start}::2', f':{start + 1}', '::-1', f'::{g.one(2, 3)}'))
  return DrawnOperation(f'{x.name}[{", ".join(index)}]', g.bound(x))


@_family(1.5)
def _roll(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  shift = str(g.one(-2, 1, 3)) if g.chance(0.6) else g.ids((), 5).name
  return DrawnOperation(f'jnp.roll({x.name}, {shift}, axis={axis})', g.bound(x))


@_family(1.5)
def _tile(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  text = g.one(
    f'jnp.repeat({x.name}, {g.one(2, 3)}, axis={axis})',
    f'jnp.tile({x.name}, {tuple(g.one(1, 1, 2, 3) for _ in x.shape)})',
    f'jnp.broadcast_to({x.name}[None], {(g.one(2, 3, 4), *x.shape)})',
    f'jnp.resize({x.name}, {(g.size(), g.size())})',
  )
  return DrawnOperation(text, g.bound(x))


@_family(4)
def _reshape(g: Graph) -> DrawnOperation:
  """Draws a reshape that splits and joins dimensions and their mesh axes; a dimension may keep only part of an axis."""
  x = g.pick(1, 5)
  n, shape = math.prod(x.shape), []
  for _ in range(g.one(0, 1, 1, 2, 3)):
    divisors = [d for d in range(1, min(n, 16) + 1) if n % d == 0]
    shape.append(int(g.one(*divisors)))
    n //= shape[-1]
  shape.insert(int(g.rng.integers(len(shape) + 1)), n)
  if g.chance(0.5):  # Only one dimension is split, or two are joined.
    shape = [*x.shape]
    i = g.axis(x)
    if g.chance(0.5):
      divisors = [d for d in range(2, shape[i]) if shape[i] % d == 0] or [1]
      d = g.one(*divisors)
      shape[i : i + 1] = [d, shape[i] // d]
    elif i + 1 < len(shape):
      shape[i : i + 2] = [shape[i] * shape[i + 1]]
  return DrawnOperation(f'{x.name}.reshape({tuple(shape)})', g.bound(x))


@_family(1.5)
def _transpose(g: Graph) -> DrawnOperation:
  x = g.pick(2, 5)
  order = tuple(int(i) for i in g.rng.permutation(len(x.shape)))
  return DrawnOperation(f'jnp.transpose({x.name}, {order})', g.bound(x))


@_family(1)
def _diagonals(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  text = g.one(
    f'jnp.diagonal({x.name}, offset={g.one(-1, 0, 1)})',
    f'jnp.trace({x.name})',
    f'jnp.tril({x.name}, {g.one(-1, 0, 1)})',
    f'jnp.diag({x.name}.reshape(-1)[:8])',
    f'jnp.rot90({x.name})',
  )
  return DrawnOperation(text, g.bound(x) * (x.shape[0] if 'trace' in text else 1))
