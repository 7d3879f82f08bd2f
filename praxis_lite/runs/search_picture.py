"""Draws the result of a search: for each field, its importance, and the results of trials over its value."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.runs.search import SearchRange, Trial

_WIDTH, _HEIGHT, _LEFT, _EDGE, _GAP = 640, 150, 70, 20, 50
_COLORS = {'complete': '#2563eb', 'pruned': '#9ca3af'}


def draw_search(trials: Sequence[Trial], ranges: Sequence[SearchRange], shares: Mapping[str, float], sign: int) -> str:
  """Returns an SVG with a panel for each field, in the order of `shares`.

  Args:
    trials, ranges: the trials and the ranges of the search; failed trials are left out.
    shares: the importance of each field, as a share of 1.
    sign: 1 if lower values of the metric are better, else -1; results of trials are multiplied by it.
  """
  drawn = [trial for trial in trials if trial.reached is not None and trial.state in _COLORS]
  reached = sorted(trial.reached or 0.0 for trial in drawn) or [0.0]  # The smallest result is the best.
  # Without a limit, a trial that has diverged would hide the differences between all others.
  worst = min(reached[-1], reached[0] + 4 * (reached[-1 - len(reached) // 4] - reached[0]))
  low, high = sorted((sign * reached[0], sign * worst))
  parts = []
  for i, path in enumerate(shares):
    given = next(each for each in ranges if each.path == path)
    top = _EDGE + i * (_HEIGHT + _GAP)
    title = f'{html.escape(path)}: {shares[path]:.0%}'
    parts.append(f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{title}</text>')
    length = shares[path] * (_WIDTH - _LEFT - _EDGE)
    parts.append(f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="6" fill="#d97706"/>')
    bottom = top + _HEIGHT - 30
    for value, anchor in ((low, bottom), (high, top + 18)):
      parts.append(f'<text x="{_LEFT - 8}" y="{anchor + 4}" text-anchor="end">{value:.4g}</text>')
    for share, label in _ticks(given):
      at = _LEFT + share * (_WIDTH - _LEFT - _EDGE)
      parts.append(f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{html.escape(label)}</text>')
    for trial in drawn:
      value = sign * (trial.reached or 0.0)
      x = _LEFT + _place(given, trial.values[path]) * (_WIDTH - _LEFT - _EDGE)
      height = (min(max(value, low), high) - low) / (high - low) if high > low else 0.5
      circle = f'<circle cx="{x:.1f}" cy="{bottom - height * (bottom - top - 18):.1f}" r="4" fill-opacity="0.7"'
      told = html.escape(f'{trial.values[path]}: {value:.5g} ({trial.state})')
      parts.append(f'{circle} fill="{_COLORS[trial.state]}"><title>{told}</title></circle>')
  height = _EDGE + len(shares) * (_HEIGHT + _GAP)
  box = f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12"'
  background = f'<rect width="{_WIDTH}" height="{height}" fill="white"/>'
  return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{background}\n' + '\n'.join(parts) + '\n</svg>\n'


def _place(given: SearchRange, value: Any) -> float:
  """Returns the position of a value in its range, from 0 to 1."""
  if given.choices:
    return (given.choices.index(str(value)) + 0.5) / len(given.choices)
  low, high, at = given.low, given.high, float(value)
  if given.kind in ('log', 'log_int'):
    low, high, at = math.log(low), math.log(high), math.log(at)
  return (at - low) / (high - low)


def _ticks(given: SearchRange) -> list[tuple[float, str]]:
  if given.choices:
    return [(_place(given, choice), choice) for choice in given.choices]
  return [(0.0, f'{given.low:g}'), (1.0, f'{given.high:g}')]
