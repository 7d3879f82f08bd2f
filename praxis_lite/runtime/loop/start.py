"""Where a run starts: in its own copies or checkpoints, in those of another run, or anew."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from praxis_lite.checkpoints import Checkpointer, OnDamage
from praxis_lite.checkpoints.emergency import EmergencyCopies, EmergencyCopy
from praxis_lite.errors import CheckpointError
from praxis_lite.hosts.processes import gather_texts, join_by_host
from praxis_lite.hosts.watchdog import watched_by_others
from praxis_lite.inputs.manifest import Manifest
from praxis_lite.records.goodput import Goodput
from praxis_lite.records.record import changes_named
from praxis_lite.runtime.init_from import WarmStart
from praxis_lite.runtime.loop.directory import HeldDirectory
from praxis_lite.runtime.loop.job import Job
from praxis_lite.runtime.loop.options import TrainOptions
from praxis_lite.runtime.loop.progress import NOTHING_KNOWN, Progress
from praxis_lite.runtime.throughput import StartupTimes
from praxis_lite.training.state import TrainState


class Start(NamedTuple):
  """Where a run starts, and what it will be saved in. The training input is at its position.

  Attributes:
    step: number of steps taken before.
    state: the train state after them, on the mesh; the first step donates it.
    is_restored: whether it is one of this run, of a checkpoint or a copy.
    checkpointer, copies: the checkpoints and the emergency copies of the run, for saving.
    lost_metrics: lines of metrics until that step that the disk had not taken.
    progress: what else decides how the run goes on, as it was saved.
    data: the manifest of the files of the training input, as they are now.
    origins: lines that say where the variables come from, where another run or an import is concerned.
    notes: lines about checkpoints and copies.
  """

  step: int
  state: TrainState
  is_restored: bool
  checkpointer: Checkpointer
  copies: EmergencyCopies
  lost_metrics: Sequence[dict[str, Any]]
  progress: Progress
  data: Manifest | None
  origins: Sequence[str]
  notes: Sequence[str]


@contextlib.contextmanager
def starting_point(
  job: Job, options: TrainOptions, startup: StartupTimes, goodput: Goodput, held: HeldDirectory
) -> Iterator[Start]:
  """Yields where a run starts, the first of these that applies; checkpoints and copies are open meanwhile.

    1. emergency copies that are newer than its checkpoints: the state, and the input after the batch of that step
    2. its newest complete checkpoint: the same
    3. variables of another run's checkpoint, or imported ones in its directory, and the input from its beginning
    4. initial values from the seed, and the input from its beginning

  Raises:
    UserError: what is there cannot be used; for all but damage, this is known before anything is written.
  """
  data, unlike = job.train_input.manifest(), ''
  newest, is_imported = _newest_checkpoint(job, options.on_damage)
  startup.mark('trace')
  with contextlib.closing(_emergency_copies(job)) as copies:
    with goodput.doing('restoring'):
      copy, about_copies = copies.newest(newest or 0)
    startup.mark('restore')
    is_restored = copy is not None or (newest is not None and not is_imported)
    warm_start = None if is_restored else _warm_start(job, is_imported)
    startup.mark('trace')
    watched = watched_by_others(job.directory, held.why_lost)
    with contextlib.closing(_checkpointer(job, options.on_damage)) as checkpointer, watched:
      if is_restored:
        with changes_named(job.directory, job.config), goodput.doing('restoring'):
          state, input_state, progress = _restored(job, copy, checkpointer)
        if options.restore_input and input_state is not None:
          unlike = _changed_data(job, progress, data, options)
          job.train_input.set_state(input_state)
        startup.mark('restore')
      else:
        progress = NOTHING_KNOWN
        state = jax.block_until_ready((warm_start or job.partitioned).init_state(job.keys.init))
        startup.mark('init')
      step, total = int(state.step), job.settings.num_train_steps
      origins = [] if warm_start is None else list(warm_start.report())
      notes = [*checkpointer.notes, *filter(None, [about_copies, unlike])]
      if is_restored and step < total:
        where = checkpointer.directory if copy is None else 'emergency copies, newer than the checkpoints'
        notes.append(f'restored step {step} of {total} from {where}')
      lost_metrics = [] if copy is None else copy.metrics
      yield Start(step, state, is_restored, checkpointer, copies, lost_metrics, progress, data, origins, notes)


def _changed_data(job: Job, saved: Progress, data: Manifest | None, options: TrainOptions) -> str:
  """Returns a line about files that have changed since the position in them was saved, where that is accepted.

  Raises:
    CheckpointError: they have changed, and it is not.
  """
  changed = join_by_host(gather_texts(job.train_input.changes_since(saved.data, data)))
  if not changed:
    return ''
  if options.accept_changed_data:
    return f'the training data has changed since it was saved, and is read on at the saved position: {changed}'
  raise CheckpointError(
    f'{changed}: the training data has changed since the checkpoint was saved, so the saved position may mean other '
    'examples. Use the data that it was saved with; or go on at that position all the same: train '
    '--accept_changed_data, or run_train(..., accept_changed_data=True); or start the data from its beginning: '
    '--norestore_input, restore_input=False'
  )


def _newest_checkpoint(job: Job, on_damage: OnDamage) -> tuple[int | None, bool]:
  """Returns the step of the newest checkpoint, None if there is none, and whether it has imported variables alone."""
  with contextlib.closing(Checkpointer(job.directory, read_only=True, on_damage=on_damage)) as saved:
    newest = saved.latest_step()
    return newest, newest is not None and saved.has_variables_alone()


def _emergency_copies(job: Job) -> EmergencyCopies:
  settings, partitioned = job.settings.emergency_copies, job.partitioned
  directories = () if settings.every_n_steps is None else settings.directories
  return EmergencyCopies(job.directory, directories, partitioned.state_shapes, partitioned.unpadded_state_shapes)


def _warm_start(job: Job, is_imported: bool) -> WarmStart | None:
  """Returns the plan of a start from variables of another run, or from imported ones; None: the run starts anew."""
  settings = job.settings.init_from
  if is_imported and settings.path is None:
    settings = dataclasses.replace(settings, path=str(job.directory))
  return WarmStart(settings, job.partitioned) if settings.path else None


def _checkpointer(job: Job, on_damage: OnDamage) -> Checkpointer:
  settings = job.settings
  return Checkpointer(
    job.directory,
    max_to_keep=settings.max_to_keep,
    keep_interval_steps=settings.keep_interval_steps,
    on_damage=on_damage,
  )


def _restored(
  job: Job, copy: EmergencyCopy | None, checkpointer: Checkpointer
) -> tuple[TrainState, dict[str, Any] | None, Progress]:
  """Returns the state of a copy, or of the newest checkpoint, that of the training input after it, and the progress."""
  shapes, true_shapes = job.partitioned.state_shapes, job.partitioned.unpadded_state_shapes
  if copy is not None:
    return copy.restore(shapes), copy.input_state, Progress.parse(copy.record.get('progress'))
  state = checkpointer.restore(shapes, true_shapes, weights=job.task.model.abstract_init())
  return state, checkpointer.input_state(), Progress.parse(checkpointer.progress())
