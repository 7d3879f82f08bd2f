"""Connectionist temporal classification: learns labels without the times at which they occur (Graves, 2006).

A path has a symbol in each frame: a label or the blank. Repeated symbols are merged, and then blanks are removed, so
the paths a a - b, a - - b and - a b b all read "ab". The probability of labels is the sum over all of their paths, and
an alignment is the most probable of these paths.

B batch, T frames, U labels, V symbols, S = 2 U + 1 states of a path: a blank, label 0, a blank, label 1, ..., a blank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_IMPOSSIBLE = -1e30  # A finite number, because differences of infinities are NaN.


class CtcAlignment(NamedTuple):
  """The most probable path of each row.

  Attributes:
    ids: [B, T] int32, the symbol in each frame; the blank in frames of padding and in rows without a path.
    label_index: [B, T] int32, the index in the row of the frame's label; -1 for a blank.
    log_prob: [B] float32, the logarithm of the path's probability; -inf if there are too few frames for the labels.
  """

  ids: jax.Array
  label_index: jax.Array
  log_prob: jax.Array


def ctc_loss(
  logits_BTV: jax.Array,
  paddings_BT: jax.Array,
  labels_BU: jax.Array,
  label_paddings_BU: jax.Array,
  *,
  blank_id: int = 0,
) -> jax.Array:
  """Returns -log p(labels), [B] float32, in nats. Frames and labels of padding may hold any values, even NaN.

  A row with too few frames for its labels has no path, and a loss of about 1e5; see `ctc_frames_needed`.

  Args:
    logits_BTV: logits of the symbols in each frame.
    paddings_BT: nonzero for frames of padding.
    labels_BU: int32, without blanks.
    label_paddings_BU: nonzero for padding after the labels.
    blank_id: the symbol that is the blank.
  """
  import optax  # Only this function needs it.

  logits_BTV = jnp.where(paddings_BT[..., None] != 0, 0, logits_BTV.astype(jnp.float32))
  labels_BU, label_paddings_BU = _clear_labels(labels_BU, label_paddings_BU, blank_id)
  is_padding_BT = (paddings_BT != 0).astype(jnp.float32)
  return optax.ctc_loss(logits_BTV, is_padding_BT, labels_BU, label_paddings_BU, blank_id=blank_id)


def ctc_frames_needed(labels_BU: jax.Array, label_paddings_BU: jax.Array) -> jax.Array:
  """Returns the length of the shortest path, [B] int32: a frame for each label, and one between equal neighbours."""
  is_label_BU = label_paddings_BU == 0
  equal_BU = (labels_BU[:, 1:] == labels_BU[:, :-1]) & is_label_BU[:, 1:]
  return jnp.sum(is_label_BU, axis=1, dtype=jnp.int32) + jnp.sum(equal_BU, axis=1, dtype=jnp.int32)


def ctc_alignment(
  logits_BTV: jax.Array,
  paddings_BT: jax.Array,
  labels_BU: jax.Array,
  label_paddings_BU: jax.Array,
  *,
  blank_id: int = 0,
) -> CtcAlignment:
  """Returns the most probable path of the labels (Viterbi); the arguments are the same as for `ctc_loss`."""
  is_frame_BT = paddings_BT == 0
  labels_BU, label_paddings_BU = _clear_labels(labels_BU, label_paddings_BU, blank_id)
  states_BS = _insert_blanks(labels_BU, blank_id)
  clean_BTV = jnp.where(is_frame_BT[..., None], logits_BTV.astype(jnp.float32), 0)
  emitted_BTS = jnp.take_along_axis(jax.nn.log_softmax(clean_BTV), states_BS[:, None], axis=2)
  # A label may follow another label without a blank between, if they differ.
  skips_BS = (states_BS != blank_id) & (states_BS != _shift(states_BS, 2, blank_id))

  def forward(score_BS: jax.Array, frame: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    emitted_BS, is_frame_B = frame
    from_two_BS = jnp.where(skips_BS, _shift(score_BS, 2, _IMPOSSIBLE), _IMPOSSIBLE)
    before_3BS = jnp.stack([score_BS, _shift(score_BS, 1, _IMPOSSIBLE), from_two_BS])
    step_BS = jnp.argmax(before_3BS, axis=0)
    next_BS = jnp.maximum(jnp.max(before_3BS, axis=0) + emitted_BS, _IMPOSSIBLE)
    is_frame_B1 = is_frame_B[:, None]
    return jnp.where(is_frame_B1, next_BS, score_BS), jnp.where(is_frame_B1, step_BS, 0).astype(jnp.int8)

  # Paths begin in a state before all others: the first blank is one state after it, and the first label two states.
  B, S = states_BS.shape
  start_BS = jnp.full((B, S + 1), _IMPOSSIBLE).at[:, 0].set(0.0)
  states_BS, skips_BS = (jnp.pad(x, ((0, 0), (1, 0))) for x in (states_BS, skips_BS))
  skips_BS = skips_BS.at[:, 2].set(True)
  emitted_BTS = jnp.pad(emitted_BTS, ((0, 0), (0, 0), (1, 0)), constant_values=_IMPOSSIBLE)
  frames = jnp.moveaxis(emitted_BTS, 1, 0), is_frame_BT.T
  score_BS, steps_TBS = jax.lax.scan(forward, start_BS, frames)

  num_labels_B1 = jnp.sum(label_paddings_BU == 0, axis=1, dtype=jnp.int32)[:, None]
  has_frames_B1 = jnp.any(is_frame_BT, axis=1)[:, None]
  ends_B2 = jnp.where(has_frames_B1, jnp.concatenate([2 * num_labels_B1 + 1, 2 * num_labels_B1], axis=1), 0)
  ends_B2 = jnp.where((num_labels_B1 > 0) | ~has_frames_B1, ends_B2, 1)
  scores_B2 = jnp.take_along_axis(score_BS, ends_B2, axis=1)
  end_B1 = jnp.take_along_axis(ends_B2, jnp.argmax(scores_B2, axis=1)[:, None], axis=1)
  log_prob_B = jnp.max(scores_B2, axis=1)
  # A path without frames has only its start, and no labels.
  is_possible_B = (log_prob_B > _IMPOSSIBLE / 2) & (has_frames_B1 | (num_labels_B1 == 0))[:, 0]

  def backward(state_B1: jax.Array, step_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    return state_B1 - jnp.take_along_axis(step_BS, state_B1, axis=1), state_B1[:, 0]

  _, path_TB = jax.lax.scan(backward, end_B1, steps_TBS, reverse=True)
  path_BT = path_TB.T
  is_label_BT = (path_BT > 0) & (path_BT % 2 == 0) & is_frame_BT & is_possible_B[:, None]
  symbol_BT = jnp.take_along_axis(states_BS, path_BT, axis=1)
  return CtcAlignment(
    jnp.where(is_label_BT, symbol_BT, blank_id).astype(jnp.int32),
    jnp.where(is_label_BT, path_BT // 2 - 1, -1).astype(jnp.int32),
    jnp.where(is_possible_B, log_prob_B, -jnp.inf),
  )


def _insert_blanks(labels_BU: jax.Array, blank_id: int) -> jax.Array:
  """Returns the symbols of the states of a path, [B, S]."""
  B, U = labels_BU.shape
  pairs_BU2 = jnp.stack([jnp.full_like(labels_BU, blank_id), labels_BU], axis=-1)
  return jnp.pad(pairs_BU2.reshape(B, 2 * U), ((0, 0), (0, 1)), constant_values=blank_id)


def _shift(x_BS: jax.Array, count: int, fill: float) -> jax.Array:
  """Returns x moved by `count` along its last dimension, with `fill` in the first entries."""
  return jnp.pad(x_BS, ((0, 0), (count, 0)), constant_values=fill)[:, : x_BS.shape[1]]


def _clear_labels(labels_BU: jax.Array, paddings_BU: jax.Array, blank_id: int) -> tuple[jax.Array, jax.Array]:
  """Returns labels, with blanks for padding, and paddings, 0 or 1; both have at least one column."""
  is_padding_BU = paddings_BU != 0
  labels_BU = jnp.where(is_padding_BU, blank_id, labels_BU).astype(jnp.int32)
  if labels_BU.shape[1]:
    return labels_BU, is_padding_BU.astype(jnp.float32)
  return jnp.pad(labels_BU, ((0, 0), (0, 1)), constant_values=blank_id), jnp.ones((labels_BU.shape[0], 1))
