"""Normalizations. Statistics are in float32, whatever dtype the layer computes in; the result is in that dtype.

D normalized dims, B batch, T length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer, WeightSplit
from praxis_lite.weights import SplitDimsMapping, WeightHParams, WeightHParamsCollection, WeightInit

_SKIP = WeightHParamsCollection.SKIP_REGULARIZATION
_KEEP = WeightHParamsCollection.KEEP_FLOAT32


class Norm(Layer):
  """Base of the normalizations over the last dimension.

  Attributes:
    dims: D.
    epsilon: added to the variance.
    weight_split_dims_mapping: `wt`, [D], of all weights.
  """

  dims: int = REQUIRED
  epsilon: float = 1e-6
  weight_split_dims_mapping: Config = template(WeightSplit)


class RMSNorm(Norm):
  """y = x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich, 2019)."""

  def setup(self) -> None:
    self.create_variable('scale', _affine_weight(self.dims, 1.0, self.weight_split_dims_mapping.wt))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., D] of x [..., D]."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon) * self.theta.scale
    return self.shard(y.astype(self.fprop_dtype))


class LayerNorm(Norm):
  """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias (Ba et al., 2016).

  Attributes:
    use_scale: whether there is a scale.
    use_bias: whether there is a bias.
  """

  use_scale: bool = True
  use_bias: bool = True

  def setup(self) -> None:
    wt = self.weight_split_dims_mapping.wt
    if self.use_scale:
      self.create_variable('scale', _affine_weight(self.dims, 1.0, wt))
    if self.use_bias:
      self.create_variable('bias', _affine_weight(self.dims, 0.0, wt))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., D] of x [..., D]."""
    x32 = x.astype(jnp.float32)
    y = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
    if self.use_scale:
      y *= self.theta.scale
    if self.use_bias:
      y += self.theta.bias
    return self.shard(y.astype(self.fprop_dtype))


class GroupNorm(Norm):
  """Normalizes each example over groups of D / num_groups dims and all dimensions between (Wu and He, 2018).

  Attributes:
    num_groups: a divisor of D.
  """

  num_groups: int = 32

  def setup(self) -> None:
    if self.num_groups < 1 or self.dims % self.num_groups:
      raise ConfigError(f'{self.path_name}.num_groups: {self.num_groups} does not divide dims, {self.dims}')
    wt = self.weight_split_dims_mapping.wt
    self.create_variable('scale', _affine_weight(self.dims, 1.0, wt))
    self.create_variable('bias', _affine_weight(self.dims, 0.0, wt))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [B, ..., D] of x [B, ..., D]."""
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], self.num_groups, self.dims // self.num_groups)
    axes = (*range(1, x.ndim - 1), x.ndim)
    y = grouped - jnp.mean(grouped, axis=axes, keepdims=True)
    y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axes, keepdims=True) + self.epsilon)
    y = y.reshape(x.shape) * self.theta.scale + self.theta.bias
    return self.shard(y.astype(self.fprop_dtype))


class BatchNorm(Norm):
  """Normalizes each dim over the batch and all other dimensions (Ioffe and Szegedy, 2015).

  In training, with the mean and variance of the batch, which also move the averages `moving_mean` and
  `moving_variance`; in evaluation, with these averages. A batch without weight leaves the averages as they are.

  Attributes:
    decay: moving = decay * moving + (1 - decay) * batch.
    weight_split_dims_mapping: `wt`, [D], of all weights and averages.
  """

  epsilon: float = 1e-3
  decay: float = 0.99

  def setup(self) -> None:
    wt = self.weight_split_dims_mapping.wt
    self.create_variable('scale', _affine_weight(self.dims, 1.0, wt))
    self.create_variable('bias', _affine_weight(self.dims, 0.0, wt))
    for name, value in (('moving_mean', 0.0), ('moving_variance', 1.0)):
      moving = WeightHParams(
        (self.dims,),
        init=WeightInit.Constant(value),
        dtype=jnp.float32,
        tensor_split_dims_mapping=wt,
        collections=frozenset({_SKIP, _KEEP}),
      )
      self.create_variable(name, moving, trainable=False)

  def __call__(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns [B, ..., D].

    Args:
      x: [B, ..., D].
      weights: [B], or any leading dimensions of `x`: how much each entry counts in the statistics. None is ones.
    """
    x32 = x.astype(jnp.float32)
    if self.do_eval:
      mean, variance = self.theta.moving_mean, self.theta.moving_variance
    else:
      mean, variance = self._statistics(x32, weights)
    y = (x32 - mean) * jax.lax.rsqrt(variance + self.epsilon) * self.theta.scale + self.theta.bias
    return self.shard(y.astype(self.fprop_dtype))

  def _statistics(self, x32: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(x32.ndim - 1))
    if weights is None:
      weights = jnp.ones(x32.shape[:1])
    weights = weights.astype(jnp.float32).reshape(*weights.shape, *(1,) * (x32.ndim - weights.ndim))
    sum_over_rows = self.surroundings.sum_over_rows
    total = sum_over_rows(jnp.sum(jnp.broadcast_to(weights, (*x32.shape[:-1], 1))))
    divisor = jnp.where(total > 0, total, 1.0)
    counted = jnp.where(weights > 0, x32, 0.0)
    mean = sum_over_rows(jnp.sum(counted * weights, axis=axes)) / divisor
    variance = sum_over_rows(jnp.sum(jnp.square(counted - mean) * weights, axis=axes)) / divisor
    for name, batch in (('moving_mean', mean), ('moving_variance', variance)):
      moving = getattr(self.theta, name)
      updated = jnp.where(total > 0, self.decay * moving + (1 - self.decay) * jax.lax.stop_gradient(batch), moving)
      self.update_var(name, updated)
    return mean, variance


def _affine_weight(dims: int, value: float, split: SplitDimsMapping) -> WeightHParams:
  return WeightHParams(
    (dims,), init=WeightInit.Constant(value), tensor_split_dims_mapping=split, collections=frozenset({_SKIP})
  )
