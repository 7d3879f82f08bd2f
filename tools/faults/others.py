"""Faults of users and other programs, which move, mix, replace and lock the files of a run, and stop its hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.inputs.grain_input import write_array_records
from tools.faults.experiment import NUM_EXAMPLES, NUM_STEPS, SAVE_INTERVAL, examples
from tools.faults.lab import FILES_MADE, Lab, SurvivalError
from tools.faults.processes import Training, host_processes, process_state

_ODD_NAMES = (
  'a[x]b',
  'what?',
  'all*',
  'with space',
  '-dash',
  'ünï',
  '{a,b}',
  '%s%d',
  "quo'te",
  'a=b',
  '[!a]',
  'back\\slash',
)


def _expect_refusal(lab: Lab, *words: str, code: int = 2) -> Training:
  """Starts a run that must be refused in one line that contains some words."""
  run = lab.start()
  if run.wait() != code:
    raise SurvivalError(f'it was not refused, and ended with {run.process.returncode}: {run.lines[-2:]}')
  errors = [line for line in run.lines if 'error: ' in line]
  if len(errors) != 1 or run.lines[-1] != errors[0] or not all(word in errors[0] for word in words):
    raise SurvivalError(f'it was refused without {words}, or not in one line: {run.lines[-3:]}')
  return run


# ---- checkpoints whose parts are intact


def mix_parts(lab: Lab) -> None:
  """part of another checkpoint"""
  lab.take()
  *_, other, newest = lab.checkpoints()
  part = str(lab.rng.choice(['state', 'inputs', 'about']))
  lab.seen.where = f'{part} of {newest.name} comes from {other.name}'
  shutil.rmtree(newest / part)
  shutil.copytree(other / part, newest / part)
  lab.go_on(damaged=1)
  _check_restored_before(lab, int(newest.name))


def rename_step(lab: Lab) -> None:
  """checkpoint renamed to another step"""
  lab.take()
  newest = lab.checkpoints()[-1]
  steps = [int(p.name) for p in lab.checkpoints()]
  to = int(lab.rng.choice([step for step in (*range(1, NUM_STEPS + 1), 99) if step not in steps]))
  lab.seen.where = f'{newest.name} to {to}'
  newest.rename(newest.with_name(str(to)))
  lab.go_on(damaged=1)
  _check_restored_before(lab, int(newest.name))


def _check_restored_before(lab: Lab, step: int) -> None:
  """Checks that the run continued from the checkpoint before the damaged one of `step`."""
  restored = lab.started[-1].restored_step or 0
  lab.seen.lost, lab.seen.bound = step - restored, SAVE_INTERVAL
  if not 0 < lab.seen.lost <= SAVE_INTERVAL:
    raise SurvivalError(f'step {restored} was restored, and only {step} was spoilt')


# ---- hosts


def stop_host_at_end(lab: Lab) -> None:
  """SIGTERM while a host of two is stopped"""
  lab.hosts = 2
  step, which = int(lab.rng.integers(0, NUM_STEPS)), int(lab.rng.integers(3))
  is_before = bool(lab.rng.random() < 0.6)
  lab.seen.where = f'step {step}, host {("0", "1", "0 and 1")[which]}, {"before" if is_before else "after"} the signal'
  run = lab.start()
  run.wait_for(lambda: run.last_step >= step and len(host_processes(run.process.pid)) == 2)
  hosts = host_processes(run.process.pid)
  hosts = hosts if which == 2 else hosts[which : which + 1]
  if not is_before:
    run.send(signal.SIGTERM)
    time.sleep(float(lab.rng.random()) * 0.3)
  for pid in hosts:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGSTOP)
  if is_before:
    end = time.monotonic() + 5
    while time.monotonic() < end and any(process_state(pid) not in 'TZ' for pid in hosts):
      time.sleep(0.01)
    run.send(signal.SIGTERM)
  code = run.wait(150)  # The watchdogs have 30 s, and the launcher 40 s for both of them.
  lab.seen.too_late = code == 0
  told = 'killed' in run.text or 'saved in' in run.text or not run.last_step
  if code not in (0, 75, 128 + signal.SIGTERM, 128 + signal.SIGKILL) or not told:
    raise SurvivalError(f'it ended with {code}: {run.lines[-3:]}')
  if code == 128 + signal.SIGTERM and is_before and run.last_step and 'saved in' not in run.text:
    raise SurvivalError(f'it did not save: {run.lines[-3:]}')
  lab.go_on(run if code == 128 + signal.SIGTERM and 'saved in' in run.text else None)


# ---- locks

_HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print('held', flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def _lock(folder: Path, seconds: float) -> Iterator[None]:
  command = [sys.executable, '-S', '-c', _HOLD, str(folder), str(seconds)]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
    try:
      assert process.stdout is not None
      process.stdout.readline()
      yield
    finally:
      process.kill()


def hold_lock(lab: Lab) -> None:
  """lock of another program"""
  lab.take()
  newest = lab.checkpoints()[-1]
  kind = int(lab.rng.choice(3, p=[0.5, 0.2, 0.3]))
  seconds = float(lab.rng.random() * 20)
  lab.seen.where = (f'checkpoint, {seconds:.0f} s', 'checkpoint, without end', 'run directory')[kind]
  if kind == 0:
    with _lock(newest, seconds):
      lab.go_on()
    return
  with _lock(newest if kind == 1 else lab.directory, 1000):
    _expect_refusal(lab, *(('is locked by', 'not released') if kind == 1 else ('another run is training',)))
  lab.go_on()


# ---- directories


def move_directory(lab: Lab) -> None:
  """run directory moved or deleted while it trains"""
  _move(lab)


def move_directory_of_hosts(lab: Lab) -> None:
  """run directory of two hosts moved or deleted while it trains"""
  lab.hosts = 2
  _move(lab)


def _move(lab: Lab) -> None:
  step, is_deleted = int(lab.rng.integers(1, NUM_STEPS - 1)), bool(lab.rng.random() < 0.4)
  lab.seen.where = f'step {step}, {"deleted" if is_deleted else "moved"}'
  run = lab.start()
  run.wait_for(lambda: run.last_step >= step)
  elsewhere = lab.directory.with_name('elsewhere')
  with contextlib.suppress(FileNotFoundError):
    os.rename(lab.directory, elsewhere)
  if is_deleted:
    shutil.rmtree(elsewhere, ignore_errors=True)
  code = run.wait()
  told = [line for line in run.lines if 'error: ' in line]
  lab.seen.too_late = 'saved in' in run.text and code == 0 and not lab.directory.exists()
  if not lab.seen.too_late and (code in (0, 1) or not told):
    raise SurvivalError(f'it ended with {code}, and its directory was gone: {run.lines[-2:]}')
  if lab.directory.exists():
    left = sorted(str(p.relative_to(lab.directory)) for p in lab.directory.rglob('*'))
    raise SurvivalError(f'it made its directory anew: {left[:5]}')
  if not is_deleted:
    elsewhere.rename(lab.directory)
  shutil.rmtree(lab.folder_of_copies, ignore_errors=True)  # They may be newer than the moved directory.
  lab.go_on()


def use_odd_path(lab: Lab) -> None:
  """run directory of an odd name"""
  name = str(lab.rng.choice(_ODD_NAMES))
  at = int(lab.rng.integers(FILES_MADE // 4, FILES_MADE))
  lab.directory = lab.directory.parent / name
  lab.seen.where = f'{name}, save {at}'
  run = lab.start(FAULTS_SIGNAL=f'save:{at}:{int(signal.SIGKILL)}')
  code = run.wait()
  if code == 2:
    if 'error: ' not in run.lines[-1] or name not in run.lines[-1] or (lab.directory / 'checkpoints').exists():
      raise SurvivalError(f'it was refused: {run.lines[-2:]}')
    lab.seen.where += ': refused'
    return
  if code not in (0, -signal.SIGKILL):
    raise SurvivalError(f'it ended with {code}: {run.lines[-2:]}')
  lab.go_on(run)


# ---- files


def replace_metrics_file(lab: Lab) -> None:
  """no file in the place of the metrics"""
  lab.take()
  metrics, kept = lab.directory / 'metrics.jsonl', lab.directory.parent / 'kept.jsonl'
  metrics.rename(kept)
  kind = str(lab.rng.choice(['named pipe', 'directory']))
  lab.seen.where = kind
  os.mkfifo(metrics) if kind == 'named pipe' else metrics.mkdir()
  _expect_refusal(lab, 'metrics.jsonl', kind)
  metrics.unlink() if kind == 'named pipe' else metrics.rmdir()
  kept.rename(metrics)
  lab.go_on()


def empty_metrics(lab: Lab) -> None:
  """metrics emptied or deleted"""
  lab.experiment = 'FaultsStopping'
  run = lab.start(FAULTS_SIGNAL=f'save:{int(lab.rng.integers(FILES_MADE // 3, FILES_MADE))}:{int(signal.SIGKILL)}')
  lab.seen.too_late = run.wait() == 0
  metrics = lab.directory / 'metrics.jsonl'
  how = str(lab.rng.choice(['emptied', 'deleted']))
  lab.seen.where = how
  if metrics.exists():
    os.truncate(metrics, 0) if how == 'emptied' else metrics.unlink()
  # The last step, and so all arrays, depend on earlier evaluations.
  lab.go_on(lost_before=NUM_STEPS)


def replace_data(lab: Lab) -> None:
  """data file replaced by another one"""
  lab.experiment = 'FaultsInFiles'
  data = lab.directory.parent / 'data.array_record'
  shutil.copy(lab.baseline.records, data)
  run = lab.start(FAULTS_SIGNAL=f'save:{int(lab.rng.integers(20, FILES_MADE // 2))}:{int(signal.SIGKILL)}')
  lab.seen.too_late = run.wait() == 0
  count = int(lab.rng.choice([5, 40, NUM_EXAMPLES, 60]))
  lab.seen.where = f'{count} other examples in place of {NUM_EXAMPLES}'
  rows = examples(count + 1)
  write_array_records(str(data), {name: x[1:] for name, x in rows.items()})
  if lab.checkpoints() and not lab.seen.too_late:
    _expect_refusal(lab, 'input')
  shutil.copy(lab.baseline.records, data)
  lab.go_on()


# As in `faults.py`.
FAULTS_OF_OTHERS = {
  mix_parts: 5,
  rename_step: 4,
  stop_host_at_end: 3,
  hold_lock: 3,
  move_directory: 4,
  move_directory_of_hosts: 3,
  use_odd_path: 4,
  replace_metrics_file: 2,
  empty_metrics: 3,
  replace_data: 3,
}
