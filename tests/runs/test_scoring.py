"""How pairs of context and continuation become rows, for models with few positions and tokenizers with merges."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import Config, SingleTask, WeightHParams
from praxis_lite.common.errors import DataError, UserError
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.models import BaseModel
from praxis_lite.models.base import ScoreLimits
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.scoring import score_rows
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig


class Merging(ByteTokenizer):
  """Token 300 stands for `ab`."""

  def encode(self, text):
    return [300 if part == 'ab' else ord(part) for part in re.findall('ab|.', text)]


def score(contexts, continuations, tokenizer=None, max_positions=None, model_type='causal', batch_size=8):
  """Scores with a model that returns the labels, negative, as log-probabilities; returns the batches too."""
  batches = []

  def run(batch):
    batches.append(batch)
    return {'log_probs': -batch['labels'].astype(np.float32), 'is_greedy': batch['labels'] > 3}

  limits = ScoreLimits(400, max_positions, takes_prefixes=model_type == 'prefix')
  return score_rows(limits, lambda: tokenizer, contexts, continuations, batch_size, run), batches


def test_rows_of_similar_length_share_a_batch():
  contexts, continuations = [[1], [2] * 40, [3, 4]], [[5, 6], [7] * 30, [8]]
  scores, batches = score(contexts, continuations, batch_size=2)
  assert [batch['ids'].shape for batch in batches] == [(2, 32), (1, 128)]
  assert [s.log_probs.tolist() for s in scores] == [[-5, -6], [-7] * 30, [-8]]
  assert [s.log_prob for s in scores] == [-11, -210, -8]
  assert batches[0]['weights'].sum(1).tolist() == [2, 2]


def test_a_context_loses_its_first_tokens_if_the_model_has_few_positions():
  (one,), (batch,) = score([[1, 2, 3, 4, 5]], [[6, 7]], max_positions=4)
  assert batch['ids'].tolist() == [[3, 4, 5, 6]] and one.log_probs.tolist() == [-6, -7]
  (_,), (batch,) = score([[1, 2]], [[6, 7, 8, 9]], max_positions=4)
  assert batch['ids'].tolist() == [[2, 6, 7, 8]]
  with pytest.raises(DataError, match=r'^score: continuation 0 has 5 tokens, but the model sees at most 4 at once'):
    score([[1]], [[6] * 5], max_positions=4)


def test_an_empty_context_is_the_beginning_of_a_document():
  (_,), (batch,) = score([[]], [[6, 7]], tokenizer=ByteTokenizer(bos_id=256))
  assert batch['ids'][0, :2].tolist() == [256, 6]
  with pytest.raises(DataError, match=r'^score: context 0 is empty; it needs at least one token'):
    score([[]], [[6, 7]])


def test_texts_are_split_where_the_context_ends():
  scores, _ = score(['xa', 'x'], ['b', 'ab'], tokenizer=Merging())  # `xab` is x, ab: it has no token that begins at b.
  assert [s.ids for s in scores] == [[ord('b')], [300]]


def test_the_context_is_the_prefix_of_a_prefix_lm():
  _, (batch,) = score([[1, 2, 3], [4]], [[5], [6]], model_type='prefix')
  assert sorted(batch['prefix_lengths'].tolist()) == [1, 3]


class Bigram(BaseModel):
  """A model of another class than `LanguageModel`: the logits of a token depend on the token before it."""

  def setup(self):
    self.create_variable('w', WeightHParams((4, 4)))

  def score_limits(self):
    return ScoreLimits(4, None, takes_prefixes=False)

  def score(self, batch):
    log_probs_BTV = jax.nn.log_softmax(self.theta.w[batch['ids']])
    log_probs_BT = jnp.take_along_axis(log_probs_BTV, batch['labels'][..., None], axis=-1)[..., 0]
    return {'log_probs': log_probs_BT, 'is_greedy': log_probs_BTV.argmax(-1) == batch['labels']}


def test_any_model_that_says_how_it_scores_is_scored():
  config = ExperimentConfig(Config(SingleTask, name='t', model=Config(Bigram)), [], [])
  task = config.task.instantiate()
  w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
  tasks = TaskOnMesh(task, task.create_mesh(jax.devices()[:1]))
  model = TrainedModel(config, tasks, tasks.layout.mdl_vars.to_mesh({'w': w}), jnp.int32(0))
  (score,) = model.score([[1]], [[2, 3]])
  expected = jax.nn.log_softmax(w)[jnp.array([1, 2]), jnp.array([2, 3])]
  np.testing.assert_allclose(score.log_probs, expected, rtol=1e-6)
  with pytest.raises(DataError, match=r'4, at position .* is not in the vocabulary'):
    model.score([[1]], [[4]])
  for pairs in ((iter([[1]]), [[2]]), ([[1]], iter([[2]]))):
    with pytest.raises(UserError, match=r'^score: (contexts|continuations) is <.*; expected a list'):
      model.score(*pairs)
