"""Sorts, and other operations that compare entries.

The sign of a zero may differ between devices, and sorts and top_k place -0 before 0: zeros are made positive first.
"""

from __future__ import annotations

import functools

from tools.graphs.drawing import DrawnOperation, Graph
from tools.graphs.families.register import Families, family
from tools.graphs.programs import Line

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


def _replace_zeros(x: Line) -> str:
  return f'jnp.where({x.name} == 0, 0, {x.name})'


@_family(2)
def _sort(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  if g.is_exact:  # The sort is stable, so equal entries have a determined order and gradient.
    text = f'jnp.sort({_replace_zeros(x)}, axis={axis}, stable=True, descending={g.chance(0.3)})'
  else:
    text = f'jnp.sort({_replace_zeros(x)}, axis={axis})'
  return DrawnOperation(text, g.bound(x))


@_family(1)
def _sort_by_keys(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  keys = g.ids(x.shape, 4)
  return DrawnOperation(
    f'lax.sort(({keys.name}, {x.name}), dimension={axis}, num_keys=1, is_stable=True)[1]', g.bound(x)
  )


@_family(1)
def _sort_rows(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  order = f'jnp.argsort({_replace_zeros(x)}[(slice(None),) + (0,) * {len(x.shape) - 1}], stable=True)'
  return DrawnOperation(f'{x.name}[{order}]', g.bound(x), size=2)


@_family(1)
def _top_k(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  return DrawnOperation(f'lax.top_k({_replace_zeros(x)}, {g.rng.integers(1, x.shape[-1] + 1)})[0]', g.bound(x))


@_family(0.7)
def _ranks(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  form = g.one('jnp.argsort({x}, axis={a}, stable=True)', 'jnp.argmax({x}, axis={a})', 'jnp.argmin({x}, axis={a})')
  text = form.format(x=_replace_zeros(x), a=axis)
  return DrawnOperation(f'{text}.astype({x.name}.dtype)', float(x.shape[axis]))


@_family(0.7)
def _searches(g: Graph) -> DrawnOperation:
  x, y = g.pick(1, 1), g.pick(1, 2)
  text = g.one(
    f'jnp.searchsorted(jnp.sort({x.name}), {y.name})',
    f'jnp.histogram({y.name}, bins=jnp.arange(-4, 5))[0]',
    f'jnp.nonzero({x.name}, size={x.shape[0]}, fill_value=0)[0]',
    f'jnp.unique({x.name}.astype(jnp.int32), size={x.shape[0]}, fill_value=0)',
    f'jnp.bincount(jnp.abs({x.name}).astype(jnp.int32), length=6)',
  )
  return DrawnOperation(f'{text}.astype({x.name}.dtype)', 24.0)
