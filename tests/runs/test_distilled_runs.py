"""A run that learns the stored probabilities of another one, and then from what that says of its own answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.errors import DataError
from praxis_lite.experiments.policies import DigitsImitated, DigitsRewarded
from praxis_lite.inputs.teacher_rows import read_teacher_rows
from praxis_lite.runs import open_run, run_train
from praxis_lite.training import train_distillation, train_on_policy
from praxis_lite.training.experiment import configure


def teach(run, texts, out, *more):
  lines = texts.with_name('texts.jsonl')
  arguments = [
    f'--job_log_dir={run}',
    f'--input={lines}',
    f'--output={out}',
    '--what=teach',
    '--top_k=5',
    '--batch_size=4',
  ]
  return main(['predict', *arguments, *more])


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
  directory = tmp_path_factory.mktemp('runs') / 'teacher'
  config = configure(DigitsImitated)
  config.task.train.set(num_train_steps=2, save_interval_steps=2, eval_interval_steps=None)
  run_train(config, directory)
  return directory


@pytest.mark.slow
def test_stored_probabilities_are_those_of_the_model(teacher, tmp_path):
  texts = ['314:134', '7', 'x' * 40, '', '90:09', '1:1']
  (tmp_path / 'texts.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
  out = tmp_path / 'taught'
  assert teach(teacher, tmp_path / 'texts.jsonl', out, '--shard_rows=4') == 0
  rows = read_teacher_rows(str(out), 10)
  model = open_run(teacher).load()
  logits = model.predict({name: rows[name] for name in ('ids', 'segment_ids', 'segment_pos', 'weights')})['logits']
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  real = rows['weights'] > 0
  assert real.sum(1).tolist() == [8, 2, 10, 1, 6, 4] and rows['teacher_ids'].shape == (6, 10, 5)
  best = np.sort(log_probs, axis=-1)[..., ::-1][..., :5]
  np.testing.assert_allclose(rows['teacher_log_probs'][real], best[real], atol=1e-5)
  np.testing.assert_allclose(np.take_along_axis(log_probs, rows['teacher_ids'], -1)[real], best[real], atol=1e-5)
  (out / 'part-00001.jsonl').unlink()
  with pytest.raises(DataError, match=r'1 of 2 parts are missing, such as part-00001.jsonl'):
    read_teacher_rows(str(out), 10)
  assert teach(teacher, tmp_path / 'texts.jsonl', out, '--shard_rows=4') == 0  # Goes on.
  assert read_teacher_rows(str(out), 10)['ids'].tolist() == rows['ids'].tolist()


def taught_student(datasets, directory, steps, teach_task):
  """Trains a small model, and returns its metrics on validation data."""
  config = configure(DigitsImitated)
  config.task.model.set(model_dims=32, num_layers=1, hidden_dims=64, num_heads=2)
  teach_task(config.task)
  config.task.train.set(num_train_steps=steps, save_interval_steps=steps, eval_interval_steps=None)
  config.datasets[:] = datasets
  run_train(config, directory)
  return open_run(directory).load()


@pytest.mark.slow
def test_a_teacher_that_corrects_its_answers_makes_a_model_better(tmp_path):
  imitated, rewarded = configure(DigitsImitated), configure(DigitsRewarded)
  imitated.task.train.set(num_train_steps=300, save_interval_steps=300, eval_interval_steps=None)
  run_train(imitated, tmp_path / 'teacher')

  def imitate_teacher(task):
    train_distillation(task, imitated.task.model, weight=1.0)
    task.train.init_from.path = str(tmp_path / 'teacher')

  def correct_answers(steps):
    def change(task):
      train_on_policy(task, imitated.task.model)
      task.train.learner.learning_rate = 2e-3
      task.train.init_from.path = str(tmp_path / 'imitated')

    return taught_student(rewarded.datasets, tmp_path / f'corrected{steps}', steps, change).evaluate('validation')

  taught_student(imitated.datasets, tmp_path / 'imitated', 60, imitate_teacher)
  before, after = correct_answers(1), correct_answers(80)
  assert after['reward'] > before['reward'] + 0.2 and after['loss'] < 0.7 * before['loss']
