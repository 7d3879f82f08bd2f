"""DiT: a transformer of image patches, conditioned on a time and a class (Peebles and Xie, 2023).

    c = time(t) + classes(class)
    shift, scale, gate = linear(silu(c)), for attention and for the feed-forward layer, from zero weights (adaLN-zero)
    x = x + gate_a attention(norm(x) (1 + scale_a) + shift_a);  x = x + gate_f ff(norm(x) (1 + scale_f) + shift_f)

B batch, H height, W width, C channels, P patch size, T = H W / P^2 patches, D model dims.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.base import Layer
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.image_coders import to_patches, to_pixels
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.positions import SinusoidalPositions2D, grid_positions
from praxis_lite.layers.repeat import Repeat
from praxis_lite.sharding.weights import WeightInit

_ZERO = WeightInit.Constant(0.0)


class TimeEmbedding(Layer):
  """y = W_2 silu(W_1 [cos(1000 t r), sin(1000 t r)] + b_1) + b_2, with rates r from 1 to 1 / 10,000.

  Attributes:
    dims: D.
    num_sinusoids: number of sines and cosines together, an even number.
    linear_tpl: template of the children `enter` and `out`.
    activation_split_dims_mapping: `out`, [B, D].
  """

  dims: int = REQUIRED
  num_sinusoids: int = 256
  linear_tpl: Config = template(Linear, use_bias=True)

  enter: Linear = child()
  out: Linear = child()

  def setup(self) -> None:
    if self.num_sinusoids < 2 or self.num_sinusoids % 2:
      raise ConfigError(f'{self.path_name}.num_sinusoids: expected an even number, got {self.num_sinusoids}')
    self.create_child('enter', self.linear_tpl.clone(input_dims=self.num_sinusoids, output_dims=self.dims))
    self.create_child('out', self.linear_tpl.clone(input_dims=self.dims, output_dims=self.dims))

  def __call__(self, t_B: jax.Array) -> jax.Array:
    """Returns embeddings [B, D] of times from 0 to 1."""
    count = self.num_sinusoids // 2
    rates = jnp.exp(-math.log(10_000) * jnp.arange(count, dtype=jnp.float32) / count)
    angles = 1000 * t_B.astype(jnp.float32)[:, None] * rates
    sinusoids = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return self.shard(self.out(jax.nn.silu(self.enter(sinusoids))))


class ModulatedBlock(Layer):
  """A transformer block whose sublayers are shifted, scaled and gated by a condition: see the top of this file.

  Attributes:
    input_dims: D.
    hidden_dims: hidden dims of the feed-forward layer.
    num_heads: number of heads.
    norm_tpl: template of the children `attention_norm` and `ff_norm`.
    attention_tpl, ff_tpl: templates of the children `attention` and `ff`.
    modulation_tpl: template of the child `modulation`, from D to 6 D.
    activation_split_dims_mapping: `out`, [B, T, D].
  """

  scales_branches: ClassVar[bool] = True

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  num_heads: int = REQUIRED
  norm_tpl: Config = template(LayerNorm, use_scale=False, use_bias=False)
  attention_tpl: Config = template(MultiHeadAttention, use_bias=True)
  ff_tpl: Config = template(FeedForward)
  modulation_tpl: Config = template(Linear, use_bias=True, params_init=_ZERO)

  attention_norm: Norm = child()
  ff_norm: Norm = child()
  attention: MultiHeadAttention = child()
  ff: FeedForward = child()
  modulation: Linear = child()

  def setup(self) -> None:
    D = self.input_dims
    self.create_children('attention_norm', 'ff_norm', template=self.norm_tpl.clone(dims=D))
    self.create_child('attention', self.attention_tpl.clone(input_dims=D, num_heads=self.num_heads))
    self.create_child('ff', self.ff_tpl.clone(input_dims=D, hidden_dims=self.hidden_dims))
    self.create_child('modulation', self.modulation_tpl.clone(input_dims=D, output_dims=6 * D))

  def __call__(self, x_BTD: jax.Array, condition_BD: jax.Array) -> jax.Array:
    """Returns [B, T, D] for the residual stream and the condition of each row."""
    parts = jnp.split(self.modulation(jax.nn.silu(condition_BD))[:, None], 6, axis=-1)
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts
    attended_BTD = self.attention(self.attention_norm(x_BTD) * (1 + scale_a) + shift_a)
    x_BTD = self.shard(x_BTD + self.scale_branch(gate_a * attended_BTD))
    return self.shard(x_BTD + self.scale_branch(gate_f * self.ff(self.ff_norm(x_BTD) * (1 + scale_f) + shift_f)))


class DiffusionTransformer(Layer):
  """Predicts an array of the shape of a noisy image, such as its noise, from the image, its time and its class.

  Attributes:
    image_channels: C.
    patch_size: P, which divides the height and the width of images.
    model_dims: D, a multiple of 4.
    num_layers, num_heads: the number of blocks, and of the heads of each.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    num_classes: number of classes; the class `num_classes` itself stands for no class. 0 disables classes.
    patch_tpl, out_tpl: templates of the children `patch`, from P^2 C to D, and `out`, which begins at zero.
    position_tpl: template of the child `position`, called with the row and the column of each patch.
    time_tpl, class_tpl: templates of the children `time` and `classes`.
    blocks_tpl: template of the child `blocks`, a stack of `ModulatedBlock`s; its field `remat` may be set.
    modulation_tpl: template of the child `modulation`, from D to 2 D: shift and scale before `out`.
    activation_split_dims_mapping: `out`, [B, T, D]: the residual stream.
  """

  image_channels: int = REQUIRED
  patch_size: int = 2
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_heads: int = REQUIRED
  hidden_dims: int | None = None
  num_classes: int = 0
  patch_tpl: Config = template(Linear, use_bias=True)
  position_tpl: Config = template(SinusoidalPositions2D)
  time_tpl: Config = template(TimeEmbedding)
  class_tpl: Config = template(Embedding)
  blocks_tpl: Config = template(Repeat, layers_tpl=Config(ModulatedBlock))
  final_norm_tpl: Config = template(LayerNorm, use_scale=False, use_bias=False)
  modulation_tpl: Config = template(Linear, use_bias=True, params_init=_ZERO)
  out_tpl: Config = template(Linear, use_bias=True, params_init=_ZERO)

  patch: Linear = child()
  position: SinusoidalPositions2D = child()
  time: TimeEmbedding = child()
  classes: Embedding = child()
  blocks: Repeat = child()
  final_norm: Norm = child()
  modulation: Linear = child()
  out: Linear = child()

  def setup(self) -> None:
    self._check_range('patch_size', least=1)
    self._check_range('num_classes', least=0)
    D, values = self.model_dims, self.patch_size**2 * self.image_channels
    self.create_child('patch', self.patch_tpl.clone(input_dims=values, output_dims=D))
    self.create_child('position', self.position_tpl.clone(dims=D))
    self.create_child('time', self.time_tpl.clone(dims=D))
    if self.num_classes:
      self.create_child('classes', self.class_tpl.clone(num_classes=self.num_classes + 1, input_dims=D))
    blocks = self.blocks_tpl.clone(num_layers=self.num_layers)
    hidden = 4 * D if self.hidden_dims is None else self.hidden_dims
    blocks.layers_tpl.set(input_dims=D, hidden_dims=hidden, num_heads=self.num_heads)
    self.create_child('blocks', blocks)
    self.create_child('final_norm', self.final_norm_tpl.clone(dims=D))
    self.create_child('modulation', self.modulation_tpl.clone(input_dims=D, output_dims=2 * D))
    self.create_child('out', self.out_tpl.clone(input_dims=D, output_dims=values))

  def __call__(self, x_BHWC: jax.Array, t_B: jax.Array, class_B: jax.Array | None = None) -> jax.Array:
    """Returns [B, H, W, C].

    Args:
      x_BHWC: noisy images.
      t_B: times from 0 to 1.
      class_B: int32 classes; None if and only if `num_classes` is 0. `num_classes` stands for no class.

    Raises:
      ConfigError: the patch size does not divide the height and the width, or images do not have C channels.
    """
    shape, size = x_BHWC.shape, self.patch_size
    if len(shape) != 4 or shape[1] % size or shape[2] % size or shape[3] != self.image_channels:
      raise ConfigError(
        f'{self.path_name}: expected images [B, H, W, {self.image_channels}] whose height and width are multiples of '
        f'patch_size, {size}, got the shape {list(shape)}'
      )
    patches = to_patches(x_BHWC.astype(self.fprop_dtype), size, size)
    B, height, width, values = patches.shape
    x_BTD = self.patch(patches.reshape(B, height * width, values))
    x_BTD = self.shard(x_BTD + self.position(*map(jnp.asarray, grid_positions(height, width))))
    condition_BD = self.time(t_B)
    if self.num_classes:
      if class_B is None:
        raise ConfigError(
          f'{self.path_name}: needs the class of each image, {self.num_classes} for none, because num_classes is not 0'
        )
      condition_BD += self.classes(class_B)
    x_BTD = self.blocks(x_BTD, condition_BD)
    shift, scale = jnp.split(self.modulation(jax.nn.silu(condition_BD))[:, None], 2, axis=-1)
    y = self.out(self.final_norm(x_BTD) * (1 + scale) + shift)
    return to_pixels(y.reshape(B, height, width, values), size)
