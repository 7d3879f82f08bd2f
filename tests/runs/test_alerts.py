"""A command of the user that runs when something happens to a run."""

from __future__ import annotations

import time

import pytest
from test_trouble import bad_run
from tiny_runs import tiny_run

from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.alerts import Alerts

pytestmark = pytest.mark.usefixtures('shared_programs')
KEEP = 'echo "$PRAXIS_LITE_EVENT $PRAXIS_LITE_STEP $PRAXIS_LITE_RUN: $PRAXIS_LITE_MESSAGE" >> {}'


def alerts_of(command, tmp_path, events, **kwargs):
  lines = []
  alerts = Alerts(command, tmp_path, lines.append, **kwargs)
  with alerts.while_training(None):
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
