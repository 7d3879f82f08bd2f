"""Compares two plans: memory, time and communication side by side, which is better, and why."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping

from praxis_lite.common.figures import format_bytes, format_seconds
from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.plan.planning import Plan
from praxis_lite.instruments.plan.report import format_table

_LEAST_SHARE = 0.005  # Kinds of collectives that take less than this share of both steps are not shown.


def format_comparison(first: Plan, second: Plan) -> str:
  """Returns a table with a column for each of two plans, and the verdict."""
  plans = (first, second)
  rows: list[tuple[str, ...]] = [('', 'first', 'second', 'second - first')]

  def row(name: str, values: Iterable[float], written: Callable[[float], str]) -> None:
    a, b = values
    if a or b:
      rows.append((name, written(a), written(b), ('-' if b < a else '+') + written(abs(b - a)) if a != b else 'same'))

  def text(name: str, what: Callable[[Plan], str]) -> None:
    rows.append((name, *map(what, plans), ''))

  text('model', lambda plan: plan.name)
  text('chips', lambda plan: f'{plan.topology.name}')
  text('mesh', lambda plan: format_mesh(plan.mesh))
  text('mode', lambda plan: plan.mode)
  text('fits', lambda plan: 'yes' if plan.fits else 'no')
  row('memory', [plan.memory.peak for plan in plans], format_bytes)
  for kind in dict.fromkeys(kind for plan in plans for kind in plan.memory.bytes_by_kind()):
    row(f'  {kind}', [plan.memory.bytes_by_kind().get(kind, 0) for plan in plans], _signed_bytes)
  if not all(plan.is_time_known for plan in plans):
    text('step', lambda plan: format_seconds(plan.step_seconds) if plan.is_time_known else 'not known')
    return f'{format_table(rows, right=(1, 2, 3))}\n\n{verdict(first, second)}'
  row('step', [plan.step_seconds for plan in plans], format_seconds)
  for limit, (name, _) in _LIMITS.items():
    row(f'  {name}', [_limits(plan)[limit] for plan in plans], format_seconds)
  row('tokens/s', [plan.tokens_per_second or 0.0 for plan in plans], '{:,.0f}'.format)
  row('MFU', [plan.mfu for plan in plans], '{:.1%}'.format)
  found = [_collectives(plan) for plan in plans]
  for key in sorted({*found[0], *found[1]}, key=lambda key: -max(seconds.get(key, 0.0) for seconds in found)):
    if any(seconds.get(key, 0.0) > _LEAST_SHARE * plan.step_seconds for seconds, plan in zip(found, plans)):
      row(f'  {key}', [seconds.get(key, 0.0) for seconds in found], format_seconds)
  return f'{format_table(rows, right=(1, 2, 3))}\n\n{verdict(first, second)}'


def verdict(first: Plan, second: Plan) -> str:
  """Returns which of two plans is better, and why, in a sentence or two."""
  plans, names = (first, second), ('the first', 'the second')
  if first.fits != second.fits:
    better, other = (0, 1) if first.fits else (1, 0)
    over = -plans[other].memory.room
    by = f', by {format_bytes(over)}' if over > 0 else ''
    return f'{names[better]} is better: {names[other]} does not fit{by}'
  if not (first.is_time_known and second.is_time_known):
    return 'which is faster is not known, because how often some loops run depends on data; see the notes'
  # Compares chip time for equal work, because models and numbers of chips may differ.
  chips = (first.topology.num_chips, second.topology.num_chips / second.work.ratio_to(first.work))
  costs = [plan.step_seconds * scale for plan, scale in zip(plans, chips)]
  better, other = (0, 1) if costs[0] <= costs[1] else (1, 0)
  unit = first.work.unit(second.work)
  if max(costs) <= 1.01 * min(costs):
    return f'both take the same time of chips for the same {unit}, within 1 %'
  of_both = [{name: scale * t for name, t in _limits(plan).items()} for plan, scale in zip(plans, chips)]
  saved = {name: of_both[other][name] - of_both[better][name] for name in of_both[0]}
  most, worse = max(saved, key=saved.__getitem__), min(saved, key=saved.__getitem__)
  text = f'{names[better]} is better: {1 - min(costs) / max(costs):.0%} less time of chips for the same {unit}'
  text += f', most by less {_LIMITS[most][1]}'
  if most == 'communication':
    text += _most_waiting(plans[better], plans[other])
  return f'{text}; it has more {_LIMITS[worse][1]}' if saved[worse] < -0.05 * max(costs) else text


# For each kind of limit (see `Operation.limit`), how the table and the verdict name it.
_LIMITS = {
  'compute': ('products', 'time in products'),
  'memory': ('limited by memory', 'reading and writing of memory'),
  'overhead': ('small operations', 'overhead of small operations'),
  'communication': ('exposed communication', 'exposed communication'),
}


def _most_waiting(won: Plan, lost: Plan) -> str:
  """Returns text about the kind of collectives with which the better plan saves the most exposed time.

  The text names the kind, and its exposed time in both plans. It is '' if the times are equal.
  """
  before, after = _collectives(lost), _collectives(won)
  most = max(before, key=lambda key: before[key] - after.get(key, 0.0), default='')
  times = [format_seconds(seconds.get(most, 0.0)) for seconds in (before, after)]
  return f' ({most}: {" against ".join(times)})' if most and times[0] != times[1] else ''


def _limits(plan: Plan) -> Mapping[str, float]:
  return plan.cost.seconds_by_limit(plan.topology.target)


def _collectives(plan: Plan) -> Mapping[str, float]:
  """Returns exposed seconds by kind of collective and mesh axes."""
  found: dict[str, float] = collections.defaultdict(float)
  for c in plan.cost.collectives:
    over = f' over {"+".join(c.axes)}' if c.axes else ''
    found[f'{c.kind}{over}'] += c.count * c.exposed
  return found


def _signed_bytes(count: float) -> str:
  return f'-{format_bytes(-count)}' if count < 0 else format_bytes(count)
