"""Processes as hosts: launched, killed, stopped, hung, preempted, and started again; real processes, real signals."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from counted_hosts import times_in
from quick_xla import xla_flags
from tiny_runs import expected_loss, open_gate, tiny_run
from warm_python import WarmPopen

from praxis_lite.checkpoints.stored import checkpoints_at
from praxis_lite.common.errors import UserError
from praxis_lite.runs import run_train
from praxis_lite.runs.cluster import launch
from praxis_lite.runs.cluster.blame import Blame, Evidence, corrupt_places, recorded_evidence
from praxis_lite.runs.cluster.launch import Ended, Launcher, launched_command, the_verdict
from praxis_lite.runs.corruption import Corruption, CorruptionPolicy
from praxis_lite.runs.records.faulty_devices import (
  FaultyDevice,
  leave_out_quarantined,
  record_faulty_devices,
)
from praxis_lite.runs.records.heartbeat import read_heartbeats
from praxis_lite.runs.records.history import note_event, read_history
from praxis_lite.runs.records.run_config import held_for_training
from praxis_lite.runs.records.seats import Seat
from praxis_lite.runs.records.status import status_of

HERE = pathlib.Path(__file__).parent


@pytest.fixture(autouse=True)
def warm_hosts(monkeypatch):
  monkeypatch.setattr(subprocess, 'Popen', WarmPopen)


class Watched:
  """A launcher whose output is kept; `on` does something when a line with some text comes."""

  def __init__(self, command, processes, **kwargs):
    self.lines, self._on = [], {}
    self.launcher = Launcher(command, processes, write=self._write, backoff_s=0.01, **kwargs)

  def on(self, text, call):
    self._on[text] = call

  def signal(self, host, number):
    os.kill(self.launcher._running[host].pid, number)

  def _write(self, line):
    self.lines.append(line)
    for text in [text for text in self._on if text in line]:
      self._on.pop(text)()

  def run(self):
    self.text = ''
    code = self.launcher.run()
    self.text = ''.join(self.lines)
    return code


def python(code, processes=2, **kwargs):
  return Watched([sys.executable, '-c', code], processes, **kwargs)


# ---- what restarts, without JAX


def test_output_is_prefixed_and_the_exit_code_is_that_of_the_first_failure():
  job = python('import os; i = os.environ["JAX_PROCESS_ID"]; print("I am", i, flush=True); os._exit(2 * int(i))')
  assert job.run() == 2
  assert {'host 0: I am 0\n', 'host 1: I am 1\n'} == set(job.lines)


def test_a_faulty_device_restarts_the_job_only_if_it_is_left_out(tmp_path):
  code = 'import os, sys, pathlib; f = pathlib.Path("DIR/again"); a = f.exists(); f.touch(); os._exit(0 if a else 76)'
  command = [sys.executable, '-c', code.replace('DIR', str(tmp_path))]

  def launched(*flags, **kwargs):
    (tmp_path / 'again').unlink(missing_ok=True)
    job = Watched([*command, *flags], 1, **kwargs)
    return job.run(), job.text

  fault = FaultyDevice(5, 'n1', 0, 'device 0', 'x', is_voted=True, is_quarantined=True, event=1)
  record_faulty_devices(tmp_path, [fault])
  code, text = launched('--elastic', directory=tmp_path)
  assert code == 0 and 'host 0 of 1 has found a faulty device, which is left out; restart 1 of 3' in text
  code, text = launched(directory=tmp_path)
  assert code == 76 and 'the job is not started again: faulty_devices.jsonl' in text and 'restart' not in text
  record_faulty_devices(tmp_path, [fault._replace(is_quarantined=False, event=2)])
  assert launched('--elastic', directory=tmp_path)[0] == 76
  assert launched('--elastic')[0] == 76


def test_a_lost_process_restarts_all_a_limited_number_of_times():
  job = python(
    'import os, signal, time\n'
    'if os.environ["JAX_PROCESS_ID"] == "1": os.kill(os.getpid(), signal.SIGKILL)\n'
    'time.sleep(60)',
    max_restarts=1,
    grace_s=0.1,
  )
  assert job.run() == 128 + signal.SIGKILL
  assert job.text.count('launch: host 1 was ended by SIGKILL') == 2
  assert job.text.count('host 0 did not end within 0.1 s, and is killed') == 2
  assert 'restart 1 of 1' in job.text and '1 restarts are all that --max_restarts allows' in job.text


def test_a_place_that_is_lost_twice_is_replaced_by_a_spare_and_one_loss_is_forgiven(tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'run.json').touch()
  job = python(
    'import os, pathlib, signal, sys\n'
    f'count = pathlib.Path("{tmp_path}/count" + os.environ["PRAXIS_LITE_PLACE"]); count.touch()\n'
    'times = len(count.read_text()); count.write_text("x" * (times + 1))\n'
    'bad = {"1": 9, "0": 1}.get(os.environ["PRAXIS_LITE_PLACE"], 0)\n'  # Place 1 is lost always, place 0 once.
    'import time; time.sleep(0.1 if times < bad else 0.5)\n'
    'if times < bad: os.kill(os.getpid(), signal.SIGKILL)\n'
    'print("place", os.environ["PRAXIS_LITE_PLACE"], "as", os.environ["JAX_PROCESS_ID"], flush=True)',
    max_restarts=5,
    spares=1,
    grace_s=5,
    directory=tmp_path / 'run',
  )
  assert job.run() == 0, job.text
  assert 'place 2 takes over from place 1, which is blamed: lost (SIGKILL), lost (SIGKILL); 0 spares left' in job.text
  assert 'host 1: place 2 as 1' in job.text and 'host 0: place 0 as 0' in job.text
  events = read_history(tmp_path / 'run')
  (event,) = [event for event in events if event.kind == 'replaced']
  assert event.text.startswith('place 2 takes over from place 1')
  kinds = [event.kind for event in events]
  assert kinds.count('restarted') == kinds.count('lost') == job.text.count('; restart ') and kinds[-1] == 'restarted'


def test_a_slow_place_that_is_lost_once_or_has_a_faulty_device_is_blamed(tmp_path, monkeypatch):
  blame = Blame()
  note_event(tmp_path, 'slow_host', 30, 'process 1 is slow', {'process': 1})
  for forged in ({'process': 7}, {'process': True}, {'process': 'x'}, {}):
    note_event(tmp_path, 'slow_host', 30, 'x', forged)
  blame.add(*recorded_evidence(read_history(tmp_path), [0, 4, 2]))
  assert blame.reasons(4) == []
  blame.add(Evidence(4, 'lost (SIGKILL)'), Evidence(0, 'lost (SIGKILL)'))
  assert blame.reasons(4) == ['slow at step 30', 'lost (SIGKILL)'] and blame.reasons(0) == []
  monkeypatch.setenv('PRAXIS_LITE_PLACE', '2')  # As `launch` sets it.
  policy = CorruptionPolicy(tmp_path, 'fail', elastic=True, most=3)
  policy.answer(Corruption(0, 5, 'step 5: replicas differ', jax.devices()[1:2], is_voted=True))
  blame.add(*corrupt_places(tmp_path, [0, 4, 2]))
  assert blame.reasons(2) == ['its device 1 is quarantined'] and corrupt_places(None, [0]) == []
  assert corrupt_places(tmp_path, [0, 4, 3]) == []
  # The same device of another place on this machine is healthy; a record of an earlier version has no place.
  host, devices = socket.gethostname(), jax.devices()[:2]
  left = lambda slot: len(leave_out_quarantined(devices, tmp_path, [Seat(host, slot)])[0])  # noqa: E731
  assert (left(2), left(3)) == (1, 2)
  file = tmp_path / 'faulty_devices.jsonl'
  file.write_text(file.read_text().replace(', "slot": 2', ''))
  assert (left(2), left(3)) == (1, 1) and corrupt_places(tmp_path, [0, 4, 2]) == []


def test_hosts_that_only_could_not_communicate_blame_no_place_and_leave_out_no_host():
  job = python('import sys; sys.exit(75)', spares=1, max_restarts=2, grace_s=5)
  assert job.run() == 75 and 'takes over' not in job.text
  job = python('import sys; sys.exit(75)', min_processes=1, max_restarts=2, grace_s=5)
  assert job.run() == 75 and 'goes on with' not in job.text


@pytest.mark.slow
def test_another_place_with_the_same_index_is_not_lost_twice(tmp_path):
  """Place 1 is lost twice, then place 2, which has its index, once; one more spare is left."""
  job = python(
    'import os, pathlib, signal, time\n'
    'place = os.environ["PRAXIS_LITE_PLACE"]\n'
    f'count = pathlib.Path("{tmp_path}/count" + place); count.touch()\n'
    'times = len(count.read_text()); count.write_text("x" * (times + 1))\n'
    'is_bad = times < {"1": 2, "2": 1}.get(place, 0)\n'
    'time.sleep(0.1 if is_bad else 0.5)\n'
    'if is_bad: os.kill(os.getpid(), signal.SIGKILL)',
    spares=2,
    min_processes=1,
    max_restarts=5,
    grace_s=5,
  )
  assert job.run() == 0 and 'goes on with' not in job.text
  assert 'place 2 takes over from place 1' in job.text and job.text.count('; restart ') == 3


def test_a_place_is_replaced_only_if_the_job_is_restarted(tmp_path):
  (tmp_path / 'run.json').touch()
  slow = {'time': time.time() + 600, 'kind': 'slow_host', 'step': 5, 'text': '', 'about': {'process': 1}}
  line = json.dumps(slow) + '\n'
  code = f'import pathlib, time; pathlib.Path("{tmp_path}/history.jsonl").write_text({2 * line!r}); time.sleep(0.2)'
  job = python(code, spares=1, directory=tmp_path)
  assert job.run() == 0 and {event.kind for event in read_history(tmp_path)} == {'slow_host'}


def test_a_host_that_is_lost_twice_is_left_out_down_to_the_smallest_number():
  job = python(
    'import os, signal\n'
    'if os.environ["JAX_NUM_PROCESSES"] > "1": os.kill(os.getpid(), signal.SIGKILL)\n'
    'print("alone", flush=True)',
    max_restarts=5,
    min_processes=1,
    grace_s=5,
  )
  assert job.run() == 0
  assert 'twice, so the job goes on with 1 process' in job.text and 'host 0: alone' in job.text


@pytest.mark.slow_cases
@pytest.mark.parametrize('fate', ['moved', 'deleted', 'never filled'])
def test_a_job_whose_directory_is_not_where_it_was_is_not_started_again(fate, tmp_path):
  """Started again, it would begin anew there. An empty directory is removed by a run that has written nothing."""
  directory = tmp_path / 'run'
  job = python(
    'import os, pathlib, shutil, sys, time\n'
    f'run, fate = pathlib.Path({str(directory)!r}), {fate!r}\n'
    'run.mkdir(exist_ok=True)\n'
    'if fate != "never filled": (run / "run.json").touch()\n'
    'time.sleep(0.5)\n'  # The launcher looks each 0.05 s.
    'run.rename(run.with_name("moved")) if fate == "moved" else shutil.rmtree(run)\n'
    'sys.exit(75)',
    processes=1,
    max_restarts=2,
    directory=directory,
  )
  assert job.run() == (75 if fate == 'never filled' else 2)
  told = f'launch: error: host 0 of 1 was lost (exit code 75), and job_log_dir {directory} is not where it was: '
  assert (job.text.count(told), job.text.count('restart ')) == ((0, 2) if fate == 'never filled' else (1, 0))


def test_a_signal_is_passed_on_once_and_nothing_is_started_again():
  job = python(
    'import os, signal, sys, time\n'
    'signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n'
    'print("ready", flush=True)\n'
    'while True: time.sleep(0.01)'
  )
  ready = threading.Barrier(2, action=lambda: os.kill(os.getpid(), signal.SIGTERM))
  for host in range(2):
    job.on(f'host {host}: ready', lambda: threading.Thread(target=ready.wait).start())
  assert job.run() == 143 and 'restart' not in job.text


def at_once_when_both_are_ready(job, call):
  ready = threading.Barrier(2, action=call)
  for host in range(2):
    job.on(f'host {host}: ready', lambda: threading.Thread(target=ready.wait).start())


def state_of(pid):
  return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2][0]


def stop_host_1_and_end_the_job(job):
  pid = job.launcher._running[1].pid
  os.kill(pid, signal.SIGSTOP)
  while (state := state_of(pid)) != 'T':
    assert state in 'RS'
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGTERM)


def test_a_host_that_is_stopped_when_the_job_is_ended_goes_on_and_saves_like_the_others():
  job = python(
    'import signal, sys, time\n'
    'signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))\n'
    'print("ready", flush=True)\n'
    'time.sleep(60)'
  )
  at_once_when_both_are_ready(job, lambda: stop_host_1_and_end_the_job(job))
  assert job.run() == 143 and 'killed' not in job.text
  assert 'host 0: saved' in job.text and 'host 1: saved' in job.text


def test_a_host_that_stops_while_it_ends_is_killed_after_some_time_and_named(monkeypatch):
  """The minute passes at once when host 0 has ended and host 1 has stopped, so a busy machine has time for both."""
  job = python(
    'import os, signal, sys, time\n'
    'stops = os.environ["JAX_PROCESS_ID"] == "1"\n'
    'signal.signal(signal.SIGTERM, lambda *_: stops or sys.exit(143))\n'
    'signal.signal(signal.SIGCONT, lambda *_: stops and os.kill(os.getpid(), signal.SIGSTOP))\n'  # It follows SIGTERM.
    'print("ready", flush=True)\n'
    'time.sleep(60)',
    stop_s=60.0,
  )

  def monotonic():
    running = job.launcher._running
    is_late = len(running) == 2 and running[0].poll() is not None and state_of(running[1].pid) == 'T'
    return time.monotonic() + 60 * is_late

  clock = types.SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
  monkeypatch.setattr(launch, 'time', clock)
  at_once_when_both_are_ready(job, lambda: os.kill(os.getpid(), signal.SIGTERM))
  assert job.run() == 128 + signal.SIGKILL and 'restart' not in job.text
  assert 'host 1 did not end within 60 s of SIGTERM, and is killed' in job.text and 'host 0 did not' not in job.text


def test_a_failure_after_a_signal_leaves_the_others_as_long_as_one_before():
  job = python(
    'import os, signal, time\n'
    'def end(*_):\n'
    '  if os.environ["JAX_PROCESS_ID"] == "0":\n'
    '    os._exit(75)\n'
    'signal.signal(signal.SIGTERM, end)\n'
    'print("ready", flush=True)\n'
    'while True: time.sleep(0.01)',
    grace_s=0.3,
  )
  at_once_when_both_are_ready(job, lambda: os.kill(os.getpid(), signal.SIGTERM))
  assert job.run() == 128 + signal.SIGKILL and 'restart' not in job.text
  assert 'host 1 did not end within 0.3 s, and is killed' in job.text


def test_after_a_second_signal_all_end_soon(monkeypatch):
  monkeypatch.setattr(launch, '_AFTER_SECOND_SIGNAL', 0.3)
  job = python(
    'import signal, time\n'
    'signal.signal(signal.SIGTERM, lambda *_: print("again", flush=True))\n'
    'print("ready", flush=True)\n'
    'while True: time.sleep(0.01)'
  )
  at_once_when_both_are_ready(job, lambda: os.kill(os.getpid(), signal.SIGTERM))
  job.on('again', lambda: os.kill(os.getpid(), signal.SIGTERM))
  assert job.run() == 128 + signal.SIGKILL
  assert 'host 0, 1 did not end within 0.3 s of another SIGTERM, and is killed' in job.text


def test_a_process_that_does_not_end_though_it_was_killed_is_left_behind(monkeypatch):
  job = python('import os; os._exit(3)', processes=1)

  def wait(process, timeout=None):  # As one that waits for storage that is gone.
    raise subprocess.TimeoutExpired(process.args, timeout)

  monkeypatch.setattr(WarmPopen, 'wait', wait)
  assert job.run() == 3
  assert re.search(r'launch: host 0, process \d+, did not end within 10 s of SIGKILL; giving up', job.text)


@pytest.mark.parametrize(
  'ended, verdict',
  [
    ({0: 0, 1: 0}, Ended(0, -1)),
    ({1: 75, 0: 2}, Ended(2, 0)),  # a mistake, which another attempt would make again
    ({0: 75, 2: 75, 1: 137}, Ended(137, 1)),
    ({0: 0, 1: 75}, Ended(75, 1)),
    ({1: 143, 0: 143}, Ended(143, 1)),
    ({1: 143, 0: 134}, Ended(134, 0)),
  ],
)
def test_the_verdict_names_the_cause_before_those_who_noticed(ended, verdict):
  assert the_verdict(ended) == verdict


@pytest.mark.parametrize(
  'arguments, devices, message',
  [
    ([], None, 'name what to run after --'),
    (['eval'], None, "got 'eval'"),
    (['train', '--process_id=1'], None, '--process_id=1: leave it out, because launch sets it'),
    (['train', '--devices=2'], 2, '--devices is given twice'),
  ],
)
def test_what_cannot_be_launched_is_a_mistake(arguments, devices, message):
  with pytest.raises(UserError, match=message):
    launched_command(arguments, devices=devices, elastic=False)


# ---- real runs


LOOP = """
import os, sys, time, pathlib
import jax, numpy as np
from praxis_lite.common.errors import UserError
from praxis_lite.common.devices import simulate_cpu_devices
from praxis_lite.common.processes import note_progress
from praxis_lite.runs.cluster.distributed import initialize_distributed
from praxis_lite.runs.cluster.watchdog import the_watchdog
simulate_cpu_devices(1)
job = initialize_distributed(hang_timeout_s=float(sys.argv[2]))
from jax.experimental import multihost_utils
def why_lost():
  return UserError('job_log_dir was moved') if 'lost' in sys.argv else None
with the_watchdog().running(pathlib.Path(sys.argv[1]), why_lost):
  for step in range(10_000):
    note_progress(f'step {step}')
    time.sleep(0.05)
    if 'apart' not in sys.argv:
      multihost_utils.process_allgather(np.ones(1))
    if step == 25:  # After a beat that says so.
      print('going', flush=True)
    if step == 30 and sys.argv[3:4] == [str(job.process_id)]:
      note_progress('a hang')
      while True:
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize('fault', ['stopped', 'hangs', 'hangs, and the directory is lost'])
def test_a_stopped_or_hanging_host_is_named_by_the_others_with_what_it_was_doing(fault, tmp_path, monkeypatch):
  hangs = {'stopped': [], 'hangs': ['1']}.get(fault, ['1', 'lost'])
  job = Watched([sys.executable, '-c', LOOP, str(tmp_path), '5', *hangs], 2, max_restarts=0, grace_s=60)
  if fault == 'stopped':
    monkeypatch.setattr(launch, '_AFTER_NOTICED', 1.0)
    job.on('host 1: going', lambda: job.signal(0, signal.SIGSTOP))
  code = job.run()
  if fault == 'stopped':
    assert code == 128 + signal.SIGKILL and 'host 0 of 2 was lost' in job.text
    assert 'which was in step' in job.text and 'has shown no sign of life for 5 s' in job.text
    stacks = (tmp_path / 'stacks' / 'host_1.txt').read_text()
    assert 'process_allgather' in stacks
  elif 'lost' in fault:
    assert code == 2 and 'no host has made progress for 5 s' in job.text
    assert 'error: job_log_dir was moved; it continues there from its last checkpoint' in job.text
    assert 'Thread' not in job.text and not any(tmp_path.iterdir())
  else:
    assert code == 75 and 'no host has made progress for 5 s' in job.text
    assert 'which was in a hang' in job.text
    # The one that hangs is alive, and writes what it was doing itself.
    assert 'in <module>' in (tmp_path / 'stacks' / 'host_1.txt').read_text()


@pytest.mark.slow
@pytest.mark.parametrize('lost', [(3,), (1, 3)])
def test_in_groups_every_host_names_the_lost_one_also_if_its_whole_group_is_lost(lost, tmp_path):
  """Five processes in groups of at most two: 0 and 3, 1 and 4, 2."""
  code = 'import praxis_lite.runs.cluster.beats as beats; beats.GROUP = 2\n' + LOOP
  job = Watched([sys.executable, '-c', code, str(tmp_path), '8'], 5, max_restarts=0, grace_s=90)
  job.on('host 1: going', lambda: [job.signal(host, signal.SIGKILL) for host in lost])
  assert job.run() == 128 + signal.SIGKILL
  told = [line for line in job.lines if 'has shown no sign of life for' in line and line.startswith('host ')]
  assert {line.split(':')[0] for line in told} == {f'host {i}' for i in range(5) if i not in lost}, job.text
  assert all(any(f': host {host} (' in line for host in lost) for line in told)


@pytest.mark.slow
def test_a_killed_host_is_named_long_before_the_timeout_though_no_collective_fails(tmp_path, monkeypatch):
  """As with collectives of GPUs, which wait. Groups of two: host 0 learns of host 3 only by its connection."""
  code = 'import praxis_lite.runs.cluster.beats as beats; beats.GROUP = 2\n' + LOOP
  job = Watched([sys.executable, '-c', code, str(tmp_path), '300', 'apart'], 5, max_restarts=0, grace_s=60)
  killed = []
  job.on('host 1: going', lambda: (job.signal(4, signal.SIGKILL), killed.append(time.monotonic())))
  assert job.run() == 128 + signal.SIGKILL
  assert time.monotonic() - killed[0] < 15  # By itself, it takes 2.3 s.
  told = [line for line in job.lines if 'host 4 (' in line and 'its connection is closed' in line]
  assert {line.split(':')[0] for line in told} == {f'host {i}' for i in range(4)}, job.text
  assert any('which was in step' in line for line in told)
  assert 'is killed' not in job.text  # By `launch`, because it ended late.


@pytest.mark.slow
def test_a_mistake_that_one_host_finds_ends_the_job_and_is_not_tried_again(tmp_path, monkeypatch):
  """Another run trains in its directory, which host 0 alone looks at."""
  env = {'TOTAL_DEVICES': '2', 'XLA_FLAGS': xla_flags(1), 'JAX_PLATFORMS': 'cpu'}
  env['PYTHONPATH'] = os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')])
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  train = ['train', f'--exp={HERE / "tiny_hosts.py"}:TinyHosts', '--noverify', f'--job_log_dir={tmp_path}']
  job = Watched(launched_command([*train, '--hang_timeout_s=60'], devices=1, elastic=False), 2, max_restarts=1)
  with held_for_training(tmp_path):
    assert job.run() == 2
  assert job.text.count('error: another run is training in job_log_dir') == 1
  assert 'restart' not in job.text and 'is killed' not in job.text and 'Thread' not in job.text


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_after_one_is_killed_and_ends_with_the_same_bits(tmp_path, monkeypatch):
  jax.devices()  # Those of this process, before the environment is that of the others.
  gate = tmp_path / 'gate'
  for name, value in {
    **{'GATE': open_gate(gate, 9), 'TOTAL_DEVICES': '2', 'XLA_FLAGS': xla_flags(1), 'JAX_PLATFORMS': 'cpu'},
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'programs'),
    'PYTHONPATH': os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]),
  }.items():
    monkeypatch.setenv(name, value)
  train = ['train', f'--exp={HERE / "tiny_hosts.py"}:TinyHosts', '--noverify', '--hang_timeout_s=20']
  train += ['--set=task.train.save_interval_steps=20', '--set=task.train.emergency_copies.every_n_steps=2']
  train += [f"--set=task.train.emergency_copies.directories=('{tmp_path}',)"]

  def started(name):
    command = launched_command([*train, f'--job_log_dir={tmp_path / name}'], devices=1, elastic=False)
    return Watched(command, 2, max_restarts=1, grace_s=60)

  job = started('two')
  job.on('step 7/', lambda: job.signal(0, signal.SIGKILL))  # The one that JAX's service is in.
  job.on('restart 1 of 1', lambda: open_gate(gate))
  assert job.run() == 0, job.text
  assert 'host 0: 2 processes, found by praxis-lite launch; process 0 is at localhost:' in job.lines[0]
  assert 'host 0 was ended by SIGKILL' in job.text and "has ended, or JAX's service there has failed" in job.text
  assert 'exit code 75: if the job is started again, it continues from its last checkpoint' in job.text
  assert 'Current thread' in (tmp_path / 'two' / 'stacks' / 'host_1.txt').read_text()
  together = run_train(tiny_run(4, noise=0.0), tmp_path / 'two')  # Restores what two processes have saved.
  alone = run_train(tiny_run(4, noise=0.0, save_interval_steps=100), tmp_path / 'one')
  assert re.search('restored step [468] of 20 from emergency copies, newer than the checkpoints', job.text)
  whole = started('whole')
  assert whole.run() == 0, whole.text
  # What two processes have saved is restored in one.
  together, undisturbed = (run_train(tiny_run(2, noise=0.0), tmp_path / name) for name in ('two', 'whole'))
  for a, b in zip(jax.tree.leaves(together.state), jax.tree.leaves(undisturbed.state)):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  alone = run_train(tiny_run(2, noise=0.0), tmp_path / 'one')
  assert together.step == alone.step == 20
  for a, b in zip(together.state.mdl_vars.values(), alone.state.mdl_vars.values()):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-4 * np.abs(np.asarray(b)).max())
  loss = together.metrics['eval/valid']['loss']
  assert abs(loss - expected_loss(together.state.mdl_vars, 33, 1)) < 1e-5


# A host of its own for each process: its memory is below its home directory.
HOST = """
import os, pathlib, sys
home = pathlib.Path(sys.argv[1], 'host' + os.environ['JAX_PROCESS_ID'])
home.mkdir(exist_ok=True)
os.environ['HOME'] = str(home)
from praxis_lite.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize('lost', [(1,), (0,), (0, 1)])
def test_hosts_that_are_lost_with_their_memory_get_their_parts_from_peers_and_end_with_the_same_bits(
  lost, tmp_path, monkeypatch
):
  """Four processes in failure domains of two; (0, 1) is a whole domain. There is no checkpoint before the end."""
  gate = tmp_path / 'gate'
  for name, value in {
    **{'GATE': open_gate(gate, 9), 'TOTAL_DEVICES': '4', 'XLA_FLAGS': xla_flags(1), 'JAX_PLATFORMS': 'cpu'},
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'programs'),
    'PYTHONPATH': os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]),
  }.items():
    monkeypatch.setenv(name, value)
  train = ['train', f'--exp={HERE / "tiny_hosts.py"}:TinyHosts', '--noverify', '--hang_timeout_s=60', '--devices=1']
  copies = 'task.train.emergency_copies'
  train += ['--set=task.train.save_interval_steps=20', f'--set={copies}.every_n_steps=2', f'--set={copies}.peers=1']
  train += [f"--set={copies}.directories=('~',)", f'--set={copies}.failure_domain=2']

  def started(name):
    (tmp_path / f'{name} hosts').mkdir()
    command = [sys.executable, '-c', HOST, str(tmp_path / f'{name} hosts'), *train, f'--job_log_dir={tmp_path / name}']
    return Watched(command, 4, max_restarts=1, grace_s=60)

  def lose():
    for host in lost:
      job.signal(host, signal.SIGKILL)
    for host in lost:
      while job.launcher._running[host].poll() is None:
        time.sleep(0.01)
      shutil.rmtree(tmp_path / 'run hosts' / f'host{host}')

  job = started('run')
  job.on('step 8/', lose)
  job.on('restart 1 of 1', lambda: open_gate(gate))
  assert job.run() == 0, job.text
  assert 'to process 2 at each copy; a process keeps up to 6 such parts' in job.text
  assert re.search('restored step [468] of 20 from emergency copies', job.text), job.text
  whole = started('whole')
  assert whole.run() == 0, whole.text
  found, undisturbed = (checkpoints_at(tmp_path / name)[-1] for name in ('run', 'whole'))
  differences = list(found.differences(undisturbed))
  assert found.step == undisturbed.step == 20 and len(differences) > 2
  assert all(difference.largest == 0 for difference in differences)
  beats = read_heartbeats(tmp_path / 'whole')
  assert [beat.speed['sent_to'] for beat in beats] == [2, 3, 0, 1]
  assert any(line.startswith('slowest link: process ') for line in status_of(beats, is_held=False).lines)


@pytest.mark.slow
def test_through_five_changes_of_size_by_kills_no_example_is_repeated_or_lost(tmp_path, monkeypatch):
  """Three epochs of 50 examples, each in 9 batches, by 1, 2, 4, 3, 2 and 1 processes, all killed after some steps."""
  gate = tmp_path / 'gate'
  for name, value in {
    **{'GATE': str(gate), 'XLA_FLAGS': xla_flags(1), 'JAX_PLATFORMS': 'cpu'},
    'PYTHONPATH': os.pathsep.join([str(HERE), os.environ.get('PYTHONPATH', '')]),
  }.items():
    monkeypatch.setenv(name, value)
  sizes, stops = (1, 2, 4, 3, 2, 1), (5, 9, 14, 18, 22, 1000)
  train = [
    'train',
    f'--exp={HERE / "counted_hosts.py"}:CountedHosts',
    '--noverify',
    f'--job_log_dir={tmp_path / "run"}',
  ]
  for size, stop in zip(sizes, stops):
    monkeypatch.setenv('TOTAL_DEVICES', str(size))
    open_gate(gate, stop)
    command = launched_command(train, devices=1, elastic=False)
    job = Watched([*command, f'--set=task.ici_mesh_shape=({size},)'], size, max_restarts=0, grace_s=0.1)
    if stop < 27:
      job.on(f'step {stop - 1}/', lambda job=job, size=size: [job.signal(i, signal.SIGKILL) for i in range(size)])
    assert job.run() == (137 if stop < 27 else 0), job.text
  lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
  read = {line['step']: times_in(line['metrics']) for line in lines if line['split'] == 'train'}
  assert list(read) == list(range(1, 28)) and len(lines) >= 27
  for epoch in range(3):
    np.testing.assert_array_equal(sum(read[step] for step in range(9 * epoch + 1, 9 * epoch + 10)), 1)
  orders = [tuple(np.flatnonzero(read[step])) for step in (1, 10, 19)]
  assert len(set(orders)) == 3  # Each epoch has its own order.
