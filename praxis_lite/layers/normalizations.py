"""Normalizations. Statistics are always in float32; the result has the dtype of the computation.

B batch, T length, D normalized dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer, SplitMapping, WeightSplit
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection, WeightInit

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

  def _declare(self, averages: bool = False, **first_values: float) -> None:
    """Declares variables [D], given by name and initial value: weights, or averages that the layer itself updates."""
    for name, value in first_values.items():
      variable = WeightHParams(
        (self.dims,),
        init=WeightInit.Constant(value),
        dtype=jnp.float32 if averages else None,
        tensor_split_dims_mapping=self.weight_split_dims_mapping.wt,
        collections=frozenset({_SKIP, _KEEP} if averages else {_SKIP}),
      )
      self.create_variable(name, variable, trainable=not averages)

  def output_factors(self) -> Mapping[str, float]:
    return {name: 0.0 for name in ('scale', 'bias') if 'scale' in self._weights and name in self._weights}

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., D] for x [..., D]."""
    return self._output(self._normalize(to_sum_dtype(x)))

  def _normalize(self, x32: jax.Array) -> jax.Array:
    """Returns the normalized float32 array, before scale and bias."""
    raise NotImplementedError

  def _output(self, y: jax.Array) -> jax.Array:
    """Returns y * scale + bias in the dtype of the computation; scale and bias apply only if they are declared."""
    if 'scale' in self._weights:
      y *= self.theta.scale
    if 'bias' in self._weights:
      y += self.theta.bias
    return self.shard(y.astype(self.fprop_dtype))


class RMSNorm(Norm):
  """y = x / sqrt(mean(x^2) + epsilon) * scale (Zhang and Sennrich, 2019).

  Attributes:
    zero_centered: multiply by 1 + scale instead, where the scale begins at 0 (Gemma).
  """

  zero_centered: bool = False

  def setup(self) -> None:
    self._declare(scale=0.0 if self.zero_centered else 1.0)

  def output_factors(self) -> Mapping[str, float]:
    return {'scale': 1.0 if self.zero_centered else 0.0}

  def _normalize(self, x32: jax.Array) -> jax.Array:
    return x32 * _inverse_root_mean_square(x32, -1, self.epsilon)

  def _output(self, y: jax.Array) -> jax.Array:
    if not self.zero_centered:
      return super()._output(y)
    return self.shard((y * (1.0 + self.theta.scale.astype(y.dtype))).astype(self.fprop_dtype))


class RMSNormNoScale(Norm):
  """y = x / sqrt(mean(x^2) + epsilon), without weights.

  Attributes: `dims` and `epsilon`, as in `Norm`.
  """

  weight_split_dims_mapping: Config = template(SplitMapping)

  def _normalize(self, x32: jax.Array) -> jax.Array:
    return x32 * _inverse_root_mean_square(x32, -1, self.epsilon)


class IdentityNorm(Norm):
  """y = x, for blocks that should not normalize; it has no weights."""

  weight_split_dims_mapping: Config = template(SplitMapping)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., D]."""
    return self.shard(x.astype(self.fprop_dtype))


class LayerNorm(Norm):
  """y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias (Ba et al., 2016).

  Attributes:
    use_scale: whether there is a scale.
    use_bias: whether there is a bias.
  """

  use_scale: bool = True
  use_bias: bool = True

  def setup(self) -> None:
    if self.use_scale:
      self._declare(scale=1.0)
    if self.use_bias:
      self._declare(bias=0.0)

  def _normalize(self, x32: jax.Array) -> jax.Array:
    return standardize(x32, -1, self.epsilon)


class GroupNorm(Norm):
  """Normalizes each example over groups of D / num_groups dims, and over all dimensions between batch and D.

  (Wu and He, 2018.)

  Attributes:
    num_groups: a divisor of D.
    initial_scale: initial value of the scale.
  """

  num_groups: int = 32
  initial_scale: float = 1.0

  def setup(self) -> None:
    self._check_range('num_groups', least=1)
    if self.dims % self.num_groups:
      raise ConfigError(f'{self.path_name}.num_groups: {self.num_groups} does not divide dims, {self.dims}')
    self._declare(scale=self.initial_scale, bias=0.0)

  def _normalize(self, x32: jax.Array) -> jax.Array:
    grouped = x32.reshape(*x32.shape[:-1], self.num_groups, self.dims // self.num_groups)
    return standardize(grouped, (*range(1, x32.ndim - 1), x32.ndim), self.epsilon).reshape(x32.shape)


class BatchNorm(Norm):
  """Normalizes each dim over the batch and all other dimensions (Ioffe and Szegedy, 2015).

  In training it uses the mean and variance of the batch, and updates their averages `moving_mean` and
  `moving_variance`; in evaluation it uses the averages. A batch of total weight zero leaves the averages unchanged.

  Attributes:
    decay: moving = decay * moving + (1 - decay) * batch.
    initial_scale: initial value of the scale; with 0 in the last norm of a residual branch, a block begins as the
      identity (Goyal et al., 2017).
    weight_split_dims_mapping: `wt`, [D], of all weights and averages.
  """

  epsilon: float = 1e-3
  decay: float = 0.99
  initial_scale: float = 1.0

  def setup(self) -> None:
    self._declare(scale=self.initial_scale, bias=0.0)
    self._declare(averages=True, moving_mean=0.0, moving_variance=1.0)

  def __call__(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns [B, ..., D].

    Args:
      x: [B, ..., D].
      weights: [B], or any leading dimensions of `x`: weight of each entry in the statistics; None means all are 1.
    """
    x32 = to_sum_dtype(x)
    if self.do_eval:
      mean, variance = self.theta.moving_mean, self.theta.moving_variance
    else:
      mean, variance = self._statistics(x32, weights)
    return self._output((x32 - mean) * jax.lax.rsqrt(variance + self.epsilon))

  def _statistics(self, x32: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(x32.ndim - 1))
    if weights is None:
      weights = jnp.ones(x32.shape[:1])
    real = self.real_rows(x32.shape[0])
    if real is not None:
      weights = jnp.where(real.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0)
    weights = weights.astype(x32.dtype).reshape(*weights.shape, *(1,) * (x32.ndim - weights.ndim))
    sum_over_rows = self.surroundings.sum_over_rows
    total = sum_over_rows(jnp.sum(jnp.broadcast_to(weights, (*x32.shape[:-1], 1))))
    divisor = jnp.where(total > 0, total, 1.0)
    counted = jnp.where(weights > 0, x32, 0.0)
    mean = sum_over_rows(jnp.sum(counted * weights, axis=axes)) / divisor
    variance = sum_over_rows(jnp.sum(jnp.square(counted - mean) * weights, axis=axes)) / divisor
    for name, batch in (('moving_mean', mean), ('moving_variance', variance)):
      moving = getattr(self.theta, name)
      updated = jnp.where(total > 0, self.decay * moving + (1 - self.decay) * jax.lax.stop_gradient(batch), moving)
      self.update_var(name, updated.astype(moving.dtype))
    return mean, variance


def normalize_rows(norm: Norm, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
  """Returns norm(x), [B, ..., D]; `weights`, [B], are the weights of rows, which only batch norms use."""
  return norm(x, weights) if isinstance(norm, BatchNorm) else norm(x)


def standardize(x: jax.Array, axes: int | Sequence[int], epsilon: float) -> jax.Array:
  """Returns x with a mean of 0 and a variance of 1 over `axes`; epsilon is added to the variance."""
  y = x - jnp.mean(x, axis=axes, keepdims=True)
  return y * _inverse_root_mean_square(y, axes, epsilon)


def _inverse_root_mean_square(x: jax.Array, axes: int | Sequence[int], epsilon: float) -> jax.Array:
  return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + epsilon)


def to_units(x: jax.Array, epsilon: float = 1e-12) -> jax.Array:
  """Returns vectors of length 1 along the last dimension, in the dtype of sums. Zeros stay, and have finite gradients.

  `epsilon` is added to their squared lengths.
  """
  x = to_sum_dtype(x)
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + epsilon)
