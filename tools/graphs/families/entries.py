"""Operations on each entry."""

from __future__ import annotations

import functools

from tools.graphs.drawing import DrawnOperation, Graph, NotDrawn
from tools.graphs.families.register import Families, family

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


@_family(3)
def _binary(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  y = g.pick(shape=x.shape) if g.chance(0.6) else g.array([n if g.chance(0.6) else 1 for n in x.shape])
  form = g.one('{x} + {y}', '{x} * {y}', '{x} - {y}', 'jnp.maximum({x}, {y})', 'jnp.where({y} > 0, {x}, 0)')
  bound = g.bound(x) * g.bound(y) if '*' in form else g.bound(x) + g.bound(y)
  return DrawnOperation(f'({form.format(x=x.name, y=y.name)})', bound)


@_family(1.5)
def _unary(g: Graph) -> DrawnOperation:
  x = g.pick(0, 4)
  forms = ['jnp.abs({x})', 'jax.nn.relu({x})', '-{x}', 'jnp.clip({x}, -2, 2)', 'small({x})', 'jnp.sign({x})']
  if not g.is_exact:
    forms += ['jnp.sin({x})', 'jax.nn.sigmoid({x})', 'jax.nn.gelu({x})', 'jnp.exp(-jnp.abs({x}))']
  return DrawnOperation(f'({g.one(*forms).format(x=x.name)})', g.bound(x))


@_family(1)
def _iota(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  n = g.rng.integers(0, x.shape[axis] + 1)
  text = f'jnp.where(lax.broadcasted_iota(jnp.int32, {x.shape}, {axis}) < {n}, {x.name}, 1)'
  return DrawnOperation(text, g.bound(x))


@_family(1)
def _random(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  return DrawnOperation(
    f'jnp.where(jax.random.bernoulli(jax.random.key({g.rng.integers(99)}), 0.5, {x.shape}), {x.name}, 0)', g.bound(x)
  )


@_family(1)
def _integers(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  form = g.one(
    '({x}.astype(jnp.int32) % 7)', '({x}.astype(jnp.int32) ^ 5)', '({x}.astype(jnp.int32) << 1)',
    'jnp.cumsum({x}.astype(jnp.int32), axis=0)', 'jnp.flip({x}.astype(jnp.int32), 0)',
    '({x}.astype(jnp.int32) @ {x}.astype(jnp.int32).T)',
  )  # fmt: skip
  text = form.format(x=x.name)
  return DrawnOperation(f'({text} % 5).astype({x.name}.dtype)', 4.0)


@_family(0.7)
def _bfloat16(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  if not g.is_exact:
    raise NotDrawn
  cast = f'small({x.name}).astype(jnp.bfloat16)'
  axis = g.axis(x)
  form = g.one('jnp.sum({c}, axis={a})', 'jnp.flip({c}, {a})', 'jnp.concatenate([{c}, {c}], {a})', 'jnp.max({c}, {a})')
  return DrawnOperation(f'{form.format(c=cast, a=axis)}.astype({x.name}.dtype)', 4.0 * x.shape[axis], size=2)
