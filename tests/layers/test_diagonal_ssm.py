"""Diagonal state space models: the scan, the convolution and the recurrence in NumPy are the same; decoding."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from mixer_meshes import on_mesh_and_alone

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import DiagonalSsm
from praxis_lite.sharding.mesh import bind_mesh

D, S = 12, 5


def ssm(num_heads=4, **fields):
  return Config(DiagonalSsm, input_dims=D, num_heads=num_heads, state_dims=S, **fields)


def built(config):
  layer = config.instantiate()
  variables = drawn_variables(layer.abstract_init())
  first = layer.init(jax.random.key(0))
  # Rates as at the start, larger steps, and weights that matter.
  return layer, {**variables, 'frequency': first['frequency'], 'b': 9 * variables['b'], 'c': 9 * variables['c']}


def by_hand(v, x, num_heads):
  """The layer for one row [T, D], in complex numbers of 128 bits, one token after another."""
  v = jax.tree.map(lambda x: np.asarray(x, np.float64), v)
  rate, step = -np.exp(v['log_decay']) + 1j * v['frequency'], np.exp(v['log_step'])
  a, b, c = np.exp(step * rate), v['b'][..., 0] + 1j * v['b'][..., 1], v['c'][..., 0] + 1j * v['c'][..., 1]
  state, out = np.zeros(a.shape, complex), []
  for u in np.asarray(x, np.float64).reshape(len(x), num_heads, -1):
    state = a * state + (a - 1) / rate * np.einsum('nsh,nh->ns', b, u)
    y = 2 * np.einsum('nhs,ns->nh', c, state).real + v['skip'] * u
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    gate = np.einsum('nh,nhd->d', y, v['out_gate']['w']) + v['out_gate']['b']
    out.append((np.einsum('nh,nhd->d', y, v['out']['w']) + v['out']['b']) / (1 + np.exp(-gate)))
  return np.array(out)


@pytest.mark.slow_cases
@pytest.mark.parametrize('num_heads', [1, 4, 12], ids=['S5', 'heads', 'S4D'])
def test_both_forms_are_the_recurrence(num_heads):
  """Values for an odd length and for one token; all gradients of one form are those of the other."""
  (scan, variables), (convolution, _) = (built(ssm(num_heads, form=form)) for form in ('scan', 'convolution'))
  x = inputs()[:, :9]

  def results(layer, x):
    def loss(v, x):
      y, _ = layer.apply(v, x)
      return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, x)

  one, other = results(scan, x), results(convolution, x)
  for row, out in zip(x, one[1]):
    np.testing.assert_allclose(out, by_hand(variables, row, num_heads), rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-5 * (1 + np.abs(e).max())), other, one)
  first, _ = convolution.apply(variables, x[:, :1])
  np.testing.assert_allclose(first, one[1][:, :1], atol=1e-5)


def test_a_segment_is_a_row_of_its_own_for_the_scan_only():
  layer, variables = built(ssm())
  x, ids = inputs()[:, :9], np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
  y, _ = jax.jit(layer.apply)(variables, x, segment_ids=ids)
  np.testing.assert_allclose(y[0, 4:], by_hand(variables, x[0, 4:], 4), rtol=1e-4, atol=1e-5)
  other = ssm(form='convolution').set(name='mixer').instantiate()
  with pytest.raises(ConfigError, match=r"mixer.form: a convolution cannot forget .* set it to 'scan'"):
    other.apply(variables, x, segment_ids=ids)


@pytest.mark.parametrize('form', ['scan', 'convolution'])
def test_decoding_equals_one_pass(form):
  layer, variables = built(ssm(form=form))
  out, _ = decoded(layer, variables, inputs())
  np.testing.assert_allclose(out, expected(layer, variables, inputs()), rtol=1e-4, atol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize('num_heads, form', [(12, 'convolution'), (4, 'convolution'), (4, 'scan')])
@pytest.mark.parametrize('mesh', [(2, 1, 3), (1, 3, 2)], ids=str)
def test_a_mesh_with_an_axis_of_three_equals_one_device(mesh, num_heads, form):
  actual, expected = on_mesh_and_alone(
    built,
    ssm(num_heads, form=form),
    dict(zip(('replica', 'data', 'mdl'), mesh)),
    inputs()[:, :7],
    batch=('replica', 'data'),
    data='data',
    mdl='mdl',
  )
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, expected)


def test_fourier_transforms_stay_on_the_devices_of_their_rows_and_heads():
  config = ssm(6, form='convolution')
  DiagonalSsm.set_split(config, batch='data', length=None, data=None, mdl='mdl')
  layer, variables = built(config.set(mesh_axis_names=('data', 'mdl')))
  mesh = jax.make_mesh((2, 3), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)
  x = np.concatenate([inputs()] * 2)[:, :7]
  variables, x = jax.device_put((variables, x), NamedSharding(mesh, PartitionSpec()))
  run = jax.jit(bind_mesh(lambda variables, x: layer.apply(variables, x)[0], mesh))
  program = run.lower(variables, x).compile().as_text()
  shapes = re.findall(r'= \w+\[([\d,]+)\]\S* fft\(', program)  # Of 4 rows and 6 heads of 2 dims, 8 waves of 14 places.
  assert len(x) == 4 and sorted(shapes) == ['2,2,2,14', '2,2,2,8', '2,2,2,8']


def test_mistakes_are_named():
  for fields, told in (
    ({'num_heads': 5}, 'mixer.num_heads: 5 does not divide input_dims, 12'),
    ({'form': 'fft'}, "mixer.form: expected 'scan' or 'convolution', got 'fft'"),
    ({'step_range': (0.0, 1.0)}, 'mixer.step_range: expected the least and the largest step'),
  ):
    with pytest.raises(ConfigError, match=told):
      ssm(**fields).set(name='mixer').instantiate()
