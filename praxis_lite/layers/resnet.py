"""Residual networks for images: ResNet, with its norms after the convolutions (v1.5) or before them (v2).

    v1.5  y = f(shortcut(x) + branch(x))   branch: convolution and norm two or three times, with f between them
    v2    y = shortcut(a) + branch(a)      a = f(norm(x)); branch: the same, with norms and f only between convolutions

If the block changes the size or the channels, the shortcut is a 1 x 1 convolution, with a norm in v1.5. Otherwise the
shortcut adds x itself; in v2 it adds x too, not a (He et al., 2015 and 2016).

B batch, H height, W width, C input channels, O output channels, F features.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dropout import StochasticResidual
from praxis_lite.layers.images import Conv2D, GlobalPooling, Pooling, check_channels
from praxis_lite.layers.normalizations import BatchNorm, Norm, normalize_rows
from praxis_lite.sharding.weights import WeightInit

BLOCK_KINDS = ('bottleneck', 'basic')


class ResNetBlock(Layer):
  """A residual block: 1 x 1, 3 x 3 and 1 x 1 convolutions, or two of 3 x 3. The first of 3 x 3 has the stride.

  Attributes:
    input_dims: C.
    output_dims: O.
    stride: stride of the block, along the height and the width.
    kind: 'bottleneck' has three convolutions, the inner ones with a quarter of O; 'basic' has two.
    pre_activation: v2 instead of v1.5.
    begins_as_identity: whether the branch is initially 0, because the scale of its last norm (v1.5) or its last
      convolution (v2) is 0.
    activation: name of f.
    conv_tpl: template of the children `conv_0`, `conv_1`, ... and `shortcut`, without biases.
    norm_tpl: template of the children `norm_0`, `norm_1`, ... and `shortcut_norm`.
    residual_tpl: template of the child `residual`, which adds the branch.
    activation_split_dims_mapping: `out`, [B, H, W, O].
  """

  input_dims: int = REQUIRED
  output_dims: int = REQUIRED
  stride: int = 1
  kind: str = 'bottleneck'
  pre_activation: bool = False
  begins_as_identity: bool = False
  activation: str = 'relu'
  conv_tpl: Config = template(Conv2D)
  norm_tpl: Config = template(BatchNorm)
  residual_tpl: Config = template(StochasticResidual)

  conv: list[Conv2D] = child()
  norm: list[Norm] = child()
  shortcut: Conv2D = child()
  shortcut_norm: Norm = child()
  residual: StochasticResidual = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    check_choice(f'{self.path_name}.kind', self.kind, BLOCK_KINDS)
    self._check_range('stride', least=1)
    outputs = self.output_dims
    inner = outputs // 4 if self.kind == 'bottleneck' else outputs
    if inner < 1:
      raise ConfigError(f'{self.path_name}.output_dims: {outputs}; a bottleneck needs at least 4')
    conv = self.conv_tpl.clone(use_bias=False, padding='SYMMETRIC')
    sizes = (1, 3, 1) if self.kind == 'bottleneck' else (3, 3)
    counts = (self.input_dims, *[inner] * (len(sizes) - 1), outputs)
    convs = [conv.clone(filter_shape=(size, size, i, o)) for size, i, o in zip(sizes, counts, counts[1:])]
    convs[sizes.index(3)].strides = (self.stride, self.stride)
    normed = counts[:-1] if self.pre_activation else counts[1:]
    norms = [self.norm_tpl.clone(dims=dims) for dims in normed]
    if self.begins_as_identity and self.pre_activation:
      convs[-1].params_init = WeightInit.Constant(0.0)
    elif self.begins_as_identity:
      norms[-1].initial_scale = 0.0
    self.create_children('conv', templates=convs)
    self.create_children('norm', templates=norms)
    if self.has_projection:
      self.create_child(
        'shortcut', conv.clone(filter_shape=(1, 1, self.input_dims, outputs), strides=convs[sizes.index(3)].strides)
      )
      if not self.pre_activation:
        self.create_child('shortcut_norm', self.norm_tpl.clone(dims=outputs))
    self.create_child('residual', self.residual_tpl)

  @property
  def has_projection(self) -> bool:
    """Whether the shortcut is a convolution."""
    return self.input_dims != self.output_dims or self.stride != 1

  def __call__(self, x_BHWC: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns [B, H / stride, W / stride, O], rounded up.

    `weights`, [B], weight the images in norms over the batch; None means all are 1.
    """
    activate = get_activation(self.activation)
    if self.pre_activation:
      y = activate(normalize_rows(self.norm[0], x_BHWC, weights))
      short = self.shortcut(y) if self.has_projection else x_BHWC
      y = self.conv[0](y)
      for norm, conv in zip(self.norm[1:], self.conv[1:]):
        y = conv(activate(normalize_rows(norm, y, weights)))
      return self.shard(self.residual(short, y))
    short = normalize_rows(self.shortcut_norm, self.shortcut(x_BHWC), weights) if self.has_projection else x_BHWC
    y = x_BHWC
    for i, (conv, norm) in enumerate(zip(self.conv, self.norm)):
      y = normalize_rows(norm, conv(y if i == 0 else activate(y)), weights)
    return self.shard(activate(self.residual(short, y)))


class ResNet(Layer):
  """A residual network: a convolution, stages of blocks, and a mean. Each stage but the first halves the image.

  The first convolution is followed by a norm and an activation in v1.5; in v2, those are after the blocks.

  Attributes:
    channels: C of the images.
    stem_dims, stem_size, stem_stride: output channels of the first convolution `stem`, height and width of its filters,
      and its stride.
    stage_dims: output channels of the blocks of each stage.
    stage_depths: number of blocks of each stage.
    pre_activation: v2 instead of v1.5.
    activation: name of the activation.
    conv_tpl: template of all convolutions.
    norm_tpl: template of all norms.
    pooling_tpl: template of the child `pooling`, after the first convolution; None disables it. v2 pads the image with
      zeros before pooling.
    block_tpl: template of the children `blocks_0`, `blocks_1`, ...; the fields above are passed on to it.
    global_pooling_tpl: template of the child `global_pooling`.
    activation_split_dims_mapping: `out`, the features, [B, F].
  """

  channels: int = 3
  stem_dims: int = 64
  stem_size: int = 7
  stem_stride: int = 2
  stage_dims: tuple[int, ...] = REQUIRED
  stage_depths: tuple[int, ...] = REQUIRED
  pre_activation: bool = False
  activation: str = 'relu'
  conv_tpl: Config = template(Conv2D)
  norm_tpl: Config = template(BatchNorm)
  pooling_tpl: Config | None = template(Pooling, window=(3, 3), strides=(2, 2), padding='SYMMETRIC')
  block_tpl: Config = template(ResNetBlock)
  global_pooling_tpl: Config = template(GlobalPooling)

  stem: Conv2D = child()
  stem_norm: Norm = child()
  pooling: Pooling = child()
  blocks: list[ResNetBlock] = child()
  final_norm: Norm = child()
  global_pooling: GlobalPooling = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    check_stages(self, self.stage_dims, self.stage_depths)
    self._check_range('stem_stride', 'stem_size', 'stem_dims', least=1)
    shape = (self.stem_size, self.stem_size, self.channels, self.stem_dims)
    stem = self.conv_tpl.clone(use_bias=False, padding='SYMMETRIC', filter_shape=shape)
    self.create_child('stem', stem.set(strides=(self.stem_stride, self.stem_stride)))
    if not self.pre_activation:
      self.create_child('stem_norm', self.norm_tpl.clone(dims=self.stem_dims))
    if self.pooling_tpl is not None:
      self.create_child('pooling', self.pooling_tpl.clone(**({'padding': 'VALID'} if self.pre_activation else {})))
    block = self.block_tpl.clone(conv_tpl=self.conv_tpl, norm_tpl=self.norm_tpl)
    block.set(pre_activation=self.pre_activation, activation=self.activation)
    dims = [d for d, depth in zip(self.stage_dims, self.stage_depths) for _ in range(depth)]
    firsts = set(itertools.accumulate(self.stage_depths[:-1]))
    sizes = [
      {'input_dims': i, 'output_dims': o, 'stride': 2 if n in firsts else 1}
      for n, (i, o) in enumerate(itertools.pairwise((self.stem_dims, *dims)))
    ]
    self.create_children('blocks', templates=[block.clone(**size) for size in sizes])
    if self.pre_activation:
      self.create_child('final_norm', self.norm_tpl.clone(dims=dims[-1]))
    self.create_child('global_pooling', self.global_pooling_tpl)
    self.output_dims = dims[-1]

  def __call__(self, x_BHWC: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns features [B, F]; for `weights`, see `ResNetBlock`.

    Raises:
      ConfigError: images are not [B, H, W, C].
    """
    check_channels(self, self.channels, x_BHWC)
    activate = get_activation(self.activation)
    x_BHWC = self.stem(x_BHWC.astype(self.fprop_dtype))
    if not self.pre_activation:
      x_BHWC = activate(normalize_rows(self.stem_norm, x_BHWC, weights))
    if self.pooling_tpl is not None:
      if self.pre_activation:
        x_BHWC = jnp.pad(x_BHWC, ((0, 0), *[((size - 1) // 2,) * 2 for size in self.pooling.window], (0, 0)))
      x_BHWC = self.pooling(x_BHWC)
    for block in self.blocks:
      x_BHWC = block(x_BHWC, weights)
    if self.pre_activation:
      x_BHWC = activate(normalize_rows(self.final_norm, x_BHWC, weights))
    return self.shard(self.global_pooling(x_BHWC))


def check_stages(layer: Layer, dims: tuple[int, ...], depths: tuple[int, ...]) -> None:
  """Raises ConfigError unless `dims` and `depths` have the same length, at least 1, and all entries are positive."""
  if not dims or min(dims) < 1:
    raise ConfigError(f'{layer.path_name}.stage_dims: expected numbers of at least 1, one for each stage; got {dims}')
  if len(dims) != len(depths) or min(depths) < 1:
    raise ConfigError(
      f'{layer.path_name}.stage_depths: expected a number of at least 1 for each of stage_dims, {dims}; got {depths}'
    )
