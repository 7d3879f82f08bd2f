"""Attention with the relative positions of Transformer-XL (Dai et al., 2019, section 3.3).

    logit(i, j) = scale ((q_i + u) . k_j + (q_i + v) . W e(i - j)),   e(p) = [sin(p r_0), ..., cos(p r_0), ...]

The paper computes the second product for all offsets, and shifts the rows of the result. Here, no array over offsets is
needed: with z = (q_i + v) . W = [z_s, z_c], the identities for sines and cosines of differences give

    z . e(i - j) = [z_c sin(i r) - z_s cos(i r), z_s sin(i r) + z_c cos(i r)] . e(j)

which is an ordinary product of query and key vectors. So positions may be arbitrary, as in packed rows or a cache.

B batch, T length, S length of the keys, D model dims, N heads, K kv heads, H dims per head, R dims of e.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention_heads import QueryKeyValue
from praxis_lite.layers.attention_spec import LogitBias, ProbabilityDropout
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.cached_attention import CachedAttention
from praxis_lite.layers.chunk_memory import MemoryAttention
from praxis_lite.layers.kv_cache import KVCache
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.masks import AttentionMask
from praxis_lite.layers.positions import SinusoidalPositions
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.layers.sequence_parts import SequenceSplit
from praxis_lite.sharding.weights import WeightHParams

_REFUSED = ('rotary_tpl', 'relative_bias_tpl', 'logit_soft_cap', 'context_axis')


class RelativeAttention(MemoryAttention):
  """Self-attention with relative positions and, with a `chunk_length`, the memory of a Transformer-XL.

  Attention is dense. The variables are `relative`, W [R, N, H], `content_bias`, u [N, H], and `position_bias`, v
  [N, H], which are split like the heads of the other weights. `rotary_tpl`, `relative_bias_tpl`, `logit_soft_cap` and
  `context_axis` must be None.

  Attributes: those of `MemoryAttention`, and
    position_dims: R, an even number; None means D.
    position_tpl: template of the child `position`, which computes e.
  """

  _has_array_bias: ClassVar[bool] = True

  position_dims: int | None = None
  position_tpl: Config = template(SinusoidalPositions)

  position: SinusoidalPositions = child()

  def _create_projections(self, D: int, N: int, K: int, H: int) -> tuple[int, int]:
    for field in _REFUSED:
      if getattr(self, field) is not None:
        raise ConfigError(f'{self.path_name}.{field}: relative attention does not support it; set it to None')
    R = self._position_dims
    if R < 2 or R % 2:
      raise ConfigError(f'{self.path_name}.position_dims: expected an even number of at least 2, got {R}')
    sizes = super()._create_projections(D, N, K, H)
    wt = self.weight_split_dims_mapping.wt
    relative = WeightHParams(
      (R, N, H),
      tensor_split_dims_mapping=None if wt is None else wt.pick(None, 1, 2),
      fan_in_axes=(0,),
      fan_out_axes=(1, 2),
    )
    self.create_variable('relative', relative)
    for name in ('content_bias', 'position_bias'):
      self.create_variable(name, bias_weight((N, H), None if wt is None else wt.pick(1, 2)))
    self.create_child('position', self.position_tpl.clone(dims=R))
    return sizes

  @property
  def _position_dims(self) -> int:
    return self.input_dims if self.position_dims is None else self.position_dims

  def _check_cross_attention(self) -> None:
    raise ConfigError(f'{self.path_name}: relative attention has no cross attention; use MultiHeadAttention for it')

  def _attend(
    self,
    heads: QueryKeyValue,
    mask: AttentionMask,
    pos_BT: jax.Array | None,
    dropout: ProbabilityDropout | None,
    split: SequenceSplit | None,
    bias: jax.Array | LogitBias | None = None,
    gate_BTNH: jax.Array | None = None,
  ) -> jax.Array:
    query_BTNH, key_BSKH, value_BSKH = heads
    T, S = query_BTNH.shape[1], key_BSKH.shape[1]
    if isinstance(bias, LogitBias):
      bias = bias.to_array(T, T)
    pos_BT = jnp.arange(T)[None] if pos_BT is None else pos_BT
    logits_BNTT = self._position_logits(self._position_queries(query_BTNH), pos_BT, pos_BT)
    logits_BNTT = logits_BNTT if bias is None else logits_BNTT + bias
    logits_BNTS = jnp.concatenate([logits_BNTT] * (S // T), axis=-1)  # The memory's keys have the same positions.
    heads = query_BTNH + self.theta.content_bias, key_BSKH, value_BSKH
    return super()._attend(heads, mask, pos_BT, dropout, split, logits_BNTS, gate_BTNH)

  def _position_queries(self, query_BTNH: jax.Array) -> jax.Array:
    """Returns scale (q + v) . W, [B, T, N, R]."""
    z_BTNR = jnp.einsum('BTNH,RNH->BTNR', query_BTNH + self.theta.position_bias, self.theta.relative)
    return self.shard(self.logit_scale * z_BTNR, 'blnh')

  def _position_logits(self, z_BTNR: jax.Array, query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
    """Returns z . e(i - j), [B, N, T, S], for positions i of queries and j of keys; see the top of this file."""
    sin_BT1, cos_BT1 = jnp.split(self.position(query_pos_BT)[:, :, None], 2, axis=-1)
    sines_BTN, cosines_BTN = jnp.split(z_BTNR, 2, axis=-1)
    turned_BTNR = jnp.concatenate(
      [cosines_BTN * sin_BT1 - sines_BTN * cos_BT1, sines_BTN * sin_BT1 + cosines_BTN * cos_BT1], axis=-1
    )
    key_BSR = jnp.broadcast_to(self.position(key_pos_BS), (len(z_BTNR), *key_pos_BS.shape[1:], z_BTNR.shape[-1]))
    return jnp.einsum('BTNR,BSR->BNTS', turned_BTNR, key_BSR, preferred_element_type=sum_dtype(turned_BTNR))

  def _cached_attention(self, logit_bias: LogitBias | None = None, sinks: jax.Array | None = None) -> CachedAttention:
    cached = super()._cached_attention(logit_bias, sinks)
    return dataclasses.replace(cached, page_size=None)  # `_extend` computes one bias for all new tokens at once.

  def _extend(
    self,
    cached: CachedAttention,
    x_BTD: jax.Array,
    pos_BT: jax.Array,
    cache: KVCache,
    mask: AttentionMask,
    first_BTKH: jax.Array | None = None,
  ) -> jax.Array:
    query_BTNH, key_BTKH, value_BTKH = self._mix_values(self._project(x_BTD, x_BTD, pos_BT), first_BTKH)
    z_BTNR, shared = self._position_queries(query_BTNH), cached.bias

    def bias(query_pos_BT: jax.Array, key_pos_BS: jax.Array) -> jax.Array:
      logits_BNTS = self._position_logits(z_BTNR, query_pos_BT, key_pos_BS)
      return logits_BNTS if shared is None else logits_BNTS + shared(query_pos_BT, key_pos_BS)

    query_BTNH += self.theta.content_bias
    cached = dataclasses.replace(cached, bias=bias)
    context_BTNH, cache = cached.extend(query_BTNH, key_BTKH, value_BTKH, pos_BT, cache, mask)
    self._keep(cache)
    return context_BTNH

  def token_flops(self, length: int) -> TokenFlops:
    flops = super().token_flops(length)
    return flops._replace(attention=flops.attention + 2.0 * self.num_heads * self._position_dims * length)
