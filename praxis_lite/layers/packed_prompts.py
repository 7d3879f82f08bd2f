"""PackedPrompts: several prompts packed into one row, so that reading them spends little work on padding.

R packed rows, T tokens in each, S prompts in a row, P tokens in a prompt; B = R S prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PackedPrompts(NamedTuple):
  """Where the tokens of each prompt are in packed rows."""

  segment_ids: jax.Array  # [R, T] int32, which prompt of its row a token belongs to, counted from 1; 0 for padding.
  pos: jax.Array  # [R, T] int32, the position of each token in its prompt; -1 for padding.
  place: jax.Array  # [R, S, P] int32, the column that holds each token of a prompt; arbitrary beyond its length.
  lengths: jax.Array  # [R, S] int32 lengths of the prompts; 0 for an unused entry.

  @classmethod
  def make(cls, packing_RT: jax.Array, lengths_RS: jax.Array, num_places: int) -> PackedPrompts:
    """Returns the packed prompts that `packing_RT` describes.

    An entry is s P + p where the row holds token p of its prompt s, and -1 for padding; `num_places` is S P.
    """
    R, S = lengths_RS.shape
    P, T = num_places // S, packing_RT.shape[1]
    column_RT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), packing_RT.shape)
    at_RT = jnp.where(packing_RT < 0, num_places, packing_RT)
    place = jnp.zeros((R, num_places), jnp.int32).at[jnp.arange(R)[:, None], at_RT].set(column_RT, mode='drop')
    is_token = packing_RT >= 0
    return cls(
      jnp.where(is_token, packing_RT // P + 1, 0),
      jnp.where(is_token, packing_RT % P, -1),
      place.reshape(R, S, P),
      lengths_RS,
    )

  @property
  def row_pos(self) -> jax.Array:
    """Positions of the tokens of the unpacked prompts, [B, P]; -1 for padding."""
    P = self.place.shape[-1]
    pos_P = jnp.arange(P, dtype=jnp.int32)
    return jnp.where(pos_P < self.lengths[..., None], pos_P, -1).reshape(-1, P)

  @property
  def last(self) -> jax.Array:
    """The column of the packed row that holds the last token of each prompt, [R, S]."""
    return jnp.take_along_axis(self.place, jnp.maximum(self.lengths - 1, 0)[..., None], axis=2)[..., 0]

  def pack(self, ids_BP: jax.Array) -> jax.Array:
    """Returns the tokens of the prompts as packed rows, [R, T]; 0 for padding."""
    (R, S, P), at_RT = self.place.shape, (self.segment_ids - 1) * ids_BP.shape[1] + self.pos
    ids_RT = jnp.take_along_axis(ids_BP.reshape(R, S * P), jnp.maximum(at_RT, 0), axis=1)
    return jnp.where(self.segment_ids > 0, ids_RT, 0)

  def unpack(self, x: jax.Array) -> jax.Array:
    """Returns x, values of the tokens in packed rows, [R, T, ...], rearranged by prompt, [B, P, ...]."""
    R, S, P = self.place.shape
    index = self.place.reshape(R, S * P, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1).reshape(R * S, P, *x.shape[2:])
