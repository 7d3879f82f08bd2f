"""TransformerLm: a decoder-only language model.

    logits = softmax(final_norm(transformer(embedding(ids) + position(pos))))

B batch, T length, D model dims, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.multi_token import MultiTokenPrediction
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.packed_prompts import PackedPrompts
from praxis_lite.layers.position_limit import PositionLimit, check_length, limit_of_table
from praxis_lite.layers.positions import LearnedPositions, SinusoidalPositions
from praxis_lite.layers.repeat import kinds_of_stack
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax, SoftmaxOutput
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import HEADS, set_biases, token_paddings
from praxis_lite.layers.value_residual import remove_value_residual


class TransformerLm(Layer):
  """A decoder-only transformer.

  The sizes are set here and passed on to the templates below.

  Attributes:
    vocab_size: V.
    model_dims: D.
    num_layers: number of blocks.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    hidden_dims: hidden dims of the feed-forward layers, except those of first blocks that set their own; None means 4
      D.
    use_bias: whether all layers that support biases, except the softmax, have them; None leaves this to their
      templates.
    embedding_tpl: template of the child `embedding`; None means that the table of `softmax` is also the embedding.
    position_tpl: template of the child `position`, which is added to the embeddings; None disables it, as for rotary
      positions.
    dropout_tpl: template of the child `embedding_dropout`.
    transformer_tpl: template of the child `transformer`. It has the fields `num_layers` and `layers_tpl`, the template
      of a block or a pattern of several, and may have `first_tpl`, templates of the first blocks.
    final_norm_tpl: template of the child `final_norm`; None disables it, as after post-norm blocks.
    softmax_tpl: template of the child `softmax`.
    mtp_tpl: template of the child `mtp`, a `MultiTokenPrediction`, whose heads predict further tokens in training; None
      disables it.
    activation_split_dims_mapping: `out`, [B, T, D]: the embeddings.
  """

  vocab_size: int = REQUIRED
  model_dims: int = REQUIRED
  num_layers: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  use_bias: bool | None = None
  embedding_tpl: Config | None = None
  position_tpl: Config | None = None
  dropout_tpl: Config = template(Dropout)
  transformer_tpl: Config = template(RepeatedTransformer)
  final_norm_tpl: Config | None = template(RMSNorm)
  softmax_tpl: Config = template(SharedEmbeddingSoftmax)
  mtp_tpl: Config | None = None

  embedding: Embedding = child()
  position: LearnedPositions | SinusoidalPositions = child()
  embedding_dropout: Dropout = child()
  transformer: RepeatedTransformer | StackedTransformer | PipelinedTransformer = child()
  final_norm: Norm = child()
  softmax: FullSoftmax = child()
  mtp: MultiTokenPrediction = child()

  def setup(self) -> None:
    V, D = self.vocab_size, self.model_dims
    if self.embedding_tpl is not None:
      self.create_child('embedding', self.embedding_tpl.clone(num_classes=V, input_dims=D))
    if self.position_tpl is not None:
      self.create_child('position', self.position_tpl.clone(dims=D))
    self.create_child('embedding_dropout', self.dropout_tpl)
    transformer = self.transformer_tpl.clone(num_layers=self.num_layers)
    sizes = {'input_dims': D, 'hidden_dims': 4 * D if self.hidden_dims is None else self.hidden_dims}
    sizes |= {field: getattr(self, field) for field in HEADS}
    final_norm = None if self.final_norm_tpl is None else self.final_norm_tpl.clone(dims=D)
    may_have_bias = [final_norm]
    first, blocks, mtp = getattr(transformer, 'first_tpl', ()), kinds_of_stack(transformer), self.mtp_tpl
    if mtp is not None:
      own = mtp.block_tpl
      mtp = mtp.clone(input_dims=D, block_tpl=remove_value_residual(blocks[-1] if own is None else own))
      if mtp.norm_tpl is None:
        mtp.norm_tpl = None if final_norm is None else final_norm.clone()
      blocks = *blocks, mtp.block_tpl
    for block in blocks:
      has_its_own = block.hidden_dims is not REQUIRED and any(block is other for other in first)
      block.set(**sizes | ({'hidden_dims': block.hidden_dims} if has_its_own else {}))
      if block.attention_tpl is not None:
        block.attention_tpl.causal = True
      may_have_bias += [block.attention_tpl, block.ff_tpl, block.norm_tpl]
    set_biases(self.use_bias, may_have_bias)
    self.create_child('transformer', transformer)
    self._takes_paddings = any(layer.takes_paddings for layer in self.transformer.descendants())
    if final_norm is not None:
      self.create_child('final_norm', final_norm)
    self.create_child('softmax', self.softmax_tpl.clone(input_dims=D, num_classes=V))
    self._look_up = shared_look_up(self.path_name, self.softmax) if self.embedding_tpl is None else self.embedding
    if mtp is not None:
      self.create_child('mtp', mtp)

  def __call__(
    self,
    ids_BT: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> SoftmaxOutput:
    """Returns the cross entropy of the labels [B, T], and logits [B, T, V] unless the softmax computes in chunks.

    Args:
      ids_BT: int32 tokens.
      labels_BT: int32, the token that follows each token.
      weights_BT: weights of the labels in auxiliary losses; None means all are 1.
      segment_ids: int32 [B, T], 0 for padding; tokens attend within their segment. None means that each row is one
        segment.
      segment_pos: int32 [B, T], position of a token in its segment; None means 0, 1, 2, ...
      prefix_lengths: int32 [B], the length of the prefix of each row to which all its tokens attend (prefix-LM); None
        disables it.
    """
    x_BTD = self.encode(
      ids_BT, weights_BT, segment_ids=segment_ids, segment_pos=segment_pos, prefix_lengths=prefix_lengths
    )
    if self.mtp_tpl is not None and self.mtp.is_used:
      visible = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **self._paddings(weights_BT, segment_ids)}
      hidden = self.mtp(x_BTD, self._look_up(ids_BT), **visible)
      self.mtp.add_losses(hidden, labels_BT, weights_BT, segment_ids, self.softmax)
    return self.softmax(x_BTD, labels_BT, weights_BT)

  def logits(self, ids_BT: jax.Array, weights_BT: jax.Array | None = None, **rows: jax.Array | None) -> jax.Array:
    """Returns float32 logits [B, T, V]; the arguments are the same as for `encode`."""
    return self.softmax.get_logits(self.encode(ids_BT, weights_BT, **rows))

  def encode(
    self,
    ids_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the input of the softmax at each token, [B, T, D]; the arguments are the same as for `__call__`."""
    if segment_pos is None:
      self._check_length(ids_BT.shape[1])
    x_BTD = self._embed(ids_BT, segment_pos)
    more = self._paddings(weights_BT, segment_ids)
    if prefix_lengths is not None:
      more['prefix_lengths'] = prefix_lengths
    y_BTD = self.transformer(x_BTD, segment_ids=segment_ids, segment_pos=segment_pos, **more)
    return self._normalize(y_BTD)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates caches of `max_len` slots for each of `batch_size` sequences."""
    self._check_length(max_len)
    self.transformer.init_decode_state(batch_size, max_len)

  def extend_step(
    self,
    ids_BT: jax.Array,
    pos_BT: jax.Array,
    last_B: jax.Array,
    prefix_lengths: jax.Array | None = None,
    packed: PackedPrompts | None = None,
  ) -> jax.Array:
    """Appends T tokens to each row of the caches; returns logits [B, V] for the token that follows token `last_B`.

    Args:
      ids_BT: int32 tokens.
      pos_BT: int32 position of each token; -1 is padding.
      last_B: int32 index in [0, T); or N indices for each row, [B, N], for logits [B, N, V].
      prefix_lengths, packed: see `MultiHeadAttention.extend_step`.
    """
    prefix = () if prefix_lengths is None else (prefix_lengths,)
    more = {} if packed is None else {'packed': packed}
    x_BTD = self.transformer.extend_step(self._embed(ids_BT, pos_BT), pos_BT, *prefix, **more)
    return logits_at(last_B, x_BTD, lambda x: self.softmax.get_logits(self._normalize(x)))

  def extend_with_hidden(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, *prefix: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the result of `extend_step`, and the softmax's input at each token, [B, T, D], for `extend_further`."""
    hidden_BTD = self._normalize(self.transformer.extend_step(self._embed(ids_BT, pos_BT), pos_BT, *prefix))
    return logits_at(last_B, hidden_BTD, self.softmax.get_logits), hidden_BTD

  def init_further_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the caches that `extend_further` needs."""
    self.mtp.init_decode_state(batch_size, max_len)

  def extend_further(
    self, number: int, hidden_BTD: jax.Array, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Appends tokens to the caches of a module of `mtp`.

    Returns the module's logits [B, V] for token `last_B`, and its h_k [B, T, D], see `multi_token.py`.

    Args:
      number: the number of the module, from 0; k = number + 1.
      hidden_BTD: h_{k-1} of the tokens, from the previous module, or from `extend_with_hidden` for the first one.
      ids_BT: int32, the tokens that are k positions after these tokens.
      pos_BT: int32 position of each token; -1 is padding.
      last_B: int32 index in [0, T).
    """
    hidden_BTD = self.mtp.extend_step(number, hidden_BTD, self._look_up(ids_BT), pos_BT)
    return logits_at(last_B, hidden_BTD, self.softmax.get_logits), hidden_BTD

  def _paddings(self, weights_BT: jax.Array | None, segment_ids_BT: jax.Array | None) -> dict[str, jax.Array | None]:
    return {'paddings': token_paddings(weights_BT, segment_ids_BT)} if self._takes_paddings else {}

  def _embed(self, ids_BT: jax.Array, pos_BT: jax.Array | None) -> jax.Array:
    x_BTD = self._look_up(ids_BT)
    if self.position_tpl is not None:
      x_BTD += self.position(jnp.arange(ids_BT.shape[1])[None] if pos_BT is None else pos_BT)
    return self.shard(self.embedding_dropout(x_BTD))

  def _normalize(self, x_BTD: jax.Array) -> jax.Array:
    return x_BTD if self.final_norm_tpl is None else self.final_norm(x_BTD)

  @property
  def max_positions(self) -> int | None:
    """The most positions that a segment can have; None means any number."""
    limit = self.position_limit
    return None if limit is None else limit.num_positions

  @property
  def position_limit(self) -> PositionLimit | None:
    """The most positions that a segment can have, and the field that says so; None means any number."""
    return limit_of_table(f'{self.path_name}.position_tpl', None if self.position_tpl is None else self.position)

  def _check_length(self, length: int) -> None:
    check_length(self.position_limit, length)


def logits_at(last_B: jax.Array, x_BTD: jax.Array, get_logits: Callable[[jax.Array], jax.Array]) -> jax.Array:
  """Returns the logits of one token of each row, [B, V]; `last_B` has the token's index in each row.

  If `last_B` is [B, N], returns the logits of N tokens of each row, [B, N, V].
  """
  last_BN = last_B if last_B.ndim == 2 else last_B[:, None]
  logits_BNV = get_logits(jnp.take_along_axis(x_BTD, last_BN[..., None], axis=1))
  return logits_BNV if last_B.ndim == 2 else logits_BNV[:, 0]


def shared_look_up(path: str, softmax: FullSoftmax) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that looks up ids [B, T] in the table of the softmax, for a model without an `embedding_tpl`.

  Raises:
    ConfigError: the softmax has no table to share; the message names the model by its path.
  """
  if isinstance(softmax, SharedEmbeddingSoftmax):
    return softmax.emb_lookup
  raise ConfigError(
    f'{path}.embedding_tpl: None shares the table of softmax_tpl, but a {type(softmax).__name__} '
    'has none to share; set embedding_tpl=Config(Embedding) or softmax_tpl=Config(SharedEmbeddingSoftmax)'
  )
