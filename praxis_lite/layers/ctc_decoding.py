"""Decodes labels from the logits of a CTC model: by the best path, or by a prefix beam search.

The probability of labels is the sum over all of their paths. The search keeps the K most probable prefixes of labels,
each with two probabilities: of its paths that end in a blank, and of the others (Hannun et al., 2014). If K is as large
as the number of all prefixes, the search is exact.

B batch, T frames, V symbols, K prefixes, L the largest number of labels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError, check_range


class CtcHypotheses(NamedTuple):
  """Labels that a decoder has found.

  Attributes:
    ids: [B, K, L] int32, the most probable first, filled with blanks after the last label; [B, T] from
      `ctc_greedy_decode`.
    lengths: [B, K] int32, the number of labels; [B] from `ctc_greedy_decode`.
    log_probs: [B, K] float32, the logarithm of the probability of the labels, or a lower bound of it if the beam is
      narrow; -inf where there are fewer hypotheses. From `ctc_greedy_decode`, this is [B], the logarithm of the
      probability of the best path.
  """

  ids: jax.Array
  lengths: jax.Array
  log_probs: jax.Array


class _Beam(NamedTuple):
  """Prefixes, [B, K, L], their lengths, and log probabilities of their paths that end in a blank or a label, [B, K]."""

  ids: jax.Array
  lengths: jax.Array
  blank: jax.Array
  label: jax.Array


def ctc_greedy_decode(logits_BTV: jax.Array, paddings_BT: jax.Array, *, blank_id: int = 0) -> CtcHypotheses:
  """Returns the labels of the most probable path: the best symbol of each frame, without repetitions and blanks.

  Args:
    logits_BTV: logits of the symbols in each frame.
    paddings_BT: nonzero for frames of padding, which are after the others.
    blank_id: the symbol that is the blank.
  """
  is_frame_BT = paddings_BT == 0
  log_probs_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
  best_BT = jnp.where(is_frame_BT, jnp.argmax(log_probs_BTV, axis=-1), blank_id).astype(jnp.int32)
  before_BT = jnp.pad(best_BT, ((0, 0), (1, 0)), constant_values=blank_id)[:, :-1]
  is_label_BT = (best_BT != blank_id) & (best_BT != before_BT)
  order_BT = jnp.argsort(~is_label_BT, axis=1, stable=True)
  ids_BT = jnp.take_along_axis(jnp.where(is_label_BT, best_BT, blank_id), order_BT, axis=1)
  path_B = jnp.sum(jnp.where(is_frame_BT, jnp.max(log_probs_BTV, axis=-1), 0), axis=1)
  return CtcHypotheses(ids_BT, jnp.sum(is_label_BT, axis=1, dtype=jnp.int32), path_B)


def ctc_beam_search(
  logits_BTV: jax.Array,
  paddings_BT: jax.Array,
  *,
  num_beams: int = 8,
  max_labels: int | None = None,
  blank_id: int = 0,
) -> CtcHypotheses:
  """Returns the K most probable labels that a search over prefixes finds.

  Args:
    logits_BTV: logits of the symbols in each frame.
    paddings_BT: nonzero for frames of padding.
    num_beams: K.
    max_labels: L; None means T.
    blank_id: the symbol that is the blank.

  Raises:
    ConfigError: `num_beams` or `max_labels` is less than 1, or `blank_id` is not a symbol.
  """
  B, T, V = logits_BTV.shape
  L = T if max_labels is None else max_labels
  check_range('ctc_beam_search: num_beams', num_beams, least=1)
  check_range('ctc_beam_search: max_labels', L, least=1)
  if not 0 <= blank_id < V:
    raise ConfigError(f'ctc_beam_search: blank_id: {blank_id} is not one of {V} symbols; it must be from 0 to {V - 1}')
  is_frame_BT = paddings_BT == 0
  clean_BTV = jnp.where(is_frame_BT[..., None], logits_BTV.astype(jnp.float32), 0)

  def step(beam: _Beam, frame: tuple[jax.Array, jax.Array]) -> tuple[_Beam, None]:
    log_probs_BV, is_frame_B = frame
    new = _extend(beam, log_probs_BV, blank_id)
    keep = lambda new, old: jnp.where(is_frame_B.reshape(B, *(1,) * (new.ndim - 1)), new, old)  # noqa: E731
    return jax.tree.map(keep, new, beam), None

  nothing_BK = jnp.full((B, num_beams), -jnp.inf)
  start = _Beam(
    jnp.full((B, num_beams, L), blank_id, jnp.int32),
    jnp.zeros((B, num_beams), jnp.int32),
    nothing_BK.at[:, 0].set(0.0),
    nothing_BK,
  )
  frames = jnp.moveaxis(jax.nn.log_softmax(clean_BTV), 1, 0), is_frame_BT.T
  end, _ = jax.lax.scan(step, start, frames)
  score_BK = jnp.logaddexp(end.blank, end.label)
  # `top_k` has sorted the beam, except in a row without frames, whose only hypothesis is the first.
  return CtcHypotheses(end.ids, end.lengths, score_BK)


def _extend(beam: _Beam, log_probs_BV: jax.Array, blank_id: int) -> _Beam:
  """Returns the best prefixes after one more frame with these log probabilities."""
  B, K, L = beam.ids.shape
  V = log_probs_BV.shape[1]
  total_BK = jnp.logaddexp(beam.blank, beam.label)
  is_alive_BK = total_BK > -jnp.inf
  last_BK = jnp.take_along_axis(beam.ids, jnp.maximum(beam.lengths - 1, 0)[..., None], axis=2)[..., 0]
  has_last_BK = beam.lengths > 0
  of_last_BK = jnp.where(has_last_BK, jnp.take_along_axis(log_probs_BV, last_BK, axis=1), -jnp.inf)

  # A label that repeats the last one is a new label only after a blank.
  symbols_V = jnp.arange(V)
  repeats_BKV = has_last_BK[..., None] & (symbols_V == last_BK[..., None])
  grown_BKV = jnp.where(repeats_BKV, beam.blank[..., None], total_BK[..., None]) + log_probs_BV[:, None]
  may_grow_BKV = (symbols_V != blank_id) & (beam.lengths < L)[..., None]
  grown_BKV = jnp.where(may_grow_BKV, grown_BKV, -jnp.inf)

  # Prefix i with one more label may be prefix j. Its paths are then added to those of prefix j.
  at_L = jnp.arange(L)
  equal_BKKL = beam.ids[:, :, None] == beam.ids[:, None]  # [B, i, j, L]
  equal_BKK = jnp.all(equal_BKKL | (at_L >= beam.lengths[:, :, None, None]), axis=-1)
  grows_into_BKK = equal_BKK & (beam.lengths[:, :, None] + 1 == beam.lengths[:, None]) & is_alive_BK[:, None]
  into_last_BKK = jnp.take_along_axis(grown_BKV, jnp.broadcast_to(last_BK[:, None], (B, K, K)), axis=2)
  joined_BK = jax.nn.logsumexp(jnp.where(grows_into_BKK, into_last_BKK, -jnp.inf), axis=1)
  is_joined_BKV = jnp.any(grows_into_BKK[..., None] & (symbols_V == last_BK[:, None, :, None]), axis=2)
  grown_BKV = jnp.where(is_joined_BKV, -jnp.inf, grown_BKV)

  blank_BK = total_BK + log_probs_BV[:, blank_id, None]
  label_BK = jnp.logaddexp(beam.label + of_last_BK, joined_BK)
  candidates = jnp.concatenate([jnp.logaddexp(blank_BK, label_BK), grown_BKV.reshape(B, K * V)], axis=1)
  _, chosen_BK = jax.lax.top_k(candidates, K)
  is_grown_BK = chosen_BK >= K
  parent_BK = jnp.where(is_grown_BK, (chosen_BK - K) // V, chosen_BK)
  symbol_BK = (chosen_BK - K) % V
  of_parent = jax.tree.map(
    lambda x: jnp.take_along_axis(x, parent_BK.reshape(B, K, *(1,) * (x.ndim - 2)), axis=1),
    _Beam(beam.ids, beam.lengths, blank_BK, label_BK),
  )
  is_new_BKL = is_grown_BK[..., None] & (at_L == of_parent.lengths[..., None])
  grown_BK = jnp.take_along_axis(candidates, chosen_BK, axis=1)
  return _Beam(
    jnp.where(is_new_BKL, symbol_BK[..., None], of_parent.ids),
    of_parent.lengths + is_grown_BK,
    jnp.where(is_grown_BK, -jnp.inf, of_parent.blank),
    jnp.where(is_grown_BK, grown_BK, of_parent.label),
  )
