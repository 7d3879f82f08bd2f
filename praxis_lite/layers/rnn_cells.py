"""Cells of recurrent networks: one step from a state and an input to the next state. `recurrent.py` runs them.

    LstmCellSimple                  c' = s(f) c + s(g) tanh(i),   m' = s(o) tanh(c')
    LayerNormalizedLstmCellSimple   the same, with i, g, f and o each normalized over H before its bias is added
    CifgLstmCellSimple              c' = s(f) c + (1 - s(f)) tanh(i),   m' = s(o) tanh(c')
    GruCell                         m' = s(z) m + (1 - s(z)) tanh(n_x + s(r) n_m)

where i, g, f, ... are x W_in + m W_state + b, and s is the sigmoid. The LSTMs have the names and formulas of Praxis.

B batch, T length, I input dims, G gates, H dims of the cell, O dims of the output.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, template
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.mixers import pick_entries
from praxis_lite.layers.precision import sum_dtype, sum_dtype_of, to_sum_dtype
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams, WeightInit

CellState = dict[str, jax.Array]
Weights = dict[str, jax.Array]


class CellActivationSplit(ActivationSplit):
  """`gates`: the part of the gates that depends only on inputs, computed for all tokens at once, [B, T, G, H]."""

  out: None = None
  gates: SplitDimsMapping = None


class RnnCell(Layer):
  """Base of the cells. A state is a dict of arrays [B, ...], zeros at first.

  A new kind of cell names its gates in `gate_names` and defines `step`. A cell whose state has more than the output `m`
  also defines `state_sizes`. The base declares the weights `w_in` [I, G, H], `w_state` [O, G, H] and `b` [G, H].

  Attributes:
    gate_names: names of the G gates, in the order of the weights; each kind of cell has its own.
    num_input_nodes: I.
    num_output_nodes: O.
    zo_prob: probability that an entry of the state keeps its value in training (zoneout; Krueger et al., 2016). In
      evaluation, the new state is the expected value.
    bias_init: initializer of the bias.
    weight_split_dims_mapping: `wt`, [I, H]; all weights are split alike along H.
  """

  gate_names: ClassVar[tuple[str, ...]] = ()

  num_input_nodes: int = REQUIRED
  num_output_nodes: int = REQUIRED
  zo_prob: float = 0.0
  bias_init: WeightInit = WeightInit.Constant(0.0)
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(CellActivationSplit)

  noise_fields = ('zo_prob',)

  @property
  def hidden_size(self) -> int:
    """H, the dims of the state."""
    return self.num_output_nodes

  def setup(self) -> None:
    self._check_range('zo_prob', least=0, below=1)
    I, G, H, O = self.num_input_nodes, len(self.gate_names), self.hidden_size, self.num_output_nodes  # noqa: E741
    for name, dims, axis in (('w_in', I, 0), ('w_state', O, None)):
      weight = WeightHParams(
        (dims, G, H),
        tensor_split_dims_mapping=pick_entries(self.weight_split_dims_mapping.wt, axis, None, 1),
        fan_in_axes=(0,),
        fan_out_axes=(1, 2),
      )
      self.create_variable(name, weight)
    self._declare_gates('b', self.bias_init)

  def _declare_gates(self, name: str, init: WeightInit) -> None:
    shape, split = (len(self.gate_names), self.hidden_size), pick_entries(self.weight_split_dims_mapping.wt, None, 1)
    self.create_variable(name, bias_weight(shape, split, init))

  def state_sizes(self) -> dict[str, int]:
    """Returns the number of dims of each array of a state, by name."""
    return {'m': self.num_output_nodes}

  def init_states(self, batch_size: int) -> CellState:
    """Returns the state before the first token, zeros [B, ...] in the dtype of sums."""
    dtype = sum_dtype_of(self.fprop_dtype)
    return {name: jnp.zeros((batch_size, dims), dtype) for name, dims in self.state_sizes().items()}

  def get_output(self, state: CellState) -> jax.Array:
    """Returns the output that a state contains, [B, O]."""
    return state['m']

  def project_input(self, x_BTI: jax.Array) -> jax.Array:
    """Returns the part of the gates that depends on inputs only, [B, T, G, H]."""
    return self.shard(jnp.einsum('BTI,IGH->BTGH', x_BTI.astype(self.fprop_dtype), self.theta.w_in), 'gates')

  def step_weights(self) -> Weights:
    """Returns the weights that `step` needs, read once before a loop over tokens."""
    return {name: getattr(self.theta, name) for name in self._weights if name != 'w_in'}

  def step(self, weights: Weights, state: CellState, projected_BGH: jax.Array) -> CellState:
    """Returns the state after a token, given the results of `step_weights`, and of `project_input` for this token."""
    raise NotImplementedError

  def project_state(self, weights: Weights, state: CellState) -> jax.Array:
    """Returns the part of the gates that depends on the state, [B, G, H]."""
    w_OGH = weights['w_state']
    m_BO = state['m'].astype(w_OGH.dtype)
    return jnp.einsum('BO,OGH->BGH', m_BO, w_OGH, preferred_element_type=sum_dtype(w_OGH))


class LstmCellSimple(RnnCell):
  """An LSTM (Hochreiter and Schmidhuber, 1997), with Praxis's options.

  Attributes:
    num_hidden_nodes: H. The variable `w_proj` then projects the output of the cell from H to O (Sak et al., 2014). 0
      means that there is no projection, and H is O.
    cell_value_cap: c is clipped to [-cap, cap]; None does not clip it.
    forget_gate_bias: constant that is added to f.
    output_nonlinearity: whether m is computed from tanh(c); False uses c itself.
  """

  gate_names: ClassVar[tuple[str, ...]] = ('i', 'g', 'f', 'o')

  num_hidden_nodes: int = 0
  cell_value_cap: float | None = 10.0
  forget_gate_bias: float = 0.0
  output_nonlinearity: bool = True

  @property
  def hidden_size(self) -> int:
    return self.num_hidden_nodes or self.num_output_nodes

  def setup(self) -> None:
    super().setup()
    if self.num_hidden_nodes:
      shape, wt = (self.num_hidden_nodes, self.num_output_nodes), self.weight_split_dims_mapping.wt
      self.create_variable('w_proj', WeightHParams(shape, tensor_split_dims_mapping=pick_entries(wt, 1, None)))

  def state_sizes(self) -> dict[str, int]:
    return {'m': self.num_output_nodes, 'c': self.hidden_size}

  def step(self, weights: Weights, state: CellState, projected_BGH: jax.Array) -> CellState:
    gates_BGH = self._add_bias(weights, to_sum_dtype(projected_BGH) + self.project_state(weights, state))
    of = dict(zip(self.gate_names, jnp.moveaxis(gates_BGH, 1, 0)))
    forget = jax.nn.sigmoid(of['f'] + self.forget_gate_bias)
    admit = 1 - forget if 'g' not in of else jax.nn.sigmoid(of['g'])
    c_BH = forget * state['c'] + admit * jnp.tanh(of['i'])
    if self.cell_value_cap is not None:
      c_BH = jnp.clip(c_BH, -self.cell_value_cap, self.cell_value_cap)
    m_BO = jax.nn.sigmoid(of['o']) * (jnp.tanh(c_BH) if self.output_nonlinearity else c_BH)
    if 'w_proj' in weights:
      m_BO = jnp.matmul(m_BO.astype(weights['w_proj'].dtype), weights['w_proj'], preferred_element_type=c_BH.dtype)
    return {'m': m_BO, 'c': c_BH}

  def _add_bias(self, weights: Weights, gates_BGH: jax.Array) -> jax.Array:
    return gates_BGH + weights['b']


class CifgLstmCellSimple(LstmCellSimple):
  """An LSTM whose input gate is 1 - the forget gate (Greff et al., 2015)."""

  gate_names = ('i', 'f', 'o')


class LayerNormalizedLstmCellSimple(LstmCellSimple):
  """An LSTM with a layer norm of each gate (Ba et al., 2016); the scale is the variable `ln_scale`.

  Attributes:
    layer_norm_epsilon: added to the variance.
  """

  layer_norm_epsilon: float = 1e-8

  def setup(self) -> None:
    super().setup()
    self._declare_gates('ln_scale', WeightInit.Constant(1.0))

  def _add_bias(self, weights: Weights, gates_BGH: jax.Array) -> jax.Array:
    centred_BGH = gates_BGH - jnp.mean(gates_BGH, axis=-1, keepdims=True)
    variance_BG1 = jnp.mean(jnp.square(centred_BGH), axis=-1, keepdims=True)
    return centred_BGH * jax.lax.rsqrt(variance_BG1 + self.layer_norm_epsilon) * weights['ln_scale'] + weights['b']


class GruCell(RnnCell):
  """A gated recurrent unit (Cho et al., 2014), with the reset gate applied after the product with the state.

  The bias of n_m is the variable `b_state`.
  """

  gate_names = ('r', 'z', 'n')

  def setup(self) -> None:
    super().setup()
    split = pick_entries(self.weight_split_dims_mapping.wt, 1)
    self.create_variable('b_state', bias_weight(self.hidden_size, split, self.bias_init))

  def step(self, weights: Weights, state: CellState, projected_BGH: jax.Array) -> CellState:
    r_x, z_x, n_x = jnp.moveaxis(to_sum_dtype(projected_BGH) + weights['b'], 1, 0)
    r_m, z_m, n_m = jnp.moveaxis(self.project_state(weights, state), 1, 0)
    update = jax.nn.sigmoid(z_x + z_m)
    candidate = jnp.tanh(n_x + jax.nn.sigmoid(r_x + r_m) * (n_m + weights['b_state']))
    return {'m': update * state['m'] + (1 - update) * candidate}
