"""ALiBi: a bias on attention logits that grows linearly with the distance, with no weights.

B batch, T length, S length of the keys, N heads.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.blocks import OffsetBias


class AlibiBias(Layer):
  """bias_n = -slope_n |query position - key position| (Press et al., 2022).

  The slopes are 2^(-8 n / N) for n = 1 ... N if N is a power of two. Otherwise, as in the authors' code, the first
  heads have the slopes for the next smaller power of two. The others have every second slope, from the first on, for
  the next larger power of two.

  Attributes:
    num_heads: N.
    activation_split_dims_mapping: `out`, [B, N, T, S].
  """

  num_heads: int = REQUIRED

  def __call__(self, query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
    """Returns the biases [B, N, T, S], in the dtype of `bias_params`, for int32 positions."""
    return self.shard(_linear_bias(self.bias_params, query_pos_BT, key_pos_BS))

  @property
  def bias_fn(self) -> OffsetBias:
    """The bias as a function of `bias_params` and of positions, for attention that computes it block by block."""
    return _linear_bias

  @property
  def bias_params(self) -> jax.Array:
    """The slopes, [N], in float32 or in the dtype of the computation if that is wider."""
    assert self.fprop_dtype is not None  # Set once the layer is built.
    return jnp.asarray(alibi_slopes(self.num_heads), jnp.promote_types(self.fprop_dtype, jnp.float32))

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops()


def alibi_slopes(num_heads: int) -> np.ndarray:
  """Returns the slope of each head, [N] float64."""
  lower = 2 ** math.floor(math.log2(num_heads))
  slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
  others = 2.0 ** (-8 * np.arange(1, 2 * lower, 2) / (2 * lower))
  return np.concatenate([slopes, others[: num_heads - lower]])


def _linear_bias(slopes_N: jax.Array, query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
  distance_BTS = jnp.abs(query_pos_BT[:, :, None] - key_pos_BS[:, None, :])
  return -slopes_N[:, None, None] * distance_BTS[:, None].astype(slopes_N.dtype)
