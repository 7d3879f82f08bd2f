"""Cross entropy of integer labels, in float32; it works on logits that are split over the vocabulary as they are.

V classes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> tuple[jax.Array, jax.Array]:
  """Returns (cross entropy, log normalizer) in nats, each float32 of the shape of `labels`.

      log normalizer z = log sum_v exp(logits_v)
      cross entropy    = z - sum_v target_v logits_v

  The target is one for the label; with smoothing e, 1 - e for the label plus e / V for every class (Szegedy et al.,
  2016). The log normalizer is what a z-loss, z^2, keeps near zero (Chowdhery et al., 2022).

  Args:
    logits: [..., V] of any float dtype.
    labels: [...] integers in [0, V).
    label_smoothing: e.
  """
  logits = logits.astype(jnp.float32)
  log_normalizer = jax.nn.logsumexp(logits, axis=-1)
  target = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
  if label_smoothing:
    target = (1 - label_smoothing) * target + label_smoothing * jnp.mean(logits, axis=-1)
  return log_normalizer - target, log_normalizer
