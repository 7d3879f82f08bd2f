"""The observers of a run, and the order in which they are called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from praxis_lite.common.errors import ConfigError
from praxis_lite.runs.console import Console
from praxis_lite.runs.corruption import ReplicaWatch
from praxis_lite.runs.hooks import Hook, Hooks
from praxis_lite.runs.improvement import EarlyStopping, KeepBest
from praxis_lite.runs.loggers.of_run import LoggersOfRun
from praxis_lite.runs.loop.feed import BadRecordLines
from praxis_lite.runs.loop.job import TrainJob
from praxis_lite.runs.loop.options import TrainOptions
from praxis_lite.runs.loop.saving import Saving
from praxis_lite.runs.loop.start import Start
from praxis_lite.runs.loop.train_log import TrainLog
from praxis_lite.runs.loop.watch import Watch
from praxis_lite.runs.observer import Observer, Observers
from praxis_lite.runs.profiling import Profiler
from praxis_lite.runs.records.metrics import SummaryWriter
from praxis_lite.runs.stop_signals import StopSignals
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.runs.trouble import TroubleWatch
from praxis_lite.training.task import TrainParams


@contextlib.contextmanager
def observe_start(
  settings: TrainParams, directory: Path, options: TrainOptions, startup: StartupTimes
) -> Iterator[Observers]:
  """Yields the observers that exist from the start: `Watch`, which measures time, and the ones of `runs/cluster`."""
  with contextlib.ExitStack() as stack:
    others = _cluster_observers(settings, directory, options)
    for observer in others:
      stack.callback(observer.close)
      observer.open(options.on_damage)
    # `Watch` comes after the calls of `open`, because these may fetch files that `Watch` reads.
    watch = stack.enter_context(Watch(directory, startup.began))
    yield Observers(watch, others)


def _cluster_observers(settings: TrainParams, directory: Path, options: TrainOptions) -> Sequence[Observer]:
  """Returns the observers of `runs/cluster`; () if that folder is not installed.

  Raises:
    ConfigError: the folder is not installed, but the config or an option needs it.
  """
  try:
    from praxis_lite.runs.cluster.observers import cluster_observers
  except ModuleNotFoundError as error:
    if (error.name or '').startswith('praxis_lite.runs.cluster'):
      wanted = {
        'task.train.emergency_copies.every_n_steps': settings.emergency_copies.every_n_steps,
        'task.train.mirror': settings.mirror,
        'grace_s': options.grace_s,
        'preemption_notice': options.preemption_notice,
      }
      for name, value in wanted.items():
        if value is not None:
          raise ConfigError(f'{name} = {value!r} needs praxis_lite.runs.cluster, which is not installed') from None
      return []
    raise
  return cluster_observers(settings, directory, grace_s=options.grace_s, notice=options.preemption_notice)


@contextlib.contextmanager
def attach_observers(
  observers: Observers,
  job: TrainJob,
  start: Start,
  console: Console,
  writer: SummaryWriter,
  saving: Saving,
  stop: StopSignals,
  loggers: LoggersOfRun,
) -> Iterator[None]:
  """Adds to `observers` the ones that need the job, and puts all in order; catches signals until the block ends."""
  settings, options, watched, data = job.task.train, job.options, job.programs.watched, job.inputs.training
  on_nonfinite, task = job.task.learner.on_nonfinite, job.programs.partitioned
  describe, losses = data.examples_at, start.progress.losses
  trouble = TroubleWatch(job.directory, settings.loss_spike, on_nonfinite, start.step, describe, losses)
  log = TrainLog(
    *(task, data.batch_struct(), console, writer, job.startup),
    first_step=start.step,
    observers=observers,
    rows_after=data.rows_after,
  )
  every = options.check_replicas
  replicas = [] if every is None else [ReplicaWatch(task.layout, every, job.corruption, start.step)]
  stop_all = stop.request_of_all if jax.process_count() > 1 else None
  with Profiler(options.profile_steps) as profiler:
    own: list[Hook] = [profiler, BadRecordLines(data), loggers]
    if watched.best is not None:
      own.append(KeepBest(watched.best, start.checkpointer))
    if watched.stopping is not None:
      own.append(EarlyStopping(watched.stopping, settings.early_stopping))
    observers.all = [
      trouble,  # `trouble` must know the batch of a step before the log reports that step.
      log,  # Before the timer, because the time of a step includes the log's wait for an earlier step.
      observers.timer,
      *replicas,  # Before all observers that save or copy the state.
      saving,
      Hooks(own, stop_all, observers.measure),
      *observers.others,  # After `own`, because `own` may choose a new best checkpoint for the mirror.
      Hooks(options.hooks, stop_all, observers.measure),  # User hooks come last, to see the others' effects.
      *options.observers,
    ]
    with stop, observers.while_training(stop):
      yield
