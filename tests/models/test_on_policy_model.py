"""A model whose own answers a teacher corrects: its loss by hand, its steps on any mesh, and mistakes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.models import Grpo, set_sharding, transformer_lm
from praxis_lite.training import train_on_policy
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, B, T = 13, 6, 7


def lm(**fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 1, 'num_heads': 3, 'hidden_dims': 10}
  return set_sharding(transformer_lm(**{**sizes, **fields}).set(packed=False))


def task_of(**teacher):
  return train_on_policy(Config(SingleTask, model=lm()), lm(**{'model_dims': 18, **teacher}))


def batch_of():
  """Answers of different lengths; the last row has none, as one that fills up a batch."""
  generator = np.random.default_rng(0)
  ids = generator.integers(0, V, (B, T + 1)).astype(np.int32)
  lengths = np.array([7, 5, 6, 7, 4, 0])
  segments = (np.arange(T) < lengths[:, None]).astype(np.int32)
  weights = (segments * (np.arange(T) >= 2)).astype(np.float32)
  positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  rows = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights, 'segment_ids': segments}
  reward = generator.standard_normal(B).astype(np.float32)
  of_answers = {
    'reward': reward,
    'rewards': {'right': reward},
    'advantages': reward,
    'is_equal': np.zeros(B, np.float32),
  }
  return {**rows, 'segment_pos': positions, 'old_log_probs': np.zeros((B, T), np.float32), **of_answers}


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.slow_cases
@pytest.mark.parametrize('do_eval', [True, False])
def test_the_loss_is_the_divergence_of_the_model_from_the_teacher(do_eval):
  model, batch = task_of().model.instantiate(), batch_of()
  variables = jax.tree.map(lambda x: 4 * x, drawn_variables(model.abstract_init()))
  (metrics, per_example), _ = jax.jit(lambda v, b: model.apply(v, b, do_eval=do_eval))(variables, batch)
  ours, theirs = (
    log_softmax(
      np.asarray(
        getattr(model, name).apply(variables[name], batch['ids'], do_eval=True, method='logits')[0], np.float64
      )
    )
    for name in ('lm', 'teacher')
  )
  divergence, weights = (np.exp(ours) * (ours - theirs)).sum(-1), batch['weights']
  np.testing.assert_allclose(metrics['loss'], [(divergence * weights).sum() / weights.sum(), weights.sum()], rtol=1e-5)
  agrees = ours.argmax(-1) == theirs.argmax(-1)
  np.testing.assert_allclose(metrics['agreement'][0], (agrees * weights).sum() / weights.sum(), rtol=1e-5)
  np.testing.assert_allclose(metrics['reward'], [batch['reward'][:5].mean(), 5], rtol=1e-5)
  assert per_example['loss'].shape == (B,) and per_example['loss'][5] == 0


def after_a_step(mesh=None):
  return take_a_step(task_of().model, batch_of(), mesh, frozen=(r'teacher\..*',))


on_one_device = functools.cache(after_a_step)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(2, 1, 3, 1), (1, 2, 2, 2)], ids=str)
def test_a_step_on_a_mesh_is_that_of_one_device(mesh):
  (loss, variables), (expected, one) = after_a_step(mesh), on_one_device()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)
  before = leaves(drawn_variables(task_of().model.instantiate().abstract_init()))
  for path, value in one.items():
    assert np.any(value != before[path]) == (path[0] == 'lm'), path


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'the teacher has 12 tokens, and the model 13'):
    task_of(vocab_size=12).model.instantiate()
  with pytest.raises(ConfigError, match=r'loss_tpl: the loss is the divergence from the teacher'):
    task_of().model.set(loss_tpl=Config(Grpo, kl_weight=0.1)).instantiate()
  trained = task_of().instantiate()
  assert set(trained.bind_learner().select_trained(trained.model.abstract_init())) == {'lm'}
