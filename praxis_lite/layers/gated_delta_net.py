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

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.causal_conv import CausalConv
from praxis_lite.layers.delta_rule import DeltaTokens, scan_delta_rule
from praxis_lite.layers.mamba2 import GroupWeightSplit, draw_rates
from praxis_lite.layers.mixers import Axes, Mixer, MixerActivationSplit, pick_entries
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.projections import Projection, split_projection
from praxis_lite.layers.state_space import segment_starts
from praxis_lite.sharding.weights import JointInit, WeightHParams, WeightHParamsCollection

_OWN = frozenset({WeightHParamsCollection.SKIP_REGULARIZATION, WeightHParamsCollection.KEEP_FLOAT32})
_UNIT_EPSILON = 1e-6


class GatedDeltaNet(Mixer):
  """A mixer of the gated delta rule.

  Attributes:
    num_heads: N, heads of values.
    dims_per_head: H.
    num_groups: G, heads of keys and queries, a divisor of N.
    key_dims: S.
    kernel_size: width of the convolutions, which have no biases.
    activation: name of f; see `activations.py`.
    step_range: the least and the largest step, softplus(bias), at the start of training.
    chunk_size: tokens of a chunk, in which the cost is quadratic.
    proj_tpl: template of the children `gate`, `value`, `key`, `query`, `step` (W_a) and `rate` (W_b).
    conv_tpl: template of the children `value_conv`, `key_conv` and `query_conv`.
    norm_tpl: template of the child `norm`, over H.
    out_tpl: template of the child `out`.
    weight_split_dims_mapping: `wt`, [D, N, H], also of the convolutions, the output and the variables [N]; `groups`,
      [D, G, S].
  """

  count_fields = ('chunk_size',)

  num_heads: int = REQUIRED
  dims_per_head: int = 128
  num_groups: int = 1
  key_dims: int = 128
  kernel_size: int = 4
  activation: str = 'silu'
  step_range: tuple[float, float] = (0.001, 0.1)
  chunk_size: int = 64
  proj_tpl: Config = template(Projection)
  conv_tpl: Config = template(CausalConv)
  norm_tpl: Config = template(RMSNorm)
  out_tpl: Config = template(Projection)
  weight_split_dims_mapping: Config = template(GroupWeightSplit)
  activation_split_dims_mapping: Config = template(MixerActivationSplit)

  gate: Projection = child()
  value: Projection = child()
  key: Projection = child()
  query: Projection = child()
  step: Projection = child()
  rate: Projection = child()
  value_conv: CausalConv = child()
  key_conv: CausalConv = child()
  query_conv: CausalConv = child()
  norm: Norm = child()
  out: Projection = child()

  @classmethod
  def set_split(cls, config: Config[Any], *, batch: Axes, length: Axes, data: Axes, mdl: Axes) -> None:
    config.weight_split_dims_mapping.set(wt=(data, mdl, None), groups=(data, None, None))
    # A device scans whole rows: the length is gathered here.
    config.activation_split_dims_mapping.set(blnh=(batch, None, mdl, None), out=(batch, length, None))

  def setup(self) -> None:
    self._check_range('num_heads', 'dims_per_head', 'num_groups', 'key_dims', 'chunk_size', least=1)
    get_activation(self.activation, f'{self.path_name}.activation')
    D, N, H, G, S = self.input_dims, self.num_heads, self.dims_per_head, self.num_groups, self.key_dims
    if N % G:
      raise ConfigError(f'{self.path_name}.num_groups: {G} does not divide num_heads, {N}')
    wt, groups = self.weight_split_dims_mapping.wt, self.weight_split_dims_mapping.groups
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    self._resolve(groups, f'{self.path_name}.weight_split_dims_mapping.groups', rank=3)
    of_heads, of_groups = ((N, H), wt), ((G, S), groups)
    for name, (shape, split) in {
      **{'gate': of_heads, 'value': of_heads, 'key': of_groups, 'query': of_groups},
      **{'step': ((N,), wt), 'rate': ((N,), wt)},
    }.items():
      proj = self.proj_tpl.clone(in_shape=(D,), out_shape=shape)
      self.create_child(name, split_projection(proj, split, (0, 1, 2)[: 1 + len(shape)], rank_in=1))
    for name, (shape, split) in {'value': of_heads, 'key': of_groups, 'query': of_groups}.items():
      conv = self.conv_tpl.clone(shape=shape, kernel_size=self.kernel_size, use_bias=False)
      conv.weight_split_dims_mapping.wt = pick_entries(split, None, 1, 2)
      self.create_child(f'{name}_conv', conv)
    self.create_child('norm', self.norm_tpl.clone(dims=H))
    out = self.out_tpl.clone(in_shape=(N, H), out_shape=(D,))
    self.create_child('out', split_projection(out, wt, (1, 2, 0), rank_in=2))
    draw = functools.partial(draw_rates, N, self.step_range)
    for name in ('log_decay', 'step_bias'):
      weight = WeightHParams(
        (N,), init=JointInit((name,), draw), tensor_split_dims_mapping=pick_entries(wt, 1), collections=_OWN
      )
      self.create_variable(name, weight)

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    gate_BTNH = checkpoint_name(self.shard(self.gate(x_BTD), 'blnh'), 'query_proj')
    value_BTNH, key_BTGS, query_BTGS = (
      self._convolve(conv, proj(x_BTD), segment_ids, pos_BT)
      for proj, conv in ((self.value, self.value_conv), (self.key, self.key_conv), (self.query, self.query_conv))
    )
    value_BTNH = checkpoint_name(self.shard(value_BTNH, 'blnh'), 'value_proj')
    step_BTN = jax.nn.softplus(to_sum_dtype(self.step(x_BTD)) + self.theta.step_bias)
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
    y_BTNH, state_BNSH = scan_delta_rule(tokens, state_BNSH, self.chunk_size)
    if pos_BT is not None:
      self._keep(state_BNSH)
    y_BTNH = self.norm(self.shard(y_BTNH, 'blnh'))
    y_BTNH = (to_sum_dtype(y_BTNH) * jax.nn.silu(to_sum_dtype(gate_BTNH))).astype(y_BTNH.dtype)
    y_BTNH = checkpoint_name(self.shard(y_BTNH, 'blnh'), 'context')
    return checkpoint_name(self.shard(self.out(y_BTNH)), 'out_proj')

  def _convolve(
    self, conv: CausalConv, x: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None
  ) -> jax.Array:
    y = conv(x, segment_ids) if pos_BT is None else conv.extend_step(x, pos_BT)
    return get_activation(self.activation)(y)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    for conv in (self.value_conv, self.key_conv, self.query_conv):
      conv.init_decode_state(batch_size)
    shape = batch_size, self.num_heads, self.key_dims, self.dims_per_head
    self._keep(jnp.zeros(shape, jnp.promote_types(jnp.float32, jnp.dtype(self.fprop_dtype or 'float32'))))

  def _keep(self, state_BNSH: jax.Array) -> None:
    split = self.activation_split_dims_mapping.blnh
    self.update_decode_state('state', self.shard(state_BNSH, pick_entries(split, 0, 2, None, 3)))

  def token_flops(self, length: int) -> TokenFlops:
    N, H, S = self.num_heads, self.dims_per_head, self.key_dims
    chunk = min(length, self.chunk_size)
    return TokenFlops(attention=2.0 * N * chunk * (2 * S + 2 * H) + 6.0 * N * H * S)


def _unit(x: jax.Array, scale: float = 1.0) -> jax.Array:
  """Returns vectors of length `scale`, in their dtype."""
  y = to_sum_dtype(x)
  return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + _UNIT_EPSILON) * scale).astype(x.dtype)
