"""Injects faults into training, and checks that runs survive them with bitwise the same results.

  python tools/fault_campaign.py --seed=1 --faults=300

Each fault depends only on the seed and its number (`tools/faults/faults.py`). Real processes train a small model on
simulated devices and hosts, are disturbed, and continue. The results are compared with those of an undisturbed run: all
arrays of the last checkpoint bit by bit, the lines of metrics.jsonl, and the curves in the event files. A table says
how often runs survived each fault, and how many steps were taken twice. The exit code is 1 if a run did not survive;
its directory is kept, and `--only=NUMBER` repeats it.

Repeating a fault repeats its moment exactly if the moment is a number of files or imports, and only approximately if it
is a time. For root, full disks are simulated by small file systems in memory, and lost permissions by the attribute
`immutable`. For other users, limits on the length of files and file modes replace these.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np

from praxis_lite.common.errors import UserError
from praxis_lite.inputs.grain_input import import_grain, write_array_records
from tools.faults.comparison import differences, results_of
from tools.faults.experiment import examples
from tools.faults.faults import FAULTS, interrupted_steps
from tools.faults.lab import Baseline, Lab, Seen, SurvivalError
from tools.faults.processes import HangError, Training

Fault = Callable[[Lab], None]


class FaultReport(NamedTuple):
  """The result of a fault; `problem` is '' if the run survived."""

  number: int
  fault: str
  seen: Seen
  problem: str
  seconds: float


def make_baseline(
  folder: Path, rng: np.random.Generator, *, hosts: int, records: bool, stopping: bool = False, interrupted: int = 3
) -> Baseline:
  """Makes the runs that several faults share: undisturbed ones to compare with, and killed ones to continue.

  Args:
    folder: where to write them.
    rng: chooses the steps at which runs are killed.
    hosts: the largest number of hosts of a run: 1, 2 or 4.
    records: whether to add a run that reads its data from files.
    stopping: whether to add a run that stops early.
    interrupted: the number of killed runs.
  """
  baseline = Baseline({}, [], folder / 'data.array_record', folder / 'cache')
  wanted = [('Faults', 1), ('Faults', 2), ('FaultsOnFour', 4)]
  wanted = [
    *(entry for entry in wanted if entry[1] <= hosts),
    *([('FaultsInFiles', 1)] * records),
    *([('FaultsStopping', 1)] * stopping),
  ]
  if records:
    write_array_records(str(baseline.records), examples())
  for name, processes in wanted:
    lab = Lab(folder / f'{name}-{processes}', rng, baseline, name)
    lab.hosts = processes
    run = lab.start()
    if run.wait() != 0:
      raise SystemExit(f'without any fault, training ended with {run.process.returncode}:\n{run.text}')
    baseline.results[name if processes == 1 else f'{name} on {processes}'] = results_of(lab.directory)
  if hosts > 1 and (apart := differences(baseline.results['Faults on 2'], baseline.results['Faults'])):
    print(f'on two hosts: {apart[0]}; runs on two hosts are compared with one of these')
  for number, step in enumerate(interrupted_steps(rng, interrupted)):
    lab = Lab(folder / f'interrupted-{number}', rng, baseline)
    run = lab.start()
    run.wait_for(functools.partial(_has_come, lab, run, step))
    run.send(9)
    run.wait()
    baseline.interrupted.append(lab.directory)
  return baseline


def _has_come(lab: Lab, run: Training, step: int) -> bool:
  return run.last_step >= step and len(lab.checkpoints()) >= 2


def one_fault(fault: Fault, number: int, seed: int, folder: Path, baseline: Baseline) -> FaultReport:
  """Runs one fault. If the run survives, its directory is removed."""
  start, where = time.monotonic(), folder / f'fault-{number}'
  where.mkdir()
  rng = np.random.default_rng([seed, number])
  lab = Lab(where / 'run', rng, baseline, copies=bool(rng.random() < 0.5))
  problem = ''
  try:
    fault(lab)
  except (SurvivalError, HangError) as error:
    problem = str(error)
  except Exception as error:
    problem = f'{type(error).__name__}: {error}'
  finally:
    for run in lab.started:
      if run.process.poll() is None:
        run.kill()
  if problem:
    (where / 'output.txt').write_text('\n\n'.join(run.text for run in lab.started))
  else:
    shutil.rmtree(where, ignore_errors=True)
  return FaultReport(number, fault.__doc__ or fault.__name__, lab.seen, problem, time.monotonic() - start)


def draw_fault(seed: int, number: int, faults: Sequence[Fault]) -> Fault:
  """Returns the fault with this number. The first numbers go through all faults once; the others draw by weight."""
  if number < len(faults):
    return faults[number]
  weights = np.array([FAULTS[fault] for fault in faults], float)
  return faults[int(np.random.default_rng([seed, number, 1]).choice(len(faults), p=weights / weights.sum()))]


def campaign(
  faults: Sequence[Fault], numbers: Sequence[int], seed: int, folder: Path, baseline: Baseline, *, jobs: int, end: float
) -> Iterator[FaultReport]:
  """Runs faults, `jobs` of them in parallel, and starts none after the time `end` of `time.monotonic()`."""
  waiting = iter(numbers)
  running: set[concurrent.futures.Future[FaultReport]] = set()
  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    while True:
      while len(running) < jobs and time.monotonic() < end and (number := next(waiting, None)) is not None:
        running.add(pool.submit(one_fault, draw_fault(seed, number, faults), number, seed, folder, baseline))
      if not running:
        return
      done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
      yield from (future.result() for future in done)


def fault_table(reports: Sequence[FaultReport]) -> str:
  """Returns a table with a line for each fault.

  Its columns: how often the fault happened and was survived, the most steps lost without and with emergency copies, and
  how often the run had ended before the fault came.
  """
  kinds: dict[str, list[FaultReport]] = collections.defaultdict(list)
  for report in reports:
    kinds[report.fault].append(report)
  width = max(map(len, kinds), default=5)
  lines = [f'{"fault":<{width}}  times  survived  most steps lost  with copies  came too late']
  for kind, group in [*kinds.items(), ('all', list(reports))]:
    lost = [
      max((r.seen.lost for r in group if r.seen.lost is not None and r.seen.copies == copies), default=0)
      for copies in (False, True)
    ]
    survived, late = sum(not r.problem for r in group), sum(r.seen.too_late for r in group)
    lines.append(f'{kind:<{width}}  {len(group):5}  {survived:8}  {lost[0]:15}  {lost[1]:11}  {late:13}')
  return '\n'.join(lines)


_IN_FILES = {'damage_data', 'replace_data'}  # These need data in files, which Grain reads.


def _missing_grain() -> str:
  """Returns why Grain cannot be imported; '' if it can."""
  try:
    import_grain()
  except UserError as error:
    return str(error)
  return ''


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--faults', type=int, default=300, help='how many')
  parser.add_argument('--first', type=int, default=0, help='the number of the first one')
  parser.add_argument('--only', type=int, help='the fault of this number alone')
  parser.add_argument('--kind', help='only faults whose name contains this')
  parser.add_argument('--jobs', type=int, default=2, help='how many at once')
  parser.add_argument('--minutes', type=float, default=60.0, help='after which no further fault begins')
  parser.add_argument('--folder', help='where to work; a new one by default')
  values = parser.parse_args(argv)
  faults = [f for f in FAULTS if values.kind is None or values.kind in (f.__doc__ or '')]
  numbers = range(values.first, values.first + values.faults) if values.only is None else [values.only]
  folder = Path(values.folder or tempfile.mkdtemp(prefix='faults-'))
  folder.mkdir(parents=True, exist_ok=True)
  start, before = time.monotonic(), _cpu_seconds()
  needed = {fault.__name__ for fault in faults}
  if needed & _IN_FILES and (missing := _missing_grain()):
    faults = [fault for fault in faults if fault.__name__ not in _IN_FILES]
    print(f'left out: {", ".join(sorted(needed & _IN_FILES))} ({missing})', flush=True)
    needed -= _IN_FILES
  if not faults:
    parser.error('there is no such fault')
  baseline = make_baseline(
    folder,
    np.random.default_rng(values.seed),
    hosts=4 if any('of_four' in name for name in needed) else 2 if any('host' in name for name in needed) else 1,
    records=bool(needed & _IN_FILES),
    stopping='empty_metrics' in needed,
  )
  print(f'undisturbed runs: {time.monotonic() - start:.0f} s', flush=True)
  begun, end = time.monotonic(), start + 60 * values.minutes
  reports = []
  for report in campaign(faults, numbers, values.seed, folder, baseline, jobs=values.jobs, end=end):
    reports.append(report)
    problem = f': NOT SURVIVED: {report.problem}' if report.problem else ''
    copies = ' (with emergency copies)' if report.seen.copies else ''
    where = f'{report.seen.where}{copies}'
    print(f'{report.number:4} {report.seconds:5.1f} s {report.fault}, {where}{problem}', flush=True)
  wall, cpu = time.monotonic() - begun, _cpu_seconds() - before
  print(f'\n{fault_table(reports)}\n')
  per = max(len(reports), 1)
  print(f'seed {values.seed}: {len(reports)} faults in {wall / 60:.1f} minutes, {cpu / per:.1f} s of CPU each')
  failed = [report.number for report in reports if report.problem]
  if failed:
    print(f'not survived: {failed}; their directories are in {folder}')
  elif not values.folder:
    with contextlib.suppress(OSError):
      shutil.rmtree(folder)
  return bool(failed)


def _cpu_seconds() -> float:
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


if __name__ == '__main__':
  sys.exit(main())
