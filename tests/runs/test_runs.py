"""What is read of the runs below a directory, and the points of sweeps."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import pytest

from praxis_lite.common.config.overrides import alternatives, apply_overrides
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.runs.records.comparing import best_run, differing_fields, metric_to_compare, short_names
from praxis_lite.runs.records.record import write_record
from praxis_lite.runs.records.run_config import held_for_training
from praxis_lite.runs.records.runs import age, find_runs, read_run
from praxis_lite.runs.sweep import FinishedPoints, Point, grid, last_line, run_points
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


def make_run(directory, *overrides, losses=(), valid=(), name='valid', exp='lm.SyntheticLmTiny'):
  """A run directory with a record and metrics, as training writes them."""
  directory.mkdir(parents=True)
  config = configure(registry.get(exp))
  apply_overrides(config.roots(), overrides)
  write_record(directory, config)
  lines = [{'step': i, 'split': 'train', 'metrics': {'loss': loss}} for i, loss in enumerate(losses, 1)]
  lines += [
    {'step': i, 'split': f'eval/{name}', 'metrics': {'loss': v, 'accuracy': 1.0}} for i, v in enumerate(valid, 1)
  ]
  (directory / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  return directory


# ---------------------------------------------------------------- runs


def test_runs_are_found_and_what_is_in_them_is_theirs(tmp_path):
  for name in ('b/2', 'b/10', 'a'):
    make_run(tmp_path / name)
  (tmp_path / 'a' / 'inner').mkdir()
  (tmp_path / 'a' / 'inner' / 'metrics.jsonl').touch()
  (tmp_path / 'old' / 'checkpoints' / '7').mkdir(parents=True)  # Before runs had records.
  (tmp_path / 'empty').mkdir()
  assert find_runs(tmp_path) == [tmp_path / name for name in ('a', 'b/10', 'b/2', 'old')]
  assert find_runs(tmp_path / 'a') == [tmp_path / 'a']
  assert read_run(tmp_path / 'old').step == 7
  with pytest.raises(UserError, match='nothing does not exist'):
    find_runs(tmp_path / 'nothing')


def test_what_a_run_has_come_to(tmp_path):
  make_run(tmp_path / 'a', 'task.train.num_train_steps=9', losses=[3, 2.5], valid=[2.0, 1.0, None, 1.5])
  run = read_run(tmp_path / 'a')
  assert (run.step, run.num_steps, run.last_loss) == (4, 9, 2.5)
  assert run.best('eval/valid/loss', 'min') == (1.0, 2)
  assert run.best('eval/valid/loss', 'max') == (2.0, 1)
  assert run.best('eval/valid/nothing', 'min') is None
  assert age(run).endswith(' s')
  with held_for_training(tmp_path / 'a'):
    assert age(read_run(tmp_path / 'a')) == 'running'
  assert not read_run(tmp_path / 'a').is_running


def test_a_damaged_record_is_none(tmp_path):
  make_run(tmp_path / 'a', losses=[1])
  (tmp_path / 'a' / 'run.json').write_text('{')
  run = read_run(tmp_path / 'a')
  assert (run.fields, run.num_steps, run.step) == ({}, None, 1)


def test_what_differs_is_named_shortly(tmp_path):
  runs = [
    make_run(tmp_path / 'a', 'task.model.model_dims=24'),
    make_run(tmp_path / 'b', 'task.train.learner.learning_rate=0.5', 'datasets[0].batch_size=2'),
    tmp_path / 'c',
  ]
  (tmp_path / 'c').mkdir()
  assert differing_fields([read_run(run) for run in runs])[1] == [
    {'model_dims': '24', 'learning_rate': '0.003', 'batch_size': '6'},
    {'model_dims': '18', 'learning_rate': '0.5', 'batch_size': '2'},
    {},
  ]
  assert short_names(['a.x', 'b.x', 'c.d.y', 'x']) == {'a.x': 'a.x', 'b.x': 'b.x', 'c.d.y': 'y', 'x': 'x'}


def test_of_unlike_models_their_classes_are_shown_and_what_differs_among_like_ones(tmp_path):
  runs = [
    make_run(tmp_path / 'a'),
    make_run(tmp_path / 'b', 'task.model.num_layers=3', 'datasets[*].seq_len=8', 'task.train.log_interval_steps=1'),
    make_run(tmp_path / 'c', exp='digits.DigitsMlp'),
  ]
  a, b, c = ({**fields} for fields in differing_fields([read_run(run) for run in runs])[1])
  assert a['num_layers'] == '2' and b['num_layers'] == '3' and 'num_layers' not in c
  assert b['seq_len'] == '8' and 'datasets[0].seq_len' not in b and 'num_classes' not in c
  assert next(iter(a.items())) == ('model', 'praxis_lite.models.language_model.LanguageModel')
  assert c['model'] == 'praxis_lite.models.classifier.ClassificationModel' and not any('lm_tpl' in name for name in c)
  for fields in (a, b, c):  # What matters less comes last.
    assert list(fields).index('learning_rate') < list(fields).index('log_interval_steps')
    assert len(fields) < 25


def test_which_metric_runs_are_compared_by(tmp_path):
  one = read_run(make_run(tmp_path / 'a', losses=[1], valid=[3.0, 2.0]))
  two = read_run(make_run(tmp_path / 'b', losses=[1], valid=[1.5], name='test'))
  assert metric_to_compare([one], None, None) == ('eval/valid/loss', 'min')
  assert metric_to_compare([one], 'accuracy', 'max') == ('eval/valid/accuracy', 'max')
  assert metric_to_compare([one], 'train/loss', None) == ('train/loss', 'min')
  assert metric_to_compare([one, two], 'loss', None) == ('eval/*/loss', 'min')  # Each has another input.
  assert metric_to_compare([one, two], 'accuracy', None) == ('eval/*/accuracy', 'max')
  assert (one.best('eval/*/loss', 'min'), two.best('eval/*/loss', 'min')) == ((2.0, 2), (1.5, 1))
  assert best_run([one, two], 'eval/*/loss', 'min') is two
  with (tmp_path / 'b' / 'metrics.jsonl').open('a') as file:
    file.write(json.dumps({'step': 2, 'split': 'eval/valid', 'metrics': {'loss': 2.0}}) + '\n')
  with pytest.raises(UserError, match=r'several inputs have it; write eval/test/loss or eval/valid/loss'):
    metric_to_compare([one, read_run(tmp_path / 'b')], 'loss', None)
  with pytest.raises(UserError, match=r'--metric=los: no run has it\. Did you mean|They have eval/'):
    metric_to_compare([one], 'los', None)
  assert metric_to_compare([], None, None) == ('loss', 'min')
  best = ['task.train.best_metric=accuracy', 'task.train.best_metric_mode=max']
  recorded = read_run(make_run(tmp_path / 'c', *best, valid=[1.0]))
  assert metric_to_compare([recorded], None, None) == ('eval/valid/accuracy', 'max')
  assert metric_to_compare([recorded], 'loss', None) == ('eval/valid/loss', 'min')
  named = read_run(make_run(tmp_path / 'e', best[0], valid=[1.0]))
  assert metric_to_compare([named], None, None) == metric_to_compare([recorded], 'accuracy', None)
  lowest = read_run(make_run(tmp_path / 'f', best[0], 'task.train.best_metric_mode=min', valid=[1.0]))
  assert metric_to_compare([lowest], None, None) == ('eval/valid/accuracy', 'min')  # As its checkpoints were kept.
  stopping = ['task.train.early_stopping.patience=3', 'task.train.early_stopping.metric=accuracy']
  stopped = read_run(make_run(tmp_path / 'd', *stopping, 'task.train.early_stopping.mode=max', valid=[1.0]))
  assert metric_to_compare([stopped], None, None) == ('eval/valid/accuracy', 'max')
  assert metric_to_compare([two, one, one], None, None) == ('eval/valid/loss', 'min')  # Most runs have it.
  assert best_run([one, two], 'eval/valid/loss', 'min') is one
  assert best_run([one, two], 'nothing', 'min') is None


# ---------------------------------------------------------------- sweeps


@pytest.mark.parametrize(
  ('override', 'values'),
  [
    ('a.b=1,2', ['a.b=1', 'a.b=2']),
    ('a=1', ['a=1']),
    ('a=', ['a=']),
    ('a = 1e-3, 3e-3 ', ['a=1e-3', 'a=3e-3']),
    ('a=(1,2)', ['a=(1,2)']),
    ('a=(1,2),(2,1)', ['a=(1,2)', 'a=(2,1)']),
    ("a=[1,(2,3)],{'x': 1, 'y': 2},None", ['a=[1,(2,3)]', "a={'x': 1, 'y': 2}", 'a=None']),
    ('a="x,y",z', ['a="x,y"', 'a=z']),
    ("a=WeightInit('gaussian', 0.1),None", ["a=WeightInit('gaussian', 0.1)", 'a=None']),
    ("a['k,l']=1,2", ["a['k,l']=1", "a['k,l']=2"]),
    ('datasets[*].batch_size=4,8', ['datasets[*].batch_size=4', 'datasets[*].batch_size=8']),
  ],
)
def test_commas_outside_of_brackets_and_quotes_separate_values(override, values):
  assert alternatives(override) == values


@pytest.mark.parametrize('override', ['a=1,', 'a=,1', 'a=1,,2', 'a', '=1,2'])
def test_values_that_are_missing_are_refused(override):
  with pytest.raises(ConfigError):
    alternatives(override)


def test_a_grid_is_all_combinations_with_names_that_say_which():
  points = grid(['task.a.rate=1e-3,3e-3', 'task.fixed=7', 'task.mesh=(1,2),(2,1)'])
  assert [p.overrides for p in points] == [
    (f'task.a.rate={rate}', 'task.fixed=7', f'task.mesh={mesh}')
    for rate in ('1e-3', '3e-3')
    for mesh in ('(1,2)', '(2,1)')
  ]
  names = [p.name for p in points]
  assert all(name.startswith('rate=1e-3,mesh=') for name in names[:2])
  assert len(set(names)) == 4 and not any(set(name) & set('()/ \'"*') for name in names)
  assert grid(['a.x=1,2', 'b.x=3,4'])[0].name == 'a.x=1,b.x=3'
  assert len(grid([f'path={"x" * 300},{"y" * 300}'])[0].name.encode()) < 255


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    (['a=1'], 'nothing is varied: give a --set several values, with commas between them, as'),
    (['a=[1,2]'], 'nothing is varied: .* commas between them without brackets'),
    ([], 'nothing is'),
    (['a=1,2', 'a=3,4'], 'a is varied twice'),
    (['a=1,2', 'b=3,3'], r'b: the value 3 is given 2 times; .* in parentheses: b=\(3,3\)$'),
  ],
)
def test_grids_that_are_none(overrides, message):
  with pytest.raises(ConfigError, match=message):
    grid(overrides)


def points(*names):
  return [Point(name, ()) for name in names]


def sleeping(seconds):
  return [sys.executable, '-S', '-c', f'import time; time.sleep({seconds})']


def test_processes_run_at_once_and_failures_stop_no_other(tmp_path):
  codes, running, most = {}, set(), []

  def command(point):
    running.add(point.name)
    most.append(len(running))
    return [
      sys.executable,
      '-S',
      '-c',
      f'import sys, time; time.sleep(0.1); print("said"); sys.exit({point.name == "b"})',
    ]

  def ended(point, code, seconds):
    running.discard(point.name)
    codes[point.name] = code

  assert not run_points(points('a', 'b', 'c'), tmp_path, command, parallel=2, ended=ended)
  assert codes == {'a': 0, 'b': 1, 'c': 0}
  assert max(most) == 2
  assert last_line(tmp_path, Point('b', ())) == 'said'
  (tmp_path / 'b' / 'sweep.log').write_text('')
  assert last_line(tmp_path, Point('b', ())) == ''


def test_a_signal_starts_no_more_and_is_passed_on(tmp_path):
  codes = {}
  threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
  before = signal.getsignal(signal.SIGINT)
  started = time.monotonic()
  stopped = run_points(
    points('a', 'b', 'c'),
    tmp_path,
    lambda p: sleeping(60),
    parallel=2,
    ended=lambda p, code, s: codes.update({p.name: code}),
  )
  assert stopped and time.monotonic() - started < 30
  assert codes == {'a': -signal.SIGTERM, 'b': -signal.SIGTERM}
  assert signal.getsignal(signal.SIGINT) is before


def test_finished_points_are_those_with_the_same_config(tmp_path):
  a, b = points('a', 'b')
  FinishedPoints(tmp_path).add(a, 'config')
  finished = FinishedPoints(tmp_path)
  assert finished.has(a, 'config') and not finished.has(a, 'other') and not finished.has(b, 'config')
  (tmp_path / 'sweep.json').write_text('[')
  assert not FinishedPoints(tmp_path).has(a, 'config')


def test_points_that_parts_of_a_sweep_have_finished_count_once_their_config_changes(tmp_path):
  a, b = points('a', 'b')
  for point in (a, b):
    FinishedPoints(tmp_path).add(point, 'first')
  for config in ('second', 'third'):
    parts = FinishedPoints(tmp_path, (1, 2)), FinishedPoints(tmp_path, (2, 2))  # Two jobs begin together.
    for part, point in zip(parts, (a, b)):
      assert not part.has(point, config)
      part.add(point, config)
    for reader in (FinishedPoints(tmp_path, (1, 2)), FinishedPoints(tmp_path, (2, 2)), FinishedPoints(tmp_path)):
      assert reader.has(a, config) and reader.has(b, config) and not reader.has(a, 'first')
  FinishedPoints(tmp_path).add(a, 'fourth')
  assert FinishedPoints(tmp_path, (1, 2)).has(a, 'fourth') and FinishedPoints(tmp_path, (2, 2)).has(b, 'third')


def test_a_process_that_cannot_be_started_is_an_error(tmp_path):
  with pytest.raises(OSError):
    run_points(points('a'), tmp_path, lambda p: ['/no/such/program'], parallel=1, ended=lambda *a: None)
