"""LowRankUpdate: what LoRA adds to a layer's product with its weight. It is a product with a matrix of low rank.

    y = s (x A) B     A [*I, R], B [R, *O], s = alpha / R  or, rank-stabilized, alpha / sqrt(R)

I input dims, O output dims, R rank, V ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import lookup_rows
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping, WeightHParams, WeightInit

# Uniform in +-1 / sqrt(fan in).
A_INIT = WeightInit.UniformFanIn(1.0)


class LowRankWeightSplit(SplitMapping):
  """`a`: one entry per dimension of `in_shape`, and one for R; `b`: one for R, and one per dimension of `out_shape`."""

  a: SplitDimsMapping = None
  b: SplitDimsMapping = None


class LowRankUpdate(Layer):
  """y = scale (dropout(x) A) B, which is 0 at first (Hu et al., 2021).

  In the update of a table of embeddings, A begins at 0 and B is random, so that a step changes only the rows of the ids
  in its batch.

  Attributes:
    in_shape: trailing dimensions of the input.
    out_shape: trailing dimensions of the output.
    rank: R.
    scale: factor of the product.
    is_table: whether the input is ids, and A is a table with a vector for each id, [V, R].
    num_adapters: K, the number of pairs [K, *in_shape, R] and [K, R, *out_shape] of A and B. Each row of a batch uses
      the pair that `surroundings.adapters` names for it, or none. None means one pair, shared by all rows.
    dropout_tpl: template of the child `dropout`, on the input; not applied to ids.
    weight_split_dims_mapping: `a`, [*in_shape, R], and `b`, [R, *out_shape]; the updated layer derives them from the
      mapping of its weight.
  """

  in_shape: tuple[int, ...] = REQUIRED
  out_shape: tuple[int, ...] = REQUIRED
  rank: int = REQUIRED
  scale: float = 1.0
  is_table: bool = False
  num_adapters: int | None = None
  dropout_tpl: Config = template(Dropout)
  weight_split_dims_mapping: Config = template(LowRankWeightSplit)

  dropout: Dropout = child()

  def setup(self) -> None:
    self._check_range('rank', least=1)
    self._check_range('num_adapters', least=1)
    rank_in, rank_out, split = len(self.in_shape), len(self.out_shape), self.weight_split_dims_mapping
    a_init, b_init = A_INIT, WeightInit.Constant(0.0)
    if self.is_table:
      a_init, b_init = b_init, WeightInit.GaussianFanIn()
    prefix = () if self.num_adapters is None else (self.num_adapters,)
    n = len(prefix)
    a = WeightHParams(
      (*prefix, *self.in_shape, self.rank),
      init=a_init,
      tensor_split_dims_mapping=_after_adapters(split.a, n),
      fan_in_axes=tuple(range(n, n + rank_in)),
      fan_out_axes=(n + rank_in,),
    )
    b = WeightHParams(
      (*prefix, self.rank, *self.out_shape),
      init=b_init,
      tensor_split_dims_mapping=_after_adapters(split.b, n),
      fan_in_axes=(n,),
      fan_out_axes=tuple(range(n + 1, n + rank_out + 1)),
    )
    self.create_variable('a', a)
    self.create_variable('b', b)
    self.create_child('dropout', self.dropout_tpl)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., *out_shape] for x [..., *in_shape], or for ids [...] if A is a table."""
    if self.num_adapters is not None:
      return self._call_by_row(x)
    if self.is_table:
      of_rank = lookup_rows(self.theta.a, x)
    else:
      x = self.dropout(x.astype(self.fprop_dtype))
      of_rank = jnp.tensordot(x, self.theta.a, axes=len(self.in_shape))
    return self.shard(jnp.tensordot(of_rank * self.scale, self.theta.b, axes=1))

  def _call_by_row(self, x: jax.Array) -> jax.Array:
    """Returns the update of each row by its own adapter, for x [B, ..., *in_shape]."""
    rows_B = self.surroundings.adapters
    if not self.do_eval:
      raise ConfigError(f'{self.path_name}: several adapters are for decoding; train each of them by itself')
    x = x.astype(self.fprop_dtype)
    if rows_B is None:
      return jnp.zeros((*x.shape[: x.ndim - len(self.in_shape)], *self.out_shape), x.dtype)
    if rows_B.shape != x.shape[:1]:
      raise ConfigError(
        f'{self.path_name}: {len(rows_B)} rows have an adapter, and the layer is called with an array of {x.shape}; '
        'several adapters need rows as the first dimension'
      )
    # A number that is neither -1 nor an adapter's gives NaN.
    number_B = jnp.where(rows_B < 0, jnp.where(rows_B == -1, 0, len(self.theta.a)), rows_B)
    a_of_rows, b_of_rows = (jnp.take(w, number_B, axis=0, mode='fill') for w in (self.theta.a, self.theta.b))
    factor_B = jnp.where(rows_B < 0, 0, self.scale).astype(x.dtype)

    def update(x: jax.Array, a: jax.Array, b: jax.Array, factor: jax.Array) -> jax.Array:
      return jnp.tensordot(jnp.tensordot(x, a, axes=len(self.in_shape)) * factor, b, axes=1)

    return self.shard(jax.vmap(update)(x, a_of_rows, b_of_rows, factor_B))

  def weight(self) -> jax.Array:
    """In a call: returns scale A B, [*in_shape, *out_shape]."""
    if self.num_adapters is not None:
      raise ConfigError(f'{self.path_name}: each row may have another weight, so there is no single one to read')
    return jnp.tensordot(self.theta.a * self.scale, self.theta.b, axes=1)


def _after_adapters(split: SplitDimsMapping, num_before: int) -> SplitDimsMapping:
  """Returns `split`. If `num_before` is not 0, an entry None precedes it, for the dimension of adapters."""
  if split is None or not num_before:
    return split
  return DeclaredSplit((None,), ('adapters are not split',)).followed_by(DeclaredSplit.make(split, ''))


def split_update(
  update: Config[LowRankUpdate], wt: DeclaredSplit | None, rank_in: int, path: str
) -> Config[LowRankUpdate]:
  """Splits A and B of an update in the same way as the weight to which the update is added.

  The weight is [*I, *O], and `wt` is its mapping. If `wt` is None, the task's strategy splits A and B, as it splits the
  weight. The weight is in the layer at `path`. `rank_in` is the number of dimensions I.
  """
  if wt is not None:
    whole = DeclaredSplit((None,), (f'derived from the weight of {path}: the rank of an update is not split',))
    update.weight_split_dims_mapping.set(
      a=derived_split(wt[:rank_in], path).followed_by(whole), b=whole.followed_by(derived_split(wt[rank_in:], path))
    )
  return update


def derived_split(wt: DeclaredSplit, path: str) -> DeclaredSplit:
  """Returns a mapping whose sources say that it is derived from the mapping of the weight of the layer at `path`."""
  return DeclaredSplit(wt, [f'{source}, derived from the weight of {path}' for source in wt.sources])


def num_stacked(a: Sequence[int], b: Sequence[int], w: Sequence[int]) -> int:
  """Returns the number of dimensions `stack`, for shapes [*stack, *I, R], [*stack, R, *O] and [*stack, *I, *O]."""
  return len(a) + len(b) - 2 - len(w)


def scaled_product(a: jax.Array, b: jax.Array, scale: float, shape: Sequence[int]) -> jax.Array:
  """Returns scale A B, of `shape` [*stack, *I, *O], in float32, or in the dtype of A if that is wider.

  A and B are stored variables, [*stack, *I, R] and [*stack, R, *O].
  """
  stack, rank = a.shape[: num_stacked(a.shape, b.shape, shape)], a.shape[-1]
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  a, b = a.astype(dtype).reshape(*stack, -1, rank), b.astype(dtype).reshape(*stack, rank, -1)
  return (scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)).reshape(shape)
