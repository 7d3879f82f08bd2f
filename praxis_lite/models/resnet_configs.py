"""Configs of residual networks, and of image classifiers with a residual network."""

from __future__ import annotations

from typing import TypedDict, Unpack

from jax.typing import DTypeLike

from praxis_lite.common.config import Config
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.dropout import StochasticResidual
from praxis_lite.layers.images import Conv2D, Pooling
from praxis_lite.layers.normalizations import BatchNorm, GroupNorm
from praxis_lite.layers.resnet import ResNet, ResNetBlock
from praxis_lite.layers.weight_norms import StandardizedConv2D
from praxis_lite.models.classifier import ClassificationModel
from praxis_lite.sharding.weights import WeightInit

RESNET_STYLES = ('v1.5', 'v2', 'bit')


class ResNetSizes(TypedDict, total=False):
  """The arguments of `resnet`."""

  channels: int
  style: str
  kind: str
  stem_dims: int
  stem_size: int
  stem_stride: int
  has_pooling: bool
  stage_dims: tuple[int, ...]
  stage_depths: tuple[int, ...]
  num_groups: int
  norm_decay: float
  activation: str
  epsilon: float
  stochastic_depth: float


def resnet(
  *,
  channels: int = 3,
  style: str = 'v1.5',
  kind: str = 'bottleneck',
  stem_dims: int = 64,
  stem_size: int = 7,
  stem_stride: int = 2,
  has_pooling: bool = True,
  stage_dims: tuple[int, ...] = (256, 512, 1024, 2048),
  stage_depths: tuple[int, ...] = (3, 4, 6, 3),
  num_groups: int = 32,
  norm_decay: float = 0.9,
  activation: str = 'relu',
  epsilon: float = 1e-5,
  stochastic_depth: float = 0.0,
) -> Config[ResNet]:
  """Returns the config of a residual network; the defaults give ResNet-50.

  Args:
    channels, stem_dims, stem_size, stem_stride, stage_dims, stage_depths, activation: see `ResNet`.
    style: 'v1.5', batch norms after the convolutions, with the stride in the 3 x 3 convolutions (He et al., 2015);
      'v2', batch norms before them (He et al., 2016); 'bit', v2 with group norms and standardized filters, whose
      results do not depend on the other images of a batch (BiT, Kolesnikov et al., 2020).
    kind: 'bottleneck', or 'basic' as in ResNet-18 and ResNet-34.
    has_pooling: whether 3 x 3 max pooling with stride 2 follows the first convolution.
    num_groups: number of groups of the group norms.
    norm_decay: decay of the moving averages of batch norms.
    epsilon: `epsilon` of all norms.
    stochastic_depth: probability with which training leaves out the branch of a block, for each image.
  """
  check_choice('resnet: style', style, RESNET_STYLES)
  is_bit = style == 'bit'
  network = Config(
    ResNet,
    channels=channels,
    stem_dims=stem_dims,
    stem_size=stem_size,
    stem_stride=stem_stride,
    stage_dims=stage_dims,
    stage_depths=stage_depths,
    pre_activation=style != 'v1.5',
    activation=activation,
    conv_tpl=Config(StandardizedConv2D if is_bit else Conv2D),
    norm_tpl=Config(BatchNorm, decay=norm_decay, epsilon=epsilon),
    block_tpl=Config(ResNetBlock, kind=kind, begins_as_identity=not is_bit),
    params_init=WeightInit.GaussianFanOut(2**0.5),
  )
  if is_bit:
    network.norm_tpl = Config(GroupNorm, num_groups=num_groups, epsilon=epsilon)
  if stochastic_depth:
    network.block_tpl.residual_tpl = Config(StochasticResidual, rate=stochastic_depth)
  if has_pooling:
    network.pooling_tpl = Config(Pooling, window=(3, 3), strides=(2, 2), padding='SYMMETRIC')
  else:
    network.pooling_tpl = None
  return network


def resnet_classifier(
  *, num_classes: int, fprop_dtype: DTypeLike | None = None, **sizes: Unpack[ResNetSizes]
) -> Config[ClassificationModel]:
  """Returns the config of a classifier of images with a residual network.

  Args:
    num_classes: V.
    fprop_dtype: dtype of the computation, such as jnp.bfloat16; None means the dtype of the weights, float32.
    **sizes: arguments of `resnet`.
  """
  model = Config(ClassificationModel, num_classes=num_classes, network_tpl=resnet(**sizes), fprop_dtype=fprop_dtype)
  model.softmax_tpl.params_init = WeightInit.Gaussian(0.01)
  return model
