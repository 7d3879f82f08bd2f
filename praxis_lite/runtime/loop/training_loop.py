"""The training loop: a batch, a step, what is due after it, and so on until the end.

host     dispatch 8 | dispatch 9, read 7 | dispatch 10, read 8 | ...
devices     step 7  |       step 8       |        step 9       |
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from praxis_lite.hosts.stop_signals import StopSignals
from praxis_lite.hosts.watchdog import doing
from praxis_lite.runtime.hooks import Run
from praxis_lite.runtime.loop.duties import Duties
from praxis_lite.runtime.loop.feed import Feed
from praxis_lite.runtime.loop.observers import Observers
from praxis_lite.runtime.loop.steps import TrainSteps
from praxis_lite.trees import NestedDict


class TrainingLoop:
  """Trains a run until its last step, until its data is over, or until something stops it.

  Args:
    feed: has the batches.
    steps: takes the steps.
    duties: does what is due between them.
    observers: are told of them.
    stop: says whether a signal ends the run.
  """

  def __init__(self, feed: Feed, steps: TrainSteps, duties: Duties, observers: Observers, stop: StopSignals):
    self._feed = feed
    self._steps = steps
    self._duties = duties
    self._observers = observers
    self._stop = stop

  def train(self, run: Run) -> None:
    """Takes the steps that are left, and saves the state after them; evaluates it too, unless a signal ends the run.

    Raises:
      NonFiniteError: too many steps in a row, or all, were not finite; the state is saved.
    """
    self._observers.watch.train()
    for batch in self._batches(run):
      out = self._steps.take(run.step + 1, run.state, batch)
      run.state, run.step = out.state, run.step + 1
      self._observers.took_step(run, out, self._feed.position_before)
      self._duties.do_those_due(run)

    self._stop.requested_now()  # After the last step too: a signal that only some processes got must not part them.
    self._duties.save(run)
    skipped = self._observers.log.skipped
    if (skipped.too_many or skipped.all_steps) and not self._stop.requested:
      self._duties.finish_saving(run)
      raise skipped.error(self._feed.hints(run.task.model))
    if not self._stop.requested:
      self._duties.evaluate(run)
      if run.task.train.decode_interval_steps is not None:
        self._duties.decode(run)
    self._duties.finish_saving(run)
    self._duties.announce_checkpoints(run)

  def _batches(self, run: Run) -> Iterator[NestedDict]:
    """Yields a batch for each step to take."""
    while run.step < run.total_steps and not self._is_stopped(run):
      doing(f'the input of step {run.step + 1}')
      if not self._feed.wait(run.step, run.state.step, lambda: self._stop.requested):
        continue
      try:
        batch = self._feed.next()
      except Exception:
        if jax.process_count() == 1:  # Saving takes all processes, and the others do not know of the error.
          self._duties.save(run)
        raise
      if batch is None:
        run.line(f'the training data is over after {run.step} of {run.total_steps} steps')
        return
      yield batch

  def _is_stopped(self, run: Run) -> bool:
    return self._stop.requested_now() or run.stop_reason is not None or self._observers.log.skipped.too_many
