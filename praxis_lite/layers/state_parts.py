"""Recurrences over sequences that a mesh axis splits: each device scans its part, and states pass from part to part.

    out, last = scan of each part, from a state of zeros                       all parts at once
    before_(p+1) = kept_p before_p + last_p                                    states only, on each device
    out_t += contribution of before_p at token t

where kept_p says how much of the state before part p is left after part p. For state space models and RG-LRU, it is a
factor. For the gated delta rule, it is a matrix [S, S]; to compute it, the scan starts from a state with a unit matrix
as further columns.
So the devices exchange one state per part, whatever the length. Parts are a dimension P of the arrays, which the mesh
axis splits; the compiler inserts the gather of states.

B batch, T length, P parts, L tokens of a part, N heads, G groups of heads, H dims per head, S dims of the state,
C = H + S columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.layers.delta_rule import DeltaTokens, scan_delta_rule
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.layers.state_space import StateTokens, expand_groups, scan_in_chunks, scan_states

# Constrains an array to be split over the mesh, given a letter for each dimension, such as 'P'; '' for no split.
ShardParts = Callable[[jax.Array, tuple[str, ...]], jax.Array]
_TokensT = TypeVar('_TokensT', StateTokens, DeltaTokens)


def scan_in_parts(tokens: StateTokens, chunk: int, num_parts: int, shard: ShardParts) -> jax.Array:
  """Returns the outputs of `scan_in_chunks`, [B, T, N, H], from a state of zeros."""
  T, N = tokens.value.shape[1:3]
  parts = _cut_tokens(tokens, num_parts, shard)
  scan = jax.vmap(lambda part: scan_in_chunks(part, None, chunk), in_axes=1, out_axes=1)
  out_BPLNH, last_BPNHS = scan(parts)
  left_BPLN = jnp.exp(jnp.cumsum(parts.decay, axis=2))
  if parts.starts is not None:
    left_BPLN = jnp.where(jnp.cumsum(parts.starts, axis=2)[..., None] == 0, left_BPLN, 0)
  before_BPNHS = _pass_on(left_BPLN[:, :, -1, :, None, None], last_BPNHS, ('B', 'P', 'N', '', ''), shard)
  query_BPLNS = expand_groups(parts.query, 3, N)
  carried_BPLNH = jnp.einsum(
    'BPLNS,BPNHS->BPLNH', query_BPLNS, before_BPNHS.astype(query_BPLNS.dtype), preferred_element_type=left_BPLN.dtype
  )
  out_BPLNH = (out_BPLNH + carried_BPLNH * left_BPLN[..., None]).astype(out_BPLNH.dtype)
  return _join(out_BPLNH, T)


def scan_states_in_parts(decay: jax.Array, inputs: jax.Array, num_parts: int, shard: ShardParts) -> jax.Array:
  """Returns the states of `scan_states`, [B, T, N, S], from a state of zeros; takes the same arguments."""
  T, letters = inputs.shape[1], ('B', 'P', '', 'N', '')
  decay, inputs = (shard(_cut(x, num_parts), letters) for x in (jnp.broadcast_to(decay, inputs.shape), inputs))
  states = jax.vmap(scan_states, in_axes=1, out_axes=1)(decay, inputs)
  left = jnp.cumprod(decay, axis=2)
  before = _pass_on(left[:, :, -1], states[:, :, -1], ('B', 'P', 'N', ''), shard)
  return _join(states + left * before[:, :, None], T)


def scan_delta_rule_in_parts(tokens: DeltaTokens, chunk: int, num_parts: int, shard: ShardParts) -> jax.Array:
  """Returns the outputs of `scan_delta_rule`, [B, T, N, H], from a state of zeros; see also `scan_in_parts`."""
  (_, T, N, H), S, sums = tokens.value.shape, tokens.key.shape[-1], sum_dtype(tokens.value)
  wide_BTNC = jnp.pad(tokens.value, ((0, 0), (0, 0), (0, 0), (0, S)))
  parts = _cut_tokens(tokens._replace(value=wide_BTNC), num_parts, shard)
  # Each part is scanned from a state of H + S columns. The H columns of zeros become last_p, the part's own state. The
  # other S columns are a unit matrix, and become kept_p.
  first_SC = jnp.concatenate([jnp.zeros((S, H), sums), jnp.eye(S, dtype=sums)], axis=1)
  first_BNSC = jnp.broadcast_to(first_SC, (len(tokens.value), N, *first_SC.shape))
  scan = jax.vmap(lambda part: scan_delta_rule(part, first_BNSC, chunk), in_axes=1, out_axes=1)
  out_BPLNC, last_BPNSC = scan(parts)
  last_PBNSC = jnp.moveaxis(shard(last_BPNSC, ('B', '', 'N', '', '')), 1, 0)

  def pass_on(before_BNSH: jax.Array, last_BNSC: jax.Array) -> tuple[jax.Array, jax.Array]:
    own_BNSH, kept_BNSS = jnp.split(last_BNSC, [H], axis=-1)
    return own_BNSH + jnp.matmul(kept_BNSS, before_BNSH, precision='highest'), before_BNSH

  _, before_PBNSH = jax.lax.scan(pass_on, jnp.zeros_like(last_PBNSC[0, ..., :H]), last_PBNSC)
  before_BPNSH = shard(jnp.moveaxis(before_PBNSH, 0, 1), ('B', 'P', 'N', '', ''))
  own_BPLNH, read_BPLNS = jnp.split(out_BPLNC, [H], axis=-1)
  carried_BPLNH = jnp.einsum(
    'BPLNS,BPNSH->BPLNH', read_BPLNS, before_BPNSH.astype(read_BPLNS.dtype), preferred_element_type=sums
  )
  return _join((own_BPLNH + carried_BPLNH).astype(own_BPLNH.dtype), T)


def _cut_tokens(tokens: _TokensT, num_parts: int, shard: ShardParts) -> _TokensT:
  """Returns the tokens in parts, [B, P, L, ...], split over the mesh."""
  parts = {name: _cut(x, num_parts) for name, x in tokens._asdict().items() if x is not None}
  head = {'value': 'N', 'decay': 'N', 'rate': 'N'}  # The letter of dimension 3; keys and queries have '' there.
  letters = {name: ('B', 'P', '', head.get(name, ''), '')[: x.ndim] for name, x in parts.items()}
  return tokens._replace(**{name: shard(x, letters[name]) for name, x in parts.items()})


def _cut(x: jax.Array, num_parts: int) -> jax.Array:
  """Returns x [B, T, ...], padded with zeros, as [B, P, L, ...]."""
  size = -(-x.shape[1] // num_parts)
  x = jnp.pad(x, ((0, 0), (0, num_parts * size - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
  return x.reshape(x.shape[0], num_parts, size, *x.shape[2:])


def _join(x: jax.Array, length: int) -> jax.Array:
  """The inverse of `_cut`: returns [B, T, ...] for [B, P, L, ...]."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _pass_on(kept: jax.Array, last: jax.Array, letters: tuple[str, ...], shard: ShardParts) -> jax.Array:
  """Returns the state before each part, [B, P, ...], from `kept` and `last` of each part; see the top of this file."""
  everywhere = tuple('' if letter == 'P' else letter for letter in letters)
  kept, last = shard(jnp.broadcast_to(kept, last.shape), everywhere), shard(last, everywhere)
  after = scan_states(kept, last)
  return shard(jnp.concatenate([jnp.zeros_like(after[:, :1]), after[:, :-1]], axis=1), letters)
