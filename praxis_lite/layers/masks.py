"""Which keys a query attends to: descriptions of masks, and masks as boolean arrays.

`Visibility` says it by rules on positions and by segments, so that attention over blocks makes the mask of a block
alone and skips the blocks that it empties. A mask is boolean, True where a query attends to a key; masks broadcast to
[B, N, T, S] and combine with `&`.

    causal      key s is not after query t: s <= t
    window      the two are less than `window` apart: |t - s| < window
    prefix      the first positions of a row are seen by all queries, whatever `causal` says (prefix-LM)
    segments    query and key have the same segment id

B batch, T length of the queries, S length of the keys.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Visibility:
  """Which keys a query attends to: all rules must allow it. A tree of arrays, so that it passes through transforms.

  Attributes:
    causal, window: see above; they go by the index in the row, not by the position in a segment.
    prefix_B: int32, how many of the first keys of each row are seen by all its queries; with `causal` alone does it
      make a difference. The window still holds.
    segments_BT, key_segments_BS: int32, segment ids of queries and keys; both or neither.
  """

  causal: bool = False
  window: int | None = None
  prefix_B: jax.Array | None = None
  segments_BT: jax.Array | None = None
  key_segments_BS: jax.Array | None = None

  def allows(self, query_T: jax.Array, key_S: jax.Array) -> jax.Array | None:
    """Returns bool, broadcastable to [B, T, S]; None where all is allowed.

    Args:
      query_T, key_S: indices of queries and keys; or of each row, [B, T] and [B, S].
    """
    query_T1, key_1S = query_T[..., :, None], key_S[..., None, :]
    mask = None
    if self.causal:
      mask = key_1S <= query_T1
      if self.prefix_B is not None:
        mask = mask | (key_1S < self.prefix_B[:, None, None])
    if self.window is not None:
      mask = combine_masks(mask, query_T1 - key_1S < self.window)
      if not self.causal or self.prefix_B is not None:
        mask = combine_masks(mask, key_1S - query_T1 < self.window)
    if self.segments_BT is not None and self.key_segments_BS is not None:
      mask = combine_masks(mask, self.segments_BT[:, :, None] == self.key_segments_BS[:, None, :])
    return mask

  def mask(self, query_len: int, key_len: int) -> jax.Array | None:
    """Returns the mask as an array that broadcasts to [B, 1, T, S]; None where all is allowed."""
    mask = self.allows(jnp.arange(query_len), jnp.arange(key_len))
    return None if mask is None else mask.reshape(-1, 1, query_len, key_len)


jax.tree_util.register_dataclass(
  Visibility, data_fields=['prefix_B', 'segments_BT', 'key_segments_BS'], meta_fields=['causal', 'window']
)


def segment_mask(query_segment_ids_BT: jax.Array, key_segment_ids_BS: jax.Array) -> jax.Array:
  """Returns [B, 1, T, S]: a query sees the keys of its own segment; padding, segment 0, sees padding."""
  return (query_segment_ids_BT[:, :, None] == key_segment_ids_BS[:, None, :])[:, None]


def cache_mask(
  query_pos_BT: jax.Array, key_pos_BS: jax.Array, window: int | None = None, prefix_B: jax.Array | None = None
) -> jax.Array:
  """Returns [B, 1, T, S]: a query sees the cached keys at positions up to its own, and those of the prefix.

  Args:
    query_pos_BT: position of each query in its sequence; -1 is padding.
    key_pos_BS: position of the key in each slot of the cache; -1 is an empty slot.
    window: a query sees keys less than this far away; None: however far.
    prefix_B: int32, how many of the first positions of each row all its queries see; None: none.
  """
  seen_BTS = Visibility(causal=True, window=window, prefix_B=prefix_B).allows(query_pos_BT, key_pos_BS)
  assert seen_BTS is not None
  return ((key_pos_BS >= 0)[:, None, :] & seen_BTS)[:, None]


def combine_masks(*masks: jax.Array | None) -> jax.Array | None:
  """Returns the conjunction of the masks that are not None, or None if all of them are."""
  given = [m for m in masks if m is not None]
  return functools.reduce(operator.and_, given) if given else None
