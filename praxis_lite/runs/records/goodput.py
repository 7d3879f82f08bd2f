"""Goodput: measures how a run spends its time, over all restarts, and finds steps that take much longer than others.

    3 h in all: training 91%, lost to restarts 3%, compiling 3%, saving 2%, waiting for input 1%

Each second of the training thread belongs to exactly one activity. Time that no other activity claims counts as
starting until training begins, and as productive afterwards. If a restart repeats steps, the time of their first run
counts as lost.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from praxis_lite.common.figures import duration, number_of

# The activities, and their names on the console and in the command `status`.
ACTIVITIES = {
  'productive': 'training',
  'starting': 'starting',
  'compiling': 'compiling',
  'restoring': 'restoring',
  'saving': 'saving',
  'evaluating': 'evaluating',
  'waiting': 'waiting for input',
  'hooks': 'hooks and traces',
  'lost': 'lost to restarts',
}
_MAX_MARKS, _MAX_COPIES = 200, 2


class Goodput:
  """Seconds by activity, including those of earlier processes of the same run.

  `clock` returns seconds; tests replace it. `began` is its value when this process started; None means now. Any thread
  may read the seconds, but only one may change the activity.
  """

  def __init__(self, clock: Callable[[], float] = time.perf_counter, began: float | None = None):
    self._clock = clock
    self._lock = threading.Lock()
    self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
    self._marks: dict[int, float] = {}  # The productive seconds before each checkpoint, by step.
    self._copies: dict[int, float] = {}  # The productive seconds before each emergency copy, by step.
    self._activities = ['starting']
    self._began = self._since = clock() if began is None else began

  def resume(self, record: Mapping[str, Any], step: int) -> None:
    """Adds the record of an earlier process. Its steps after `step` will be repeated, so their time is lost."""
    seconds = seconds_of(record)
    marks = {int(s): _number(t) for s, t in _dict(record.get('marks')).items() if s.isdecimal() and int(s) <= step}
    kept = marks[max(marks)] if marks else 0.0
    lost = max(seconds['productive'] - kept, 0.0) if _number(record.get('step')) > step else 0.0
    with self._lock:
      for name, value in seconds.items():
        self._seconds[name] += value
      self._seconds['productive'] -= lost
      self._seconds['lost'] += lost
      self._marks = marks

  def train(self) -> None:
    """Begins training: from now on, time that no activity claims counts as productive."""
    self._change(lambda: self._activities.__setitem__(0, 'productive'))

  @contextlib.contextmanager
  def doing(self, activity: str) -> Iterator[None]:
    """Assigns the time of the block to an activity."""
    self._change(lambda: self._activities.append(activity))
    try:
      yield
    finally:
      self._change(self._activities.pop)

  def mark(self, step: int, *, is_copy: bool = False) -> None:
    """Records that a checkpoint or emergency copy of `step` is saved now. A restart from it loses only later time."""
    marks, most = (self._copies, _MAX_COPIES) if is_copy else (self._marks, _MAX_MARKS)
    marks[step] = self.seconds()['productive']
    for old in sorted(marks)[:-most]:
      del marks[old]

  def seconds(self) -> dict[str, float]:
    """Returns the seconds by activity until now."""
    with self._lock:
      now = {**self._seconds}
      now[self._activities[-1]] += self._clock() - self._since
    return now

  @property
  def activity(self) -> tuple[str, float]:
    """The current activity, and its seconds so far."""
    with self._lock:
      return self._activities[-1], self._clock() - self._began

  def record(self, step: int) -> dict[str, Any]:
    """Returns what `resume` needs, for JSON."""
    seconds = {name: round(value, 3) for name, value in self.seconds().items()}
    marks = {**self._marks, **self._copies}
    return {'step': step, 'seconds': seconds, 'marks': {str(s): round(t, 3) for s, t in marks.items()}}

  def _change(self, change: Callable[[], object]) -> None:
    with self._lock:
      now, before = self._clock(), self._activities[-1]
      self._seconds[before] += now - self._since
      change()
      self._since = now
      self._began = now if self._activities[-1] != before else self._began


def seconds_of(record: Mapping[str, Any]) -> dict[str, float]:
  """Returns the seconds by activity in the result of `Goodput.record`; missing and invalid numbers are 0."""
  seconds = _dict(record.get('seconds'))
  return {name: _number(seconds.get(name)) for name in ACTIVITIES}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
  """Returns each activity's share of the total time, 0 to 1."""
  total = sum(seconds.values())
  return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}


def goodput_line(seconds: Mapping[str, float], *, is_resumed: bool = False) -> str:
  """Returns one line: the share of training, and the shares of other activities that round to at least one percent.

  Args:
    seconds: the seconds by activity, of all launches of a run.
    is_resumed: whether to say that the seconds include earlier launches.
  """
  spent = sorted(shares(seconds).items(), key=lambda item: -item[1])
  others = [(ACTIVITIES[name], share) for name, share in spent if name != 'productive' and share >= 0.005]
  parts = [('training', shares(seconds).get('productive', 0.0)), *others]
  of = 'all launches' if is_resumed else 'all'
  return f'{duration(sum(seconds.values()))} in {of}: {", ".join(f"{name} {share:.0%}" for name, share in parts)}'


class SlowSteps:
  """Finds steps that take more than `factor` times the median of earlier steps; None disables this."""

  def __init__(self, factor: float | None):
    self._factor = factor
    self._recent: deque[float] = deque(maxlen=_WINDOW)
    self.count = 0

  def add(self, step: int, seconds: float, waited: float) -> str | None:
    """Adds the seconds of a step, and of its wait for input; returns a line if the step was slow, otherwise None."""
    median = statistics.median(self._recent) if len(self._recent) >= _FEWEST else None
    self._recent.append(seconds)
    if self._factor is None or median is None or seconds < max(self._factor * median, _SHORTEST):
      return None
    self.count += 1
    if self.count > _MOST_LINES and self.count % _MOST_LINES:
      return None
    cause = f'{waited:.1f} s of it waiting for input' if waited > seconds / 2 else 'computing, not waiting for input'
    more = f'; {number_of(self.count, "such step")}' if self.count > _MOST_LINES else ''
    return f'step {step} took {seconds:.1f} s, {seconds / max(median, 1e-9):.0f} x the median: {cause}{more}'

  def quantiles(self) -> dict[str, float]:
    """Returns the median and the 90th percentile of the recent steps, in seconds, by name; {} before the first step."""
    if not (recent := sorted(self._recent)):
      return {}
    return {'median': round(statistics.median(recent), 6), 'p90': round(recent[math.ceil(0.9 * len(recent)) - 1], 6)}


# The largest and the smallest number of steps for a median; the seconds below which a step is never slow; and the
# number of slow steps after which only every tenth gets a line.
_WINDOW, _FEWEST = 101, 8
_SHORTEST = 0.5
_MOST_LINES = 10


def _number(value: object) -> float:
  return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _dict(value: object) -> dict[str, Any]:
  return value if isinstance(value, dict) else {}
