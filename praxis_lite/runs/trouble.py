"""Handles numerical trouble: steps that are not finite, and losses that jump; a run may go back and skip their batches.

    job_log_dir/trouble.jsonl    {"first": 812, "last": 814, "what": "...", "action": "rollback", "back_to": 800,
                                  "batches": [{"epoch": 0, "position": 51904, ...}, ...]}      a line for each trouble
                losses.json      the last losses, which a resumed run compares with new ones

A batch is identified by the state of the input before it. With the action 'rollback', the checkpoints from the first of
these steps on are removed. The run continues from the checkpoint before them, as after a restart, and skips the batches
of these steps, now and after every restart. With the action 'repeat', it goes back in the same way, but skips no
batches.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.checkpoints import saved_steps
from praxis_lite.checkpoints.retention import step_folder, take_away
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import KnownFolder, parse_json, read_plain, remove_all
from praxis_lite.common.processes import is_primary_process
from praxis_lite.runs.observer import InputState, Observer, PauseReason, Run
from praxis_lite.runs.records.json_lines import read_json_lines, write_lines
from praxis_lite.runs.records.lineage import forget_copies
from praxis_lite.runs.records.metrics import DeviceMetrics
from praxis_lite.training.steps import TrainStepOutput
from praxis_lite.training.task import LossSpikeParams

_FILE, _LOSSES = 'trouble.jsonl', 'losses.json'
# Once this many troubles are recorded, only those for which the run went back are added: the run needs all of these.
_MOST_RECORDED = 1000
# A step's metrics are read some steps later. So besides the batches of a jump, those of this many steps are remembered.
_IN_FLIGHT = 16
# The smallest number of losses with a meaningful median, and the number of losses kept for a restart.
_FEWEST, _KEPT = 20, 2000


class LossSpikeError(UserError):
  """The loss jumped, and `task.train.loss_spike.action` is 'raise', or the run has gone back too often."""


class Trouble(NamedTuple):
  """Steps of a run with numerical trouble.

  Attributes:
    action: 'skip', 'raise' or 'rollback'; or 'repeat', after a device gave wrong values, see `corruption.py`.
    batches: the states of the input before the batches of these steps.
    back_to: the step of the checkpoint that the run went back to, 0 for its start; None if it did not go back.
    examples: the names of the examples in the first batch, such as 'record 7 of a.array_record', if the input knows
      them.
  """

  first: int
  last: int
  what: str
  action: str
  batches: Sequence[InputState] = ()
  back_to: int | None = None
  examples: Sequence[str] = ()


class GoBack(BaseException):
  """Ends this attempt to train: the run continues from an earlier checkpoint.

  It derives from BaseException, so that code which handles errors does not catch it.
  """

  def __init__(self, trouble: Trouble):
    super().__init__(trouble.what)
    self.trouble = trouble


def read_troubles(directory: str | os.PathLike[str]) -> list[Trouble]:
  """Returns the recorded troubles of a run, in order; skips damaged lines."""
  return read_json_lines(Path(directory, _FILE), _parse)


def _parse(data: dict[str, Any]) -> Trouble:
  trouble = Trouble(**{name: data[name] for name in Trouble._fields})
  if not isinstance(trouble.first, int) or not all(isinstance(state, dict) for state in trouble.batches):
    raise ValueError('no trouble')
  return trouble


def batches_to_skip(troubles: Sequence[Trouble]) -> list[InputState]:
  """Returns the states of the input before the batches to skip."""
  return [state for trouble in troubles if trouble.action == 'rollback' for state in trouble.batches]


def read_rollbacks(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the records of the troubles for which a run has gone back, as JSON values."""
  return [trouble._asdict() for trouble in read_troubles(directory) if trouble.action == 'rollback']


def restore_rollbacks(directory: Path, records: Sequence[dict[str, Any]]) -> int:
  """Writes the troubles that are missing from the directory; returns their number. Only one process calls this."""
  before = read_troubles(directory)
  lost: list[Trouble] = []
  for record in records:
    with contextlib.suppress(ValueError, TypeError, KeyError):
      trouble = _parse(record)
      if all(_place(trouble) != _place(known) for known in (*before, *lost)):
        lost.append(trouble)
  if lost:
    write_lines(directory / _FILE, (trouble._asdict() for trouble in [*lost, *before]))
  return len(lost)


def count_rollbacks(directory: str | os.PathLike[str]) -> int:
  """Returns how often a run has gone back with the action 'rollback'."""
  return len(read_rollbacks(directory))


class LossSpikes:
  """Finds jumps: `steps` losses in a row that are more than `factor` times the median of earlier losses.

  Losses above this limit do not enter the median.
  """

  def __init__(self, settings: LossSpikeParams):
    self._factor, self._steps = settings.factor, settings.steps
    self._recent: deque[float] = deque(maxlen=settings.window)
    self._in_a_row = 0

  def add(self, step: int, loss: float) -> str | None:
    """Adds the loss of the next step. If it is the last of the losses that form a jump, returns a message."""
    median = statistics.median(self._recent) if len(self._recent) >= min(_FEWEST, self._recent.maxlen or 0) else None
    if median is None or self._factor is None or not loss > self._factor * median > 0:
      self._recent.append(loss)
      self._in_a_row = 0
      return None
    self._in_a_row += 1
    if self._in_a_row < self._steps:
      return None
    first, self._in_a_row = step - self._in_a_row + 1, 0
    several = f'steps {first} to {step}: the loss, {loss:.4g} at the end, is'
    what = f'step {step}: the loss {loss:.4g} is' if first == step else several
    return f'{what} more than {self._factor:g} x its median {median:.4g}'


class TroubleWatch(Observer):
  """Decides what happens after a step that is not finite, or whose loss jumps, and records it.

  Args:
    describe: returns the names of the examples of a batch, from the state of the input before it.
    losses: (step, loss) of the last steps before this process; None reads them from `losses.json`.
  """

  def __init__(
    self,
    directory: Path,
    loss_spike: LossSpikeParams,
    on_nonfinite: str,
    first_step: int,
    describe: Callable[[InputState], Sequence[str]] = lambda state: [],
    losses: Sequence[tuple[int, float]] | None = None,
  ):
    self._directory = KnownFolder(directory)
    self._on_nonfinite = on_nonfinite
    self._on_spike, self._spike_steps = loss_spike.action, loss_spike.steps
    self._describe = describe
    self._spikes = LossSpikes(loss_spike) if loss_spike.factor is not None else None
    self._batches: dict[int, InputState] = {}
    self._losses: deque[tuple[int, float]] = deque(maxlen=_KEPT)
    if self._spikes is not None:
      for step, loss in _read_losses(directory) if losses is None else losses:
        if step <= first_step:
          self._losses.append((step, loss))
          self._spikes.add(step, loss)

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    self._batches[run.step] = read_from
    self._batches.pop(run.step - _IN_FLIGHT - self._spike_steps, None)

  def on_pause(self, run: Run, reason: PauseReason) -> None:
    """Writes the losses so far, for a run that resumes from the checkpoint saved next."""
    if reason in ('save', 'copy') and self._spikes is not None and is_primary_process():
      with contextlib.suppress(OSError):
        self._directory.replace_file(_LOSSES, json.dumps(list(self._losses)) + '\n')

  def progress(self) -> Mapping[str, Any]:
    losses = tuple(self._losses) if self._spikes is not None else None
    return {'losses': losses, 'troubles': read_rollbacks(self._directory.path)}

  def on_nonfinite(self, step: int, what: str) -> None:
    """Records a step that was not finite; raises GoBack if the run must go back."""
    self._record_or_go_back(step, step, what, self._on_nonfinite)

  def on_metrics(self, step: int, metrics: DeviceMetrics) -> None:
    """Adds the loss of a step that was finite; raises GoBack or LossSpikeError after a jump."""
    if self._spikes is None:
      return
    loss = float(np.asarray(metrics['loss'][0]))
    self._losses.append((step, loss))
    if (what := self._spikes.add(step, loss)) is not None:
      first = step - self._spike_steps + 1
      self._record_or_go_back(first, step, what, self._on_spike)
      raise LossSpikeError(
        f'{what}, and task.train.loss_spike.action is raise; the checkpoints before are kept. '
        f'`praxis-lite replay {self._directory.path} --step={first}` shows what happens in that step'
      )

  def _record_or_go_back(self, first: int, last: int, what: str, action: str) -> None:
    batches = [self._batches[step] for step in range(first, last + 1) if step in self._batches]
    examples = self._describe(batches[0]) if batches else []
    trouble = Trouble(first, last, what, action, batches, None, examples)
    if action == 'rollback':
      raise GoBack(trouble)
    if is_primary_process():
      with contextlib.suppress(OSError):
        if not self._directory.is_elsewhere():
          _record(self._directory.path, trouble)


def go_back(directory: Path, trouble: Trouble, max_rollbacks: int) -> Trouble:
  """Makes emergency copies invalid, removes checkpoints from the first bad step on, and records the trouble.

  All processes call this, once nothing is being saved or read. If the run is killed after the removal and before the
  record is written, it resumes from the earlier checkpoint, meets the same trouble and calls this again.

  Raises:
    LossSpikeError: the action is 'rollback', and the run has already gone back `max_rollbacks` times in this way.
  """
  steps = saved_steps(directory)
  back_to = max((step for step in steps if step < trouble.first), default=0)
  trouble = trouble._replace(back_to=back_to)
  count = count_rollbacks(directory)
  if trouble.action == 'rollback' and count >= max_rollbacks:
    raise LossSpikeError(
      f'{trouble.what}; the run has gone back {number_of(count, "time")}, as often as task.train.max_rollbacks '
      f'allows. Its checkpoint of step {back_to} is kept. Lower the learning rate, or look at the data: '
      f'`praxis-lite replay {directory} --step={trouble.first}`'
    )
  if is_primary_process():
    forget_copies(directory)
    for step in steps:
      if step >= trouble.first:
        remove_all(take_away(step_folder(directory, step)))
    _record(directory, trouble)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices('praxis_lite: went back')
  return trouble


def _record(directory: Path, trouble: Trouble) -> None:
  known = read_troubles(directory)
  if any(_place(earlier) == _place(trouble) for earlier in known):
    return  # The step is recorded already: a restart has repeated it.
  if trouble.back_to is None and len(known) >= _MOST_RECORDED:
    return
  write_lines(directory / _FILE, (one._asdict() for one in [*known, trouble]))


def _place(trouble: Trouble) -> tuple[int, int, str, list[str]]:
  return trouble.first, trouble.last, trouble.action, [json.dumps(state, sort_keys=True) for state in trouble.batches]


def _read_losses(directory: Path) -> list[tuple[int, float]]:
  try:
    return [(int(step), float(loss)) for step, loss in parse_json(read_plain(directory / _LOSSES))]
  except (OSError, ValueError, TypeError):
    return []
