"""Linear layers from model dims to heads and back, the numbers and sizes of heads, and a scale for each dim of a head.

D model dims, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError, check_choice, check_range
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.products import MATMULS, multiply_by_w
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping, WeightHParams


class ProjectionWeightSplit(WeightSplit):
  """`wt`: one entry per dimension of `in_shape` and `out_shape`; `bias`: one per dimension of `out_shape`."""

  bias: SplitDimsMapping = None


class Projection(Layer):
  """y = x . w + b, contracting all of `in_shape`: a linear layer from dims to heads, or back.

  Attributes:
    in_shape: trailing dimensions of the input.
    out_shape: trailing dimensions of the output.
    use_bias: whether there is a bias.
    matmul: see `Linear`.
  """

  product_weights: ClassVar[Mapping[str, str]] = {'w': 'in'}

  in_shape: tuple[int, ...] = REQUIRED
  out_shape: tuple[int, ...] = REQUIRED
  use_bias: bool = False
  matmul: str = 'fprop'
  weight_split_dims_mapping: Config = template(ProjectionWeightSplit)

  def setup(self) -> None:
    check_choice(f'{self.path_name}.matmul', self.matmul, MATMULS)
    rank_in, rank = len(self.in_shape), len(self.in_shape) + len(self.out_shape)
    weight = WeightHParams(
      (*self.in_shape, *self.out_shape),
      tensor_split_dims_mapping=self.weight_split_dims_mapping.wt,
      fan_in_axes=tuple(range(rank_in)),
      fan_out_axes=tuple(range(rank_in, rank)),
    )
    self.create_variable('w', weight)
    if self.use_bias:
      self.create_variable('b', bias_weight(self.out_shape, self.weight_split_dims_mapping.bias))

  def output_factors(self) -> Mapping[str, float]:
    return dict.fromkeys(self._weights, 0.0)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., *out_shape] for x [..., *in_shape]."""
    y = multiply_by_w(self, x, len(self.in_shape), self.matmul)
    if self.use_bias:
      y += self.theta.b
    return self.shard(y)

  def weight(self) -> jax.Array:
    """In a call: returns the weight, [*in_shape, *out_shape], for callers that contract other dimensions of it."""
    return self.theta.w


class PerDimScale(Layer):
  """y = x softplus(w) / log 2, with a weight for each dim of a head; weights begin at 0, where y = x (Praxis).

  Attributes:
    dims: H.
    weight_split_dims_mapping: `wt`, [H].
  """

  dims: int = REQUIRED
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    self.create_variable('w', bias_weight(self.dims, self.weight_split_dims_mapping.wt))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., H] for x [..., H]."""
    return self.shard(x * (jax.nn.softplus(self.theta.w) / math.log(2)).astype(x.dtype))


def split_projection(
  projection: Config[Projection], wt: DeclaredSplit | None, dims: tuple[int | None, ...], rank_in: int
) -> Config[Projection]:
  """Splits a projection's weight and bias by the entries `dims` of `wt`, a mapping of [D, N, H].

  See `DeclaredSplit.pick`.
  """
  if wt is not None:
    split = wt.pick(*dims)
    projection.weight_split_dims_mapping.set(wt=split, bias=split[rank_in:])
  return projection


def head_sizes(
  path: str, model_dims: int, num_heads: int, num_kv_heads: int | None, dims_per_head: int | None
) -> tuple[int, int]:
  """Returns K, by default N, and H, by default D / N; raises a ConfigError, which names `path`, if they do not fit."""
  kv_heads = num_heads if num_kv_heads is None else num_kv_heads
  for field, size in (('num_kv_heads', num_kv_heads), ('dims_per_head', dims_per_head)):
    check_range(f'{path}.{field}', size, least=1)
  if num_heads % kv_heads:
    raise ConfigError(
      f'{path}.num_kv_heads: {kv_heads} does not divide num_heads, {num_heads}, so heads cannot be grouped'
    )
  if dims_per_head is None and model_dims % num_heads:
    raise ConfigError(
      f'{path}.dims_per_head: num_heads, {num_heads}, does not divide the model dims, {model_dims}; set dims_per_head'
    )
  return kv_heads, model_dims // num_heads if dims_per_head is None else dims_per_head
