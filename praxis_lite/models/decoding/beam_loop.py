"""BeamLoop: the search for the most probable continuations, with any model that has `DecodingSteps`.

B prompts, K beams, R = B K rows, N best continuations, P length of the prompts, M maximum number of tokens to decode,
V vocabulary, C candidates: the best pairs of a beam and its next token.

    logits = extend(prompts)                      one pass over the prompts, once for all beams
    choose(logits)
    for i = 1 ... M - 1, while a prompt continues:
      state = state of each beam's parent
      choose(extend(token i - 1 of each beam))

`choose` ranks all pairs of a beam and a token by the sum of log-probabilities. A continuation ends with a stop token,
or when it has the largest number of tokens. Of the first K pairs, those that end join the list of the K best completed
continuations, which is ordered by score. The first K pairs that do not end are the next beams. At first, only
beam 0 is possible, so it becomes the parent of all, and its state is copied to them. In a diverse search, G groups of K
/ G beams search in this way independently, one after the other; a group ranks by the sum minus a penalty for tokens
that earlier groups have just chosen. In a flat search, each of the K beams joins the list with each stop token instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.weighted import WeightedScalars
from praxis_lite.layers.base.expected_trips import expected_trips
from praxis_lite.models.decoding.beam_rows import BeamRows, keep_places
from praxis_lite.models.decoding.loop import Decoded
from praxis_lite.models.decoding.reading import NEXT_TOKEN, READ_PROMPTS, RowReader
from praxis_lite.models.decoding.steps import DecodingState

_IMPOSSIBLE = -jnp.inf


class BeamDecoded(NamedTuple):
  """The best continuation of each prompt, as in `Decoded`, and the N best ones, the best first.

  Attributes:
    ids, lengths, log_probs: the best continuation, as in `Decoded`.
    beam_ids: [B, N, M] int32 tokens of the N best continuations.
    beam_lengths: [B, N] int32 number of tokens of each; 0 if there are fewer than N continuations.
    beam_log_probs: [B, N, M] float32 log-probability of each token under the model.
    beam_scores: [B, N] float32 scores, in descending order; minus infinity if there are fewer than N continuations.
  """

  ids: jax.Array
  lengths: jax.Array
  log_probs: jax.Array
  beam_ids: jax.Array
  beam_lengths: jax.Array
  beam_log_probs: jax.Array
  beam_scores: jax.Array

  def metrics(self, rows_B: jax.Array) -> WeightedScalars:
    """Returns the metrics of the best continuations, see `Decoded.metrics`."""
    return Decoded(self.ids, self.lengths, self.log_probs).metrics(rows_B)


class _Beams(NamedTuple):
  """Continuations of each prompt; an entry whose score is minus infinity holds no continuation."""

  ids: jax.Array  # [B, K, M] int32.
  lengths: jax.Array  # [B, K] int32.
  log_probs: jax.Array  # [B, K, M] float32, of each token under the model.
  # [B, K] float32: a beam's sum of log-probabilities, or the final score of a completed continuation.
  scores: jax.Array

  def take(self, index_BK: jax.Array) -> _Beams:
    """Returns, for each prompt b, the continuations with the indices `index_BK[b]`."""
    return jax.tree.map(lambda x: jax.vmap(lambda x, index_K: x[index_K])(x, index_BK), self)


class _Progress(NamedTuple):
  """The progress of the prompts, besides the state of the model."""

  number: jax.Array  # int32, the index of the next token in each continuation.
  beams: _Beams  # The continuations that go on.
  parent_BK: jax.Array  # int32, the index of the previous beam that each beam continues.
  best: _Beams  # The best completed continuations.
  done_BG: jax.Array  # bool, which groups of beams have ended; without groups, G is 1.

  @property
  def continues(self) -> jax.Array:
    """Whether a group of beams still continues, a bool scalar."""
    return ~jnp.all(self.done_BG)

  @property
  def done_B(self) -> jax.Array:
    """Whether all groups of beams of each prompt have ended, [B] bool."""
    return jnp.all(self.done_BG, axis=1)

  def group(self, number: int, size: int) -> _Progress:
    """Returns the progress of one group of `size` beams."""
    own = slice(number * size, (number + 1) * size)
    beams, parent_BK, best = jax.tree.map(lambda x: x[:, own], (self.beams, self.parent_BK, self.best))
    return _Progress(self.number, beams, parent_BK, best, self.done_BG[:, number : number + 1])


class _Candidates(NamedTuple):
  """The best pairs of a beam and a token, in order."""

  parent: jax.Array  # [B, C] int32, the index of the beam.
  ids: jax.Array  # [B, C] int32, the token.
  log_probs: jax.Array  # [B, C], of the token under the model.
  sums: jax.Array  # [B, C], the sums of log-probabilities.
  ranks: jax.Array  # [B, C], the values to rank by: the sums minus penalties for tokens that other groups have chosen.
  is_stop: jax.Array  # [B, C], whether the token is a stop token.

  def take(self, index_BK: jax.Array) -> _Candidates:
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index_BK, axis=1), self)

  def extend(self, beams: _Beams, number: jax.Array) -> _Beams:
    """Returns the candidates as beams: each parent's continuation, with the candidate's token at index `number`."""
    ids, lengths, log_probs, _ = beams.take(self.parent)
    return _Beams(
      ids.at[:, :, number].set(self.ids), lengths + 1, log_probs.at[:, :, number].set(self.log_probs), self.sums
    )


@dataclasses.dataclass(frozen=True)
class BeamLoop(Generic[DecodingState]):
  """One call of `BeamSearch.decode`; see `BeamSearch` for fields without a comment."""

  reader: RowReader[DecodingState]  # Reads the prompts.
  # (logits [R, V], tokens [R, P + M] of the rows, number of tokens [R]) -> the logits to rank by; None keeps them.
  adjust: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None
  stop_ids: tuple[int, ...]  # Tokens that end a continuation.
  limits_B: jax.Array  # int32, the largest number of tokens after each prompt, at most M.
  beam_size: int
  num_best: int
  early_stopping: bool
  # (number of tokens) -> the divisor of the sum of log-probabilities; a non-decreasing function.
  length_norm: Callable[[jax.Array], jax.Array]
  num_groups: int = 1
  diversity_penalty: float = 0.0
  # (state) -> [R], terms of at most 0, added to the scores of continuations that end now; None adds nothing.
  coverage: Callable[[DecodingState], jax.Array] | None = None
  # True if a beam ends only by a stop token, at any step; see `FlatBeamSearch`.
  is_flat: bool = False

  def run(self) -> BeamDecoded:
    """Continues the prompts."""
    reader, state = self.reader, self.reader.start()
    B, K, M = len(reader.prompt_lengths_B), self.beam_size, reader.num_steps
    rows = BeamRows.make(reader.steps, state, B, reader.slots, K)

    def read_and_search(progress: _Progress) -> _Progress:
      """Continues the beams until they are done, or the state is full."""
      with jax.named_scope(READ_PROMPTS):
        logits_RV, of_beams, taken = self._read(progress, state, rows)
        carry = taken, of_beams, self._choose(logits_RV, progress, of_beams)
      equal = [jnp.where(progress.number == 0, count, 0) for count in rows.equal_slots(of_beams)]

      def reorder(state: DecodingState, parent_BK: jax.Array) -> DecodingState:
        return rows.take(state, parent_BK, equal)

      with expected_trips(M - 1):
        return jax.lax.while_loop(
          lambda c: (c[0] < reader.slots) & c[-1].continues, lambda carry: self._extend(carry, reorder), carry
        )[-1]

    nothing = _Beams(
      jnp.zeros((B, K, M), jnp.int32),
      jnp.zeros((B, K), jnp.int32),
      jnp.zeros((B, K, M)),
      jnp.full((B, K), _IMPOSSIBLE),
    )
    first = nothing._replace(scores=nothing.scores.at[:, :: K // self.num_groups].set(0.0))
    is_done_B = (reader.prompt_lengths_B == 0) | (self.limits_B <= 0)
    is_done_BG = jnp.repeat(is_done_B[:, None], self.num_groups, axis=1)
    progress = _Progress(jnp.int32(0), first, jnp.zeros((B, K), jnp.int32), nothing, is_done_BG)
    if reader.fits:
      return self._finish(read_and_search(progress))
    return self._finish(jax.lax.while_loop(lambda progress: progress.continues, read_and_search, progress))

  def _read(
    self, progress: _Progress, start: DecodingState, rows: BeamRows
  ) -> tuple[jax.Array, DecodingState, jax.Array]:
    """Reads the prompts and, if the state was full, the tokens of all beams so far.

    Returns:
      Logits [R, V] of the next tokens, the state of all beams, and the number of slots that are taken.
    """
    reader, K = self.reader, self.beam_size

    def read_beam(beam: jax.Array | int) -> tuple[jax.Array, DecodingState, jax.Array]:
      return reader.read(progress.beams.ids[:, beam], progress.number, progress.done_B, start)

    if reader.fits:
      logits_BV, state, taken = read_beam(0)
      return jnp.repeat(logits_BV, K, axis=0), rows.spread(state), taken

    def read_next(
      beam: jax.Array, carry: tuple[jax.Array, DecodingState, jax.Array]
    ) -> tuple[jax.Array, DecodingState, jax.Array]:
      logits_BKV, of_beams, _ = carry
      logits_BV, state, taken = read_beam(beam)
      return logits_BKV.at[:, beam].set(logits_BV), rows.put(of_beams, state, beam), taken

    shape = jax.eval_shape(read_beam, 0)[0]
    zeros_BKV = jnp.zeros((shape.shape[0], K, *shape.shape[1:]), shape.dtype)
    carry = zeros_BKV, rows.spread(start), jnp.int32(0)
    logits_BKV, of_beams, taken = jax.lax.fori_loop(0, jnp.where(progress.number == 0, 1, K), read_next, carry)
    return logits_BKV.reshape(-1, logits_BKV.shape[-1]), of_beams, taken

  def _extend(
    self,
    carry: tuple[jax.Array, DecodingState, _Progress],
    reorder: Callable[[DecodingState, jax.Array], DecodingState],
  ) -> tuple[jax.Array, DecodingState, _Progress]:
    """Reads the last token of each beam and chooses the next tokens.

    The carry is the number of slots taken, the state of the model and the progress.
    """
    taken, state, progress = carry
    ids_R = progress.beams.ids[:, :, progress.number - 1].reshape(-1)
    pos_R = jnp.repeat(self.reader.prompt_lengths_B + progress.number - 1, self.beam_size)
    with jax.named_scope(NEXT_TOKEN):
      state = reorder(state, progress.parent_BK)
      logits_RV, state = self.reader.steps.extend(ids_R[:, None], pos_R[:, None], jnp.zeros_like(ids_R), state)
      return taken + 1, state, self._choose(logits_RV, progress, state)

  def _choose(self, logits_RV: jax.Array, progress: _Progress, state: DecodingState) -> _Progress:
    """Adds a token to each beam, and adds beams that end to the completed continuations; returns the new progress."""
    B, V, size = len(progress.done_BG), logits_RV.shape[-1], self.beam_size // self.num_groups
    log_probs_RV, ranked_RV = self._log_probs(logits_RV, progress)
    log_probs_BKV, ranked_BKV = log_probs_RV.reshape(B, -1, V), ranked_RV.reshape(B, -1, V)
    covered_BK = jnp.zeros((B, self.beam_size)) if self.coverage is None else self.coverage(state).reshape(B, -1)
    groups: list[_Progress] = []
    chosen_BV = jnp.zeros((B, V), jnp.int32)  # How many beams of earlier groups go on with each token.
    for number in range(self.num_groups):
      own = slice(number * size, (number + 1) * size)
      penalty_BV = self.diversity_penalty * chosen_BV
      after = self._choose_in_group(
        log_probs_BKV[:, own],
        ranked_BKV[:, own],
        penalty_BV,
        covered_BK[:, own],
        progress.group(number, size),
        number * size,
      )
      ids_BK = after.beams.ids[:, :, progress.number]
      chosen_BV = chosen_BV.at[jnp.arange(B)[:, None], ids_BK].add(after.beams.scores > _IMPOSSIBLE)
      groups.append(after)
    if len(groups) == 1:
      return groups[0]
    _, *parts = zip(*groups)
    joined = [jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *part) for part in parts]
    return _Progress(progress.number + 1, *joined)

  def _choose_in_group(
    self,
    log_probs_BKV: jax.Array,
    ranked_BKV: jax.Array,
    penalty_BV: jax.Array,
    covered_BK: jax.Array,
    progress: _Progress,
    first_beam: int,
  ) -> _Progress:
    """Does the work of `_choose` for one group, whose first beam has the index `first_beam`."""
    number, beams, _, best, done_BG = progress
    done_B = done_BG[:, 0]
    K = log_probs_BKV.shape[1]
    candidates = self._candidates(log_probs_BKV, ranked_BKV, penalty_BV, progress)
    is_last_B = number + 1 >= self.limits_B
    if self.is_flat:
      first = self._stop_candidates(log_probs_BKV, ranked_BKV, progress)
    else:
      first = jax.tree.map(lambda x: x[:, :K], candidates)
    ends_BC = (first.is_stop | (is_last_B[:, None] & (not self.is_flat))) & ~done_B[:, None]
    scores_BC = first.sums / self.length_norm(number + 1) + jnp.take_along_axis(covered_BK, first.parent, axis=1)
    ended = first._replace(sums=jnp.where(ends_BC, scores_BC, _IMPOSSIBLE)).extend(beams, number)
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), best, ended)
    best = both.take(jax.lax.top_k(both.scores, K)[1])

    ranks_BK, index_BK = jax.lax.top_k(jnp.where(candidates.is_stop, _IMPOSSIBLE, candidates.ranks), K)
    chosen = candidates.take(index_BK)
    chosen = chosen._replace(sums=jnp.where(ranks_BK == _IMPOSSIBLE, _IMPOSSIBLE, chosen.sums))
    chosen = chosen.take(keep_places(chosen.parent))
    beams = chosen.extend(beams, number)
    # An upper bound: sums of log-probabilities do not grow, the divisor does not shrink, and coverage terms are <= 0.
    attainable_B = jnp.max(chosen.sums, axis=1) / self.length_norm(self.limits_B)
    done_B |= is_last_B | (best.scores[:, min(self.num_best, K) - 1] >= attainable_B)
    if self.early_stopping:
      done_B |= best.scores[:, -1] > _IMPOSSIBLE
    return _Progress(number + 1, beams, first_beam + chosen.parent, best, done_B[:, None])

  def _log_probs(self, logits_RV: jax.Array, progress: _Progress) -> tuple[jax.Array, jax.Array]:
    """Returns the model's log-probabilities of the next tokens, [R, V], and adjusted ones, [R, V], to rank beams with.

    Without `adjust`, both are equal.
    """
    logits_RV = logits_RV.astype(jnp.float32)
    log_probs_RV = jax.nn.log_softmax(logits_RV)
    ranked_RV = log_probs_RV
    # Adjusted values are not normalised again, so tokens that are not excluded keep their probability.
    if self.adjust is not None:
      adjusted_RV = self._adjust(logits_RV, progress) - jax.nn.logsumexp(logits_RV, axis=-1, keepdims=True)
      ranked_RV = jnp.minimum(adjusted_RV, 0.0)
    return log_probs_RV, ranked_RV

  def _candidates(
    self, log_probs_BKV: jax.Array, ranked_BKV: jax.Array, penalty_BV: jax.Array, progress: _Progress
  ) -> _Candidates:
    """Returns the best candidates: enough that at least K are not stop tokens, if there are K such candidates."""
    B, K, V = log_probs_BKV.shape
    scores_BK1 = progress.beams.scores[..., None]
    # The logits of impossible beams may be NaN.
    sums_BKV = jnp.where(scores_BK1 == _IMPOSSIBLE, _IMPOSSIBLE, scores_BK1 + ranked_BKV)
    ranks_BKV = sums_BKV if self.num_groups == 1 else sums_BKV - penalty_BV[:, None]
    count = K * min(1 + len(self.stop_ids), V)
    ranks_BC, index_BC = jax.lax.top_k(ranks_BKV.reshape(B, K * V), count)
    log_probs_BC, sums_BC = (
      jnp.take_along_axis(x.reshape(B, K * V), index_BC, axis=1) for x in (log_probs_BKV, sums_BKV)
    )
    ids_BC = index_BC % V
    is_stop_BC = jnp.isin(ids_BC, jnp.array(self.stop_ids, jnp.int32))
    return _Candidates(index_BC // V, ids_BC, log_probs_BC, sums_BC, ranks_BC, is_stop_BC)

  def _stop_candidates(self, log_probs_BKV: jax.Array, ranked_BKV: jax.Array, progress: _Progress) -> _Candidates:
    """Returns all pairs of a beam and a stop token. A beam without a continuation has a sum of minus infinity."""
    B, K, _ = log_probs_BKV.shape
    stops_N = jnp.array(self.stop_ids, jnp.int32)
    scores_BK1 = progress.beams.scores[..., None]
    sums_BKN = jnp.where(scores_BK1 == _IMPOSSIBLE, _IMPOSSIBLE, scores_BK1 + ranked_BKV[..., stops_N])
    parent_BKN = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32)[:, None], sums_BKN.shape)
    ids_BKN, is_stop_BKN = jnp.broadcast_to(stops_N, sums_BKN.shape), jnp.ones(sums_BKN.shape, bool)
    parts = parent_BKN, ids_BKN, log_probs_BKV[..., stops_N], sums_BKN, sums_BKN, is_stop_BKN
    return _Candidates(*(x.reshape(B, -1) for x in parts))

  def _adjust(self, logits_RV: jax.Array, progress: _Progress) -> jax.Array:
    assert self.adjust is not None
    ids_BKL = jax.vmap(self.reader.row_tokens, in_axes=1, out_axes=1)(progress.beams.ids)
    lengths_R = jnp.repeat(self.reader.prompt_lengths_B + progress.number, self.beam_size)
    return self.adjust(logits_RV, ids_BKL.reshape(-1, ids_BKL.shape[-1]), lengths_R)

  def _finish(self, progress: _Progress) -> BeamDecoded:
    """Returns the best completed continuations, with zeros after their tokens."""
    best = progress.best
    if self.num_groups > 1:
      best = best.take(jax.lax.top_k(best.scores, self.beam_size)[1])
    ids, lengths, log_probs, scores = jax.tree.map(lambda x: x[:, : self.num_best], best)
    lengths = jnp.where(scores == _IMPOSSIBLE, 0, lengths)
    is_token = jnp.arange(ids.shape[-1]) < lengths[..., None]
    ids, log_probs = jnp.where(is_token, ids, 0), jnp.where(is_token, log_probs, 0.0)
    return BeamDecoded(ids[:, 0], lengths[:, 0], log_probs[:, 0], ids, lengths, log_probs, scores)
