"""Where the time before the first step went: one line of named seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path


class StartupTimes:
  """Accounts for the seconds from the start of the process to the first step, all of them.

      startup = StartupTimes()          # what has passed so far counts as 'imports'
      ...
      startup.mark('data')              # what has passed since counts as 'data'
      startup.report()                  # 'first step after 7.9 s: imports 1.9, data 0.4, compile 2.9, ...'

  Args:
    process_seconds: age of the process now; None asks the system.
    clock: seconds, for tests.
  """

  def __init__(self, process_seconds: float | None = None, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self._last = clock()
    self._seconds: dict[str, float] = {'imports': process_age() if process_seconds is None else process_seconds}

  def mark(self, name: str) -> None:
    """Counts what has passed since the last mark as `name`."""
    now = self._clock()
    self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
    self._last = now

  def mark_parts(self, seconds: Mapping[str, float]) -> None:
    """Counts what has passed since the last mark as several phases, of which someone else has taken the time."""
    for name, value in seconds.items():
      self._seconds[name] = self._seconds.get(name, 0.0) + value
    self._last = self._clock()

  def report(self) -> str:
    """Returns the line; phases of less than 0.05 s are left out."""
    shown = ', '.join(f'{name} {seconds:.1f}' for name, seconds in self._seconds.items() if seconds >= 0.05)
    return f'first step after {sum(self._seconds.values()):.1f} s: {shown}'


def process_age() -> float:
  """Seconds since this process started; where the system does not tell, the CPU time it has used."""
  try:
    # Field 22 of stat is the start in clock ticks since boot; the command's name, field 2, may hold spaces.
    stat = Path('/proc/self/stat').read_text()
    started = int(stat.rpartition(')')[2].split()[19]) / os.sysconf('SC_CLK_TCK')
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
  except (OSError, AttributeError, ValueError, IndexError):
    return time.process_time()
