"""IA3: a learned factor for each output, or input, of a frozen layer (Liu et al., 2022).

    y = (x W + b) l, l [*O]      or, of the inputs      y = (x l) W + b, l [*I]

I input dims, O output dims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path
from praxis_lite.layers.layer_patterns import check_regexes
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.lora import AdaptedLayer, Adapter
from praxis_lite.layers.low_rank import derived_split
from praxis_lite.layers.projections import Projection
from praxis_lite.sharding.weights import DeclaredSplit, WeightHParams, WeightInit, is_dtype

_OF_INPUTS = r'.*\.ff\.down'


class Ia3Layer(AdaptedLayer):
  """Base of the layers with IA3, whose variable `ia3_scale` is l.

  Attributes:
    ia3_of_inputs: whether l belongs to the inputs.
    ia3_dtype: storage dtype of l; None uses `dtype`.
  """

  ia3_of_inputs: bool = False
  ia3_dtype: DTypeLike | None = None

  def _create_scale(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
    wt: DeclaredSplit | None = self.weight_split_dims_mapping.wt
    shape, rank_in, split = in_shape if self.ia3_of_inputs else out_shape, len(in_shape), None
    if wt is not None:
      split = derived_split(wt[:rank_in] if self.ia3_of_inputs else wt[rank_in:], self.path_name)
    weight = WeightHParams(
      shape,
      WeightInit.Constant(1.0),
      self.ia3_dtype,
      tensor_split_dims_mapping=split,
      fan_in_axes=(),
      fan_out_axes=tuple(range(len(shape))),
    )
    self.create_variable('ia3_scale', weight)

  def _scale_call(self, compute: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `compute(x)` with inputs or outputs multiplied by the factors; `compute` calls the frozen layer."""
    if self.surroundings.without_adapters:
      return compute(x)
    if self.ia3_of_inputs:
      return compute(x.astype(self.fprop_dtype) * self.theta.ia3_scale)
    return self.shard(compute(x) * self.theta.ia3_scale)

  @property
  def adapted_weights(self) -> dict[str, tuple[Path, ...]]:
    names = ['b'] if 'b' in self._weights and not self.ia3_of_inputs else []
    return dict.fromkeys(('w', *names), (('ia3_scale',),))

  def merge_weight(self, name: str, w: jax.Array, parts: Sequence[jax.Array], sign: int = 1) -> jax.Array:
    (scale,) = parts
    rank, own = len(self._weights['ia3_scale'].shape), len(self._weights[name].shape)
    n = scale.ndim - rank
    ones = (1,) * (own - rank)
    shape = scale.shape[:n]
    shape += (*scale.shape[n:], *ones) if self.ia3_of_inputs else (*ones, *scale.shape[n:])
    factor = scale.astype(jnp.promote_types(scale.dtype, jnp.float32)).reshape(shape)
    return w * factor if sign > 0 else w / factor


class Ia3Linear(Linear, Ia3Layer):
  """A `Linear` with IA3. Attributes: the same as for `Linear` and `Ia3Layer`."""

  def setup(self) -> None:
    super().setup()
    self._create_scale((self.input_dims,), (self.output_dims,))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] for x [..., I]."""
    return self._scale_call(super().__call__, x)


class Ia3Projection(Projection, Ia3Layer):
  """A `Projection` with IA3. Attributes: the same as for `Projection` and `Ia3Layer`."""

  def setup(self) -> None:
    super().setup()
    self._create_scale(self.in_shape, self.out_shape)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., *out_shape] for x [..., *in_shape]."""
    return self._scale_call(super().__call__, x)

  def weight(self) -> jax.Array:
    w = super().weight()
    if self.surroundings.without_adapters:
      return w
    return self.merge_weight('w', w, [self.theta.ia3_scale]).astype(w.dtype)


class Ia3(Adapter):
  """Factors of keys, values, and hidden activations of feed-forward layers, as in the paper, or of other layers.

  Attributes:
    layers: see `Adapter`; linear layers and projections.
    of_inputs: regex, or several, for the layers whose inputs are scaled instead of their outputs; except for the
      default, each regex must match one of these layers.
    dtype: storage dtype of the factors; None uses that of the layer.
  """

  adaptable = 'linear layers and projections'
  adapted = {Linear: Ia3Linear, Projection: Ia3Projection}

  layers: str | tuple[str, ...] | None = (r'.*\.attention\.(key|value)', r'.*\.ff\.down')
  of_inputs: str | tuple[str, ...] = _OF_INPUTS
  dtype: DTypeLike | None = 'float32'

  def __post_init__(self) -> None:
    super().__post_init__()
    check_regexes('Ia3.of_inputs', self._of_inputs)
    if self.dtype is not None and not is_dtype(self.dtype, jnp.floating):
      raise ConfigError(f'Ia3.dtype: expected a floating dtype, such as float32, or None, got {self.dtype!r}')

  @property
  def _of_inputs(self) -> tuple[str, ...]:
    return (self.of_inputs,) if isinstance(self.of_inputs, str) else tuple(self.of_inputs)

  @property
  def further_patterns(self) -> dict[str, tuple[str, ...]]:
    # The default need not match any layer, because `layers` may exclude the layers that it is for.
    return {} if self.of_inputs == _OF_INPUTS else {'of_inputs': self._of_inputs}

  def adapt_at(self, name: str, config: Config) -> Config:
    assert target(config) in self.adapted
    of_inputs = any(re.fullmatch(pattern, name) for pattern in self._of_inputs)
    return self._change_class(config, ia3_of_inputs=of_inputs, ia3_dtype=self.dtype)
