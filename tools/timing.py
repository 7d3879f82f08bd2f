"""Measures times for comparisons. Candidates take turns, so that other work on the machine affects them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

ValueT = TypeVar('ValueT')


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
  """Returns the seconds that `work` takes, including the wait for the arrays that it returns."""
  import jax  # Imported late, because the benchmark chooses its devices first.

  start = clock()
  jax.block_until_ready(work())
  return clock() - start


def measure_in_turn(measures: Sequence[Callable[[], ValueT]], rounds: int, warm_up: int = 1) -> list[list[ValueT]]:
  """Calls all measures once per round, in reverse every other round; returns the results of each after the warm-up."""
  found: list[list[ValueT]] = [[] for _ in measures]
  for i in range(-warm_up, rounds):
    turns = list(zip(measures, found))
    for measure, values in turns if i % 2 else reversed(turns):
      value = measure()
      if i >= 0:
        values.append(value)
  return found


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
  """Returns the median, over rounds, of the ratio of two measurements of the same round."""
  return statistics.median(a / b for a, b in zip(times, baseline, strict=True))
