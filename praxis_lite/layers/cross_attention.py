"""Cross attention: targets attend to sources, in one pass, or token by token with keys and values computed once.

B batch, T length of the targets, S length of the sources, D model dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, insert, leaves_by_path, node_at
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.decode_caches import place_caches, places_of_caches, read_cache
from praxis_lite.layers.dot_product import attention_probs
from praxis_lite.layers.kv_cache import KVCache
from praxis_lite.layers.masks import AttentionMask, Band, Paddings

_CHILD = 'cross_attention'  # The name of a `CrossAttention` among the children of a block.
COVERED = 'covered'  # In the decode state, [B, S] float32: how much targets have attended to each token of the source.


class CrossAttention(MultiHeadAttention):
  """Attention of targets to sources, such as the output of an encoder (Vaswani et al., 2017).

  It is called with `x_BTD`, the targets, and `kv_BSD`, the sources. It adds no positions, because the encoder has
  already added them. So `causal`, `sliding_window`, `local_chunk`, `rotary_tpl` and `relative_bias_tpl` are not
  supported, nor is `combine_qkv`. A `context_axis` splits the lengths of both targets and sources.

  Attributes: the same as for `MultiHeadAttention`.
  """

  def setup(self) -> None:
    self._check_cross_attention()
    super().setup()
    self._has_bias = False

  def attention_mask(
    self,
    *,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> AttentionMask:
    """Returns the mask: a target attends to the sources of its segment or, without segments, to all except padding.

    The arguments are the same as for `__call__`; positions and prefixes have no effect.
    """
    if segment_ids is None and kv_segment_ids is not None:
      return Paddings((kv_segment_ids == 0).astype(jnp.int32))
    return super().attention_mask(segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)

  def read_source(self, kv_BSD: jax.Array, kv_segment_ids: jax.Array | None = None) -> None:
    """Computes keys and values of the sources, and keeps them for `attend_to_source`.

    Args:
      kv_BSD: the sources, one in each row.
      kv_segment_ids: [B, S] int32, 0 for padding; None means no padding.
    """
    B, S, _ = kv_BSD.shape
    key_BSKH, value_BSKH = self.key(kv_BSD), self.value(kv_BSD)
    if self.qk_norm_tpl is not None:
      key_BSKH = self._normalize(self.key_norm, key_BSKH)
    pos_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    if kv_segment_ids is not None:
      pos_BS = jnp.where(kv_segment_ids == 0, -1, pos_BS)
    cached = self._cached_attention()
    empty = cached.empty(B, S, *self._kv_heads)
    self._keep(cached.write(empty, self.shard(key_BSKH, 'blkh'), self.shard(value_BSKH, 'blkh'), pos_BS))

  def attend_to_source(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
    """Returns [B, T, D] for the next targets, from the keys and values that `read_source` has stored.

    Args:
      x_BTD: the next token (T = 1) or tokens of each target.
      pos_BT: int32, -1 for padding, whose results are not used.
    """
    if not self.decode_state:
      raise ConfigError(f'{self.path_name}: attend_to_source needs the decode state that read_source makes')
    query_BTNH = self.query(x_BTD)
    if self.qk_norm_tpl is not None:
      query_BTNH = self._normalize(self.query_norm, query_BTNH)
    query_BTNH, cache = self.shard(self._scale_queries(query_BTNH), 'blnh'), read_cache(self)
    if (covered := self.get_decode_state(COVERED)) is not None:
      new_BS = self._attention_to_each(query_BTNH, pos_BT, cache.unstack())
      after = covered + new_BS if cache.turn is None else covered.at[cache.turn].add(new_BS)
      self.update_decode_state(COVERED, after)
    context_BTNH = self._cached_attention(sinks=self._sinks()).attend(query_BTNH, pos_BT, cache, Band())
    return self._output(context_BTNH, self._gate(x_BTD))

  def _attention_to_each(self, query_BTNH: jax.Array, pos_BT: jax.Array, cache: KVCache) -> jax.Array:
    """Returns the probability of each source token, averaged over heads and summed over targets, [B, S]."""
    key_BSKH, _ = cache.read(query_BTNH.dtype)
    is_source_B11S = (cache.pos >= 0)[:, None, None, :]
    probs_BKGTS = attention_probs(query_BTNH, key_BSKH, is_source_B11S, None, self._sinks(), self._spec())
    probs_BTS = jnp.mean(probs_BKGTS.astype(jnp.float32), axis=(1, 2))
    return jnp.sum(jnp.where((pos_BT >= 0)[..., None], probs_BTS, 0.0), axis=1)


def place_targets(state: NestedDict, num_slots: int) -> NestedDict:
  """Returns the state with placed caches of targets (see `place_caches`); caches of sources stay as they are."""
  return place_caches(state, num_slots, _CHILD)


def start_coverage(state: NestedDict) -> NestedDict:
  """Returns a decoder's state, in which all `CrossAttention` layers count how much each source token is attended to."""
  for place in places_of_caches(state):
    if place[-1] == _CHILD:
      is_source = node_at(state, place)['pos'] >= 0
      state = insert(state, (*place, COVERED), jnp.where(is_source, 0.0, jnp.inf))
  return state


def read_coverage(state: NestedDict, num_layers: int) -> jax.Array:
  """Returns the coverage since `start_coverage`, averaged over a decoder's layers, [B, S]; infinity for padding."""
  counts = [x for path, x in leaves_by_path(state).items() if path[-1] == COVERED]
  return sum((jnp.sum(x, axis=tuple(range(x.ndim - 2))) for x in counts), jnp.float32(0)) / num_layers
