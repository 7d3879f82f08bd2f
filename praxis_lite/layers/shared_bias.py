"""A bias on attention logits that all layers of a stack share, from one table of offsets (T5, Raffel et al., 2020).

The stack's parent has the `RelativeBias`. It builds the stack inside `building_with_shared_bias`, so that the attention
layers declare no bias of their own, and calls the stack with `logit_bias=shared_bias(...)`. Dimension 0 of each array
in the bias is 1, because a pipeline cuts dimension 0 of all other arguments into microbatches.

B batch, N heads, T length of the queries, S length of the keys, K buckets.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.layers.attention_spec import LogitBias
from praxis_lite.layers.dot_product import many_logits
from praxis_lite.layers.positions import BucketedBias, RelativeBias
from praxis_lite.sharding.mesh import platform

_is_shared: contextvars.ContextVar[bool] = contextvars.ContextVar('praxis_lite_is_bias_shared', default=False)


@contextlib.contextmanager
def building_with_shared_bias() -> Iterator[None]:
  """Tells the attention layers that are built inside the block that each call gives them a shared bias."""
  token = _is_shared.set(True)
  try:
    yield
  finally:
    _is_shared.reset(token)


def is_bias_shared() -> bool:
  """Whether attention layers that are built now get a shared bias in each call."""
  return _is_shared.get()


def shared_bias(layer: RelativeBias, length: int, *, in_blocks: bool = False) -> jax.Array | LogitBias:
  """In a call: returns the bias of self-attention over whole rows, for all layers of a stack.

  If the layers have all logits of a row in memory anyway, the bias is an array [1, N, T, T], which is computed once.
  Otherwise it is a function, for attention that computes the bias block by block. Offsets are differences of indices in
  the row; inside a segment, differences of positions are equal to them. `in_blocks` says whether a layer computes its
  attention in blocks even if T is small.
  """
  if in_blocks or length * length >= many_logits(platform()):
    return bias_of_positions(layer)
  pos_1T = jnp.arange(length)[None]
  return layer(pos_1T, pos_1T)


def bias_of_positions(layer: RelativeBias) -> LogitBias:
  """In a call: returns the bias as a function of positions, for all layers of a stack."""
  return LogitBias(_BiasOfAllRows(layer.bias_fn), layer.bias_params[None])


class _BiasOfAllRows(NamedTuple):
  """Computes a bias from a table [1, K, N], whose dimension 0 is for rows; see the top of this file."""

  of_table: BucketedBias

  def __call__(self, table_1KN: jax.Array, query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
    """Returns the biases [B, N, T, S] for int32 positions."""
    return self.of_table(table_1KN[0], query_pos_BT, key_pos_BS)
