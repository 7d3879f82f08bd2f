"""Linear recurrences whose state is a vector, computed for all tokens of a row at once.

    state_t = decay_t * state_(t-1) + input_t

Two consecutive steps combine into one of the same form: the decays multiply, and the later decay applies to the earlier
input. This is associative, so a tree of log T products computes all states (Blelloch, 1990).

B batch, T length; `...` are the dimensions of a state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_Pair = tuple[jax.Array, jax.Array]


def scan_states(decay: jax.Array, inputs: jax.Array, state: jax.Array | None = None) -> jax.Array:
  """Returns the state after each token, [B, T, ...].

  Args:
    decay: [B, T, ...], real or complex; 0 forgets the state before a token, as at the start of a segment.
    inputs: [B, T, ...].
    state: [B, ...], the state before the first token; None means zeros.
  """
  if state is not None:
    inputs = inputs.at[:, 0].add(decay[:, 0] * state)
  if inputs.shape[1] == 1:
    return inputs

  def combine(earlier: _Pair, later: _Pair) -> _Pair:
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]

  states: jax.Array = jax.lax.associative_scan(combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)[1]
  return states
