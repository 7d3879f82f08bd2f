"""The executor: restore, train, evaluate, decode, checkpoint.

A run is a function of its config and its directory. However it ends, the same call continues from the newest
checkpoint, and on the same mesh ends with bitwise the same parameters: the PRNG key of a step is the run's key folded
with the step, and a checkpoint holds the position in the input at its own step.

A run may take several attempts, of which each goes on from an earlier checkpoint. The parts of one are in `loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from praxis_lite.errors import ConfigError, UserError
from praxis_lite.experiment import ExperimentConfig
from praxis_lite.files import user_path
from praxis_lite.foreign_text import printable
from praxis_lite.hosts.preemption import preemptible
from praxis_lite.hosts.processes import is_primary_process
from praxis_lite.hosts.stop_signals import StopSignals
from praxis_lite.hosts.watchdog import meet_others
from praxis_lite.records.metrics import HostMetrics, SummaryWriter, read_results
from praxis_lite.records.record import write_record
from praxis_lite.records.run_config import held_for_training, job_directory
from praxis_lite.runtime.console import make_console
from praxis_lite.runtime.hooks import Hooks, Run
from praxis_lite.runtime.improvement import own_hooks
from praxis_lite.runtime.loop.directory import HeldDirectory, LostDirectoryError
from praxis_lite.runtime.loop.duties import Duties
from praxis_lite.runtime.loop.feed import BadRecordLines, Feed
from praxis_lite.runtime.loop.job import Job, build_job
from praxis_lite.runtime.loop.lines import conclusion, introduction
from praxis_lite.runtime.loop.observers import Observers
from praxis_lite.runtime.loop.options import Advice, TrainOptions
from praxis_lite.runtime.loop.progress import Progress, evaluations_in, with_saved
from praxis_lite.runtime.loop.saving import Saving
from praxis_lite.runtime.loop.start import Start, starting_point
from praxis_lite.runtime.loop.steps import TrainSteps
from praxis_lite.runtime.loop.train_log import TrainLog
from praxis_lite.runtime.loop.training_loop import TrainingLoop
from praxis_lite.runtime.loop.watch import Watch
from praxis_lite.runtime.mirror import Mirror
from praxis_lite.runtime.profiling import make_profiler
from praxis_lite.runtime.programs import Programs
from praxis_lite.runtime.throughput import StartupTimes
from praxis_lite.runtime.trouble import GoBack, TroubleWatch, go_back, restore_rollbacks, rollbacks_in
from praxis_lite.runtime.vocabulary import keep_vocabulary
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
    config: configs of the task and its datasets, exactly one of them with `is_training=True`.
    job_log_dir: directory of checkpoints, summaries and decoded outputs.
    options: how to train; see `TrainOptions`, which documents each option. None means all defaults.
    **changes: single options by their names, as in `run_train(config, job_log_dir, seed=3)`; they replace those in
      `options`.

  Raises:
    TypeError: there is no option of such a name.
    DeterminismError: a step that was run twice gave different bits; nothing is saved after it.
    UserError: the config, the data, the directory or the checkpoint in it is not usable; or, at the end, something
      could not be written: the last checkpoint, or metrics.
    HungInputError: no batch came for `input_timeout_s`; the state is saved.
    NumericsError: the gradients of the first step are wrong on these devices; nothing was trained.
    LossSpikeError: the loss jumped and `task.train.loss_spike` is set to raise, or the run went back too often.
    NonFiniteError: a step was not finite and the learner is set to raise, and nothing is saved after that step; or more
      steps in a row than `max_skipped_steps`, or all steps, were not finite, and the last one is saved.
    Exception: what a hook raised, with a note that names the hook; the state has been saved. With several processes,
      the others return, with ended_by='SIGTERM'.
  """
  if not isinstance(config, ExperimentConfig):
    experiment = config.__name__ if isinstance(config, type) else 'MyExperiment'
    raise ConfigError(f'run_train(config, job_log_dir): expected configure({experiment}), got {type(config).__name__}')
  options = (options or TrainOptions()).replace(changes)
  while True:
    try:
      return _attempt(config, job_log_dir, options)
    except GoBack as error:
      directory = user_path(job_log_dir).absolute()
      with held_for_training(directory) if is_primary_process() else contextlib.nullcontext():
        trouble = go_back(directory, error.trouble, config.task.train.max_rollbacks)
      options = dataclasses.replace(options, advise=None)
      if is_primary_process():
        gone = f'without {len(trouble.batches)} batches'
        print(printable(f'{trouble.what}: going back to step {trouble.back_to}, {gone}'), flush=True)


def _attempt(config: ExperimentConfig, job_log_dir: str | Path, options: TrainOptions) -> TrainResult:
  """Trains until the end, or until the run has to go back: then it raises GoBack."""
  startup = StartupTimes()
  with contextlib.ExitStack() as to_close:
    opened = to_close.enter_context

    # ---- what is trained, where it starts
    directory = opened(job_directory(job_log_dir))
    held = opened(HeldDirectory(directory))
    if is_primary_process():
      opened(held_for_training(directory))
    mirror = opened(contextlib.closing(Mirror(config.task.train.mirror, directory)))
    mirror.fetch(options.on_damage)
    watch = opened(Watch(directory))
    job = build_job(config, directory, options, startup)
    start = opened(starting_point(job, options, startup, watch.goodput, held))
    first_step, total = start.step, job.settings.num_train_steps

    # ---- what it says, and to whom
    is_primary = is_primary_process()
    console = opened(contextlib.closing(make_console(total, first_step=first_step, enabled=is_primary)))
    writer = SummaryWriter(
      directory, resumed_step=first_step, lost=start.lost_metrics, enabled=is_primary, report=console.line
    )
    to_close.callback(writer.close)
    progress = start.progress
    results, lost = with_saved(read_results(directory, first_step), progress, job.watched, first_step)
    told = list(_lost_records(directory, progress, writer, lost))
    saving = Saving(start.checkpointer, job.partitioned.unpadded_state_shapes, console.line, start.copies)
    trouble = TroubleWatch(directory, job.task, first_step, job.train_input.examples_at, progress.losses)
    log = TrainLog(
      job.partitioned,
      job.batch_struct,
      console,
      writer,
      startup,
      first_step=first_step,
      more=lambda: {**saving.figures(), **watch.figures()},
      trouble=trouble,
    )
    about_job, advice = introduction(job, options.devices), _advice(job, options.advise, startup)
    for line in itertools.chain(about_job, start.origins, advice, start.notes, told, _recorded(job, start)):
      console.line(line)
    watch.begin(first_step, total, job.settings.slow_step_factor, console.line)
    stop = StopSignals()
    profiler = opened(make_profiler(options.profile_steps))
    own = [BadRecordLines(job.train_input), *own_hooks(job.settings, job.watched, start.checkpointer), mirror]
    stop_all = stop.request_of_all if jax.process_count() > 1 else None
    observers = Observers(log, trouble, watch, Hooks([profiler, *own, *options.hooks], stop_all))

    # ---- who does the work
    programs = Programs([*job.evaluation, *job.decoding], console, writer, stop, first_step=first_step, results=results)
    if is_primary:
      keep_vocabulary(job.config, directory)
    feed = opened(Feed(job, watch.goodput, console.line, options.input_timeout_s))
    run: Run

    def progress_now() -> Progress:
      values = evaluations_in(run.results, job.watched)
      return Progress(
        values, trouble.losses, rollbacks_in(directory), writer.num_lines if is_primary else None, start.data
      )

    duties = Duties(job, feed, saving, programs, observers, held, progress_now)
    loop = TrainingLoop(feed, TrainSteps(job, options, console.line), duties, observers, stop)
    run = Run(job.task, directory, start.state, results, save=lambda: duties.save(run), line=console.line)

    # ---- train
    opened(stop)
    opened(preemptible(stop, directory, grace_s=options.grace_s, notice=options.preemption_notice))
    observers.hooks.on_start(run)
    if first_step < total and run.stop_reason is None:
      with watch.goodput.doing('compiling'):
        times = job.partitioned.train_step.compile()
      startup.mark_parts({'lower': times.lower, 'compile': times.compile})
      meet_others()
    if start.is_restored:
      duties.do_those_due(run)  # The last run may have been killed between this checkpoint and its evaluation.
    try:
      loop.train(run)
    except (LostDirectoryError, OSError) as error:
      # What only one process of several could not write, as what it decodes, ends them all, and nothing is saved.
      is_alone = jax.process_count() == 1
      gone = error if isinstance(error, LostDirectoryError) else held.why_lost() if is_alone else None
      if gone is None:
        raise
      raise UserError(duties.rescue(run, gone, lambda new: _make_anew(new, job, run.step))) from None

    # ---- the end
    if run.step > first_step:
      console.line(watch.summary())
    console.line(conclusion(run, first_step, start.checkpointer.directory))
    with watch.goodput.doing('saving'):
      mirror.finish(run)
    if observers.hooks.error is not None:
      raise observers.hooks.error
    watch.ended_by = _ended_by(run, stop)
    return TrainResult(run.step, run.state, programs.metrics, watch.ended_by)


def _advice(job: Job, advise: Advice | None, startup: StartupTimes) -> Iterator[str]:
  """Yields the lines of advice, on the process that prints."""
  if advise is not None and is_primary_process():
    yield from advise(job.task, job.batch_struct)
    startup.mark('check')


def _recorded(job: Job, start: Start) -> Iterator[str]:
  """Records the run, and yields how its config differs from what was recorded before."""
  if is_primary_process():
    # A run that takes no step keeps its record: nothing in it was made with what this call asks for.
    is_finished = start.is_restored and start.step >= job.settings.num_train_steps
    mesh = job.partitioned.mesh.shape
    yield from write_record(
      job.directory, job.config, seed=job.seed, mesh=mesh, step=start.step, keeps_record=is_finished
    )


def _lost_records(directory: Path, saved: Progress, writer: SummaryWriter, evaluations: int) -> Iterator[str]:
  """Writes again which batches are left out, and yields lines about what the files of a run have lost."""
  if not is_primary_process():
    rollbacks = 0
  else:
    rollbacks = restore_rollbacks(directory, saved.troubles)
    missing = (saved.lines or 0) - writer.num_lines
    if evaluations or missing > 0:
      lines = f'{missing} lines' if missing > 0 else f'{evaluations} evaluations'
      kept = '; early stopping and the best checkpoint go by the evaluations in the checkpoint' if evaluations else ''
      yield f'{directory / "metrics.jsonl"} has lost {lines} that there were when the checkpoint was saved{kept}'
    if rollbacks:
      yield f'{directory / "trouble.jsonl"} had lost {rollbacks} lines: the checkpoint knows which batches are left out'
  if saved.troubles:
    meet_others()  # They read the file.


def _make_anew(directory: Path, job: Job, step: int) -> None:
  """Makes a directory in which a run can go on: its config, and the vocabulary that it keeps."""
  directory.mkdir(parents=True)
  write_record(directory, job.config, seed=job.seed, mesh=job.partitioned.mesh.shape, step=step)
  keep_vocabulary(job.config, directory)


def _ended_by(run: Run, stop: StopSignals) -> str:
  if stop.requested and stop.received is not None:
    return stop.received
  if run.stop_reason is not None:
    return 'stopped'
  return 'done' if run.step >= run.total_steps else 'data'
