"""The encoder: a transformer whose tokens attend in both directions, as in BERT (Devlin et al., 2019) and RoBERTa.

    x      = norm(embedding(ids) + position(pos) + token_type(types))
    states = final_norm(blocks(x))

After post-norm blocks, which BERT has, there is no final norm. See `transformer_block.py` for the formulas.

B batch, T length, D model dims, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.layers.position_limit import PositionLimit, check_length, limit_of_table
from praxis_lite.layers.positions import LearnedPositions, SinusoidalPositions
from praxis_lite.layers.softmax import SharedEmbeddingSoftmax
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer, size_stack
from praxis_lite.layers.transformer_block import TransformerBlock, set_biases, token_paddings

_POST_NORM_BLOCK = Config(TransformerBlock, norm_policy='post')
_POST_NORM_BLOCK.set(norm_tpl=Config(LayerNorm), ff_tpl=Config(FeedForward, activation='gelu'))
_POST_NORM_BLOCK.attention_tpl.use_bias = True


class TransformerEncoder(Layer):
  """A transformer that computes a state of each token, which depends on all tokens of its segment unless `causal`.

  The sizes are set here and passed on to the templates below.

  Attributes:
    vocab_size: V.
    model_dims: D.
    num_layers: number of blocks.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    use_bias: whether all layers that support biases have them; None leaves this to their templates.
    causal: whether tokens attend only to themselves and to earlier ones, as in the text encoder of CLIP.
    embedding_tpl: template of the child `embedding`; with a `SharedEmbeddingSoftmax`, a head that predicts tokens can
      use its table.
    position_tpl: template of the child `position`, which is added to the embeddings; None disables it.
    first_position: the position of the first token of a segment; RoBERTa counts from 2, and leaves the first vectors of
      its table unused.
    token_type_tpl: template of the child `token_type`, an `Embedding` of a few types, such as the first and the second
      sentence of a pair, which is added too; None disables it.
    embedding_norm_tpl: template of the child `embedding_norm`, the norm of the sum; None disables it.
    dropout_tpl: template of the child `embedding_dropout`.
    transformer_tpl: template of the child `transformer`, a stack of blocks; `causal` sets its attention.
    final_norm_tpl: template of the child `final_norm`; None disables it, as after post-norm blocks.
    activation_split_dims_mapping: `out`, [B, T, D]: the embeddings, and the states.
  """

  vocab_size: int = REQUIRED
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  use_bias: bool | None = None
  causal: bool = False
  embedding_tpl: Config = template(Embedding)
  position_tpl: Config | None = None
  first_position: int = 0
  token_type_tpl: Config | None = None
  embedding_norm_tpl: Config | None = template(LayerNorm)
  dropout_tpl: Config = template(Dropout)
  transformer_tpl: Config = template(RepeatedTransformer, layers_tpl=_POST_NORM_BLOCK)
  final_norm_tpl: Config | None = None

  embedding: Embedding | SharedEmbeddingSoftmax = child()
  position: LearnedPositions | SinusoidalPositions = child()
  token_type: Embedding = child()
  embedding_norm: Norm = child()
  embedding_dropout: Dropout = child()
  transformer: RepeatedTransformer | StackedTransformer | PipelinedTransformer = child()
  final_norm: Norm = child()

  def setup(self) -> None:
    self._check_range('first_position', least=0)
    D = self.model_dims
    self.create_child('embedding', self.embedding_tpl.clone(num_classes=self.vocab_size, input_dims=D))
    if self.position_tpl is not None:
      self.create_child('position', self.position_tpl.clone(dims=D))
    if self.token_type_tpl is not None:
      self.create_child('token_type', self.token_type_tpl.clone(input_dims=D))
    norms = {'embedding_norm': self.embedding_norm_tpl, 'final_norm': self.final_norm_tpl}
    built = {name: norm.clone(dims=D) for name, norm in norms.items() if norm is not None}
    set_biases(self.use_bias, built.values())
    for name, norm in built.items():
      self.create_child(name, norm)
    self.create_child('embedding_dropout', self.dropout_tpl)
    transformer = size_stack(self.transformer_tpl, self, self.num_layers, causal=self.causal)
    self.create_child('transformer', transformer)
    self._takes_paddings = any(layer.takes_paddings for layer in self.transformer.descendants())

  def __call__(
    self,
    ids_BT: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    token_type_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the states, [B, T, D].

    Args:
      ids_BT: int32 tokens.
      segment_ids: int32 [B, T], 0 for padding; tokens attend within their segment. None means that each row is one
        segment without padding.
      segment_pos: int32 [B, T], position of a token in its segment; None means 0, 1, 2, ...
      token_type_ids: int32 [B, T], the type of each token; None means 0 for all. Without a `token_type_tpl`, they have
        no effect.
    """
    if segment_pos is None:
      check_length(self.position_limit, ids_BT.shape[1])
    x_BTD = self._embed(ids_BT, segment_pos, token_type_ids)
    more = {'paddings': token_paddings(None, segment_ids)} if self._takes_paddings else {}
    x_BTD = self.transformer(x_BTD, segment_ids=segment_ids, segment_pos=segment_pos, **more)
    return self.shard(x_BTD if self.final_norm_tpl is None else self.final_norm(x_BTD))

  def _embed(self, ids_BT: jax.Array, pos_BT: jax.Array | None, types_BT: jax.Array | None) -> jax.Array:
    embedding = self.embedding
    x_BTD = embedding.emb_lookup(ids_BT) if isinstance(embedding, SharedEmbeddingSoftmax) else embedding(ids_BT)
    if self.position_tpl is not None:
      pos_BT = jnp.arange(ids_BT.shape[1])[None] if pos_BT is None else jnp.maximum(pos_BT, 0)
      x_BTD += self.position(self.first_position + pos_BT)
    if self.token_type_tpl is not None:
      x_BTD += self.token_type(jnp.zeros_like(ids_BT) if types_BT is None else types_BT)
    if self.embedding_norm_tpl is not None:
      x_BTD = self.embedding_norm(self.shard(x_BTD))
    return self.shard(self.embedding_dropout(x_BTD))

  @property
  def max_positions(self) -> int | None:
    """The most positions that a segment can have; None means any number."""
    limit = self.position_limit
    return None if limit is None else limit.num_positions

  @property
  def position_limit(self) -> PositionLimit | None:
    """The most positions that a segment can have, and the field that says so; None means any number."""
    table = None if self.position_tpl is None else self.position
    return limit_of_table(f'{self.path_name}.position_tpl', table, self.first_position)


class HeadTransform(Layer):
  """y = norm(f(x W + b)), between the states of an encoder and a softmax.

  BERT predicts tokens with GELU and LayerNorm here, and classifies with tanh and no norm (its pooler).

  Attributes:
    dims: D, of x and of y.
    activation: name of f; see `activations.py`.
    linear_tpl: template of the child `linear`.
    norm_tpl: template of the child `norm`; None disables it.
    activation_split_dims_mapping: `out`, [..., D].
  """

  dims: int = REQUIRED
  activation: str = 'gelu'
  linear_tpl: Config = template(Linear, use_bias=True)
  norm_tpl: Config | None = template(LayerNorm)

  linear: Linear = child()
  norm: Norm = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    self.create_child('linear', self.linear_tpl.clone(input_dims=self.dims, output_dims=self.dims))
    if self.norm_tpl is not None:
      self.create_child('norm', self.norm_tpl.clone(dims=self.dims))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., D] for x [..., D]."""
    y = get_activation(self.activation)(self.linear(x))
    return self.shard(y if self.norm_tpl is None else self.norm(y))
