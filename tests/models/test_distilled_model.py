"""A language model that learns from another: its loss by hand, its gradients on any mesh, and mistakes."""

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
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers import Lora
from praxis_lite.models import set_sharding, transformer_encoder, transformer_lm
from praxis_lite.models.distilled_model import kl_divergence, stored_divergence
from praxis_lite.training import train_distillation
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, B, T = 13, 5, 6


def lm(**fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 1, 'num_heads': 3, 'hidden_dims': 10}
  return set_sharding(transformer_lm(**{**sizes, **fields}))


def task_of(temperature=2.0, weight=0.7, **teacher):
  task = Config(SingleTask, model=lm())
  teacher = lm(**{'model_dims': 18, 'num_layers': 2, **teacher})
  return train_distillation(task, teacher, temperature=temperature, weight=weight)


def batch_of():
  ids = np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
  weights = np.ones((B, T), np.float32)
  weights[1, 3:] = weights[4] = 0
  segments = np.ones((B, T), np.int32)
  segments[2, 4:] = 2
  positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
  positions[2, 4:] = [0, 1]
  fields = {'weights': weights, 'segment_ids': segments, 'segment_pos': positions}
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], **fields}


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.slow_cases
@pytest.mark.parametrize('chunk_size', [None, 4])
def test_the_loss_is_that_of_the_paper(chunk_size):
  config = task_of().model
  config.lm_tpl.softmax_tpl.chunk_size = chunk_size
  model, batch = config.instantiate(), batch_of()
  variables = jax.tree.map(lambda x: 4 * x, drawn_variables(model.abstract_init()))
  (metrics, per_example), _ = jax.jit(lambda v, b: model.apply(v, b, do_eval=True))(variables, batch)
  more = {name: batch[name] for name in ('segment_ids', 'segment_pos')}
  ours, theirs = (
    np.asarray(
      jax.jit(lambda v, n=name: getattr(model, n).apply(v, batch['ids'], **more, do_eval=True, method='logits')[0])(
        variables[name]
      ),
      np.float64,
    )
    for name in ('lm', 'teacher')
  )
  weights = batch['weights']
  xent = -np.take_along_axis(log_softmax(ours), batch['labels'][..., None], -1)[..., 0]
  p, q = log_softmax(theirs / 2), log_softmax(ours / 2)
  divergence = (np.exp(p) * (p - q)).sum(-1)
  total = weights.sum()
  expected = {
    'xent': (xent * weights).sum() / total,
    'divergence': (divergence * weights).sum() / total,
    'accuracy': ((ours.argmax(-1) == batch['labels']) * weights).sum() / total,
    'agreement': ((ours.argmax(-1) == theirs.argmax(-1)) * weights).sum() / total,
  }
  expected['loss'] = 0.3 * expected['xent'] + 0.7 * 4 * expected['divergence']
  assert metrics.keys() == expected.keys() and expected['divergence'] > 0.01
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], [value, total], rtol=1e-5, err_msg=name)
  assert per_example['loss'].shape == (B,) and per_example['weights'].tolist() == [6, 3, 6, 6, 0]


def log_probs_by_hand(seed, shape=(B, T, V)):
  return log_softmax(3 * np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize('k', [1, 4, V])
def test_tokens_that_are_not_stored_count_as_one(k):
  p, q = log_probs_by_hand(0), log_probs_by_hand(1)
  ids = np.argsort(-p, axis=-1)[..., :k].astype(np.int32)
  kept_p = np.take_along_axis(p, ids, -1).astype(np.float32)
  stored, gradient = jax.value_and_grad(lambda q: stored_divergence(jax.nn.log_softmax(q), ids, kept_p).sum())(
    np.float32(q)
  )
  expected, by_q = 0.0, np.zeros_like(q)
  for at in np.ndindex(B, T):
    kept = ids[at]
    others = np.setdiff1d(np.arange(V), kept)
    mass = [np.exp(x[at][others]).sum() for x in (p, q)]
    expected += sum(np.exp(p[at][i]) * (p[at][i] - q[at][i]) for i in kept)
    expected += mass[0] * (np.log(mass[0]) - np.log(mass[1])) if len(others) else 0
    by_q[at] = np.exp(q[at])
    by_q[at][kept] -= np.exp(p[at][kept])
    by_q[at][others] -= mass[0] * np.exp(q[at][others]) / mass[1] if len(others) else 0
  np.testing.assert_allclose(stored, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient, by_q, atol=1e-5)
  if k == V:
    np.testing.assert_allclose(stored, kl_divergence(p, q).sum(), rtol=1e-5)


def stored_batch():
  log_probs = log_probs_by_hand(2)
  ids = np.argsort(-log_probs, axis=-1)[..., :4].astype(np.int32)
  kept = np.take_along_axis(log_probs, ids, -1).astype(np.float32)
  return {**batch_of(), 'teacher_ids': ids, 'teacher_log_probs': kept}


def after_a_stored_step(mesh=None):
  task = train_distillation(Config(SingleTask, model=lm()), None, weight=0.7)
  rows = ('replica', 'data')
  return take_a_step(task.model, stored_batch(), mesh, rows)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(2, 1, 3, 1), (1, 2, 2, 2)], ids=str)
def test_a_step_with_stored_probabilities_on_a_mesh_is_that_of_one_device(mesh):
  (loss, variables), (expected, one) = after_a_stored_step(mesh), after_a_stored_step()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


def after_a_step(mesh=None, **fields):
  return take_a_step(task_of().model, batch_of(), mesh, frozen=(r'teacher\..*',), **fields)


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


@pytest.mark.slow
def test_explicit_collectives():
  (loss, variables), (expected, one) = after_a_step((1, 1, 3, 1), partitioning='shard_map'), on_one_device()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


def test_the_learner_leaves_the_teacher_alone():
  task = task_of().instantiate()
  trained = task.bind_learner().select_trained(task.model.abstract_init())
  assert set(trained) == {'lm'}


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'temperature': 0.0}, r'temperature'),
    ({'weight': 1.5}, r'weight'),
    ({'vocab_size': 12}, r'the teacher has 12 tokens, and the model 13; both need the same tokenizer'),
  ],
)
def test_mistakes_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    task_of(**fields).model.instantiate()


@pytest.mark.parametrize(
  'change, message',
  [
    ({'adapters': Config(Lora, rank=2)}, r'teacher.adapters: .*; merge them first'),
    ({'adapters': (Config(Lora, rank=2),)}, r'teacher.adapters: .*; merge them first'),
    ({'model_type': 'prefix'}, r"teacher.model_type: a teacher must be 'causal'.*, got 'prefix'"),
  ],
)
def test_a_teacher_that_would_silently_be_another_model_is_an_error(change, message):
  with pytest.raises(ConfigError, match=message):
    train_distillation(Config(SingleTask, model=lm()), lm().set(**change))


def test_a_teacher_is_a_language_model():
  encoder = transformer_encoder(vocab_size=V, model_dims=9, max_len=T, num_layers=1, num_heads=3, hidden_dims=10)
  with pytest.raises(ConfigError, match=r'teacher: expected a LanguageModel, got TransformerEncoder'):
    train_distillation(Config(SingleTask, model=lm()), encoder)


def test_a_learner_that_would_train_the_teacher_is_an_error():
  task = task_of().set(train=Config(SingleTask).train)
  message = r"task.train.learner.bprop_variable_exclusion: teacher.* would be trained.*; set it to \('teacher"
  with pytest.raises(ConfigError, match=message):
    task.instantiate()


def test_what_a_model_with_stored_probabilities_needs():
  model = train_distillation(Config(SingleTask, model=lm()), None).model
  for batch in (batch_of(), {**batch_of(), 'teacher_ids': stored_batch()['teacher_ids']}):
    with pytest.raises(ConfigError, match=r'its batches have no probabilities of a teacher'):
      model.instantiate().check_input(ArrayInput(name='train', arrays=batch, batch_size=B), batch)
  batch = stored_batch()
  model.instantiate().check_input(ArrayInput(name='train', arrays=batch, batch_size=B), batch)
  batch['teacher_ids'][0, 0, 0] = V
  with pytest.raises(ConfigError, match=rf'train: its teacher_ids go up to {V}, but task.model.vocab_size is {V}'):
    model.instantiate().check_input(ArrayInput(name='train', arrays=batch, batch_size=B), batch)
  with pytest.raises(ConfigError, match=r'temperature: 2.0, and probabilities are stored at the temperature 1'):
    model.set(temperature=2.0).instantiate()
