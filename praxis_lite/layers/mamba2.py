"""Mamba-2: a state space model in chunks of matrix products (Dao and Gu, 2024, arXiv:2405.21060).

    gate = x W_z [N, H],  value = f(conv(x W_x)) [N, H],  key = f(conv(x W_B)) [G, S],  query = f(conv(x W_C)) [G, S]
    step = softplus(x W_dt + bias) [N]
    state = exp(-step exp(A)) state + step value key^T,  y = state query + D value
    out = norm(y * silu(gate)) W_o

The paper calls the query C and the key B. Keys and queries are shared by the N / G heads of a group.

B batch, T length, D model dims, N heads, G groups, H dims per head, S dims of the state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.causal_conv import CausalConv
from praxis_lite.layers.mixers import Axes, Mixer, MixerActivationSplit, pick_entries
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.projections import Projection, split_projection
from praxis_lite.layers.state_parts import scan_in_parts
from praxis_lite.layers.state_space import Tokens, scan_in_chunks, segment_starts
from praxis_lite.sharding.weights import (
  JointInit,
  SplitDimsMapping,
  WeightHParams,
  WeightHParamsCollection,
  WeightInit,
)

_OWN = frozenset({WeightHParamsCollection.SKIP_REGULARIZATION, WeightHParamsCollection.KEEP_FLOAT32})
_LARGEST_DECAY = 16.0


class GroupWeightSplit(WeightSplit):
  """`wt`: weights of heads, [D, N, H]; `groups`: weights of keys and queries, [D, G, S]."""

  groups: SplitDimsMapping = None


class GatedRMSNorm(Layer):
  """y = norm(x * silu(gate)) * scale, where each group of heads is normalized together.

  Attributes:
    num_heads: N.
    dims_per_head: H.
    num_groups: a divisor of N; the N / num_groups heads of a group share a mean square.
    epsilon: added to the mean square.
    weight_split_dims_mapping: `wt`, [N, H], of the scale.
  """

  num_heads: int = REQUIRED
  dims_per_head: int = REQUIRED
  num_groups: int = 1
  epsilon: float = 1e-5
  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self) -> None:
    scale = WeightHParams(
      (self.num_heads, self.dims_per_head),
      init=WeightInit.Constant(1.0),
      tensor_split_dims_mapping=self.weight_split_dims_mapping.wt,
      collections=frozenset({WeightHParamsCollection.SKIP_REGULARIZATION}),
    )
    self.create_variable('scale', scale)

  def __call__(self, x_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    """Returns [B, T, N, H] for two arrays of this shape."""
    x_BTNH = to_sum_dtype(x_BTNH) * jax.nn.silu(to_sum_dtype(gate_BTNH))
    square_BTN = jnp.mean(jnp.square(x_BTNH), axis=-1)
    if self.num_groups == 1:
      square_BTN = jnp.mean(square_BTN, axis=-1, keepdims=True)
    else:  # A product with a constant, because a reshape would move heads that are split over a mesh.
      group_N = np.arange(self.num_heads) * self.num_groups // self.num_heads
      same_NN = (group_N[:, None] == group_N).astype(square_BTN.dtype) * self.num_groups / self.num_heads
      square_BTN = jnp.einsum('BTM,MN->BTN', square_BTN, same_NN, precision='highest')
    y_BTNH = x_BTNH * jax.lax.rsqrt(square_BTN + self.epsilon)[..., None]
    return self.shard((y_BTNH * self.theta.scale).astype(self.fprop_dtype))


class Mamba2(Mixer):
  """The mixer of Mamba-2.

  Attributes:
    num_heads: N.
    dims_per_head: H.
    state_dims: S.
    num_groups: G, a divisor of N.
    kernel_size: width of the convolutions.
    activation: name of f; see `activations.py`.
    use_bias: whether the projections have biases.
    use_conv_bias: whether the convolutions have biases.
    step_range: the least and the largest step at the start of training; steps are drawn between them.
    step_limits: bounds of the steps.
    chunk_size: tokens of a chunk, in which the cost is quadratic; see `state_space.py`.
    proj_tpl: template of the children `gate`, `value`, `key`, `query` and `step`.
    conv_tpl: template of the children `value_conv`, `key_conv` and `query_conv`.
    norm_tpl: template of the child `norm`.
    out_tpl: template of the child `out`.
    weight_split_dims_mapping: `wt`, [D, N, H]; the convolutions, the norm, the output and the variables [N] are split
      along the same dimensions. `groups`, [D, G, S].
    activation_split_dims_mapping: `blnh`, [B, T, N, H]; if it splits T, each device scans its part of the sequence,
      and states pass from part to part, see `state_parts.py`. `out`: [B, T, D].
  """

  count_fields = ('chunk_size',)
  _passes_states = True

  num_heads: int = REQUIRED
  dims_per_head: int = 64
  state_dims: int = 128
  num_groups: int = 1
  kernel_size: int = 4
  activation: str = 'silu'
  use_bias: bool = False
  use_conv_bias: bool = True
  step_range: tuple[float, float] = (0.001, 0.1)
  step_limits: tuple[float, float] = (0.0, math.inf)
  chunk_size: int = 256
  proj_tpl: Config = template(Projection)
  conv_tpl: Config = template(CausalConv)
  norm_tpl: Config = template(GatedRMSNorm)
  out_tpl: Config = template(Projection)
  weight_split_dims_mapping: Config = template(GroupWeightSplit)
  activation_split_dims_mapping: Config = template(MixerActivationSplit)

  gate: Projection = child()
  value: Projection = child()
  key: Projection = child()
  query: Projection = child()
  step: Projection = child()
  value_conv: CausalConv = child()
  key_conv: CausalConv = child()
  query_conv: CausalConv = child()
  norm: GatedRMSNorm = child()
  out: Projection = child()

  @classmethod
  def set_split(cls, config: Config[Any], *, batch: Axes, length: Axes, data: Axes, mdl: Axes) -> None:
    config.weight_split_dims_mapping.set(wt=(data, mdl, None), groups=(data, None, None))
    config.activation_split_dims_mapping.set(blnh=(batch, length, mdl, None), out=(batch, length, None))

  def setup(self) -> None:
    D, N, H, G, S = self.input_dims, self.num_heads, self.dims_per_head, self.num_groups, self.state_dims
    self._check_sizes()
    wt, groups = self.weight_split_dims_mapping.wt, self.weight_split_dims_mapping.groups
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    self._resolve(groups, f'{self.path_name}.weight_split_dims_mapping.groups', rank=3)
    for name, shape, split in (
      ('gate', (N, H), wt),
      ('value', (N, H), wt),
      ('key', (G, S), groups),
      ('query', (G, S), groups),
      ('step', (N,), wt),
    ):
      proj = self.proj_tpl.clone(in_shape=(D,), out_shape=shape, use_bias=self.use_bias)
      self.create_child(name, split_projection(proj, split, (0, 1, 2)[: 1 + len(shape)], rank_in=1))
      if name in ('value', 'key', 'query'):
        conv = self.conv_tpl.clone(shape=shape, kernel_size=self.kernel_size, use_bias=self.use_conv_bias)
        conv.weight_split_dims_mapping.wt = pick_entries(split, None, 1, 2)
        self.create_child(f'{name}_conv', conv)
    norm = self.norm_tpl.clone(num_heads=N, dims_per_head=H, num_groups=G)
    norm.weight_split_dims_mapping.wt = pick_entries(wt, 1, 2)
    self.create_child('norm', norm)
    out = self.out_tpl.clone(in_shape=(N, H), out_shape=(D,), use_bias=self.use_bias)
    self.create_child('out', split_projection(out, wt, (1, 2, 0), rank_in=2))
    draw = functools.partial(draw_rates, N, self.step_range)
    for name, init in (('log_decay', None), ('step_bias', None), ('skip', WeightInit.Constant(1.0))):
      weight = WeightHParams(
        (N,),
        init=init or JointInit((name,), draw),
        tensor_split_dims_mapping=pick_entries(wt, 1),
        collections=_OWN,
      )
      self.create_variable(name, weight)

  def _check_sizes(self) -> None:
    self._check_range('num_heads', 'dims_per_head', 'state_dims', 'num_groups', 'chunk_size', least=1)
    get_activation(self.activation, f'{self.path_name}.activation')
    if self.num_heads % self.num_groups:
      raise ConfigError(f'{self.path_name}.num_groups: {self.num_groups} does not divide num_heads, {self.num_heads}')
    for field, (low, high) in (('step_range', self.step_range), ('step_limits', self.step_limits)):
      if not 0 <= low <= high or (field == 'step_range' and not (low > 0 and high < math.inf)):
        raise ConfigError(
          f'{self.path_name}.{field}: expected two numbers, the least and the largest step, got {(low, high)}'
        )

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    gate_BTNH = checkpoint_name(self.shard(self.gate(x_BTD), 'blnh'), 'query_proj')
    value_BTNH, key_BTGS, query_BTGS = (
      self._convolve(conv, proj(x_BTD), segment_ids, pos_BT)
      for proj, conv in (
        (self.value, self.value_conv),
        (self.key, self.key_conv),
        (self.query, self.query_conv),
      )
    )
    value_BTNH = checkpoint_name(self.shard(value_BTNH, 'blnh'), 'value_proj')
    step_BTN = jax.nn.softplus(to_sum_dtype(self.step(x_BTD)) + self.theta.step_bias)
    step_BTN = jnp.clip(step_BTN, *self.step_limits)
    state_BNHS = None
    if pos_BT is not None:
      state_BNHS = self.get_decode_state('state')
      step_BTN = jnp.where(pos_BT[..., None] >= 0, step_BTN, 0)  # A step of 0 leaves the state as it is.
    decay_BTN = -step_BTN * jnp.exp(self.theta.log_decay)
    scaled_BTNH = (value_BTNH * step_BTN[..., None]).astype(value_BTNH.dtype)
    tokens = Tokens(scaled_BTNH, decay_BTN, key_BTGS, query_BTGS, segment_starts(segment_ids))
    parts = self._num_parts() if pos_BT is None else 1
    if parts > 1:
      y_BTNH = scan_in_parts(tokens, self.chunk_size, parts, self._shard_parts)
    else:
      y_BTNH, state_BNHS = scan_in_chunks(tokens, state_BNHS, self.chunk_size)
    if pos_BT is not None:
      assert state_BNHS is not None
      self._keep(state_BNHS)
    y_BTNH = self.shard((y_BTNH + self.theta.skip[:, None] * value_BTNH).astype(value_BTNH.dtype), 'blnh')
    y_BTNH = checkpoint_name(self.norm(y_BTNH, gate_BTNH), 'context')
    return checkpoint_name(self.shard(self.out(y_BTNH)), 'out_proj')

  def _convolve(
    self, conv: CausalConv, x: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None
  ) -> jax.Array:
    y = conv(x, segment_ids) if pos_BT is None else conv.extend_step(x, pos_BT)
    return get_activation(self.activation)(y)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    for conv in (self.value_conv, self.key_conv, self.query_conv):
      conv.init_decode_state(batch_size)
    shape = batch_size, self.num_heads, self.dims_per_head, self.state_dims
    self._keep(jnp.zeros(shape, jnp.promote_types(jnp.float32, jnp.dtype(self.fprop_dtype or 'float32'))))

  def _keep(self, state_BNHS: jax.Array) -> None:
    split = self.activation_split_dims_mapping.blnh
    self.update_decode_state('state', self.shard(state_BNHS, pick_entries(split, 0, 2, 3, None)))

  def token_flops(self, length: int) -> TokenFlops:
    N, H, G, S = self.num_heads, self.dims_per_head, self.num_groups, self.state_dims
    chunk = min(length, self.chunk_size)
    return TokenFlops(attention=2.0 * chunk * (G * S + N * H) + 4.0 * N * H * S)


def draw_rates(N: int, step_range: tuple[float, float], key: jax.Array) -> Mapping[Path, jax.Array]:
  """Returns decays from 1 to 16, and biases for steps whose logarithms are uniform in a range."""
  of_decay, of_step = jax.random.split(key)
  low, high = np.log(step_range)
  step_N = jnp.exp(jax.random.uniform(of_step, (N,), minval=low, maxval=high))
  return {
    ('log_decay',): jnp.log(jax.random.uniform(of_decay, (N,), minval=1.0, maxval=_LARGEST_DECAY)),
    ('step_bias',): step_N + jnp.log(-jnp.expm1(-step_N)),  # The inverse of softplus.
  }
