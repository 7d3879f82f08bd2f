"""Operations that contain others, and combinations of operations that layers use."""

from __future__ import annotations

import functools

from tools.graphs.drawing import DrawnOperation, Graph
from tools.graphs.families.register import Families, family
from tools.graphs.programs import Line

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


def _inner(g: Graph, x: Line, rank: int, name: str) -> tuple[str, float]:
  """Draws an expression of the array `name`, which has this rank. Returns its text and its bound."""
  axis = int(g.rng.integers(rank))
  w = g.array((x.shape[-1], x.shape[-1]))
  forms = [
    f'small({name} @ {w.name})', f'jnp.roll({name}, 1, axis={axis})', f'{name}[::-1]',
    f'jnp.cumsum(small({name}), axis={axis})',
    f'jnp.sort({name}, axis={axis}, stable=True)', f'small({name} + {name}.sum({axis}, keepdims=True))',
    f'lax.pad({name}, jnp.zeros((), {name}.dtype), [(1, -1, 0)] + [(0, 0, 0)] * {rank - 1})',
    f'jnp.maximum({name}, 0)',
  ]  # fmt: skip
  return g.one(*forms), max(g.bound(x) * 4, 60.0)


@_family(2)
def _region(g: Graph) -> DrawnOperation:
  """Draws a few operations inside remat, vmap, scan, map, cond, switch or a loop."""
  x = g.pick(2, 3)
  rank = len(x.shape)
  form = g.one('remat', 'vmap', 'scan', 'scan rows', 'map', 'cond', 'switch', 'loop', 'jit', 'while')
  by_row = form in ('vmap', 'scan rows', 'map')
  inner, bound = _inner(g, x, rank - by_row, 'a')
  second, _ = _inner(g, x, rank - by_row, f'({inner})')
  body = second if g.chance(0.6) else inner
  zeros = f'jnp.zeros({x.shape[1:]}, {x.name}.dtype)'
  steps = f'jnp.arange(1, 4).astype({x.name}.dtype)'
  in_loop = body.replace('a', 'c[1]') if body == 'a[::-1]' else '-c[1]'
  first = f'(0, lax.stop_gradient({x.name}))'
  branches = f'[lambda a: {body}, lambda a: -a, lambda a: a + 1]'
  texts = {
    'remat': f'jax.checkpoint(lambda a: {body})({x.name})',
    'jit': f'jax.jit(lambda a: {body})({x.name})',
    'vmap': f'jax.vmap(lambda a: {body})({x.name})',
    'map': f'lax.map(lambda a: {body}, {x.name})',
    'scan': f'lax.scan(lambda a, s: (small({body} + s), None), {x.name}, {steps})[0]',
    'scan rows': f'lax.scan(lambda c, a: (small(c + a), c + {body}), {zeros}, {x.name})[1]',
    'cond': f'lax.cond({x.name}.sum() > 0, lambda a: {body}, lambda a: -a, {x.name})',
    'switch': f'lax.switch(jnp.argmax({x.name}.reshape(-1)[:3]), {branches}, {x.name})',
    'loop': f'lax.fori_loop(0, 2, lambda i, a: small({body} + i), {x.name})',
    'while': f'lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, {in_loop}), {first})[1]',
  }
  return DrawnOperation(texts[form], bound * 8, size=2)


@_family(0.8)
def _vmapped_lookup(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  ids = g.ids((x.shape[0], g.size()), x.shape[1])
  return DrawnOperation(f"jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode='clip'))({x.name}, {ids.name})", g.bound(x))


@_family(0.8)
def _vmapped_product(g: Graph) -> DrawnOperation:
  x = g.pick(3, 3)
  w = g.array((x.shape[g.one(0, 1)], x.shape[2], g.size()))
  axis = g.one(0, 1)
  out = g.one(0, 1, 2)
  text = f'jax.vmap(lambda a, b: a @ b, in_axes=({axis}, 0), out_axes={out})({x.name}, {w.name})'
  return DrawnOperation(text, g.bound(x) * 3 * x.shape[2])


@_family(0.8)
def _moe(g: Graph) -> DrawnOperation:
  """Draws the dispatch of tokens to experts by ids, and back."""
  x = g.pick(2, 2)
  E, C, F = g.one(2, 3, 4), g.one(2, 3), g.size()
  ids = g.ids((x.shape[0],), E)
  w = g.array((E, x.shape[1], F))
  hot = f'jax.nn.one_hot({ids.name}, {E}, dtype={x.name}.dtype)'
  place = f'((jnp.cumsum({hot}, 0) - 1) * {hot}).sum(1).astype(jnp.int32)'
  mask = f'jnp.einsum("te,tc->tec", {hot}, jax.nn.one_hot({place}, {C}, dtype={x.name}.dtype))'
  inputs = f'jnp.einsum("tec,td->ecd", {mask}, {x.name})'
  hidden = f'small(jnp.einsum("ecd,edf->ecf", {inputs}, {w.name}))'
  return DrawnOperation(f'jnp.einsum("tec,ecf->tf", {mask}, {hidden})', 200.0, (hidden, inputs, mask), size=7)


@_family(0.5, smooth=True)
def _loss(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  labels = g.ids(x.shape[:-1], x.shape[-1])
  logp = f'jax.nn.log_softmax({x.name})'
  return DrawnOperation(f'-jnp.take_along_axis({logp}, {labels.name}[..., None], axis=-1)[..., 0]', 30.0, size=2)
