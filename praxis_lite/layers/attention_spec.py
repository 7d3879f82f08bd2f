"""The arguments that all implementations of attention take.

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from praxis_lite.layers.blocks import Formula, OffsetBias
from praxis_lite.layers.masks import AttentionMask, to_mask

SplitAxes = str | tuple[str, ...] | None  # The mesh axes that split a dimension.
AttentionImplementation = Literal['auto', 'xla', 'dense', 'blockwise', 'cudnn', 'tokamax', 'splash']
FUSED_ATTENTION = ('cudnn', 'tokamax', 'splash')


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """How attention is computed.

  Attributes:
    scale: factor of the logits; None means 1 / sqrt(H).
    logit_soft_cap: bounds logits smoothly: cap * tanh(logits / cap) (Gemma 2). None disables it.
    implementation: see `choose_attention`.
    block_size: the largest number of queries and of keys in a block; None means 512, or less for a small window or
      many rows.
  """

  scale: float | None = None
  logit_soft_cap: float | None = None
  implementation: AttentionImplementation = 'auto'
  block_size: int | None = None

  def formula(self, dims_per_head: int) -> Formula:
    """Returns how products of queries and keys of `dims_per_head` dims become logits, without a bias."""
    return Formula(dims_per_head**-0.5 if self.scale is None else self.scale, self.logit_soft_cap)


DEFAULT_SPEC = AttentionSpec()


@dataclasses.dataclass(frozen=True)
class LogitBias:
  """A bias on logits as a function of positions, which attention calls for each pair of blocks. It is a pytree.

  Attributes:
    fn: the function.
    params: its first argument, a tree of arrays, for which gradients are computed.
    query_pos: int32 [B, T] or [1, T]; None means the index in the row.
    key_pos: int32 [B, S] or [1, S]; None if and only if `query_pos` is None.
  """

  fn: OffsetBias
  params: Any
  query_pos: jax.Array | None = None
  key_pos: jax.Array | None = None

  def to_array(self, query_len: int, key_len: int) -> jax.Array:
    """Returns the bias of all queries and keys, [B, N, T, S] or [1, N, T, S]."""
    query_pos = jnp.arange(query_len)[None] if self.query_pos is None else self.query_pos
    key_pos = jnp.arange(key_len)[None] if self.key_pos is None else self.key_pos
    return self.fn(self.params, query_pos, key_pos)


@dataclasses.dataclass(frozen=True)
class ProbabilityDropout:
  """Dropout on the probabilities of attention. It is a pytree.

  Attributes:
    rate: share of the probabilities that becomes 0; the others are scaled by 1 / (1 - rate).
    seeds_BTN: uint32, a random number for each query and head; see `blocks.dropout_factors`.
  """

  rate: float
  seeds_BTN: jax.Array


jax.tree_util.register_dataclass(LogitBias, data_fields=['params', 'query_pos', 'key_pos'], meta_fields=['fn'])
jax.tree_util.register_dataclass(ProbabilityDropout, data_fields=['seeds_BTN'], meta_fields=['rate'])


class Heads(NamedTuple):
  """The arguments with gradients."""

  query: jax.Array  # [B, T, N, H]
  key: jax.Array  # [B, S, K, H]
  value: jax.Array  # [B, S, K, H]
  bias: Any = None  # The parameters of the bias: a tree of arrays, each with heads as its last dimension.
  sinks: jax.Array | None = None  # [N], the logit of each head's sink; None without sinks. See `blocks.add_sinks`.


class Integers(NamedTuple):
  """The arrays without gradients: arrays of the mask, positions of the bias, and seeds of dropout."""

  mask: AttentionMask
  query_pos: jax.Array | None = None
  key_pos: jax.Array | None = None
  seeds_BTN: jax.Array | None = None


Residuals = tuple[Heads, Integers, jax.Array, jax.Array]  # Arguments, results, and what else a backward pass needs.


def argument_specs(
  heads: Heads, integers: Integers, rows: SplitAxes, length: SplitAxes, head: SplitAxes
) -> tuple[Heads, Integers]:
  """Returns the specs of the arguments if these mesh axes split rows, lengths and heads.

  An array [1, ...], which all rows share, is not split over the axes of rows.
  """

  def spec(x: jax.Array, rank: int = 3) -> PartitionSpec:
    """Returns the spec of the first `rank` dimensions of [B, T, N, ...]."""
    return PartitionSpec(*(rows if x.shape[0] > 1 else None, length, head)[: min(x.ndim, rank)])

  arrays, others = jax.tree.map(spec, (heads._replace(bias=None, sinks=None), integers[1:]))
  biases = jax.tree.map(lambda x: PartitionSpec(*(None,) * (x.ndim - 1), head), heads.bias)
  mask = integers.mask.map_arrays(query=lambda x: spec(x, 2), key=lambda x: spec(x, 2), row=lambda x: spec(x, 1))
  sinks = None if heads.sinks is None else PartitionSpec(head)
  return arrays._replace(bias=biases, sinks=sinks), Integers(mask, *others)


def sort_arguments(
  heads: tuple[jax.Array, jax.Array, jax.Array],
  mask: AttentionMask | None,
  bias: LogitBias | None,
  dropout: ProbabilityDropout | None,
  spec: AttentionSpec,
  sinks: jax.Array | None = None,
) -> tuple[Formula, Heads, Integers]:
  """Returns the arguments of attention in three groups: static ones, arrays with gradients, and other arrays."""
  formula = dataclasses.replace(
    spec.formula(heads[0].shape[-1]),
    bias=bias.fn if bias else None,
    dropout_rate=dropout.rate if dropout else 0.0,
  )
  pos = (bias.query_pos, bias.key_pos) if bias else (None, None)
  integers = Integers(to_mask(mask), *pos, dropout.seeds_BTN if dropout else None)
  return formula, Heads(*heads, bias.params if bias else None, sinks), integers
