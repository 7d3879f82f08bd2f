"""Pooling of images.

B batch, H height, W width, C channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.config import Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.layers.convolutions import check_padding


class Pooling(Layer):
  """The greatest or the mean value of each channel in each window.

  A mean is over the part of the window that lies in the image.

  Attributes:
    kind: 'max' or 'mean'.
    window: height and width of a window.
    strides: distance between windows; None is `window`.
    padding: 'SAME' or 'VALID', as of a convolution.
    activation_split_dims_mapping: `out`, [B, H, W, C].
  """

  kind: str = 'max'
  window: tuple[int, int] = (2, 2)
  strides: tuple[int, int] | None = None
  padding: str = 'VALID'
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    _check_kind(self.kind, f'{self.path_name}.kind')
    check_padding(self.padding, f'{self.path_name}.padding')

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, H', W', C]."""
    y_BHWC = self._max(x_BHWC) if self.kind == 'max' else self._mean(x_BHWC)
    return self.shard(y_BHWC, self.activation_split_dims_mapping.out)

  def _windows(self) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    return (1, *self.window, 1), (1, *(self.strides or self.window), 1), self.padding

  def _max(self, x_BHWC: jax.Array) -> jax.Array:
    # -inf, the identity of max, is what the derivative of reduce_window knows.
    return jax.lax.reduce_window(x_BHWC, -jnp.inf, jax.lax.max, *self._windows())

  def _mean(self, x_BHWC: jax.Array) -> jax.Array:
    sums = jax.lax.reduce_window(x_BHWC.astype(jnp.float32), 0.0, jax.lax.add, *self._windows())
    ones_HW = jnp.ones((1, *x_BHWC.shape[1:3], 1))
    counts = jax.lax.reduce_window(ones_HW, 0.0, jax.lax.add, *self._windows())
    return (sums / counts).astype(x_BHWC.dtype)


class GlobalPooling(Layer):
  """The greatest or the mean value of each channel.

  Attributes:
    kind: 'max' or 'mean'.
    activation_split_dims_mapping: `out`, [B, C].
  """

  kind: str = 'mean'
  weight_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    _check_kind(self.kind, f'{self.path_name}.kind')

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, C]."""
    if self.kind == 'max':
      y_BC = jnp.max(x_BHWC, axis=(1, 2))
    else:
      y_BC = jnp.mean(x_BHWC.astype(jnp.float32), axis=(1, 2)).astype(x_BHWC.dtype)
    return self.shard(y_BC, self.activation_split_dims_mapping.out)


def _check_kind(kind: str, where: str) -> None:
  if kind not in ('max', 'mean'):
    raise ConfigError(f"{where}: expected 'max' or 'mean', got {kind!r}")
