"""EncoderDecoderModel: trains, evaluates and decodes a network that reads a source and predicts a target.

B batch, S length of the sources, T length of the targets, P length of their given beginnings, V vocabulary, M largest
number of tokens to decode.

A batch holds the `ids`, `labels` and `weights` [B, T] of the targets, as for a `LanguageModel`, and `source_ids` [B, S]
int32. Either `source_segment_ids` [B, S] int32, 0 for padding, or `source_lengths` [B] int32, says which source ids are
tokens; without these arrays, all are. If rows are packed, there are also `segment_ids` and `segment_pos` [B, T] and
`source_segment_pos` [B, S]; a target attends to the source with the same segment id.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.cross_attention import place_targets, read_coverage, start_coverage
from praxis_lite.layers.encoder_decoder import TransformerEncoderDecoder
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.layers.repeat import unstack_for_decoding
from praxis_lite.layers.softmax import SoftmaxOutput
from praxis_lite.models.base import PromptLimits, ScoreLimits
from praxis_lite.models.decoding import (
  BeamDecoded,
  Decoded,
  Draws,
  SpeculativeDecoded,
  SpeculativeSampler,
  find_row_axes,
)
from praxis_lite.models.decoding.row_loop import RowsState
from praxis_lite.models.labels import IdLimit
from praxis_lite.models.language_model import LanguageModel, clear_padding, weights_of_tokens


class EncoderDecoderModel(LanguageModel):
  """A model over a network with the interface of `TransformerEncoderDecoder`, trained with teacher forcing.

  Attributes: the same as for `LanguageModel`, except that `model_type` has no effect, and
    lm_tpl: config of the network, the child `lm`. `num_layers` is the number of layers of its decoder.
    packed: whether rows may hold several pairs of a source and a target. False means that each row is one pair, with
      padding only at the ends; nonzero segment ids then all mean the same.
    start_id: the token that the decoder reads before the first token of a target; T5 uses its padding, 0.
    source_end_id: the token that ends the sources of the training data; T5 uses its end token, 1. `decode` and scores
      append it to prompts and contexts, unless it is None.
  """

  prompts_are_sources: ClassVar[bool] = True
  has_work_besides_ids: ClassVar[bool] = True

  lm_tpl: Config = template(TransformerEncoderDecoder)
  start_id: int = 0
  source_end_id: int | None = None

  lm: TransformerEncoderDecoder = child()  # type: ignore[assignment]

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if an id is not in the vocabulary or sources are missing.

    It also does so if the data and the model do not have the same start id of targets or the same end id of sources.
    """
    super().check_input(data, batch)
    if 'source_ids' not in batch and 'prompt_lengths' not in batch:
      raise ConfigError(
        f'{data.label}: an encoder-decoder needs source_ids, [B, S] int32, in each batch; this one has '
        f'{", ".join(sorted(batch))}'
      )
    first = getattr(data, 'first_id', self.start_id)
    if first != self.start_id:
      raise ConfigError(
        f'{data.label}: its targets begin after token {first} (start_id, or the padding of its tokenizer), but '
        f'task.model.start_id is {self.start_id}, with which decoding would begin; set the same in both'
      )
    end = getattr(data, 'source_end_id', self.source_end_id)
    if end != self.source_end_id:
      raise ConfigError(
        f'{data.label}: {"no token ends its sources" if end is None else f"token {end} ends its sources"}, but '
        f'task.model.source_end_id is {self.source_end_id}, with which prompts would end; set it to {end}'
      )
    for name, limit in self.id_limits().items():
      if len(missing := limit.missing_ids(name, batch)):
        raise ConfigError(
          f'{data.label}: found {missing[0]} in {name!r}, but task.model.vocab_size is {limit.size}; all must be from '
          f'0 to {limit.size - 1}, or be padding'
        )

  # ---------------------------------------------------------------- training and evaluation

  def compute_predictions(self, batch: NestedDict) -> SoftmaxOutput:
    """Returns cross entropies [B, T], and logits [B, T, V] unless the softmax layer works in chunks of the classes."""
    weights_BT = weights_of_tokens(batch)
    ids_BT, labels_BT = (clear_padding(batch[name], weights_BT) for name in ('ids', 'labels'))
    source_BS, visible = self._source(batch)
    return self.lm(source_BS, ids_BT, labels_BT, weights_BT, **visible)

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `logits`, [B, T, V] float32, for the token after each of `ids`; the batch needs no labels."""
    weights_BT = weights_of_tokens(batch)
    source_BS, visible = self._source(batch)
    return {'logits': self.lm.logits(source_BS, clear_padding(batch['ids'], weights_BT), weights_BT, **visible)}

  def id_limits(self) -> dict[str, IdLimit]:
    if (known := self.num_ids) is None:
      return {}
    what = f'the vocabulary of the model has ids 0 to {known - 1}'
    return {'source_ids': IdLimit(known, what, 'source_segment_ids', 'source_lengths')}

  def position_limits(self) -> dict[str, PositionLimit]:
    limits, sources = super().position_limits(), getattr(self.lm, 'source_position_limit', None)
    return {**limits, 'source_segment_pos': sources} if self.packed and sources is not None else limits

  def score_limits(self) -> ScoreLimits:
    return (
      super().score_limits()._replace(takes_prefixes=False, start_id=self.start_id, source_end_id=self.source_end_id)
    )

  def _source(self, batch: NestedDict) -> tuple[jax.Array, dict[str, jax.Array | None]]:
    """Returns the tokens of the sources, [B, S], and the network's arguments for the attention masks."""
    source_BS, segments_BS = _tokens_of_sources(batch)
    if not self.packed:
      is_token = None if segments_BS is None else (segments_BS != 0).astype(jnp.int32)
      return source_BS, {'source_segment_ids': is_token}
    names = ('source_segment_pos', 'segment_ids', 'segment_pos')
    return source_BS, {'source_segment_ids': segments_BS, **{name: batch.get(name) for name in names}}

  # ---------------------------------------------------------------- decoding

  def prompt_limits(self) -> PromptLimits | None:
    return None

  def most_prompt_tokens(self) -> int | None:
    most: int | None = getattr(self.lm, 'max_source_positions', None)
    return None if most is None else most - (self.source_end_id is not None)

  def prefill(self, ids_BP: jax.Array, lengths_B: jax.Array, cache_length: int) -> jax.Array:
    """Returns logits [B, V] of the first token of each target; leaves caches of `cache_length` slots as decode state.

    This is for decoding loops in Python, outside of jit. The next tokens that they read have the positions 1, 2, ...

    Args:
      ids_BP: int32, the sources, of length P, padded at the end; `source_end_id` is added to them.
      lengths_B: int32, lengths of the sources.
      cache_length: the largest number of target tokens to read, including the start token.
    """
    self.lm.init_decode_state(*_prompts_as_sources(ids_BP, lengths_B, self.source_end_id), cache_length)
    first_B = jnp.zeros_like(lengths_B)
    return self.extend_step(jnp.full_like(first_B, self.start_id), first_B)

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Writes a target for each source.

    Args:
      batch: `source_ids` [B, S] int32, and `source_lengths` or `source_segment_ids`; if rows are packed, only the first
        source of each row is used. A target may have a given beginning: its tokens are in `ids` [B, P], and their
        number, which may be 0, in `prompt_lengths` [B] int32. If there are no `source_ids`, then `ids` and
        `prompt_lengths` are the sources, and `target_ids` and `target_lengths` the beginnings. Rows without a source
        get no tokens. `max_tokens`, `row` and `num_drawn` are the same as for `LanguageModel.decode`. With `labels` and
        `weights` [B, T], as in training, the result also has `exact_match`.

    Returns:
      Metrics: `decoded_length`, tokens per row; `log_prob`, nats per token; and with labels `exact_match`, the fraction
      of rows whose decoded tokens equal the labels. Outputs: `ids` [B, M], `lengths` [B] and `log_probs` [B, M] as in
      `Decoded`; further fields of `BeamDecoded` or `SpeculativeDecoded` with such a decoder; and with labels
      `exact_match`, [B] bool.
    """
    return self.decode_with(batch, None)

  def decode_with(self, batch: NestedDict, draft: LanguageModel | None) -> tuple[WeightedScalars, NestedDict]:
    """Writes a target for each source, like `decode`. The encoder-decoder `draft`, in the same call, guesses tokens."""
    assert draft is None or isinstance(draft, EncoderDecoderModel)
    guesses = None if draft is None else draft._steps_of(*draft._sources_to_decode(batch)[:2])
    source_BS, is_token_BS, batch = self._sources_to_decode(batch)
    is_row_B = jnp.any(is_token_BS != 0, axis=1)
    start_B1 = jnp.full((len(source_BS), 1), self.start_id, jnp.int32)
    prompt_BP, lengths_B = start_B1, is_row_B.astype(jnp.int32)
    if batch.get('prompt_lengths') is not None:
      prompt_BP = jnp.concatenate([start_B1, batch['ids']], axis=1)
      lengths_B = jnp.where(is_row_B, 1 + batch['prompt_lengths'], 0)
    steps = self._steps_of(source_BS, is_token_BS)
    key = self.next_prng_key() if self.decoder.is_random else None
    draws = Draws(batch.get('row'), batch.get('num_drawn'))
    arguments = steps, prompt_BP, lengths_B, key, batch.get('max_tokens'), None, draws
    decoded: Decoded | BeamDecoded | SpeculativeDecoded
    if isinstance(self.decoder, SpeculativeSampler):
      if batch.get('max_tokens') is None:
        for model in (self, draft or self):
          model.check_fits(prompt_BP.shape[1], self.decoder.max_decode_steps)
      decoded = self.decoder.decode(*arguments, guesses, None, self._tokens_to_look_up(source_BS, is_token_BS))
    else:
      decoded = self.decoder.decode(*arguments)
    metrics, outputs = decoded.metrics(is_row_B), dict(decoded._asdict())
    if 'labels' in batch:
      outputs['exact_match'] = _are_labels(decoded.ids, decoded.lengths, batch, self.packed)
      metrics['exact_match'] = weighted_mean(outputs['exact_match'], is_row_B)
    return metrics, outputs

  def _sources_to_decode(self, batch: NestedDict) -> tuple[jax.Array, jax.Array, NestedDict]:
    """Returns sources [B, S], a mask [B, S] int32 of their tokens, and the batch with target beginnings as `ids`."""
    if 'source_ids' in batch:
      source_BS, segments_BS = _tokens_of_sources(batch)
      if segments_BS is None:
        return source_BS, jnp.ones_like(source_BS), batch
      is_token_BS = segments_BS == 1 if self.packed else segments_BS != 0
      return source_BS, is_token_BS.astype(jnp.int32), batch
    source_BS, is_token_BS = _prompts_as_sources(batch['ids'], batch['prompt_lengths'], self.source_end_id)
    return (
      source_BS,
      is_token_BS,
      {**batch, 'ids': batch.get('target_ids'), 'prompt_lengths': batch.get('target_lengths')},
    )

  def _steps_of(self, source_BS: jax.Array, is_token_BS: jax.Array) -> SourceSteps:
    return SourceSteps(self.lm, source_BS, is_token_BS, self.decoder.goes_back, self.decoder.needs_coverage)

  def _tokens_to_look_up(self, source_BS: jax.Array, is_token_BS: jax.Array) -> jax.Array | None:
    """Returns the source tokens in which a `LookupDrafter` searches, -1 for padding; None if sources are not tokens."""
    return jnp.where(is_token_BS != 0, source_BS, -1)

  # ---------------------------------------------------------------- rows that come and go

  def start_rows(self, num_rows: int, num_slots: int) -> RowsState[NestedDict]:
    """Returns the state of rows without tokens, with room for `num_slots` tokens of a source and of a target each."""
    ids_BL = jnp.full((num_rows, num_slots), self.start_id, jnp.int32)
    return super().start_rows(num_rows, num_slots)._replace(ids=ids_BL)

  @property
  def adapter_names(self) -> tuple[str, ...]:
    if names := super().adapter_names:
      raise ConfigError(f'{self.path_name}.adapters: only decoders alone take one of several for each row, not {names}')
    return ()

  def read_rows(
    self,
    state: RowsState[NestedDict],
    ids_BT: jax.Array,
    start: jax.Array,
    length: jax.Array,
    adapter: jax.Array | int = -1,
  ) -> RowsState[NestedDict]:
    """Reads a whole source into each row; see `LanguageModel.read_rows`. `start` must be 0, and T at least `length`."""
    del adapter
    B, L = state.ids.shape
    source = _prompts_as_sources(ids_BT[:, :L], jnp.full(B, length), self.source_end_id)
    steps = SourceSteps(self.lm, *source, can_go_back=True)
    return RowsState(steps.start(B, L), state.ids.at[:, 0].set(self.start_id))

  def _row_steps(self, num_rows: int, num_slots: int) -> SourceSteps:
    """Returns steps for rows whose sources are placeholders of the largest length.

    `read_rows` replaces the placeholders by real sources.
    """
    ones_BS = jnp.ones((num_rows, num_slots + (self.source_end_id is not None)), jnp.int32)
    return SourceSteps(self.lm, 0 * ones_BS, ones_BS, can_go_back=True)


class SourceSteps:
  """`DecodingSteps` of an encoder-decoder; the state is the keys and values of the sources, and the caches of targets.

  Args:
    lm: the network, in a call of its parent.
    source_ids_BS, is_token_BS: the sources, and 1 for their tokens, 0 for padding.
    can_go_back: see `DecodingSteps`.
    counts_coverage: whether the state also stores the sums that `coverage` returns.
  """

  def __init__(
    self,
    lm: TransformerEncoderDecoder,
    source_ids_BS: jax.Array,
    is_token_BS: jax.Array,
    can_go_back: bool = False,
    counts_coverage: bool = False,
  ):
    variables = lm.cast_variables(lm.variables)
    self._lm, self._counts_coverage, self.can_go_back = lm, counts_coverage, can_go_back
    self._variables = {**variables, 'decoder': unstack_for_decoding(lm.decoder, variables['decoder'])}
    self._source = source_ids_BS, is_token_BS

  @property
  def max_positions(self) -> int | None:
    return getattr(self._lm, 'max_positions', None)

  def start(self, num_rows: int, num_slots: int) -> NestedDict:
    assert num_rows == len(self._source[0])
    return self._start(num_slots, *self._source)

  def row_axes(self, num_rows: int, num_slots: int) -> NestedDict:
    twice = (jax.ShapeDtypeStruct((2 * num_rows, *x.shape[1:]), x.dtype) for x in self._source)
    start = functools.partial(self._start, num_slots)
    axes: NestedDict = find_row_axes(jax.eval_shape(start, *self._source), jax.eval_shape(start, *twice))
    return axes

  def _start(self, num_slots: int, source_ids_BS: jax.Array, is_token_BS: jax.Array) -> NestedDict:
    _, side = self._lm.apply(self._variables, source_ids_BS, is_token_BS, num_slots, method='init_decode_state')
    state = place_targets(side.decode_state, num_slots) if self.can_go_back else side.decode_state
    return start_coverage(state) if self._counts_coverage else state

  def coverage(self, state: NestedDict) -> jax.Array:
    """Returns how much the targets have attended to each token of the sources; see `DecodingSteps`."""
    return read_coverage(state, self._lm.num_layers)

  def extend(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, state: NestedDict
  ) -> tuple[jax.Array, NestedDict]:
    logits_BV, side = self._lm.apply(self._variables, ids_BT, pos_BT, last_B, decode_state=state, method='extend_step')
    return logits_BV, side.decode_state


def _tokens_of_sources(batch: NestedDict) -> tuple[jax.Array, jax.Array | None]:
  """Returns the source tokens [B, S], 0 for padding, and their segment ids [B, S]; None means that all are tokens."""
  if 'source_ids' not in batch:
    raise ConfigError(f'the batch has no source_ids, [B, S] int32, to read; it has {", ".join(sorted(batch))}')
  ids_BS, segments_BS = batch['source_ids'], batch.get('source_segment_ids')
  if segments_BS is None and batch.get('source_lengths') is not None:
    segments_BS = (jnp.arange(ids_BS.shape[1]) < batch['source_lengths'][:, None]).astype(jnp.int32)
  # Padding may be an invalid id, whose vector is NaN.
  return ids_BS if segments_BS is None else jnp.where(segments_BS == 0, 0, ids_BS), segments_BS


def _prompts_as_sources(ids_BP: jax.Array, lengths_B: jax.Array, end_id: int | None) -> tuple[jax.Array, jax.Array]:
  """Returns prompts as sources, and an int32 mask of their tokens.

  If `end_id` is not None, it is appended to each prompt that is not empty.
  """
  if end_id is not None:
    ids_BP = jnp.pad(ids_BP, ((0, 0), (0, 1)))
    ids_BP = jnp.where(jnp.arange(ids_BP.shape[1]) == lengths_B[:, None], end_id, ids_BP)
    lengths_B = jnp.where(lengths_B > 0, lengths_B + 1, 0)
  is_token_BP = jnp.arange(ids_BP.shape[1]) < lengths_B[:, None]
  return jnp.where(is_token_BP, ids_BP, 0), is_token_BP.astype(jnp.int32)


def _are_labels(ids_BM: jax.Array, lengths_B: jax.Array, batch: NestedDict, packed: bool) -> jax.Array:
  """Returns [B] bool: whether the decoded tokens of a row equal its labels; if packed, those of its first target."""
  is_label_BT = weights_of_tokens(batch) > 0
  if packed and batch.get('segment_ids') is not None:
    is_label_BT &= batch['segment_ids'] == 1
  most = max(ids_BM.shape[1], is_label_BT.shape[1])
  ids, labels, is_label = (jnp.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in (ids_BM, batch['labels'], is_label_BT))
  return (lengths_B == jnp.sum(is_label, axis=1)) & jnp.all((ids == labels) | ~is_label, axis=1)
