"""DecodingSteps: the interface through which decoding uses a model.

B batch, T tokens in one step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

DecodingState = TypeVar('DecodingState')  # a tree of arrays


class DecodingSteps(Protocol[DecodingState]):
  """A model that predicts the next token of each row from a state, which holds what it has read so far.

  The state is any tree of arrays: caches of keys and values, the hidden state of a recurrence, the output of an
  encoder. The sampler only passes it on. Loops carry it, so its structure, shapes and dtypes must not change.

  Beam search reorders the rows of the state. If rows are not dimension 0 of all its arrays, steps also have a method
  `row_axes(num_rows, num_slots)`. It returns a tree like the state of `start` with these arguments: for each array, the
  dimension of rows, or -1 if all rows share the array. `find_row_axes` finds these dimensions.

  Speculative decoding withdraws wrong guesses. Steps that allow this have an attribute `can_go_back` that is True.
  Then `extend` may be called again for earlier positions: it replaces their tokens, and forgets later ones. Rows may
  have different lengths, and `last_B` may be [B, N], N tokens of each row, for logits [B, N, V].

  Steps may have a method `read_prompts`, with the arguments of `extend`. It is called for whole prompts and a state
  without tokens.

  A coverage penalty needs steps with a method `coverage(state)`, which returns [B, S] float32 for sources of S tokens:
  the attention to each token of the source, summed over the target tokens so far. The attention of a target token sums
  to 1 over the source. For padding, the result is infinity.
  """

  @property
  def max_positions(self) -> int | None:
    """The largest number of tokens of a row that the model can read; None if there is no limit."""
    ...

  def start(self, num_rows: int, num_slots: int) -> DecodingState:
    """Returns the state of rows that have no tokens yet, with room for `num_slots` tokens in each.

    The rows are the prompts of the batch, in order. The state may contain other inputs of these rows, such as the
    output of an encoder.
    """
    ...

  def extend(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    """Reads tokens; returns logits, [B, V], and the new state.

    Args:
      ids_BT: int32, the next tokens of each row: one token, a prompt, or a part of a prompt.
      pos_BT: int32, their positions in the row; -1 is padding, which must not change what the model predicts.
      last_B: int32, the index in [0, T) of the token in each row whose logits are returned.
      state: the state before these tokens.
    """
    ...


def extend_one_by_one(
  extend_one: Callable[[jax.Array, jax.Array, DecodingState], tuple[jax.Array, DecodingState]],
  ids_BT: jax.Array,
  pos_BT: jax.Array,
  last_B: jax.Array,
  state: DecodingState,
) -> tuple[jax.Array, DecodingState]:
  """Implements `DecodingSteps.extend` for a model that reads one token of each row at a time.

  Args:
    extend_one: (ids [B], positions [B], state) -> (logits [B, V], new state). It need not handle padding: rows whose
      token is padding keep their state. All arrays of the state have the batch as dimension 0.
    ids_BT, pos_BT, last_B, state: see `DecodingSteps.extend`.
  """

  def read(
    carry: tuple[jax.Array, DecodingState], column: tuple[jax.Array, ...]
  ) -> tuple[tuple[jax.Array, DecodingState], None]:
    logits_BV, state = carry
    index, ids_B, pos_B = column
    new_logits_BV, new_state = extend_one(ids_B, pos_B, state)
    state = jax.tree.map(lambda new, old: _choose_rows(pos_B >= 0, new, old), new_state, state)
    return (_choose_rows(index == last_B, new_logits_BV, logits_BV), state), None

  shape = jax.eval_shape(extend_one, ids_BT[:, 0], pos_BT[:, 0], state)[0]
  columns = jnp.arange(ids_BT.shape[1]), ids_BT.T, pos_BT.T
  return jax.lax.scan(read, (jnp.zeros(shape.shape, shape.dtype), state), columns)[0]


def prompt_step(
  ids_BT: jax.Array, lengths_B: jax.Array, start: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns `ids_BT`, `pos_BT` and `last_B` of `DecodingSteps.extend` for prompts, or for a chunk of them.

  Args:
    ids_BT: tokens; those after the end of a prompt are arbitrary.
    lengths_B: int32 lengths of the prompts.
    start: position of the first of these tokens.
  """
  column_T = start + jnp.arange(ids_BT.shape[1], dtype=jnp.int32)
  pos_BT = jnp.where(column_T < lengths_B[:, None], column_T, -1)
  known_BT = jnp.where(pos_BT < 0, 0, ids_BT)  # Padding may be an invalid id, whose vector is NaN.
  return known_BT, pos_BT, jnp.clip(lengths_B - 1 - start, 0, ids_BT.shape[1] - 1)


def _choose_rows(condition_B: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns an array with rows of `x` where the condition holds, and rows of `y` elsewhere."""
  return jnp.where(condition_B.reshape(-1, *[1] * (x.ndim - 1)), x, y)
