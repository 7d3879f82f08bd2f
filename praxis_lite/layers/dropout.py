"""Dropout of entries (Srivastava et al., 2014), and of the residual branches of whole rows (Huang et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer


class Dropout(Layer):
  """Sets entries to zero at random in training, and scales the others by 1 / (1 - rate); in evaluation, does nothing.

  Attributes:
    rate: probability that an entry is dropped, at least 0 and less than 1. 0 needs no PRNG key.
    broadcast_dims: dimensions along which the mask is shared, such as (-2,) for all positions of a sequence.
  """

  noise_fields: ClassVar[tuple[str, ...]] = ('rate',)

  rate: float = 0.0
  broadcast_dims: Sequence[int] = ()

  def setup(self) -> None:
    self._check_range('rate', least=0, below=1)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns an array of the shape and dtype of x."""
    if self.rate == 0 or self.do_eval:
      return self.shard(x)
    shape = list(x.shape)
    for dim in self.broadcast_dims:
      if not -x.ndim <= dim < x.ndim:
        raise ConfigError(f'{self.path_name}.broadcast_dims: an array of shape {x.shape} has no dimension {dim}')
      shape[dim] = 1
    kept = jax.random.bernoulli(self.next_prng_key(), 1 - self.rate, shape)
    return self.shard(jnp.where(kept, x / (1 - self.rate), 0))


class StochasticResidual(Layer):
  """y = x + residual_weight * branch, where training leaves out the branch of whole rows at random: stochastic depth.

  The branches of other rows are scaled by 1 / (1 - rate); in evaluation, no branch is left out (Huang et al., 2016). So
  an example skips some of the blocks, and a deep network trains as an ensemble of shallower ones.

  Attributes:
    rate: probability that the branch of a row is left out, at least 0 and less than 1. 0 needs no PRNG key.
    residual_weight: factor of the branch.
  """

  noise_fields: ClassVar[tuple[str, ...]] = ('rate',)

  rate: float = 0.0
  residual_weight: float = 1.0

  def setup(self) -> None:
    self._check_range('rate', least=0, below=1)

  def __call__(self, x: jax.Array, branch: jax.Array) -> jax.Array:
    """Returns the residual stream x, [B, ...], with `branch`, [B, ...], added to it."""
    if self.rate and not self.do_eval:
      kept = jax.random.bernoulli(self.next_prng_key(), 1 - self.rate, (branch.shape[0], *(1,) * (branch.ndim - 1)))
      branch = jnp.where(kept, branch / (1 - self.rate), 0)
    return self.shard(x + (branch if self.residual_weight == 1 else self.residual_weight * branch))
