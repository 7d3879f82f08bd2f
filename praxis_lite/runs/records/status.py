"""Describes the state of a run from its heartbeats."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from praxis_lite.common.figures import duration, format_bytes, number_of, short_number
from praxis_lite.runs.records.goodput import ACTIVITIES, goodput_line, seconds_of
from praxis_lite.runs.records.heartbeat import Heartbeat, life

# The states of a process, the worst first; and the largest number of processes that get a line each.
_ORDER = ('dead', 'silent', 'ended', 'alive')
_MOST_SHOWN = 16


class Status(NamedTuple):
  """The state of a run.

  Attributes:
    is_well: whether each process is alive, or ended normally.
    lines: lines to print; the first one says whether the run is alive.
  """

  is_well: bool
  lines: list[str]
  life: str


def status_of(
  beats: Sequence[Heartbeat], *, is_held: bool, now: float | None = None, newest: int | None = None
) -> Status:
  """Returns the state of a run.

  Args:
    beats: the last heartbeats of its processes, at least one.
    is_held: whether a process of this host is training in the run's directory.
    now: seconds since 1970, for tests.
    newest: the step of the newest checkpoint, if it may have been saved after the last heartbeat.
  """
  now = time.time() if now is None else now
  lives = [life(beat, is_held=is_held, now=now) for beat in beats]
  is_well = all(alive == 'alive' or (alive == 'ended' and ':' not in beat.ended) for alive, beat in zip(lives, beats))
  first = beats[0]
  lines = [_life(lives[0], first, now)]
  others = list(zip(lives[1:], beats[1:]))
  # If there are many processes, the ones in the worst states are shown.
  shown = sorted(others, key=lambda entry: _ORDER.index(entry[0]))[:_MOST_SHOWN]
  shown.sort(key=lambda entry: entry[1].process)
  lines += [f'process {beat.process}: {_life(alive, beat, now)}' for alive, beat in shown]
  if len(shown) < len(others):
    counts = Counter(alive for alive, _ in others) - Counter(alive for alive, _ in shown)
    lines.append(f'all other processes: {", ".join(f"{counts[alive]:,} {alive}" for alive in _ORDER if counts[alive])}')
  if len(beats) < first.processes:
    lines.append(f'{first.processes - len(beats)} of {number_of(first.processes, "process")} never gave a sign of life')
    is_well = is_well and lives[0] == 'ended'
  is_later = newest is not None and newest > (-1 if first.saved_step is None else first.saved_step)
  step = max(first.step, newest) if newest is not None and is_later else first.step
  text = _progress(dataclasses.replace(first, step=step), is_running=lives[0] == 'alive')
  lines.append(f'{text}, or later' if is_later else text)
  if is_later:
    lines.append(f'last save: step {newest}, after the last sign of life')
  elif first.saved_step is None or first.saved is None:
    lines.append('last save: none yet')
  else:
    lines.append(f'last save: step {first.saved_step}, {_ago(first.saved, now)}')
  lines += [*_spread(beats), *_slowest_link(beats), goodput_line(seconds_of(first.goodput))]
  return Status(is_well, lines, lives[0])


def _spread(beats: Sequence[Heartbeat]) -> Iterator[str]:
  """Yields a line about how the hosts differ, if at least two heartbeats have times of a step and of a test product."""
  known = [beat for beat in beats if all(number_in(beat.speed, name) > 0 for name in ('median', 'product'))]
  if len(known) < 2:
    return
  medians = [number_in(beat.speed, 'median') for beat in known]
  products = [number_in(beat.speed, 'product') for beat in known]
  slowest, waits = (max(known, key=lambda beat: number_in(beat.speed, name)) for name in ('product', 'waited'))
  ratio = ratio_to_others(products, known.index(slowest))
  text = f'steps take {duration(min(medians))} to {duration(max(medians))} by process (medians of recent steps)'
  text += f'; slowest devices: process {slowest.process} on {slowest.host}, {ratio:.2f} x the median of the others '
  text += 'for a test product'
  if number_in(waits.speed, 'waited') >= 0.05:
    share = number_in(waits.speed, 'waited')
    text += f'; longest waits for input: process {waits.process} on {waits.host}, {share:.0%} of a step'
  yield text


def _slowest_link(beats: Sequence[Heartbeat]) -> Iterator[str]:
  """Yields a line about the slowest transfer of an emergency copy; nothing if fewer than two processes send them."""
  known = [beat for beat in beats if number_in(beat.speed, 'sent_rate') > 0]
  if len(known) < 2:
    return
  rates = [number_in(beat.speed, 'sent_rate') for beat in known]
  at = rates.index(min(rates))
  peer = int(number_in(known[at].speed, 'sent_to'))
  host = next((f' on {beat.host}' for beat in beats if beat.process == peer), '')
  yield (
    f'slowest link: process {known[at].process} on {known[at].host} sends {format_bytes(rates[at])}/s to process '
    f'{peer}{host}, {ratio_to_others(rates, at):.2f} x the median of the others'
  )


def ratio_to_others(values: Sequence[float], index: int) -> float:
  """Returns the ratio of a value to the median of the other values; 1 without others."""
  others = [*values[:index], *values[index + 1 :]]
  return values[index] / max(statistics.median(others), 1e-9) if others else 1.0


def number_in(values: Mapping[str, object], name: str) -> float:
  """Returns a number from a heartbeat, which is untrusted; 0 if it is missing or not a positive number."""
  value = values.get(name)
  return float(value) if isinstance(value, int | float) and 0 < value < 1e12 else 0.0


def _life(alive: str, beat: Heartbeat, now: float) -> str:
  who, when = f'process {beat.pid} on {beat.host}', _ago(beat.time, now)
  if alive == 'ended':
    return f'ended ({beat.ended}), {when}'
  if alive == 'dead':
    return f'dead: {who} has disappeared; its last sign of life was {when}'
  doing = ACTIVITIES.get(beat.doing, beat.doing)
  if beat.doing_for >= 1:  # Shorter times are not shown. They say little, because steps and waits for input alternate.
    doing += f' for {duration(beat.doing_for)}'
  if alive == 'silent':
    return f'silent: {who} exists, but gives no sign of life; the last was {when}: {doing}'
  return f'alive: {who}, {doing} ({when})'


def _progress(beat: Heartbeat, *, is_running: bool) -> str:
  text = f'step {beat.step} of {beat.total_steps}'
  if is_running and beat.rate > 0:
    text += f', {short_number(beat.rate)} step/s'
    left = max(beat.total_steps - beat.step, 0) / beat.rate
    text += f', {duration(left)} left without evaluations and saves'
  return text


def _ago(then: float, now: float) -> str:
  return f'{duration(max(now - then, 0.0))} ago'
