"""Cross attention: targets attend to sources, in one pass, or token by token with keys and values computed once.

B batch, T length of the targets, S length of the sources, D model dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.decode_caches import read_cache
from praxis_lite.layers.masks import AttentionMask, Band, Paddings


class CrossAttention(MultiHeadAttention):
  """Attention of targets to sources, such as the output of an encoder (Vaswani et al., 2017).

  It is called with `x_BTD`, the targets, and `kv_BSD`, the sources. Sources have no positions here: their encoder has
  put these into them. So `causal`, `sliding_window`, `local_chunk`, `rotary_tpl` and `relative_bias_tpl` are not
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
    """Returns which sources a target attends to: those of its segment, or without segments of targets, all but padding.

    The arguments are the same as for `__call__`; positions and prefixes have no effect.
    """
    if segment_ids is None and kv_segment_ids is not None:
      return Paddings((kv_segment_ids == 0).astype(jnp.int32))
    return super().attention_mask(segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)

  def read_source(self, kv_BSD: jax.Array, kv_segment_ids: jax.Array | None = None) -> None:
    """Computes keys and values of the sources, and keeps them for `attend_to_source`.

    Args:
      kv_BSD: the sources, one in each row.
      kv_segment_ids: [B, S] int32, 0 for padding; None means that there is none.
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
    """Returns [B, T, D] for the next targets, from the keys and values that `read_source` has kept.

    Args:
      x_BTD: the next token (T = 1) or tokens of each target.
      pos_BT: int32, -1 for padding, whose results are not used.
    """
    if not self.decode_state:
      raise ConfigError(f'{self.path_name}: attend_to_source needs the decode state that read_source makes')
    query_BTNH = self.query(x_BTD)
    if self.qk_norm_tpl is not None:
      query_BTNH = self._normalize(self.query_norm, query_BTNH)
    cached = self._cached_attention(sinks=self._sinks())
    return self._output(
      cached.attend(self.shard(self._scale_queries(query_BTNH), 'blnh'), pos_BT, read_cache(self), Band())
    )
