"""RgLru: the recurrent block of Griffin, with a real-gated linear recurrent unit (De et al., 2024, arXiv:2402.19427).

    gate = f(x W_y) [N, H],   u = conv(x W_x) [N, H]
    admit = s(u W_a + b_a),   forget = s(u W_r + b_r)                      W_a, W_r [N, H, H]: each head on its own
    a = exp(-8 softplus(decay) forget)                                     [N, H]
    state = a state + sqrt(1 - a^2) admit u
    out = (state * gate) W_o

where s is the sigmoid. At the first token of a row or a segment, a is 0 and the factor of its input is 1.

B batch, T length, D model dims, N heads, H and K dims per head.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import WeightSplit
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.causal_conv import CausalConv
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.mixers import Mixer, MixerActivationSplit, pick_entries
from praxis_lite.layers.precision import sum_dtype_of, to_sum_dtype
from praxis_lite.layers.projections import Projection, split_projection
from praxis_lite.layers.state_parts import scan_states_in_parts
from praxis_lite.layers.state_space import scan_states, segment_starts
from praxis_lite.sharding.weights import NO_DECAY_FLOAT32, JointInit, WeightHParams

_SHARPNESS = 8.0
_LEAST_DECAY, _MOST_DECAY = 0.9, 0.999  # The range of initial values of a, for a forget gate of 1 / 8.
_LARGEST_SLOPE = 1000.0


class RgLru(Mixer):
  """The recurrent block of Griffin.

  Attributes:
    width: N x H, dims of the recurrence; None means D.
    num_heads: N, a divisor of the width; gates see only the dims of their own head.
    kernel_size: width of the convolution.
    activation: name of f; see `activations.py`.
    use_bias: whether the projections have biases.
    proj_tpl: template of the children `gate` and `value`.
    conv_tpl: template of the child `conv`.
    out_tpl: template of the child `out`.
    weight_split_dims_mapping: `wt`, [D, N, H]; the gates, the convolution and the output are split along the same
      heads.
    activation_split_dims_mapping: see `Mamba2`; states pass from part to part of a split length in the same way.
  """

  _passes_states = True
  _state_split = (0, 2, 3)

  width: int | None = None
  num_heads: int = REQUIRED
  kernel_size: int = 4
  activation: str = 'gelu_tanh'
  use_bias: bool = True
  proj_tpl: Config = template(Projection)
  conv_tpl: Config = template(CausalConv)
  out_tpl: Config = template(Projection)
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(MixerActivationSplit)

  gate: Projection = child()
  value: Projection = child()
  conv: CausalConv = child()
  out: Projection = child()

  def setup(self) -> None:
    self._check_range('num_heads', 'width', least=1)
    get_activation(self.activation, f'{self.path_name}.activation')
    D, N = self.input_dims, self.num_heads
    self.width = D if self.width is None else self.width
    if self.width % N:
      raise ConfigError(f'{self.path_name}.num_heads: {N} does not divide the width, {self.width}')
    H = self.width // N
    self._shape = N, H
    wt = self.weight_split_dims_mapping.wt
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    for name in ('gate', 'value'):
      proj = self.proj_tpl.clone(in_shape=(D,), out_shape=(N, H), use_bias=self.use_bias)
      self.create_child(name, split_projection(proj, wt, (0, 1, 2), rank_in=1))
    conv = self.conv_tpl.clone(shape=(N, H), kernel_size=self.kernel_size)
    conv.weight_split_dims_mapping.wt = pick_entries(wt, None, 1, 2)
    self.create_child('conv', conv)
    for name in ('admit', 'forget'):
      weight = WeightHParams(
        (N, H, H), tensor_split_dims_mapping=pick_entries(wt, 1, None, 2), fan_in_axes=(1,), fan_out_axes=(2,)
      )
      self.create_variable(f'{name}_w', weight)
      self.create_variable(f'{name}_b', bias_weight((N, H), pick_entries(wt, 1, 2)))
    init = JointInit(('decay',), functools.partial(_draw_decay, (N, H)))
    decay = WeightHParams((N, H), init, None, pick_entries(wt, 1, 2), collections=NO_DECAY_FLOAT32)
    self.create_variable('decay', decay)
    out = self.out_tpl.clone(in_shape=(N, H), out_shape=(D,), use_bias=self.use_bias)
    self.create_child('out', split_projection(out, wt, (1, 2, 0), rank_in=2))

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    gate_BTNH = checkpoint_name(self.shard(self.gate(x_BTD), 'blnh'), 'query_proj')
    value_BTNH = self.shard(self.value(x_BTD), 'blnh')
    state_BNH = None
    if pos_BT is None:
      u_BTNH = self.conv(value_BTNH, segment_ids)
      is_first_BT = jnp.zeros(x_BTD.shape[:2], bool).at[:, 0].set(True)
      starts_BT = segment_starts(segment_ids)
      if starts_BT is not None:
        is_first_BT |= starts_BT
    else:
      u_BTNH = self.conv.extend_step(value_BTNH, pos_BT)
      is_first_BT, state_BNH = pos_BT == 0, self.get_decode_state('state')
    u_BTNH = checkpoint_name(self.shard(u_BTNH, 'blnh'), 'value_proj')
    states_BTNH = self._recur(u_BTNH, is_first_BT, None if pos_BT is None else pos_BT < 0, state_BNH)
    if pos_BT is not None:
      self._keep(states_BTNH[:, -1])
    gate_BTNH = get_activation(self.activation)(gate_BTNH)
    y_BTNH = checkpoint_name(self.shard(states_BTNH.astype(gate_BTNH.dtype) * gate_BTNH, 'blnh'), 'context')
    return checkpoint_name(self.shard(self.out(y_BTNH)), 'out_proj')

  def _recur(
    self,
    u_BTNH: jax.Array,
    is_first_BT: jax.Array,
    is_padding_BT: jax.Array | None,
    state_BNH: jax.Array | None,
  ) -> jax.Array:
    """Returns the state after each token, [B, T, N, H], in the dtype of sums."""
    admit_BTNH, forget_BTNH = (
      jax.nn.sigmoid(to_sum_dtype(jnp.einsum('BTNH,NHK->BTNK', u_BTNH, w) + b))
      for w, b in ((self.theta.admit_w, self.theta.admit_b), (self.theta.forget_w, self.theta.forget_b))
    )
    log_a_BTNH = -_SHARPNESS * forget_BTNH * jax.nn.softplus(to_sum_dtype(self.theta.decay))
    first_BT11 = is_first_BT[..., None, None]
    factor_BTNH = jnp.where(first_BT11, 1, _sqrt(-jnp.expm1(2 * log_a_BTNH)))
    inputs_BTNH = factor_BTNH * admit_BTNH * to_sum_dtype(u_BTNH)
    a_BTNH = jnp.where(first_BT11, 0, jnp.exp(log_a_BTNH))
    if is_padding_BT is not None:  # Padding leaves the state as it is.
      padding_BT11 = is_padding_BT[..., None, None]
      a_BTNH, inputs_BTNH = jnp.where(padding_BT11, 1, a_BTNH), jnp.where(padding_BT11, 0, inputs_BTNH)
    parts = self._num_parts() if is_padding_BT is None else 1
    if parts > 1:
      return scan_states_in_parts(a_BTNH, inputs_BTNH, parts, self._shard_parts)
    return scan_states(a_BTNH, inputs_BTNH, state_BNH)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    self.conv.init_decode_state(batch_size)
    self._keep(jnp.zeros((batch_size, *self._shape), sum_dtype_of(self.fprop_dtype)))

  def token_flops(self, length: int) -> TokenFlops:
    N, H = self._shape
    return TokenFlops(4.0 * N * H * H)


@jax.custom_jvp
def _sqrt(x: jax.Array) -> jax.Array:
  """Returns the square root; its gradient uses a slope of at most 1,000, because the slope at 0 is infinite."""
  return jnp.sqrt(x)


@_sqrt.defjvp
def _sqrt_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
  (x,), (dx,) = primals, tangents
  return jnp.sqrt(x), dx * jax.lax.rsqrt(jnp.maximum(4 * x, _LARGEST_SLOPE**-2))


def _draw_decay(shape: tuple[int, ...], key: jax.Array) -> Mapping[Path, jax.Array]:
  """Returns values for which a^2, at a forget gate of 1 / 8, is uniform between the squares of 0.9 and 0.999."""
  square = jax.random.uniform(key, shape, minval=_LEAST_DECAY**2, maxval=_MOST_DECAY**2)
  return {('decay',): jnp.log(jnp.expm1(-0.5 * jnp.log(square)))}  # The inverse of softplus.
