"""The history of a run as one self-contained HTML page: its attempts, how they ended, and where time went."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from praxis_lite.common.figures import duration
from praxis_lite.common.foreign_text import printable
from praxis_lite.instruments.explain.page import fill_page, write_file
from praxis_lite.runs.records.goodput import ACTIVITIES, seconds_of, shares
from praxis_lite.runs.records.heartbeat import Heartbeat
from praxis_lite.runs.records.history import Attempt, RunEvent, attempts_of, read_history
from praxis_lite.runs.records.status import Status, number_in, ratio_to_others

# How many of the last events of each kind, and of the slowest hosts, the page shows at most.
_MOST_EVENTS, _MOST_HOSTS = 2000, 12


def write_status_page(path: str, directory: str, beats: Sequence[Heartbeat], status: Status) -> pathlib.Path:
  """Writes the page to the file `path` and returns its path; creates missing parent directories.

  `beats` are the last heartbeats of the run's processes. Raises UserError if the file cannot be written.
  """
  data = status_data(directory, beats, status)
  return write_file(path, fill_page('praxis_lite.cli', f'{directory}: status', data, 'status', ['status']))


def status_data(directory: str, beats: Sequence[Heartbeat], status: Status) -> Mapping[str, object]:
  """Returns the data of the page, for JSON."""
  events = read_history(Path(directory))
  attempts = attempts_of(events, beats[0], is_alive=status.life in ('alive', 'silent'))
  seconds = seconds_of(beats[0].goodput)
  spent = shares(seconds)
  lived = sum(attempt.ended - attempt.began for attempt in attempts)
  between = attempts[-1].ended - attempts[0].began - lived if attempts else 0.0
  return {
    'title': printable(directory, one_line=True),
    'lines': [printable(line, one_line=True) for line in status.lines[:1]],
    'well': status.is_well,
    'step': beats[0].step,
    'steps': beats[0].total_steps,
    'processes': beats[0].processes,
    'goodput': spent['productive'],
    'seconds': [[ACTIVITIES[name], value] for name, value in seconds.items() if value > 0],
    'between': max(between, 0.0),
    'attempts': [_attempt(attempt) for attempt in attempts],
    'events': [
      {'time': e.time, 'kind': e.kind.replace('_', ' '), 'step': e.step, 'text': e.text}
      for e in _last_of_each_kind(events)
    ],
    'hosts': _hosts(beats),
    'numHosts': len(beats),
  }


def _attempt(attempt: Attempt) -> Mapping[str, object]:
  lost = [event.text for event in attempt.events if event.kind == 'lost']
  spent = [(ACTIVITIES[name], value) for name, value in attempt.seconds.items() if value > 0]
  return {
    'began': attempt.began,
    'ended': attempt.ended,
    'first': attempt.first_step,
    'last': attempt.last_step,
    'processes': attempt.processes,
    'how': f'killed: {lost[-1]}' if lost and attempt.how == 'killed' else attempt.how,
    'seconds': sorted(spent, key=lambda part: -part[1]),
    'saves': [[event.time, event.step] for event in attempt.events if event.kind == 'saved'][-_MOST_EVENTS:],
  }


def _last_of_each_kind(events: Sequence[RunEvent]) -> Sequence[RunEvent]:
  counts: dict[str, int] = {}
  found = []
  for event in reversed(events):
    counts[event.kind] = counts.get(event.kind, 0) + 1
    if counts[event.kind] <= _MOST_EVENTS:
      found.append(event)
  return found[::-1]


def _hosts(beats: Sequence[Heartbeat]) -> Sequence[Mapping[str, object]]:
  """Returns the processes with the slowest devices, the slowest first."""
  ordered = sorted(beats, key=_product, reverse=True)
  products = [product for product in map(_product, ordered) if product > 0]
  ratios = [ratio_to_others(products, i) for i in range(min(len(products), _MOST_HOSTS))]
  return [_host(beat, ratio) for beat, ratio in zip(ordered, [*ratios, *[0.0] * (_MOST_HOSTS - len(ratios))])]


def _host(beat: Heartbeat, ratio: float) -> Mapping[str, object]:
  return {
    'process': beat.process,
    'host': beat.host,
    'median': number_in(beat.speed, 'median'),
    'p90': number_in(beat.speed, 'p90'),
    'product': _product(beat),
    'ratio': ratio,
    'waited': number_in(beat.speed, 'waited'),
    'age': duration(max(beat.time - beat.started, 0.0)),
  }


def _product(beat: Heartbeat) -> float:
  return number_in(beat.speed, 'product')
