"""Transformer: the block, stacks of blocks in sequence or as a scan, and the decoder-only language model.

    pre-norm     x = x + attention(norm(x));  x = x + ff(norm(x))
    post-norm    x = norm(x + attention(x));  x = norm(x + ff(x))
    hybrid       x = x + norm(attention(norm(x)));  x = x + norm(ff(norm(x)))

    TransformerLm: logits = softmax(final_norm(transformer(embedding(ids) + position(pos))))

B batch, T length, D model dims, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, field_names, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.base.facts import LayerProblem
from praxis_lite.layers.dropout import Dropout, StochasticResidual
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.multi_token import MultiTokenPrediction
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.pipeline import Pipelined
from praxis_lite.layers.position_limit import PositionLimit, check_length, limit_of_table
from praxis_lite.layers.positions import LearnedPositions, SinusoidalPositions
from praxis_lite.layers.remat import Remat
from praxis_lite.layers.repeat import Repeat, check_pattern, kinds_of_stack, pattern
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax, SoftmaxOutput
from praxis_lite.layers.value_residual import mixes_values, remove_value_residual

T = TypeVar('T')

# The fields of a model that its attention layers get.
HEADS = ('num_heads', 'num_kv_heads', 'dims_per_head')
NORM_POLICIES = ('pre', 'post', 'post_sublayer', 'primer_hybrid')


class TransformerBlock(Layer):
  """Self-attention and a feed-forward layer, each with a norm and a residual connection.

  Attributes:
    input_dims: D.
    hidden_dims: hidden dims of the feed-forward layer.
    num_heads, num_kv_heads, dims_per_head: see `MultiHeadAttention`.
    norm_policy: what is normalized. 'pre': the input of a sublayer (GPT-2, LLaMA). 'post': the sum of its input and its
      output (the original transformer, BERT; Praxis's 'post_skip'). 'post_sublayer': its output (OLMo 2; Praxis's
      'post'). 'primer_hybrid': both its input and its output (Gemma 2).
    norm_tpl: template of the children `attention_norm` and `ff_norm`, and with 'primer_hybrid' of `attention_out_norm`
      and `ff_out_norm`.
    attention_tpl: template of the child `attention`.
    ff_tpl: template of the child `ff`, such as a `MoeFeedForward`.
    dropout_tpl: template of the child `residual_dropout`, on values that are added to the residual stream.
    residual_tpl: template of the child `residual`, a `StochasticResidual` that adds them; None just adds them.
    activation_split_dims_mapping: `out`, [B, T, D]: the residual stream.
  """

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  num_heads: int = REQUIRED
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  norm_policy: str = 'pre'
  norm_tpl: Config = template(RMSNorm)
  attention_tpl: Config = template(MultiHeadAttention)
  ff_tpl: Config = template(GatedFeedForward)
  dropout_tpl: Config = template(Dropout)
  residual_tpl: Config | None = None

  attention: MultiHeadAttention = child()
  ff: FeedForward | MoeFeedForward = child()
  attention_norm: Norm = child()
  ff_norm: Norm = child()
  attention_out_norm: Norm = child()
  ff_out_norm: Norm = child()
  residual_dropout: Dropout = child()
  residual: StochasticResidual = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.norm_policy', self.norm_policy, NORM_POLICIES)
    heads = {field: getattr(self, field) for field in HEADS}
    norms = ['attention_norm', 'ff_norm']
    if self.norm_policy == 'primer_hybrid':
      norms += ['attention_out_norm', 'ff_out_norm']
    self.create_children(*norms, template=self.norm_tpl.clone(dims=self.input_dims))
    self.create_child('attention', self.attention_tpl.clone(input_dims=self.input_dims, **heads))
    self.create_child('ff', self.ff_tpl.clone(input_dims=self.input_dims, hidden_dims=self.hidden_dims))
    self.create_child('residual_dropout', self.dropout_tpl)
    if self.residual_tpl is not None:
      self.create_child('residual', self.residual_tpl)

  def __call__(self, x_BTD: jax.Array, *, paddings: jax.Array | None = None, **attention: Any) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the residual stream.
      paddings: [B, T], nonzero for padding tokens; for feed-forward layers that take paddings.
      **attention: keyword arguments of `attention`: segment_ids, segment_pos, prefix_lengths, mask, logit_bias,
        first_values.
    """
    x_BTD = self._add_attention(x_BTD, lambda x: self.attention(x, **attention))
    return self._add_feed_forward(x_BTD, paddings)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the cache; see `MultiHeadAttention.init_decode_state`."""
    self.attention.init_decode_state(batch_size, max_len)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, *attention: Any, **more: Any) -> jax.Array:
    """Returns [B, T, D] for the next tokens; `attention` and `more` are further arguments of its `extend_step`."""
    x_BTD = self._add_attention(x_BTD, lambda x: self.attention.extend_step(x, pos_BT, *attention, **more))
    return self._add_feed_forward(x_BTD, pos_BT < 0)

  def first_values(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the values of its attention, [B, T, K, H], for later layers with a `ValueResidual`."""
    return self.attention.first_values(self.attention_norm(x_BTD) if self._norms_inputs else x_BTD)

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterator[LayerProblem]:
    router: Any = getattr(self.ff, 'router', None)
    if getattr(router, 'choice', '') == 'expert' and getattr(self.attention, 'causal', False):
      yield LayerProblem(
        'experts see later tokens',
        f'{router.path_name}.choice',
        'experts choose among all tokens of a row, and the attention of this block is causal: the loss is of a model '
        'that knows what comes next, and decoding differs from training',
        "set it to 'token'",
      )

  @property
  def _norms_inputs(self) -> bool:
    return self.norm_policy in ('pre', 'primer_hybrid')

  @property
  def _is_hybrid(self) -> bool:
    return self.norm_policy == 'primer_hybrid'

  def _add_attention(self, x_BTD: jax.Array, attend: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return self._add_sublayer(x_BTD, attend, self.attention_norm, self.attention_out_norm if self._is_hybrid else None)

  def _add_feed_forward(self, x_BTD: jax.Array, paddings: jax.Array | None) -> jax.Array:
    feed_forward: Callable[..., jax.Array] = self.ff
    if self.ff.takes_paddings:
      feed_forward = functools.partial(feed_forward, paddings=self.mark_filler_rows(paddings, x_BTD.shape[:2]))
    return self._add_sublayer(x_BTD, feed_forward, self.ff_norm, self.ff_out_norm if self._is_hybrid else None)

  def _add_sublayer(
    self, x_BTD: jax.Array, sublayer: Callable[[jax.Array], jax.Array], norm: Norm, out_norm: Norm | None
  ) -> jax.Array:
    y_BTD = sublayer(norm(x_BTD) if self._norms_inputs else x_BTD)
    if self.norm_policy == 'post_sublayer':
      y_BTD = norm(y_BTD)
    elif out_norm is not None:
      y_BTD = out_norm(y_BTD)
    y_BTD = self.residual_dropout(y_BTD)
    x_BTD = self.shard(x_BTD + y_BTD if self.residual_tpl is None else self.residual(x_BTD, y_BTD))
    return norm(x_BTD) if self.norm_policy == 'post' else x_BTD


class StackedTransformer(Layer):
  """`num_layers` layers in sequence, each with its own variables: `layers_0`, `layers_1`, ...

  Attributes:
    layers_tpl: template of each layer; or a pattern of several templates, used in turn.
    num_layers: number of layers.
    first_tpl: templates of layers before those of `layers_tpl`; see `Repeat`.
    sliding_windows: see `add_windows`.
    remat, remat_save_names, remat_offload_names: what each layer keeps for the backward pass; see `remat.py`.
  """

  layers_tpl: Config | tuple[Config, ...] = template(TransformerBlock)
  num_layers: int = REQUIRED
  first_tpl: tuple[Config, ...] = ()
  sliding_windows: tuple[int | None, ...] | None = None
  remat: str | tuple[str, ...] = 'auto'
  remat_save_names: tuple[str, ...] = ()
  remat_offload_names: tuple[str, ...] = ()
  activation_split_dims_mapping: Config = template(SplitMapping)

  layers: list[TransformerBlock] = child()

  def setup(self) -> None:
    check_pattern(self.layers_tpl, self.num_layers, self.path_name, self.first_tpl)
    configs = add_windows(self.layers_tpl, self.sliding_windows, self.path_name)
    self._period = len(configs)
    self._remat = Remat.from_fields(self, self._period)
    in_turn = itertools.chain(self.first_tpl, itertools.cycle(configs))
    templates = list(itertools.islice(in_turn, self.num_layers))
    self._mixes_values = any(map(mixes_values, templates))
    if self._mixes_values:
      templates[0] = remove_value_residual(templates[0])
    self.create_children('layers', templates=templates)

  def __call__(self, x_BTD: jax.Array, **kwargs: Any) -> jax.Array:
    """Returns the result of the last layer; all layers get the same `kwargs`."""
    kwargs |= self._first_values(x_BTD)
    for i, layer in enumerate(self.layers):
      kind = max(i - len(self.first_tpl), 0) % self._period
      x_BTD = self._remat.run(self, layer, x_BTD, kind=kind, **kwargs)
    return x_BTD

  def init_decode_state(self, *args: Any) -> None:
    """Allocates the caches of all layers; the arguments are the same as for one of them."""
    for layer in self.layers:
      layer.init_decode_state(*args)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, *attention: Any) -> jax.Array:
    """Returns the result of the last layer for the next tokens; see `TransformerBlock.extend_step`."""
    more = self._first_values(x_BTD)
    for layer in self.layers:
      x_BTD = layer.extend_step(x_BTD, pos_BT, *attention, **more)
    return x_BTD

  def _first_values(self, x_BTD: jax.Array) -> dict[str, jax.Array]:
    return {'first_values': self.layers[0].first_values(x_BTD)} if self._mixes_values else {}


class RepeatedTransformer(Repeat):
  """A scan over transformer blocks with stacked variables.

  It computes the same as `StackedTransformer`, and compiles faster. If blocks mix their values with those of the first
  one, see `ValueResidual`, that is the first of `first_tpl`; a single template without `first_tpl` makes it itself.

  Attributes: the same as for `Repeat`, and
    sliding_windows: see `add_windows`.
  """

  layers_tpl: Config | tuple[Config, ...] = template(TransformerBlock)
  sliding_windows: tuple[int | None, ...] | None = None

  layers: TransformerBlock | Sequence[TransformerBlock] = child()

  def setup(self) -> None:
    if self.sliding_windows is not None:
      self.layers_tpl = add_windows(self.layers_tpl, self.sliding_windows, self.path_name)
    self._mixes_values = any(map(mixes_values, kinds_of_stack(self)))
    if self._mixes_values:
      self._make_first()
    super().setup()

  def __call__(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last layer; see `Repeat.__call__`."""
    return super().__call__(x, *args, **kwargs, **self._first_values(x))

  def extend_step(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last layer for the next tokens; see `TransformerBlock.extend_step`."""
    return super().extend_step(x, *args, **kwargs, **self._first_values(x))

  def _make_first(self) -> None:
    """Makes the first block one that does not mix its values, outside of the scan."""
    if not self.first_tpl:
      if not isinstance(self.layers_tpl, Config):
        raise ConfigError(
          f'{self.path_name}.first_tpl: blocks of a pattern mix their values with those of the first block, which must '
          'be outside of the pattern; set first_tpl to the template of that block'
        )
      self.first_tpl = (self.layers_tpl,)
    self.first_tpl = (remove_value_residual(self.first_tpl[0]), *self.first_tpl[1:])

  def _first_values(self, x: Any) -> dict[str, jax.Array]:
    if not self._mixes_values:
      return {}
    first: Any = self.first[0]
    return {'first_values': first.first_values(x)}


def add_windows(
  layers_tpl: Config | tuple[Config, ...], windows: Sequence[int | None] | None, where: str
) -> tuple[Config, ...]:
  """Returns a pattern of blocks with sliding windows.

  Args:
    layers_tpl: config of a block.
    windows: the `sliding_window` of each block, repeated in turn, so that (4096, None) alternates local and global
      attention. None leaves `layers_tpl` unchanged, which may then be a pattern.
    where: the path of the layer that has these fields.

  Raises:
    ConfigError: there are both windows and a pattern, or the tuple of windows is empty.
  """
  if windows is None:
    return pattern(layers_tpl)
  if not isinstance(layers_tpl, Config):
    raise ConfigError(
      f'{where}.sliding_windows: layers_tpl is a pattern of {len(layers_tpl)} blocks; set the attention_tpl.'
      'sliding_window of each instead'
    )
  if not windows:
    raise ConfigError(f'{where}.sliding_windows: expected the windows of one or more blocks, or None')
  blocks = tuple(layers_tpl.clone() for _ in windows)
  for block, window in zip(blocks, windows):
    block.attention_tpl.sliding_window = window
  return blocks


class PipelinedTransformer(Pipelined):
  """Transformer blocks in stages of a pipeline, with the variables of a `RepeatedTransformer`."""

  layers_tpl: Config = template(TransformerBlock)

  layers: TransformerBlock = child()

  def setup(self) -> None:
    if mixes_values(self.layers_tpl):
      raise ConfigError(
        f'{self.path_name}.layers_tpl.attention_tpl.value_residual_tpl: stages of a pipeline get no values of the '
        'first layer; set it to None, or use a RepeatedTransformer'
      )
    super().setup()


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
    embedding_tpl: template of the child `embedding`; with None, the table of `softmax` is also the embedding.
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
      labels_BT: int32, the token that follows each of them.
      weights_BT: weights of the labels in auxiliary losses; None means all are 1.
      segment_ids: int32 [B, T], 0 for padding; tokens attend within their segment. None means that each row is one
        segment.
      segment_pos: int32 [B, T], position of a token in its segment; None means 0, 1, 2, ...
      prefix_lengths: int32 [B], the length of the prefix of each row to which all its tokens attend (prefix-LM); None
        disables it.
    """
    x_BTD = self._encode(ids_BT, weights_BT, segment_ids, segment_pos, prefix_lengths)
    if self.mtp_tpl is not None and self.mtp.is_used:
      visible = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **self._paddings(weights_BT, segment_ids)}
      hidden = self.mtp(x_BTD, self._look_up(ids_BT), **visible)
      self.mtp.add_losses(hidden, labels_BT, weights_BT, segment_ids, self.softmax)
    return self.softmax(x_BTD, labels_BT, weights_BT)

  def logits(
    self,
    ids_BT: jax.Array,
    weights_BT: jax.Array | None = None,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """Returns float32 logits [B, T, V]; the arguments are the same as for `__call__`."""
    return self.softmax.get_logits(self._encode(ids_BT, weights_BT, segment_ids, segment_pos, prefix_lengths))

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates caches of `max_len` slots for each of `batch_size` sequences."""
    self._check_length(max_len)
    self.transformer.init_decode_state(batch_size, max_len)

  def extend_step(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, prefix_lengths: jax.Array | None = None
  ) -> jax.Array:
    """Appends T tokens to each row of the caches; returns logits [B, V] of the token that follows token `last_B`.

    Args:
      ids_BT: int32 tokens.
      pos_BT: int32 position of each; -1 is padding.
      last_B: int32 index in [0, T); or several, [B, N], for logits [B, N, V].
      prefix_lengths: see `MultiHeadAttention.extend_step`.
    """
    prefix = () if prefix_lengths is None else (prefix_lengths,)
    x_BTD = self.transformer.extend_step(self._embed(ids_BT, pos_BT), pos_BT, *prefix)
    return self._logits_of(x_BTD, last_B, self._normalize)

  def extend_with_hidden(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, *prefix: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns what `extend_step` does, and what the softmax reads at each token, [B, T, D], for `extend_further`."""
    hidden_BTD = self._normalize(self.transformer.extend_step(self._embed(ids_BT, pos_BT), pos_BT, *prefix))
    return self._logits_of(hidden_BTD, last_B), hidden_BTD

  def init_further_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the caches that `extend_further` needs."""
    self.mtp.init_decode_state(batch_size, max_len)

  def extend_further(
    self, number: int, hidden_BTD: jax.Array, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Appends tokens to the caches of a module of `mtp`; returns its logits [B, V] at `last_B`, and its h_k [B, T, D].

    Args:
      number: the number of the module, from 0.
      hidden_BTD: h_{k-1} of tokens: that of the module before, or of `extend_with_hidden`.
      ids_BT: int32, the token `number` + 1 places after each of them.
      pos_BT: int32 position of each; -1 is padding.
      last_B: int32 index in [0, T).
    """
    hidden_BTD = self.mtp.extend_step(number, hidden_BTD, self._look_up(ids_BT), pos_BT)
    return self._logits_of(hidden_BTD, last_B), hidden_BTD

  def _logits_of(
    self, x_BTD: jax.Array, last_B: jax.Array, normalize: Callable[[jax.Array], jax.Array] = lambda x: x
  ) -> jax.Array:
    """Returns the logits of token `last_B` of each row, [B, V]; or of several, [B, N, V]."""
    last_BN = last_B if last_B.ndim == 2 else last_B[:, None]
    x_BND = jnp.take_along_axis(x_BTD, last_BN[..., None], axis=1)
    logits_BNV = self.softmax.get_logits(normalize(x_BND))
    return logits_BNV if last_B.ndim == 2 else logits_BNV[:, 0]

  def _encode(
    self,
    ids_BT: jax.Array,
    weights_BT: jax.Array | None,
    segment_ids_BT: jax.Array | None,
    segment_pos_BT: jax.Array | None,
    prefix_lengths_B: jax.Array | None,
  ) -> jax.Array:
    if segment_pos_BT is None:
      self._check_length(ids_BT.shape[1])
    x_BTD = self._embed(ids_BT, segment_pos_BT)
    more = self._paddings(weights_BT, segment_ids_BT)
    if prefix_lengths_B is not None:
      more['prefix_lengths'] = prefix_lengths_B
    y_BTD = self.transformer(x_BTD, segment_ids=segment_ids_BT, segment_pos=segment_pos_BT, **more)
    return self._normalize(y_BTD)

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
    """How many positions the model has; None for any number."""
    limit = self.position_limit
    return None if limit is None else limit.num_positions

  @property
  def position_limit(self) -> PositionLimit | None:
    """How many positions the model has, and which field says so; None for any number."""
    return limit_of_table(f'{self.path_name}.position_tpl', None if self.position_tpl is None else self.position)

  def _check_length(self, length: int) -> None:
    check_length(self.position_limit, length)


def set_biases(use_bias: bool | None, configs: Iterable[Config | None]) -> None:
  """Sets `use_bias` of the configs that have this field; None leaves them as they are."""
  for config in configs:
    if use_bias is not None and config is not None and 'use_bias' in (field_names(config) or ()):
      config.use_bias = use_bias


def shared_look_up(path: str, softmax: FullSoftmax) -> Callable[[jax.Array], jax.Array]:
  """Returns how a model without an `embedding_tpl` embeds ids, [B, T] to [B, T, D]: by the table of its softmax.

  Raises:
    ConfigError: the softmax has no table to share; the message names the model by its path.
  """
  if isinstance(softmax, SharedEmbeddingSoftmax):
    return softmax.emb_lookup
  raise ConfigError(
    f'{path}.embedding_tpl: None shares the table of softmax_tpl, but a {type(softmax).__name__} '
    'has none to share; set embedding_tpl=Config(Embedding) or softmax_tpl=Config(SharedEmbeddingSoftmax)'
  )


def token_paddings(weights_BT: jax.Array | None, segment_ids_BT: jax.Array | None) -> jax.Array | None:
  """Returns [B, T] bool, True for padding; None if no argument marks padding.

  A token is padding if its segment is 0, or if it and all later tokens of its row have weight 0. So tokens of a prompt,
  which have weight 0 but are followed by tokens with a weight, are not padding.
  """
  padding = None if segment_ids_BT is None else segment_ids_BT == 0
  if weights_BT is None:
    return padding
  positions_T = jnp.arange(weights_BT.shape[1])
  last_B = jnp.max(jnp.where(weights_BT > 0, positions_T, -1), axis=1)
  after = positions_T > last_B[:, None]
  return after if padding is None else after | padding
