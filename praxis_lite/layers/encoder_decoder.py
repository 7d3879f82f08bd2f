"""The transformer that reads a source and writes a target: encoder and decoder (Vaswani et al., 2017; T5).

    encoder        source = norm(blocks(embedding(source ids)))
    decoder block  x = x + attention(norm(x));  x = x + cross_attention(norm(x), source);  x = x + ff(norm(x))
    logits         = softmax(norm(decoder blocks(embedding(ids), source)))

The formula of the block is for `norm_policy='pre'`; see `transformer_block.py` for others.

B batch, T length of the targets, S length of the sources, D model dims, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.base import Layer
from praxis_lite.layers.cross_attention import CrossAttention
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.position_limit import PositionLimit, check_length, limit_of_table
from praxis_lite.layers.positions import LearnedPositions, RelativeBias, SinusoidalPositions
from praxis_lite.layers.shared_bias import bias_of_positions, building_with_shared_bias, shared_bias
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax, SoftmaxOutput
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer, size_stack
from praxis_lite.layers.transformer_block import HEADS, TransformerBlock, set_biases, token_paddings
from praxis_lite.layers.transformer_lm import logits_at, shared_look_up


class DecoderBlock(TransformerBlock):
  """A transformer block that also attends to a source, between self-attention and the feed-forward layer.

  Attributes: the same as for `TransformerBlock`, and
    cross_attention_tpl: template of the child `cross_attention`. `norm_tpl` is also the template of its norm,
      `cross_attention_norm`, and with 'primer_hybrid' of `cross_attention_out_norm`.
  """

  cross_attention_tpl: Config = template(CrossAttention)

  cross_attention: CrossAttention = child()
  cross_attention_norm: Norm = child()
  cross_attention_out_norm: Norm = child()

  def setup(self) -> None:
    super().setup()
    heads = {field: getattr(self, field) for field in HEADS}
    self.create_child('cross_attention', self._set_sizes('cross_attention_tpl', input_dims=self.input_dims, **heads))
    norms = ['cross_attention_norm', *(['cross_attention_out_norm'] if self._is_hybrid else [])]
    self.create_children(*norms, template=self.norm_tpl.clone(dims=self.input_dims))

  def __call__(
    self,
    x_BTD: jax.Array,
    source_BSD: jax.Array | None = None,
    *,
    source_segment_ids: jax.Array | None = None,
    paddings: jax.Array | None = None,
    **attention: Any,
  ) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the residual stream.
      source_BSD: the output of the encoder.
      source_segment_ids: [B, S] int32, 0 for padding. A target attends to the sources of its segment; without
        `segment_ids`, to all but padding. None means one segment without padding.
      paddings: [B, T], nonzero for padding tokens, for feed-forward layers that take them; None means no padding.
      **attention: keyword arguments of `attention`: segment_ids, segment_pos, mask, logit_bias.
    """
    if source_BSD is None:
      raise ConfigError(f'{self.path_name}: a block of a decoder attends to a source; pass source_BSD')
    ids = {'segment_ids': attention.get('segment_ids'), 'kv_segment_ids': source_segment_ids}
    x_BTD = self._add_attention(x_BTD, lambda x: self.attention(x, **attention))
    x_BTD = self._add_cross_attention(x_BTD, lambda x: self.cross_attention(x, source_BSD, **ids))
    return self._add_feed_forward(x_BTD, paddings)

  def init_decode_state(
    self,
    batch_size: int,
    max_len: int,
    source_BSD: jax.Array | None = None,
    source_segment_ids: jax.Array | None = None,
  ) -> None:
    """Allocates the cache of self-attention, and computes the keys and values of the sources, one source a row."""
    if source_BSD is None:
      raise ConfigError(f'{self.path_name}: a block of a decoder attends to a source; pass source_BSD')
    super().init_decode_state(batch_size, max_len)
    self.cross_attention.read_source(source_BSD, source_segment_ids)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, *attention: Any, **more: Any) -> jax.Array:
    """Returns [B, T, D] for the next tokens; see `TransformerBlock.extend_step`."""
    x_BTD = self._add_attention(x_BTD, lambda x: self.attention.extend_step(x, pos_BT, *attention, **more))
    x_BTD = self._add_cross_attention(x_BTD, lambda x: self.cross_attention.attend_to_source(x, pos_BT))
    return self._add_feed_forward(x_BTD, pos_BT < 0)

  def _add_cross_attention(self, x_BTD: jax.Array, attend: Callable[[jax.Array], jax.Array]) -> jax.Array:
    out_norm = self.cross_attention_out_norm if self._is_hybrid else None
    return self._add_sublayer(x_BTD, attend, self.cross_attention_norm, out_norm)


class TransformerEncoderDecoder(Layer):
  """An encoder that reads sources, and a decoder that predicts targets.

  The sizes are set here and passed on to the templates below.

  Attributes:
    vocab_size: V.
    model_dims: D.
    num_layers: number of blocks of the decoder.
    num_encoder_layers: number of blocks of the encoder; None means `num_layers`.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`; also of cross attention.
    hidden_dims: hidden dims of the feed-forward layers; None means 4 D.
    use_bias: whether all layers that support biases, except the softmax, have them; None leaves this to their
      templates.
    embedding_tpl: template of the child `embedding`; with None, the table of `softmax` is also the embedding.
    decoder_embedding_tpl: template of the child `decoder_embedding`; with None, targets have the embedding of sources.
    position_tpl: template of the children `encoder_position` and `decoder_position`, which are added to the embeddings;
      None disables them.
    encoder_position_tpl: template of `encoder_position` if it has its own; None means `position_tpl`.
    first_position: the position of the first token; BART counts from 2, and leaves the first vectors unused.
    embedding_norm_tpl: template of the children `encoder_embedding_norm` and `decoder_embedding_norm`, norms of the sum
      of embeddings and positions; None disables them.
    relative_bias_tpl: template of the children `encoder_bias`, which is bidirectional, and `decoder_bias`: biases of
      self-attention that all blocks of a stack share (T5); None disables them.
    dropout_tpl: template of the children `embedding_dropout` and `output_dropout`, on the embeddings and on the results
      of both stacks.
    encoder_tpl, decoder_tpl: templates of the children `encoder` and `decoder`, stacks of a `TransformerBlock` and of a
      `DecoderBlock`, or of patterns of these.
    final_norm_tpl: template of the children `encoder_norm` and `decoder_norm`; None disables them, as after post-norm
      blocks.
    softmax_tpl: template of the child `softmax`.
    scale_output_sqrt_depth: divide the decoder's result by sqrt(D) before the softmax, as T5 does with a shared table.
    activation_split_dims_mapping: `out`, [B, T, D]: the embeddings, and the result of the encoder.
  """

  vocab_size: int = REQUIRED
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_encoder_layers: int | None = None
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  use_bias: bool | None = None
  embedding_tpl: Config | None = None
  decoder_embedding_tpl: Config | None = None
  position_tpl: Config | None = None
  encoder_position_tpl: Config | None = None
  first_position: int = 0
  embedding_norm_tpl: Config | None = None
  relative_bias_tpl: Config | None = template(RelativeBias)
  dropout_tpl: Config = template(Dropout)
  encoder_tpl: Config = template(RepeatedTransformer)
  decoder_tpl: Config = template(RepeatedTransformer, layers_tpl=Config(DecoderBlock))
  final_norm_tpl: Config | None = template(RMSNorm)
  softmax_tpl: Config = template(SharedEmbeddingSoftmax)
  scale_output_sqrt_depth: bool = False

  embedding: Embedding = child()
  decoder_embedding: Embedding = child()
  encoder_position: LearnedPositions | SinusoidalPositions = child()
  decoder_position: LearnedPositions | SinusoidalPositions = child()
  encoder_embedding_norm: Norm = child()
  decoder_embedding_norm: Norm = child()
  encoder_bias: RelativeBias = child()
  decoder_bias: RelativeBias = child()
  embedding_dropout: Dropout = child()
  output_dropout: Dropout = child()
  encoder: RepeatedTransformer | StackedTransformer | PipelinedTransformer = child()
  decoder: RepeatedTransformer | StackedTransformer | PipelinedTransformer = child()
  encoder_norm: Norm = child()
  decoder_norm: Norm = child()
  softmax: FullSoftmax = child()

  def setup(self) -> None:
    self._check_range('first_position', least=0)
    V, D = self.vocab_size, self.model_dims
    for name, embedding in (('embedding', self.embedding_tpl), ('decoder_embedding', self.decoder_embedding_tpl)):
      if embedding is not None:
        self.create_child(name, embedding.clone(num_classes=V, input_dims=D))
    if self.position_tpl is not None:
      of_encoder = self.position_tpl if self.encoder_position_tpl is None else self.encoder_position_tpl
      self.create_child('encoder_position', of_encoder.clone(dims=D))
      self.create_child('decoder_position', self.position_tpl.clone(dims=D))
    if self.embedding_norm_tpl is not None:
      norm = self.embedding_norm_tpl.clone(dims=D)
      set_biases(self.use_bias, [norm])
      self.create_children('encoder_embedding_norm', 'decoder_embedding_norm', template=norm)
    if self.relative_bias_tpl is not None:
      bias = self.relative_bias_tpl.clone(num_heads=self.num_heads)
      self.create_child('encoder_bias', bias.clone(bidirectional=True))
      self.create_child('decoder_bias', bias.clone(bidirectional=False))
    self.create_children('embedding_dropout', 'output_dropout', template=self.dropout_tpl)
    final_norm = None if self.final_norm_tpl is None else self.final_norm_tpl.clone(dims=D)
    set_biases(self.use_bias, [final_norm])
    if self.num_encoder_layers is None:
      self.num_encoder_layers = self.num_layers
    with building_with_shared_bias() if self.relative_bias_tpl is not None else contextlib.nullcontext():
      self.create_child('encoder', size_stack(self.encoder_tpl, self, self.num_encoder_layers, causal=False))
      self.create_child('decoder', size_stack(self.decoder_tpl, self, self.num_layers, causal=True))
    if final_norm is not None:
      self.create_children('encoder_norm', 'decoder_norm', template=final_norm)
    self.create_child('softmax', self.softmax_tpl.clone(input_dims=D, num_classes=V))
    self._look_up = shared_look_up(self.path_name, self.softmax) if self.embedding_tpl is None else self.embedding
    self._look_up_target = self._look_up if self.decoder_embedding_tpl is None else self.decoder_embedding

  # ---------------------------------------------------------------- training and evaluation

  def __call__(
    self,
    source_ids_BS: jax.Array,
    ids_BT: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    source_segment_ids: jax.Array | None = None,
    source_segment_pos: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
  ) -> SoftmaxOutput:
    """Returns the cross entropy of the labels [B, T], and logits [B, T, V] unless the softmax computes in chunks.

    Args:
      source_ids_BS: int32 tokens of the sources.
      ids_BT: int32 tokens that the decoder reads: a start token, and then the tokens of the target.
      labels_BT: int32, the token that follows each token of `ids_BT`.
      weights_BT: weights of the labels in auxiliary losses; None means all are 1.
      source_segment_ids: int32 [B, S], 0 for padding; tokens attend within their segment. None means that each row is
        one source without padding.
      source_segment_pos: int32 [B, S], position of a token in its source; None means 0, 1, 2, ...
      segment_ids: int32 [B, T], 0 for padding; targets attend within their segment, and to the source with this number.
        None means that each row is one target, which attends to all source tokens of its row except padding.
      segment_pos: int32 [B, T], position of a token in its target; None means 0, 1, 2, ...
    """
    source = self.encode(source_ids_BS, source_segment_ids, source_segment_pos), source_segment_ids
    return self.softmax(self._decode(source, ids_BT, weights_BT, segment_ids, segment_pos), labels_BT, weights_BT)

  def logits(
    self,
    source_ids_BS: jax.Array,
    ids_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    source_segment_ids: jax.Array | None = None,
    source_segment_pos: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
  ) -> jax.Array:
    """Returns float32 logits [B, T, V]; the arguments are the same as for `__call__`."""
    source = self.encode(source_ids_BS, source_segment_ids, source_segment_pos), source_segment_ids
    return self.softmax.get_logits(self._decode(source, ids_BT, weights_BT, segment_ids, segment_pos))

  def encode(
    self, ids_BS: jax.Array, segment_ids: jax.Array | None = None, segment_pos: jax.Array | None = None
  ) -> jax.Array:
    """Returns the encoder's result, [B, S, D], for tokens of sources; see `__call__`."""
    if segment_pos is None:
      check_length(self.source_position_limit, ids_BS.shape[1])
    x_BSD = self._embed(self._look_up, 'encoder', ids_BS, segment_pos)
    more = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **self._bias('encoder', ids_BS.shape[1])}
    if _takes_paddings(self.encoder):
      more['paddings'] = token_paddings(None, segment_ids)
    return self.shard(self._finish(self.encoder(x_BSD, **more), 'encoder_norm'))

  def _decode(
    self,
    source: tuple[jax.Array, jax.Array | None],
    ids_BT: jax.Array,
    weights_BT: jax.Array | None,
    segment_ids: jax.Array | None,
    segment_pos: jax.Array | None,
  ) -> jax.Array:
    """Returns the inputs of the softmax, [B, T, D]; `source` is the encoder's result and its segments."""
    if segment_pos is None:
      check_length(self.position_limit, ids_BT.shape[1])
    x_BTD = self._embed(self._look_up_target, 'decoder', ids_BT, segment_pos)
    more = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **self._bias('decoder', ids_BT.shape[1])}
    if _takes_paddings(self.decoder):
      more['paddings'] = token_paddings(weights_BT, segment_ids)
    y_BTD = self.decoder(x_BTD, source_BSD=source[0], source_segment_ids=source[1], **more)
    return self._scale(self._finish(y_BTD, 'decoder_norm'))

  # ---------------------------------------------------------------- token by token

  def init_decode_state(self, source_ids_BS: jax.Array, source_segment_ids: jax.Array | None, max_len: int) -> None:
    """Reads sources, one in each row, and allocates caches of `max_len` slots for their targets.

    The decode state holds the keys and values of the sources for each layer of the decoder.
    """
    check_length(self.position_limit, max_len)
    source_BSD = self.encode(source_ids_BS, source_segment_ids)
    self.decoder.init_decode_state(source_ids_BS.shape[0], max_len, source_BSD, source_segment_ids)

  def extend_step(self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array) -> jax.Array:
    """Appends T tokens to the target of each row; returns logits [B, V] of the token that follows token `last_B`.

    Args:
      ids_BT: int32 tokens.
      pos_BT: int32 position of each token; -1 is padding.
      last_B: int32 index in [0, T); or N indices for each row, [B, N], for logits [B, N, V].
    """
    bias = None if self.relative_bias_tpl is None else bias_of_positions(self.decoder_bias)
    x_BTD = self._embed(self._look_up_target, 'decoder', ids_BT, pos_BT)
    x_BTD = self.decoder.extend_step(x_BTD, pos_BT, None, bias)
    return logits_at(last_B, x_BTD, lambda x: self.softmax.get_logits(self._scale(self._finish(x, 'decoder_norm'))))

  # ---------------------------------------------------------------- parts

  def _embed(
    self,
    look_up: Callable[[jax.Array], jax.Array],
    stack: str,
    ids_BT: jax.Array,
    pos_BT: jax.Array | None,
  ) -> jax.Array:
    """Returns the inputs of a stack, 'encoder' or 'decoder', for these ids, [B, T, D]."""
    x_BTD = look_up(ids_BT)
    if self.position_tpl is not None:
      pos_BT = jnp.arange(ids_BT.shape[1])[None] if pos_BT is None else pos_BT
      x_BTD += getattr(self, f'{stack}_position')(self.first_position + pos_BT)
    if self.embedding_norm_tpl is not None:
      x_BTD = getattr(self, f'{stack}_embedding_norm')(self.shard(x_BTD))
    return self.shard(self.embedding_dropout(x_BTD))

  def _bias(self, stack: str, length: int) -> dict[str, Any]:
    """Returns keyword arguments for a stack, 'encoder' or 'decoder': `logit_bias`; {} without a relative bias."""
    if self.relative_bias_tpl is None:
      return {}
    in_blocks = any(_attends_in_blocks(block.attention) for block in _blocks(getattr(self, stack)))
    return {'logit_bias': shared_bias(getattr(self, f'{stack}_bias'), length, in_blocks=in_blocks)}

  def _finish(self, x_BTD: jax.Array, norm: str) -> jax.Array:
    return self.output_dropout(x_BTD if self.final_norm_tpl is None else getattr(self, norm)(x_BTD))

  def _scale(self, x_BTD: jax.Array) -> jax.Array:
    dims = self.model_dims / self.growth_of('model_dims')  # With a smaller model, the softmax divides by the growth.
    return x_BTD * dims**-0.5 if self.scale_output_sqrt_depth else x_BTD

  @property
  def max_positions(self) -> int | None:
    """The most positions that a target can have; None means any number."""
    limit = self.position_limit
    return None if limit is None else limit.num_positions

  @property
  def max_source_positions(self) -> int | None:
    """The most positions that a source can have; None means any number."""
    limit = self.source_position_limit
    return None if limit is None else limit.num_positions

  @property
  def position_limit(self) -> PositionLimit | None:
    """The most positions that a target can have, and the field that says so; None means any number."""
    return self._limit('decoder_position')

  @property
  def source_position_limit(self) -> PositionLimit | None:
    """The most positions that a source can have, and the field that says so; None means any number."""
    return self._limit('encoder_position')

  def _limit(self, position: str) -> PositionLimit | None:
    table = None if self.position_tpl is None else getattr(self, position)
    return limit_of_table(f'{self.path_name}.position_tpl', table, self.first_position)


def _takes_paddings(stack: Layer) -> bool:
  return any(layer.takes_paddings for layer in stack.descendants())


def _attends_in_blocks(attention: MultiHeadAttention) -> bool:
  """Whether attention is computed in blocks or by a kernel, however few its logits are."""
  return attention.implementation not in ('auto', 'dense', 'xla') or attention.context_axis is not None


def _blocks(stack: Layer) -> Iterator[TransformerBlock]:
  """Yields each block of a stack; a block that is repeated, only once."""
  return (layer for layer in stack.descendants() if isinstance(layer, TransformerBlock))
