"""Cross entropy of integer labels, in float32; it works on logits that are split over the vocabulary as they are.

The gradient is written out, softmax(logits) - target: derived from the forward pass, it would keep exp(logits) beside
the logits and scatter the labels into a third array of that size, which is what takes the most memory of a language
model's head.

V classes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

Residuals = tuple[jax.Array, jax.Array, jax.Array]


def cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0) -> tuple[jax.Array, jax.Array]:
  """Returns (cross entropy, log normalizer) in nats, each float32 of the shape of `labels`.

      log normalizer z = log sum_v exp(logits_v)
      cross entropy    = z - sum_v target_v logits_v

  The target is one for the label; with smoothing e, 1 - e for the label plus e / V for every class (Szegedy et al.,
  2016). The log normalizer is what a z-loss, z^2, keeps near zero (Chowdhery et al., 2022).

  Args:
    logits: [..., V] of any float dtype.
    labels: [...] integers; the cross entropy of those that are not in [0, V) is NaN, so that they show.
    label_smoothing: e.
  """
  return _cross_entropy(logits.astype(jnp.float32), labels, label_smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, labels: jax.Array, label_smoothing: float) -> tuple[jax.Array, jax.Array]:
  return _forward(logits, labels, label_smoothing)[0]


def _forward(
  logits: jax.Array, labels: jax.Array, label_smoothing: float
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
  log_normalizer = jax.nn.logsumexp(logits, axis=-1)
  index = jnp.where(labels < 0, logits.shape[-1], labels)  # Otherwise -1 would be the last class.
  target = jnp.take_along_axis(logits, index[..., None], axis=-1, mode='fill', fill_value=jnp.nan)[..., 0]
  if label_smoothing:
    target = (1 - label_smoothing) * target + label_smoothing * jnp.mean(logits, axis=-1)
  return (log_normalizer - target, log_normalizer), (logits, labels, log_normalizer)


def _backward(
  label_smoothing: float, residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
  logits, labels, log_normalizer = residuals
  of_xent, of_normalizer = (c[..., None] for c in cotangents)
  # A comparison, where a one-hot array would be, is computed in the loop that writes the gradient.
  is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
  target = (1 - label_smoothing) * is_label + label_smoothing / logits.shape[-1]
  probabilities = jnp.exp(logits - log_normalizer[..., None])
  return probabilities * (of_xent + of_normalizer) - target * of_xent, None


_cross_entropy.defvjp(_forward, _backward)
