"""The observers of a run, and the order in which they are called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from praxis_lite.runs.cluster.mirror import Mirror
from praxis_lite.runs.cluster.preemption import preemptible
from praxis_lite.runs.console import Console
from praxis_lite.runs.hooks import Hook, Hooks, Observers
from praxis_lite.runs.improvement import EarlyStopping, KeepBest
from praxis_lite.runs.loop.feed import BadRecordLines
from praxis_lite.runs.loop.job import TrainJob
from praxis_lite.runs.loop.options import TrainOptions
from praxis_lite.runs.loop.saving import Saving
from praxis_lite.runs.loop.start import Start
from praxis_lite.runs.loop.train_log import TrainLog
from praxis_lite.runs.loop.watch import Watch
from praxis_lite.runs.profiling import make_profiler
from praxis_lite.runs.records.metrics import SummaryWriter
from praxis_lite.runs.stop_signals import StopSignals
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.runs.trouble import TroubleWatch


@contextlib.contextmanager
def observe_start(directory: Path) -> Iterator[Observers]:
  """Yields the observers of the start of a run: there is only what measures time and writes heartbeats."""
  with Watch(directory) as watch:
    yield Observers(watch)


@contextlib.contextmanager
def attach_observers(
  observers: Observers,
  job: TrainJob,
  start: Start,
  options: TrainOptions,
  console: Console,
  writer: SummaryWriter,
  startup: StartupTimes,
  saving: Saving,
  mirror: Mirror,
  stop: StopSignals,
) -> Iterator[None]:
  """Adds all observers of a run, catches signals and looks for notices of preemption, until the block ends."""
  settings, on_nonfinite, first_step = job.settings, job.task.learner.on_nonfinite, start.step
  describe, losses = job.train_input.examples_at, start.progress.losses
  trouble = TroubleWatch(job.directory, settings.loss_spike, on_nonfinite, first_step, describe, losses)
  task, batch, more = job.partitioned, job.batch_struct, observers.figures
  log = TrainLog(task, batch, console, writer, startup, first_step=first_step, more=more, trouble=trouble)
  stop_all = stop.request_of_all if jax.process_count() > 1 else None
  with make_profiler(options.profile_steps) as profiler:
    own: list[Hook] = [profiler, BadRecordLines(job.train_input)]
    if job.watched.best is not None:
      own.append(KeepBest(job.watched.best, start.checkpointer))
    if job.watched.stopping is not None:
      own.append(EarlyStopping(job.watched.stopping, settings.early_stopping))
    observers.all = [
      trouble,  # Before the log, which asks it for the batch of a step that was not finite.
      log,  # Before the watch: it waits for an earlier step, and that time belongs to the step.
      *observers.all,
      saving,
      Hooks(own, stop_all, observers.measure),
      mirror,  # After our hooks, which may mark another checkpoint as the best.
      Hooks(options.hooks, stop_all, observers.measure),  # Last, so that they see what all others have done.
    ]
    with stop, preemptible(stop, job.directory, grace_s=options.grace_s, notice=options.preemption_notice):
      yield
