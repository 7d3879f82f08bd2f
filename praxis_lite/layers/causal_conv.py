"""CausalConv: a short convolution over time of each channel separately, in one pass or token by token.

    y_t = sum over w of  filter_w * x_(t - W + 1 + w)  + bias

Tokens before the first one of a row, or of a segment, count as zeros. The state in decoding is the window of the last
W - 1 tokens of each row.

B batch, T length, W width of the window; `...` are the dimensions of the channels.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.weights import WeightHParams, WeightInit


class CausalConv(Layer):
  """A depthwise causal convolution (as in Mamba and Griffin).

  Attributes:
    shape: the dimensions of the channels, such as (D,) or (N, H).
    kernel_size: W, at least 2.
    use_bias: whether there is a bias.
    weight_split_dims_mapping: `wt`, [W, *shape], of the filter; the bias is split like its last dimensions.
    activation_split_dims_mapping: `out`, [B, T, *shape]; also of the window, [B, W - 1, *shape].
  """

  shape: tuple[int, ...] = REQUIRED
  kernel_size: int = 4
  use_bias: bool = True
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    self._check_range('kernel_size', least=2)
    wt = self.weight_split_dims_mapping.wt
    filters = WeightHParams(
      (self.kernel_size, *self.shape),
      init=WeightInit.UniformFanIn(),
      tensor_split_dims_mapping=wt,
      fan_in_axes=(0,),
      fan_out_axes=(0,),
    )
    self.create_variable('w', filters)
    if self.use_bias:
      self.create_variable('b', bias_weight(self.shape, None if wt is None else wt[1:]))

  def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Returns [B, T, ...] for x [B, T, ...].

    A token sees only tokens of its own segment, for `segment_ids` [B, T] int32; None means that a row is one segment.
    """
    window = jnp.zeros((x.shape[0], self.kernel_size - 1, *self.shape), x.dtype)
    return self._convolve(jnp.concatenate([window, x], axis=1), segment_ids)

  def init_decode_state(self, batch_size: int) -> None:
    """Allocates the windows of `batch_size` rows that have no tokens yet."""
    self._keep(jnp.zeros((batch_size, self.kernel_size - 1, *self.shape), self.fprop_dtype))

  def extend_step(self, x: jax.Array, pos_BT: jax.Array) -> jax.Array:
    """Returns [B, T, ...] for the next tokens, x [B, T, ...], and stores the last W - 1 tokens of each row.

    A position of -1 is padding, which comes after the tokens of a row.
    """
    seen = jnp.concatenate([self.get_decode_state('window'), x.astype(self.fprop_dtype)], axis=1)
    place_BW = jnp.sum(pos_BT >= 0, axis=1)[:, None] + jnp.arange(self.kernel_size - 1)
    self._keep(jnp.take_along_axis(seen, place_BW.reshape(*place_BW.shape, *(1,) * len(self.shape)), axis=1))
    return self._convolve(seen)

  def _keep(self, window: jax.Array) -> None:
    self.update_decode_state('window', self.shard(window))

  def _convolve(self, seen: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Returns the result for the last tokens of `seen`, [B, W - 1 + T, ...]."""
    T = seen.shape[1] - self.kernel_size + 1

    def is_seen(w: int) -> jax.Array | None:
      if segment_ids is None or w == self.kernel_size - 1:
        return None
      earlier = jnp.pad(segment_ids, ((0, 0), (self.kernel_size - 1 - w, 0)), constant_values=-1)[:, :T]
      return (earlier == segment_ids).reshape(*segment_ids.shape, *(1,) * len(self.shape))

    y = sum_windows(seen, self.theta.w, is_seen)
    if self.use_bias:
      y += self.theta.b
    return self.shard(y.astype(self.fprop_dtype))


def sum_windows(
  x: jax.Array, filters: jax.Array, is_seen: Callable[[int], jax.Array | None] = lambda w: None
) -> jax.Array:
  """Returns the sum over w of filters[w] * x[:, w : w + T], [B, T, ...] in the dtype of sums.

  Each shifted sequence is multiplied by its filter, and XLA fuses the products and the sum. This also works if rows and
  channels are split. `is_seen` returns which entries of x[:, w : w + T] count, as an array that broadcasts to them;
  None means all.
  """
  T = x.shape[1] - len(filters) + 1
  x, filters = to_sum_dtype(x), to_sum_dtype(filters)
  y = jnp.zeros((x.shape[0], T, *x.shape[2:]), x.dtype)
  for w, weight in enumerate(filters):
    part, seen = x[:, w : w + T], is_seen(w)
    y += weight * (part if seen is None else jnp.where(seen, part, 0))
  return y
