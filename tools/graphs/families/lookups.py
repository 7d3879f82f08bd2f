"""Gathers, scatters, and slices whose starts are values of an array."""

from __future__ import annotations

import functools

from tools.graphs.drawing import DrawnOperation, Graph
from tools.graphs.families.register import Families, family

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


@_family(3)
def _take(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  shape = [g.size() for _ in range(g.one(0, 1, 1, 2))]
  ids = g.ids(shape, x.shape[axis] + g.one(0, 0, 0, 2))
  mode = g.one('clip', 'wrap') if g.chance(0.7) else 'fill'
  fill = ', fill_value=0' if mode == 'fill' else ''
  return DrawnOperation(f"jnp.take({x.name}, {ids.name}, axis={axis}, mode='{mode}'{fill})", g.bound(x))


@_family(1.5)
def _take_along(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  shape = [*x.shape]
  shape[axis] = g.size()
  ids = g.ids(shape, x.shape[axis])
  return DrawnOperation(f'jnp.take_along_axis({x.name}, {ids.name}, axis={axis})', g.bound(x))


@_family(1.5)
def _index_of_several_dims(g: Graph) -> DrawnOperation:
  x = g.pick(2, 4)
  n = g.size()
  dims = [i for i in range(len(x.shape)) if g.chance(0.6)] or [0]
  ids = {i: g.ids((n,), x.shape[i]) for i in dims}
  index = ', '.join(ids[i].name if i in ids else ':' for i in range(len(x.shape)))
  return DrawnOperation(f'{x.name}[{index}]', g.bound(x))


@_family(3)
def _scatter(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  form = g.one('add', 'add', 'max', 'min', 'set', 'mul')
  n = min(g.size(), x.shape[axis]) if form in ('set', 'mul') else g.size()
  if form in ('set', 'mul'):
    ids = g.array((n,), f'unique({x.shape[axis]}, {n})')
  else:
    ids = g.ids((n,), x.shape[axis])
  shape = [*x.shape]
  shape[axis] = n
  updates = g.pick(shape=shape)
  index = ', '.join(ids.name if i == axis else ':' for i in range(len(x.shape)))
  bound = g.bound(x, updates) * (g.bound(x, updates) if form == 'mul' else n + 1)
  extra = ', unique_indices=True' if form in ('set', 'mul') and g.chance(0.5) else ''
  return DrawnOperation(f'{x.name}.at[{index}].{form}({updates.name}{extra})', bound)


@_family(1.5)
def _scatter_points(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  n = g.size()
  ids = [g.ids((n,), size) for size in x.shape[:2]]
  shape = (n, *x.shape[2:])
  updates = g.pick(shape=shape)
  return DrawnOperation(
    f'{x.name}.at[{ids[0].name}, {ids[1].name}].add({updates.name})', g.bound(x) + n * g.bound(updates)
  )


@_family(2)
def _dynamic_slice(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  n = int(g.rng.integers(1, x.shape[axis] + 1))
  at = g.ids((), x.shape[axis] + 1)
  return DrawnOperation(f'lax.dynamic_slice_in_dim({x.name}, {at.name}, {n}, {axis})', g.bound(x))


@_family(2)
def _dynamic_update_slice(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  shape = [*x.shape]
  shape[axis] = int(g.rng.integers(1, x.shape[axis] + 1))
  at, y = g.ids((), x.shape[axis] + 1), g.pick(shape=shape)
  return DrawnOperation(f'lax.dynamic_update_slice_in_dim({x.name}, {y.name}, {at.name}, {axis})', g.bound(x, y))


@_family(1.5)
def _slices_by_row(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  n = int(g.rng.integers(1, x.shape[1] + 1))
  ids = g.ids((x.shape[0],), x.shape[1] + 1)
  if g.chance(0.5):
    text = f'jax.vmap(lambda a, i: lax.dynamic_slice_in_dim(a, i, {n}, 0))({x.name}, {ids.name})'
    return DrawnOperation(text, g.bound(x))
  y = g.pick(shape=(x.shape[0], n, *x.shape[2:]))
  text = f'jax.vmap(lambda a, u, i: lax.dynamic_update_slice_in_dim(a, u, i, 0))({x.name}, {y.name}, {ids.name})'
  return DrawnOperation(text, g.bound(x, y))


@_family(1)
def _segments(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  n = g.one(1, 2, 3, 5, 8)
  ids = g.ids((x.shape[0],), n)
  form = g.one('sum', 'sum', 'max')
  text = f'jax.ops.segment_{form}({x.name}, {ids.name}, num_segments={n})'
  if form == 'max':
    text = f'jnp.clip({text}, -100, 100)'
  return DrawnOperation(text, g.bound(x) * x.shape[0] if form == 'sum' else 100.0)


@_family(1)
def _one_hot(g: Graph) -> DrawnOperation:
  x = g.pick(1, 2)
  n = g.one(2, 3, 5, 8)
  ids = g.ids((g.size(), x.shape[0]), n)
  one_hot = f'jax.nn.one_hot({ids.name}, {n}, dtype={x.name}.dtype)'
  return DrawnOperation(f'jnp.einsum("btn,t...->bn...", {one_hot}, {x.name})', g.bound(x) * x.shape[0], size=2)
