"""SpectrumAugmenter: masks random bands of frequencies and stretches of time in features (SpecAugment).

B batch, T frames, M frequencies.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer


class SpectrumAugmenter(Layer):
  """Sets random bands and stretches of each row to 0 in training; in evaluation, does nothing (Park et al., 2019).

  The width of each mask is uniform from 0 to the largest width, and its start is uniform. Masks may overlap.

  Attributes:
    freq_mask_count, freq_mask_max_bins: number of bands per row, and the largest number of frequencies in a band.
    time_mask_count, time_mask_max_frames: number of stretches per row, and the largest number of frames in a stretch.
      Stretches do not reach into padding.
    time_mask_max_ratio: the largest share of a row's frames that a stretch may have.
    activation_split_dims_mapping: `out`, [B, T, M].
  """

  noise_fields: ClassVar[tuple[str, ...]] = ('freq_mask_count', 'time_mask_count')

  freq_mask_count: int = 2
  freq_mask_max_bins: int = 27
  time_mask_count: int = 2
  time_mask_max_frames: int = 40
  time_mask_max_ratio: float = 1.0

  def setup(self) -> None:
    self._check_range('freq_mask_count', 'freq_mask_max_bins', 'time_mask_count', 'time_mask_max_frames', least=0)
    self._check_range('time_mask_max_ratio', least=0)
    if self.time_mask_max_ratio > 1:
      raise ConfigError(f'{self.path_name}.time_mask_max_ratio: expected at most 1, got {self.time_mask_max_ratio}')

  def __call__(self, x_BTM: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
    """Returns features with masks, [B, T, M].

    `paddings`, [B, T], are nonzero for padding after the frames; None means no padding.
    """
    x_BTM = x_BTM.astype(self.fprop_dtype)
    if self.do_eval or not (self.freq_mask_count or self.time_mask_count):
      return self.shard(x_BTM)
    B, T, M = x_BTM.shape
    frames_B = jnp.full((B,), T) if paddings is None else jnp.sum(paddings == 0, axis=1)
    longest_B = jnp.minimum(jnp.floor(self.time_mask_max_ratio * frames_B), self.time_mask_max_frames)
    widest_B = jnp.full((B,), min(self.freq_mask_max_bins, M))
    hidden_BT = self._draw_masks(T, self.time_mask_count, frames_B, longest_B)
    hidden_BM = self._draw_masks(M, self.freq_mask_count, jnp.full((B,), M), widest_B)
    return self.shard(jnp.where(hidden_BT[..., None] | hidden_BM[:, None], 0, x_BTM))

  def _draw_masks(self, size: int, count: int, length_B: jax.Array, most_B: jax.Array) -> jax.Array:
    """Returns bool [B, size], True inside of `count` masks of at most `most_B` entries, among the first `length_B`."""
    # Rows are dimension 0, so that rows added to fill a batch do not change the draws of other rows.
    u_B2C = jax.random.uniform(self.next_prng_key(), (len(length_B), 2, count), jnp.float32)
    # The minimum is needed because u * n, with u < 1 and n an integer, may round up to n in float32.
    width_BC = jnp.minimum(jnp.floor(u_B2C[:, 0] * (most_B[:, None] + 1)), most_B[:, None])
    free_BC = length_B[:, None] - width_BC
    start_BC = jnp.minimum(jnp.floor(u_B2C[:, 1] * (free_BC + 1)), free_BC)[..., None]
    at = jnp.arange(size)
    return jnp.any((at >= start_BC) & (at < start_BC + width_BC[..., None]), axis=1)
