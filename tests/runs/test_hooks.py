"""Hooks, early stopping and the best checkpoint: what they see and decide, and that a restart changes nothing."""

from __future__ import annotations

import gc
import json
import re
import signal
import threading

import jax
import numpy as np
import pytest
from test_executor import curves, wait_for
from tiny_runs import Config, examples, open_gate, tiny_run

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.inputs import ArrayInput
from praxis_lite.runs import Hook, run_eval, run_train
from praxis_lite.runs.improvement import WatchedMetric, watched_metrics
from praxis_lite.runs.records.metric_modes import mode_of_metric
from praxis_lite.runs.records.metrics import EvalResult

pytestmark = pytest.mark.usefixtures('shared_programs')

# The loss on the validation data goes down, and up again from about step 10 on: 12 of 50 examples are seen often.
OVERFITTING = {'eval_interval_steps': 2, 'num_train_steps': 60, 'save_interval_steps': 7, 'max_to_keep': 1}
RUN = """
import sys
from test_hooks import overfitting
from praxis_lite.runs import run_train
result = run_train(overfitting(gate=sys.argv[2], patience=3), sys.argv[1])
"""


def overfitting(*, patience=None, gate='', **train):
  config = tiny_run(1, gate=gate, **{**OVERFITTING, **train})
  config.datasets[0].arrays = examples(12, 0)
  config.task.train.early_stopping.patience = patience
  return config


def valid_losses(directory):
  return {step: v for (split, step, name), v in curves(directory).items() if (split, name) == ('eval/valid', 'loss')}


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  directory = tmp_path_factory.mktemp('stopped')
  return directory, run_train(overfitting(patience=3), directory)


def test_it_stops_when_nothing_has_improved_for_as_long_and_keeps_the_best(stopped, capsys):
  directory, result = stopped
  losses = valid_losses(directory)
  best = min(losses, key=losses.get)
  assert (result.ended_by, result.step) == ('stopped', best + 2 * 3)
  assert json.loads((directory / 'best.json').read_text()) == {
    'step': best, 'metric': 'eval/valid/loss', 'mode': 'min', 'value': losses[best]
  }  # fmt: skip
  assert Checkpointer(directory, read_only=True).steps() == [best, result.step]
  config = overfitting(patience=3)
  assert run_eval(config, directory, step='best')['eval/valid']['loss'] == pytest.approx(losses[best], rel=1e-6)


def test_started_again_it_says_once_why_it_has_stopped_and_returns_its_metrics(stopped, capsys):
  directory, result = stopped
  before = (directory / 'metrics.jsonl').read_text()
  again = run_train(overfitting(patience=3), directory)
  assert (again.step, again.ended_by) == (result.step, 'stopped')
  assert again.metrics['eval/valid']['loss'] == result.metrics['eval/valid']['loss']
  out = capsys.readouterr().out
  assert out.count('stopping early: eval/valid/loss did not improve on ') == 1
  assert '(lower is better); to go on, raise task.train.early_stopping.patience, or set it to None\n' in out
  assert (directory / 'metrics.jsonl').read_text() == before


@pytest.mark.slow
def test_killed_while_it_waits_it_stops_where_it_would_have(stopped, tmp_path, run_python):
  _, whole = stopped
  gate = open_gate(tmp_path / 'gate', whole.step - 1)
  process = run_python(RUN, str(tmp_path / 'run'), gate)
  wait_for(f'step {whole.step - 2} eval/valid', process.stdout)
  process.kill()
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  result = run_train(overfitting(patience=3), tmp_path / 'run')
  assert (result.step, result.ended_by) == (whole.step, 'stopped')
  assert (tmp_path / 'run' / 'best.json').read_text() == (stopped[0] / 'best.json').read_text()
  assert valid_losses(tmp_path / 'run') == valid_losses(stopped[0])


def test_another_limit_lets_it_go_on(stopped, tmp_path):
  result = run_train(overfitting(patience=3), tmp_path)
  longer = run_train(overfitting(patience=4), tmp_path)
  assert longer.step == result.step + 2 and longer.ended_by == 'stopped'


def test_the_best_may_be_the_highest_of_another_metric(tmp_path):
  # `errors` is not a metric: the loss itself, the wrong way round, is the worst checkpoint.
  config = overfitting(num_train_steps=8, best_metric='eval/valid/loss', best_metric_mode='max')
  run_train(config, tmp_path)
  losses = valid_losses(tmp_path)
  assert json.loads((tmp_path / 'best.json').read_text())['step'] == max(losses, key=losses.get)


def test_without_a_record_there_is_no_best_checkpoint(tmp_path):
  run_train(tiny_run(1, num_train_steps=2), tmp_path)
  with pytest.raises(CheckpointError, match=r'recorded as the best: .* without task\.train\.best_metric'):
    run_eval(tiny_run(1), tmp_path, step='best')
  (tmp_path / 'best.json').write_text('{')
  with pytest.raises(CheckpointError, match=r'best\.json is damaged, or names a step that is not there'):
    run_eval(tiny_run(1), tmp_path, step='best')


def test_values_are_compared_by_mode_and_margin():
  low, high = WatchedMetric('eval/v', 'loss', 'min'), WatchedMetric('eval/v', 'loss', 'max')
  assert low.is_better(1.0, None) and low.is_better(1.0, 1.2) and not low.is_better(1.0, 1.0)
  assert high.is_better(1.2, 1.0) and not high.is_better(1.2, 1.2)
  assert not low.is_better(1.0, 1.05, by=0.1) and low.is_better(1.0, 1.2, by=0.1)
  assert not low.is_better(np.nan, None) and not low.is_better(np.nan, 1.0)
  results = [EvalResult(1, 'eval/v', {'loss': np.array(2.0)}), EvalResult(1, 'eval/w', {}), EvalResult(2, 'eval/v', {})]
  assert low.values(results)[0] == (1, 2.0) and np.isnan(low.values(results)[1][1])


METRICS = {
  'unknown': (
    'los',
    r"task\.train\.best_metric = 'los': there is no such metric\. Did you mean '(eval/valid/)?loss'\?",
  ),
  'of two inputs': ('loss', r"'loss': several inputs have it; write eval/valid/loss or eval/wide/loss"),
}


@pytest.mark.parametrize(('metric', 'message'), METRICS.values(), ids=METRICS)
def test_a_metric_that_is_not_there_is_told_before_anything_is_written(tmp_path, metric, message):
  config = tiny_run(1, best_metric=metric)
  if metric == 'loss':
    config.datasets = [*config.datasets, Config(ArrayInput, name='wide', arrays=examples(20, 3), batch_size=20)]
  with pytest.raises(ConfigError, match=message):
    run_train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


# best_metric and its mode, the metric and mode of early stopping; and the metrics of both, as path and mode.
ACCURACY, LOSS = ('eval/valid/accuracy', 'max'), ('eval/valid/loss', 'min')
ONE_METRIC = {
  'neither': (None, 'min', 'loss', 'min', LOSS, LOSS),
  'best alone': ('accuracy', 'max', 'loss', 'min', ACCURACY, ACCURACY),
  'stopping alone': (None, 'min', 'accuracy', 'max', ACCURACY, ACCURACY),
  'the mode of best': (None, 'max', 'accuracy', 'min', ACCURACY, ACCURACY),
  'both': ('accuracy', 'max', 'eval/valid/accuracy', 'min', ACCURACY, ACCURACY),
  'by the name': ('accuracy', 'auto', 'loss', 'auto', ACCURACY, ACCURACY),
  'by the name of a path': ('eval/valid/accuracy', 'auto', 'loss', 'auto', ACCURACY, ACCURACY),
  'stopping by the name': (None, 'auto', 'accuracy', 'auto', ACCURACY, ACCURACY),
  'two by their names': ('accuracy', 'auto', 'eval/valid/loss', 'auto', ACCURACY, LOSS),
  'against the name': ('loss', 'max', 'loss', 'auto', (LOSS[0], 'max'), (LOSS[0], 'max')),
  'two metrics': ('accuracy', 'max', 'eval/valid/loss', 'min', ACCURACY, LOSS),
}


@pytest.mark.parametrize(('best', 'best_mode', 'metric', 'mode', 'kept', 'stops'), ONE_METRIC.values(), ids=ONE_METRIC)
def test_one_metric_decides_about_the_best_and_about_stopping(best, best_mode, metric, mode, kept, stops):
  task = tiny_run(1, best_metric=best, best_metric_mode=best_mode, eval_interval_steps=1).task
  task.train.early_stopping.set(patience=1, metric=metric, mode=mode)
  watched = watched_metrics(task.instantiate().train, {'eval/valid': ['accuracy', 'loss']})
  assert [(found.path, found.mode) for found in watched] == [kept, stops]


def test_two_modes_of_one_metric_are_refused():
  task = tiny_run(1, best_metric='accuracy', best_metric_mode='min', eval_interval_steps=1).task
  task.train.early_stopping.set(patience=1, mode='max')
  with pytest.raises(
    ConfigError, match=r"mode = 'max', but task\.train\.best_metric_mode = 'min', for the same metric"
  ):
    watched_metrics(task.instantiate().train, {'eval/valid': ['accuracy', 'loss']})


def test_the_name_of_a_metric_tells_its_mode_or_a_mode_is_asked_for(tmp_path):
  names = {
    'min': ['loss', 'aux_loss', 'nll', 'perplexity', 'word_error_rate', 'MSE', 'accuracy_loss', 'eval/accuracy/loss'],
    'max': ['accuracy', 'top5_accuracy', 'f1', 'macro-F1', 'bleu', 'eval/loss/accuracy'],
    None: ['close', 'scale', 'flossy', ''],
  }
  for mode, found in names.items():
    assert [name for name in found if mode_of_metric(name, 'auto') != mode] == []
  assert mode_of_metric('loss', 'auto', 'max') == 'max' and mode_of_metric('accuracy', 'min') == 'min'

  splits = {'eval/valid': ['accuracy', 'close', 'loss']}
  told = "'close': its name does not tell whether lower or higher values are better; set task.train.{} to 'min'"
  task = tiny_run(1, best_metric='close', eval_interval_steps=1).task
  with pytest.raises(ConfigError, match=re.escape(f'task.train.best_metric = {told.format("best_metric_mode")}')):
    watched_metrics(task.instantiate().train, splits)
  task.train.set(best_metric=None)
  task.train.early_stopping.set(patience=1, metric='close')
  with pytest.raises(ConfigError, match=re.escape(told.format('early_stopping.mode'))):
    watched_metrics(task.instantiate().train, splits)
  task.train.early_stopping.set(mode='max')
  assert watched_metrics(task.instantiate().train, splits).best == ('eval/valid', 'close', 'max')


SETTINGS = {
  'patience': ({'patience': 0}, r'early_stopping\.patience: expected at least 1, got 0'),
  'mode': ({'mode': 'low'}, r"early_stopping\.mode: expected 'auto', 'min' or 'max', got 'low'"),
  'delta': ({'min_delta': -1.0}, r'early_stopping\.min_delta: expected at least 0, got -1'),
}


@pytest.mark.parametrize(('fields', 'message'), SETTINGS.values(), ids=SETTINGS)
def test_settings_out_of_range_are_told(tmp_path, fields, message):
  config = tiny_run(1)
  config.task.train.early_stopping.set(**fields)
  with pytest.raises(ConfigError, match=message):
    config.task.instantiate()


def test_without_evaluations_in_between_early_stopping_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r'patience is set, .*; set task\.train\.eval_interval_steps$'):
    run_train(overfitting(patience=3, eval_interval_steps=None), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


# -------------------------------------------------------------------- hooks of one's own


class Recorder(Hook):
  def __init__(self):
    self.seen = []

  def on_start(self, run):
    self.seen.append(('start', run.step, run.total_steps))

  def on_step(self, run, metrics):
    self.seen.append(('step', run.step, int(run.state.step)))
    self.loss = float(metrics['loss'][0])

  def on_eval(self, run, split, metrics):
    self.seen.append((split, run.step, float(metrics['loss'])))

  def on_checkpoint(self, run, step, path):
    assert (path / 'state').is_dir() and path.parent.parent == run.directory
    self.seen.append(('checkpoint', step, None))


def test_hooks_see_steps_evaluations_and_complete_checkpoints(tmp_path):
  hook = Recorder()
  result = run_train(tiny_run(1, num_train_steps=4, eval_interval_steps=2), tmp_path, hooks=[hook])
  assert hook.seen[0] == ('start', 0, 4)
  assert [s for s in hook.seen if s[0] == 'step'] == [('step', i, i) for i in range(1, 5)]
  assert [s[1] for s in hook.seen if s[0] == 'eval/valid'] == [2, 4]
  assert hook.seen[-1] == ('checkpoint', 4, None) and ('checkpoint', 3, None) in hook.seen
  assert hook.loss == pytest.approx(curves(tmp_path)['train', 4, 'loss'])
  assert [s[2] for s in hook.seen if s[0] == 'eval/valid'][-1] == result.metrics['eval/valid']['loss']


def test_a_hook_can_stop_a_run(tmp_path, capsys):
  class Stop(Hook):
    def on_step(self, run, metrics):
      if run.step == 2:
        run.stop('I have seen enough')

  result = run_train(tiny_run(1), tmp_path, hooks=[Stop()])
  assert (result.step, result.ended_by) == (2, 'stopped')
  assert capsys.readouterr().out.count('step 2 of 20: I have seen enough') == 1
  assert run_train(tiny_run(1, num_train_steps=4), tmp_path).step == 4


@pytest.mark.slow_cases
@pytest.mark.parametrize('method', ['on_step', 'on_eval', 'on_checkpoint'])
def test_what_a_hook_raises_ends_the_run_after_the_state_is_saved_and_names_the_hook(tmp_path, capsys, method):
  class Breaks(Hook):
    pass

  def broken(self, run, *args):
    if run.step >= 4:
      raise KeyError('mine')

  setattr(Breaks, method, broken)
  with pytest.raises(KeyError, match='mine') as raised:
    run_train(tiny_run(1, eval_interval_steps=4, save_interval_steps=2), tmp_path, hooks=[Breaks()])
  step = Checkpointer(tmp_path, read_only=True).latest_step()
  assert step >= 4
  told = f'Breaks.{method} raised KeyError after step {step}; the state is saved'
  assert told in raised.value.__notes__[0] and told in capsys.readouterr().out
  assert run_train(tiny_run(1, num_train_steps=step + 1), tmp_path).step == step + 1


class Misspelled(Hook):
  def on_evaluation(self, run, split, metrics):
    pass


NO_HOOKS = {
  'a function': ([print], r'hooks\[0\]: expected an object of a class derived from Hook, got'),
  'no list': (Hook(), r'hooks: expected a list, as in hooks=\[MyHook\(\)\], got <'),
  'a generator': ((Hook() for _ in range(2)), r'hooks: expected a list'),
  'misspelled': (
    [Hook(), Misspelled()],
    r"^hooks\[1\]: Misspelled\.on_evaluation is never called\. Did you mean 'on_eval'\? A run calls on_start, ",
  ),
}


@pytest.mark.parametrize(('hooks', 'message'), NO_HOOKS.values(), ids=NO_HOOKS)
def test_what_is_no_hook_is_told(tmp_path, hooks, message):
  with pytest.raises(ConfigError, match=message):
    run_train(tiny_run(1), tmp_path / 'run', hooks=hooks)
  assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_cell_of_a_notebook_can_be_run_again_with_another_config_and_leaves_no_threads(tmp_path):
  def cell(steps):
    return run_train(tiny_run(1, num_train_steps=steps), tmp_path)

  first = cell(2)
  gc.collect()
  before = {t.name for t in threading.enumerate()}
  again = cell(2)
  assert again.step == 2 and again.metrics['eval/valid']['loss'] == first.metrics['eval/valid']['loss']
  assert cell(5).step == 5
  wider = tiny_run(3, num_train_steps=2)
  assert run_train(wider, tmp_path / 'other').step == 2
  gc.collect()
  for thread in threading.enumerate():
    if thread.name not in before:
      thread.join(timeout=30)  # It may be ending.
      assert not thread.is_alive(), thread
  assert sorted(step for split, step, name in curves(tmp_path) if (split, name) == ('train', 'loss')) == [1, 2, 3, 4, 5]


def test_a_second_state_compiles_nothing(tmp_path):
  from praxis_lite.training.partitioned_task import PartitionedTask

  config = tiny_run(3)
  partitioned = PartitionedTask(config.task.instantiate(), config.datasets[0].instantiate().batch_struct())
  compiled = []

  def listen(name, seconds, **_):
    compiled.extend([name] if name.endswith('backend_compile_duration') else [])

  first = partitioned.init_state(jax.random.key(0))
  key = jax.random.key(1)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    second = partitioned.init_state(key)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled
  assert not np.array_equal(first.mdl_vars['w'], second.mdl_vars['w'])
