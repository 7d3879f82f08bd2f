"""The campaign of faults in a short form, and that it would notice what it looks for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from warm_python import WarmPopen

from praxis_lite.common.errors import UserError
from praxis_lite.runs.records.metrics import SummaryWriter
from tools import fault_campaign
from tools.fault_campaign import campaign, fault_table, make_baseline
from tools.faults import processes
from tools.faults.comparison import Results, _lines, curves_of, differences
from tools.faults.faults import FAULTS, damage_events, flip_bit_of_checkpoint, kill, terminate
from tools.faults.processes import child_processes, host_processes


@pytest.mark.slow
def test_training_survives_faults(tmp_path, monkeypatch):
  """Each of these four is a process that is disturbed, or files that are, and one that goes on."""
  monkeypatch.setattr(subprocess, 'Popen', WarmPopen)
  baseline = make_baseline(tmp_path, np.random.default_rng(0), hosts=1, records=False, interrupted=1)
  faults = kill, terminate, flip_bit_of_checkpoint, damage_events
  end = time.monotonic() + 1000
  reports = list(campaign(faults, range(4), 0, tmp_path, baseline, jobs=1, end=end))
  assert len(reports) == 4
  assert not [(r.fault, r.seen, r.problem) for r in reports if r.problem], fault_table(reports)


def written(directory, losses, resumed_step=0):
  directory.mkdir(exist_ok=True)
  writer = SummaryWriter(directory, resumed_step=resumed_step)
  for step, loss in losses.items():
    writer.write(step, 'train', {'loss': loss})
  writer.close()


def results(directory):
  return Results(3, {'w': b'1'}, _lines(directory / 'metrics.jsonl'), curves_of(directory / 'summaries'))


def test_a_resumed_run_shows_each_step_once_also_after_the_clock_was_set_back(tmp_path, monkeypatch):
  written(tmp_path / 'a', {1: 0.5, 2: 0.25, 3: 0.125})
  written(tmp_path / 'b', {1: 0.5, 2: 7.0, 3: 8.0})
  assert len(differences(results(tmp_path / 'b'), results(tmp_path / 'a'))) == 2
  with monkeypatch.context() as patched:
    patched.setattr(time, 'time', lambda: 1e9)
    patched.setattr(time, 'time_ns', lambda: 10**18)
    written(tmp_path / 'b', {2: 0.25}, resumed_step=1)
    written(tmp_path / 'b', {3: 0.125}, resumed_step=2)
  assert not differences(results(tmp_path / 'b'), results(tmp_path / 'a'))
  again = SummaryWriter(tmp_path / 'b', resumed_step=2)
  for _ in range(2):
    again.write(3, 'train', {'loss': 0.125})
  again.close()
  assert len(differences(results(tmp_path / 'b'), results(tmp_path / 'a'))) == 2
  assert differences(results(tmp_path / 'b')._replace(step=2, arrays={}), results(tmp_path / 'a'))[:2] == [
    'it ended at step 2',
    'w differs',
  ]


def test_without_grain_faults_of_data_in_files_are_left_out_in_one_line(monkeypatch, capsys):
  def absent():
    raise UserError('Grain is not installed; pip install praxis_lite[grain]')

  monkeypatch.setattr(fault_campaign, 'import_grain', absent)
  with pytest.raises(SystemExit) as ended:
    fault_campaign.main(['--kind=data file', '--faults=1'])
  assert ended.value.code == 2
  out, err = capsys.readouterr()
  assert out == 'left out: damage_data, replace_data (Grain is not installed; pip install praxis_lite[grain])\n'
  assert err.splitlines()[-1].endswith('error: there is no such fault')


def test_each_fault_of_others_is_drawn():
  names = {fault.__name__ for fault in FAULTS}
  wanted = {'mix_parts', 'rename_step', 'stop_host_at_end', 'hold_lock', 'move_directory', 'use_odd_path'}
  assert names >= wanted | {'replace_metrics_file', 'empty_metrics', 'replace_data'}
  assert [fault_campaign.draw_fault(1, n, [*FAULTS]) for n in range(len(FAULTS))] == [*FAULTS]


@pytest.mark.skipif(sys.platform != 'linux', reason='processes are forked on Linux')
def test_the_processes_of_the_hosts_are_those_that_launch_has_started(tmp_path):
  """Not the process that imports for them, which a fault would leave without an effect on the run."""
  (tmp_path / 'sleeping.py').write_text('import time; time.sleep(60)')
  code = 'import sys; from praxis_lite.runs.cluster.warm_start import WarmStarter\n'
  code += "starter = WarmStarter('sleeping', [], ['json'])\n"
  code += 'print([starter.start({}).pid for _ in range(2)], flush=True); sys.stdin.read()'
  env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), str(processes.ROOT)])}
  command = [sys.executable, '-c', code]
  with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launching:
    try:
      started = json.loads(launching.stdout.readline())
      assert host_processes(launching.pid) == started
      assert len(child_processes(launching.pid)) == 3
    finally:
      for pid in child_processes(launching.pid):
        os.kill(pid, signal.SIGKILL)
      launching.kill()
