"""The laboratory of a fault: a directory, functions that train in it, moments for faults, and comparisons."""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from pathlib import Path

import numpy as np

from tools.faults.comparison import Results, differences, results_of
from tools.faults.experiment import NUM_STEPS, SAVE_INTERVAL
from tools.faults.processes import EXPERIMENT, Training, environment

# Approximate numbers of imports, files written and files read in a run that saves every `SAVE_INTERVAL` steps.
IMPORTS, FILES_MADE, FILES_READ = 2500, 220, 30


class SurvivalError(Exception):
  """A run did not survive a fault as promised."""


@dataclasses.dataclass(frozen=True)
class Baseline:
  """Undisturbed runs, and runs that were killed in the middle.

  Attributes:
    results: the results of each experiment, by name.
    interrupted: directories of killed runs with at least two checkpoints.
    records: the file of records.
    cache: a directory for compiled programs.
  """

  results: dict[str, Results]
  interrupted: list[Path]
  records: Path
  cache: Path


@dataclasses.dataclass
class Seen:
  """The effect of a fault.

  Attributes:
    where: the moment of the fault, and its other random choices.
    lost: how many steps were taken twice; None if this is not known.
    bound: the largest allowed value of `lost`.
    copies: whether there were emergency copies.
    too_late: whether the run had already ended.
  """

  where: str = ''
  lost: int | None = None
  bound: int = SAVE_INTERVAL
  copies: bool = False
  too_late: bool = False


class Lab:
  """A directory for one fault, its random numbers, and methods that train there.

  Args:
    directory: the directory of the run; it does not exist yet.
    rng: random numbers of this fault.
    baseline: the runs to compare with.
    experiment: class name in `experiment.py`.
    copies: whether the runs make emergency copies, in a folder beside their directory.
  """

  def __init__(
    self,
    directory: Path,
    rng: np.random.Generator,
    baseline: Baseline,
    experiment: str = 'Faults',
    *,
    copies: bool = False,
  ):
    self.directory = directory
    self.rng = rng
    self.baseline = baseline
    self.experiment = experiment
    self.seen = Seen(copies=copies)
    self.folder_of_copies = directory.parent / 'copies'
    self.hosts = 1
    self.started: list[Training] = []

  def start(self, **env: str) -> Training:
    """Starts or continues a run."""
    command = ['train', f'--exp={EXPERIMENT}:{self.experiment}', f'--job_log_dir={self.directory}', '--noverify']
    if self.experiment == 'FaultsInFiles':
      command += [f'--set=datasets[0].path={self.directory.parent / "data.array_record"}']
    if self.seen.copies:
      self.folder_of_copies.mkdir(exist_ok=True)
      command += [f'--set=task.train.emergency_copies.every_n_steps={SAVE_INTERVAL // 2}']
      command += [f"--set=task.train.emergency_copies.directories=('{self.folder_of_copies}',)"]
    if self.hosts > 1:
      command = [
        *f'launch --processes={self.hosts} --devices=1 --max_restarts=6 --stop_within_s=40 --'.split(),
        *command,
      ]
      command += ['--hang_timeout_s=30']
    devices = environment(self.baseline.cache, 2)
    if self.hosts > 1:  # `launch --devices` sets the number. Other flags must be as in one process, for the same bits.
      devices['XLA_FLAGS'] = re.sub(r'--xla_force_host_platform_device_count=\d+', '', devices['XLA_FLAGS']).strip()
    self.started.append(Training(command, devices | env))
    return self.started[-1]

  def take(self, interrupted: int | None = None) -> Path:
    """Copies a killed run into the directory, and returns the original."""
    number = int(self.rng.integers(len(self.baseline.interrupted))) if interrupted is None else interrupted
    source = self.baseline.interrupted[number]
    shutil.copytree(source, self.directory, symlinks=True)
    return source

  def checkpoints(self) -> list[Path]:
    """Returns the folders of complete checkpoints, in order."""
    folder = self.directory / 'checkpoints'
    return sorted((p for p in folder.glob('*') if p.name.isdecimal()), key=lambda p: int(p.name))

  def copies(self) -> list[Path]:
    """Returns the files of complete emergency copies, by step and process."""
    files = (p for p in self.folder_of_copies.rglob('*.*') if not p.name.endswith('incomplete'))
    return sorted(files, key=lambda p: tuple(map(int, p.name.split('.'))))

  def bound(self, damaged: int = 0) -> int:
    """Returns how many steps a run may lose if it ends now with its newest checkpoints or copies damaged."""
    return SAVE_INTERVAL * (1 + damaged + (self.is_saving() and not self.seen.copies))

  def is_saving(self) -> bool:
    """Whether a checkpoint is being written."""
    return any('tmp' in p.name for p in (self.directory / 'checkpoints').glob('*'))

  def go_on(
    self, before: Training | None = None, *, damaged: int = 0, lost_before: int | None = None, clock: str = ''
  ) -> None:
    """Continues the run to its end, and compares its results.

    Args:
      before: the run that the fault has ended.
      damaged: how many of the newest checkpoints the fault has damaged.
      lost_before: see `differences`.
      clock: how to change the clock of the continued run; see `inside/sitecustomize.py`.
    """
    self.seen.bound = self.bound(damaged)
    run = self.start(FAULTS_CLOCK=clock)
    code = run.wait()
    if code != 0:
      raise SurvivalError(f'going on ended with {code}: {run.lines[-2:]}')
    if before is not None and before.last_step:
      restored = NUM_STEPS if 'all steps are taken' in run.text else run.restored_step or 0
      self.seen.lost = max(before.last_step - restored, 0)
      if self.seen.lost > self.seen.bound:
        raise SurvivalError(f'{self.seen.lost} steps were lost, of {before.last_step}')
    self.compare(lost_before)

  def compare(self, lost_before: int | None = None) -> None:
    """Raises SurvivalError if results differ from those of the undisturbed run, or if a run printed a traceback."""
    for run in self.started:
      if 'Traceback (most recent' in run.text:
        raise SurvivalError(f'a traceback: {run.lines[-3:]}')
    name = self.experiment if self.hosts == 1 else f'{self.experiment} on {self.hosts}'
    found = differences(results_of(self.directory), self.baseline.results[name], lost_before=lost_before)
    if found:
      raise SurvivalError('; '.join(found[:3]))

  # ---- moments

  def start_and_signal(self, number: int, kinds: tuple[str, ...] = ()) -> Training:
    """Starts a run that gets a signal at a random moment of a random kind, and returns it."""
    kind = str(self.rng.choice(kinds or ('start', 'compile', 'step', 'step', 'save', 'saving', 'restore')))
    if kind in ('start', 'save', 'restore'):
      most = {'start': IMPORTS, 'save': FILES_MADE, 'restore': FILES_READ}[kind]
      if kind == 'restore' or self.rng.random() < 0.3:
        self.take()
      at = int(self.rng.integers(1, most))
      self.seen.where = f'{kind} {at}'
      return self.start(FAULTS_SIGNAL=f'{"import" if kind == "start" else kind}:{at}:{number}')
    delay = float(self.rng.random() ** 2)
    if kind == 'compile':
      run = self.start(JAX_ENABLE_COMPILATION_CACHE='0')
      self.seen.where = f'compile +{delay:.2f} s'
      run.wait_for(lambda: any(line.startswith('faults: ') for line in run.lines))
    else:
      step = int(self.rng.integers(1, NUM_STEPS))
      delay /= 5
      self.seen.where = f'{kind} {step} +{delay:.2f} s'
      run = self.start()
      run.wait_for(lambda: run.last_step >= step and (kind == 'step' or self.is_saving()))
    time.sleep(delay)
    run.send(number)
    return run
