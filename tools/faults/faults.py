"""The faults. Each is a function of a `Lab`: it starts a run, disturbs it, lets it continue, and reports what it saw.

These are faults of machines and of people who end a run; `others.py` has the faults of other programs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tools.faults.experiment import NUM_STEPS, SAVE_INTERVAL
from tools.faults.hosts import FAULTS_OF_HOSTS
from tools.faults.lab import FILES_MADE, FILES_READ, Lab, SurvivalError
from tools.faults.others import FAULTS_OF_OTHERS
from tools.faults.processes import Training, host_processes


def _end_by_signal(lab: Lab, number: int, kinds: tuple[str, ...] = ()) -> Training:
  run = lab.start_and_signal(number, kinds)
  code = run.wait()
  lab.seen.too_late = code == 0
  if code not in (0, -number, 128 + number):
    raise SurvivalError(f'{signal.Signals(number).name} ended it with {code}: {run.lines[-2:]}')
  is_before_training = number == signal.SIGINT and not run.last_step and 'interrupted' in run.text
  if code == 128 + number and number != signal.SIGKILL and 'saved in' not in run.text and not is_before_training:
    raise SurvivalError(f'it ended with {code} and does not say what was saved: {run.lines[-2:]}')
  return run


def kill(lab: Lab) -> None:
  """SIGKILL"""
  lab.go_on(_end_by_signal(lab, signal.SIGKILL))


def terminate(lab: Lab) -> None:
  """SIGTERM"""
  run = _end_by_signal(lab, signal.SIGTERM)
  lab.go_on(run)
  if run.process.returncode == 128 + signal.SIGTERM and lab.seen.lost:
    raise SurvivalError(f'{lab.seen.lost} steps were lost though it was saved')


def interrupt(lab: Lab) -> None:
  """SIGINT"""
  lab.go_on(_end_by_signal(lab, signal.SIGINT))


def stop_and_continue(lab: Lab) -> None:
  """SIGSTOP, SIGCONT"""
  run = lab.start_and_signal(signal.SIGSTOP)
  if run.wait_for(run.is_stopped):
    time.sleep(float(lab.rng.random()) * 2)
    run.send(signal.SIGCONT)
  else:
    lab.seen.too_late = True
  if run.wait() != 0:
    raise SurvivalError(f'it ended with {run.process.returncode}: {run.lines[-2:]}')
  lab.compare()


def stop_and_kill(lab: Lab) -> None:
  """SIGSTOP, SIGKILL"""
  run = lab.start_and_signal(signal.SIGSTOP)
  lab.seen.too_late = not run.wait_for(run.is_stopped)
  run.send(signal.SIGKILL)
  run.wait()
  lab.go_on(run)


def kill_three_times(lab: Lab) -> None:
  """SIGKILL three times"""
  for _ in range(2):
    at = int(lab.rng.integers(1, FILES_MADE // 3))
    run = lab.start(FAULTS_SIGNAL=f'save:{at}:{int(signal.SIGKILL)}')
    if run.wait() not in (0, -signal.SIGKILL):
      raise SurvivalError(f'it ended with {run.process.returncode}: {run.lines[-2:]}')
  if lab.directory.exists() and lab.rng.random() < 0.5:
    lab.start(FAULTS_SIGNAL=f'restore:{int(lab.rng.integers(1, FILES_READ))}:{int(signal.SIGKILL)}').wait()
  lab.seen.where = 'save'
  lab.go_on()


def start_two_runs(lab: Lab) -> None:
  """two runs at once"""
  delay = float(lab.rng.random()) * 3
  lab.seen.where = f'{delay:.1f} s apart'
  first = lab.start()
  time.sleep(delay)
  second = lab.start()
  codes = sorted((first.wait(), second.wait()))
  refused = [run for run in (first, second) if 'another run is training in job_log_dir' in run.text]
  if codes not in ([0, 0], [0, 2]) or (codes == [0, 2] and len(refused) != 1):
    raise SurvivalError(f'they ended with {codes}: {first.lines[-1:]} {second.lines[-1:]}')
  lab.seen.too_late = codes == [0, 0]
  lab.compare()


def refuse_writes_of_one_host(lab: Lab) -> None:
  """one host of two cannot write"""
  lab.hosts = 2
  host, step, limit = int(lab.rng.integers(2)), int(lab.rng.integers(1, NUM_STEPS)), int(lab.rng.integers(3000))
  is_for_a_while = lab.rng.random() < 0.5
  lab.seen.where = f'host {host}, step {step}, no file above {limit} bytes{", for a while" * is_for_a_while}'
  run = lab.start()
  if run.wait_for(lambda: run.last_step >= step and len(host_processes(run.process.pid)) == 2):
    pid = host_processes(run.process.pid)[host]
    with contextlib.suppress(ProcessLookupError):
      _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
      resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
      if is_for_a_while and run.wait_for(lambda: run.last_step >= min(step + 6, NUM_STEPS)):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
  _check_end(run)
  is_told = any('error: metrics cannot be written' in line for line in run.lines)
  lab.go_on(run if run.process.returncode == 0 else None, lost_before=NUM_STEPS if is_told else None)


# ---- disks


def fill_disk(lab: Lab) -> None:
  """full disk"""
  step, room = int(lab.rng.integers(1, NUM_STEPS)), int(lab.rng.integers(0, 60_000))
  lab.seen.where = f'step {step}, room for {room} bytes'
  if not _has_mounts():
    _disk_quota(lab)
    return
  lab.directory.mkdir()
  subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'none', str(lab.directory)], check=True)
  try:
    run = lab.start()
    run.wait_for(lambda: run.last_step >= step)
    _fill(lab.directory / 'filler', room)
    if lab.rng.random() < 0.5:  # Frees the disk while the run trains.
      run.wait_for(lambda: run.last_step >= min(step + 6, NUM_STEPS))
      (lab.directory / 'filler').unlink()
      lab.seen.where += ', for a while'
      _check_end(run)
    else:
      _check_end(run)
      (lab.directory / 'filler').unlink()
    lab.go_on(run if run.process.returncode == 0 else None)
  finally:
    subprocess.run(['umount', str(lab.directory)], check=False)


def _fill(file: Path, room: int) -> None:
  """Fills a file system except for `room` bytes."""
  with open(file, 'wb', buffering=0) as f:
    for size in (1 << 16, 1 << 12, 1 << 8):
      try:
        while True:
          f.write(b'x' * size)
      except OSError:
        continue
    f.truncate(max(f.tell() - room, 0))


def _disk_quota(lab: Lab) -> None:
  """Limits the length of files, as if the disk were full; used where no file system can be mounted."""
  limit = int(lab.rng.integers(300, 6000))
  lab.seen.where = f'no file above {limit} bytes'
  _check_end(lab.start(FAULTS_FILE_LIMIT=str(limit)))
  lab.go_on()


def _check_end(run: Training) -> None:
  """Checks how a run on a failed disk ended: with code 0 if all was written in the end, else with 2 and a message."""
  code = run.wait()
  told = 'error: ' in run.text or 'failed' in run.text or 'cannot be written' in run.text
  if code not in (0, 2) or (code == 2 and not told):
    raise SurvivalError(f'it ended with {code}: {run.lines[-2:]}')


def _has_mounts() -> bool:
  if os.geteuid() != 0 or shutil.which('mount') is None:
    return False
  here = Path(os.environ.get('TMPDIR', '/tmp'), f'faults-mount-{os.getpid()}')
  here.mkdir(exist_ok=True)
  try:
    command = ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'none', str(here)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
      return False
    subprocess.run(['umount', str(here)], check=False)
    return True
  finally:
    here.rmdir()


def remove_permission(lab: Lab) -> None:
  """lost permission"""
  step = int(lab.rng.integers(1, NUM_STEPS))
  what = str(lab.rng.choice(['.', 'checkpoints', 'metrics.jsonl']))
  lab.seen.where = f'step {step}, {what}'
  run = lab.start()
  run.wait_for(lambda: run.last_step >= step and (lab.directory / what).exists())
  path = lab.directory / what
  if not path.exists():
    raise SurvivalError(f'it ended with {run.wait()}: {run.lines[-2:]}')
  with _read_only(path):
    _check_end(run)
  # Metrics that could not be written until the end are lost. Then the last line says so.
  is_told = 'metrics cannot be written' in run.lines[-1]
  lab.go_on(run if run.process.returncode == 0 else None, lost_before=NUM_STEPS if is_told else None)


class _read_only:
  """Removes the permission to write; for root, sets the attribute `immutable`, if the file system supports it."""

  def __init__(self, path: Path):
    self._path = path
    self._mode = path.stat().st_mode

  def __enter__(self) -> None:
    if os.geteuid() == 0:
      subprocess.run(['chattr', '+i', str(self._path)], check=True, capture_output=True)
    else:
      self._path.chmod(self._mode & 0o555)

  def __exit__(self, *error: object) -> None:
    if os.geteuid() == 0:
      subprocess.run(['chattr', '-i', str(self._path)], check=True)
    else:
      self._path.chmod(self._mode)


# ---- damage


def truncate_checkpoint(lab: Lab) -> None:
  """truncated checkpoint file"""
  _damage_checkpoint(lab, _truncate)


def flip_bit_of_checkpoint(lab: Lab) -> None:
  """flipped bit in a checkpoint file"""
  _damage_checkpoint(lab, _flip)


def delete_file_of_checkpoint(lab: Lab) -> None:
  """checkpoint file gone"""
  _damage_checkpoint(lab, _remove)


def _damage_checkpoint(lab: Lab, damage: Callable[[Path, np.random.Generator], str]) -> None:
  lab.take()
  newest = lab.checkpoints()[-1]
  files = sorted(p for p in newest.rglob('*') if p.is_file() and p.stat().st_size)
  file = files[int(lab.rng.integers(len(files)))]
  lab.seen.where = f'{file.relative_to(newest.parent)}: {damage(file, lab.rng)}'
  lab.go_on(damaged=1)
  restored = lab.started[-1].restored_step or 0
  lab.seen.lost, lab.seen.bound = int(newest.name) - restored, SAVE_INTERVAL
  if lab.seen.lost > SAVE_INTERVAL:
    raise SurvivalError(f'step {restored} was restored, and only {newest.name} was damaged')


def damage_copy(lab: Lab) -> None:
  """damaged emergency copy"""
  lab.seen.copies = True
  _end_by_signal(lab, signal.SIGKILL, ('step', 'saving'))
  copies, checkpoints = lab.copies(), lab.checkpoints()
  if copies:
    damage = (_truncate, _flip, _remove)[int(lab.rng.integers(3))]
    lab.seen.where += f', {copies[-1].name}: {damage(copies[-1], lab.rng)}'
  lab.go_on(damaged=1)
  undamaged = [int(p.name.split('.')[0]) for p in copies[:-1]] + [int(p.name) for p in checkpoints]
  if (lab.started[-1].restored_step or NUM_STEPS) != max(undamaged, default=NUM_STEPS) and not lab.seen.too_late:
    raise SurvivalError(f'step {lab.started[-1].restored_step} was restored, and there were {undamaged}')


def damage_events(lab: Lab) -> None:
  """damaged event files and metrics"""
  lab.take()
  files = sorted([*lab.directory.rglob('*tfevents*'), lab.directory / 'metrics.jsonl'])
  told = []
  for file in files if lab.rng.random() < 0.3 else [files[int(lab.rng.integers(len(files)))]]:
    damage = _truncate if lab.rng.random() < 0.5 else _flip
    told.append(f'{file.name[-20:]}: {damage(file, lab.rng)}')
  lab.seen.where = ', '.join(told)
  lab.go_on(lost_before=int(lab.checkpoints()[-1].name))


def damage_record(lab: Lab) -> None:
  """damaged run.json, config.txt or best.json"""
  lab.take()
  files = [p for name in ('run.json', 'config.txt', 'best.json') if (p := lab.directory / name).exists()]
  file = files[int(lab.rng.integers(len(files)))]
  damage = (_truncate, _flip)[int(lab.rng.integers(2))]
  lab.seen.where = f'{file.name}: {damage(file, lab.rng)}'
  lab.go_on()


def damage_data(lab: Lab) -> None:
  """damaged data file"""
  lab.experiment = 'FaultsInFiles'
  data = lab.directory.parent / 'data.array_record'
  shutil.copy(lab.baseline.records, data)
  run = lab.start(FAULTS_SIGNAL=f'save:{int(lab.rng.integers(20, FILES_MADE))}:{int(signal.SIGKILL)}')
  lab.seen.too_late = run.wait() == 0
  damage = _truncate if lab.rng.random() < 0.5 else _flip
  lab.seen.where = damage(data, lab.rng)
  saved = {p: p.stat().st_mtime_ns for p in lab.checkpoints()}
  tried = lab.start()
  code = tried.wait()
  if code == 2 and ('error: ' not in tried.lines[-1] or 'data.array_record' not in tried.text):
    raise SurvivalError(f'the error does not name the file: {tried.lines[-2:]}')
  if code not in (0, 2):
    raise SurvivalError(f'with damaged data it ended with {code}: {tried.lines[-2:]}')
  if code == 2 and (missing := [p.name for p in saved if not p.exists()]) and len(lab.checkpoints()) < 1:
    raise SurvivalError(f'checkpoints are gone: {missing}')
  shutil.copy(lab.baseline.records, data)
  lab.go_on()


def set_back_clock(lab: Lab) -> None:
  """clock set back"""
  lab.take()
  offset, after = -int(10 ** lab.rng.uniform(1, 8)), float(lab.rng.random()) * 3
  lab.seen.where = f'by {-offset} s after {after:.1f} s'
  clock = f'{offset}:{after}'
  if lab.rng.random() < 0.5:
    run = lab.start(
      FAULTS_CLOCK=clock, FAULTS_SIGNAL=f'save:{int(lab.rng.integers(1, FILES_MADE // 2))}:{int(signal.SIGKILL)}'
    )
    run.wait()
    if lab.rng.random() < 0.5:
      clock = ''
    lab.go_on(run, clock=clock)
    return
  lab.go_on(clock=clock)


def _truncate(file: Path, rng: np.random.Generator) -> str:
  size = int(rng.integers(file.stat().st_size))
  os.truncate(file, size)
  return f'cut to {size} bytes'


def _remove(file: Path, rng: np.random.Generator) -> str:
  file.unlink()
  return 'gone'


def _flip(file: Path, rng: np.random.Generator) -> str:
  data = bytearray(file.read_bytes())
  at, bit = int(rng.integers(len(data))), int(rng.integers(8))
  data[at] ^= 1 << bit
  file.write_bytes(data)
  return f'bit {bit} of byte {at} flipped'


# The weight with which each fault is drawn.
FAULTS: dict[Callable[[Lab], None], int] = {
  kill: 12,
  terminate: 8,
  interrupt: 5,
  stop_and_continue: 4,
  stop_and_kill: 3,
  kill_three_times: 3,
  start_two_runs: 4,
  refuse_writes_of_one_host: 3,
  fill_disk: 5,
  remove_permission: 4,
  truncate_checkpoint: 5,
  flip_bit_of_checkpoint: 7,
  delete_file_of_checkpoint: 2,
  damage_events: 5,
  damage_record: 3,
  damage_copy: 3,
  damage_data: 3,
  set_back_clock: 5,
  **FAULTS_OF_HOSTS,
  **FAULTS_OF_OTHERS,
}


def interrupted_steps(rng: np.random.Generator, count: int) -> Iterator[int]:
  """Yields the steps at which the runs of `Baseline.interrupted` are killed."""
  yield from (int(rng.integers(2 * SAVE_INTERVAL + 2, NUM_STEPS - 1)) for _ in range(count))
