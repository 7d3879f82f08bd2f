"""The operations that graphs are drawn of."""

from __future__ import annotations

import math
from collections.abc import Callable

from tools.graphs.drawing import Graph, NotDrawn, Operation
from tools.graphs.programs import Line

FAMILIES: dict[str, tuple[float, Callable[[Graph], Operation]]] = {}
_Draw = Callable[[Graph], Operation]


def _family(weight: float = 1.0, smooth: bool = False) -> Callable[[_Draw], _Draw]:
  """Registers a family with its weight; those whose results are no integers are for smooth programs only."""

  def register(draw: _Draw) -> _Draw:
    def checked(g: Graph) -> Operation:
      if smooth and g.is_exact:
        raise NotDrawn
      return draw(g)

    FAMILIES[draw.__name__.strip('_')] = weight, checked
    return draw

  return register


def _letters(g: Graph, n: int, used: str = '') -> str:
  rest = [c for c in 'abcdefghijklmnop' if c not in used]
  return ''.join(rest[i] for i in g.rng.permutation(len(rest))[:n])


def _shuffled(g: Graph, text: str) -> str:
  return ''.join(text[i] for i in g.rng.permutation(len(text)))


# ---------------------------------------------------------------- products


@_family(5)
def _einsum(g: Graph) -> Operation:
  """A product of any rank: some dimensions of both are multiplied, some summed over."""
  x = g.pick(1, 4)
  left = _letters(g, len(x.shape))
  sizes = dict(zip(left, x.shape))
  kinds = {c: g.one('batch', 'sum', 'sum', 'left', 'left') for c in left}
  new = _letters(g, g.one(0, 1, 1, 2), left)
  sizes |= {c: g.size() for c in new}
  right = _shuffled(g, ''.join(c for c in left if kinds[c] != 'left') + new)
  out = _shuffled(g, ''.join(c for c in left if kinds[c] != 'sum') + new)
  y = g.pick(shape=[sizes[c] for c in right]) if right else g.array(())
  summed = math.prod(sizes[c] for c in left if kinds[c] == 'sum')
  return Operation(f"jnp.einsum('{left},{right}->{out}', {x.name}, {y.name})", g.bound(x) * g.bound(y) * summed)


@_family(2)
def _einsum_with_itself(g: Graph) -> Operation:
  x = g.pick(2, 4)
  left = _letters(g, len(x.shape))
  i = g.axis(x)
  new = _letters(g, 1, left)
  right = left[:i] + new + left[i + 1 :]
  summed = [c for c in left if c != left[i] and g.chance(0.5)]
  out = _shuffled(g, ''.join(c for c in left + new if c not in summed))
  n = math.prod(x.shape[left.index(c)] for c in summed)
  return Operation(f"jnp.einsum('{left},{right}->{out}', {x.name}, {x.name})", g.bound(x) ** 2 * n)


@_family(1)
def _three_products(g: Graph) -> Operation:
  x = g.pick(2, 3)
  B, d = g.size(), x.shape[-1]
  y, z = g.array((d, B)), g.array((B, g.size()))
  return Operation(f'small(small({x.name} @ {y.name}) @ {z.name})', 5.0, (f'small({x.name} @ {y.name})',), size=2)


@_family(1.5)
def _heads(g: Graph) -> Operation:
  """A projection to heads, by a reshape of a product or of its weight; parts of axes split heads and their dims."""
  x = g.pick(2, 3)
  n, h = g.one(2, 3, 4, 6), g.one(2, 3, 4)
  w = g.array((x.shape[-1], n * h))
  shape = (*x.shape[:-1], n, h)
  texts = (
    f'({x.name} @ {w.name}).reshape({shape})',
    f"jnp.einsum('...d,dnh->...nh', {x.name}, {w.name}.reshape({(x.shape[-1], n, h)}))",
    f'jnp.moveaxis(({x.name} @ {w.name}).reshape({shape}), -2, 0)',
  )
  return Operation(g.one(*texts), g.bound(x) * g.bound(w) * x.shape[-1])


@_family(1.2, smooth=True)
def _attention(g: Graph) -> Operation:
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
  return Operation(f'({attended} @ {o.name}) / {n * h}', 20.0, (attended, logits, q_text), size=8)


@_family(1)
def _ragged_product(g: Graph) -> Operation:
  x = g.pick(2, 2)
  groups = g.one(1, 2, 3, 4)
  w, ids = g.array((groups, x.shape[1], g.size())), g.ids((x.shape[0],), groups)
  text = f'lax.ragged_dot({x.name}, {w.name}, jnp.bincount({ids.name}, length={groups}).astype(jnp.int32))'
  return Operation(text, g.bound(x) * g.bound(w) * x.shape[1], size=2)


@_family(1)
def _outer(g: Graph) -> Operation:
  x, y = g.pick(1, 2), g.pick(1, 2)
  text = g.one(f'jnp.outer({x.name}, {y.name})', f'jnp.kron({x.name}, {y.name})', f'jnp.inner({x.name}, {x.name})')
  return Operation(text, g.bound(x) * g.bound(x, y) * x.shape[-1])


@_family(1)
def _bfloat16_product(g: Graph) -> Operation:
  x = g.pick(2, 3)
  w = g.array((x.shape[-1], g.size()))
  cast = f'small({x.name}).astype(jnp.bfloat16)'
  text = f"jnp.einsum('...d,df->...f', {cast}, {w.name}.astype(jnp.bfloat16), preferred_element_type={w.name}.dtype)"
  if not g.is_exact:
    raise NotDrawn
  return Operation(text, 4 * 3 * x.shape[-1], size=2)


# ---------------------------------------------------------------- images


def _as_image(g: Graph, spatial: int) -> tuple[str, Line, tuple[int, ...]]:
  """A value as rows, channels and pixels, in the text of a reshape where it has another rank."""
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
def _convolution(g: Graph) -> Operation:
  """With groups of channels or of rows, strides, dilations of both, padding with crops, and dimensions in any order."""
  spatial = g.one(1, 1, 2, 2)
  text, x, shape = _as_image(g, spatial)
  names = 'HW'[:spatial]
  lhs = _shuffled(g, 'NC' + names)
  rhs, out = _shuffled(g, 'IO' + names), _shuffled(g, 'NC' + names)
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
  return Operation(call, g.bound(x) * 3 * math.prod(window.values()) * (channels // features))


@_family(1)
def _transposed_convolution(g: Graph) -> Operation:
  text, x, shape = _as_image(g, 1)
  w = g.array((g.one(1, 2, 3), shape[-1], g.one(1, 2, 3, 4)))
  stride, padding = (g.one(1, 2, 3),), g.one('SAME', 'VALID')
  call = f"lax.conv_transpose({text}, {w.name}, {stride}, '{padding}', dimension_numbers=('NHC', 'HIO', 'NHC'))"
  return Operation(call, g.bound(x) * 9 * shape[-1])


@_family(2.5)
def _windows(g: Graph) -> Operation:
  x = g.pick(1, 4)
  window = tuple(g.one(1, 1, 2, 3) for _ in x.shape)
  strides = tuple(g.one(1, 1, 2) for _ in x.shape)
  form = g.one('add', 'max', 'min', 'pool')
  if form == 'pool':
    padding = g.one('SAME', 'VALID')
    text = f"lax.reduce_window({x.name}, -jnp.inf, lax.max, {window}, {strides}, '{padding}')"
    return Operation(text, g.bound(x))
  first = {'add': '0.', 'max': '-jnp.inf', 'min': 'jnp.inf'}[form]
  padding = repr([(g.one(0, 0, min(1, k - 1)), g.one(0, min(1, k - 1))) for k in window])
  dilation = '' if form != 'add' or g.chance(0.7) else f', window_dilation={tuple(g.one(1, 2) for _ in window)}'
  call = f'lax.reduce_window({x.name}, {first}, lax.{form}, {window}, {strides}, {padding}{dilation})'
  return Operation(call, g.bound(x) * (math.prod(window) if form == 'add' else 1))


@_family(2)
def _pad(g: Graph) -> Operation:
  x = g.pick(1, 4)
  config = [(g.one(-1, 0, 0, 1, 2), g.one(-1, 0, 0, 1, 3), g.one(0, 0, 0, 1, 2)) for _ in x.shape]
  return Operation(f'lax.pad({x.name}, jnp.zeros((), {x.name}.dtype), {config})', g.bound(x))


@_family(1)
def _pad_by_mode(g: Graph) -> Operation:
  x = g.pick(1, 3)
  widths = [(g.one(0, 1, 2), g.one(0, 1)) for _ in x.shape]
  return Operation(f"jnp.pad({x.name}, {widths}, mode='{g.one('edge', 'reflect', 'wrap', 'symmetric')}')", g.bound(x))


# ---------------------------------------------------------------- lookups


@_family(3)
def _take(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  shape = [g.size() for _ in range(g.one(0, 1, 1, 2))]
  ids = g.ids(shape, x.shape[axis] + g.one(0, 0, 0, 2))
  mode = g.one('clip', 'wrap') if g.chance(0.7) else 'fill'
  fill = ', fill_value=0' if mode == 'fill' else ''
  return Operation(f"jnp.take({x.name}, {ids.name}, axis={axis}, mode='{mode}'{fill})", g.bound(x))


@_family(1.5)
def _take_along(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  shape = [*x.shape]
  shape[axis] = g.size()
  ids = g.ids(shape, x.shape[axis])
  return Operation(f'jnp.take_along_axis({x.name}, {ids.name}, axis={axis})', g.bound(x))


@_family(1.5)
def _index_of_several_dims(g: Graph) -> Operation:
  x = g.pick(2, 4)
  n = g.size()
  dims = [i for i in range(len(x.shape)) if g.chance(0.6)] or [0]
  ids = {i: g.ids((n,), x.shape[i]) for i in dims}
  index = ', '.join(ids[i].name if i in ids else ':' for i in range(len(x.shape)))
  return Operation(f'{x.name}[{index}]', g.bound(x))


@_family(3)
def _scatter(g: Graph) -> Operation:
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
  return Operation(f'{x.name}.at[{index}].{form}({updates.name}{extra})', bound)


@_family(1.5)
def _scatter_points(g: Graph) -> Operation:
  x = g.pick(2, 3)
  n = g.size()
  ids = [g.ids((n,), size) for size in x.shape[:2]]
  shape = (n, *x.shape[2:])
  updates = g.pick(shape=shape)
  return Operation(f'{x.name}.at[{ids[0].name}, {ids[1].name}].add({updates.name})', g.bound(x) + n * g.bound(updates))


@_family(2)
def _dynamic_slice(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  n = int(g.rng.integers(1, x.shape[axis] + 1))
  at = g.ids((), x.shape[axis] + 1)
  return Operation(f'lax.dynamic_slice_in_dim({x.name}, {at.name}, {n}, {axis})', g.bound(x))


@_family(2)
def _dynamic_update_slice(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  shape = [*x.shape]
  shape[axis] = int(g.rng.integers(1, x.shape[axis] + 1))
  at, y = g.ids((), x.shape[axis] + 1), g.pick(shape=shape)
  return Operation(f'lax.dynamic_update_slice_in_dim({x.name}, {y.name}, {at.name}, {axis})', g.bound(x, y))


@_family(1.5)
def _slices_by_row(g: Graph) -> Operation:
  x = g.pick(2, 3)
  n = int(g.rng.integers(1, x.shape[1] + 1))
  ids = g.ids((x.shape[0],), x.shape[1] + 1)
  if g.chance(0.5):
    text = f'jax.vmap(lambda a, i: lax.dynamic_slice_in_dim(a, i, {n}, 0))({x.name}, {ids.name})'
    return Operation(text, g.bound(x))
  y = g.pick(shape=(x.shape[0], n, *x.shape[2:]))
  text = f'jax.vmap(lambda a, u, i: lax.dynamic_update_slice_in_dim(a, u, i, 0))({x.name}, {y.name}, {ids.name})'
  return Operation(text, g.bound(x, y))


@_family(1)
def _segments(g: Graph) -> Operation:
  x = g.pick(1, 3)
  n = g.one(1, 2, 3, 5, 8)
  ids = g.ids((x.shape[0],), n)
  form = g.one('sum', 'sum', 'max')
  text = f'jax.ops.segment_{form}({x.name}, {ids.name}, num_segments={n})'
  if form == 'max':
    text = f'jnp.clip({text}, -100, 100)'
  return Operation(text, g.bound(x) * x.shape[0] if form == 'sum' else 100.0)


@_family(1)
def _one_hot(g: Graph) -> Operation:
  x = g.pick(1, 2)
  n = g.one(2, 3, 5, 8)
  ids = g.ids((g.size(), x.shape[0]), n)
  return Operation(f'jnp.einsum("btn,t...->bn...", jax.nn.one_hot({ids.name}, {n}, dtype={x.name}.dtype), {x.name})',
                   g.bound(x) * x.shape[0], size=2)  # fmt: skip


# ---------------------------------------------------------------- order


@_family(2)
def _sort(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  if g.is_exact:  # What a sort does with equals is determined, and so is its gradient.
    text = f'jnp.sort({x.name}, axis={axis}, stable=True, descending={g.chance(0.3)})'
  else:
    text = f'jnp.sort({x.name}, axis={axis})'
  return Operation(text, g.bound(x))


@_family(1)
def _sort_by_keys(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  keys = g.ids(x.shape, 4)
  return Operation(f'lax.sort(({keys.name}, {x.name}), dimension={axis}, num_keys=1, is_stable=True)[1]', g.bound(x))


@_family(1)
def _sort_rows(g: Graph) -> Operation:
  x = g.pick(2, 3)
  order = f'jnp.argsort({x.name}[(slice(None),) + (0,) * {len(x.shape) - 1}], stable=True)'
  return Operation(f'{x.name}[{order}]', g.bound(x), size=2)


@_family(1)
def _top_k(g: Graph) -> Operation:
  x = g.pick(1, 3)
  return Operation(f'lax.top_k({x.name}, {g.rng.integers(1, x.shape[-1] + 1)})[0]', g.bound(x))


@_family(0.7)
def _ranks(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  form = g.one('jnp.argsort({x}, axis={a}, stable=True)', 'jnp.argmax({x}, axis={a})', 'jnp.argmin({x}, axis={a})')
  text = form.format(x=x.name, a=axis)
  return Operation(f'{text}.astype({x.name}.dtype)', float(x.shape[axis]))


@_family(0.7)
def _searches(g: Graph) -> Operation:
  x, y = g.pick(1, 1), g.pick(1, 2)
  text = g.one(
    f'jnp.searchsorted(jnp.sort({x.name}), {y.name})',
    f'jnp.histogram({y.name}, bins=jnp.arange(-4, 5))[0]',
    f'jnp.nonzero({x.name}, size={x.shape[0]}, fill_value=0)[0]',
    f'jnp.unique({x.name}.astype(jnp.int32), size={x.shape[0]}, fill_value=0)',
    f'jnp.bincount(jnp.abs({x.name}).astype(jnp.int32), length=6)',
  )
  return Operation(f'{text}.astype({x.name}.dtype)', 24.0)


# ---------------------------------------------------------------- along a dimension


@_family(2)
def _cumulative(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis, reverse = g.axis(x), g.chance(0.3)
  form = g.one('cumsum', 'cumsum', 'cummax', 'cummin', 'scan')
  if form == 'scan':
    text = f'lax.associative_scan(jnp.add, {x.name}, axis={axis}, reverse={reverse})'
  else:
    text = f'lax.{form}({x.name}, axis={axis}, reverse={reverse})'
  return Operation(text, g.bound(x) * (x.shape[axis] if form in ('cumsum', 'scan') else 1))


@_family(3)
def _reduction(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axes = tuple(i for i in range(len(x.shape)) if g.chance(0.5)) or (0,)
  form = g.one('sum', 'sum', 'max', 'min', 'any')
  keep = g.chance(0.4)
  text = f'jnp.{form}({x.name}, axis={axes}, keepdims={keep})'
  if form == 'any':
    text = f'jnp.any({x.name} > 0, axis={axes}, keepdims={keep}).astype({x.name}.dtype)'
  n = math.prod(x.shape[i] for i in axes)
  return Operation(text, g.bound(x) * n if form == 'sum' else g.bound(x))


@_family(1.5)
def _concatenate(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  shape = [*x.shape]
  shape[axis] = g.size()
  y = g.pick(shape=shape)
  return Operation(f'jnp.concatenate([{x.name}, {y.name}, {x.name}][:{g.one(2, 3)}], axis={axis})', g.bound(x, y))


@_family(1)
def _stack(g: Graph) -> Operation:
  x = g.pick(0, 3)
  y = g.pick(shape=x.shape)
  return Operation(f'jnp.stack([{x.name}, {y.name}], axis={g.rng.integers(len(x.shape) + 1)})', g.bound(x, y))


@_family(2)
def _slice(g: Graph) -> Operation:
  x = g.pick(1, 4)
  index = []
  for n in x.shape:
    start = int(g.rng.integers(0, n))
    index.append(g.one(':', f'{start}:', f'{start}::2', f':{start + 1}', '::-1', f'::{g.one(2, 3)}'))
  return Operation(f'{x.name}[{", ".join(index)}]', g.bound(x))


@_family(1.5)
def _roll(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  shift = str(g.one(-2, 1, 3)) if g.chance(0.6) else g.ids((), 5).name
  return Operation(f'jnp.roll({x.name}, {shift}, axis={axis})', g.bound(x))


@_family(1.5)
def _tile(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  text = g.one(
    f'jnp.repeat({x.name}, {g.one(2, 3)}, axis={axis})',
    f'jnp.tile({x.name}, {tuple(g.one(1, 1, 2, 3) for _ in x.shape)})',
    f'jnp.broadcast_to({x.name}[None], {(g.one(2, 3, 4), *x.shape)})',
    f'jnp.resize({x.name}, {(g.size(), g.size())})',
  )
  return Operation(text, g.bound(x))


@_family(4)
def _reshape(g: Graph) -> Operation:
  """Dimensions are split and joined, and with them axes; parts of an axis are left on some."""
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
  return Operation(f'{x.name}.reshape({tuple(shape)})', g.bound(x))


@_family(1.5)
def _transpose(g: Graph) -> Operation:
  x = g.pick(2, 5)
  order = tuple(int(i) for i in g.rng.permutation(len(x.shape)))
  return Operation(f'jnp.transpose({x.name}, {order})', g.bound(x))


@_family(1)
def _diagonals(g: Graph) -> Operation:
  x = g.pick(2, 3)
  text = g.one(
    f'jnp.diagonal({x.name}, offset={g.one(-1, 0, 1)})',
    f'jnp.trace({x.name})',
    f'jnp.tril({x.name}, {g.one(-1, 0, 1)})',
    f'jnp.diag({x.name}.reshape(-1)[:8])',
    f'jnp.rot90({x.name})',
  )
  return Operation(text, g.bound(x) * (x.shape[0] if 'trace' in text else 1))


# ---------------------------------------------------------------- entry by entry


@_family(3)
def _binary(g: Graph) -> Operation:
  x = g.pick(1, 4)
  y = g.pick(shape=x.shape) if g.chance(0.6) else g.array([n if g.chance(0.6) else 1 for n in x.shape])
  form = g.one('{x} + {y}', '{x} * {y}', '{x} - {y}', 'jnp.maximum({x}, {y})', 'jnp.where({y} > 0, {x}, 0)')
  bound = g.bound(x) * g.bound(y) if '*' in form else g.bound(x) + g.bound(y)
  return Operation(f'({form.format(x=x.name, y=y.name)})', bound)


@_family(1.5)
def _unary(g: Graph) -> Operation:
  x = g.pick(0, 4)
  forms = ['jnp.abs({x})', 'jax.nn.relu({x})', '-{x}', 'jnp.clip({x}, -2, 2)', 'small({x})', 'jnp.sign({x})']
  if not g.is_exact:
    forms += ['jnp.sin({x})', 'jax.nn.sigmoid({x})', 'jax.nn.gelu({x})', 'jnp.exp(-jnp.abs({x}))']
  return Operation(f'({g.one(*forms).format(x=x.name)})', g.bound(x))


@_family(1)
def _iota(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  n = g.rng.integers(0, x.shape[axis] + 1)
  text = f'jnp.where(lax.broadcasted_iota(jnp.int32, {x.shape}, {axis}) < {n}, {x.name}, 1)'
  return Operation(text, g.bound(x))


@_family(1)
def _random(g: Graph) -> Operation:
  x = g.pick(1, 3)
  return Operation(
    f'jnp.where(jax.random.bernoulli(jax.random.key({g.rng.integers(99)}), 0.5, {x.shape}), {x.name}, 0)', g.bound(x)
  )


@_family(1)
def _integers(g: Graph) -> Operation:
  x = g.pick(1, 3)
  form = g.one(
    '({x}.astype(jnp.int32) % 7)', '({x}.astype(jnp.int32) ^ 5)', '({x}.astype(jnp.int32) << 1)',
    'jnp.cumsum({x}.astype(jnp.int32), axis=0)', 'jnp.flip({x}.astype(jnp.int32), 0)',
    '({x}.astype(jnp.int32) @ {x}.astype(jnp.int32).T)',
  )  # fmt: skip
  text = form.format(x=x.name)
  return Operation(f'({text} % 5).astype({x.name}.dtype)', 4.0)


@_family(0.7)
def _bfloat16(g: Graph) -> Operation:
  x = g.pick(1, 3)
  if not g.is_exact:
    raise NotDrawn
  cast = f'small({x.name}).astype(jnp.bfloat16)'
  axis = g.axis(x)
  form = g.one('jnp.sum({c}, axis={a})', 'jnp.flip({c}, {a})', 'jnp.concatenate([{c}, {c}], {a})', 'jnp.max({c}, {a})')
  return Operation(f'{form.format(c=cast, a=axis)}.astype({x.name}.dtype)', 4.0 * x.shape[axis], size=2)


# ---------------------------------------------------------------- real numbers


@_family(1, smooth=True)
def _normalize(g: Graph) -> Operation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  form = g.one(
    'jax.nn.softmax({x}, axis={a})', 'jax.nn.log_softmax({x}, axis={a})', 'jax.nn.logsumexp({x}, axis={a})',
    '(({x} - {x}.mean({a}, keepdims=True)) / jnp.sqrt({x}.var({a}, keepdims=True) + 1))',
    'jnp.cumsum({x}, {a}) / 4', 'lax.cumlogsumexp({x}, axis={a})', 'jnp.cumprod(1 + {x} / 10, {a})',
  )  # fmt: skip
  return Operation(form.format(x=x.name, a=axis), 20.0)


@_family(1.5, smooth=True)
def _fourier(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = -1 if g.chance(0.9) else g.axis(x)  # Of others, XLA transposes, which its CPU does not take everywhere.
  forms = [
    'jnp.real(jnp.fft.fft({x}, axis={a}))', 'jnp.imag(jnp.fft.fft({x}, axis={a}))',
    'jnp.abs(jnp.fft.rfft({x}, axis={a}) + 9)',
    'jnp.real(jnp.fft.ifft(jnp.fft.fft({x}, axis={a}) * 1j, axis={a}))', 'jnp.fft.irfft({x} + 0j, n={n}, axis={a})',
    'jnp.real(jnp.fft.rfft({x}, axis={a}))', 'jnp.imag(jnp.fft.rfft({x}, axis={a}))',
  ]  # fmt: skip
  if len(x.shape) > 1:
    forms += ['jnp.real(jnp.fft.fft2({x}))', 'jnp.real(jnp.fft.rfftn({x}))']
  return Operation(f'{g.one(*forms).format(x=x.name, a=axis, n=g.size())}', 1000.0)


@_family(1.5, smooth=True)
def _library(g: Graph) -> Operation:
  """Calls of LAPACK, of well-conditioned matrices."""
  x = g.pick(2, 3)
  n = x.shape[-1]
  if n > 8:
    raise NotDrawn
  squared = f"jnp.einsum('...ij,...ik->...jk', small({x.name}), small({x.name})) / {x.shape[-2]}"
  spd = f'({squared} + 2 * jnp.eye({n}, dtype={x.name}.dtype))'
  b = g.array((*x.shape[:-2], n, g.one(1, 2, 3)))
  text = g.one(
    f'jnp.linalg.cholesky({spd})', f'jnp.linalg.solve({spd}, {b.name})', f'jnp.linalg.inv({spd})',
    f'jnp.linalg.det({spd} / 2)', f'jnp.linalg.slogdet({spd})[1]', f'jnp.linalg.eigvalsh({spd})',
    f"jnp.linalg.qr({spd}, mode='r')", f'jax.scipy.linalg.solve_triangular({spd}, {b.name}, lower=True)',
    f'jax.scipy.linalg.expm({spd} / 9)' if len(x.shape) == 2 else f'jnp.linalg.cholesky({spd})',
    f'jnp.linalg.svd({spd}, compute_uv=False)', f'jnp.linalg.norm({spd}, axis=-1)',
  )  # fmt: skip
  return Operation(text, 1000.0, (spd,), size=2)


@_family(0.7, smooth=True)
def _quantiles(g: Graph) -> Operation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  form = g.one('jnp.median({x}, axis={a})', 'jnp.quantile({x}, jnp.asarray([0.3, 0.8], {x}.dtype), axis={a})')
  return Operation(form.format(x=x.name, a=axis), g.bound(x), size=2)


# ---------------------------------------------------------------- around others


def _inner(g: Graph, x: Line, rank: int, name: str) -> tuple[str, float]:
  """An expression of one array, of this rank, under another name; of its own shape or not."""
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
def _region(g: Graph) -> Operation:
  """A few operations under remat, vmap, scan, map, cond, switch or a loop."""
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
  return Operation(texts[form], bound * 8, size=2)


@_family(0.8)
def _vmapped_lookup(g: Graph) -> Operation:
  x = g.pick(2, 3)
  ids = g.ids((x.shape[0], g.size()), x.shape[1])
  return Operation(f"jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode='clip'))({x.name}, {ids.name})", g.bound(x))


@_family(0.8)
def _vmapped_product(g: Graph) -> Operation:
  x = g.pick(3, 3)
  w = g.array((x.shape[g.one(0, 1)], x.shape[2], g.size()))
  axis = g.one(0, 1)
  out = g.one(0, 1, 2)
  text = f'jax.vmap(lambda a, b: a @ b, in_axes=({axis}, 0), out_axes={out})({x.name}, {w.name})'
  return Operation(text, g.bound(x) * 3 * x.shape[2])


@_family(0.8)
def _moe(g: Graph) -> Operation:
  """Dispatch of tokens to experts by ids, and back."""
  x = g.pick(2, 2)
  E, C, F = g.one(2, 3, 4), g.one(2, 3), g.size()
  ids = g.ids((x.shape[0],), E)
  w = g.array((E, x.shape[1], F))
  hot = f'jax.nn.one_hot({ids.name}, {E}, dtype={x.name}.dtype)'
  place = f'((jnp.cumsum({hot}, 0) - 1) * {hot}).sum(1).astype(jnp.int32)'
  mask = f'jnp.einsum("te,tc->tec", {hot}, jax.nn.one_hot({place}, {C}, dtype={x.name}.dtype))'
  inputs = f'jnp.einsum("tec,td->ecd", {mask}, {x.name})'
  hidden = f'small(jnp.einsum("ecd,edf->ecf", {inputs}, {w.name}))'
  return Operation(f'jnp.einsum("tec,ecf->tf", {mask}, {hidden})', 200.0, (hidden, inputs, mask), size=7)


@_family(0.5, smooth=True)
def _loss(g: Graph) -> Operation:
  x = g.pick(2, 3)
  labels = g.ids(x.shape[:-1], x.shape[-1])
  logp = f'jax.nn.log_softmax({x.name})'
  return Operation(f'-jnp.take_along_axis({logp}, {labels.name}[..., None], axis=-1)[..., 0]', 30.0, size=2)
