"""Latent attention: keys and values come from one short vector for each token, and only this vector is cached.

    c = norm(x W_c)  [R],  r = rotate(x W_r)  [P]                       the latent vector, and the key of positions
    key = [c W_k, r],  value = c W_v                                    of each head
    query = [x W_q without its last P dims, rotate(the last P)]         from x, or from a separate latent vector
    out = softmax(query . key / sqrt(H)) . value  W_o

Training computes keys and values of all heads. Decoding applies W_k to queries and W_v to results instead:

    query . key = [query W_k^T, rotated query] . [c, r]                 one key [R + P] for all heads, which is cached
    sum of p value = (sum of p c) W_v

So a token takes R + P numbers of the cache for any number of heads, and the first R of them are its value.

B batch, T length, S length of the cache, D model dims, N heads, H dims of queries and keys, P of these rotary, V dims
of values, R latent dims.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.attention_heads import QueryKeyValue
from praxis_lite.layers.attention_spec import AttentionImplementation, AttentionSpec
from praxis_lite.layers.base.facts import InputSource, TokenFlops
from praxis_lite.layers.cached_attention import CachedAttention
from praxis_lite.layers.kv_cache import KVCache
from praxis_lite.layers.masks import AttentionMask
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.projections import Projection, split_projection
from praxis_lite.layers.sequence_parts import SequenceSplit
from praxis_lite.sharding.weights import SplitDimsMapping

_REFUSED = ('combine_qkv', 'qk_norm_tpl', 'kv_input_dims', 'per_dim_scale_tpl', 'value_residual_tpl')


class LatentAttention(MultiHeadAttention):
  """Multi-head latent attention (DeepSeek-V2, 2024).

  `num_kv_heads`, `combine_qkv`, `qk_norm_tpl`, `per_dim_scale_tpl`, `value_residual_tpl` and cross attention are not
  supported. `use_bias` gives biases to `latent` and `query_latent` only, as in DeepSeek's models. The entry of `blkh`
  for heads does not split the cache, which has one head.

  Attributes:
    latent_dims: R.
    query_latent_dims: dims of the latent vector of queries; None computes queries from the input itself.
    dims_per_head: H, including the rotary dims; None means D / N.
    rotary_dims: P; 0 needs `rotary_tpl` to be None.
    value_dims: V, at most H; None means H. In training, values of fewer dims are padded to H.
    latent_norm_tpl: template of the norms of both latent vectors.
    others: see `MultiHeadAttention`. `weight_split_dims_mapping.wt`, [D, N, H], also splits [D, R] and [R, N, H].
  """

  latent_dims: int = REQUIRED
  query_latent_dims: int | None = None
  rotary_dims: int = REQUIRED
  value_dims: int | None = None
  latent_norm_tpl: Config = template(RMSNorm)

  _caches_values: ClassVar[bool] = False

  query_latent: Projection = child()
  query_latent_norm: Norm = child()
  latent: Projection = child()
  latent_norm: Norm = child()

  def input_readers(self) -> tuple[str, ...]:
    return ('latent', 'query' if self.query_latent_dims is None else 'query_latent')

  def input_sources(self) -> tuple[InputSource, ...]:
    return ()

  def _create_projections(self, D: int, N: int, K: int, H: int) -> tuple[int, int]:
    self._check_latent(N, K, H)
    wt, R, P = self.weight_split_dims_mapping.wt, self.latent_dims, self.rotary_dims
    self._cache_heads = 1, R + P
    query_dims = D
    if self.query_latent_dims is not None:
      query_dims = self.query_latent_dims
      down = self.proj_tpl.clone(in_shape=(D,), out_shape=(query_dims,), use_bias=self.use_bias)
      self.create_child('query_latent', split_projection(down, wt, (0, None), rank_in=1))
      self.create_child('query_latent_norm', self.latent_norm_tpl.clone(dims=query_dims))
    latent = self.proj_tpl.clone(in_shape=(D,), out_shape=(R + P,), use_bias=self.use_bias)
    self.create_child('latent', split_projection(latent, wt, (0, None), rank_in=1))
    self.create_child('latent_norm', self.latent_norm_tpl.clone(dims=R))
    V = self.value_dims or H
    for name, in_dims, out_dims in (('query', query_dims, H), ('key', R, H - P), ('value', R, V)):
      proj = self.proj_tpl.clone(in_shape=(in_dims,), out_shape=(N, out_dims), use_bias=False)
      self.create_child(name, split_projection(proj, wt, (0, 1, 2), rank_in=1))
    if self.rotary_tpl is not None:
      self.create_child('rotary', self.rotary_tpl.clone(dims=P))
    return N, V

  def _check_latent(self, N: int, K: int, H: int) -> None:
    self._check_range('latent_dims', 'query_latent_dims', least=1)
    self._check_range('value_dims', least=1, below=H + 1)
    self._check_range('rotary_dims', least=0, below=H)
    for field in _REFUSED:
      if getattr(self, field) not in (None, False, self.input_dims):
        raise ConfigError(f'{self.path_name}.{field}: latent attention does not support it; leave it unset')
    if K != N:
      raise ConfigError(f'{self.path_name}.num_kv_heads: each head has its own keys here; expected None, got {K}')
    if (self.rotary_tpl is None) != (self.rotary_dims == 0):
      raise ConfigError(
        f'{self.path_name}.rotary_dims: {self.rotary_dims}, and rotary_tpl is '
        f'{"None" if self.rotary_tpl is None else "set"}; expected both or neither'
      )

  def _check_cross_attention(self) -> None:
    raise ConfigError(f'{self.path_name}: latent attention has no cross attention; use MultiHeadAttention for it')

  # ---------------------------------------------------------------- parts

  def _spec(self, implementation: AttentionImplementation = 'auto') -> AttentionSpec:
    # The scale is explicit, because a cached key does not have H dims.
    return AttentionSpec(self.logit_scale, self.logit_soft_cap, implementation, self.block_size)

  def _queries(self, x_BTD: jax.Array, pos_BT: jax.Array | None) -> jax.Array:
    """Returns [B, T, N, H]; the last P dims are rotated."""
    if self.query_latent_dims is not None:
      x_BTD = self.query_latent_norm(self.query_latent(x_BTD))
    query_BTNH = self.query(x_BTD)
    if self.rotary_tpl is None:
      return query_BTNH
    plain_BTNh, turned_BTNP = self._parts(query_BTNH)
    return jnp.concatenate([plain_BTNh, self.rotary(turned_BTNP, pos_BT)], axis=-1)

  def _parts(self, query_BTNH: jax.Array) -> list[jax.Array]:
    """Returns two parts of queries: [B, T, N, H - P], and the rotary dims, [B, T, N, P]."""
    return jnp.split(query_BTNH, [query_BTNH.shape[-1] - self.rotary_dims], axis=-1)

  def _latents(self, x_BTD: jax.Array, pos_BT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the latent vectors, [B, T, R], and the keys of positions, [B, T, 1, P]."""
    latent_BTR, turned_BTP = jnp.split(self.latent(x_BTD), [self.latent_dims], axis=-1)
    turned_BT1P = turned_BTP[:, :, None]
    if self.rotary_tpl is not None:
      turned_BT1P = self.rotary(turned_BT1P, pos_BT)
    return self.latent_norm(latent_BTR), turned_BT1P

  def _project(
    self, x_BTD: jax.Array, kv_BSD: jax.Array, pos_BT: jax.Array | None, split: SequenceSplit | None = None
  ) -> QueryKeyValue:
    latent_BTR, turned_BT1P = self._latents(kv_BSD, pos_BT)
    key_BTNh, value_BTNV = self.key(latent_BTR), self.value(latent_BTR)
    turned_BTNP = jnp.broadcast_to(turned_BT1P, (*key_BTNh.shape[:3], self.rotary_dims))
    key_BTNH = jnp.concatenate([key_BTNh, turned_BTNP], axis=-1)
    value_BTNH = jnp.pad(value_BTNV, ((0, 0),) * 3 + ((0, key_BTNH.shape[-1] - value_BTNV.shape[-1]),))
    return self._split_heads((self._queries(x_BTD, pos_BT), key_BTNH, value_BTNH), split)

  def _output(
    self, context_BTNH: jax.Array, gate_BTNH: jax.Array | None, split: SequenceSplit | None = None, **how: Any
  ) -> jax.Array:
    return super()._output(context_BTNH[..., : self.value_dims], gate_BTNH, split, **how)

  def token_flops(self, length: int) -> TokenFlops:
    H = self.dims_per_head or 0
    return TokenFlops(attention=2.0 * self.num_heads * (H + (self.value_dims or H)) * length)

  # ---------------------------------------------------------------- token by token

  def _cache_mapping(self) -> SplitDimsMapping:
    mapping = self.activation_split_dims_mapping.blkh
    return None if mapping is None else (*mapping[:2], None, None)

  def _extend(
    self,
    cached: CachedAttention,
    x_BTD: jax.Array,
    pos_BT: jax.Array,
    cache: KVCache,
    mask: AttentionMask,
    first_BTKH: jax.Array | None = None,
  ) -> jax.Array:
    plain_BTNh, turned_BTNP = self._parts(self._queries(x_BTD, pos_BT))
    query_BTNR = jnp.einsum('BTNh,RNh->BTNR', plain_BTNh, self.key.weight())
    query_BTNC = jnp.concatenate([query_BTNR, turned_BTNP], axis=-1)
    entries = self._entries_of(x_BTD, pos_BT)
    context_BTNC, cache = cached.extend(self.shard(query_BTNC, 'blnh'), *entries, pos_BT, cache, mask)
    self._keep(cache)
    context_BTNR = context_BTNC[..., : self.latent_dims]
    return jnp.einsum('BTNR,RNV->BTNV', context_BTNR, self.value.weight())

  def _entries_of(
    self, x_BTD: jax.Array, pos_BT: jax.Array, heads: QueryKeyValue | None = None
  ) -> tuple[jax.Array, jax.Array]:
    latent_BTR, turned_BT1P = self._latents(x_BTD, pos_BT)
    key_BT1C = jnp.concatenate([latent_BTR[:, :, None], turned_BT1P], axis=-1)
    return key_BT1C, key_BT1C
