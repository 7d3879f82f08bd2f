"""Runs that learn from rewards of their own answers: they resume bit by bit after SIGKILL, evaluate, and improve."""

from __future__ import annotations

import pathlib
import signal

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.experiments.policies import DigitsImitated, DigitsRewarded, numbers_to_sort
from praxis_lite.layers import Lora
from praxis_lite.models import Grpo, transformer_lm
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.replay import replay
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.training import train_adapters, train_policy
from praxis_lite.training.experiment import configure

pytestmark = pytest.mark.usefixtures('shared_programs')


def share_of_low_bytes(prompt, answer, example):
  """Random models earn it too, so there is something to learn from the first step on."""
  return float(np.mean([ord(c) < 128 for c in answer])) if answer else 0.0


def small(steps, adapters=(), devices=1, several=2, **fields):
  config = configure(DigitsRewarded)
  model = transformer_lm(vocab_size=256, model_dims=12, num_layers=1, num_heads=3, hidden_dims=10).set(packed=False)
  model.decoder_tpl.set(max_decode_steps=4, stop_ids=tuple(range(0, 256, 9)), temperature=0.0)
  task = Config(LanguageModelTask, model=model, mesh_axis_names=('data',), ici_mesh_shape=(devices,))
  task.train.learner = config.task.train.learner.clone(bprop_variable_exclusion=())
  task.train.learner.schedule.set(warmup_steps=1, total_steps=8)
  if adapters:
    train_adapters(task, *adapters)
  train_policy(task, Config(Grpo, kl_weight=0.1))
  task.train.set(num_train_steps=steps, save_interval_steps=several, log_interval_steps=2)
  task.train.set(eval_interval_steps=None, **fields)
  config.task = task
  for data in config.datasets:
    size = 8 if data.is_training else 5
    data.set(batch_size=size, examples=data.examples.clone(count=5), rewards={'low': share_of_low_bytes})
    data.steps_per_batch = several
  config.datasets[0].num_answers = 4
  return config


def variables_of(directory):
  return leaves(open_run(directory).load().variables)


RUN = """
import sys
sys.path.insert(0, {tests!r})
import os, signal
from praxis_lite.layers import Lora
from praxis_lite.common.config import Config
from praxis_lite.runs import Hook, run_train
from test_policy_runs import small

class Kill(Hook):
  def on_step(self, run, metrics):
    if run.step == 5:
      os.kill(os.getpid(), signal.SIGKILL)

run_train(small(8, devices=2), sys.argv[1], hooks=[Kill()])
"""


@pytest.mark.slow
def test_killed_within_a_batch_it_resumes_and_ends_with_the_same_bits(tmp_path, run_python):
  """Two steps share their answers; SIGKILL comes between them."""
  process = run_python(RUN.format(tests=str(pathlib.Path(__file__).parent)), str(tmp_path / 'killed'), devices=2)
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert open_run(tmp_path / 'killed').checkpoints.steps[-1] in (2, 4)  # The newest save may not be complete.
  run_train(small(8, devices=2), tmp_path / 'killed')
  result = run_train(small(8, devices=2), tmp_path / 'whole')
  killed, whole = variables_of(tmp_path / 'killed'), variables_of(tmp_path / 'whole')
  for path, value in whole.items():
    np.testing.assert_array_equal(killed[path], value)
  assert {'reward', 'reward/low', 'equal_groups'} <= result.metrics['eval/validation'].keys()


@pytest.mark.slow
def test_adapters_learn_alone_and_a_step_can_be_replayed(tmp_path):
  lines = []
  config = small(4, adapters=(Config(Lora, rank=2),))
  run_train(config, tmp_path / 'run')
  trace = replay(config, tmp_path / 'run', 4, 0, lines.append)
  assert not trace.origins and lines[-1] == 'all values are finite'
  first, last = (leaves(open_run(tmp_path / 'run').load(step=step).variables) for step in (2, 4))
  changed = {path for path, value in last.items() if np.any(value != first[path])}
  assert changed and all('lora' in '.'.join(path) for path in changed)


@pytest.mark.parametrize(
  'name, value', [('save_interval_steps', 3), ('num_train_steps', 7), ('eval_interval_steps', 5)]
)
def test_steps_that_would_part_a_batch_are_an_error(name, value, tmp_path):
  config = small(8)
  config.task.train.set(**{name: value})
  with pytest.raises(ConfigError, match=rf'task.train.{name} = {value}: train.steps_per_batch = 2 .* a multiple of 2'):
    run_train(config, tmp_path / 'run')


def test_numbers_of_validation_are_not_in_training():
  train, validation = (numbers_to_sort(part) for part in ('train', 'validation'))
  assert len(train) == 9 * len(validation) == 900
  assert not {e['prompt'] for e in train} & {e['prompt'] for e in validation}
  assert all(''.join(sorted(e['prompt'][:-1])) == e['completion'] for e in validation[:50])


@pytest.mark.slow
def test_the_experiment_sorts_more_numbers_than_the_run_it_starts_from(tmp_path):
  imitated = configure(DigitsImitated)
  imitated.task.train.set(eval_interval_steps=None)
  run_train(imitated, tmp_path / 'imitated')
  config = configure(DigitsRewarded)
  config.task.train.set(num_train_steps=60, eval_interval_steps=None, save_interval_steps=10)
  config.task.train.max_to_keep = 9
  config.task.train.init_from.path = str(tmp_path / 'imitated')
  run_train(config, tmp_path / 'rewarded')
  run, data = open_run(tmp_path / 'rewarded'), config.datasets[1]
  before, after = (run.load(step=step).evaluate(data)['reward/exact'] for step in (10, 60))
  assert after > before + 0.05
