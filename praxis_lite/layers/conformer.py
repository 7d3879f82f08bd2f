"""The Conformer: blocks of self-attention and convolution between two half feed-forward layers (Gulati et al., 2020).

    x = x + ff_in(norm(x)) / 2;  x = x + attention(norm(x));  x = x + convolution(x)
    y = norm(x + ff_out(norm(x)) / 2)

B batch, T frames, U frames after subsampling, D model dims, M features of a frame.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.positions import RotaryPositions
from praxis_lite.layers.repeat import Repeat, kinds_of_stack
from praxis_lite.layers.time_convolutions import ConvolutionModule, ConvSubsampling


class ConformerBlock(Layer):
  """One block of a Conformer.

  Attributes:
    input_dims: D.
    hidden_dims: hidden dims of the feed-forward layers.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    causal: whether attention and convolution see no later frames.
    norm_tpl: template of the children `ff_in_norm`, `attention_norm`, `ff_out_norm` and `final_norm`.
    ff_tpl: template of the children `ff_in` and `ff_out`.
    attention_tpl: template of the child `attention`: with rotary positions, or with a `relative_bias_tpl` instead of
      the `rotary_tpl`. Its `sliding_window` or `local_chunk` makes it local.
    conv_tpl: template of the child `convolution`.
    dropout_tpl: template of the child `residual_dropout`, on the results of feed-forward layers and attention.
    activation_split_dims_mapping: `out`, [B, T, D].
  """

  takes_paddings: ClassVar[bool] = True

  scales_branches: ClassVar[bool] = True

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  causal: bool = False
  norm_tpl: Config = template(LayerNorm)
  ff_tpl: Config = template(FeedForward, activation='silu')
  attention_tpl: Config = template(MultiHeadAttention, use_bias=True, rotary_tpl=Config(RotaryPositions))
  conv_tpl: Config = template(ConvolutionModule)
  dropout_tpl: Config = template(Dropout)

  ff_in: FeedForward = child()
  attention: MultiHeadAttention = child()
  convolution: ConvolutionModule = child()
  ff_out: FeedForward = child()
  ff_in_norm: Norm = child()
  attention_norm: Norm = child()
  ff_out_norm: Norm = child()
  final_norm: Norm = child()
  residual_dropout: Dropout = child()

  def setup(self) -> None:
    D = self.input_dims
    norms = ('ff_in_norm', 'attention_norm', 'ff_out_norm', 'final_norm')
    self.create_children(*norms, template=self.norm_tpl.clone(dims=D))
    self.create_children('ff_in', 'ff_out', template=self.ff_tpl.clone(input_dims=D, hidden_dims=self.hidden_dims))
    heads = {field: getattr(self, field) for field in ('num_heads', 'num_kv_heads', 'dims_per_head')}
    self.create_child('attention', self.attention_tpl.clone(input_dims=D, causal=self.causal, **heads))
    self.create_child('convolution', self.conv_tpl.clone(input_dims=D, causal=self.causal))
    self.create_child('residual_dropout', self.dropout_tpl)

  def __call__(self, x_BTD: jax.Array, *, paddings: jax.Array | None = None) -> jax.Array:
    """Returns [B, T, D]. Frames do not see frames of padding, whose own results are undefined.

    `paddings`, [B, T], are nonzero for padding; None means no padding.
    """
    segments_BT = None if paddings is None else (paddings == 0).astype(jnp.int32)
    x_BTD = self.shard(x_BTD + 0.5 * self.scale_branch(self.residual_dropout(self.ff_in(self.ff_in_norm(x_BTD)))))
    attended_BTD = self.attention(self.attention_norm(x_BTD), segment_ids=segments_BT)
    x_BTD = self.shard(x_BTD + self.scale_branch(self.residual_dropout(attended_BTD)))
    x_BTD = self.shard(x_BTD + self.scale_branch(self.convolution(x_BTD, paddings)))
    x_BTD = self.shard(x_BTD + 0.5 * self.scale_branch(self.residual_dropout(self.ff_out(self.ff_out_norm(x_BTD)))))
    return self.shard(self.final_norm(x_BTD))


class ConformerEncoder(Layer):
  """Subsampling of features, and a stack of Conformer blocks. The sizes are set here and passed on to the templates.

  Attributes:
    input_dims: M.
    model_dims: D.
    num_layers: number of blocks.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    kernel_size: width of the convolutions of the blocks.
    causal: whether no frame sees later ones.
    subsampling_tpl: template of the child `subsampling`, which reduces T frames to U.
    dropout_tpl: template of the child `input_dropout`.
    stack_tpl: template of the child `stack`, a `Repeat` of blocks.
    activation_split_dims_mapping: `out`, [B, U, D].
  """

  takes_paddings: ClassVar[bool] = True

  input_dims: int = REQUIRED
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  kernel_size: int = 31
  causal: bool = False
  subsampling_tpl: Config = template(ConvSubsampling)
  dropout_tpl: Config = template(Dropout)
  stack_tpl: Config = template(Repeat, layers_tpl=Config(ConformerBlock))

  subsampling: ConvSubsampling = child()
  input_dropout: Dropout = child()
  stack: Repeat = child()

  def setup(self) -> None:
    sizes = {'input_dims': self.input_dims, 'output_dims': self.model_dims, 'causal': self.causal}
    self.create_child('subsampling', self.subsampling_tpl.clone(**sizes))
    self.create_child('input_dropout', self.dropout_tpl)
    stack = self.stack_tpl.clone(num_layers=self.num_layers)
    of_block: dict[str, Any] = {'input_dims': self.model_dims, 'causal': self.causal}
    of_block['hidden_dims'] = 4 * self.model_dims if self.hidden_dims is None else self.hidden_dims
    of_block |= {field: getattr(self, field) for field in ('num_heads', 'num_kv_heads', 'dims_per_head')}
    for block in kinds_of_stack(stack):
      block.set(**of_block)
      block.conv_tpl.kernel_size = self.kernel_size
    self.create_child('stack', stack)

  def __call__(self, x_BTM: jax.Array, paddings: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Returns the states, [B, U, D], and their paddings, [B, U], which are None if `paddings` is None.

    `paddings`, [B, T], are nonzero for padding after the frames.
    """
    x_BUD, paddings = self.subsampling(x_BTM, paddings)
    return self.shard(self.stack(self.shard(self.input_dropout(x_BUD)), paddings=paddings)), paddings
