"""PartialRotaryPositions: rotary positions for the first dims of each head; the other dims are not rotated.

B batch, T length, N heads, H dims per head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.positions import RotaryPositions


class PartialRotaryPositions(RotaryPositions):
  """Rotates the first dims of each head, by the angles that a head with only these dims would have.

  Attributes:
    share: fraction of the H dims that are rotated, such as 0.5; share * H must be even.
  """

  share: float = 0.5

  def setup(self) -> None:
    super().setup()
    if self._turned % 2 or not 0 < self._turned <= self.dims:
      raise ConfigError(
        f'{self.path_name}.share: {self.share} of {self.dims} dims is {self._turned}; expected an even number from '
        f'2 to {self.dims}'
      )

  @property
  def _turned(self) -> int:
    return int(self.dims * self.share)

  def __call__(self, x_BTNH: jax.Array, pos_BT: jax.Array | None = None) -> jax.Array:
    """Returns `x_BTNH` with its first dims rotated; see `RotaryPositions`."""
    turned, plain = jnp.split(x_BTNH, [self._turned], axis=-1)
    return jnp.concatenate([super().__call__(turned, pos_BT), plain], axis=-1)
