"""Values between the layers of a loaded model: they can be read, and edited in prediction and decoding, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from test_taps import LAYERS, B, D, Stacked, T, batch, make

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models import transformer_lm
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.edits import add, replace, zero
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

STEER = np.linspace(-1, 2, D).astype(np.float32)


def loaded(task):
  tasks = TaskOnMesh.make_for_inference(task, task.create_mesh())
  variables = tasks.layout.mdl_vars.to_mesh(drawn_variables(task.model.abstract_init()))
  step = jax.device_put(np.int32(0), jax.sharding.NamedSharding(tasks.mesh, jax.sharding.PartitionSpec()))
  return TrainedModel(ExperimentConfig(Config(SingleTask, model=None), [], []), tasks, variables, step)


def stacked(**fields):
  return loaded(make(**fields).jax_task)


def forward(edit=lambda layer, x: x):
  """The results of all layers, and the prediction, in NumPy."""
  variables, xs = drawn_variables(make().jax_task.model.abstract_init()), [batch()['x']]
  for i, w in enumerate(variables['stack']['layers']['w']):
    xs.append(edit(i, np.maximum(xs[-1] @ w + 0.1, 0)))
  return np.stack(xs[1:]), xs[-1] @ variables['v']


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', [(3, 2), (1, 1)])
def test_tapped_values_and_statistics_are_those_of_numpy(mesh):
  tapped = stacked(mesh=mesh, split=True).tap(batch(), 'stack.layers', 'stack:mean')
  layers, _ = forward()
  assert tapped.keys() == {'stack.layers', 'stack', 'stack/mean'} - {'stack'}
  assert tapped['stack.layers'].shape == (LAYERS, B, T, D)
  np.testing.assert_allclose(tapped['stack.layers'], layers, rtol=1e-5, atol=1e-6)
  real = np.ones((B, T), bool)
  real[0, 1:] = False
  np.testing.assert_allclose(tapped['stack/mean'], layers[-1][real].mean(), rtol=1e-5)


def gradients_by_hand(edit=lambda layer, x: x, times=1, rows=B):
  """The results of all layers, applied several times, and the gradients of the loss with respect to them."""
  variables, data = drawn_variables(make(rows=rows).jax_task.model.abstract_init()), batch(rows)
  ws, v, weights = variables['stack']['layers']['w'], variables['v'], data['weights']

  def loss(probes):
    xs = [data['x']]
    for i in range(times * LAYERS):
      xs.append(edit(i, jnp.maximum(xs[-1] @ ws[i % LAYERS] + 0.1, 0)) + probes[i])
    errors = jnp.where(weights > 0, (xs[-1] @ v - data['y']) ** 2 * weights, 0)
    return errors.sum() / weights.sum(), jnp.stack(xs[1:])

  gradients, values = jax.grad(loss, has_aux=True)(jnp.zeros((times * LAYERS, rows, T, D)))
  return np.asarray(values), np.asarray(gradients)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields',
  [
    {'mesh': (3, 2), 'split': True},
    {},
    {'mesh': (2, 2, 2), 'split': True},
    {'mesh': (3, 2), 'rows': 1},
    {'mesh': (2, 1), 'parts': 2, 'remat': 'full'},
  ],
)
def test_tapped_gradients_are_those_of_jax(fields):
  rows = fields.get('rows', B)
  tapped = stacked(**fields).tap(batch(rows), 'stack.layers.grad', 'stack.grad', 'stack.layers', 'stack.*.grad:max_abs')
  values, gradients = gradients_by_hand(rows=rows)
  assert tapped.keys() == {'stack.layers', 'stack.layers.grad', 'stack.grad', 'stack.layers.grad/max_abs'}
  for name, wanted in (
    ('stack.layers', values),
    ('stack.layers.grad', gradients),
    ('stack.grad', gradients[-1]),
    ('stack.layers.grad/max_abs', np.abs(gradients).max((1, 2, 3))),
  ):
    np.testing.assert_allclose(tapped[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow_cases
@pytest.mark.parametrize('edited', [False, True])
def test_each_call_of_a_layer_has_an_array_of_gradients(monkeypatch, edited):
  edits = {'stack.layers': [add(STEER, layers=(1,)), zero(units=(1, 4), layers=(-1,))]} if edited else {}
  monkeypatch.setattr(Stacked, 'compute_predictions', lambda self, b: self.stack(self.stack(b['x'])) @ self.theta.v)
  tapped = stacked().edit(edits).tap(batch(), 'stack.layers.grad')
  in_numpy = (lambda layer, x: edit_in_numpy(layer % LAYERS, x)) if edited else (lambda layer, x: x)
  _, gradients = gradients_by_hand(in_numpy, times=2)
  assert tapped.keys() == {'stack.layers.grad', 'stack.layers.grad_1'}
  np.testing.assert_allclose(tapped['stack.layers.grad'], gradients[:LAYERS], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(tapped['stack.layers.grad_1'], gradients[LAYERS:], rtol=1e-4, atol=1e-6)


def test_a_pipeline_has_statistics_of_gradients_and_no_arrays():
  model = stacked(**PLACES['pipeline'])
  with pytest.raises(ConfigError, match=r'stack.layers.grad cannot be tapped: it is in a pipeline, .* tap its stat'):
    model.tap(batch(), 'stack.layers.grad')
  tapped = model.tap(batch(), 'stack.layers.grad:max_abs', 'stack.grad')
  _, gradients = gradients_by_hand()
  np.testing.assert_allclose(tapped['stack.layers.grad/max_abs'], np.abs(gradients).max((1, 2, 3)), rtol=1e-4)
  np.testing.assert_allclose(tapped['stack.grad'], gradients[-1], rtol=1e-4, atol=1e-6)


def edit_in_numpy(layer, x):
  if layer == 1:
    x = x + STEER
  if layer == LAYERS - 1:
    x = jnp.where(np.isin(np.arange(D), [1, 4]), 0, x)
  return x


PLACES = {
  'mesh': {'mesh': (3, 2), 'split': True},
  'pipeline': {'mesh': (2, 1), 'pipeline': {'num_stages': 2, 'num_microbatches': 3}},
  'rounds': {'pipeline': {'num_stages': 1, 'num_microbatches': 2, 'circular_repeat': 3}},
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('place', PLACES)
def test_edits_of_some_layers_are_those_of_numpy(place):
  edits = {'stack.layers': [add(STEER, layers=(1,)), zero(units=(1, 4), layers=(-1,))]}
  got = stacked(**PLACES[place]).edit(edits).predict(batch())
  np.testing.assert_allclose(got, forward(edit_in_numpy)[1], rtol=1e-4, atol=1e-4)


def test_edits_follow_each_other_and_the_first_model_stays_as_it_was():
  model = stacked()
  other = model.edit({'stack.layers': replace(3.0)}).edit({'stack': add(1.0)})
  v = model.variables['v']
  np.testing.assert_allclose(other.predict(batch()), np.full((B, T), 4 * v.sum()), rtol=1e-5)
  np.testing.assert_allclose(model.predict(batch()), forward()[1], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(other.tap(batch(), 'stack.layers')['stack.layers'], 3.0)


@pytest.mark.parametrize(
  'edits, message',
  [
    (
      {'stack.layer': zero()},
      r"stack.layer: there is no such layer. Did you mean 'stack.layers'",
    ),
    ({'stack.layers': zero(layers=(3,))}, 'there is no layer 3; it is in a stack of 3 layers'),
    ({'stack': zero(layers=(0,))}, 'it is in no stack of layers'),
    ({'stack': zero(units=(D,))}, 'there is no unit 5; the units are 0 to 4'),
    ({'stack': add(np.zeros(4))}, r'an array of shape \(4,\) does not fit its values, \(4, 3, 5\)'),
    ({'stack': 3.0}, 'expected add'),
  ],
)
def test_mistakes_in_edits_are_told(edits, message):
  with pytest.raises(ConfigError, match=message):
    stacked().edit(edits).predict(batch())


def test_numbers_of_units_are_integers():
  with pytest.raises(ConfigError, match='expected numbers'):
    zero(units=[0.5])


@pytest.mark.slow
def test_a_steered_language_model_decodes_as_it_predicts():
  model = transformer_lm(vocab_size=7, model_dims=4, num_layers=2, num_heads=1, hidden_dims=4, repeat=True)
  model.decoder_tpl.max_decode_steps = 3
  config = Config(SingleTask, model=model)
  plain = loaded(config.instantiate())
  plain.config.task.set(model=model)
  steer = {'lm.transformer.layers': add(5 * np.array([1.0, -2.0, 3.0, -1.0]), layers=(0,))}
  steered = plain.edit(steer)
  prompt = [1, 2, 3]
  (got,) = steered.decode([prompt], temperature=0.0, max_tokens=3)
  wanted = list(prompt)
  for _ in range(3):
    logits = steered.predict({'ids': np.array([wanted], np.int32)})['logits']
    wanted.append(int(logits[0, -1].argmax()))
  assert got == wanted[3:]
  assert got != plain.decode([prompt], temperature=0.0, max_tokens=3)[0]
  with pytest.raises(ConfigError, match='the values of this model are edited'):
    steered.batcher()
