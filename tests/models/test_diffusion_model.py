"""DiffusionModel: its loss, classifier-free guidance, seeds, meshes, and that its experiment makes digits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.experiments.generative import DigitsDiffusion, DitXl
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.layers import DiffusionTransformer
from praxis_lite.models import DiffusionModel
from praxis_lite.models.labels import check_ids_in_tables
from praxis_lite.runs import run_train
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig, configure
from praxis_lite.training.task import SingleTask

KEY = jax.random.key(3)


def model(**fields):
  network = Config(DiffusionTransformer, image_channels=1, model_dims=8, num_layers=1, num_heads=2, num_classes=3)
  return Config(DiffusionModel, network_tpl=network, image_size=(4, 6), num_sampling_steps=3, **fields)


def drawn(layer):
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda w: (0.3 * rng.standard_normal(w.full_shape)).astype(np.float32), layer.abstract_init())


def images_of(config, batch, variables=None):
  layer = config.instantiate()
  variables = drawn(layer) if variables is None else variables
  return np.asarray(layer.apply(variables, batch, key=KEY, do_eval=True, method='predict')[0]['image'])


def test_loss_is_the_mean_of_squared_errors_and_rows_of_weight_zero_count_in_nothing():
  layer = model().instantiate()
  batch = {
    'image': np.random.default_rng(0).random((3, 4, 6, 1)).astype(np.float32),
    'label': np.array([0, 99, 2], np.int32),
    'weights': np.array([1.0, 0.0, 2.0], np.float32),
  }
  batch['image'][1] = np.nan
  outputs = jax.jit(lambda variables, batch: layer.apply(variables, batch, key=KEY)[0])
  metrics, per_example = outputs(drawn(layer), batch)
  loss = np.asarray(per_example['loss'])
  assert metrics['loss'][0] == pytest.approx((loss[0] + 2 * loss[2]) / 3, rel=1e-5) and loss[0] > 0
  first = {name: x[:1] for name, x in batch.items()}
  alone, _ = outputs(drawn(layer), first)  # A row draws the same numbers in any batch.
  assert alone['loss'][0] == pytest.approx(loss[0], rel=1e-5)
  gradient = jax.jit(jax.grad(lambda v: outputs(v, batch)[0]['loss'][0]))(drawn(layer))
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_images_depend_on_seed_and_class_alone():
  label, seed = np.array([0, 1, 1, 0], np.int32), np.array([5, 5, 7, 5], np.int32)
  images = images_of(model(), {'label': label, 'seed': seed})
  assert images.shape == (4, 4, 6, 1) and images.min() >= 0 and images.max() <= 1
  np.testing.assert_allclose(images[3], images[0], atol=1e-6)
  assert abs(images[1] - images[0]).max() > 1e-3 and abs(images[2] - images[1]).max() > 1e-3
  np.testing.assert_allclose(images_of(model(), {'label': label[2:3], 'seed': seed[2:3]})[0], images[2], atol=1e-5)
  numbered = images_of(model(), {'label': label})
  np.testing.assert_allclose(numbered, images_of(model(), {'label': label, 'seed': np.arange(4)}), atol=1e-6)


@pytest.mark.slow_cases
@pytest.mark.parametrize('sampler', ['ancestral', 'euler'])
def test_guidance_goes_from_no_class_to_the_class_and_beyond(sampler):
  config = model(sampler=sampler, schedule='cosine', prediction='v', sample_limit=None).set(num_sampling_steps=1)
  label = np.array([1], np.int32)
  none, own, double = (images_of(config.set(guidance=w), {'label': label}) for w in (0.0, 1.0, 2.0))
  np.testing.assert_allclose(double - own, own - none, atol=1e-4)  # A single step is linear in the prediction.
  np.testing.assert_allclose(none, images_of(config.set(guidance=1.0), {'label': np.array([3])}), atol=1e-5)
  by_row = {'label': np.array([1, 1]), 'seed': np.array([0, 0]), 'guidance': np.array([1.0, 2.0])}
  np.testing.assert_allclose(images_of(config, by_row), np.concatenate([own, double]), atol=1e-4)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r"prediction: 'v' needs the schedule"):
    model(prediction='v').instantiate()
  with pytest.raises(ConfigError, match=r"sampler: .*'heun'"):
    model(sampler='ddpm').instantiate()
  with pytest.raises(DataError, match='to make images, a batch needs label, and perhaps seed and guidance; it has '):
    images_of(model(), {'seed': np.array([1])})
  layer, data = model().instantiate(), configure(DigitsDiffusion).datasets[0].instantiate()
  with pytest.raises(ConfigError, match=r"expected images \[B, 4, 6, 1\] in 'image'"):
    layer.check_input(data, data.get_next())
  with pytest.raises(ConfigError, match=r"found 3 in 'label', but task\.model\.network\.num_classes is 3"):
    layer.check_input(data, {'image': np.zeros((1, 4, 6, 1)), 'label': np.array([3])})


def test_a_class_that_the_model_does_not_have_is_refused_before_an_image_is_made():
  config = ExperimentConfig(Config(SingleTask, model=model()), [])
  jax_task = config.task.instantiate()
  tasks = TaskOnMesh.make_for_inference(jax_task, jax_task.create_mesh())
  variables = tasks.layout.mdl_vars.to_mesh(drawn(jax_task.model))
  trained = TrainedModel(config, tasks, variables, jnp.int32(0))
  images = {'image': np.zeros((2, 4, 6, 1), np.float32)}
  for bad in (17, -1):
    message = rf'^label {bad}: the model has classes 0 to 2, and 3 stands for any class$'
    with pytest.raises(DataError, match=message):
      trained.predict({'label': np.array([1, bad]), 'seed': np.array([1, 1])})
    with pytest.raises(DataError, match=message):
      trained.evaluate_examples({**images, 'label': np.array([1, bad])})
  check_ids_in_tables(jax_task.model.id_limits(), {'label': np.array([3, 99]), 'weights': np.array([1.0, 0.0])})


def test_the_published_size_has_the_published_number_of_parameters():
  """675,129,632 include the fixed table of positions, and outputs for learned variances, which are not here."""
  config = configure(DitXl)
  count = sum(np.prod(w.full_shape) for w in jax.tree.leaves(config.task.model.instantiate().abstract_init()))
  assert count == 674_816_272
  assert count + 256 * 1152 + (1152 + 1) * 2 * 2 * 4 == 675_129_632


@pytest.mark.slow
def test_a_mesh_that_does_not_divide_the_batch_changes_nothing():
  config = configure(DigitsDiffusion)
  config.datasets[0].batch_size = 5
  config.task.set(mesh_axis_names=('data', 'unused'), ici_mesh_shape=(3, 2))
  config.task.model.network_tpl.set(num_layers=1, model_dims=12, num_heads=3)
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)


@pytest.mark.slow
def test_a_short_run_learns_and_makes_the_same_images_on_a_mesh(tmp_path):
  """A network that predicts zero has a loss of 1.7, and one that reads each pixel alone 0.85 at best.

  The guide says how well a whole run makes digits.
  """
  config = configure(DigitsDiffusion)
  config.task.train.set(num_train_steps=250, eval_interval_steps=250, save_interval_steps=250)
  config.task.model.network_tpl.num_layers = 2
  config.task.model.num_sampling_steps = 12
  assert run_train(config, tmp_path).metrics['eval/validation']['loss'] < 0.8
  run, label = praxis_lite.open_run(tmp_path), np.arange(5, dtype=np.int32)
  images = run.load().predict({'label': label})['image']
  other = run.load(ema=False).predict({'label': label})['image']
  assert abs(other - images).max() > 0.01  # Averages are used unless one says otherwise.
  again = run.load(mesh=(3,)).predict({'label': label})['image']
  np.testing.assert_allclose(again, images, atol=1e-3)


def test_bfloat16_runs():
  layer = model(fprop_dtype=jnp.bfloat16).instantiate()
  images = layer.apply(drawn(layer), {'label': np.array([0, 1])}, key=KEY, do_eval=True, method='predict')[0]['image']
  assert images.dtype == jnp.float32 and np.isfinite(images).all()
