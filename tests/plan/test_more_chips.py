"""How many chips a step needs that does not fit, and batches that are too small for many chips."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import sys
import time

import pytest
from small_lm import ROWS, small_lm
from warm_python import WarmPopen

from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.plan import parse_topology, plan
from praxis_lite.instruments.plan.knobs import configure_task
from praxis_lite.instruments.plan.what_if import format_more_chips, plan_on_more_chips


def with_memory(name, size):
  topology = parse_topology(name)
  return dataclasses.replace(topology, target=dataclasses.replace(topology.target, memory=size))


@pytest.mark.slow
@pytest.mark.parametrize('chips, name', [('h100:1', 'h100:1x4'), ('v5p:1x1x1', 'v5p:2x2x1'), ('cpu:1', 'cpu:4')])
def test_a_step_that_does_not_fit_has_the_fewest_chips_on_which_it_does(chips, name):
  config = small_lm((1, 1, 1))
  topology = parse_topology(chips)
  on_4 = plan(small_lm((1, 4, 1)), None, with_memory(name, 1e9), compile=False).memory.peak
  small = with_memory(chips, on_4 / topology.target.device_memory * topology.target.memory + 1)
  found = plan_on_more_chips(configure_task(config), small)
  assert (found.topology.name, found.memory.peak, found.mesh['data']) == (name, on_4, 4)
  assert 'fits on 4 chips: ' in format_more_chips(found)
  assert f"--topology={name} --set 'task.ici_mesh_shape=(1, 4, 1)'" in format_more_chips(found)
  assert config.task.ici_mesh_shape == (1, 1, 1)  # It is as it was.


@pytest.mark.slow
def test_a_step_that_fits_on_no_number_of_chips_has_none():
  assert plan_on_more_chips(configure_task(small_lm((1, 1, 1))), with_memory('cpu:1', 1000)) is None


def test_a_batch_that_would_mostly_be_filled_up_is_refused():
  told = r"datasets\[\*\].batch_size: 16 rows are split into 64 parts.*75% of the work.*batch_size=64'"
  with pytest.raises(ConfigError, match=told):
    plan(small_lm((1, 4 * ROWS, 1)), None, 'cpu:64', compile=False)


@pytest.mark.slow_cases
@pytest.mark.skipif(sys.platform == 'win32', reason='Windows has no SIGTERM that a process may ignore')
@pytest.mark.parametrize('sent', ['SIGTERM', 'SIGKILL'])
def test_the_process_of_a_compiler_ends_with_the_process_that_started_it(sent, tmp_path):
  file = tmp_path / 'pid'
  child = (
    'import os, pathlib, time; from praxis_lite.instruments.plan.child import end_with_parent; end_with_parent(); '
    f'pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(300)'
  )
  parent = (
    'import pathlib, sys; from praxis_lite.instruments.plan.child import compile_in_child; '
    f'compile_in_child([sys.executable, "-c", {child!r}], pathlib.Path({str(tmp_path)!r}))'
  )
  process = WarmPopen([sys.executable, '-c', parent], cwd=pathlib.Path(__file__).parents[2])
  deadline = time.monotonic() + 240
  while not (file.exists() and file.read_text()) and time.monotonic() < deadline and process.poll() is None:
    time.sleep(0.1)
  of_child = int(file.read_text())
  process.send_signal(getattr(signal, sent))
  process.wait()
  while is_running(of_child) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not is_running(of_child)


def is_running(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  stat = pathlib.Path(f'/proc/{pid}/stat')
  return not (stat.exists() and stat.read_text().rpartition(')')[2].split()[0] == 'Z')  # A zombie has ended.
