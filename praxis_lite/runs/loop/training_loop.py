"""The training loop: reads a batch, takes a step, saves and evaluates if this is due, and repeats this until the end.

host     dispatch 8 | dispatch 9, read 7 | dispatch 10, read 8 | ...
devices     step 7  |       step 8       |        step 9       |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from praxis_lite.checkpoints import eval_variables
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.processes import meet_others, note_progress
from praxis_lite.common.trees import NestedDict
from praxis_lite.runs.corruption import Corruption
from praxis_lite.runs.determinism import DeterminismError, step_twice
from praxis_lite.runs.loop.directory import HeldDirectory
from praxis_lite.runs.loop.feed import Feed
from praxis_lite.runs.loop.job import TrainJob
from praxis_lite.runs.loop.saving import RunSaver
from praxis_lite.runs.nonfinite import SKIPPED
from praxis_lite.runs.observer import Observers, Run
from praxis_lite.runs.programs import InputProgram
from praxis_lite.runs.records.metrics import EvalResult, HostMetrics
from praxis_lite.runs.records.run_config import is_due, is_logged, run_keys
from praxis_lite.runs.replay import check_finite
from praxis_lite.runs.sized_steps import SizedSteps
from praxis_lite.runs.stop_signals import StopSignals
from praxis_lite.training.numerics import compare_gradients
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.training.steps import TrainStepOutput


@dataclasses.dataclass
class TrainingLoop:
  """Trains a run until its last step, the end of its data, or a request to stop.

  Attributes:
    directory: the run's directory; nothing is saved or evaluated if it is lost.
    done_at: the step at which each input was last evaluated or decoded, by split, including evaluations before a
      restart.
    metrics: the results of these evaluations, by split.
  """

  job: TrainJob
  directory: HeldDirectory
  feed: Feed
  saver: RunSaver
  observers: Observers
  stop: StopSignals
  done_at: dict[str, int]
  metrics: dict[str, HostMetrics]

  def compile(self) -> None:
    """Compiles the train step, and waits for the other processes."""
    with self.observers.measure('compiling'):
      times = self.job.programs.partitioned.train_step.compile()
      self.job.programs.steps.compile()
      if self.job.programs.elsewhere is not None:
        self.job.programs.elsewhere.compile()
      if self.job.programs.answers is not None:
        self.job.programs.answers.step.compile()
    self.job.startup.mark_parts({'lower': times.lower, 'compile': times.compile})
    meet_others()

  def train(self, run: Run) -> None:
    """Takes the remaining steps and saves the state after them; also evaluates it, unless a signal ends the run.

    Raises:
      NumericsError, CorruptionError: see `TrainOptions.verify_numerics`, `check_determinism` and `check_replicas`.
      NonFiniteError: for the reasons that `run_train` lists, or because a step with `TrainOptions.debug_nans` had a
        NaN or an infinity.
    """
    for observer in self.observers:
      observer.on_ready(run)
    verifies = self.job.options.verify_numerics
    for batch in self._batches(run):
      if verifies:
        run.line(_verify_gradients(self.job.programs.steps.taking(batch), run.state, self.job.keys.train, batch))
      verifies = False
      out = self._take_step(run.step + 1, run.state, batch)
      run.state, run.step = out.state, run.step + 1
      for observer in self.observers:
        observer.on_step(run, out, self.feed.position_before)
      if not self._is_within_batch(run):
        self.run_due(run)

    self.stop.requested_now()  # After the last step, too, all processes must agree whether they got a signal.
    run.is_over = True
    self.saver.save(run)
    failure = self.observers.failure(run)
    if failure is not None and not self.stop.requested:
      self.saver.finish(run)
      raise failure(self.feed.hints(run.task.model))
    if not self.stop.requested:
      self._run(self.job.programs.evaluation, run)
      if self.job.task.train.decode_interval_steps is not None:
        self._run(self.job.decoding, run)
    self.saver.finish(run)

  def run_due(self, run: Run) -> None:
    """Saves, evaluates and decodes if that is due now; raises LostDirectoryError if the directory is lost."""
    if jax.process_count() == 1:  # With several processes, `_pause` checks this in all of them together.
      self.directory.check()
    settings, job = self.job.task.train, self.job
    # Saving comes first: the disk writes while the devices evaluate, and a run killed in an evaluation loses no step.
    for interval, act in (
      (settings.emergency_copies.every_n_steps, self.saver.copy),
      (settings.save_interval_steps, self.saver.save),
      (settings.eval_interval_steps, lambda run: self._run(job.programs.evaluation, run)),
      (settings.decode_interval_steps, lambda run: self._run(job.decoding, run)),
    ):
      if is_due(run.step, interval):
        act(run)
        for observer in self.observers:
          observer.on_resume(run)
    self.saver.announce_checkpoints(run)

  def _take_step(self, number: int, state: TrainState, batch: NestedDict) -> TrainStepOutput:
    """Takes step `number`; donates `state`, the state after the previous step."""
    partitioned, key = self._task_for(number, self.job.programs.steps, batch), self.job.keys.train
    note_progress(f'step {number}')
    with jax.profiler.StepTraceAnnotation('train', step_num=number):
      if is_due(number, self.job.options.check_determinism):
        out = self._step_twice(partitioned, state, batch, number)
      else:
        out = partitioned.train_step(state, key, batch)
    if self.job.options.debug_nans and float(np.asarray(out.mean_metrics[SKIPPED][0])):
      check_finite(partitioned, number - 1, out.state, key, batch)
    return out

  def _task_for(self, number: int, steps: SizedSteps, batch: NestedDict) -> PartitionedTask:
    """Returns the task that takes step `number`; it has taps only if the metrics of this step are written."""
    partitioned, settings = steps.taking(batch), self.job.task.train
    has_taps = is_logged(number, settings.log_interval_steps, settings.num_train_steps)
    return partitioned if has_taps else partitioned.untapped

  def _step_twice(
    self, partitioned: PartitionedTask, state: TrainState, batch: NestedDict, number: int
  ) -> TrainStepOutput:
    elsewhere = None
    if self.job.programs.elsewhere is not None:
      other = self._task_for(number, self.job.programs.elsewhere, batch)
      elsewhere = other.train_step, run_keys(self.job.seed, other.mesh).train
    try:
      return step_twice(partitioned.train_step, state, self.job.keys.train, batch, number, elsewhere)
    except DeterminismError as error:
      if self.job.options.on_corruption == 'fail':
        raise
      # Either of the two results may be wrong, so no device is known to be at fault.
      found = Corruption(number - 1, number, error.what, devices=(), is_voted=False)
      raise self.job.corruption.answer(found) from None

  def _batches(self, run: Run) -> Iterator[NestedDict]:
    """Yields a batch for each remaining step, completed with answers of the model if it has prompts to answer."""
    answers = self.job.programs.answers
    for batch in self._batches_of_feed(run):
      if answers is not None:
        batch = answers.complete(run.state.mdl_vars, run.state.step, batch)
      yield batch
      while self._is_within_batch(run) and self.observers.failure(run) is None:
        yield batch

  def _is_within_batch(self, run: Run) -> bool:
    """Whether the next step uses the same batch again; then the run can neither save nor stop now."""
    answers = self.job.programs.answers
    return answers is not None and run.step % answers.steps_per_batch != 0

  def _batches_of_feed(self, run: Run) -> Iterator[NestedDict]:
    while run.step < run.total_steps and not self._is_stopped(run):
      note_progress(f'the input of step {run.step + 1}')
      if not self.feed.wait(run.step, run.state.step, lambda: self.stop.requested):
        continue
      try:
        batch = self.feed.next()
      except Exception:
        if jax.process_count() == 1:  # All processes must save together, and the others do not know of the error.
          run.is_over = True
          self.saver.save(run)
        raise
      if batch is None:
        run.line(f'reached the end of the training data after {run.step} of {number_of(run.total_steps, "step")}')
        return
      yield batch

  def _is_stopped(self, run: Run) -> bool:
    is_stopped = self.stop.requested_now() or run.stop_reason is not None
    return is_stopped or self.observers.failure(run) is not None

  def _run(self, programs: Sequence[InputProgram], run: Run) -> None:
    """Evaluates or decodes each input, unless that is done for this step already, or a signal ends the run."""
    self.directory.check()
    for observer in self.observers:
      observer.on_pause(run, 'evaluate')
    with self.observers.measure('evaluating'):
      for program in programs:
        if self.done_at.get(program.split) == run.step:
          continue
        variables = eval_variables(run.state, use_ema=program.use_ema)
        if (result := program.run(variables, run.state.step, self.stop.requested_now)) is None:
          return
        self.done_at[program.split], self.metrics[program.split] = run.step, result.metrics
        run.results.append(EvalResult(run.step, program.split, result.metrics))
        for observer in self.observers:
          observer.on_evaluation(run, program, result)


def _verify_gradients(partitioned: PartitionedTask, state: TrainState, key: jax.Array, batch: NestedDict) -> str:
  """Compares the gradients of the next step with a second computation; returns a line about the result."""
  try:
    compared = compare_gradients(partitioned, state, key, batch)
  except ConfigError as error:
    return f'gradients not verified: {error}'
  return (
    f'gradients verified: {compared.num_norms} norms, of each variable and layer, agree with those computed '
    f'{compared.reference}; largest relative difference {compared.worst:.1e}'
  )
