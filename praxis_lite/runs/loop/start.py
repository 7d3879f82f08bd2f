"""Finds where a run starts: from its own copies or checkpoints, from those of another run, or from initial values."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.base import Base
from praxis_lite.checkpoints.contents import array_records
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.processes import gather_texts, join_by_host
from praxis_lite.inputs.manifest import DataManifest
from praxis_lite.runs.init_from import WarmStart, constant_variables
from praxis_lite.runs.loop.directory import HeldDirectory
from praxis_lite.runs.loop.job import TrainJob
from praxis_lite.runs.loop.progress import NOTHING_KNOWN, Progress
from praxis_lite.runs.observer import Observers, StateCopy
from praxis_lite.runs.records.differences import changes_named
from praxis_lite.training.state import TrainState


class Start(NamedTuple):
  """The state from which a run starts. The training input is already at the position for the next step.

  Attributes:
    state: the train state after `step` steps, on the mesh; the first step donates it.
    is_restored: whether the state comes from a checkpoint or an emergency copy of this run.
    lost_metrics: lines of metrics up to this step that could not be written to the disk.
    data: the manifest of the files of the training input, as they are now.
    origins: lines that say where the variables come from, if they come from another run or an import.
  """

  step: int
  state: TrainState
  is_restored: bool
  checkpointer: Checkpointer
  lost_metrics: Sequence[dict[str, Any]]
  progress: Progress
  data: DataManifest | None
  origins: Sequence[str]
  notes: Sequence[str]


@contextlib.contextmanager
def find_start(job: TrainJob, directory: HeldDirectory, observers: Observers) -> Iterator[Start]:
  """Yields the start of a run, with its checkpoints open. The first of these that exists is used:

    1. an emergency copy, if it is newer than all checkpoints: the state, and the position in the input
    2. the run's newest complete checkpoint: the state, and the position in the input
    3. variables from the checkpoint of another run, or imported ones; the input from its beginning
    4. initial values from the seed; the input from its beginning

  Raises:
    UserError: the copies, checkpoints or data cannot be used; nothing was written, unless a checkpoint is damaged.
  """
  settings, options, startup, partitioned = job.task.train, job.options, job.startup, job.programs.partitioned
  data, unlike = job.inputs.training.manifest(), ''
  newest, is_imported = _newest_checkpoint(job)
  startup.mark('trace')
  with observers.measure('restoring'):
    copy, about_copies = observers.find_copy(newest or 0, partitioned.state_shapes, partitioned.unpadded_state_shapes)
  startup.mark('restore')
  is_restored = copy is not None or (newest is not None and not is_imported)
  warm_start = None if is_restored else _plan_warm_start(job, is_imported)
  startup.mark('trace')
  most, interval, on_damage = settings.max_to_keep, settings.keep_interval_steps, options.on_damage
  saved = Checkpointer(job.directory, max_to_keep=most, keep_interval_steps=interval, on_damage=on_damage)
  with contextlib.closing(saved) as checkpointer, observers.while_running(directory.why_lost):
    if is_restored:
      with changes_named(job.directory, job.config), observers.measure('restoring'):
        state, input_state, progress = _restore(job, copy, checkpointer)
      if options.restore_input and input_state is not None:
        unlike = _check_data(job, progress, data)
        job.inputs.training.set_state(input_state)
      startup.mark('restore')
    else:
      progress = NOTHING_KNOWN
      state = jax.block_until_ready((warm_start or partitioned).init_state(job.keys.init))
      startup.mark('init weights')
    step, total = int(state.step), settings.num_train_steps
    origins = [] if warm_start is None else list(warm_start.report())
    notes = [*checkpointer.notes, *filter(None, [about_copies, unlike])]
    if is_restored and step < total:
      where = checkpointer.directory if copy is None else 'emergency copies, newer than the checkpoints'
      notes.append(f'restored step {step} of {total} from {where}')
    checkpointer.base, about_base = _base_of_checkpoints(job, checkpointer, is_restored, warm_start)
    notes += filter(None, [about_base])
    lost_metrics = [] if copy is None else copy.metrics
    yield Start(step, state, is_restored, checkpointer, lost_metrics, progress, data, origins, notes)


def _base_of_checkpoints(
  job: TrainJob, checkpointer: Checkpointer, is_restored: bool, warm_start: WarmStart | None
) -> tuple[Base | None, str]:
  """Returns the base whose arrays this run's checkpoints leave out, and a line about it; (None, '') without a base."""
  if not job.task.train.init_from.store_changes_only:
    return None, ''
  if is_restored:
    return _base_of_newest(job, checkpointer)
  if warm_start is None or job.task.train.init_from.path is None:
    raise ConfigError(
      'task.train.init_from.store_changes_only: checkpoints can leave out only what is in those of another run; set '
      'task.train.init_from.path, or set this to False'
    )
  return warm_start.base(job.task.bind_learner()), ''


def _base_of_newest(job: TrainJob, checkpointer: Checkpointer) -> tuple[Base | None, str]:
  """Returns the base for checkpoints of this run, and a line if they will store more arrays than before, otherwise ''.

  The newest checkpoint of this run names the base, even if the other run has a newer checkpoint by now. It leaves
  out the arrays that this run may change, and those whose shape or dtype differs in this run. It is None if no array
  remains.
  """
  base = checkpointer.base_of() if checkpointer.steps() else None
  if base is None:
    why = 'the newest one has all variables' if checkpointer.steps() else 'this run, restored from a copy, has none yet'
    return None, f'task.train.init_from.store_changes_only: checkpoints store all variables, because {why}'
  saved, here = checkpointer.about()['variables'], array_records(job.programs.partitioned.unpadded_state_shapes)
  constant = constant_variables(job.task.model, job.task.bind_learner())
  names = {name: there for name, there in base.names.items() if name in constant and saved[name] == here.get(name)}
  count = len(base.names) - len(names)
  line = (
    f'task.train.init_from.store_changes_only: checkpoints now store {number_of(count, "variable")} more, which this '
    'run trains, or has in another shape or dtype than before'
  )
  return base._replace(names=names) if names else None, line if count else ''


def _check_data(job: TrainJob, saved: Progress, data: DataManifest | None) -> str:
  """Returns a line about data files that have changed since the position in them was saved; '' if none have.

  Raises:
    CheckpointError: files have changed, and the options do not accept this.
  """
  if not (changed := join_by_host(gather_texts(job.inputs.training.changes_since(saved.data, data)))):
    return ''
  if job.options.accept_changed_data:
    return f'the training data has changed since the checkpoint; reading goes on at the saved position: {changed}'
  raise CheckpointError(
    f'{changed}: the training data has changed since the checkpoint was saved, so the saved position may mean other '
    'examples. Use the same data as before; or go on at that position all the same: train --accept_changed_data, or '
    'run_train(..., accept_changed_data=True); or start the data from its beginning: --norestore_input, '
    'restore_input=False'
  )


def _newest_checkpoint(job: TrainJob) -> tuple[int | None, bool]:
  """Returns the step of the newest checkpoint (None without one), and whether it contains only imported variables."""
  with contextlib.closing(Checkpointer(job.directory, read_only=True, on_damage=job.options.on_damage)) as saved:
    newest = saved.latest_step()
    return newest, newest is not None and saved.has_only_variables()


def _plan_warm_start(job: TrainJob, is_imported: bool) -> WarmStart | None:
  """Returns the plan of a start from variables of another run or an import; None if all are drawn from the seed."""
  settings = job.task.train.init_from
  if is_imported and settings.path is None:
    settings = dataclasses.replace(settings, path=str(job.directory))
  return WarmStart(settings, job.programs.partitioned) if settings.path else None


def _restore(
  job: TrainJob, copy: StateCopy | None, checkpointer: Checkpointer
) -> tuple[TrainState, dict[str, Any] | None, Progress]:
  """Restores `copy` if it is not None, otherwise the newest checkpoint.

  Returns the train state, the state of the training input, and the progress of the run.
  """
  shapes, true_shapes = job.programs.partitioned.state_shapes, job.programs.partitioned.unpadded_state_shapes
  if copy is not None:
    return copy.restore(shapes), copy.input_state, Progress.parse(copy.progress)
  state = checkpointer.restore(shapes, true_shapes, weights=job.task.model.abstract_init())
  return state, checkpointer.input_state(), Progress.parse(checkpointer.progress())
