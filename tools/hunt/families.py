"""Families of single operations: draws their sizes, and builds the expression in plain JAX.

An expression uses arrays x0, x1, ... A family builds it from sizes, plain integers that can be reduced one by one. For
sizes that give no valid program, the family or JAX raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

SizesByName = Mapping[str, int]


class Operand(NamedTuple):
  """An argument of an expression.

  Attributes:
    shape: its shape.
    values: 'small': integers from -3 to 3, as floats. 'distinct': a permutation of the integers, as floats. 'ids n':
      integers below n. 'unique ids n': the same, each at most once.
  """

  shape: tuple[int, ...]
  values: str = 'small'


class Expression(NamedTuple):
  """The text of an expression, its arrays, and whether it has a gradient."""

  text: str
  arrays: tuple[Operand, ...]
  has_gradient: bool = True


class ExpressionFamily(NamedTuple):
  draw: Callable[[np.random.Generator], dict[str, int]]
  build: Callable[[SizesByName], Expression]


FAMILIES: dict[str, ExpressionFamily] = {}
_Draw = Callable[[np.random.Generator], dict[str, int]]
_Build = Callable[[SizesByName], Expression]


def _family(draw: _Draw) -> Callable[[_Build], _Build]:
  def register(build: _Build) -> _Build:
    FAMILIES[build.__name__.strip('_')] = ExpressionFamily(draw, build)
    return build

  return register


def _pick(rng: np.random.Generator, *choices: int) -> int:
  return int(rng.choice(choices))


def _size(rng: np.random.Generator) -> int:
  return _pick(rng, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 9, 12, 16, 16, 24, 32, 64)


# ---------------------------------------------------------------- products

# fmt: off
_PRODUCTS = [
  'bv,vc->bc', 'bv,cv->bc', 'vb,vc->bc', 'vb,cv->bc', 'bv,vc->cb', 'btd,df->btf', 'btd,fd->btf', 'btd,btf->df',
  'btf,df->btd', 'btd,dnh->btnh', 'btnh,dnh->btd', 'btnh,nhd->btd', 'btnh,bsnh->bnts', 'bnts,bsnh->btnh',
  'bnts,btnh->bsnh', 'gmk,gkn->gmn', 'mgk,kgn->gmn', 'gmk,gnk->mgn', 'ed,etd->et', 'etd,edf->etf', 'etf,etd->edf',
  'bi,bj->ij', 'ij,kj->ik', 'ij,ik->jk', 'i,j->ij', 'bt,b->bt', 'bt,t->b', 'btd,td->bt', 'btgnh,bsgh->bgnts',
  'bgnts,bsgh->btgnh', 'btd,vd->btv', 'btv,btd->vd', 'btv,vd->btd', 'bte,btd->ebtd', 'bec,bd->ecd', 'ecd,bec->bd',
  'abcd,cdef->abef', 'abcd,abef->cdef', 'abc,cb->a', 'ab,ab->', 'ab,ab->a', 'ab,ba->b',
]
# fmt: on


def _draw_product(rng: np.random.Generator) -> dict[str, int]:
  sizes = {'equation': int(rng.integers(len(_PRODUCTS) + 15)), 'seed': int(rng.integers(1000))}
  return sizes | {letter: _size(rng) for letter in 'abcdefghijklmnopqrstuvw'}


def _equation(sizes: SizesByName) -> str:
  """Returns one of the usual products, or a random one of two arrays with letters in any order."""
  if sizes['equation'] < len(_PRODUCTS):
    return _PRODUCTS[sizes['equation']]
  rng = np.random.default_rng(sizes['seed'])
  letters = list('abcdefgh')
  batch, left, right, summed = ([letters.pop() for _ in range(rng.integers(0, 3))] for _ in range(4))

  def shuffle(names: Sequence[str]) -> str:
    return ''.join(names[i] for i in rng.permutation(len(names)))

  return f'{shuffle(batch + left + summed)},{shuffle(batch + right + summed)}->{shuffle(batch + left + right)}'


def _shape_of(letters: str, sizes: SizesByName) -> tuple[int, ...]:
  """Returns the sizes of some letters. The more letters, the smaller their largest size, so that arrays stay small."""
  largest = {0: 1, 1: 64, 2: 64, 3: 16, 4: 8}.get(len(letters), 6)
  return tuple(min(sizes[letter], largest) for letter in letters)


def _cap_sizes(equation: str, sizes: SizesByName) -> SizesByName:
  """Returns the sizes of an equation's letters, reduced so that no array is too large."""
  left, right = equation.partition('->')[0].split(',')
  capped = {letter: sizes[letter] for letter in {*left, *right}}
  for letters in (left, right, equation.partition('->')[2]):
    capped |= {letter: min(capped[letter], n) for letter, n in zip(letters, _shape_of(letters, sizes))}
  return capped


@_family(_draw_product)
def _product(sizes: SizesByName) -> Expression:
  equation = _equation(sizes)
  capped = _cap_sizes(equation, sizes)
  arrays = tuple(
    Operand(tuple(capped[letter] for letter in letters)) for letters in equation.partition('->')[0].split(',')
  )
  return Expression(f'jnp.einsum({equation!r}, x0, x1)', arrays)


_CHAINS = [
  ('jnp.einsum("bf,fc->bc", jnp.maximum(jnp.einsum("bd,df->bf", x0, x1), 0), x2)', 'bd df fc'),
  ('jnp.einsum("bf,fc->bc", jnp.einsum("bd,df->bf", x0, x1), x2)', 'bd df fc'),
  ('jnp.einsum("ij,kj->ik", jnp.einsum("ij,kj->ik", x0, x1), x2)', 'bd fd cf'),
  ('jnp.einsum("ij,jk->ik", x0, jnp.transpose(x1))', 'bd fd'),
  ('jnp.transpose(jnp.einsum("ij,jk->ik", x0, x1))', 'bd df'),
  ('jnp.transpose(jnp.einsum("ij,jk->ik", jnp.transpose(x0), x1))', 'db df'),
  ('jnp.reshape(jnp.einsum("bd,df->bf", jnp.reshape(x0, ({b} * {c}, {d})), x1), ({b}, {c}, {f}))', 'bcd df'),
  ('jnp.einsum("bd,df->bf", x0, jnp.reshape(x1, ({d}, {c} * {f})))', 'bd dcf'),
  ('jnp.einsum("bcd,df->bcf", jnp.reshape(x0, ({b}, {c}, {d})), x1)', 'b(cd) df'),
  ('jnp.reshape(jnp.einsum("bd,df->bf", x0, x1), ({b}, {c}, {g}))', 'bd d(cg)'),
  (
    'jnp.einsum("bts,bsh->bth", jnp.einsum("bth,bsh->bts", jnp.einsum("btd,dh->bth", x0, x1), '
    'jnp.einsum("btd,dh->bth", x0, x2)), jnp.einsum("btd,dh->bth", x0, x3))',
    'bcd df df df',
  ),
  (
    'jnp.einsum("btnh,nhd->btd", jnp.reshape(jnp.einsum("btd,df->btf", x0, x1), ({b}, {c}, {g}, {f})), x2)',
    'bcd d(gf) gfd',
  ),
  ('jnp.einsum("bd,df->bf", jnp.where(x0 > 0, x0, 0), x1) @ x1.T', 'bd df'),
  ('x0 @ x1 @ x0.T @ x0', 'bd db'),
]


def _draw_chain(rng: np.random.Generator) -> dict[str, int]:
  return {'chain': int(rng.integers(len(_CHAINS)))} | {letter: min(_size(rng), 16) for letter in 'bcdfg'}


@_family(_draw_chain)
def _chain(sizes: SizesByName) -> Expression:
  """Builds chains of products, also with transposes and reshapes between them."""
  text, shapes = _CHAINS[sizes['chain']]
  arrays = []
  for letters in shapes.split():
    dims: list[int] = []
    inside = False
    for letter in letters:
      if letter in '()':
        inside = letter == '('
        if inside:
          dims.append(1)
      elif inside:
        dims[-1] *= sizes[letter]
      else:
        dims.append(sizes[letter])
    arrays.append(Operand(tuple(dims)))
  for letter in 'bcdfg':
    text = text.replace(f'{{{letter}}}', str(sizes[letter]))
  return Expression(text, tuple(arrays))


# ---------------------------------------------------------------- images


def _draw_convolution(rng: np.random.Generator) -> dict[str, int]:
  groups = _pick(rng, 1, 1, 2, 3, 4, 8)
  kind = _pick(rng, 0, 0, 0, 1)  # 1: batch groups
  return {
    'rank': _pick(rng, 1, 2, 2),
    'batch_groups': groups if kind else 1,
    'groups': 1 if kind else groups,
    'b': _pick(rng, 1, 2, 3, 4, 8),
    'h': _pick(rng, 3, 4, 5, 6, 8, 8, 9, 12, 16),
    'w': _pick(rng, 3, 4, 5, 8, 8, 9),
    'ci': _pick(rng, 1, 1, 2, 3, 4),
    'co': _pick(rng, 1, 1, 2, 3, 4),
    'kh': _pick(rng, 1, 2, 3, 3, 5),
    'kw': _pick(rng, 1, 2, 3),
    'sh': _pick(rng, 1, 1, 2, 3),
    'sw': _pick(rng, 1, 1, 2),
    'dh': _pick(rng, 1, 1, 2),
    'dw': _pick(rng, 1, 1, 2),
    'lh': _pick(rng, 1, 1, 1, 2),
    'padding': _pick(rng, 0, 0, 1, 2),
    'transposed': _pick(rng, 0, 0, 1),
  }


@_family(_draw_convolution)
def _convolution(s: SizesByName) -> Expression:
  """Builds convolutions with strides, dilations, groups of channels and of rows, and several paddings."""
  one = s['rank'] == 1
  padding = "'SAME'", "'VALID'", '[(2, 1)]' if one else '[(2, 1), (0, 1)]'
  dims = ("'NWC'", "'WIO'", "'NWC'") if one else ("'NHWC'", "'HWIO'", "'NHWC'")
  if s['transposed']:
    dims = ("'NCW'", "'OIW'", "'NCW'") if one else ("'NCHW'", "'OIHW'", "'NCHW'")
  pairs = {name: f'({s[h]},)' if one else f'({s[h]}, {s[w] if w else 1})' for name, h, w in _WINDOW}
  image = (s['h'],) if one else (s['h'], s['w'])
  filters = (s['kh'],) if one else (s['kh'], s['kw'])
  channels, groups, of_rows = s['ci'] * s['groups'], s['co'] * s['groups'] * s['batch_groups'], s['batch_groups']
  x = (s['b'] * of_rows, channels, *image) if s['transposed'] else (s['b'] * of_rows, *image, channels)
  w = (groups, s['ci'], *filters) if s['transposed'] else (*filters, s['ci'], groups)
  text = (
    f'lax.conv_general_dilated(x0, x1, {pairs["strides"]}, {padding[s["padding"]]}, lhs_dilation={pairs["lhs"]}, '
    f'rhs_dilation={pairs["rhs"]}, dimension_numbers=({", ".join(dims)}), feature_group_count={s["groups"]}, '
    f'batch_group_count={of_rows})'
  )
  return Expression(text, (Operand(x), Operand(w)))


_WINDOW = (('strides', 'sh', 'sw'), ('lhs', 'lh', ''), ('rhs', 'dh', 'dw'))


def _draw_pooling(rng: np.random.Generator) -> dict[str, int]:
  return {
    'kind': _pick(rng, 0, 0, 1, 2),
    'rank': _pick(rng, 1, 2, 2),
    'b': _pick(rng, 1, 2, 3, 8),
    'h': _pick(rng, 2, 3, 4, 5, 6, 8, 8, 9, 12, 16),
    'w': _pick(rng, 2, 3, 4, 5, 8, 8, 9),
    'c': _pick(rng, 1, 2, 3, 4),
    'kh': _pick(rng, 1, 2, 2, 3, 4),
    'kw': _pick(rng, 1, 2, 2, 3),
    'kc': _pick(rng, 1, 1, 1, 2),
    'sh': _pick(rng, 1, 2, 2, 3),
    'sw': _pick(rng, 1, 2, 2, 3),
    'padding': _pick(rng, 0, 1, 2),
  }


@_family(_draw_pooling)
def _pooling(s: SizesByName) -> Expression:
  """Builds the maximum, minimum or sum over windows, which may overlap or leave gaps."""
  initial, function = (('-jnp.inf', 'lax.max'), ('0.0', 'lax.add'), ('jnp.inf', 'lax.min'))[s['kind']]
  one = s['rank'] == 1
  window = (1, s['kh'], s['kc']) if one else (1, s['kh'], s['kw'], s['kc'])
  strides = (1, s['sh'], 1) if one else (1, s['sh'], s['sw'], 1)
  shape = (s['b'], s['h'], s['c']) if one else (s['b'], s['h'], s['w'], s['c'])
  explicit = ((0, 0), (1, 0), (0, 0)) if one else ((0, 0), (1, 0), (0, 1), (0, 0))
  padding = ("'SAME'", "'VALID'", repr(explicit))[s['padding']]
  values = 'small' if s['kind'] == 1 else 'distinct'
  text = f'lax.reduce_window(x0, {initial}, {function}, {window}, {strides}, {padding})'
  return Expression(text, (Operand(shape, values),))


# ---------------------------------------------------------------- lookups


def _draw_lookup(rng: np.random.Generator) -> dict[str, int]:
  names = ('v', 'd', 'b', 't')
  return {'form': int(rng.integers(len(_LOOKUPS)))} | {name: min(_size(rng), 16) for name in names}


# Expressions with the shapes of a table and of ids into its rows.
_LOOKUPS = [
  ('jnp.take(x0, x1, axis=0)', 'vd', 'bt', ''),
  ('jnp.take(x0, x1, axis=0)', 'vd', 'b', ''),
  ('jnp.take(x0, x1, axis=1)', 'dv', 'bt', ''),
  ('x0[x1]', 'v', 'bt', ''),
  ('x0[x1]', 'vdt', 'b', ''),
  ('x0[:, x1]', 'dvt', 'b', ''),
  ('jnp.take_along_axis(x0, x1, axis=1)', 'bv', 'bt', ''),
  ('jnp.take_along_axis(x0, x1[..., None], axis=2)[..., 0]', 'btv', 'bt', ''),
  ('jax.vmap(lambda table, i: table[i])(x0, x1)', 'bvd', 'bt', ''),
  ('jax.vmap(lambda table, i: table[i], in_axes=(1, 0))(x0, x1)', 'vbd', 'bt', ''),
  ('x0[x1, jnp.arange({b})]', 'vbd', 'b', ''),
  ('jax.nn.one_hot(x1, {v}) @ x0', 'vd', 'bt', ''),
  ('jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (1,)))(x0, x1)', 'bv', 'b', ''),
  ('x0.at[x1].add(x2)', 'vd', 'b', 'bd'),
  ('x0.at[x1].add(x2)', 'vd', 'bt', 'btd'),
  ('x0.at[x1].add(x2)', 'v', 'b', 'b'),
  ('x0.at[:, x1].add(x2)', 'dv', 'b', 'db'),
  ('x0.at[x1].max(x2)', 'vd', 'b', 'bd'),
  ('x0.at[x1].min(x2)', 'vd', 'b', 'bd'),
  ('x0.at[x1].set(x2)', 'vd', 'unique b', 'bd'),
  ('x0.at[x1].mul(x2)', 'vd', 'unique b', 'bd'),
  ('x0.at[:, x1].set(x2)', 'dv', 'unique b', 'db'),
  ('x0.at[jnp.arange({b}), x1].add(x2)', 'bv', 'b', 'b'),
  ('x0.at[jnp.arange({b}), x1].set(x2)', 'bvd', 'b', 'bd'),
  ('jax.vmap(lambda table, i, u: table.at[i].add(u))(x0, x1, x2)', 'bvd', 'bt', 'btd'),
  ('jax.vmap(lambda table, i, u: lax.dynamic_update_slice(table, u, (i, 0)))(x0, x1, x2)', 'bvd', 'b', 'btd'),
  ('jax.ops.segment_sum(x2, x1, {v}) + x0', 'vd', 'b', 'bd'),
]


@_family(_draw_lookup)
def _lookup(s: SizesByName) -> Expression:
  """Builds a lookup or a scatter. The gradient of one is the other."""
  text, table, ids, updates = _LOOKUPS[s['form']]
  shape = tuple(s[letter] for letter in table)
  unique, ids = ids.startswith('unique'), ids.removeprefix('unique ')
  if unique and s['b'] > s['v']:
    raise ValueError('more unique ids than rows')
  arrays = [Operand(shape), Operand(tuple(s[letter] for letter in ids), f'{"unique " * unique}ids {s["v"]}')]
  if updates:
    arrays.append(Operand(tuple(s[letter] for letter in updates)))
  extreme = '.max(' in text or '.min(' in text
  arrays = [Operand(a.shape, 'distinct') if extreme and a.values == 'small' else a for a in arrays]
  for letter in 'vb':
    text = text.replace(f'{{{letter}}}', str(s[letter]))
  return Expression(text, tuple(arrays), '.mul(' not in text and not extreme)


# ---------------------------------------------------------------- along a dimension, and shapes

_ALONG = [
  ('jnp.cumsum(x0, axis={axis})', 'small'),
  ('lax.cumsum(x0, axis={axis}, reverse=True)', 'small'),
  ('lax.cummax(x0, axis={axis})', 'distinct'),
  ('jnp.sort(x0, axis={axis})', 'distinct'),
  ('jnp.argsort(x0, axis={axis}).astype(jnp.float32)', 'distinct'),
  ('jnp.sum(x0, axis={axis})', 'small'),
  ('jnp.max(x0, axis={axis})', 'distinct'),
  ('jnp.min(x0, axis={axis})', 'distinct'),
  ('jnp.argmax(x0, axis={axis}).astype(jnp.float32)', 'small'),
  ('jnp.argmin(x0, axis={axis}).astype(jnp.float32)', 'small'),
  ('jnp.sum(x0)', 'small'),
  ('jnp.max(x0)', 'distinct'),
  ('jnp.any(x0 > 2, axis={axis}).astype(jnp.float32)', 'small'),
  ('jnp.flip(x0, axis={axis})', 'small'),
  ('jnp.roll(x0, {k}, axis={axis})', 'small'),
  ('jnp.diff(x0, axis={axis})', 'small'),
  ('jnp.repeat(x0, {k}, axis={axis})', 'small'),
  ('jnp.concatenate([x0, 2 * x0], axis={axis})', 'small'),
  ('jnp.stack([x0, 2 * x0], axis={axis})', 'small'),
  ('lax.slice_in_dim(x0, {k} - 1, x0.shape[{axis}], axis={axis})', 'small'),
  ('lax.slice_in_dim(x0, 0, x0.shape[{axis}], {k}, axis={axis})', 'small'),
  ('lax.slice_in_dim(x0, 0, x0.shape[{axis}] - 1, axis={axis})', 'small'),
  ('lax.dynamic_slice_in_dim(x0, jnp.int32(x0.sum()) % 3, max(1, x0.shape[{axis}] - {k}), axis={axis})', 'small'),
  ('lax.dynamic_update_slice_in_dim(x0, 2 * lax.slice_in_dim(x0, 0, 1, axis={axis}), {k}, axis={axis})', 'small'),
  ('lax.pad(x0, 0.0, [({k}, 1, 0), (0, {k}, 0), (1, 0, 1)])', 'small'),
  ('lax.pad(x0, 0.0, [(-1, 1, 0), (0, -1, 0), (1, -1, 0)])', 'small'),
  ('jnp.transpose(x0, (2, 0, 1))', 'small'),
  ('jnp.transpose(x0, (1, 0, 2))', 'small'),
  ('jnp.reshape(x0, (x0.shape[0] * x0.shape[1], x0.shape[2]))', 'small'),
  ('jnp.reshape(x0, (x0.shape[0], x0.shape[1] * x0.shape[2]))', 'small'),
  ('jnp.reshape(x0, (x0.shape[0] * x0.shape[2], x0.shape[1]))', 'small'),
  ('jnp.reshape(x0, (-1,))', 'small'),
  ('jnp.reshape(x0, ({k}, x0.shape[0] // {k}, x0.shape[1], x0.shape[2]))', 'small'),
  ('jnp.reshape(x0, (x0.shape[0], x0.shape[1] // {k}, {k}, x0.shape[2]))', 'small'),
  ('jnp.tril(x0, {k} - 2)', 'small'),
  ('jnp.diagonal(x0, axis1=0, axis2=1)', 'small'),
  ('jnp.where(jnp.arange(x0.shape[{axis}]) < {k}, jnp.moveaxis(x0, {axis}, -1), 0)', 'small'),
  ('lax.top_k(x0, min({k}, x0.shape[2]))[0]', 'distinct'),
  ('x0 * jnp.sum(x0, axis={axis}, keepdims=True)', 'small'),
  ('x0 - jnp.max(x0, axis={axis}, keepdims=True)', 'distinct'),
  ('jax.random.bits(jax.random.key({k}), x0.shape).astype(jnp.float32) * x0', 'small'),
  ('lax.associative_scan(jnp.add, x0, axis={axis})', 'small'),
  ('jax.vmap(lambda x: jnp.convolve(x, jnp.arange(1.0, {k} + 1), mode="same"))(x0[0])', 'small'),
  ('jnp.linalg.norm(x0, axis={axis}) ** 2', 'small'),
  ('jnp.broadcast_to(x0[:, None], (x0.shape[0], {k}, *x0.shape[1:])) + 1', 'small'),
  ('jnp.squeeze(x0[:1], 0) + x0[-1]', 'small'),
]


def _draw_along(rng: np.random.Generator) -> dict[str, int]:
  sizes = {'form': int(rng.integers(len(_ALONG))), 'axis': int(rng.integers(3)), 'k': _pick(rng, 1, 2, 2, 3, 4)}
  return sizes | {name: min(_size(rng), 24) for name in 'lmn'}


@_family(_draw_along)
def _along(s: SizesByName) -> Expression:
  """Builds scans, sorts, reductions, slices, pads and reshapes of an array with three dimensions."""
  text, values = _ALONG[s['form']]
  text = text.replace('{axis}', str(s['axis'])).replace('{k}', str(s['k']))
  has_gradient = 'float32' not in text and 'norm' not in text
  return Expression(text, (Operand((s['l'], s['m'], s['n']), values),), has_gradient)
