"""Cells against formulas in NumPy, token after token; the scan with segments, paddings, chunks, and in decoding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import MixerBlock, Recurrent, RepeatedTransformer, rnn_cells
from praxis_lite.layers.rnn_cells import CifgLstmCellSimple, GruCell, LayerNormalizedLstmCellSimple, LstmCellSimple

D, O = 12, 6  # noqa: E741
CELLS = {
  'lstm': lambda: Config(LstmCellSimple),
  'lstm with a projection': lambda: Config(
    LstmCellSimple, num_hidden_nodes=5, cell_value_cap=0.3, forget_gate_bias=0.7, output_nonlinearity=False
  ),
  'cifg': lambda: Config(CifgLstmCellSimple, forget_gate_bias=0.4, cell_value_cap=None),
  'normalized': lambda: Config(LayerNormalizedLstmCellSimple, forget_gate_bias=0.5),
  'gru': lambda: Config(GruCell),
}
every_cell = pytest.mark.parametrize('cell', CELLS)


def built(cell='lstm', **fields):
  layer = Config(Recurrent, **{'input_dims': D, 'output_dims': O, 'cell_tpl': CELLS[cell](), **fields}).instantiate()
  variables = drawn_variables(layer.abstract_init())
  return layer, jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, variables)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def by_hand(cell, config, weights, row):
  """Outputs [T, O] of a cell for one row [T, D]."""
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
  H = w['b'].shape[-1]
  m, c, out = np.zeros(w['w_state'].shape[0]), np.zeros(H), []
  for x in np.asarray(row, np.float64):
    from_x, from_m = np.tensordot(x, w['w_in'], 1), np.tensordot(m, w['w_state'], 1)
    if cell == 'gru':
      r, z = sigmoid(from_x[:2] + from_m[:2] + w['b'][:2])
      m = z * m + (1 - z) * np.tanh(from_x[2] + w['b'][2] + r * (from_m[2] + w['b_state']))
      out.append(m)
      continue
    assert isinstance(config, LstmCellSimple), (
      f'add the formula of {cell!r} to by_hand, above this line, with `out.append(m)` and `continue` like the GRU'
    )
    gates = from_x + from_m
    if cell == 'normalized':
      gates = (gates - gates.mean(1, keepdims=True)) / np.sqrt(gates.var(1, keepdims=True) + 1e-8) * w['ln_scale']
    gates = gates + w['b']
    forget = sigmoid(gates[-2] + config.forget_gate_bias)
    admit = 1 - forget if cell == 'cifg' else sigmoid(gates[1])
    c = forget * c + admit * np.tanh(gates[0])
    if config.cell_value_cap is not None:
      c = np.clip(c, -config.cell_value_cap, config.cell_value_cap)
    m = sigmoid(gates[-1]) * (np.tanh(c) if config.output_nonlinearity else c)
    if 'w_proj' in w:
      m = m @ w['w_proj']
    out.append(m)
  return np.array(out)


def test_each_cell_is_compared_with_its_formula():
  cells = {v for v in vars(rnn_cells).values() if isinstance(v, type) and issubclass(v, rnn_cells.RnnCell)}
  missing = cells - {rnn_cells.RnnCell} - {target(cell()) for cell in CELLS.values()}
  names = sorted(cell.__name__ for cell in missing)
  assert not names, f'add a config of {names} to CELLS, and the formula to by_hand'


@every_cell
def test_cell_is_its_formula_in_each_segment_and_passes_over_padding(cell):
  layer, variables = built(cell)
  x = inputs()[:, :9]
  ids = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
  paddings = np.zeros((2, 9))
  paddings[1, [2, 5]] = 1
  y, _ = jax.jit(layer.apply)(variables, x, segment_ids=ids, paddings=paddings)
  hand = functools.partial(by_hand, cell, layer.forward[0], variables['forward_0'])
  np.testing.assert_allclose(y[0], np.concatenate([hand(x[0, :3]), hand(x[0, 3:])]), atol=2e-5)
  kept = paddings[1] == 0
  np.testing.assert_allclose(y[1, kept], hand(x[1, kept]), atol=2e-5)
  np.testing.assert_array_equal(y[1, [2, 5]], y[1, [1, 4]])


def test_both_directions_and_several_layers():
  """The second layer reads both directions of the first; padding at the end changes nothing backward."""
  layer, variables = built('cifg', direction='both', num_layers=2, output_dims=2 * O)
  x, paddings = inputs()[:, :7], np.array([[0] * 7, [0] * 4 + [1] * 3])
  y, _ = jax.jit(layer.apply)(variables, x, paddings=paddings)
  for row, length in ((0, 7), (1, 4)):
    h = x[row, :length]
    for i in range(2):
      hands = [
        functools.partial(by_hand, 'cifg', layer.forward[i], variables[f'{d}_{i}']) for d in ('forward', 'backward')
      ]
      h = np.concatenate([hands[0](h), hands[1](h[::-1])[::-1]], axis=-1)
    np.testing.assert_allclose(y[row, :length], h, atol=5e-5)
  backward, of_backward = built('gru', direction='backward')
  y, _ = backward.apply(of_backward, x)
  hand = by_hand('gru', backward.backward[0], of_backward['backward_0'], x[0, ::-1])
  np.testing.assert_allclose(y[0], hand[::-1], atol=2e-5)


def value_and_gradients(layer, variables, x):
  def loss(v, x):
    y, _ = layer.apply(v, x)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)


def test_chunks_change_nothing_and_truncation_only_gradients():
  whole, variables = built()
  x = inputs()[:, :11]
  expected = value_and_gradients(whole, variables, x)
  for size in (4, 11):
    actual = value_and_gradients(built(chunk_size=size)[0], variables, x)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)
  truncated, _ = built(chunk_size=4, truncate_gradients=True)

  def of_last(layer, x):
    return jax.grad(lambda x: jnp.sum(layer.apply(variables, x)[0][:, -1]))(x)

  value, (grads, _) = value_and_gradients(truncated, variables, x)
  np.testing.assert_allclose(value, expected[0], rtol=1e-6)
  assert np.abs(grads['forward_0']['w_state'] - expected[1][0]['forward_0']['w_state']).max() > 1e-4
  stopped = of_last(truncated, x)
  assert not stopped[:, :8].any() and stopped[:, 8:].all()
  np.testing.assert_allclose(stopped[:, 8:], of_last(whole, x)[:, 8:], rtol=1e-5, atol=1e-7)
  assert of_last(whole, x)[:, :8].all()


def test_zoneout_keeps_entries_in_training_and_means_in_evaluation():
  layer, variables = built()
  zoned, _ = built(cell_tpl=Config(LstmCellSimple, zo_prob=0.5))
  x = inputs()[:, :1]
  once, _ = layer.apply(variables, x)
  drawn, _ = zoned.apply(variables, np.repeat(x, 50, axis=0), key=jax.random.key(0))
  kept = np.asarray(drawn == 0)
  assert 0.4 < kept.mean() < 0.6
  mean, _ = zoned.apply(variables, x, do_eval=True)
  gates = np.tensordot(x[0, 0], variables['forward_0']['w_in'], 1) + variables['forward_0']['b']
  c = sigmoid(gates[1]) * np.tanh(gates[0])
  np.testing.assert_allclose(once[0, 0], sigmoid(gates[3]) * np.tanh(c), atol=1e-5)
  np.testing.assert_allclose(mean[0, 0], 0.5 * once[0, 0], atol=1e-5)


@pytest.mark.parametrize('stacked', [False, True])
def test_decoding_equals_one_pass(stacked):
  recurrent = Config(Recurrent, cell_tpl=CELLS['normalized' if stacked else 'gru'](), num_layers=2)
  config = recurrent.set(input_dims=D)
  if stacked:
    block = Config(MixerBlock, input_dims=D, hidden_dims=16, mixer_tpl=recurrent.clone(num_layers=1))
    config = Config(RepeatedTransformer, layers_tpl=block, num_layers=5)
  layer = config.set(name='stack').instantiate()
  variables = drawn_variables(layer.abstract_init())
  out, _ = decoded(layer, variables, inputs())
  np.testing.assert_allclose(out, expected(layer, variables, inputs()), rtol=1e-4, atol=1e-4)


def test_cells_over_an_axis_of_three_equal_one_device():
  config = Config(Recurrent, input_dims=D, output_dims=14, direction='both', num_layers=2, chunk_size=4)
  config.cell_tpl.num_hidden_nodes = 5
  Recurrent.set_split(config, batch=('replica', 'data'), length=None, data='data', mdl='mdl')
  layer = config.set(mesh_axis_names=(axes := ('replica', 'data', 'mdl'))).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), inputs()[:, :9]

  def step(layer, variables, x):
    loss = lambda v, x: jnp.sum(layer.apply(v, x)[0] ** 2)  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

  expected = jax.jit(functools.partial(step, layer))(variables, x)
  mesh = jax.make_mesh((2, 1, 3), axes, axis_types=(AxisType.Auto,) * 3)
  actual = step_on_mesh(step, layer, variables, mesh)(place_variables(layer, variables, mesh), x)
  weights = jax.tree.map(lambda a, e: a[tuple(map(slice, e.shape))], actual[1][0], expected[1][0])
  actual = actual[0], (weights, actual[1][1])
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


def test_one_token_and_bfloat16():
  layer, variables = built('gru', fprop_dtype=jnp.bfloat16, chunk_size=4)
  exact, _ = built('gru')
  for x in (inputs()[:1, :1], inputs()[:, :5]):
    y, _ = layer.apply(variables, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), exact.apply(variables, x)[0], atol=0.04)


def test_mistakes_are_named():
  for fields, told in (
    ({'direction': 'up'}, 'rnn.direction'),
    ({'direction': 'both', 'output_dims': 5}, "rnn.output_dims: direction = 'both' needs an even number, got 5"),
    ({'truncate_gradients': True}, 'rnn.truncate_gradients: set chunk_size, the tokens between two stops'),
    ({'num_layers': 0}, 'rnn.num_layers: expected at least 1, got 0'),
  ):
    with pytest.raises(ConfigError, match=told):
      built(**{'name': 'rnn', **fields})
  layer, variables = built(name='rnn', direction='backward')
  with pytest.raises(ConfigError, match=r"rnn.direction: decoding needs 'forward', since later tokens do not exist"):
    layer.apply(variables, 2, 4, method='init_decode_state')
  with pytest.raises(ConfigError, match='so no axis can split their length'):
    Recurrent.set_split(Config(Recurrent), batch=None, length='data', data=None, mdl=None)
