"""Vision transformers: their formula, images of odd sizes, steps on any mesh, and mistakes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers.base.facts import PositionGrid
from praxis_lite.layers.positions import resample_positions
from praxis_lite.models import image_classifier, set_pipeline, set_sharding
from praxis_lite.runs import open_run, run_train
from praxis_lite.sharding.weights import WeightHParamsCollection
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

B, D, N, F, V = 5, 12, 3, 10, 3
# A row of pixels and two columns do not fill a patch.
SIZES = {
  'image_size': (7, 11),
  'patch_size': (2, 3),
  'channels': 2,
  'model_dims': D,
  'num_layers': 2,
  'num_heads': N,
  'hidden_dims': F,
}
KINDS = {
  'class': {},
  'mean': {'pooling': 'mean', 'positions': 'sinusoidal'},
  'mean_beside_class': {'pooling': 'mean', 'class_token': True, 'representation': True},
  'attention': {'pooling': 'attention'},
  'sinusoidal_class': {'positions': 'sinusoidal'},
}


def config(kind='class', **fields):
  return image_classifier(num_classes=V, **{**SIZES, **KINDS[kind], **fields})


@functools.cache
def make(kind='class'):
  """A model, and variables that are not nearly constant functions."""
  model = config(kind).instantiate()
  return model, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def batch_of(rows=B):
  rng = np.random.default_rng(0)
  image = rng.standard_normal((rows, 7, 11, 2)).astype(np.float32)
  weights = np.array([1, 0.5, 0, 2, 1], np.float32)[:rows]
  return {'image': image, 'label': rng.integers(0, V, rows).astype(np.int32), 'weights': weights}


# ------------------------------------------------------------------ the formula, in NumPy


def norm(x, of):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * of['scale'] + of['bias']


def gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attend(x, source, of):
  query, key, value = (
    np.einsum('btd,dnh->bnth', s, of[name]['w']) + of[name]['b'][:, None]
    for name, s in (('query', x), ('key', source), ('value', source))
  )
  scores = np.exp(query @ np.swapaxes(key, -1, -2) / math.sqrt(D // N))
  out = scores / scores.sum(-1, keepdims=True) @ value
  return np.einsum('bnth,nhd->btd', out, of['out']['w']) + of['out']['b']


def feed(x, of):
  return gelu(x @ of['up']['w'] + of['up']['b']) @ of['down']['w'] + of['down']['b']


def sinusoids(rows, columns):
  rates = 10_000.0 ** (-np.arange(D // 4) / (D // 4))
  angles = [np.arange(n)[:, None] * rates for n in (rows, columns)]
  row, column = (np.concatenate([np.sin(a), np.cos(a)], -1) for a in angles)
  return np.array([np.concatenate([row[i], column[j]]) for i in range(rows) for j in range(columns)])


def by_hand(kind, variables, image):
  """Log probabilities of the classes."""
  variables = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
  of, pooling = variables['network'], KINDS[kind].get('pooling', 'class_token')
  rows, columns = 3, 3
  conv = of['patches']['conv']
  x = np.stack(
    [
      np.einsum('bhwc,hwcd->bd', image[:, 2 * i : 2 * i + 2, 3 * j : 3 * j + 3], conv['w']) + conv['b']
      for i in range(rows)
      for j in range(columns)
    ],
    axis=1,
  )
  if 'position' not in of:
    x = x + sinusoids(rows, columns)
  if 'class_token' in of:
    x = np.concatenate([np.broadcast_to(of['class_token'], (len(x), 1, D)), x], axis=1)
  if 'position' in of:
    x = x + of['position']['w']
  for i in range(2):
    block = jax.tree.map(lambda w, i=i: w[i], of['transformer']['layers'])
    y = norm(x, block['attention_norm'])
    x = x + attend(y, y, block['attention'])
    x = x + feed(norm(x, block['ff_norm']), block['ff'])
  x = norm(x, of['final_norm'])
  if pooling == 'class_token':
    x = x[:, 0]
  elif pooling == 'mean':
    x = x[:, int('class_token' in of) :].mean(1)
  else:
    head = of['pooling_layer']
    x = attend(np.broadcast_to(head['probe'], (len(x), 1, D)), x, head['attention'])
    x = (x + feed(norm(x, head['norm']), head['ff']))[:, 0]
  if 'representation' in of:
    linear = of['representation']['linear']
    x = np.tanh(x @ linear['w'] + linear['b'])
  logits = x @ variables['softmax']['w'] + variables['softmax']['b']
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', KINDS)
def test_it_is_its_formula_for_images_that_patches_do_not_fill(kind):
  model, variables = make(kind)
  batch = batch_of()
  expected = by_hand(kind, variables, batch['image'])
  assert np.ptp(expected, axis=0).max() > 0.05
  found, _ = model.apply(variables, batch, method='predict', do_eval=True)
  np.testing.assert_allclose(np.log(found['probabilities']), expected, atol=2e-5)
  one = {name: x[:1] for name, x in batch.items()}
  found, _ = model.apply(variables, one, method='predict', do_eval=True)
  np.testing.assert_allclose(np.log(found['probabilities']), expected[:1], atol=2e-5)
  # Pixels beyond the last whole patch are not seen.
  batch['image'][:, 6:], batch['image'][:, :, 9:] = 9, 9
  np.testing.assert_allclose(by_hand(kind, variables, batch['image']), expected, atol=1e-12)


@pytest.mark.slow
def test_weight_decay_leaves_out_positions_the_class_token_biases_and_norms():
  weights = leaves_by_path(image_classifier(num_classes=V, **SIZES).instantiate().abstract_init())
  decayed = {
    path_name(p) for p, w in weights.items() if WeightHParamsCollection.SKIP_REGULARIZATION not in w.collections
  }
  assert all(name.endswith('.w') for name in decayed) and 'softmax.w' in decayed
  assert weights.keys() >= {('network', 'class_token'), ('network', 'position', 'w')}
  assert not decayed & {'network.class_token', 'network.position.w'}


@pytest.mark.slow
def test_bfloat16_has_nearly_the_same_probabilities_and_a_loss_in_float32():
  model, variables = make('attention')
  half = config('attention', fprop_dtype=jnp.bfloat16).instantiate()
  (metrics, _), _ = half.apply(variables, batch_of(), do_eval=True)
  assert metrics['loss'][0].dtype == jnp.float32
  (expected, _), _ = model.apply(variables, batch_of(), do_eval=True)
  np.testing.assert_allclose(metrics['loss'][0], expected['loss'][0], atol=0.03)


@pytest.mark.slow
def test_rows_of_padding_may_hold_nan():
  model, variables = make()
  batch = batch_of()
  bad = {**batch, 'image': np.where(batch['weights'][:, None, None, None] == 0, np.nan, batch['image'])}

  def gradients(batch):
    return jax.jit(jax.grad(lambda v: model.apply(v, batch, do_eval=True)[0][0]['loss'][0]))(variables)

  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-7), gradients(bad), gradients(batch))


# ------------------------------------------------------------------ meshes


def after_a_step(kind, mesh=None, stages=None, **fields):
  """The loss, and the variables after a step of gradient descent at a rate of 1, which are those minus gradients."""
  split = {'batch_axes': 'data'} if stages else {}
  model = set_sharding(config(kind, remat='full' if mesh else 'none', **fields), **split)
  if stages:
    set_pipeline(model, num_stages=stages, num_microbatches=2, stage_axis='replica', batch_axes='data')
  return take_a_step(model, batch_of(), mesh, rows='data' if stages else ('replica', 'data'))


@functools.cache
def on_one_device(kind):
  return after_a_step(kind)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, mesh, stages',
  [
    ('attention', (1, 2, 2, 2), None),
    ('class', (1, 1, 3, 1), None),
    ('mean_beside_class', (2, 1, 1, 3), None),
    ('class', (1, 2, 2, 1), 2),
  ],
)
def test_a_step_on_a_mesh_that_divides_nothing_is_that_of_one_device(kind, mesh, stages):
  (loss, variables), (expected, one) = after_a_step(kind, mesh, stages), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


def test_blocks_ends_and_head_are_split():
  p = set_sharding(config('attention', representation=True))
  tree = {
    path_name(path): w.full_split_dims_mapping for path, w in leaves_by_path(p.instantiate().abstract_init()).items()
  }
  assert tree['network.patches.conv.w'] == (None, None, None, 'data')
  assert tree['network.transformer.layers.attention.query.w'] == (None, 'data', 'mdl', None)
  assert tree['network.pooling_layer.attention.out.w'] == ('mdl', None, 'data')
  assert tree['network.pooling_layer.ff.up.w'] == ('data', 'mdl')
  assert tree['network.representation.linear.w'] == tree['softmax.w'] == ('data', 'mdl')
  assert set_sharding(p.network_tpl) is p.network_tpl


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
  'change, says',
  [
    ({'pooling': 'max'}, "vision_transformer: pooling.*'max'"),
    ({'class_token': False}, r"network\.pooling: 'class_token' needs a class token; set class_token=True"),
    ({'patch_size': (8, 3)}, r'network\.patch_size: a patch of \(8, 3\) is larger than the image, \(7, 11\)'),
    ({'image_size': (7, 11, 2)}, r'network\.image_size: expected tuple\[int, int\], got \(7, 11, 2\)'),
    ({'image_size': 0}, r'network\.image_size: expected \(height, width\) of at least 1, got \(0, 0\)'),
    ({'positions': 'sinusoidal', 'model_dims': 6}, r'network\.position\.dims: expected a multiple of 4, got 6'),
  ],
)
def test_mistakes_of_a_config_are_named(change, says):
  with pytest.raises(ConfigError, match=says):
    config(**change).instantiate()


def test_images_of_another_size_are_named():
  model, variables = make()
  batch = batch_of()
  for image, says in (
    (batch['image'][:, :6], r'network\.image_size: \(7, 11\), but images have shape \[5, 6, 11, 2\]'),
    (batch['image'][..., :1], r'network\.patches\.channels: 2, so images are \[B, height, width, 2\]'),
    (batch['image'][..., 0], r'network\.patches\.channels: 2, so images are'),
  ):
    with pytest.raises(ConfigError, match=says):
      jax.eval_shape(lambda v, image=image: model.apply(v, {**batch, 'image': image}, do_eval=True), variables)


# ------------------------------------------------------------------ another size of images


@pytest.mark.slow
def test_a_run_with_larger_images_starts_from_resampled_positions(tmp_path, capsys):
  sizes = {'patch_size': 2, 'channels': 1, 'model_dims': 8, 'num_layers': 1, 'num_heads': 2, 'hidden_dims': 8}

  def experiment(size, mesh):
    task = Config(SingleTask, model=set_sharding(image_classifier(num_classes=2, image_size=size, **sizes)))
    task.set(mesh_axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=mesh)
    task.model.network_tpl.position_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
    task.train.set(num_train_steps=1, save_interval_steps=1, eval_interval_steps=None)
    task.train.learner.set(learning_rate=0.0)
    height, width = size if isinstance(size, tuple) else (size, size)
    arrays = {'image': np.ones((4, height, width, 1), np.float32), 'label': np.zeros(4, np.int32)}
    return ExperimentConfig(task, [Config(ArrayInput, arrays=arrays, batch_size=4, is_training=True)], [])

  run_train(experiment(6, (1, 1, 1)), tmp_path / 'small')
  large = experiment((8, 10), (1, 2, 2))
  large.task.train.init_from.path = str(tmp_path / 'small')
  run_train(large, tmp_path / 'large')
  assert 'resampled  network.position.w: positions of 3 x 3 to 4 x 5 patches' in capsys.readouterr().out
  old, new = (
    np.asarray(open_run(tmp_path / n).load().variables['network']['position']['w']) for n in ('small', 'large')
  )
  expected = resample_positions(jnp.asarray(old), PositionGrid(3, 3, 1), PositionGrid(4, 5, 1))
  np.testing.assert_allclose(new[:21], expected, atol=1e-6)
  # `partial` copies the first positions as before.
  odd = experiment((8, 10), (1, 1, 1))
  odd.task.train.init_from.set(path=str(tmp_path / 'small'), partial=('network.position.w',))
  run_train(odd, tmp_path / 'odd')
  assert 'partial   network.position.w: (10, 8) of (21, 8)' in capsys.readouterr().out
