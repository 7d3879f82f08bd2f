"""Differential attention: the difference of two softmaxes, which cancels what both attend to (Ye et al., 2024).

    out_n  = norm(softmax(q_n1 . k_n1 / sqrt(H)) v_n - lambda softmax(q_n2 . k_n2 / sqrt(H)) v_n) (1 - lambda_init)
    lambda = exp(lq_1 . lk_1) - exp(lq_2 . lk_2) + lambda_init

Values have 2 H dims, so that there are as many weights, and as large a cache, as with ordinary heads. To masks, caches
and implementations of attention, the two keys of a head look like one key of 2 H dims. A query for one of the two keys
has zeros in the half that belongs to the other.

B batch, T length, S length of keys and values, D model dims, N softmaxes, K keys, H dims per query and key; M = K / 2
kv heads, G = N / K, J = 2 H.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.attention_heads import QueryKeyValue
from praxis_lite.layers.attention_spec import AttentionImplementation, AttentionSpec
from praxis_lite.layers.base.facts import InputSource, TokenFlops
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.sequence_parts import SequenceSplit
from praxis_lite.sharding.weights import WeightHParams, WeightInit

_LAMBDA_STD = 0.1


class DifferentialAttention(MultiHeadAttention):
  """Attention whose heads subtract the results of two softmaxes; see the top of this file.

  Attributes:
    num_heads: N, the number of softmaxes, twice the number of differences. 2 G = 2 N / K query heads share a value; of
      these, the result of head G + g is subtracted from that of head g, for g = 0, ..., G - 1.
    num_kv_heads: K, the number of keys: even, and a divisor of N. None means N.
    dims_per_head: H; None means D / N.
    lambda_init: the part of lambda that is not learned. The paper uses 0.8 - 0.6 exp(-0.3 l) in layer l = 0, 1, ...,
      and finds 0.8 equally good.
    head_norm_tpl: template of the child `head_norm`, which normalizes each difference over its 2 H dims.
    others: see `MultiHeadAttention`.
  """

  lambda_init: float = 0.8
  head_norm_tpl: Config = template(RMSNorm)

  head_norm: Norm = child()

  def _create_projections(self, D: int, N: int, K: int, H: int) -> tuple[int, int]:
    if K % 2:
      raise ConfigError(f'{self.path_name}.num_kv_heads: two keys share a value here; expected an even number, got {K}')
    self._check_range('lambda_init', least=0, below=1)
    super()._create_projections(D, N, K, H)
    self._kv_heads = self._cache_heads = K // 2, 2 * H
    for name in ('lambda_query', 'lambda_key'):
      self.create_variable(name, WeightHParams((2, H), WeightInit.Gaussian(_LAMBDA_STD)))
    self.create_child('head_norm', self.head_norm_tpl.clone(dims=2 * H))
    return N // 2, 2 * H

  def input_sources(self) -> tuple[InputSource, ...]:
    return ()  # A norm lies between values and outputs.

  def _spec(self, implementation: AttentionImplementation = 'auto') -> AttentionSpec:
    # The scale is explicit, because queries have H more dims, which are zeros.
    return AttentionSpec(self.logit_scale, self.logit_soft_cap, implementation, self.block_size)

  def _scale_queries(self, query_BTNH: jax.Array) -> jax.Array:
    """Returns [B, T, N, 2 H]: H zeros after a query of the first softmax, and before a query of the second."""
    B, T, N, H = query_BTNH.shape
    query_BTM2G1H = super()._scale_queries(query_BTNH).reshape(B, T, self._kv_heads[0], 2, -1, 1, H)
    half_212 = jnp.eye(2, dtype=query_BTNH.dtype)[:, None, :, None]
    return (query_BTM2G1H * half_212).reshape(B, T, N, 2 * H)

  def _split_heads(self, heads: QueryKeyValue, split: SequenceSplit | None) -> QueryKeyValue:
    query_BTNH, key_BSKH, value_BSKH = heads
    key_BSMJ, value_BSMJ = (x.reshape(*x.shape[:2], *self._kv_heads) for x in (key_BSKH, value_BSKH))
    return super()._split_heads((query_BTNH, key_BSMJ, value_BSMJ), split)

  def _output(
    self, context_BTNH: jax.Array, gate_BTNH: jax.Array | None, split: SequenceSplit | None = None, **how: Any
  ) -> jax.Array:
    B, T, N, J = context_BTNH.shape
    first_BTMGJ, second_BTMGJ = jnp.moveaxis(context_BTNH.reshape(B, T, self._kv_heads[0], 2, -1, J), 3, 0)
    factor = self._read_lambda().astype(context_BTNH.dtype)
    difference = (first_BTMGJ - factor * second_BTMGJ).reshape(B, T, N // 2, J)
    out = self.head_norm(difference) * (1 - self.lambda_init)
    return super()._output(out, gate_BTNH, split, **how)

  def _read_lambda(self) -> jax.Array:
    """Returns lambda, a scalar, in float32 or wider."""
    wide = jnp.promote_types(self.theta.lambda_query.dtype, jnp.float32)
    query_2H, key_2H = self.theta.lambda_query.astype(wide), self.theta.lambda_key.astype(wide)
    first, second = jnp.exp(jnp.sum(query_2H * key_2H, axis=-1))
    return first - second + self.lambda_init

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops(attention=6.0 * self.num_heads * (self.dims_per_head or 0) * length)
