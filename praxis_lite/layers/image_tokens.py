"""Images as sequences of tokens: patches at the entry of a vision transformer, and attention pooling at its exit.

B batch, h and w height and width of an image, C channels, T patches, D model dims, F hidden dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.base import Layer
from praxis_lite.layers.cross_attention import CrossAttention
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.images import Conv2D, check_channels
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.sharding.weights import WeightHParams, WeightInit

# A block with norms and biases as in ViT.
VISION_BLOCK = Config(TransformerBlock, norm_tpl=Config(LayerNorm), ff_tpl=Config(FeedForward, activation='gelu'))
VISION_BLOCK.attention_tpl.use_bias = True


class PatchEmbedding(Layer):
  """Cuts an image into patches and projects each to a token, row by row: a convolution whose stride is its filter.

      y[i * columns + j] = sum_{r, s} x[i * patch + r, j * patch + s] . w[r, s] + b

  Pixels at the bottom and at the right that do not fill a patch are left out (Dosovitskiy et al., 2021).

  Attributes:
    patch_size: (height, width) of a patch.
    channels: C.
    dims: D.
    conv_tpl: template of the child `conv`.
    activation_split_dims_mapping: `out`, [B, T, D].
  """

  patch_size: tuple[int, int] = REQUIRED
  channels: int = 3
  dims: int = REQUIRED
  conv_tpl: Config = template(Conv2D)

  conv: Conv2D = child()

  def setup(self) -> None:
    self._check_range('patch_size', least=1)
    shape = (*self.patch_size, self.channels, self.dims)
    self.create_child('conv', self.conv_tpl.clone(filter_shape=shape, strides=self.patch_size, padding='VALID'))

  def __call__(self, image_BhwC: jax.Array) -> jax.Array:
    """Returns the tokens [B, T, D].

    Raises:
      ConfigError: images are not [B, h, w, C], or are smaller than a patch.
    """
    check_channels(self, self.channels, image_BhwC)
    y_BhwD = self.conv(image_BhwC)
    return self.shard(jnp.reshape(y_BhwD, (y_BhwD.shape[0], -1, self.dims)))


def grid_size(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
  """Returns how many patches an image has along its height and its width."""
  return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


class AttentionPooling(Layer):
  """Pools tokens by a learned query that attends to all of them (MAP; Lee et al., 2019; Zhai et al., 2022).

      x = attention(probe, tokens);  y = x + ff(norm(x))

  Attributes:
    dims: D.
    num_heads, dims_per_head: see `MultiHeadAttention`.
    hidden_dims: F; None means 4 D.
    attention_tpl: template of the child `attention`.
    norm_tpl: template of the child `norm`.
    ff_tpl: template of the child `ff`.
    activation_split_dims_mapping: `out`, [B, D].
  """

  dims: int = REQUIRED
  num_heads: int = REQUIRED
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  attention_tpl: Config = template(CrossAttention, use_bias=True)
  norm_tpl: Config = template(LayerNorm)
  ff_tpl: Config = template(FeedForward, activation='gelu')

  attention: CrossAttention = child()
  norm: Norm = child()
  ff: FeedForward = child()

  def setup(self) -> None:
    D = self.dims
    self.create_variable('probe', WeightHParams((D,), init=WeightInit.Gaussian(D**-0.5)))
    heads = {'num_heads': self.num_heads, 'dims_per_head': self.dims_per_head}
    self.create_child('attention', self.attention_tpl.clone(input_dims=D, **heads))
    self.create_child('norm', self.norm_tpl.clone(dims=D))
    hidden = 4 * D if self.hidden_dims is None else self.hidden_dims
    self.create_child('ff', self.ff_tpl.clone(input_dims=D, hidden_dims=hidden))

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns [B, D] for tokens [B, T, D]."""
    B, _, D = x_BTD.shape
    probe_B1D = jnp.broadcast_to(self.theta.probe, (B, 1, D)).astype(x_BTD.dtype)
    y_B1D = self.attention(probe_B1D, x_BTD)
    y_B1D += self.ff(self.norm(y_B1D))
    return self.shard(y_B1D[:, 0])
