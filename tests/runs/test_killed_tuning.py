"""Runs that imitate chats, prefer answers, or learn from a teacher end with the same bits after SIGKILL."""

from __future__ import annotations

import pathlib
import signal

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves
from praxis_lite.experiments.preferences import SortedTiny
from praxis_lite.inputs import ByteTokenizer, ChatInput
from praxis_lite.models import Dpo, transformer_lm
from praxis_lite.runs import open_run, run_train
from praxis_lite.training import train_distillation, train_preferences
from praxis_lite.training.experiment import configure

RUN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from praxis_lite.runs import Hook, run_train
from test_killed_tuning import tuned

class Kill(Hook):
  def on_step(self, run, metrics):
    if run.step == 5:
      os.kill(os.getpid(), signal.SIGKILL)

run_train(tuned(sys.argv[1]), sys.argv[2], hooks=[Kill()])
"""


def small_model():
  return transformer_lm(vocab_size=256, model_dims=12, num_layers=1, num_heads=3, hidden_dims=10)


def tuned(kind):
  """The config of a run of 6 steps that saves every second one."""
  config = configure(SortedTiny)
  task, pairs = config.task, config.datasets[0]
  task.model = small_model()
  task.train.set(num_train_steps=6, save_interval_steps=2, log_interval_steps=2, eval_interval_steps=None)
  task.train.learner.schedule.set(warmup_steps=1, total_steps=8)
  if kind == 'preferences':
    train_preferences(task, Config(Dpo))
    config.datasets = [pairs.set(batch_size=4, examples=pairs.examples.clone(count=10))]
    return config
  examples = [{'prompt': f'{i} + 1 = ', 'completion': f'{i + 1}'} for i in range(11)]
  chats = Config(ChatInput, name='chats', examples=examples, seq_len=24, batch_size=2, is_training=True, packed=True)
  config.datasets = [chats.set(tokenizer_tpl=Config(ByteTokenizer))]
  if kind == 'teacher':
    train_distillation(task, small_model(), weight=0.7)
  return config


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['chats', 'preferences', 'teacher'])
def test_a_killed_run_ends_with_the_same_bits(kind, tmp_path, run_python):
  code = RUN.format(tests=str(pathlib.Path(__file__).parent))
  process = run_python(code, kind, str(tmp_path / 'killed'), devices=8)
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert open_run(tmp_path / 'killed').checkpoints.steps[-1] in (2, 4)  # The newest save may not be complete.
  run_train(tuned(kind), tmp_path / 'killed')
  run_train(tuned(kind), tmp_path / 'whole')
  killed, whole = (leaves(open_run(tmp_path / name).load().variables) for name in ('killed', 'whole'))
  assert killed.keys() == whole.keys()
  for path, value in whole.items():
    np.testing.assert_array_equal(killed[path], value)
