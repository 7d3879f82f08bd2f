"""Loss of transducers, for labels whose times in the sequence are not known (RNN-T; Graves, 2012).

A path begins at frame 0 with no label. In each step it either writes the next label and stays in its frame, or writes
a blank and goes to the next frame; it ends with the blank of the last frame, after all labels. The probability of
labels is the sum over all of their paths:

    alpha[0, 0] = 1;  alpha[t, u] = alpha[t - 1, u] blank[t - 1, u] + alpha[t, u - 1] label[t, u - 1]
    p(labels)   = alpha[last frame, L] blank[last frame, L]

All entries with the same t + u are computed at once, so a scan has T + L steps.

B batch, T frames, L labels, U = L + 1 numbers of labels that are written, N = T + U - 1 diagonals.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_IMPOSSIBLE = -1e30  # A finite number, because differences of infinities are NaN.


def rnnt_loss(blank_BTU: jax.Array, label_BTU: jax.Array, frames_B: jax.Array, labels_B: jax.Array) -> jax.Array:
  """Returns -log p(labels), [B] float32, in nats; about 1e30 for rows without frames.

  Entries beyond the frames and labels of a row may have any finite values.

  Args:
    blank_BTU: log probability of the blank in frame t, after u labels.
    label_BTU: log probability of label u in frame t, after u labels; the last entry, u = L, is not used.
    frames_B: int32, the number of frames of each row.
    labels_B: int32, the number of labels of each row, at most L.
  """
  B, T, U = blank_BTU.shape
  at_U = jnp.arange(U)
  frame_NU = jnp.arange(T + U - 1)[:, None] - at_U
  exists_NU = (frame_NU >= 0) & (frame_NU < T)

  def to_diagonals(x_BTU: jax.Array) -> jax.Array:
    """Returns [N, B, U]: entry [n, b, u] is x[b, n - u, u], or `_IMPOSSIBLE` if there is no frame n - u."""
    index_BNU = jnp.broadcast_to(jnp.clip(frame_NU, 0, T - 1), (B, T + U - 1, U))
    found_BNU = jnp.take_along_axis(x_BTU.astype(jnp.float32), index_BNU, axis=1)
    return jnp.moveaxis(jnp.where(exists_NU, found_BNU, _IMPOSSIBLE), 1, 0)

  def step(alpha_BU: jax.Array, logs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    blank_BU, label_BU = logs
    after_blank_BU = alpha_BU + blank_BU
    after_label_BU = jnp.pad(alpha_BU + label_BU, ((0, 0), (1, 0)), constant_values=_IMPOSSIBLE)[:, :U]
    next_BU = jnp.logaddexp(after_blank_BU, after_label_BU)
    return jnp.maximum(next_BU, _IMPOSSIBLE), after_blank_BU

  start_BU = jnp.full((B, U), _IMPOSSIBLE).at[:, 0].set(0.0)
  _, ended_NBU = jax.lax.scan(step, start_BU, (to_diagonals(blank_BTU), to_diagonals(label_BTU)))
  last_B = jnp.maximum(frames_B - 1 + labels_B, 0)
  ended_BU = jnp.take_along_axis(ended_NBU, last_B[None, :, None], axis=0)[0]
  log_prob_B = jnp.take_along_axis(ended_BU, labels_B[:, None], axis=1)[:, 0]
  return jnp.where(frames_B > 0, -log_prob_B, -_IMPOSSIBLE)
