"""Plans learn from runs that were measured."""

import dataclasses
import json
import math

import pytest
from small_lm import small_lm

from praxis_lite.cli.main import main
from praxis_lite.common.errors import UserError
from praxis_lite.instruments.plan import parse_topology, plan
from praxis_lite.instruments.plan.experience import (
  Measurement,
  apply_experience,
  experience_file,
  format_measured,
  remember,
)
from praxis_lite.instruments.plan.topology import time_factors


@pytest.fixture(scope='module')
def planned():
  return plan(small_lm(), None, 'h100:1x8', compile=False)


def measured(planned, factor, run='runs/1', peak=None):
  return Measurement(run, factor * planned.step_seconds, 100, peak, 0.1)


@pytest.mark.slow
def test_all_times_are_multiplied_by_the_typical_quotient(planned, tmp_path):
  file = tmp_path / 'folder' / 'measured.json'
  remember(file, planned, measured(planned, 7.0))
  remember(file, planned, measured(planned, 1.0))  # Of the same run: replaces the first.
  remember(file, planned, measured(planned, 4.0, 'runs/2'))
  topology = apply_experience(planned.topology, file, 'analytic')
  corrected = plan(small_lm(), None, topology, compile=False)
  assert corrected.step_seconds == pytest.approx(2.0 * planned.step_seconds)
  assert corrected.seconds_range == pytest.approx((planned.step_seconds, 4.0 * planned.step_seconds))
  assert corrected.memory == planned.memory
  assert 'by 2 measured runs on h100: steps took 2.00 times as long as planned (1.00 to 4.00)' in str(corrected.notes)


def test_modes_and_chips_are_kept_apart(planned, tmp_path):
  file = tmp_path / 'measured.json'
  assert apply_experience(planned.topology, file, 'analytic') is planned.topology
  remember(file, planned, measured(planned, 2.0))
  for topology, mode in ((planned.topology, 'compiled'), (parse_topology('a100:1x8'), 'analytic')):
    assert apply_experience(topology, file, mode) is topology
  one = apply_experience(parse_topology('h100:8x8'), file, 'analytic')
  assert one.experience.runs == 1 and time_factors(one, False) is None  # One run says nothing about errors.
  assert one.target.efficiency.compute == planned.topology.target.efficiency.compute / 2


def test_figures_stand_side_by_side(planned):
  text = format_measured(planned, measured(planned, 1.5, peak=1.1 * planned.memory.peak))
  lines = {line.split('  ')[0]: line.split()[-1] for line in text.splitlines()}
  assert (lines['step'], lines['tokens/s'], lines['memory']) == ('1.50', '0.67', '1.10')
  assert 'not reported' in format_measured(planned, measured(planned, 1.5))


@pytest.mark.parametrize(
  'content', ['[]', '{"h100 compiled": {"a": 0}}', '{"h100 compiled": [1]}', '{"x": {"a": "b"}}', 'no']
)
def test_a_damaged_file_is_named(content, planned, tmp_path):
  file = tmp_path / 'measured.json'
  file.write_text(content)
  with pytest.raises(UserError, match=r'measured.json: not what `praxis-lite plan --measured` writes .*; remove it'):
    apply_experience(planned.topology, file, 'compiled')


@pytest.mark.slow
def test_a_run_corrects_later_plans(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  run = str(tmp_path / 'run')
  train = [
    'train',
    '--exp=lm.SyntheticLmTiny',
    f'--job_log_dir={run}',
    '--noverify',
    '--set=task.ici_mesh_shape=(1,8,1)',
  ]
  steps = '--set=task.train.num_train_steps={}', '--set=task.train.log_interval_steps=2'
  assert main([*train, steps[0].format(2), steps[1]]) == 0
  assert main(['plan', f'--job_log_dir={run}', '--measured', '--nocompile']) == 2
  assert 'its last launch logged too few steps to measure their time; train longer' in capsys.readouterr().err
  assert main([*train, steps[0].format(20), steps[1]]) == 0
  assert main(['plan', f'--job_log_dir={run}', '--measured', '--nocompile']) == 0
  assert 'measured / planned' in capsys.readouterr().out
  ((mode, quotients),) = json.loads(experience_file().read_text()).items()
  assert mode == 'cpu analytic' and list(quotients) == [run] and 0 < quotients[run]['time'] < math.inf
  assert main(['plan', 'lm.SyntheticLmTiny', '--topology=cpu:8', '--nocompile']) == 0
  assert f'took {quotients[run]["time"]:.2f} times as long as planned' in ' '.join(capsys.readouterr().out.split())
  assert main(['plan', '--measured', '--topology=cpu:8']) == 2
  assert '--measured needs --job_log_dir' in capsys.readouterr().err
  assert main(['plan', f'--job_log_dir={run}', '--measured', '--set=task.train.num_train_steps=3']) == 2
  assert 'compares a run as it was recorded; leave out --set' in capsys.readouterr().err


def test_topologies_with_and_without_experience_have_the_same_name(planned):
  assert dataclasses.replace(planned.topology, experience=None).name == 'h100:1x8'
