"""StackingOverTime: concatenates each frame with its neighbours, at every `stride`-th frame.

B batch, T length, D dims of a frame, W frames in a window, U length of the result, T / stride rounded up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import Layer


class StackingOverTime(Layer):
  """y[u] = the frames x[u * stride - left_context], ..., x[u * stride + right_context], concatenated.

  With a context of 1 on both sides and a stride of 3, frames 4 1 9 3 5 2 8 become (0 4 1) (9 3 5) (2 8 0). Frames
  before the first and after the last one are zeros, and are marked as padding, unless a field says otherwise.

  Attributes:
    left_context, right_context: number of frames before and after the one in the middle; W is one more than their sum.
    stride: distance of neighbouring windows.
    pad_with_left_frame, pad_with_right_frame: whether the frames before the first one are copies of the first one, and
      whether the frames after the last one are copies of the last one. Their paddings are copied too.
    padding_reduce_option: with 'reduce_min', a window is padding if all of its frames are; with 'reduce_max', if one of
      them is.
    activation_split_dims_mapping: `out`, [B, U, W D].
  """

  left_context: int = 0
  right_context: int = 0
  stride: int = 1
  pad_with_left_frame: bool = False
  pad_with_right_frame: bool = False
  padding_reduce_option: str = 'reduce_min'

  def setup(self) -> None:
    self._check_range('left_context', 'right_context', least=0)
    self._check_range('stride', least=1)
    check_choice(f'{self.path_name}.padding_reduce_option', self.padding_reduce_option, ('reduce_min', 'reduce_max'))

  @property
  def window_size(self) -> int:
    """W, the frames of a window."""
    return self.left_context + 1 + self.right_context

  def __call__(self, x_BTD: jax.Array, paddings: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Returns the stacked frames, [B, U, W D], and their paddings, [B, U], which are None if `paddings` is None.

    `paddings`, [B, T], are nonzero for padding frames.
    """
    y_BUD = self.shard(jnp.concatenate(self._windows(x_BTD, 0), axis=-1))
    if paddings is None:
      return y_BUD, None
    windows_BUW = jnp.stack(self._windows(paddings, 1), axis=-1)
    reduce = jnp.min if self.padding_reduce_option == 'reduce_min' else jnp.max
    return y_BUD, reduce(windows_BUW, axis=-1)

  def _windows(self, x: jax.Array, outside: int) -> list[jax.Array]:
    """Returns W arrays [B, U, ...]: the first frame of each window, the second one, and so on; x is [B, T, ...]."""
    left, right = self.left_context, self.right_context
    first, last = x[:, :1], x[:, -1:]
    before = jnp.broadcast_to(first if self.pad_with_left_frame else outside, (x.shape[0], left, *x.shape[2:]))
    after = jnp.broadcast_to(last if self.pad_with_right_frame else outside, (x.shape[0], right, *x.shape[2:]))
    padded = jnp.concatenate([before.astype(x.dtype), x, after.astype(x.dtype)], axis=1)
    return [padded[:, i : i + x.shape[1] : self.stride] for i in range(self.window_size)]

  def unstack(self, y_BUD: jax.Array) -> jax.Array:
    """Returns the frames [B, (U - 1) * stride + right_context + 1, D] that make the stacked frames [B, U, W D].

    They begin with the first frame of the input. If the last window reached beyond the end of the input, the padding in
    that window follows the last frame of the input.

    Raises:
      ConfigError: the stride is larger than the window, so that some frames are in no window.
    """
    if self.stride > self.window_size:
      raise ConfigError(
        f'{self.path_name}.stride: {self.stride} skips frames between windows of {self.window_size}, so they cannot be '
        'unstacked'
      )
    B, U, size = y_BUD.shape
    frame = np.arange((U - 1) * self.stride + self.right_context + 1)
    window = np.clip(-(-(frame - self.right_context) // self.stride), 0, U - 1)
    place = self.left_context + frame - window * self.stride
    return y_BUD.reshape(B, U, self.window_size, size // self.window_size)[:, window, place]
