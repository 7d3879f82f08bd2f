"""Products of arrays, and operations that consist of products."""

from __future__ import annotations

import functools
import math

from tools.graphs.drawing import DrawnOperation, Graph, NotDrawn
from tools.graphs.families.register import Families, family, letters, shuffle

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


@_family(5)
def _einsum(g: Graph) -> DrawnOperation:
  """Draws a product of two arrays of any rank, with batch dimensions and summed dimensions."""
  x = g.pick(1, 4)
  left = letters(g, len(x.shape))
  sizes = dict(zip(left, x.shape))
  kinds = {c: g.one('batch', 'sum', 'sum', 'left', 'left') for c in left}
  new = letters(g, g.one(0, 1, 1, 2), left)
  sizes |= {c: g.size() for c in new}
  right = shuffle(g, ''.join(c for c in left if kinds[c] != 'left') + new)
  out = shuffle(g, ''.join(c for c in left if kinds[c] != 'sum') + new)
  y = g.pick(shape=[sizes[c] for c in right]) if right else g.array(())
  summed = math.prod(sizes[c] for c in left if kinds[c] == 'sum')
  return DrawnOperation(f"jnp.einsum('{left},{right}->{out}', {x.name}, {y.name})", g.bound(x) * g.bound(y) * summed)


@_family(2)
def _einsum_with_itself(g: Graph) -> DrawnOperation:
  x = g.pick(2, 4)
  left = letters(g, len(x.shape))
  i = g.axis(x)
  new = letters(g, 1, left)
  right = left[:i] + new + left[i + 1 :]
  summed = [c for c in left if c != left[i] and g.chance(0.5)]
  out = shuffle(g, ''.join(c for c in left + new if c not in summed))
  n = math.prod(x.shape[left.index(c)] for c in summed)
  return DrawnOperation(f"jnp.einsum('{left},{right}->{out}', {x.name}, {x.name})", g.bound(x) ** 2 * n)


@_family(1)
def _three_products(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  B, d = g.size(), x.shape[-1]
  y, z = g.array((d, B)), g.array((B, g.size()))
  return DrawnOperation(f'small(small({x.name} @ {y.name}) @ {z.name})', 5.0, (f'small({x.name} @ {y.name})',), size=2)


@_family(1.5)
def _heads(g: Graph) -> DrawnOperation:
  """Draws a projection to heads: a reshape of the product or of the weight divides mesh axes into heads and dims."""
  x = g.pick(2, 3)
  n, h = g.one(2, 3, 4, 6), g.one(2, 3, 4)
  w = g.array((x.shape[-1], n * h))
  shape = (*x.shape[:-1], n, h)
  texts = (
    f'({x.name} @ {w.name}).reshape({shape})',
    f"jnp.einsum('...d,dnh->...nh', {x.name}, {w.name}.reshape({(x.shape[-1], n, h)}))",
    f'jnp.moveaxis(({x.name} @ {w.name}).reshape({shape}), -2, 0)',
  )
  return DrawnOperation(g.one(*texts), g.bound(x) * g.bound(w) * x.shape[-1])


@_family(1.2, smooth=True)
def _attention(g: Graph) -> DrawnOperation:
  x = g.pick(3, 3)
  B, T, D = x.shape
  n, h = g.one(1, 2, 3, 4), g.one(2, 3, 4)
  kv = g.one(*[k for k in (1, 2, 3, 4) if n % k == 0])
  q, k, v, o = g.array((D, n, h)), g.array((D, kv, h)), g.array((D, kv, h)), g.array((n * h, D))
  q_text = f"jnp.einsum('btd,dnh->btnh', {x.name}, {q.name}).reshape({B}, {T}, {kv}, {n // kv}, {h})"
  k_text = f"jnp.einsum('btd,dkh->btkh', {x.name}, {k.name})"
  v_text = f"jnp.einsum('btd,dkh->btkh', {x.name}, {v.name})"
  mask = f'jnp.where(jnp.tril(jnp.ones(({T}, {T}), bool)), 0, -1e9)' if g.chance(0.6) else '0'
  logits = f"jnp.einsum('btkgh,bskh->bkgts', {q_text}, {k_text}) / 4 + {mask}"
  attended = f"jnp.einsum('bkgts,bskh->btkgh', jax.nn.softmax({logits}, -1), {v_text}).reshape({B}, {T}, {n * h})"
  return DrawnOperation(f'({attended} @ {o.name}) / {n * h}', 20.0, (attended, logits, q_text), size=8)


@_family(1)
def _ragged_product(g: Graph) -> DrawnOperation:
  x = g.pick(2, 2)
  groups = g.one(1, 2, 3, 4)
  w, ids = g.array((groups, x.shape[1], g.size())), g.ids((x.shape[0],), groups)
  text = f'lax.ragged_dot({x.name}, {w.name}, jnp.bincount({ids.name}, length={groups}).astype(jnp.int32))'
  return DrawnOperation(text, g.bound(x) * g.bound(w) * x.shape[1], size=2)


@_family(1)
def _outer(g: Graph) -> DrawnOperation:
  x, y = g.pick(1, 2), g.pick(1, 2)
  text = g.one(f'jnp.outer({x.name}, {y.name})', f'jnp.kron({x.name}, {y.name})', f'jnp.inner({x.name}, {x.name})')
  return DrawnOperation(text, g.bound(x) * g.bound(x, y) * x.shape[-1])


@_family(1)
def _bfloat16_product(g: Graph) -> DrawnOperation:
  x = g.pick(2, 3)
  w = g.array((x.shape[-1], g.size()))
  cast = f'small({x.name}).astype(jnp.bfloat16)'
  text = f"jnp.einsum('...d,df->...f', {cast}, {w.name}.astype(jnp.bfloat16), preferred_element_type={w.name}.dtype)"
  if not g.is_exact:
    raise NotDrawn
  return DrawnOperation(text, 4 * 3 * x.shape[-1], size=2)
