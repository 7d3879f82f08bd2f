"""Convolutions from images to a smaller grid of latents, and back.

B batch, H height, W width, C channels of the image or of a block, D dims of a latent, S number of halvings.
"""

from __future__ import annotations

import itertools

import jax

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer
from praxis_lite.layers.images import Conv2D


class ConvResidual(Layer):
  """y = x + out(f(mix(f(x)))), where `mix` is 3 x 3 and `out` 1 x 1: a residual block of van den Oord et al. (2017).

  Attributes:
    channels: C.
    activation: name of the activation f.
    conv_tpl: template of the children `mix` and `out`.
    activation_split_dims_mapping: `out`, [B, H, W, C].
  """

  channels: int = REQUIRED
  activation: str = 'gelu'
  conv_tpl: Config = template(Conv2D)

  mix: Conv2D = child()
  out: Conv2D = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    C = self.channels
    self.create_child('mix', self.conv_tpl.clone(filter_shape=(3, 3, C, C)))
    self.create_child('out', self.conv_tpl.clone(filter_shape=(1, 1, C, C)))

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns [B, H, W, C]."""
    activate = get_activation(self.activation)
    return self.shard(x_BHWC + self.out(activate(self.mix(activate(x_BHWC)))))


class ImageEncoder(Layer):
  """Halves an image S times by convolutions with stride 2; residual blocks and a projection to latents follow.

  Attributes:
    image_channels: C.
    channels: S numbers, the output channels of each convolution `down`.
    num_blocks: number of residual blocks after the halvings, the children `block_0`, `block_1`, ...
    output_dims: D.
    activation: name of the activation.
    conv_tpl: template of the children `down_0`, `down_1`, ..., `mix` and `out`.
    activation_split_dims_mapping: `out`, [B, H / 2^S, W / 2^S, D].
  """

  image_channels: int = REQUIRED
  channels: tuple[int, ...] = REQUIRED
  num_blocks: int = 0
  output_dims: int = REQUIRED
  activation: str = 'gelu'
  conv_tpl: Config = template(Conv2D)

  down: list[Conv2D] = child()
  block: list[ConvResidual] = child()
  mix: Conv2D = child()
  out: Conv2D = child()

  def setup(self) -> None:
    _check_channels(self)
    shapes = [(3, 3, i, o) for i, o in itertools.pairwise((self.image_channels, *self.channels))]
    self.create_children('down', templates=[self.conv_tpl.clone(filter_shape=s, strides=(2, 2)) for s in shapes])
    last = self.channels[-1]
    self.create_children('block', templates=_blocks(self, last))
    self.create_child('mix', self.conv_tpl.clone(filter_shape=(3, 3, last, last)))
    self.create_child('out', self.conv_tpl.clone(filter_shape=(1, 1, last, self.output_dims)))

  def __call__(self, x_BHWC: jax.Array) -> jax.Array:
    """Returns latents [B, H / 2^S, W / 2^S, D].

    Raises:
      ConfigError: 2^S does not divide H and W, or the image does not have C channels.
    """
    check_image(self.path_name, x_BHWC.shape, self.image_channels, len(self.channels))
    activate, x = get_activation(self.activation), x_BHWC.astype(self.fprop_dtype)
    for down in self.down:
      x = activate(down(x))
    for block in self.block:
      x = block(x)
    return self.shard(self.out(x + activate(self.mix(x))))


class ImageDecoder(Layer):
  """Doubles the height and width of a grid of latents S times.

  Each time, a convolution computes 4 times as many channels as the result has; they are rearranged into 2 x 2 pixels.

  Attributes:
    input_dims: D.
    channels: S numbers, the channels before each doubling.
    num_blocks: number of residual blocks before the doublings, the children `block_0`, `block_1`, ...
    image_channels: C.
    activation: name of the activation.
    conv_tpl: template of the children `enter`, `up_0`, `up_1`, ..., and `out`.
    activation_split_dims_mapping: `out`, [B, H, W, C].
  """

  input_dims: int = REQUIRED
  channels: tuple[int, ...] = REQUIRED
  num_blocks: int = 0
  image_channels: int = REQUIRED
  activation: str = 'gelu'
  conv_tpl: Config = template(Conv2D)

  enter: Conv2D = child()
  block: list[ConvResidual] = child()
  up: list[Conv2D] = child()
  out: Conv2D = child()

  def setup(self) -> None:
    _check_channels(self)
    counts = (*self.channels, self.channels[-1])
    self.create_child('enter', self.conv_tpl.clone(filter_shape=(3, 3, self.input_dims, counts[0])))
    self.create_children('block', templates=_blocks(self, counts[0]))
    shapes = [(3, 3, i, 4 * o) for i, o in itertools.pairwise(counts)]
    self.create_children('up', templates=[self.conv_tpl.clone(filter_shape=shape) for shape in shapes])
    self.create_child('out', self.conv_tpl.clone(filter_shape=(3, 3, counts[-1], self.image_channels)))

  def __call__(self, z_BHWD: jax.Array) -> jax.Array:
    """Returns images [B, 2^S H, 2^S W, C] for latents [B, H, W, D]."""
    activate = get_activation(self.activation)
    x = activate(self.enter(z_BHWD.astype(self.fprop_dtype)))
    for block in self.block:
      x = block(x)
    for up in self.up:
      x = activate(to_pixels(up(x), 2))
    return self.shard(self.out(x))


def to_pixels(x_BHWC: jax.Array, size: int) -> jax.Array:
  """Returns [B, size H, size W, C / size^2]: the channels of each position become size x size pixels."""
  B, H, W, C = x_BHWC.shape
  x = x_BHWC.reshape(B, H, W, size, size, C // size**2)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, H * size, W * size, -1)


def to_patches(x_BHWC: jax.Array, height: int, width: int) -> jax.Array:
  """Returns patches of this size, [B, H / height, W / width, height width C]; `to_pixels` joins square ones."""
  B, H, W, C = x_BHWC.shape
  x = x_BHWC.reshape(B, H // height, height, W // width, width, C)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, H // height, W // width, height * width * C)


def check_image(where: str, shape: tuple[int, ...], channels: int, halvings: int) -> None:
  """Raises ConfigError unless images, [B, H, W, C], have C = `channels`, and H and W can be halved `halvings` times."""
  if len(shape) != 4 or shape[-1] != channels or any(size % 2**halvings for size in shape[1:3]):
    remedy = f'; set image_channels = {shape[-1]} of the encoder' if len(shape) == 4 and shape[-1] != channels else ''
    raise ConfigError(
      f'{where}: expected images [B, H, W, {channels}] whose height and width are multiples of {2**halvings}, got the '
      f'shape {list(shape)}{remedy}'
    )


def _blocks(layer: ImageEncoder | ImageDecoder, channels: int) -> list[Config]:
  sizes = {'channels': channels, 'activation': layer.activation, 'conv_tpl': layer.conv_tpl}
  return [Config(ConvResidual, **sizes) for _ in range(layer.num_blocks)]


def _check_channels(layer: ImageEncoder | ImageDecoder) -> None:
  get_activation(layer.activation, f'{layer.path_name}.activation')
  layer._check_range('num_blocks', least=0)
  if not layer.channels:
    raise ConfigError(f'{layer.path_name}.channels: expected a number for each halving of the image, as in (32, 64)')
