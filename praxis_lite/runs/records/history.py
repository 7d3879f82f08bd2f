"""The history of a run, `history.jsonl` in its directory: starts, saves, failures and ends of all its attempts.

    {"time": 1764194342.1, "kind": "started", "step": 0, "text": "", "about": {"processes": 8, ...}}
    {"time": 1764194399.8, "kind": "saved", "step": 100, "text": "", "about": {}}
    {"time": 1764194425.0, "kind": "lost", "step": 130, "text": "host 3 (n3), which was in step 131, ...", "about": {}}

An attempt is one start of the run's processes. One that is killed cannot write how it ended; the line of the next start
says what was last known of it. A line that cannot be written is left out, and the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from praxis_lite.common.errors import first_line
from praxis_lite.common.files import KnownFolder, open_plain_to_write, parse_json, read_plain
from praxis_lite.common.foreign_text import printable
from praxis_lite.runs.records.goodput import seconds_of
from praxis_lite.runs.records.heartbeat import Heartbeat

HISTORY = 'history.jsonl'
_MOST_TEXT = 500

EventKind = Literal[
  'started', 'saved', 'save_failed', 'nonfinite', 'went_back', 'slow_host', 'lost', 'replaced', 'restarted', 'ended'
]


class RunEvent(NamedTuple):
  """Something that has happened to a run.

  Attributes:
    time: seconds since 1970.
    kind: what has happened. A line of `launch` has 'lost', 'replaced' or 'restarted'.
    step: the steps taken so far; None if whoever wrote this does not know.
    text: a line about it; '' if `kind` says all.
    about: numbers and names, by name; see `started_event` for those of 'started'.
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
    first_step, last_step: steps taken at its begin and its end.
    processes: the number of processes.
    how: how it ended; 'killed' if nobody wrote that, '' if it goes on.
    seconds: seconds by activity, as in `goodput.py`; steps that a later attempt repeated still count as productive.
    events: what happened during the attempt, in order.
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
  with contextlib.suppress(OSError), open_plain_to_write(directory / HISTORY, append=True) as file:
    file.write(f'{json.dumps(event._asdict())}\n'.encode())


def started_event(step: int, processes: int, earlier: Heartbeat | None) -> dict[str, Any]:
  """Returns what the line 'started' says: the number of processes, and what is known of the attempt before."""
  about: dict[str, Any] = {'processes': processes}
  if earlier is not None:
    before = {'time': round(earlier.time, 3), 'step': earlier.step, 'ended': earlier.ended}
    about |= {'before': before | {'seconds': seconds_of(earlier.goodput)}}
  return about


def read_history(directory: Path) -> list[RunEvent]:
  """Returns the events of a run in order; skips damaged lines."""
  found = []
  with contextlib.suppress(OSError):
    for line in read_plain(directory / HISTORY).decode(errors='replace').splitlines():
      with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        found.append(_event(parse_json(line)))
  return sorted(found, key=lambda event: event.time)


def _event(data: Mapping[str, Any]) -> RunEvent:
  step = data['step']
  if not isinstance(data['time'], int | float) or not 0 <= data['time'] < 1e11:
    raise ValueError('no time')
  if not (step is None or (isinstance(step, int) and 0 <= step < 1e15)) or not isinstance(data['about'], dict):
    raise ValueError('no event')
  kind, text = (printable(str(data[name]), one_line=True)[:_MOST_TEXT] for name in ('kind', 'text'))
  return RunEvent(float(data['time']), kind, step, text, data['about'])


def attempts_of(events: Sequence[RunEvent], beat: Heartbeat | None) -> list[Attempt]:
  """Returns the attempts of a run in order.

  Args:
    events: the history.
    beat: the last heartbeat of process 0, which knows more of the last attempt than the history does.
  """
  starts = [i for i, event in enumerate(events) if event.kind == 'started']
  found: list[Attempt] = []
  spent = seconds_of({})
  for i, stop in zip(starts, [*starts[1:], len(events)]):
    began, own = events[i], events[i + 1 : stop]
    ends = [event for event in own if event.kind == 'ended']
    steps = [event.step for event in own if event.step is not None and event.kind != 'went_back']
    known = _before(events[stop]) if stop < len(events) else None
    if known is None and stop == len(events) and beat is not None:
      known = beat.time, beat.step, beat.ended, seconds_of(beat.goodput)
    now, reached, how, total = known or (began.time, 0, '', spent)
    times = [event.time for event in own if event.kind not in ('lost', 'replaced', 'restarted')]
    ended = max(now, began.time, *times)
    how = ends[-1].text if ends else how if how or stop == len(events) else 'killed'
    seconds = {name: max(total[name] - spent[name], 0.0) for name in spent}
    # A restart moves the time of repeated steps from 'productive' to 'lost', which is not time of its own.
    seconds['productive'] = max(total['productive'] + total['lost'] - spent['productive'] - spent['lost'], 0.0)
    seconds['lost'] = 0.0
    processes = began.about.get('processes')
    first = began.step or 0
    found.append(
      Attempt(
        *(began.time, ended, first, max([first, reached, *steps])),
        *(processes if isinstance(processes, int) else 1, printable(how, one_line=True), seconds, own),
      )
    )
    spent = total
  return found


def _before(event: RunEvent) -> tuple[float, int, str, dict[str, float]] | None:
  """Returns what the line of a start says about the attempt before it; None if it says nothing."""
  try:
    before = event.about['before']
    seen, reached, how = float(before['time']), int(before['step']), str(before['ended'])
    return min(seen, event.time), reached, how, seconds_of(before)
  except (KeyError, TypeError, ValueError, OverflowError):
    return None


def why_ended(error: BaseException) -> str:
  """Returns how an attempt has ended, as one line, from the error that ended it."""
  return f'{type(error).__name__}: {first_line(error)}' if str(error).strip() else type(error).__name__
