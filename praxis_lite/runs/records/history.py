"""The history of a run, `history.jsonl` in its directory: starts, saves, failures and ends of all its attempts.

    {"time": 1764194342.1, "kind": "started", "step": 0, "text": "", "about": {"processes": 8, ...}}
    {"time": 1764194399.8, "kind": "saved", "step": 100, "text": "", "about": {}}
    {"time": 1764194425.0, "kind": "lost", "step": 130, "text": "host 3 (n3), which was in step 131, ...", "about": {}}

An attempt is one start of the run's processes. An attempt that is killed cannot write how it ended; the line of the
next start says what was last known of it. A line that cannot be written is left out, and the run goes on. If the file
exceeds 8 MiB, its older half is dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from praxis_lite.common.files import KnownFolder
from praxis_lite.common.foreign_text import printable
from praxis_lite.runs.records.goodput import seconds_of
from praxis_lite.runs.records.heartbeat import Heartbeat
from praxis_lite.runs.records.json_lines import append_line, read_json_lines

HISTORY = 'history.jsonl'
_MOST_TEXT = 500
_MOST_BYTES = 8 << 20

EventKind = Literal[
  'started', 'saved', 'save_failed', 'nonfinite', 'went_back', 'slow_host', 'lost', 'replaced', 'restarted', 'ended'
]


class RunEvent(NamedTuple):
  """Something that has happened to a run.

  Attributes:
    time: seconds since 1970.
    kind: what has happened. `launch` writes 'lost', 'replaced' and 'restarted'.
    step: the steps taken so far; None if the writer does not know.
    text: a line with details; '' if there are none.
    about: further values by name; for the kind 'started' see `started_event`.
  """

  time: float
  kind: str
  step: int | None = None
  text: str = ''
  about: Mapping[str, Any] = {}


class Attempt(NamedTuple):
  """One start of the processes of a run.

  Attributes:
    began, ended: seconds since 1970; `ended` is the last sign of life of an attempt that was killed.
    how: how it ended; 'killed' if no process has recorded the end, '' if it goes on.
    seconds: seconds by activity, as in `goodput.py`; steps that a later attempt repeated still count as productive.
  """

  began: float
  ended: float
  first_step: int
  last_step: int
  processes: int
  how: str
  seconds: Mapping[str, float]
  events: Sequence[RunEvent]


def note_event(
  directory: Path | KnownFolder,
  kind: EventKind,
  step: int | None = None,
  text: str = '',
  about: Mapping[str, Any] | None = None,
) -> None:
  """Adds a line to the history of a run; does nothing if its directory is gone or not writable."""
  if isinstance(directory, KnownFolder):
    if directory.is_elsewhere():
      return
    directory = directory.path
  event = RunEvent(round(time.time(), 3), kind, step, text[:_MOST_TEXT], about or {})
  with contextlib.suppress(OSError):
    append_line(directory / HISTORY, event._asdict(), _MOST_BYTES)


def started_event(step: int, processes: int, earlier: Heartbeat | None) -> dict[str, Any]:
  """Returns the `about` of an event 'started': the number of processes, and facts about the previous attempt."""
  about: dict[str, Any] = {'processes': processes}
  if earlier is not None:
    times = {'time': round(earlier.time, 3), 'began': round(earlier.started, 3)}
    about['before'] = {**times, 'step': earlier.step, 'ended': earlier.ended, 'seconds': seconds_of(earlier.goodput)}
  return about


def read_history(directory: Path) -> list[RunEvent]:
  """Returns the events of a run in order; skips damaged lines."""
  return sorted(read_json_lines(directory / HISTORY, _event), key=lambda event: event.time)


def _event(data: Mapping[str, Any]) -> RunEvent:
  step = data['step']
  if not isinstance(data['time'], int | float) or not 0 <= data['time'] < 1e11:
    raise ValueError('no time')
  if not (step is None or (isinstance(step, int) and 0 <= step < 1e15)) or not isinstance(data['about'], dict):
    raise ValueError('no event')
  kind, text = (printable(str(data[name]), one_line=True)[:_MOST_TEXT] for name in ('kind', 'text'))
  return RunEvent(float(data['time']), kind, step, text, data['about'])


class _Beat(NamedTuple):
  """The last heartbeat before the next start; `began` is when the process that wrote it began."""

  time: float
  began: float
  step: int
  ended: str
  seconds: Mapping[str, float]


def attempts_of(events: Sequence[RunEvent], beat: Heartbeat | None, *, is_alive: bool = True) -> list[Attempt]:
  """Returns the attempts of a run in order.

  Args:
    beat: the last heartbeat of process 0, which says more about the last attempt than the history; None without one.
  """
  starts = [i for i, event in enumerate(events) if event.kind == 'started']
  found: list[Attempt] = []
  spent: Mapping[str, float] = seconds_of({})
  for i, stop in zip(starts, [*starts[1:], len(events)]):
    began, own = events[i], events[i + 1 : stop]
    ends = [event for event in own if event.kind == 'ended']
    steps = [event.step for event in own if event.step is not None and event.kind != 'went_back']
    known = _before(events[stop]) if stop < len(events) else None
    if known is None and stop == len(events) and beat is not None:
      known = _Beat(beat.time, beat.started, beat.step, beat.ended, seconds_of(beat.goodput))
    known = known or _Beat(began.time, 0.0, 0, '', spent)
    total = known.seconds
    # Until a new process trains, its heartbeat repeats the step and the seconds of the previous attempt.
    is_own = known.began <= began.time
    times = [event.time for event in own if event.kind not in ('lost', 'replaced', 'restarted')]
    ended = max([known.time if is_own else 0.0, began.time, *times])
    goes_on = stop == len(events) and is_own and is_alive
    how = ends[-1].text if ends else known.ended if is_own and known.ended else '' if goes_on else 'killed'
    seconds = {name: max(total[name] - spent[name], 0.0) for name in spent}
    # A restart moves the time of repeated steps from 'productive' to 'lost'; it does not spend this time itself.
    seconds['productive'] = max(total['productive'] + total['lost'] - spent['productive'] - spent['lost'], 0.0)
    seconds['lost'] = 0.0
    processes = began.about.get('processes')
    first = began.step or 0
    found.append(
      Attempt(
        *(began.time, ended, first, max([first, known.step, *steps])),
        *(processes if isinstance(processes, int) else 1, printable(how, one_line=True), seconds, own),
      )
    )
    spent = total
  return found


def _before(event: RunEvent) -> _Beat | None:
  """Returns what the event of a start says about the previous attempt; None if it says nothing."""
  try:
    before = event.about['before']
    seen, began = float(before['time']), float(before.get('began', 0.0))
    return _Beat(min(seen, event.time), began, int(before['step']), str(before['ended']), seconds_of(before))
  except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
    return None
