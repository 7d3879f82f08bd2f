"""Batches of pairs: two answers to each prompt, `chosen` and `rejected`, which are rows of one call of a network.

    batch     chosen: {ids, labels, weights, segment_ids, segment_pos}, each [B, T]    rejected: the same    weights [B]
    packed    a row has several pairs: segment s of `chosen` and segment s of `rejected`; weights [B, S]

A call of the network has 2 B rows, in which the rejected answer follows the chosen one, so rows stay on their devices.

B batch, T length, S pairs of a row, D model dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.models.labels import check_labels
from praxis_lite.models.token_checks import check_packing, check_positions_of_input, check_vocabulary

CHOSEN, REJECTED, MISMATCHED = 'chosen', 'rejected', 'mismatched'


def has_pairs(batch: NestedDict) -> bool:
  """Whether a batch holds pairs of answers."""
  return CHOSEN in batch


def check_pairs(
  data: BaseInput,
  batch: NestedDict,
  *,
  vocab_size: int,
  field: str,
  packed: bool,
  limits: Mapping[str, PositionLimit],
  sides: Sequence[str],
) -> None:
  """Raises a `ConfigError` if the first batch of an input does not hold pairs of answers that a model can read.

  `field` is the path of the field that sets the size of the vocabulary. `packed` says whether the model takes rows of
  several segments. `sides` are the parts of the batch that the model reads, such as 'chosen'.
  """
  for side in sides:
    if not isinstance(batch.get(side), dict):
      remedy = 'set its mismatched=True' if side == MISMATCHED else 'a PreferenceInput makes such batches'
      raise ConfigError(
        f'{data.label}: this model reads {", ".join(sides)}, and a batch has {", ".join(sorted(batch))}; {remedy}'
      )
    rows = batch[side]
    is_token = np.asarray(rows['segment_ids']) > 0
    ids, labels = np.asarray(rows['ids']), np.asarray(rows['labels'])
    check_vocabulary(data, (ids[is_token], labels[np.asarray(rows['weights']) > 0]), field, vocab_size)
    check_labels(data, {f'{side}.ids': ids}, {'weights': is_token}, field, vocab_size)
    check_labels(data, {f'{side}.labels': labels}, rows, field, vocab_size)
    check_positions_of_input(limits, data, rows)
  check_packing(data, packed, np.ndim(batch['weights']) > 1, 'pairs')


def rows_of_both(batch: NestedDict) -> dict[str, jax.Array]:
  """Returns the arrays of both answers, [2 B, T]: row 2 b has the chosen answer of pair b, row 2 b + 1 the rejected."""
  chosen, rejected = batch[CHOSEN], batch[REJECTED]
  return {
    name: jnp.stack([x, rejected[name]], axis=1).reshape(2 * x.shape[0], *x.shape[1:]) for name, x in chosen.items()
  }


def split_both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the chosen and the rejected rows, each [B, ...], of an array [2 B, ...] in which they alternate."""
  both = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
  return both[:, 0], both[:, 1]


def tokens_of_pairs(segment_ids_BT: jax.Array, num_pairs: int) -> jax.Array:
  """Returns whether each token belongs to each of the first `num_pairs` segments of its row, [B, T, S] bool."""
  return segment_ids_BT[:, :, None] == 1 + jnp.arange(num_pairs, dtype=segment_ids_BT.dtype)


def sum_by_pair(x_BT: jax.Array, segment_ids_BT: jax.Array, weights_shape: Sequence[int]) -> jax.Array:
  """Returns the sum over the tokens of each pair, in the shape of the weights of the pairs, `weights_shape`.

  If this is [B, S], a pair is a segment of a row; if it is [B], a pair is a row.
  """
  if len(weights_shape) == 1:
    return jnp.sum(x_BT, axis=1)
  return jnp.sum(jnp.where(tokens_of_pairs(segment_ids_BT, weights_shape[1]), x_BT[:, :, None], 0), axis=1)


def last_of_pairs(segment_ids_BT: jax.Array, num_pairs: int) -> jax.Array:
  """Returns the index of the last token of each segment, [B, S] int32; 0 if there is no such segment."""
  places_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
  return jnp.max(jnp.where(tokens_of_pairs(segment_ids_BT, num_pairs), places_T[:, None], 0), axis=1)
