"""Linear layers and convolutions with normalized weights.

I input dims, O output dims.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from praxis_lite.layers.images import Conv2D
from praxis_lite.layers.linears import Linear, bias_weight
from praxis_lite.layers.normalizations import standardize
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.products import matmul
from praxis_lite.sharding.weights import NO_DECAY_FLOAT32, WeightHParams, WeightInit

_EPSILON = 1e-12  # Added to squared norms, so that a weight of zeros stays zero, with finite gradients.


class _NormalizedLinear(Linear):
  """Base of the linear layers whose weight is computed from the variable `w`."""

  def _normalize(self, w: jax.Array) -> jax.Array:
    """Returns the weight [I, O] that multiplies the input; w is float32."""
    raise NotImplementedError

  def output_factors(self) -> Mapping[str, float]:
    return {}  # Norms of weights do not change when the weights are multiplied.

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] for x [..., I]."""
    w = self._normalize(to_sum_dtype(self.theta.w)).astype(self.fprop_dtype)
    y = matmul(x.astype(self.fprop_dtype), w, 1, self.matmul, f'{self.path_name}.matmul')
    if self.use_bias:
      y += self.theta.b
    return self.shard(y)


class WeightNormalizedLinear(_NormalizedLinear):
  """y = x w g / |w| + b, with the norm |w| and the learned length g of each column (Salimans and Kingma, 2016).

  Attributes: the same as for `Linear`; `g`, [O], begins at 1 and is split as the last dimension.
  """

  def setup(self) -> None:
    super().setup()
    wt = self.weight_split_dims_mapping.wt
    g = bias_weight(self.output_dims, None if wt is None else wt[-1:], WeightInit.Constant(1.0))
    self.create_variable('g', g)

  def _normalize(self, w: jax.Array) -> jax.Array:
    return w * (self.theta.g * jax.lax.rsqrt(jnp.sum(jnp.square(w), axis=0) + _EPSILON))


class SpectralNormLinear(_NormalizedLinear):
  """y = x w / sigma + b, where sigma is the largest singular value of w (Miyato et al., 2018).

  Each call in training improves the estimate of the singular vector by a step of the power method, and stores it in
  the variable `u`, [I]; sigma = |u^T w|. No gradient flows through u.

  Attributes: the same as for `Linear`; `u` is split as the first dimension.
  """

  def setup(self) -> None:
    super().setup()
    wt, init = self.weight_split_dims_mapping.wt, WeightInit.GaussianSqrtDim()
    split = None if wt is None else wt[:1]
    u = WeightHParams((self.input_dims,), init, 'float32', split, collections=NO_DECAY_FLOAT32)
    self.create_variable('u', u, trainable=False)

  def _normalize(self, w: jax.Array) -> jax.Array:
    fixed = jax.lax.stop_gradient(w)
    u = _unit(jax.lax.stop_gradient(self.theta.u).astype(w.dtype))
    if not self.do_eval:
      u = _unit(fixed @ _unit(u @ fixed))
      self.update_var('u', u)
    v = _unit(u @ fixed)
    return w / jnp.maximum(u @ w @ v, _EPSILON)


class StandardizedConv2D(Conv2D):
  """A convolution with filters (w - mean(w)) / sqrt(var(w) + epsilon), for each output channel (Qiao et al., 2019).

  Attributes: the same as for `Conv2D`, and
    epsilon: added to the variance.
  """

  epsilon: float = 1e-8

  def _filters(self) -> jax.Array:
    return standardize(to_sum_dtype(self.theta.w), (0, 1, 2), self.epsilon).astype(self.fprop_dtype)


def _unit(x: jax.Array) -> jax.Array:
  """Returns a vector of length 1 in the direction of x; zeros if x is zero."""
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x)) + _EPSILON**2)
