"""Convolutions of images.

B batch, H height, W width, C input channels, O output channels.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from praxis_lite.config import REQUIRED
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer
from praxis_lite.layers.linears import bias_weight
from praxis_lite.partitioning.constraints import with_sharding_constraint
from praxis_lite.weights import WeightHParams

PADDINGS = ('SAME', 'VALID')

# Height and width whole on each device; batch and channels split as they come.
_ANY = PartitionSpec.UNCONSTRAINED
_WHOLE_IMAGES = PartitionSpec(_ANY, None, None, _ANY)
_WHOLE_FILTERS = PartitionSpec(None, None, _ANY, _ANY)


class Conv2D(Layer):
  """y[i, j] = sum_{h, w} x[i * stride + h * dilation, j * stride + w * dilation] . w[h, w] + b.

  Attributes:
    filter_shape: (height, width, C, O).
    strides: of the height and the width.
    dilations: distance between the filter's taps in the image.
    padding: 'SAME' keeps the size, divided by the stride; 'VALID' takes only what the filter fits into.
    groups: the channels fall into so many groups that are convolved apart; C counts all of them.
    use_bias: whether there is a bias.
    weight_split_dims_mapping: `wt`, [height, width, C / groups, O], of `w`; the bias is split as its last dimension.
    activation_split_dims_mapping: `out`, [B, H, W, O]. Height and width are split after the convolution: images come
      whole to it, because XLA's convolution of split ones is not correct.
  """

  filter_shape: tuple[int, int, int, int] = REQUIRED
  strides: tuple[int, int] = (1, 1)
  dilations: tuple[int, int] = (1, 1)
  padding: str = 'SAME'
  groups: int = 1
  use_bias: bool = True

  def setup(self) -> None:
    check_padding(self.padding, f'{self.path_name}.padding')
    height, width, inputs, outputs = self.filter_shape
    if self.groups < 1 or inputs % self.groups or outputs % self.groups:
      raise ConfigError(f'{self.path_name}.groups: {self.groups} does not divide both {inputs} and {outputs} channels')
    wt = self.weight_split_dims_mapping.wt
    shape = (height, width, inputs // self.groups, outputs)
    self.create_variable('w', WeightHParams(shape, tensor_split_dims_mapping=wt))
    if self.use_bias:
      self.create_variable('b', bias_weight(outputs, None if wt is None else tuple(wt)[-1:]))

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, H', W', O]."""
    # XLA's partitioner gets a convolution or its gradients wrong, and says nothing, where height or width are split
    # over one axis of a mesh that has others. The constraints hold for the gradients too, convolutions as well.
    y_BHWO = jax.lax.conv_general_dilated(
      with_sharding_constraint(x_BHWC.astype(self.fprop_dtype), _WHOLE_IMAGES),
      with_sharding_constraint(self.theta.w, _WHOLE_FILTERS),
      self.strides,
      self.padding,
      rhs_dilation=self.dilations,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=self.groups,
    )
    y_BHWO = with_sharding_constraint(y_BHWO, _WHOLE_IMAGES)
    if self.use_bias:
      y_BHWO += self.theta.b
    return self.shard(y_BHWO, self.activation_split_dims_mapping.out)


def check_padding(padding: str, where: str) -> None:
  """Raises ConfigError, naming the field `where`, unless `padding` is known."""
  if padding not in PADDINGS:
    raise ConfigError(f'{where}: expected one of {", ".join(PADDINGS)}, got {padding!r}')
