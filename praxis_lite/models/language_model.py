"""LanguageModel: trains, evaluates and decodes a network that predicts the next token.

B batch, T length, V vocabulary, P length of prompts, M largest number of tokens to decode.

A batch holds arrays [B, T]: `ids`, int32; `labels`, int32, the token after each id; `weights`, float32; if rows are
packed, `segment_ids` and `segment_pos`, int32; and optionally `bytes`, float32, the number of bytes of text that each
label stands for. Weights may also be [B], one for all tokens of a row. A prefix-LM needs `prefix_lengths` [B], int32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, build_at, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean, zero_where
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.packed_prompts import PackedPrompts
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.layers.softmax import SoftmaxOutput
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.adapters import names_of_adapters
from praxis_lite.models.base import BaseModel, PromptLimits, ScoreLimits
from praxis_lite.models.cached_steps import (
  CachedSteps,
  OwnHeads,
  PackedSteps,
  StepsWithHidden,
  can_read_packed,
  start_caches,
  start_heads,
  start_with_hidden,
)
from praxis_lite.models.decoding import (
  BeamDecoded,
  BeamSearch,
  Decoded,
  Draws,
  Sampler,
  SpeculativeDecoded,
  SpeculativeSampler,
  chunk_of,
  prompt_step,
)
from praxis_lite.models.decoding.row_loop import NewTokens, RowSettings, RowsState
from praxis_lite.models.labels import check_labels
from praxis_lite.models.pairs_of_answers import has_pairs
from praxis_lite.models.token_checks import check_packing, check_positions_of_input, check_vocabulary

_SIZES = ('vocab_size', 'model_dims', 'num_layers', 'num_heads', 'num_kv_heads', 'dims_per_head', 'hidden_dims')
MODEL_TYPES = ('causal', 'prefix')
SIZES_OF_NETWORK = (*_SIZES, 'use_bias')


def sized_network(model: LanguageModel | Config, where: str) -> Config[TransformerLm]:
  """Returns a copy of `lm_tpl`, of a `LanguageModel` or of its config, with the sizes that are set in the model.

  Raises:
    ConfigError: a size is set differently in `lm_tpl`; the message begins with `where`, the path of the model.
  """
  lm = model.lm_tpl.clone()
  for name in SIZES_OF_NETWORK:
    own = getattr(model, name)
    if own is None or own is REQUIRED:
      continue
    there = getattr(lm, name)
    if there is not None and there is not REQUIRED and there != own:
      raise ConfigError(f'{where}.{name} is {own}, but {where}.lm_tpl.{name} is {there}; set one of them')
    setattr(lm, name, own)
  return lm


class LanguageModel(BaseModel[SoftmaxOutput]):
  """A language model over any network with the interface of `TransformerLm`.

  Attributes:
    vocab_size, model_dims, num_layers, num_heads, num_kv_heads, dims_per_head, hidden_dims: sizes of the network, set
      here or in `lm_tpl`; None leaves them to `lm_tpl`.
    use_bias: whether the network has biases, set here or in `lm_tpl`; None leaves it to `lm_tpl`.
    lm_tpl: config of the network, the child `lm`.
    packed: whether rows may hold several segments, numbered by `segment_ids`. False means that each row is one segment
      with padding only at its end, which inputs must ensure; attention then only needs the causal mask.
    model_type: with 'causal', a token attends to itself and earlier tokens. With 'prefix', all tokens of a row also
      attend to its first `prefix_lengths` tokens; in decoding, to its prompt (prefix-LM; Raffel et al., 2020).
    tokens_are_bytes: whether each token is a byte of text; adds the metric `nats_per_byte` for batches without `bytes`.
    decoder_tpl: config of the decoder, a `Sampler`, `SpeculativeSampler` or `BeamSearch`.
  """

  vocab_size: int | None = None
  model_dims: int | None = None
  num_layers: int | None = None
  num_heads: int | None = None
  num_kv_heads: int | None = None
  dims_per_head: int | None = None
  hidden_dims: int | None = None
  use_bias: bool | None = None
  lm_tpl: Config = template(TransformerLm)
  packed: bool = True
  model_type: Literal['causal', 'prefix'] = 'causal'
  tokens_are_bytes: bool = False
  decoder_tpl: Config = template(Sampler)
  activation_split_dims_mapping: Config = template(SplitMapping)

  lm: TransformerLm = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.model_type', self.model_type, MODEL_TYPES)
    self.create_child('lm', sized_network(self, self.path_name))
    self.decoder: Sampler | BeamSearch = build_at(f'{self.path_name}.decoder_tpl', self.decoder_tpl)
    if self._guesses_itself:
      self._check_own_heads(self.decoder)

  def _check_own_heads(self, decoder: SpeculativeSampler) -> None:
    mtp = self.lm.mtp if getattr(self.lm, 'mtp_tpl', None) is not None else None
    if mtp is None:
      can_have = hasattr(self.lm, 'mtp_tpl')
      make = f'{self.path_name}.lm_tpl.mtp_tpl=Config(MultiTokenPrediction) and train them, or set ' if can_have else ''
      raise ConfigError(
        f'{self.path_name}.decoder_tpl.own_heads: the model has no heads for further tokens; set {make}lookup instead'
      )
    if decoder.draft_tokens > mtp.num_modules:
      raise ConfigError(
        f'{self.path_name}.decoder_tpl.draft_tokens: {decoder.draft_tokens} is more than the {mtp.num_modules} further '
        f'tokens that the heads of {mtp.path_name} predict; set it to {mtp.num_modules}, or fewer'
      )

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if this model cannot learn from a batch.

    This is so if the batch has pairs of answers, prompts without answers, prefixes or segments that the model does not
    support, or ids, labels or positions out of range.
    """
    if has_pairs(batch):
      raise ConfigError(
        f'{data.label}: its batches are pairs of answers, which a {type(self).__name__} does not learn from; set '
        'task.model=praxis_lite.models.PreferenceModel, or in Python call train_preferences(task) or '
        'train_rewards(task)'
      )
    if 'num_given' in batch:
      raise ConfigError(
        f'{data.label}: its batches are prompts, to which a {type(self).__name__} samples no answers in training; set '
        'task.model=praxis_lite.models.PolicyModel, or in Python call train_policy(task)'
      )
    if 'labels' in batch:
      self._prefixes(batch)
    check_positions_of_input(self.position_limits(), data, batch)
    if 'prompt_lengths' not in batch:
      check_packing(data, self.packed, bool(np.max(batch.get('segment_ids', 0), initial=0) > 1), 'segments')
    if (known := self.num_ids) is None:
      return
    ids: dict[str, np.ndarray] = {name: np.asarray(batch[name]) for name in ('ids', 'labels') if name in batch}
    check_vocabulary(data, ids.values(), 'task.model.vocab_size', known)
    if 'prompt_lengths' not in batch:  # After a prompt, ids are arbitrary.
      check_labels(data, ids, batch, 'task.model.vocab_size', known)

  # ---------------------------------------------------------------- training and evaluation

  def compute_predictions(self, batch: NestedDict) -> SoftmaxOutput:
    """Returns cross entropies [B, T], and logits [B, T, V] unless the softmax layer works in chunks of the classes."""
    weights_BT = weights_of_tokens(batch)
    ids_BT, labels_BT = (clear_padding(batch[name], weights_BT) for name in ('ids', 'labels'))
    output: SoftmaxOutput = self._call_network(batch, '__call__', ids_BT, labels_BT, weights_BT)
    return output

  def compute_loss(self, predictions: SoftmaxOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs.

    Metrics: `loss`, nats per token; `nats_per_byte` if the number of bytes is known; in evaluation `accuracy`, the
    fraction of labels that are the most probable token. Per example: `loss`, the mean over the tokens of a row, and
    `weights`, the sum of their weights.
    """
    xent_BT, weights_BT = predictions.xent, weights_of_tokens(batch)
    loss_B, weights_B = weighted_mean(xent_BT, weights_BT, axis=1)
    loss, num_tokens = weighted_mean(loss_B, weights_B)
    metrics = {'loss': (loss, num_tokens)}
    if 'bytes' in batch:
      num_bytes = jnp.sum(batch['bytes'] * weights_BT)
      metrics['nats_per_byte'] = (loss * num_tokens / jnp.maximum(num_bytes, 1.0), num_bytes)
    elif self.tokens_are_bytes:
      metrics['nats_per_byte'] = metrics['loss']
    if self.do_eval:
      metrics['accuracy'] = weighted_mean(predictions.correct, weights_BT)
    return metrics, {'loss': loss_B, 'weights': weights_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `logits`, [B, T, V] float32, for the token after each of `ids`; the batch needs no labels."""
    weights_BT = weights_of_tokens(batch)
    ids_BT = clear_padding(batch['ids'], weights_BT)
    return {'logits': self._call_network(batch, 'logits', ids_BT, weights_BT)}

  def score(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `log_probs` of the labels, [B, T] float32, in nats, and `is_greedy`, [B, T] bool.

    `is_greedy` says whether a label is the most probable token. Unlike the loss, `log_probs` has no label smoothing.
    """
    logits_BTV, labels_BT1 = self.predict(batch)['logits'], batch['labels'][..., None]
    log_probs_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    log_probs_BT = jnp.take_along_axis(log_probs_BTV, labels_BT1, axis=-1)[..., 0]
    return {'log_probs': log_probs_BT, 'is_greedy': jnp.argmax(logits_BTV, axis=-1) == batch['labels']}

  def _call_network(self, batch: NestedDict, method: str, *arguments: jax.Array) -> Any:
    """Calls a method of the network on a batch; the batch's `adapters` says which adapter each row uses."""
    visible: dict[str, Any] = {**self._visible(batch)}
    adapters_B = self._adapters_of(batch)
    if adapters_B is None:
      return getattr(self.lm, method)(*arguments, **visible)
    surroundings = dataclasses.replace(self.surroundings, adapters=adapters_B)
    key = self.next_prng_key() if self.has_prng_key() else None
    out, side = self.lm.apply(
      self.lm.variables, *arguments, key=key, method=method, surroundings=surroundings, **visible
    )
    self.lm.absorb(side)
    return out

  def position_limits(self) -> dict[str, PositionLimit]:
    limit = getattr(self.lm, 'position_limit', None)
    return {'segment_pos': limit} if self.packed and limit is not None else {}

  def score_limits(self) -> ScoreLimits:
    positions = getattr(self.lm, 'max_positions', None)
    return ScoreLimits(self.lm.vocab_size, positions, takes_prefixes=self.model_type == 'prefix')

  def _visible(self, batch: NestedDict) -> dict[str, jax.Array | None]:
    """Returns the network's arguments for the attention mask of a batch."""
    segments = {name: batch.get(name) for name in ('segment_ids', 'segment_pos')} if self.packed else {}
    return segments | self._prefixes(batch)

  def _prefixes(self, batch: NestedDict) -> dict[str, jax.Array | None]:
    if self.model_type != 'prefix':
      return {}
    if 'prefix_lengths' not in batch:
      raise ConfigError(
        f"{self.path_name}.model_type: 'prefix' needs prefix_lengths in each batch, [B] int32, the number of first "
        f'tokens that all of a row attend to; this one has {", ".join(sorted(batch))}'
      )
    return {'prefix_lengths': batch['prefix_lengths']}

  # ---------------------------------------------------------------- decoding

  @property
  def context(self) -> int | None:
    """The number of last tokens that the network sees in decoding; None means all."""
    return self.decoder.context(getattr(self.lm, 'max_positions', None))

  @property
  def num_ids(self) -> int | None:
    found: int | None = getattr(self.lm, 'vocab_size', self.vocab_size)
    return found

  def prompt_limits(self) -> PromptLimits | None:
    if type(self).decode is not LanguageModel.decode:  # A subclass with another `decode` may need other batches.
      return None
    return PromptLimits(
      self.decoder.max_decode_steps, self.decoder.stop_ids, self.context, self.check_fits, self._state_bytes
    )

  def _state_bytes(self, num_rows: int, num_slots: int) -> int:
    """Returns the size of the decode state of `num_rows` prompts in bytes, computed from shapes."""

    def start(variables: NestedDict) -> NestedDict:
      if not self._guesses_itself:
        return start_caches(self.lm, variables, num_rows, num_slots, self.decoder.goes_back)
      heads = start_heads(self.lm, variables, num_rows, num_slots)
      return {**start_with_hidden(self.lm, variables, num_rows, num_slots), 'heads': heads}

    state = jax.eval_shape(start, jax.tree.map(lambda weight: weight.as_struct(), self.lm.abstract_init()))
    return self.decoder.state_copies * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

  def prefill(self, ids_BP: jax.Array, lengths_B: jax.Array, cache_length: int) -> jax.Array:
    """Returns logits [B, V] of the token after each prompt; leaves caches of `cache_length` slots as decode state.

    This is for decoding loops in Python, outside of jit. `Sampler.decode` describes the arguments.
    """
    self.lm.init_decode_state(ids_BP.shape[0], cache_length)
    arguments: tuple[Any, ...] = *prompt_step(ids_BP, lengths_B), *self._prompt_is_prefix(lengths_B)
    return self.lm.extend_step(*arguments)

  def _prompt_is_prefix(self, lengths_B: jax.Array) -> tuple[jax.Array, ...]:
    """Returns `lengths_B` in a tuple, as the argument `prefix_lengths` of the network's `extend_step`.

    Returns () unless the model attends to prompts as prefixes.
    """
    return (lengths_B,) if self.model_type == 'prefix' else ()

  def extend_step(self, ids_B: jax.Array, pos_B: jax.Array) -> jax.Array:
    """Appends `ids_B`, at positions `pos_B`, to the caches; returns logits [B, V] of the next token."""
    return self.lm.extend_step(ids_B[:, None], pos_B[:, None], jnp.zeros_like(ids_B))

  def check_fits(self, prompt_length: int, max_tokens: int) -> None:
    """Raises a `ConfigError` if the model must see prompts and continuations of these lengths at once, but cannot."""
    context, most, goes_back = self.context, prompt_length + max_tokens - 1, self.decoder.goes_back
    if context is not None and most > context and (goes_back or self.model_type == 'prefix'):
      needs, sees, remedy = "model_type: 'prefix' needs the whole prompt", f'{context} tokens', ''
      if goes_back:
        needs, sees, remedy = 'decoder_tpl: speculative decoding needs all tokens', f'{context}', ', or use a Sampler'
      raise ConfigError(
        f'{self.path_name}.{needs} at each step, but the model sees only {sees} at once, and prompts of '
        f'{prompt_length} with max_decode_steps = {max_tokens} need {most}; decode fewer steps, or shorter prompts'
        + remedy
      )

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Continues prompts.

    Args:
      batch: a dict of arrays:
        `ids` [B, P] int32: prompts, padded at the end.
        `prompt_lengths` [B] int32: their lengths; 0 marks a row of padding.
        `max_tokens` [B] int32, optional: the largest number of new tokens, at most `max_decode_steps`. It lets calls of
          different lengths share a program: prompts are read in chunks, up to the end of the longest one. The caller
          must have called `check_fits`.
        `row`, `num_drawn` [B] int32, optional: the number of each row, and how many tokens at the end of its prompt
          were drawn by earlier calls. With both, random numbers do not depend on how rows and tokens are split into
          calls.
        `adapters` [B] int32, optional: the index in `adapter_names` of the adapter of each row; -1 for none.
        `packing`, for packed prompts, see `inputs.pack_prompts`: S prompts share a row. Then `ids` are [B, S P], and
          all other arrays and results have the dimensions B and S instead of B.

    Returns:
      Metrics: `decoded_length`, tokens per row, and `log_prob`, nats per token. Outputs: `ids` [B, M], `lengths` [B]
      and `log_probs` [B, M] as in `Decoded`; further fields of `BeamDecoded` or `SpeculativeDecoded` with such a
      decoder; and `prompt_ids` and `prompt_lengths` of the batch.
    """
    return self.decode_with(batch, None)

  def decode_with(self, batch: NestedDict, draft: LanguageModel | None) -> tuple[WeightedScalars, NestedDict]:
    """Continues prompts like `decode`; `draft`, a model in the same call, guesses tokens for a `SpeculativeSampler`."""
    packed, shape = None, batch['prompt_lengths'].shape
    if len(shape) > 1 or 'packing' in batch:
      self._check_packed(batch)
      packed = PackedPrompts.make(batch['packing'], batch['prompt_lengths'], batch['ids'].shape[1])
      of_rows = ('prompt_lengths', 'max_tokens', 'row', 'num_drawn', 'adapters')
      rows = {name: batch[name].reshape(-1) for name in of_rows if name in batch}
      batch = {'ids': batch['ids'].reshape(math.prod(shape), -1), **rows}
    prompt_ids_BP, prompt_lengths_B = batch['ids'], batch['prompt_lengths']
    prompt_length = prompt_ids_BP.shape[1]
    max_tokens_B, chunk = batch.get('max_tokens'), None
    if max_tokens_B is None or packed is not None:
      self.check_fits(prompt_length, self.decoder.max_decode_steps)
    elif self.model_type == 'causal':
      chunk = chunk_of(self.decoder.num_slots(prompt_length, self.context), len(prompt_ids_BP))
    draws = Draws(batch.get('row'), batch.get('num_drawn'))
    prefix_lengths_B = draws.given_lengths(prompt_lengths_B)
    key = self.next_prng_key() if self.decoder.is_random else None
    steps = self._steps(prefix_lengths_B, packed, self._adapters_of(batch))
    arguments = steps, prompt_ids_BP, prompt_lengths_B, key, max_tokens_B, chunk, draws
    decoded: Decoded | BeamDecoded | SpeculativeDecoded
    if isinstance(self.decoder, SpeculativeSampler):
      guesses = None if draft is None else draft._steps(prefix_lengths_B)
      decoded = self.decoder.decode(*arguments, guesses, OwnHeads(self.lm) if self._guesses_itself else None)
    else:
      decoded = self.decoder.decode(*arguments)
    outputs = {**decoded._asdict(), 'prompt_ids': prompt_ids_BP, 'prompt_lengths': prompt_lengths_B}
    if packed is not None:
      outputs = {name: x.reshape(*shape, *x.shape[1:]) for name, x in outputs.items()}
    return decoded.metrics(prompt_lengths_B > 0), outputs

  def _check_packed(self, batch: NestedDict) -> None:
    """Raises ConfigError if the shapes of the arrays of packed prompts do not fit together."""
    lengths, width = batch['prompt_lengths'].shape, batch['ids'].shape[-1]
    if 'packing' not in batch:
      raise ConfigError(f'{self.path_name}: prompt_lengths has {len(lengths)} dimensions, and the batch has no packing')
    if len(lengths) != 2 or not lengths[1] or width % lengths[1]:
      raise ConfigError(
        f'{self.path_name}: packing: prompt_lengths has the shape {lengths}, which must be rows x prompts of a row, '
        f'and the width of ids, {width}, must be a multiple of the latter; see inputs.pack_prompts'
      )

  def _adapters_of(self, batch: NestedDict) -> jax.Array | None:
    if 'adapters' not in batch:
      return None
    if not self.adapter_names or self._guesses_itself:
      why = 'decoder_tpl guesses by heads of the model' if self.adapter_names else 'the model does not have several'
      raise ConfigError(f'{self.path_name}: the batch says which adapter each row uses, and {why}')
    numbers_B = jnp.asarray(batch['adapters'])
    if not jnp.issubdtype(numbers_B.dtype, jnp.integer) or numbers_B.ndim != 1:
      raise ConfigError(
        f'{self.path_name}: `adapters` is {numbers_B.dtype}{list(numbers_B.shape)}; expected int32 [B], the number of '
        'the adapter of each row, or -1'
      )
    return numbers_B

  @property
  def _guesses_itself(self) -> bool:
    return isinstance(self.decoder, SpeculativeSampler) and self.decoder.own_heads

  def _steps(
    self, prefix_lengths_B: jax.Array, packed: PackedPrompts | None = None, adapters_B: jax.Array | None = None
  ) -> CachedSteps:
    if self._guesses_itself:
      return StepsWithHidden(self.lm, self._prompt_is_prefix(prefix_lengths_B))
    if packed is not None and adapters_B is None and self.model_type == 'causal' and can_read_packed(self.lm):
      return PackedSteps(self.lm, packed, self.decoder.goes_back)
    return CachedSteps(self.lm, self._prompt_is_prefix(prefix_lengths_B), self.decoder.goes_back, adapters_B)

  @property
  def adapter_names(self) -> tuple[str, ...]:
    """The names of the adapters that rows choose from, see `combine_adapters`; () if there are none."""
    return names_of_adapters(self)

  # ---------------------------------------------------------------- rows that come and go

  def start_rows(self, num_rows: int, num_slots: int) -> RowsState[NestedDict]:
    """Returns the state of rows without tokens, with room for `num_slots` tokens in each."""
    steps = self._row_steps(num_rows, num_slots)
    return RowsState(steps.start(num_rows, num_slots), jnp.zeros((num_rows, num_slots), jnp.int32))

  def row_axes(self, num_rows: int, num_slots: int) -> RowsState[NestedDict]:
    """Returns the dimension of rows for each array of a state that `start_rows` returns."""
    axes = self._row_steps(num_rows, num_slots).row_axes(num_rows, num_slots)
    return RowsState(axes, 0)  # type: ignore[arg-type]

  def read_rows(
    self,
    state: RowsState[NestedDict],
    ids_BT: jax.Array,
    start: jax.Array,
    length: jax.Array,
    adapter: jax.Array | int = -1,
  ) -> RowsState[NestedDict]:
    """Reads a part of a prompt into each row. The last token of a prompt is only stored; `extend_rows` reads it.

    Args:
      state: the result of `start_rows`, `read_rows` or `extend_rows`.
      ids_BT: int32 tokens of the prompt; entries after its end are arbitrary.
      start: int32, the position of the first of these tokens.
      length: int32, the number of tokens of the whole prompt.
      adapter: int32, the index in `adapter_names` of the adapter that these rows use; -1 for none.
    """
    if self.adapter_names:
      state = state._replace(model={**state.model, 'adapters': jnp.full(len(ids_BT), adapter, jnp.int32)})
    place_T = start + jnp.arange(ids_BT.shape[1], dtype=jnp.int32)
    places = jnp.where(place_T < length, place_T, state.ids.shape[1])
    ids_BL = state.ids.at[:, places].set(ids_BT, mode='drop')
    before_B = jnp.full(len(ids_BT), length - 1, jnp.int32)
    steps = self._row_steps(*ids_BL.shape)
    return RowsState(steps.extend(*prompt_step(ids_BT, before_B, start), state.model)[1], ids_BL)

  def extend_rows(
    self, state: RowsState[NestedDict], rows: RowSettings, num_tokens: int, num_top: int = 0
  ) -> tuple[RowsState[NestedDict], NewTokens]:
    """Adds up to `num_tokens` tokens to rows whose prompts have been read, each with its own settings."""
    assert isinstance(self.decoder, Sampler)
    steps = self._row_steps(*state.ids.shape)
    return self.decoder.row_loop(steps, rows.prompt_lengths, num_tokens, num_top).run(state, rows)

  def draw_key(self) -> jax.Array:
    """Returns the PRNG key that `decode` would use in the same call."""
    return self.next_prng_key()

  def _row_steps(self, num_rows: int, num_slots: int) -> Any:
    """Returns the `DecodingSteps` of rows; they have a method `row_axes` as well."""
    return CachedSteps(self.lm, (), True, jnp.full(num_rows, -1, jnp.int32) if self.adapter_names else None)


def weights_of_tokens(batch: NestedDict) -> jax.Array:
  """Returns the weights [B, T] of a batch; the weight of a row, [B], applies to each of its tokens."""
  weights = batch['weights']
  return weights if weights.ndim > 1 else jnp.broadcast_to(weights[:, None], batch['ids'].shape)


def clear_padding(ids_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
  """Returns the ids, with 0 in place of negative ids of weight zero: the vectors of negative ids would be NaN."""
  return zero_where((weights_BT == 0) & (ids_BT < 0), ids_BT)
