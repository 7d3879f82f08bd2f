"""The executor: restore, train, evaluate, decode, checkpoint.

A run is a function of its config and its directory. However it ends, the same call continues from the newest
checkpoint. On the same mesh, it then ends with bitwise the same parameters, because the PRNG key of a step is the run's
key folded with the step, and a checkpoint contains the position in the input at its step.

A run may take several attempts: if its loss jumps or is not finite, it may go back to an earlier checkpoint. `_attempt`
reads from top to bottom; its parts are in `loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import user_path
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.processes import broadcast_decision, is_primary_process
from praxis_lite.runs.alerts import alerts_of_run
from praxis_lite.runs.console import make_console
from praxis_lite.runs.imported_files import keep_files_of
from praxis_lite.runs.loggers.of_run import LoggersOfRun
from praxis_lite.runs.loop.directory import HeldDirectory, LostDirectoryError
from praxis_lite.runs.loop.feed import Feed
from praxis_lite.runs.loop.job import TrainJob, build_job
from praxis_lite.runs.loop.observers import attach_observers, observe_start
from praxis_lite.runs.loop.options import TrainOptions
from praxis_lite.runs.loop.progress import recover_results
from praxis_lite.runs.loop.saving import RunSaver, Saving
from praxis_lite.runs.loop.start import find_start
from praxis_lite.runs.loop.training_loop import TrainingLoop
from praxis_lite.runs.observer import Run
from praxis_lite.runs.records.history import note_event
from praxis_lite.runs.records.metrics import HostMetrics, SummaryWriter
from praxis_lite.runs.records.record import write_record
from praxis_lite.runs.records.run_config import held_for_training, job_directory
from praxis_lite.runs.records.run_inputs import keep_vocabulary
from praxis_lite.runs.stop_signals import StopSignals
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.runs.trouble import GoBack, batches_to_skip, go_back, read_troubles
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.state import TrainState


class TrainResult(NamedTuple):
  """How a training run ended.

  Attributes:
    step: total number of steps taken.
    state: the last train state, on the mesh.
    metrics: metrics of the last evaluation, by split ('eval/valid') and name.
    ended_by: 'done'; 'data' if the input ended before the last step; 'stopped' if a hook stopped it, such as early
      stopping; or the name of a signal.
  """

  step: int
  state: TrainState
  metrics: dict[str, HostMetrics]
  ended_by: str


def run_train(
  config: ExperimentConfig, job_log_dir: str | Path, options: TrainOptions | None = None, **changes: Any
) -> TrainResult:
  """Trains, or continues where an earlier run in the same directory stopped; for a finished run, returns its result.

  Args:
    config: configs of the task and its datasets; exactly one dataset has `is_training=True`.
    job_log_dir: directory of checkpoints, summaries and decoded outputs.
    options: how to train; see `TrainOptions`, which documents each option. None means all defaults.
    **changes: single options by their names, as in `run_train(config, job_log_dir, seed=3)`; they replace those in
      `options`.

  Raises:
    TypeError: `changes` has a name that is not an option.
    CorruptionError: replicas of the state differ, or a step that was run twice gave different bits; nothing is saved
      after it.
    UserError: the config, the data, the directory or the checkpoint in it is not usable; or, at the end, something
      could not be written: the last checkpoint, or metrics.
    HungInputError: no batch came for `input_timeout_s`; the state is saved.
    NumericsError: the gradients of the first step are wrong on these devices; nothing was trained.
    LossSpikeError: the loss jumped, and `task.train.loss_spike` says to raise, or the run went back too often.
    NonFiniteError: a step was not finite, and the learner is set to raise; that step is not saved. Or too many steps
      in a row were not finite; the last step is saved. Too many means `max_skipped_steps`; at the end of
      training, it also means more than half of the steps since this call began.
    Exception: the error of a hook, with a note that names the hook; the state has been saved. With several processes,
      the other processes return with ended_by='SIGTERM'.
  """
  if not isinstance(config, ExperimentConfig):
    experiment = config.__name__ if isinstance(config, type) else 'MyExperiment'
    raise ConfigError(f'run_train(config, job_log_dir): expected configure({experiment}), got {type(config).__name__}')
  if not isinstance(job_log_dir, str | os.PathLike):
    given = type(job_log_dir).__name__
    raise ConfigError(f"run_train(config, job_log_dir): expected a directory, such as 'runs/1', got {given}")
  options = (options or TrainOptions()).replace(changes)
  startup = options.startup or StartupTimes()
  start_devices()
  startup.mark('devices')
  directory = user_path(job_log_dir).absolute()
  with alerts_of_run(options.alert_command, directory) as alerts:
    options = dataclasses.replace(options, observers=(*options.observers, *alerts), startup=startup)
    while True:
      try:
        return _attempt(config, job_log_dir, options)
      except GoBack as error:
        with held_for_training(directory) if is_primary_process() else contextlib.nullcontext():
          trouble = go_back(directory, error.trouble, config.task.train.max_rollbacks)
        options = dataclasses.replace(options, advise=None, startup=None)
        for alert in alerts:
          alert.note_going_back(trouble)
        if is_primary_process():
          note_event(directory, 'went_back', trouble.back_to, trouble.what)
          skipped = f'without {number_of(len(trouble.batches), "batch")}'
          how = 'and repeating the steps since' if trouble.action == 'repeat' else skipped
          print(printable(f'{trouble.what}: going back to step {trouble.back_to}, {how}'), flush=True)


def _attempt(config: ExperimentConfig, job_log_dir: str | Path, options: TrainOptions) -> TrainResult:
  """Trains until the run ends, and returns its result; raises GoBack if the run has to go back to a checkpoint."""
  startup = options.startup or StartupTimes()
  with contextlib.ExitStack() as stack:
    opened = stack.enter_context

    # ---- where: a directory that no other run uses, into which a mirror may fetch newer files
    path = opened(job_directory(job_log_dir))
    directory = opened(HeldDirectory(path))
    if is_primary_process():
      opened(held_for_training(path))
    observers = opened(observe_start(config.task.train, path, options, startup))

    # ---- what is trained, and where it starts
    job = build_job(config, path, options, startup)
    start = opened(find_start(job, directory, observers))
    first_step, total = start.step, job.task.train.num_train_steps

    # ---- what it prints and writes
    is_primary = is_primary_process()
    console = opened(contextlib.closing(make_console(total, first_step=first_step, enabled=is_primary)))
    line = console.line
    loggers = opened(LoggersOfRun(job.loggers if is_primary else (), path, line))
    settings: dict[str, Any] = {'enabled': is_primary, 'report': line, 'log': loggers.log}
    writer = SummaryWriter(path, resumed_step=first_step, lost=start.lost_metrics, **settings)
    stack.callback(writer.close)
    results, lost = recover_results(start.progress, first_step, path, job.programs.watched, writer)
    # If no step remains, an existing record is kept, because the config of this call does not affect the run.
    is_finished = start.is_restored and first_step >= total
    changes = _record(job, path, first_step, keeps_record=is_finished) if is_primary else ()
    advice = _advise(job) if is_primary else ()
    for text in itertools.chain(job.lines, start.origins, advice, start.notes, lost, changes):
      line(text)

    # ---- who does the work, and who watches
    stop = StopSignals()
    put_batch = job.programs.steps.put if job.programs.answers is None else None
    skip = batches_to_skip(read_troubles(path))
    feed = opened(Feed(job.inputs.training, put_batch, skip, observers, line, options.input_timeout_s))
    saving = Saving(start.checkpointer, job.programs.partitioned.unpadded_state_shapes, line)
    saver = RunSaver(saving, directory, feed, start.data, job.programs.watched, writer, observers)
    # Only process 0 knows which inputs were already evaluated. It tells the others, because all must evaluate the same.
    splits = [program.split for program in (*job.programs.evaluation, *job.decoding)]
    done_at = {split: first_step for split in splits if broadcast_decision(writer.was_written(split))}
    metrics = {r.split: r.metrics for r in results if r.step == first_step and r.split in done_at}
    loop = TrainingLoop(job, directory, feed, saver, observers, stop, done_at, metrics)
    what = job.task, path, dict(job.programs.partitioned.mesh.shape), job.inputs.training.batch_struct()
    run = Run(*what, total, first_step, start.state, results, save=lambda: saver.save(run), line=line)
    opened(attach_observers(observers, job, start, console, writer, saving, stop, loggers))

    # ---- train
    for observer in observers:
      observer.on_start(run)
    if first_step < total and run.stop_reason is None:
      loop.compile()
    if start.is_restored:
      loop.run_due(run)  # An earlier process may have been killed before it evaluated this checkpoint.
    try:
      loop.train(run)
    except (LostDirectoryError, OSError) as error:
      # If one of several processes cannot write, for example decoded outputs, the run ends and nothing is saved.
      is_alone = jax.process_count() == 1
      loss = error if isinstance(error, LostDirectoryError) else directory.why_lost() if is_alone else None
      if loss is None:
        raise
      raise UserError(saver.rescue(run, loss, lambda new: _make_directory(new, job, run.step))) from None

    # ---- the end
    run.ended_by = _ended_by(run, stop)
    with observers.measure('saving'):  # At its end, a mirror copies the last checkpoint.
      for observer in observers:
        observer.on_end(run)
    if run.error is not None:
      raise run.error
    return TrainResult(run.step, run.state, loop.metrics, run.ended_by)


def _advise(job: TrainJob) -> Iterator[str]:
  if job.options.advise is not None:
    yield from job.options.advise(job.task, job.inputs.training.batch_struct())
    job.startup.mark('check')


def _record(job: TrainJob, directory: Path, step: int, *, keeps_record: bool) -> Iterator[str]:
  """Records the run and its vocabulary in a directory; yields lines about differences from the recorded config."""
  mesh = job.programs.partitioned.mesh.shape
  yield from write_record(directory, job.config, seed=job.seed, mesh=mesh, step=step, keeps_record=keeps_record)
  keep_vocabulary(job.inputs.vocabulary, directory)
  if job.task.train.init_from.path is not None:
    keep_files_of(job.task.train.init_from.path, directory)


def _make_directory(directory: Path, job: TrainJob, step: int) -> None:
  """Creates a directory in which a run can continue."""
  directory.mkdir(parents=True)
  list(_record(job, directory, step, keeps_record=False))


def _ended_by(run: Run, stop: StopSignals) -> str:
  if stop.requested and stop.received is not None:
    return stop.received
  if run.stop_reason is not None:
    return 'stopped'
  return 'done' if run.step >= run.total_steps else 'data'
