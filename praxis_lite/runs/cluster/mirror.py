"""Keeps a copy of a run in an object store while it trains, and fetches it to resume: `task.train.mirror`.

    train | step | step | save 20 | step | step | step | save 30 | ...
    mirror               | files, checkpoint 20, then removals |                       | files, ...

A pass of the mirror compares the store with the directory, copies what is missing and removes what is outdated. So if a
pass fails or is killed, the next one completes the copy. The store keeps checkpoints by the same rule as the directory.
If the run goes back to an earlier checkpoint, later ones are removed from the store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from praxis_lite.checkpoints import OnDamage
from praxis_lite.checkpoints.best import BEST, BestRecord
from praxis_lite.checkpoints.checkpointer import saved_steps
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.checkpoints.retention import RemovedError, step_folder, steps_to_remove
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError
from praxis_lite.common.files import read_plain
from praxis_lite.common.processes import gather_texts, is_primary_process, join_by_host, meet_others, note_progress
from praxis_lite.inputs.patient_thread import PatientThread
from praxis_lite.runs.cluster.object_store import ObjectStore, StoreError
from praxis_lite.runs.cluster.remote import RemoteCheckpoint, RemoteRun
from praxis_lite.runs.observer import InputState, Observer, Run
from praxis_lite.runs.records.lineage import forget_copies
from praxis_lite.runs.records.record import first_launch
from praxis_lite.runs.trouble import count_rollbacks
from praxis_lite.training.steps import TrainStepOutput

_FIELD = 'task.train.mirror'
# Seconds that one file may take at the end of a run, and seconds that `close` waits for the file being copied.
_STALLED, _AT_CLOSE = 7200.0, 60.0


class _ClosedError(Exception):
  """The run has ended, so copying stops."""


class Mirror(Observer):
  """Keeps a copy of the run in `directory` at the URL of an object store. Only process 0 copies.

  `max_to_keep` and `keep_interval_steps` decide which checkpoints stay in the store; see `steps_to_remove`.
  """

  def __init__(self, url: str, directory: Path, max_to_keep: int | None = None, keep_interval_steps: int | None = None):
    self._url, self._directory = url, directory
    self._rule = {'max_to_keep': max_to_keep, 'keep_interval_steps': keep_interval_steps}
    self._remote: RemoteRun | None = None  # None in processes that do not copy.
    self._pool = PatientThread('mirror')
    self._passes: deque[concurrent.futures.Future[None]] = deque()
    self._newest: int | None = None
    self._closing = False
    self._progress = time.monotonic()

  # -------------------------------------------------------------------- before the run

  def open(self, on_damage: OnDamage) -> None:
    self.fetch(on_damage)

  def fetch(self, on_damage: OnDamage = 'previous') -> None:
    """Copies the newest checkpoint of the store to the run's directory, if it is newer than all checkpoints there.

    If it does so, it also copies the best checkpoint, and replaces the other files of the run. Otherwise it only copies
    files that the directory lacks. All processes call this.

    Args:
      on_damage: what to do if that checkpoint is damaged: 'previous' uses the one before it, from the store or the
        directory; 'fail' raises.

    Raises:
      ConfigError: the URL cannot be used, or holds another run than the directory does.
      CheckpointError: the store cannot be read; or all its checkpoints are damaged, and the directory has none.
    """
    error: UserError | None = None
    if is_primary_process():
      try:
        self._remote = RemoteRun(self._open_store(), self._go_on)
        self._fetch(self._remote, on_damage)
      except UserError as caught:
        error = caught
    meet_others()
    told = join_by_host(gather_texts('' if error is None else str(error)))
    if error is not None or told:
      raise error or ConfigError(told)

  def _open_store(self) -> ObjectStore:
    store = ObjectStore(self._url, _FIELD)
    try:
      store.check_writable()
    except CheckpointError as error:
      raise ConfigError(f'{_FIELD}: {error}') from error
    return store

  def _fetch(self, remote: RemoteRun, on_damage: OnDamage) -> None:
    here, rollbacks = saved_steps(self._directory), count_rollbacks(self._directory)
    there = remote.checkpoints()
    if here and there:
      self._check_same_run(remote)
    newer = [c for c in there if c.step > max(here, default=-1) and c.rollbacks >= rollbacks]
    if newer:
      forget_copies(self._directory)  # The emergency copies of this host are older than the fetched checkpoint.
    remote.fetch_files(self._directory, overwrite=bool(newer))
    damaged: list[DamagedError] = []
    for checkpoint in reversed(newer):
      try:
        self._fetch_best(remote, older_than=checkpoint.step)
        self._fetch_one(checkpoint)
        return
      except DamagedError as error:
        if on_damage == 'fail':
          raise
        print(f'{error}; using the previous checkpoint', flush=True)
        damaged.append(error)
    if damaged and not here:
      raise DamagedError(f'{damaged[0]}; there is no other one in {remote.url} or {self._directory}')

  def _fetch_best(self, remote: RemoteRun, *, older_than: int) -> None:
    """Fetches the best checkpoint if its step is below `older_than`. Call this before the newest one is fetched."""
    best = remote.best_step()
    for checkpoint in remote.checkpoints():
      if checkpoint.step == best and best < older_than and not self._folder(best).exists():
        with contextlib.suppress(DamagedError):  # The run can resume without the best checkpoint.
          self._fetch_one(checkpoint)

  def _fetch_one(self, checkpoint: RemoteCheckpoint) -> None:
    start = time.perf_counter()
    checkpoint.fetch(self._directory)
    seconds = time.perf_counter() - start
    print(f'fetched {checkpoint.url}: {checkpoint.num_bytes / 1e6:,.1f} MB in {seconds:.1f} s', flush=True)

  def _check_same_run(self, remote: RemoteRun) -> None:
    there = remote.read_file('run.json')
    try:
      here = read_plain(self._directory / 'run.json')
    except OSError:
      return
    if there is not None and first_launch(here) != first_launch(there):
      raise ConfigError(
        f'{_FIELD} = {remote.url!r} has the copy of another run than the one in {self._directory}; each run needs its '
        'own URL'
      )

  # -------------------------------------------------------------------- while it trains

  def on_start(self, run: Run) -> None:
    self._begin_pass()

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    self._report(run)

  def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
    self._begin_pass()
    self._report(run)

  def on_end(self, run: Run) -> None:
    """Waits until everything is in the store. After an error it tries once more, and then raises UserError.

    All processes call this, and wait for process 0, which copies.
    """
    if self._remote is not None:
      error = self._pass_and_wait()
      if error is not None and self._pool.is_idle:  # Otherwise a second pass would wait for the stalled one.
        error = self._pass_and_wait()
      if error is not None:
        why = f'{_failure_text(error)}; the run is saved in {self._directory}, and the same command copies it'
        raise UserError(why) from error
      run.line(f'step {run.step}: copied to {self._remote.url}')
    meet_others()

  def close(self) -> None:
    """Stops copying after the current file; does not wait for that file if it takes too long."""
    self._closing = True
    self._pool.end(_AT_CLOSE)

  def _begin_pass(self) -> None:
    if self._remote is not None:
      self._passes.append(self._pool.submit(self._pass, self._remote))

  def _pass_and_wait(self) -> BaseException | None:
    self._begin_pass()
    done, seen = self._passes.pop(), 0.0
    self._progress = time.monotonic()
    while not concurrent.futures.wait([done], timeout=0.5).done:
      if self._progress != seen:  # Tells the watchdog that this host, for which other hosts wait, makes progress.
        seen = self._progress
        note_progress('copying to the object store')
      if time.monotonic() - seen > _STALLED:
        return StoreError(f'no file has been copied for {_STALLED:g} s; the thread is at {self._pool.where}')
    return done.exception()

  def _report(self, run: Run) -> None:
    """Reports each pass that has failed."""
    while self._passes and self._passes[0].done():
      error = self._passes.popleft().exception()
      if error is not None:
        newest = 'there is no copy yet' if self._newest is None else f'the newest copy is of step {self._newest}'
        run.line(f'{_failure_text(error)}; training goes on, and {newest}')

  # -------------------------------------------------------------------- in the thread that copies

  def _pass(self, remote: RemoteRun) -> None:
    """Copies files and missing checkpoints to the store, newest first, and removes checkpoints that need not stay."""
    rollbacks = count_rollbacks(self._directory)
    there = remote.checkpoints()
    outdated = [c.step for c in there if c.rollbacks < rollbacks and not c.is_that_in(self._folder(c.step))]
    for step in (*remote.incomplete, *outdated):
      remote.remove(step)
    for step in self._steps_to_copy(remote):
      remote.upload_files(self._directory)
      with contextlib.suppress(RemovedError):
        remote.upload(self._folder(step), rollbacks)
    remote.upload_files(self._directory)
    steps = {checkpoint.step for checkpoint in remote.checkpoints()}
    self._newest = max(steps, default=None)
    for step in steps - self._steps_to_keep(steps):
      remote.remove(step)

  def _steps_to_copy(self, remote: RemoteRun) -> Iterator[int]:
    """Yields the steps of checkpoints to copy, the newest first, and looks for newer ones after each."""
    looked_at: set[int] = set()
    while True:
      here, there = saved_steps(self._directory), {checkpoint.step: checkpoint for checkpoint in remote.checkpoints()}
      steps = (self._steps_to_keep({*here, *there}) & {*here}) - looked_at
      if not steps:
        return
      step = max(steps)
      looked_at.add(step)
      if step not in there or not there[step].is_that_in(self._folder(step)):
        yield step

  def _steps_to_keep(self, steps: set[int]) -> set[int]:
    """Returns the steps in `steps` whose checkpoints stay in the store."""
    best = BestRecord(self._directory / BEST, steps).kept_steps()
    return steps - {*steps_to_remove(sorted(steps), **self._rule, kept=best)}

  def _folder(self, step: int) -> Path:
    return step_folder(self._directory, step)

  def _go_on(self) -> None:
    if self._closing:
      raise _ClosedError
    self._progress = time.monotonic()


def _failure_text(error: BaseException) -> str:
  return f'copying the run failed: {error}'
