"""ConvNeXt: a network of depthwise convolutions and feed-forward layers (Liu et al., 2022).

    block       y = x + scale * ff(norm(depthwise(x)))
    network     norm of the mean over the image, after the blocks of all stages

Patches of 4 x 4 begin the first stage; a norm and a convolution of 2 x 2 that halves the image begin each other stage.

B batch, H height, W width, C channels, D dims, F features.
"""

from __future__ import annotations

import itertools

import jax

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.dropout import StochasticResidual
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.images import Conv2D, GlobalPooling, check_channels
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.resnet import check_stages
from praxis_lite.sharding.weights import WeightInit


class ConvNeXtBlock(Layer):
  """A residual branch of a depthwise convolution, a norm and a feed-forward layer. See the top of this file.

  Attributes:
    dims: D.
    kernel_size: height and width of the filters.
    hidden_dims: hidden dims of the feed-forward layer; None means 4 D.
    activation: name of the activation of the feed-forward layer.
    initial_scale: initial value of the variable `scale`, [D]; None leaves the scale out.
    conv_tpl: template of the child `depthwise`.
    norm_tpl: template of the child `norm`.
    ff_tpl: template of the child `ff`.
    residual_tpl: template of the child `residual`, which adds the branch.
    weight_split_dims_mapping: `wt`, [D], of `scale`.
    activation_split_dims_mapping: `out`, [B, H, W, D].
  """

  dims: int = REQUIRED
  kernel_size: int = 7
  hidden_dims: int | None = None
  activation: str = 'gelu'
  initial_scale: float | None = 1e-6
  conv_tpl: Config = template(Conv2D)
  norm_tpl: Config = template(LayerNorm)
  ff_tpl: Config = template(FeedForward)
  residual_tpl: Config = template(StochasticResidual)
  weight_split_dims_mapping: Config = template(WeightSplit)

  depthwise: Conv2D = child()
  norm: Norm = child()
  ff: FeedForward = child()
  residual: StochasticResidual = child()

  def setup(self) -> None:
    self._check_range('dims', 'kernel_size', 'hidden_dims', least=1)
    if self.kernel_size % 2 == 0:
      raise ConfigError(
        f'{self.path_name}.kernel_size: expected an odd size, with which images keep their size; got {self.kernel_size}'
      )
    D = self.dims
    shape = (self.kernel_size, self.kernel_size, D, D)
    self.create_child('depthwise', self.conv_tpl.clone(filter_shape=shape, groups=D, padding='SYMMETRIC'))
    self.create_child('norm', self.norm_tpl.clone(dims=D))
    hidden = 4 * D if self.hidden_dims is None else self.hidden_dims
    self.create_child('ff', self.ff_tpl.clone(input_dims=D, hidden_dims=hidden, activation=self.activation))
    if self.initial_scale is not None:
      init = WeightInit.Constant(self.initial_scale)
      self.create_variable('scale', bias_weight(D, self.weight_split_dims_mapping.wt, init))
    self.create_child('residual', self.residual_tpl)

  def __call__(self, x_BHWD: jax.Array) -> jax.Array:
    """Returns [B, H, W, D]."""
    y_BHWD = self.ff(self.norm(self.depthwise(x_BHWD)))
    if self.initial_scale is not None:
      y_BHWD *= self.theta.scale
    return self.shard(self.residual(x_BHWD, y_BHWD))


class ConvNeXt(Layer):
  """A ConvNeXt that computes features of images. See the top of this file.

  Attributes:
    channels: channels of the images.
    patch_size: height and width of the patches; pixels that do not fill a patch are left out.
    stage_dims: D of each stage.
    stage_depths: number of blocks of each stage.
    activation: name of the activation of the blocks.
    stochastic_depth: probability with which training leaves out the branch of the last block, for each image; the
      probability grows linearly from 0 at the first block.
    conv_tpl: template of the children `patches`, and `down_0`, `down_1`, ..., which halve the image.
    norm_tpl: template of the children `patch_norm`, and `down_norm_0`, `down_norm_1`, ..., before `down_0`, ...
    block_tpl: template of the children `blocks_0`, `blocks_1`, ...
    global_pooling_tpl: template of the child `global_pooling`.
    final_norm_tpl: template of the child `final_norm`, of the features.
    activation_split_dims_mapping: `out`, the features, [B, F].
  """

  channels: int = 3
  patch_size: int = 4
  stage_dims: tuple[int, ...] = REQUIRED
  stage_depths: tuple[int, ...] = REQUIRED
  activation: str = 'gelu'
  stochastic_depth: float = 0.0
  conv_tpl: Config = template(Conv2D)
  norm_tpl: Config = template(LayerNorm)
  block_tpl: Config = template(ConvNeXtBlock)
  global_pooling_tpl: Config = template(GlobalPooling)
  final_norm_tpl: Config = template(LayerNorm)

  patches: Conv2D = child()
  patch_norm: Norm = child()
  down_norm: list[Norm] = child()
  down: list[Conv2D] = child()
  blocks: list[ConvNeXtBlock] = child()
  global_pooling: GlobalPooling = child()
  final_norm: Norm = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    check_stages(self, self.stage_dims, self.stage_depths)
    self._check_range('patch_size', 'channels', least=1)
    self._check_range('stochastic_depth', least=0, below=1)
    size, dims = self.patch_size, self.stage_dims
    patches = self.conv_tpl.clone(filter_shape=(size, size, self.channels, dims[0]), strides=(size, size))
    self.create_child('patches', patches.set(padding='VALID'))
    self.create_child('patch_norm', self.norm_tpl.clone(dims=dims[0]))
    halving = self.conv_tpl.clone(strides=(2, 2), padding='VALID')
    pairs = list(itertools.pairwise(dims))
    self.create_children('down_norm', templates=[self.norm_tpl.clone(dims=i) for i, _ in pairs])
    self.create_children('down', templates=[halving.clone(filter_shape=(2, 2, i, o)) for i, o in pairs])
    of_blocks = [d for d, depth in zip(dims, self.stage_depths) for _ in range(depth)]
    blocks = []
    for n, d in enumerate(of_blocks):
      block = self.block_tpl.clone(dims=d, activation=self.activation)
      if self.stochastic_depth:
        block.residual_tpl.rate = self.stochastic_depth * n / max(1, len(of_blocks) - 1)
      blocks.append(block)
    self.create_children('blocks', templates=blocks)
    self.create_child('global_pooling', self.global_pooling_tpl)
    self.create_child('final_norm', self.final_norm_tpl.clone(dims=dims[-1]))
    self.output_dims = dims[-1]

  def __call__(self, x_BHWC: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns features [B, F] of images [B, H, W, C]; `weights` are not used.

    Raises:
      ConfigError: images are not [B, H, W, C], or too small to be halved by all stages.
    """
    check_channels(self, self.channels, x_BHWC)
    x_BHWD = self.patch_norm(self.patches(x_BHWC.astype(self.fprop_dtype)))
    blocks = iter(self.blocks)
    for stage, depth in enumerate(self.stage_depths):
      if stage:
        x_BHWD = self.down[stage - 1](self.down_norm[stage - 1](x_BHWD))
      for block in itertools.islice(blocks, depth):
        x_BHWD = block(x_BHWD)
    return self.shard(self.final_norm(self.global_pooling(x_BHWD)))
