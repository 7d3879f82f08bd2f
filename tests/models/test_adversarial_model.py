"""AdversarialModel, and learners with losses of their own: each part learns from its loss, on any mesh, and resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import praxis_lite
from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, UserError
from praxis_lite.experiments.digits import digits
from praxis_lite.experiments.generative import DigitsGan
from praxis_lite.layers import ImageDecoder, ImageEncoder
from praxis_lite.models import AdversarialModel
from praxis_lite.runs import run_train
from praxis_lite.training import PartitionedTask
from praxis_lite.training.experiment import configure
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner
from praxis_lite.training.steps import loss_and_gradients
from praxis_lite.training.task import SingleTask

IMAGES = np.random.default_rng(0).random((5, 4, 4, 1)).astype(np.float32)
BATCH = {'image': IMAGES, 'weights': np.array([1, 2, 0, 1, 1], np.float32)}


def gan(**fields: Any) -> Config:
  return Config(
    AdversarialModel,
    generator_tpl=Config(ImageDecoder, channels=(4,)),
    discriminator_tpl=Config(ImageEncoder, image_channels=1, channels=(5,)),
    latent_dims=3,
    image_size=(4, 4),
    **fields,
  )


def task(mesh: tuple[int, ...] = (1, 1), partitioning: str = 'auto', microbatches: int = 1, **fields: Any) -> Config:
  made = Config(
    SingleTask, model=gan(), mesh_axis_names=('data', 'unused'), ici_mesh_shape=mesh, partitioning=partitioning
  )
  losses = {'generator': 'generator_loss', 'discriminator': 'discriminator_loss'} | fields
  rules = [
    Config(
      LearnerRule,
      name=name,
      regex=rf'{name}\..*',
      loss=losses[name],
      learner=Config(Learner, optimizer=Config(optax.sgd, momentum=0.9), learning_rate=0.1),
    )
    for name in ('generator', 'discriminator')
  ]
  made.train.learner = Config(MultiLearner, rules=tuple(rules), num_microbatches=microbatches)
  return made


def test_each_part_has_the_gradient_of_its_own_loss() -> None:
  """The oracle differentiates one loss at a time by all variables, without a learner."""
  made = task().instantiate()
  variables, key = made.model.init(jax.random.key(0)), jax.random.key(1)
  step = jnp.int32(3)

  def loss(variables: Any, name: str) -> jax.Array:
    (metrics, _), _ = made.model.apply(variables, BATCH, key=jax.random.fold_in(key, step), do_eval=False)
    return metrics[name][0]

  total, found = loss_and_gradients(made, variables, step, key, BATCH)
  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  both = [gradient(variables, f'{part}_loss')[part] for part in ('generator', 'discriminator')]
  for part, expected in zip(('generator', 'discriminator'), both):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found[part], expected)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) > 1e-5
  np.testing.assert_allclose(total, loss(variables, 'loss'), rtol=1e-6)
  summed = gradient(variables, 'loss')['generator']  # Which would also help the discriminator.
  assert not np.allclose(jax.tree.leaves(summed)[0], jax.tree.leaves(found['generator'])[0], rtol=1e-2)


def after_steps(config: Config, start: Any = None) -> tuple[Any, Any]:
  partitioned = PartitionedTask(config.instantiate(), BATCH)
  start = partitioned.unpad(partitioned.init_state(jax.random.key(0))) if start is None else start
  state = partitioned.pad(start)
  for _ in range(2):
    state = partitioned.train_step(state, jax.random.key(1), BATCH).state
  return start, partitioned.unpad(state)


def test_a_mesh_that_does_not_divide_the_batch_changes_nothing() -> None:
  """An axis of 3 for the rows, and an unused one: momentum is the sum of gradients."""
  start, expected = after_steps(task())
  _, found = after_steps(task((3, 2)), start)
  assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(expected)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def test_padding_may_hold_anything_and_the_latent_of_a_row_is_its_own() -> None:
  model = gan().instantiate()
  variables, key = model.init(jax.random.key(0)), jax.random.key(2)
  (metrics, _), _ = model.apply(variables, BATCH, key=key)
  spoilt = {**BATCH, 'image': np.where(BATCH['weights'][:, None, None, None] == 0, np.nan, IMAGES)}
  (again, _), _ = model.apply(variables, spoilt, key=key)
  assert {name: float(x) for name, (x, _) in again.items()} == {name: float(x) for name, (x, _) in metrics.items()}
  images, _ = model.apply(variables, BATCH, key=key, method='predict')
  fewer, _ = model.apply(variables, {'image': IMAGES[:2]}, key=key, method='predict')
  assert images['image'].shape == IMAGES.shape
  np.testing.assert_allclose(fewer['image'], images['image'][:2], rtol=1e-5, atol=1e-6)
  seeds = {'seed': np.array([7, 1, 7], np.int32)}
  of_seeds, _ = model.apply(variables, seeds, key=key, method='predict')
  expected = np.asarray(images['image'])[1]
  np.testing.assert_allclose(of_seeds['image'][1], expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(of_seeds['image'][0], of_seeds['image'][2])
  assert not np.allclose(of_seeds['image'][0], expected)
  with pytest.raises(DataError, match=r'to make images, a batch has seed, got .*latent'):
    model.apply(variables, {'latent': np.ones(2)}, key=key, method='predict')


def test_a_loss_that_the_model_does_not_have_and_images_of_another_size_are_refused() -> None:
  made = task(generator='generator_los').instantiate()
  with pytest.raises(ConfigError, match=r"the loss 'generator_los', but the model has only .* Did you mean"):
    loss_and_gradients(made, made.model.init(jax.random.key(0)), jnp.int32(0), jax.random.key(1), BATCH)
  with pytest.raises(ConfigError, match=r'image_size: expected images .* multiples of 2'):
    gan().set(image_size=(4, 5)).instantiate()
  data = configure(DigitsGan).datasets[0].instantiate()
  with pytest.raises(ConfigError, match=r'has images \[4, 4, 1\], but those of task\.model are \[8, 8, 1\]'):
    configure(DigitsGan).task.model.instantiate().check_input(data, BATCH)


# ---------------------------------------------------------------- whole runs


def frechet_distance(images: np.ndarray, others: np.ndarray) -> float:
  """Between normal distributions of pixels with the means and covariances of two sets of images."""
  a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (images, others))
  cov_a, cov_b = np.cov(a.T), np.cov(b.T)
  root = np.sqrt(np.clip(np.linalg.eigvals(cov_a @ cov_b).real, 0, None)).sum()
  return float(np.square(a.mean(0) - b.mean(0)).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * root)


def small_run(steps: int) -> Config:
  config = configure(DigitsGan)
  config.datasets = config.datasets[:1]
  config.datasets[0].batch_size = 8
  config.task.model.generator_tpl.channels = (4, 4)
  config.task.model.discriminator_tpl.channels = (4, 4)
  config.task.train.set(num_train_steps=steps, log_interval_steps=1, save_interval_steps=5, eval_interval_steps=10**6)
  return config


KILLED = """
import sys
from test_adversarial_model import run_train, small_run
run_train(small_run(10**6), sys.argv[1])
"""


@pytest.mark.slow
def test_killed_it_resumes_with_the_same_bits_and_a_learner_less_or_more_is_an_error(tmp_path: Path) -> None:
  with subprocess.Popen(
    [sys.executable, '-c', KILLED, str(tmp_path / 'killed')],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(Path(__file__).parent), *sys.path])},
  ) as process:
    assert process.stdout is not None
    next(line for line in process.stdout if re.match(r'step \d{3,}/', line))
    process.kill()
    process.communicate()
  assert process.returncode == -signal.SIGKILL
  reader = Checkpointer(tmp_path / 'killed', read_only=True)
  saved = reader.latest_step()
  reader.close()
  assert saved is not None and saved >= 5
  found = run_train(small_run(saved + 3), tmp_path / 'killed')
  expected = run_train(small_run(saved + 3), tmp_path / 'whole')
  jax.tree.map(np.testing.assert_array_equal, found.state, expected.state)
  fewer, more = small_run(saved + 6), small_run(saved + 6)
  fewer.task.train.learner = Config(Learner, optimizer=Config(optax.adam))
  more.task.train.learner.rules[0].regex = r'generator\.enter\..*'
  rest = more.task.train.learner.rules[0].clone(name='rest', regex=r'generator\.(up|out).*')
  more.task.train.learner.rules = (*more.task.train.learner.rules, rest)
  for config in (fewer, more):
    with pytest.raises(UserError) as error:
      run_train(config, tmp_path / 'killed')
    assert 'opt_states' in str(error.value)


@pytest.mark.slow
def test_digits_are_made_that_are_more_like_real_ones(tmp_path: Path) -> None:
  """The distance is 10.6 after one step, 1.1 after 300, 4.8 if all are the mean, and 0.1 between the real splits."""
  config = configure(DigitsGan)
  config.task.train.set(num_train_steps=300, eval_interval_steps=10**6, save_interval_steps=300)
  run_train(config, tmp_path)
  loaded, real = praxis_lite.open_run(tmp_path).load(), digits('validation')['image']
  assert frechet_distance(np.asarray(loaded.predict({'image': real})['image']), real) < 2.5
