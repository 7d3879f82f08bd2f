"""ValueResidual: mixes the values of attention with those of the first layer (Zhou et al., 2024, ResFormer).

    value = first_weight * value of the first layer + own_weight * value of this layer

B batch, S length, K kv heads, H dims per head.
"""

from __future__ import annotations

import jax

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer, SplitMapping, WeightSplit
from praxis_lite.layers.linears import bias_weight
from praxis_lite.sharding.weights import WeightInit


class ValueResidual(Layer):
  """Mixes the values of an attention layer with the values of the first layer.

  Attributes:
    num_heads: K, set by the attention layer.
    first_weight, own_weight: the factors; with `is_learned`, their initial values.
    is_learned: whether each kv head has its own factors, the variables `first` and `own`, [K], which are trained.
    weight_split_dims_mapping: `wt`, [K], of `first` and `own`.
  """

  num_heads: int = REQUIRED
  first_weight: float = 0.5
  own_weight: float = 0.5
  is_learned: bool = False
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    if self.is_learned:
      for name, value in (('first', self.first_weight), ('own', self.own_weight)):
        wt = self.weight_split_dims_mapping.wt
        self.create_variable(name, bias_weight(self.num_heads, wt, WeightInit.Constant(value)))

  def __call__(self, first_BSKH: jax.Array, own_BSKH: jax.Array) -> jax.Array:
    """Returns the mixed values, [B, S, K, H].

    Raises:
      ConfigError: the values of the first layer have a different shape.
    """
    if first_BSKH.shape != own_BSKH.shape:
      raise ConfigError(
        f'{self.path_name}: the values of the first layer have shape {first_BSKH.shape}, and those of this layer '
        f'{own_BSKH.shape}; all layers need the same num_kv_heads and dims_per_head'
      )
    if not self.is_learned:
      return self.first_weight * first_BSKH + self.own_weight * own_BSKH
    return self.theta.first[:, None] * first_BSKH + self.theta.own[:, None] * own_BSKH


def mixes_values(block: Config) -> bool:
  """Whether the attention in the config of a block mixes its values with the values of the first block."""
  return getattr(getattr(block, 'attention_tpl', None), 'value_residual_tpl', None) is not None


def remove_value_residual(block: Config) -> Config:
  """Returns the config of a block without its value residual, as the first block needs it."""
  block = block.clone()
  if mixes_values(block):
    block.attention_tpl.value_residual_tpl = None
  return block
