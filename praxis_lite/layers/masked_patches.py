"""Masked autoencoders (MAE, He et al., 2022): patches that an encoder sees, and a decoder that predicts all patches.

B batch, h and w height and width of an image, C channels, T patches, K patches that are seen, E dims of the encoder,
D dims of the decoder, P numbers in a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.base import ActivationSplit, Layer
from praxis_lite.layers.base.facts import PositionGrid
from praxis_lite.layers.image_coders import to_patches
from praxis_lite.layers.image_tokens import VISION_BLOCK, grid_size
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.positions import LearnedPositions, SinusoidalPositions2D, grid_positions, is_position_table
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.repeat import kinds_of_stack
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams, WeightInit


class SeenPatches(NamedTuple):
  """Which patches of each image are seen."""

  numbers: jax.Array  # [B, K] int32, the numbers of the patches that are seen.
  places: jax.Array  # [B, T] int32, the place of each patch in `numbers`; K or more for hidden patches.
  is_hidden: jax.Array  # [B, T] bool.


def choose_patches(noise_BT: jax.Array, count: int) -> SeenPatches:
  """Returns the `count` patches of each row that have the least noise; random noise chooses random patches."""
  order_BT = jnp.argsort(noise_BT, axis=1)
  places_BT = jnp.argsort(order_BT, axis=1)
  return SeenPatches(order_BT[:, :count], places_BT, places_BT >= count)


def take_tokens(x_BTD: jax.Array, numbers_BK: jax.Array) -> jax.Array:
  """Returns the tokens with these numbers, from 0 to T - 1, [B, K, D]."""
  return jnp.take_along_axis(x_BTD, numbers_BK[..., None], axis=1)


def pixels_of_patches(image_BhwC: jax.Array, patch_size: tuple[int, int]) -> jax.Array:
  """Returns the pixel values of each patch, [B, T, P], row by row; pixels that do not fill a patch are left out."""
  _, h, w, _ = image_BhwC.shape
  rows, columns = grid_size((h, w), patch_size)
  patches = to_patches(image_BhwC[:, : rows * patch_size[0], : columns * patch_size[1]], *patch_size)
  return patches.reshape(len(patches), rows * columns, patches.shape[-1])


def normalize_patches(x_BTP: jax.Array) -> jax.Array:
  """Returns (x - mean(x)) / sqrt(var(x) + 1e-6) for each patch; the variance is a sum divided by P - 1."""
  x_BTP = to_sum_dtype(x_BTP)
  y_BTP = x_BTP - jnp.mean(x_BTP, axis=-1, keepdims=True)
  variance = jnp.sum(jnp.square(y_BTP), axis=-1, keepdims=True) / max(1, x_BTP.shape[-1] - 1)
  return y_BTP * jax.lax.rsqrt(variance + 1e-6)


class PatchDecoderSplit(ActivationSplit):
  """`out`: predictions, [B, T, P]; `states`: the tokens, [B, T, D]."""

  states: SplitDimsMapping = None


class PatchDecoder(Layer):
  """Predicts all patches of an image from the states of the patches that an encoder has seen.

      tokens = [embed(class token), embed(state) or mask_token for each patch, plus its position]
      y      = pixels(final_norm(blocks(tokens)))

  Attributes:
    input_dims: E.
    model_dims: D.
    num_layers, num_heads: the number of blocks, and of the heads of each.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    grid: number of rows and columns of patches.
    patch_dims: P.
    has_class_token: whether the first state belongs to a class token.
    embed_tpl: template of the child `embed`.
    position_tpl: template of the child `position`: sinusoids, where the class token has no position; or
      `LearnedPositions`, whose first position belongs to the class token.
    transformer_tpl: template of the child `transformer`; its attention is never causal.
    final_norm_tpl: template of the child `final_norm`.
    pixels_tpl: template of the child `pixels`.
    activation_split_dims_mapping: `out`: [B, T, P]; `states`: the tokens, [B, T, D].
  """

  input_dims: int = REQUIRED
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_heads: int = REQUIRED
  hidden_dims: int | None = None
  grid: tuple[int, int] = REQUIRED
  patch_dims: int = REQUIRED
  has_class_token: bool = True
  embed_tpl: Config = template(Linear, use_bias=True)
  position_tpl: Config = template(SinusoidalPositions2D)
  transformer_tpl: Config = template(RepeatedTransformer, layers_tpl=VISION_BLOCK)
  final_norm_tpl: Config = template(LayerNorm)
  pixels_tpl: Config = template(Linear, use_bias=True)
  activation_split_dims_mapping: Config = template(PatchDecoderSplit)

  embed: Linear = child()
  position: SinusoidalPositions2D | LearnedPositions = child()
  transformer: RepeatedTransformer | StackedTransformer | PipelinedTransformer = child()
  final_norm: Norm = child()
  pixels: Linear = child()

  def setup(self) -> None:
    D = self.model_dims
    self.create_child('embed', self.embed_tpl.clone(input_dims=self.input_dims, output_dims=D))
    self.create_variable('mask_token', WeightHParams((D,), init=WeightInit.Gaussian(0.02)))
    num_tokens = self.grid[0] * self.grid[1] + self.has_class_token
    table = {'max_len': num_tokens} if is_position_table(self.position_tpl) else {}
    self.create_child('position', self.position_tpl.clone(dims=D, **table))
    transformer = self.transformer_tpl.clone(num_layers=self.num_layers)
    hidden = 4 * D if self.hidden_dims is None else self.hidden_dims
    for block in kinds_of_stack(transformer):
      block.set(input_dims=D, hidden_dims=hidden, num_heads=self.num_heads)
      block.attention_tpl.causal = False
    self.create_child('transformer', transformer)
    self.create_child('final_norm', self.final_norm_tpl.clone(dims=D))
    self.create_child('pixels', self.pixels_tpl.clone(input_dims=D, output_dims=self.patch_dims))

  def position_grids(self) -> Mapping[str, PositionGrid]:
    is_table = is_position_table(self.position_tpl)
    return {'position.w': PositionGrid(*self.grid, int(self.has_class_token))} if is_table else {}

  def __call__(self, states: jax.Array, places_BT: jax.Array) -> jax.Array:
    """Returns predictions of all patches, [B, T, P].

    Args:
      states: the states of the seen patches, [B, K, E]; with a class token, [B, 1 + K, E], its state first.
      places_BT: the `places` of `SeenPatches`.
    """
    x_BKD = self.embed(states)
    num_others = int(self.has_class_token)
    others, seen_BKD = x_BKD[:, :num_others], x_BKD[:, num_others:]
    K = seen_BKD.shape[1]
    at_place_BTD = take_tokens(seen_BKD, jnp.minimum(places_BT, K - 1))
    is_seen_BT1 = (places_BT < K)[..., None]
    x_BTD = jnp.where(is_seen_BT1, at_place_BTD, self.theta.mask_token.astype(x_BKD.dtype))
    if isinstance(self.position, SinusoidalPositions2D):
      x_BTD += self.position(*map(jnp.asarray, grid_positions(*self.grid)))
    x_BTD = jnp.concatenate([others, x_BTD], axis=1)
    if isinstance(self.position, LearnedPositions):
      x_BTD += self.position(jnp.arange(x_BTD.shape[1])[None])
    x_BTD = self.shard(x_BTD, 'states')
    x_BTD = self.final_norm(self.transformer(x_BTD))
    return self.shard(self.pixels(x_BTD[:, num_others:]))
