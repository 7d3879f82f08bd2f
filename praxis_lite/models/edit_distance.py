"""The edit distance of sequences (Levenshtein): the fewest insertions, deletions and substitutions between them.

B batch, T and U lengths in symbols, V = U + 1 prefixes of the labels, W = T, the largest number of words.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.weighted import WeightedScalar

_FACTOR = 0x9E3779B1  # Any odd number whose bits look random.


def edit_distance(
  found_BT: jax.Array, found_lengths_B: jax.Array, labels_BU: jax.Array, label_lengths_B: jax.Array
) -> jax.Array:
  """Returns the edit distance, [B] int32, of each pair of rows of symbols, given their int32 lengths."""
  at_V = jnp.arange(labels_BU.shape[1] + 1, dtype=jnp.int32)  # The number of labels in each prefix.

  def step(row_BV: jax.Array, symbol: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    found_B, is_symbol_B = symbol
    substituted_BU = row_BV[:, :-1] + (labels_BU != found_B[:, None])
    best_BV = jnp.minimum(row_BV + 1, jnp.pad(substituted_BU, ((0, 0), (1, 0)), constant_values=2**30))
    # Any number of labels may be skipped: next[u] is the minimum of best[j] + (u - j) over j <= u.
    next_BV = at_V + jax.lax.cummin(best_BV - at_V, axis=1)
    return jnp.where(is_symbol_B[:, None], next_BV, row_BV), None

  is_symbol_BT = jnp.arange(found_BT.shape[1]) < found_lengths_B[:, None]
  start_BV = jnp.broadcast_to(at_V, (labels_BU.shape[0], len(at_V)))
  last_BV, _ = jax.lax.scan(step, start_BV, (found_BT.T, is_symbol_BT.T))
  return jnp.take_along_axis(last_BV, label_lengths_B[:, None], axis=1)[:, 0]


def hash_words(ids_BT: jax.Array, lengths_B: jax.Array, space_id: int) -> tuple[jax.Array, jax.Array]:
  """Returns a hash of each word of each row, [B, W] uint32, and the number of words, [B].

  Tokens `space_id` separate words. Two different words have the same hash with a probability of 1 in 4 billion.
  """
  is_in_BT = (jnp.arange(ids_BT.shape[1]) < lengths_B[:, None]) & (ids_BT != space_id)

  def step(hash_B: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    id_B, is_in_B = token
    mixed_B = (hash_B ^ (id_B.astype(jnp.uint32) + 1)) * jnp.uint32(_FACTOR)
    hash_B = jnp.where(is_in_B, mixed_B ^ (mixed_B >> 15), 0)
    return hash_B, hash_B

  start_B = jnp.zeros_like(ids_BT[:, 0], jnp.uint32)
  _, hash_TB = jax.lax.scan(step, start_B, (ids_BT.T, is_in_BT.T))
  is_end_BT = is_in_BT & ~jnp.pad(is_in_BT, ((0, 0), (0, 1)))[:, 1:]
  order_BT = jnp.argsort(~is_end_BT, axis=1, stable=True)
  return jnp.take_along_axis(hash_TB.T, order_BT, axis=1), jnp.sum(is_end_BT, axis=1, dtype=jnp.int32)


def error_rate(errors_B: jax.Array, counts_B: jax.Array, weights_B: jax.Array) -> WeightedScalar:
  """Returns (errors / labels, labels), both summed over rows with their weights; (errors, 0) if there are no labels."""
  weights_B = weights_B.astype(jnp.float32)
  total = jnp.sum(counts_B * weights_B)
  return jnp.sum(jnp.where(weights_B == 0, 0, errors_B * weights_B)) / (total + (total == 0)), total
