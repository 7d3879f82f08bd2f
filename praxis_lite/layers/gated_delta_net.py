"""GatedDeltaNet: a layer of the gated delta rule (Yang et al., 2024), as in Qwen3-Next.

    gate = x W_z [N, H],  value = f(conv(x W_v)) [N, H]
    key = unit(f(conv(x W_k))) [G, S],  query = unit(f(conv(x W_q))) / sqrt(S) [G, S]
    decay = -exp(log_decay) softplus(x W_a + bias),  rate = s(x W_b)                              [N]
    out = (norm(rule(value, decay, rate, key, query)) * silu(gate)) W_o

where s is the sigmoid, unit(y) = y / |y|, and the norm is over each head; `delta_rule.py` has the rule.

B batch, T length, D model dims, N heads, G groups of heads with the same keys and queries, H dims of values, S dims of
keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import Config, child, template
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.delta_rule import DeltaTokens, scan_delta_rule
from praxis_lite.layers.grouped_mixer import GroupedMixer
from praxis_lite.layers.normalizations import Norm, RMSNorm, to_units
from praxis_lite.layers.precision import sum_dtype_of, to_sum_dtype
from praxis_lite.layers.projections import Projection
from praxis_lite.layers.state_parts import scan_delta_rule_in_parts
from praxis_lite.layers.state_space import segment_starts

_UNIT_EPSILON = 1e-6


class GatedDeltaNet(GroupedMixer):
  """A mixer of the gated delta rule. Its convolutions and projections have no biases.

  Attributes: the same as for `GroupedMixer`, and
    key_dims: S.
    norm_tpl: template of the child `norm`, over H.
    activation_split_dims_mapping: if `blnh` splits the length, each device scans its part of the sequence, and states
      pass from part to part. The scan then has S more columns per head; see `state_parts.py`.
  """

  _passes_states = True
  _state_split = (0, 2, None, 3)

  dims_per_head: int = 128
  key_dims: int = 128
  norm_tpl: Config = template(RMSNorm)

  gate: Projection = child()
  rate: Projection = child()
  norm: Norm = child()

  def setup(self) -> None:
    N, H = self.num_heads, self.dims_per_head
    self._check_range('key_dims', least=1)
    self._create_parts(self.key_dims, {'gate': (N, H), 'rate': (N,)})
    self.create_child('norm', self.norm_tpl.clone(dims=H))

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    gate_BTNH = checkpoint_name(self.shard(self.gate(x_BTD), 'blnh'), 'query_proj')
    value_BTNH, key_BTGS, query_BTGS = self._read(x_BTD, segment_ids, pos_BT)
    value_BTNH = checkpoint_name(self.shard(value_BTNH, 'blnh'), 'value_proj')
    step_BTN = self._steps(x_BTD)
    rate_BTN = jax.nn.sigmoid(to_sum_dtype(self.rate(x_BTD)))
    state_BNSH = None
    if pos_BT is not None:
      state_BNSH, is_token_BT1 = self.get_decode_state('state'), (pos_BT >= 0)[..., None]
      step_BTN, rate_BTN = (jnp.where(is_token_BT1, x, 0) for x in (step_BTN, rate_BTN))
    tokens = DeltaTokens(
      value_BTNH,
      -step_BTN * jnp.exp(self.theta.log_decay),
      rate_BTN,
      _unit(key_BTGS),
      _unit(query_BTGS, self.key_dims**-0.5),
      segment_starts(segment_ids),
    )
    parts = self._num_parts() if pos_BT is None else 1
    if parts > 1:
      y_BTNH = scan_delta_rule_in_parts(tokens, self.chunk_size, parts, self._shard_parts)
    else:
      y_BTNH, state_BNSH = scan_delta_rule(tokens, state_BNSH, self.chunk_size)
      if pos_BT is not None:
        self._keep(state_BNSH)
    y_BTNH = self.norm(self.shard(y_BTNH, 'blnh'))
    y_BTNH = (to_sum_dtype(y_BTNH) * jax.nn.silu(to_sum_dtype(gate_BTNH))).astype(y_BTNH.dtype)
    y_BTNH = checkpoint_name(self.shard(y_BTNH, 'blnh'), 'context')
    return checkpoint_name(self.shard(self.out(y_BTNH)), 'out_proj')

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    self._start_convolutions(batch_size)
    shape = batch_size, self.num_heads, self.key_dims, self.dims_per_head
    self._keep(jnp.zeros(shape, sum_dtype_of(self.fprop_dtype)))

  def token_flops(self, length: int) -> TokenFlops:
    N, H, S = self.num_heads, self.dims_per_head, self.key_dims
    chunk = min(length, self.chunk_size)
    return TokenFlops(attention=2.0 * N * chunk * (2 * S + 2 * H) + 6.0 * N * H * S)


def _unit(x: jax.Array, scale: float = 1.0) -> jax.Array:
  return (to_units(x, _UNIT_EPSILON) * scale).astype(x.dtype)
