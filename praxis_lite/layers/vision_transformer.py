"""The vision transformer: a transformer over the patches of an image (ViT, Dosovitskiy et al., 2021).

    x        = dropout(norm([class token, patches(image)] + position))      the class token and the norm are optional
    states   = final_norm(blocks(x))
    features = states[0], mean(states), or attention pooling of states; then perhaps `representation`

See `transformer_block.py` for the formulas of the blocks.

B batch, h and w height and width of an image, C channels, T tokens, D model dims.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import ActivationSplit, Layer
from praxis_lite.layers.base.facts import PositionGrid
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.encoder import HeadTransform
from praxis_lite.layers.image_tokens import VISION_BLOCK, AttentionPooling, PatchEmbedding, grid_size
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.positions import LearnedPositions, SinusoidalPositions2D, grid_positions, is_position_table
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer, size_stack
from praxis_lite.layers.transformer_block import set_biases
from praxis_lite.sharding.weights import SplitDimsMapping

IMAGE_POOLINGS = ('class_token', 'mean', 'attention')


class VisionActivationSplit(ActivationSplit):
  """`out`: the features, [B, D]; `states`: the tokens, [B, T, D]."""

  states: SplitDimsMapping = None


class VisionTransformer(Layer):
  """A transformer that computes features of an image, for a `ClassificationModel` or a tower of a `TwoTowerModel`.

  The sizes are set here and passed on to the templates below.

  Attributes:
    image_size: (height, width) of the images in pixels.
    patch_size: (height, width) of the patches; pixels that do not fill a patch are left out.
    channels: C of the images.
    model_dims: D.
    num_layers: number of blocks.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    hidden_dims: hidden dims of the feed-forward layers, including the one in attention pooling; None means 4 D.
    use_bias: whether all layers that support biases have them; None leaves this to their templates.
    class_token: whether a learned token, the variable `class_token` [D], comes before the patches.
    pooling: where the features come from: 'class_token', the state of this token (ViT, CLIP); 'mean', the mean over the
      patches; or 'attention', the child `pooling_layer` (MAP: SigLIP, ViT-G).
    patch_tpl: template of the child `patches`.
    position_tpl: template of the child `position`, which is added to the tokens: `LearnedPositions`, whose first entry
      is for the class token; or `SinusoidalPositions2D`, which gives the class token no position. None disables it. By
      default, weight decay leaves out learned positions, as it always leaves out the class token.
    embedding_norm_tpl: template of the child `embedding_norm`, before the blocks (CLIP); None disables it.
    dropout_tpl: template of the child `embedding_dropout`.
    transformer_tpl: template of the child `transformer`, a stack of blocks; its attention is never causal.
    final_norm_tpl: template of the child `final_norm`, after the blocks; None disables it.
    pooling_tpl: template of the child `pooling_layer`, with `pooling='attention'`.
    representation_tpl: template of the child `representation`, such as a `HeadTransform` with tanh, on the pooled
      features; None disables it.
    activation_split_dims_mapping: `out`: the features, [B, D]; `states`: the tokens, [B, T, D].
  """

  image_size: tuple[int, int] = REQUIRED
  patch_size: tuple[int, int] = REQUIRED
  channels: int = 3
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  use_bias: bool | None = None
  class_token: bool = True
  pooling: str = 'class_token'
  patch_tpl: Config = template(PatchEmbedding)
  position_tpl: Config | None = template(LearnedPositions, skip_regularization=True)
  embedding_norm_tpl: Config | None = None
  dropout_tpl: Config = template(Dropout)
  transformer_tpl: Config = template(RepeatedTransformer, layers_tpl=VISION_BLOCK)
  final_norm_tpl: Config | None = template(LayerNorm)
  pooling_tpl: Config = template(AttentionPooling)
  representation_tpl: Config | None = None
  activation_split_dims_mapping: Config = template(VisionActivationSplit)

  patches: PatchEmbedding = child()
  position: LearnedPositions | SinusoidalPositions2D = child()
  embedding_norm: Norm = child()
  embedding_dropout: Dropout = child()
  transformer: RepeatedTransformer | StackedTransformer | PipelinedTransformer = child()
  final_norm: Norm = child()
  pooling_layer: AttentionPooling = child()
  representation: HeadTransform = child()

  def setup(self) -> None:
    self._check()
    D = self.output_dims = self.model_dims
    self.create_child('patches', self.patch_tpl.clone(patch_size=self.patch_size, channels=self.channels, dims=D))
    if self.class_token:
      self.create_variable('class_token', bias_weight(D))
    if self.position_tpl is not None:
      table = {'max_len': self.num_tokens} if self.has_learned_positions else {}
      self.create_child('position', self.position_tpl.clone(dims=D, **table))
    norms = {'embedding_norm': self.embedding_norm_tpl, 'final_norm': self.final_norm_tpl}
    built = {name: norm.clone(dims=D) for name, norm in norms.items() if norm is not None}
    set_biases(self.use_bias, built.values())
    for name, norm in built.items():
      self.create_child(name, norm)
    self.create_child('embedding_dropout', self.dropout_tpl)
    self.create_child('transformer', size_stack(self.transformer_tpl, self, self.num_layers, causal=False))
    if self.pooling == 'attention':
      hidden = 4 * D if self.hidden_dims is None else self.hidden_dims
      pooling = self.pooling_tpl.clone(dims=D, hidden_dims=hidden)
      pooling.set(num_heads=self.num_heads, dims_per_head=self.dims_per_head)
      set_biases(self.use_bias, [pooling.attention_tpl, pooling.ff_tpl, pooling.norm_tpl])
      self.create_child('pooling_layer', pooling)
    if self.representation_tpl is not None:
      self.create_child('representation', self.representation_tpl.clone(dims=D))

  @property
  def grid(self) -> tuple[int, int]:
    """Patches along the height and the width of an image."""
    return grid_size(self.image_size, self.patch_size)

  @property
  def num_tokens(self) -> int:
    """T, the number of patches plus 1 if there is a class token."""
    return self.grid[0] * self.grid[1] + self.class_token

  @property
  def has_learned_positions(self) -> bool:
    """Whether positions are a table, with an entry for each token."""
    return is_position_table(self.position_tpl)

  def position_grids(self) -> Mapping[str, PositionGrid]:
    return {'position.w': PositionGrid(*self.grid, int(self.class_token))} if self.has_learned_positions else {}

  def __call__(self, image_BhwC: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns the features, [B, D].

    Args:
      image_BhwC: images of `image_size`, such as float32 in [-1, 1].
      weights: not used; a `ClassificationModel` passes the weights of the images to its network.
    """
    return self.pool(self.encode(image_BhwC))

  def encode(self, image_BhwC: jax.Array) -> jax.Array:
    """Returns the states of the tokens, [B, T, D]; the class token comes first.

    Raises:
      ConfigError: the images do not have the size `image_size`.
    """
    return self.encode_tokens(self.embed(image_BhwC))

  def embed(self, image_BhwC: jax.Array) -> jax.Array:
    """Returns the tokens with their positions, [B, T, D], before the blocks; the class token is the first.

    Raises:
      ConfigError: the images do not have the size `image_size`.
    """
    if image_BhwC.shape[1:3] != tuple(self.image_size):
      raise ConfigError(
        f'{self.path_name}.image_size: {self.image_size}, but images have shape {list(image_BhwC.shape)}; crop or '
        'resize them in the input, or set image_size'
      )
    x_BTD = self.patches(image_BhwC.astype(self.fprop_dtype))
    B, _, D = x_BTD.shape
    if self.position_tpl is not None and isinstance(self.position, SinusoidalPositions2D):
      x_BTD += self.position(*map(jnp.asarray, grid_positions(*self.grid)))
    if self.class_token:
      first_B1D = jnp.broadcast_to(self.theta.class_token, (B, 1, D)).astype(x_BTD.dtype)
      x_BTD = jnp.concatenate([first_B1D, x_BTD], axis=1)
    if self.position_tpl is not None and isinstance(self.position, LearnedPositions):
      x_BTD += self.position(jnp.arange(self.num_tokens)[None])
    return self.shard(x_BTD, 'states')

  def encode_tokens(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the states, [B, T, D], of tokens to which positions have been added; some tokens may be left out."""
    if self.embedding_norm_tpl is not None:
      x_BTD = self.embedding_norm(x_BTD)
    x_BTD = self.transformer(self.embedding_dropout(x_BTD))
    return self.shard(x_BTD if self.final_norm_tpl is None else self.final_norm(x_BTD), 'states')

  def pool(self, states_BTD: jax.Array) -> jax.Array:
    """Returns the features, [B, D], for the states of all tokens."""
    if self.pooling == 'class_token':
      x_BD = states_BTD[:, 0]
    elif self.pooling == 'mean':
      mean_BD = jnp.mean(to_sum_dtype(states_BTD[:, int(self.class_token) :]), axis=1)
      x_BD = mean_BD.astype(states_BTD.dtype)
    else:
      x_BD = self.pooling_layer(states_BTD)
    return self.shard(x_BD if self.representation_tpl is None else self.representation(x_BD))

  def _check(self) -> None:
    check_choice(f'{self.path_name}.pooling', self.pooling, IMAGE_POOLINGS)
    if self.pooling == 'class_token' and not self.class_token:
      raise ConfigError(
        f"{self.path_name}.pooling: 'class_token' needs a class token; set class_token=True, or pooling to 'mean' or "
        "'attention'"
      )
    for field in ('image_size', 'patch_size'):
      size = getattr(self, field)
      if min(size) < 1:
        raise ConfigError(f'{self.path_name}.{field}: expected (height, width) of at least 1, got {size!r}')
    if 0 in self.grid:
      raise ConfigError(
        f'{self.path_name}.patch_size: a patch of {self.patch_size} is larger than the image, {self.image_size}'
      )
