"""Who is told what a run does, and in which order: its log, what watches for trouble, its heartbeat, its hooks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from praxis_lite.records.metrics import EvalResult
from praxis_lite.runtime.hooks import Hooks, Run
from praxis_lite.runtime.loop.train_log import TrainLog
from praxis_lite.runtime.loop.watch import Watch
from praxis_lite.runtime.trouble import InputState, TroubleWatch
from praxis_lite.training.steps import TrainStepOutput


class Observers(NamedTuple):
  """Those who are told of steps, saves and evaluations. Any of them may raise, which ends the run."""

  log: TrainLog
  trouble: TroubleWatch
  watch: Watch
  hooks: Hooks

  def doing(self, activity: str) -> contextlib.AbstractContextManager[None]:
    """The time of the block belongs to an activity, one of `records.goodput.ACTIVITIES`."""
    return self.watch.goodput.doing(activity)

  def took_step(self, run: Run, out: TrainStepOutput, before: InputState) -> None:
    """A step was dispatched: the last one of `run`.

    Args:
      out: its outputs, which the devices may still be computing.
      before: the state of the input from which its batch was read.
    """
    self.trouble.took(run.step, before)
    self.log.add(run.step, out)
    self.watch.took(run.step)
    with self.doing('hooks'):
      self.hooks.on_step(run, out.mean_metrics)

  def will_save(self, run: Run, *, is_copy: bool) -> None:
    """The state is about to be saved: raises if one of the steps until now was not finite, and so must not be."""
    self.log.drain()
    self.watch.saves(run.step, is_copy=is_copy)
    self.trouble.keep_losses()

  def saved(self, run: Run, step: int, folder: Path) -> None:
    """The checkpoint of `step` is complete."""
    self.watch.saved(step)
    self.hooks.on_checkpoint(run, step, folder)

  def evaluated(self, run: Run, result: EvalResult) -> None:
    """An input was evaluated or decoded."""
    run.results.append(result)
    self.hooks.on_eval(run, result.split, result.metrics)
