"""DiagonalSsm: a linear state space model with a diagonal matrix that does not depend on the input (S4D and S5).

    rate = -exp(log_decay) + i frequency,   step = exp(log_step),   a = exp(step rate)              [N, S], complex
    state_t = a state_(t-1) + (a - 1) / rate  B u_t                                                 [N, S], complex
    y_t = 2 Re(C state_t) + skip u_t                                                                [N, H]

This is the zero-order hold. With one channel in a head, H = 1, the model is S4D (Gu et al., 2022, arXiv:2206.11893);
with one head, S5 (Smith et al., 2023, arXiv:2208.04933). As no weight depends on the input, outputs are a convolution:

    y_t = sum over k of  K_k u_(t-k) + skip u_t,   K_k = 2 Re(C a^k (a - 1) / rate B)               [N, H, K]

The layer is y = gelu(y), out = (y W_o) * sigmoid(y W_g).

B batch, T length, F frequencies, D model dims, N heads, H and K channels per head, S states per head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.trees import Path
from praxis_lite.layers.base import WeightSplit
from praxis_lite.layers.base.facts import TokenFlops
from praxis_lite.layers.mixers import Mixer, MixerActivationSplit, pick_entries
from praxis_lite.layers.precision import sum_dtype_of, to_sum_dtype
from praxis_lite.layers.projections import Projection, split_projection
from praxis_lite.layers.state_space import scan_states, segment_starts
from praxis_lite.sharding.constraints import unmapped_axes
from praxis_lite.sharding.specs import axes_to_entry, complete_spec, spec_axes
from praxis_lite.sharding.weights import NO_DECAY_FLOAT32, JointInit, WeightHParams, WeightHParamsCollection, WeightInit

FORMS = ('scan', 'convolution')


class DiagonalSsm(Mixer):
  """A diagonal state space model.

  Attributes:
    num_heads: N, a divisor of D; D heads make S4D, and one makes S5.
    state_dims: S, the number of complex states; each also stands for its conjugate.
    form: how a whole row is computed: 'scan', by an associative scan; or 'convolution', by a Fourier transform, which
      takes no packed rows. Decoding is always a recurrence.
    step_range: the least and the largest step at the start of training.
    out_tpl: template of the children `out` and `out_gate`.
    weight_split_dims_mapping: `wt`, [D, N, H], of `out` and `out_gate`; all other weights are split along the heads.
  """

  _state_split = (0, 2, None)

  num_heads: int = REQUIRED
  state_dims: int = 32
  form: str = 'scan'
  step_range: tuple[float, float] = (0.001, 0.1)
  out_tpl: Config = template(Projection)
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(MixerActivationSplit)

  out: Projection = child()
  out_gate: Projection = child()

  def setup(self) -> None:
    self._check_range('num_heads', 'state_dims', least=1)
    check_choice(f'{self.path_name}.form', self.form, FORMS)
    D, N, S = self.input_dims, self.num_heads, self.state_dims
    if D % N:
      raise ConfigError(f'{self.path_name}.num_heads: {N} does not divide input_dims, {D}')
    low, high = self.step_range
    if not 0 < low <= high:
      raise ConfigError(f'{self.path_name}.step_range: expected the least and the largest step, got {(low, high)}')
    H = D // N
    wt = self.weight_split_dims_mapping.wt
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    draw = functools.partial(_draw_rates, (N, S), self.step_range)
    for name in ('log_decay', 'frequency', 'log_step'):
      split = pick_entries(wt, 1, None)
      self.create_variable(
        name, WeightHParams((N, S), JointInit((name,), draw), None, split, collections=NO_DECAY_FLOAT32)
      )
    for name, shape in (('b', (N, S, H, 2)), ('c', (N, H, S, 2))):
      weight = WeightHParams(
        shape,
        init=WeightInit.GaussianFanIn(),
        tensor_split_dims_mapping=pick_entries(wt, 1, None, None, None),
        fan_in_axes=(2,),
        fan_out_axes=(1,),
        collections=frozenset({WeightHParamsCollection.KEEP_FLOAT32}),
      )
      self.create_variable(name, weight)
    skip = WeightHParams(
      (N, H), WeightInit.Gaussian(), None, pick_entries(wt, 1, None), fan_in_axes=(), fan_out_axes=(0, 1)
    )
    self.create_variable('skip', skip)
    for name in ('out', 'out_gate'):
      out = self.out_tpl.clone(in_shape=(N, H), out_shape=(D,), use_bias=True)
      self.create_child(name, split_projection(out, wt, (1, 2, 0), rank_in=2))

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    u_BTNH = self.shard(x_BTD.reshape(*x_BTD.shape[:2], self.num_heads, -1), 'blnh')
    if pos_BT is None and self.form == 'convolution':
      if segment_ids is not None:
        raise ConfigError(
          f"{self.path_name}.form: a convolution cannot forget what is before a segment; set it to 'scan', or the "
          "model's packed to False"
        )
      y_BTNH = self._convolve(to_sum_dtype(u_BTNH))
    else:
      y_BTNH = self._recur(to_sum_dtype(u_BTNH), segment_starts(segment_ids), pos_BT)
    y_BTNH = jax.nn.gelu(y_BTNH + to_sum_dtype(self.theta.skip) * u_BTNH).astype(self.fprop_dtype)
    y_BTNH = self.shard(y_BTNH, 'blnh')
    return self.shard(self.out(y_BTNH) * jax.nn.sigmoid(self.out_gate(y_BTNH)))

  def _matrices(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns complex arrays: log a and a, [N, S]; the matrices from inputs, [N, S, H], and to outputs, [N, H, S]."""
    rate_NS = jax.lax.complex(-jnp.exp(self.theta.log_decay), self.theta.frequency)
    log_a_NS = jnp.exp(self.theta.log_step) * rate_NS
    b_NSH, c_NHS = (jax.lax.complex(w[..., 0], w[..., 1]) for w in (self.theta.b, self.theta.c))
    a_NS = jnp.exp(log_a_NS)
    return log_a_NS, a_NS, ((a_NS - 1) / rate_NS)[..., None] * b_NSH, 2 * c_NHS

  def _recur(self, u_BTNH: jax.Array, starts_BT: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    _, a_NS, b_NSH, c_NHS = self._matrices()
    inputs_BTNS = jnp.einsum('BTNH,NSH->BTNS', u_BTNH, b_NSH)
    a_BTNS = jnp.broadcast_to(a_NS, inputs_BTNS.shape)
    state_BNS = None
    if starts_BT is not None:
      a_BTNS = jnp.where(starts_BT[..., None, None], 0, a_BTNS)
    if pos_BT is not None:
      state_BNS, is_token_BT11 = self.get_decode_state('state'), (pos_BT >= 0)[..., None, None]
      a_BTNS, inputs_BTNS = jnp.where(is_token_BT11, a_BTNS, 1), jnp.where(is_token_BT11, inputs_BTNS, 0)
    states_BTNS = scan_states(a_BTNS, inputs_BTNS, state_BNS)
    if pos_BT is not None:
      self._keep(states_BTNS[:, -1])
    return jnp.real(jnp.einsum('BTNS,NHS->BTNH', states_BTNS, c_NHS))

  def _convolve(self, u_BTNH: jax.Array) -> jax.Array:
    T = u_BTNH.shape[1]
    log_a_NS, _, b_NSK, c_NHS = self._matrices()
    powers_TNS = jnp.exp(jnp.arange(T)[:, None, None] * log_a_NS)
    kernel_TNHK = jnp.real(jnp.einsum('NHS,TNS,NSK->TNHK', c_NHS, powers_TNS, b_NSK))
    rows, heads = self._even_axes(u_BTNH)
    if not (rows or heads):
      return _convolve(u_BTNH, kernel_TNHK)
    row, head = axes_to_entry(rows), axes_to_entry(heads)  # Without `shard_map`, XLA would gather `u_BTNH`.
    tokens = PartitionSpec(row, None, head, None)
    return jax.shard_map(
      _convolve,
      in_specs=(tokens, PartitionSpec(None, head, None, None)),
      out_specs=tokens,
      axis_names={*rows, *heads},
      check_vma=False,  # Kernels are replicated over the axes of rows by construction.
    )(u_BTNH, kernel_TNHK)

  def _even_axes(self, u_BTNH: jax.Array) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the mesh axes that split the rows, and those that split the heads, evenly."""
    sizes, mapping = unmapped_axes(), self.activation_split_dims_mapping.blnh
    placement = self._resolve(mapping, f'{self.path_name}.activation_split_dims_mapping.blnh', rank=4)
    spec = complete_spec(None if placement is None else placement.spec, 4)

    def dividing_axes(dim: int) -> tuple[str, ...]:
      axes = tuple(axis for axis in spec_axes(spec[dim]) if axis in sizes)
      return axes if u_BTNH.shape[dim] % math.prod(sizes[axis] for axis in axes) == 0 else ()

    return dividing_axes(0), dividing_axes(2)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    dtype = jnp.promote_types(jnp.complex64, sum_dtype_of(self.fprop_dtype))
    self._keep(jnp.zeros((batch_size, self.num_heads, self.state_dims), dtype))

  def token_flops(self, length: int) -> TokenFlops:
    return TokenFlops(16.0 * self.input_dims * self.state_dims)


def _convolve(u_BTNH: jax.Array, kernel_TNHK: jax.Array) -> jax.Array:
  T = u_BTNH.shape[1]
  size = 2 * T  # FFTs convolve in a circle: with T zeros, the end of a row does not affect its beginning.
  u_BFNK, kernel_FNHK = jnp.fft.rfft(u_BTNH, size, axis=1), jnp.fft.rfft(kernel_TNHK, size, axis=0)
  return jnp.fft.irfft(jnp.einsum('BFNK,FNHK->BFNH', u_BFNK, kernel_FNHK), size, axis=1)[:, :T]


def _draw_rates(shape: tuple[int, int], step_range: tuple[float, float], key: jax.Array) -> Mapping[Path, jax.Array]:
  """Returns initial values: each decay is 1 / 2, frequencies are 0, pi, 2 pi, ... (S4D-Lin), log steps are uniform."""
  low, high = np.log(step_range)
  return {
    ('log_decay',): jnp.full(shape, np.log(0.5)),
    ('frequency',): jnp.broadcast_to(np.pi * jnp.arange(shape[1], dtype=jnp.float32), shape),
    ('log_step',): jax.random.uniform(key, shape, minval=low, maxval=high),
  }
