"""Measures times for comparisons. The candidates take turns, so that other work on the machine affects them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar('Value')


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
  """The time that `work` takes, until the arrays that it returns are there."""
  import jax  # Not before the benchmark has chosen its devices.

  start = clock()
  jax.block_until_ready(work())
  return clock() - start


def measure_in_turn(measures: Sequence[Callable[[], Value]], rounds: int, warm_up: int = 1) -> list[list[Value]]:
  """Takes every measure once a round, in reverse every other round, and returns those of each after the warm-up."""
  found: list[list[Value]] = [[] for _ in measures]
  for i in range(-warm_up, rounds):
    turns = list(zip(measures, found))
    for measure, values in turns if i % 2 else reversed(turns):
      value = measure()
      if i >= 0:
        values.append(value)
  return found


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
  """The median of what one took over what the other did in the same round."""
  return statistics.median(a / b for a, b in zip(times, baseline, strict=True))
