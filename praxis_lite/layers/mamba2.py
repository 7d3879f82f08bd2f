"""Mamba-2: a state space model in chunks of matrix products (Dao and Gu, 2024, arXiv:2405.21060).

    gate = x W_z [N, H],  value = f(conv(x W_x)) [N, H],  key = f(conv(x W_B)) [G, S],  query = f(conv(x W_C)) [G, S]
    step = softplus(x W_dt + bias) [N]
    state = exp(-step exp(A)) state + step value key^T,  y = state query + D value
    out = norm(y * silu(gate)) W_o

The paper calls the query C and the key B. Keys and queries are shared by the N / G heads of a group.

B batch, T length, D model dims, N heads, G groups, H dims per head, S dims of the state.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.base import Layer, WeightSplit
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.grouped_mixer import GroupedMixer
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.mixers import pick_entries
from praxis_lite.layers.precision import sum_dtype_of, to_sum_dtype
from praxis_lite.layers.projections import Projection
from praxis_lite.layers.state_parts import scan_in_parts
from praxis_lite.layers.state_space import StateTokens, scan_in_chunks, segment_starts
from praxis_lite.sharding.weights import WeightInit


class GatedRMSNorm(Layer):
  """y = norm(x * silu(gate)) * scale, where the heads of a group are normalized together.

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
    shape, wt = (self.num_heads, self.dims_per_head), self.weight_split_dims_mapping.wt
    self.create_variable('scale', bias_weight(shape, wt, WeightInit.Constant(1.0)))

  def __call__(self, x_BTNH: jax.Array, gate_BTNH: jax.Array) -> jax.Array:
    """Returns the normalized product of x and silu(gate), [B, T, N, H] like both."""
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


class Mamba2(GroupedMixer):
  """The mixer of Mamba-2.

  Attributes: the same as for `GroupedMixer`, and
    state_dims: S.
    use_bias: whether the projections have biases.
    use_conv_bias: whether the convolutions have biases.
    step_limits: bounds of the steps.
    norm_tpl: template of the child `norm`, which is split like the heads.
    activation_split_dims_mapping: if `blnh` splits the length, each device scans its part of the sequence, and states
      pass from part to part, see `state_parts.py`.
  """

  _passes_states = True
  _state_split = (0, 2, 3, None)

  dims_per_head: int = 64
  state_dims: int = 128
  use_bias: bool = False
  use_conv_bias: bool = True
  step_limits: tuple[float, float] = (0.0, math.inf)
  chunk_size: int = 256
  norm_tpl: Config = template(GatedRMSNorm)

  gate: Projection = child()
  norm: GatedRMSNorm = child()

  def setup(self) -> None:
    N, H = self.num_heads, self.dims_per_head
    self._check_range('state_dims', least=1)
    low, high = self.step_limits
    self._check_steps('step_limits', low, high, 0 <= low <= high)
    self._create_parts(self.state_dims, {'gate': (N, H)}, use_bias=self.use_bias, use_conv_bias=self.use_conv_bias)
    norm = self.norm_tpl.clone(num_heads=N, dims_per_head=H, num_groups=self.num_groups)
    norm.weight_split_dims_mapping.wt = pick_entries(self.weight_split_dims_mapping.wt, 1, 2)
    self.create_child('norm', norm)
    self._create_by_head('skip', WeightInit.Constant(1.0))

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    gate_BTNH = checkpoint_name(self.shard(self.gate(x_BTD), 'blnh'), 'query_proj')
    value_BTNH, key_BTGS, query_BTGS = self._read(x_BTD, segment_ids, pos_BT)
    value_BTNH = checkpoint_name(self.shard(value_BTNH, 'blnh'), 'value_proj')
    step_BTN = jnp.clip(self._steps(x_BTD), *self.step_limits)
    state_BNHS = None
    if pos_BT is not None:
      state_BNHS = self.get_decode_state('state')
      step_BTN = jnp.where(pos_BT[..., None] >= 0, step_BTN, 0)  # A step of 0 leaves the state as it is.
    decay_BTN = -step_BTN * jnp.exp(self.theta.log_decay)
    scaled_BTNH = (value_BTNH * step_BTN[..., None]).astype(value_BTNH.dtype)
    tokens = StateTokens(scaled_BTNH, decay_BTN, key_BTGS, query_BTGS, segment_starts(segment_ids))
    parts = self._num_parts() if pos_BT is None else 1
    if parts > 1:
      y_BTNH = scan_in_parts(tokens, self.chunk_size, parts, self._shard_parts)
    else:
      y_BTNH, state_BNHS = scan_in_chunks(tokens, state_BNHS, self.chunk_size)
      if pos_BT is not None:
        self._keep(state_BNHS)
    y_BTNH = self.shard((y_BTNH + self.theta.skip[:, None] * value_BTNH).astype(value_BTNH.dtype), 'blnh')
    y_BTNH = checkpoint_name(self.norm(y_BTNH, gate_BTNH), 'context')
    return checkpoint_name(self.shard(self.out(y_BTNH)), 'out_proj')

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    self._start_convolutions(batch_size)
    shape = batch_size, self.num_heads, self.dims_per_head, self.state_dims
    self._keep(jnp.zeros(shape, sum_dtype_of(self.fprop_dtype)))

  def token_flops(self, length: int) -> TokenFlops:
    N, H, G, S = self.num_heads, self.dims_per_head, self.num_groups, self.state_dims
    chunk = min(length, self.chunk_size)
    return TokenFlops(attention=2.0 * chunk * (G * S + N * H) + 4.0 * N * H * S)
