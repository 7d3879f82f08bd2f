"""Rows of weight 0 may hold NaN: loss and gradients of every kind of model are those with ordinary numbers there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_adversarial_model
import test_ctc_model
import test_diffusion_model
import test_distilled_model
import test_masked_image_model
import test_on_policy_model
import test_policy_model
import test_preference_model
import test_transducer_model
import test_two_towers
import test_vq_vae
from drawn_state import drawn_variables

from praxis_lite.common.config import Config, template
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.layers import Linear, Mlp
from praxis_lite.layers.base import SplitMapping
from praxis_lite.models import BaseModel, ClassificationModel, Kto, whisper
from praxis_lite.training import train_distillation, train_policy
from praxis_lite.training.task import SingleTask


class Regression(BaseModel[jax.Array]):
  """A model as a user writes it: nothing in it knows of rows that do not count."""

  activation_split_dims_mapping: Config = template(SplitMapping)

  def setup(self):
    self.create_child('linear', Config(Linear, input_dims=3, output_dims=1))

  def compute_predictions(self, batch):
    return self.linear(batch['x'])[:, 0]

  def compute_loss(self, predictions, batch):
    return {'loss': weighted_mean(jnp.square(predictions - batch['y']), batch['weights'])}, {}


def of_numbers():
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal((3, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
  return Config(Regression), {'x': x, 'y': y, 'weights': np.array([1, 0, 2], np.float32)}


def classifier():
  image = np.random.default_rng(0).standard_normal((3, 4, 4, 1)).astype(np.float32)
  model = Config(ClassificationModel, num_classes=3, network_tpl=Config(Mlp, input_dims=16, hidden_dims=(5,)))
  return model, {'image': image, 'label': np.array([0, 1, 2], np.int32), 'weights': np.array([1, 0, 2], np.float32)}


def diffusion():
  _, batch = classifier()
  return test_diffusion_model.model(), {**batch, 'image': np.ones((3, 4, 6, 1), np.float32)}


def whisper_of_sound():
  model = whisper(vocab_size=11, model_dims=8, num_layers=1, num_heads=2, hidden_dims=8, max_len=4, max_source_len=8)
  model.frontend_tpl.window_length, model.lm_tpl.num_mels = 16 * 160, 5
  rng = np.random.default_rng(0)
  ids, audio = rng.integers(0, 11, (3, 4)).astype(np.int32), rng.standard_normal((3, 2000)).astype(np.float32)
  weights = np.repeat(np.array([[1], [0], [2]], np.float32), 4, axis=1)
  sound = {'audio': audio, 'audio_lengths': np.full(3, 1800, np.int32)}
  return model, {**sound, 'ids': ids, 'labels': ids, 'weights': weights}


def distilled():
  batch = test_distilled_model.batch_of()
  rng = np.random.default_rng(0)
  shape = (*batch['ids'].shape, 3)
  log_probs = np.log(rng.uniform(0.05, 0.3, shape)).astype(np.float32)
  ids = np.broadcast_to(np.arange(3, dtype=np.int32), shape)
  model = train_distillation(Config(SingleTask, model=test_distilled_model.lm()), None).model
  return model, {**batch, 'teacher_ids': ids, 'teacher_log_probs': log_probs}


def policy():
  task = Config(SingleTask, model=test_on_policy_model.lm())
  return train_policy(task, test_policy_model.LOSS).model, test_on_policy_model.batch_of()


CASES = {
  'of_numbers': of_numbers,
  'vq_vae': lambda: (test_vq_vae.model(), test_vq_vae.batch()),
  'adversarial': lambda: (test_adversarial_model.gan(), test_adversarial_model.BATCH),
  'masked_images': lambda: (test_masked_image_model.config(), test_masked_image_model.batch_of()),
  'two_towers': lambda: (test_two_towers.config(), test_two_towers.batch_of()),
  'classifier': classifier,
  'diffusion': diffusion,
  'ctc': lambda: (test_ctc_model.config(), test_ctc_model.batch_of()),
  'transducer': lambda: (test_transducer_model.config(), test_ctc_model.batch_of()),
  'whisper': whisper_of_sound,
  'rewards': lambda: (test_preference_model.task_of('rewards').model, test_preference_model.batch_of()),
  'preferences': lambda: (test_preference_model.task_of(Kto).model, test_preference_model.batch_of()),
  'policy': policy,
  'on_policy': lambda: (test_on_policy_model.task_of().model, test_on_policy_model.batch_of()),
  'distilled': distilled,
}


def with_numbers(batch, numbers):
  """A batch whose rows of weight 0 have these numbers in turn, in all of their arrays of floats but the weights."""
  weights = batch['weights']
  is_filler_B = np.reshape(weights, (len(weights), -1)).max(1) == 0
  assert 0 < is_filler_B.sum() < len(weights)

  def spoil(x):
    x = np.array(x)
    if x.dtype.kind == 'f':
      x[is_filler_B] = np.resize(numbers, x[is_filler_B].shape)
    return x

  return {**jax.tree.map(spoil, batch), 'weights': weights}


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', CASES)
def test_loss_and_gradients_are_those_with_ordinary_numbers_there(kind):
  config, batch = CASES[kind]()
  model = config.instantiate()
  variables = drawn_variables(model.abstract_init())

  @jax.jit
  def step(batch):
    def loss(variables):
      (metrics, _), side = model.apply(variables, batch, key=jax.random.key(0), do_eval=False)
      return metrics['loss'][0], (metrics, side.aux_losses, side.updates)

    return jax.value_and_grad(loss, has_aux=True)(variables)

  expected = step(with_numbers(batch, [0.0]))
  assert any(np.any(x) for x in jax.tree.leaves(expected[1]))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
  found = step(with_numbers(batch, [np.nan, np.inf, -np.inf]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
