"""DoRA: updates of low rank that change only the directions of weights, and learned magnitudes (Liu et al., 2024).

    y = x (W + s A B) (1 + m) |W| / |W + s A B| + b      m [*O]; | | is the norm over the inputs of each output

In the paper, the learned magnitude of an output starts as |W|. Here m is its relative change, which starts at 0, so
that it need not be computed from weights that come from another run.

I input dims, O output dims, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.lora import Lora, LoraLayer, LoraLinear, LoraProjection
from praxis_lite.layers.low_rank import derived_split, scaled_product
from praxis_lite.layers.projections import Projection
from praxis_lite.sharding.weights import DeclaredSplit, WeightHParams, WeightInit

LEAST_NORM = 1e-30


class DoraLayer(LoraLayer):
  """Base of the layers with DoRA, whose variable `dora_magnitude` is m."""

  def _create_magnitude(self, out_shape: tuple[int, ...], rank_in: int) -> None:
    wt: DeclaredSplit | None = self.weight_split_dims_mapping.wt
    split = None if wt is None else derived_split(wt[rank_in:], self.path_name)
    weight = WeightHParams(
      out_shape,
      WeightInit.Constant(0.0),
      self.lora.dtype,
      tensor_split_dims_mapping=split,
      fan_in_axes=(),
      fan_out_axes=tuple(range(len(out_shape))),
    )
    self.create_variable('dora_magnitude', weight)

  def _scale_output(self, y: jax.Array) -> jax.Array:
    """In a call: returns the layer's output, given `y`, which is its output without the factors of DoRA."""
    bias = self.theta.b if 'b' in self._weights else jnp.zeros((), y.dtype)
    return ((y - bias) * self._factor() + bias).astype(y.dtype)

  def _factor(self) -> jax.Array:
    """In a call: returns (1 + m) |W| / |W + s A B|, [*O]."""
    w, magnitude = self.theta.w, self.theta.dora_magnitude
    return output_factors(w, self.lora.weight(), magnitude, magnitude.ndim)[(0,) * (w.ndim - magnitude.ndim)]

  @property
  def adapted_weights(self) -> dict[str, tuple[Path, ...]]:
    return {'w': (('lora', 'a'), ('lora', 'b'), ('dora_magnitude',))}

  def merge_weight(self, name: str, w: jax.Array, parts: Sequence[jax.Array], sign: int = 1) -> jax.Array:
    if sign < 0:
      raise ConfigError(f'{self.path_name}: DoRA cannot be taken out of a merged weight; keep the weights before it')
    a, b, magnitude = parts
    update = scaled_product(a, b, self.update_scale, w.shape)
    w = w.astype(update.dtype)
    return (w + update) * output_factors(w, update, magnitude, len(self._weights['dora_magnitude'].shape))


class DoraLinear(LoraLinear, DoraLayer):
  """A `Linear` with DoRA: the child `lora`, and `dora_magnitude`, [O]. Attributes: the same as for `LoraLinear`."""

  def setup(self) -> None:
    super().setup()
    self._create_magnitude((self.output_dims,), 1)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] for x [..., I]."""
    y = super().__call__(x)
    return y if self.surroundings.without_adapters else self.shard(self._scale_output(y))


class DoraProjection(LoraProjection, DoraLayer):
  """A `Projection` with DoRA, like `DoraLinear`. Attributes: the same as for `LoraProjection`."""

  def setup(self) -> None:
    super().setup()
    self._create_magnitude(self.out_shape, len(self.in_shape))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., *out_shape] for x [..., *in_shape]."""
    y = super().__call__(x)
    return y if self.surroundings.without_adapters else self.shard(self._scale_output(y))

  def weight(self) -> jax.Array:
    w = super().weight()
    return w if self.surroundings.without_adapters else (w * self._factor()).astype(w.dtype)


class Dora(Lora):
  """DoRA for linear layers and projections of attention. Attributes: the same as for `Lora`."""

  adaptable = 'linear layers and projections'
  adapted = {Linear: DoraLinear, Projection: DoraProjection}


def output_factors(w: jax.Array, update: jax.Array, magnitude: jax.Array, num_outputs: int) -> jax.Array:
  """Returns (1 + m) |W| / |W + update|, [*stack, 1, ..., *O] float32; no gradient flows through the norms.

  The weight and its update are [*stack, *I, *O]; `magnitude` is m, [*stack, *O], with `num_outputs` dimensions O.
  """
  n = magnitude.ndim - num_outputs
  axes = tuple(range(n, w.ndim - num_outputs))
  w, update = w.astype(jnp.float32), update.astype(jnp.float32)
  before, after = (jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True)) for x in (w, w + update))
  ratio = jax.lax.stop_gradient(before / jnp.maximum(after, LEAST_NORM))
  return (1 + magnitude.reshape(ratio.shape)) * ratio
