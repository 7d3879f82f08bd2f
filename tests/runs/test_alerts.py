"""A command of the user that runs when something happens to a run."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace

import pytest
from test_trouble import bad_run
from tiny_runs import tiny_run

from praxis_lite.common.errors import ConfigError
from praxis_lite.runs import Hook, executor, run_train
from praxis_lite.runs.alerts import Alerts, _run_command
from praxis_lite.runs.trouble import GoBack, LossSpikeError, Trouble

pytestmark = pytest.mark.usefixtures('shared_programs')
KEEP = 'echo "$PRAXIS_LITE_EVENT $PRAXIS_LITE_STEP $PRAXIS_LITE_RUN: $PRAXIS_LITE_MESSAGE" >> {}'


def alerts_of(command, tmp_path, events, **kwargs):
  lines = []
  alerts = Alerts(command, tmp_path, lines.append, **kwargs)
  with alerts.while_called():
    for event in events:
      alerts._alert(*event)
      alerts._step += 1
  return lines


def test_a_command_gets_the_event(tmp_path):
  seen = tmp_path / 'a "quoted" name'
  message = 'step 3: $(touch hacked); "quotes"'
  assert alerts_of(KEEP.format(f"'{seen}'"), tmp_path, [('nonfinite', message), ('ended', 'done')]) == []
  assert seen.read_text() == f'nonfinite 0 {tmp_path}: {message}\nended 1 {tmp_path}: done\n'
  assert not (tmp_path / 'hacked').exists()


def test_commands_that_fail_or_hang_are_told_once_and_end(tmp_path):
  (line,) = alerts_of('exit 3', tmp_path, [('ended', 'x'), ('ended', 'y')])
  assert line.startswith('--alert_command: the command ended with exit code 3; training goes on')
  before = time.monotonic()
  (line,) = alerts_of(f'sleep 60; touch {tmp_path}/late', tmp_path, [('ended', 'x')], limit_s=0.2)
  assert 'took more than 0.2 s, and was killed' in line and time.monotonic() - before < 30


def test_a_process_that_cannot_be_killed_does_not_end_the_thread(tmp_path, monkeypatch):
  def wait(self, timeout=None):
    raise subprocess.TimeoutExpired('command', timeout)

  monkeypatch.setattr(subprocess.Popen, 'wait', wait)
  assert 'took more than 0.1 s' in _run_command('exit 0', {}, 0.1)


def test_errors_before_the_first_step_and_too_many_rollbacks_are_failures(tmp_path, monkeypatch):
  seen, answers = tmp_path / 'seen', []
  (tmp_path / 'run').mkdir()

  def attempt(config, directory, options):
    raise answers.pop(0)

  monkeypatch.setattr(executor, '_attempt', attempt)
  config = tiny_run(1, max_rollbacks=1)
  jump = GoBack(Trouble(2, 2, 'a jump', 'rollback', [{'position': 1}]))
  again = GoBack(Trouble(3, 3, 'another jump', 'rollback', [{'position': 2}]))
  for raised, events in (
    ([ConfigError('a mistake')], ['failed 0']),
    ([jump, ValueError('no')], ['went_back 0', 'failed 0']),
    ([again], ['failed 0']),
  ):
    answers[:] = raised
    with pytest.raises((ConfigError, ValueError, LossSpikeError)):
      run_train(config, tmp_path / 'run', alert_command=KEEP.format(seen))
    assert [' '.join(line.split()[:2]) for line in seen.read_text().splitlines()] == events
    seen.unlink()


def test_an_error_after_the_end_is_no_end(tmp_path):
  alerts = Alerts('true', tmp_path, print)
  run = SimpleNamespace(step=3, total_steps=3, ended_by='done', error=RuntimeError('a hook'))
  alerts.on_end(run)
  assert alerts._events.empty()
  run.error = None
  alerts.on_end(run)
  assert alerts._events.get_nowait() == ('ended', 'the run ended after step 3 of 3: done', 3)


@pytest.mark.slow
def test_a_run_alerts_of_bad_steps_of_going_back_of_errors_and_of_its_end(tmp_path):
  seen = tmp_path / 'seen'

  def events():
    found = [line.split()[0] for line in seen.read_text().splitlines()]
    seen.unlink()
    return found

  command = KEEP.format(seen)
  run_train(bad_run(num_train_steps=9), tmp_path / 'skip', alert_command=command)
  assert events() == ['nonfinite', 'ended']
  run_train(bad_run(learner={'on_nonfinite': 'rollback'}, num_train_steps=9), tmp_path / 'back', alert_command=command)
  assert events() == ['went_back', 'ended']

  class Raises(Hook):
    def on_step(self, run, metrics):
      raise RuntimeError('a hook')

  with pytest.raises(RuntimeError):
    run_train(tiny_run(1), tmp_path / 'raises', hooks=[Raises()], alert_command=command)
  assert events() == ['failed']
