"""Linear layers: y = x w + b over the last dimension.

I input dims, O output dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.products import MATMULS, multiply_by_w
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams, WeightHParamsCollection, WeightInit

_ZEROS = WeightInit.Constant(0.0)


class Bias(Layer):
  """y = x + b.

  Attributes:
    dims: size of the last dimension.
    weight_split_dims_mapping: `wt`, [dims], of `b`.
  """

  dims: int = REQUIRED
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    self.create_variable('b', bias_weight(self.dims, self.weight_split_dims_mapping.wt))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., dims] with the bias added."""
    return self.shard(x.astype(self.fprop_dtype) + self.theta.b)


class Linear(Layer):
  """y = x w, plus a bias if there is one.

  Attributes:
    input_dims: I.
    output_dims: O.
    use_bias: whether there is a bias.
    matmul: 'fprop' multiplies in `fprop_dtype`; 'fp8' and 'int8' round both operands to 8 bits; see `products.py`.
    weight_split_dims_mapping: `wt`, [I, O], of `w`; the bias is split like the last dimension.
  """

  product_weights: ClassVar[Mapping[str, str]] = {'w': 'in'}

  input_dims: int = REQUIRED
  output_dims: int = REQUIRED
  use_bias: bool = False
  matmul: str = 'fprop'
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    check_choice(f'{self.path_name}.matmul', self.matmul, MATMULS)
    wt = self.weight_split_dims_mapping.wt
    self.create_variable('w', WeightHParams((self.input_dims, self.output_dims), tensor_split_dims_mapping=wt))
    if self.use_bias:
      self.create_variable('b', bias_weight(self.output_dims, None if wt is None else wt[-1:]))

  def output_factors(self) -> Mapping[str, float]:
    return dict.fromkeys(self._weights, 0.0)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] for x [..., I]."""
    y = multiply_by_w(self, x, 1, self.matmul)
    if self.use_bias:
      y += self.theta.b
    return self.shard(y)


def bias_weight(
  dims: int | tuple[int, ...], split: SplitDimsMapping = None, init: WeightInit = _ZEROS
) -> WeightHParams:
  """Returns the declaration of a bias, or of a scale, of this size or shape; it is not regularized."""
  return WeightHParams(
    (dims,) if isinstance(dims, int) else dims,
    init=init,
    tensor_split_dims_mapping=split,
    collections=frozenset({WeightHParamsCollection.SKIP_REGULARIZATION}),
  )


def draw_bias(layer: Layer, fan_in: int) -> None:
  """In `setup` of a layer's parent: initializes the layer's bias `b` uniformly within 1 / sqrt(fan_in), not to zero.

  So inputs of zeros do not become vectors of zeros, for which the gradient of a norm has the factor 1 / sqrt(epsilon).
  A layer without a bias is left as it is.
  """
  if (bias := layer._weights.get('b')) is not None:
    layer._weights['b'] = dataclasses.replace(bias, init=WeightInit.Uniform(fan_in**-0.5))
