"""Runs that learn from pairs of answers: they start from another run, resume bit by bit, and improve."""

from __future__ import annotations

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves
from praxis_lite.experiments.preferences import SortedTiny
from praxis_lite.layers import Lora
from praxis_lite.models import Dpo, Orpo, transformer_lm
from praxis_lite.runs import open_run, run_train
from praxis_lite.training import train_adapters, train_preferences
from praxis_lite.training.experiment import configure

pytestmark = pytest.mark.usefixtures('shared_programs')


def small(steps, loss=None, base=None, adapters=()):
  config = configure(SortedTiny)
  task = config.task
  task.model = transformer_lm(vocab_size=256, model_dims=12, num_layers=1, num_heads=3, hidden_dims=10)
  if adapters:
    train_adapters(task, *adapters)
  train_preferences(task, loss)
  task.train.set(num_train_steps=steps, save_interval_steps=2, log_interval_steps=2, eval_interval_steps=None)
  task.train.learner.schedule.set(warmup_steps=1, total_steps=8)
  task.train.init_from.path = base
  for data in config.datasets:
    data.set(batch_size=4, examples=data.examples.clone(count=10))
  return config


@pytest.mark.slow
@pytest.mark.parametrize('adapters', [(), (Config(Lora, rank=2),)], ids=['copy', 'adapters'])
def test_a_run_from_the_weights_of_another_resumes_bit_by_bit(adapters, tmp_path):
  run_train(small(2, Config(Orpo)), tmp_path / 'base')
  fields = {'loss': Config(Dpo, beta=0.5), 'base': str(tmp_path / 'base'), 'adapters': adapters}
  run_train(small(4, **fields), tmp_path / 'whole')
  run_train(small(2, **fields), tmp_path / 'parts')
  run_train(small(4, **fields), tmp_path / 'parts')
  first = leaves(open_run(tmp_path / 'base').load().variables)
  whole, parts = (leaves(open_run(tmp_path / name).load().variables) for name in ('whole', 'parts'))
  for path, value in whole.items():
    np.testing.assert_array_equal(parts[path], value)
    if path[0] == 'reference':
      np.testing.assert_array_equal(value, first['lm', *path[1:]])
  changed = [
    path for path, value in whole.items() if path[0] == 'lm' and path in first and np.any(value != first[path])
  ]
  assert bool(changed) == (not adapters)


@pytest.mark.slow
def test_the_experiment_learns_to_sort(tmp_path):
  config = configure(SortedTiny)
  config.task.train.set(num_train_steps=60, eval_interval_steps=60, save_interval_steps=60)
  data = config.datasets[1]
  run_train(config, tmp_path / 'run')
  trained = open_run(tmp_path / 'run').load()
  metrics = trained.evaluate(data)
  assert metrics['accuracy'] > 0.9 and metrics['margin'] > 1
  pair = data.examples.instantiate()[0]
  (answer,) = trained.score([pair['prompt']], [pair['chosen']])
  assert answer.log_prob > trained.score([pair['prompt']], [pair['rejected']])[0].log_prob
