"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.explain.explanation import format_bytes, format_mesh
from praxis_lite.plan.cost import Communication
from praxis_lite.plan.planning import Plan
from praxis_lite.plan.why_text import format_why

_MOST_ROWS = 8


def format_plan(plan: Plan, *, every_cause: bool = False) -> str:
  """Returns what a plan says: whether it fits, memory, time, communication and why, and what is uncertain.

  Args:
    plan: the plan.
    every_cause: the cause of each collective, not of the kinds of them; see `format_why`.
  """
  topology, work = plan.topology, plan.work
  active = '' if work.active_parameters == work.parameters else f' ({work.active_parameters:,} active for each token)'
  rows = [
    ('model', f'{plan.name}: {work.parameters:,} parameters{active}'),
    ('topology', f'{topology.name}: {_chips(plan)}'),
    ('mesh', format_mesh(plan.mesh)),
    ('mode', _mode(plan)),
    ('fits' if plan.fits else 'does not fit', _fits(plan)),
    ('step', _time(plan)),
    ('model FLOPs', _mfu(plan)),
    ('bottleneck', plan.bottleneck),
  ]
  width = max(len(name) for name, _ in rows)
  sections = ['\n'.join(f'{name:<{width}}  {text}' for name, text in rows), _memory_table(plan), _time_table(plan)]
  if plan.cost.collectives:
    sections.append(_collectives_table(plan))
  sections += [why] if (why := format_why(plan, every_cause)) else []
  sections += ['\n'.join(f'note: {note}' for note in plan.notes)] if plan.notes else []
  return '\n\n'.join(sections)


def _chips(plan: Plan) -> str:
  topology, target = plan.topology, plan.topology.target
  count, name = topology.num_chips, target.cuda.name if target.cuda else target.name
  if target.kind == 'cpu':
    return f'{count:,} simulated devices'
  plural = 's' if count > 1 else ''
  if target.kind == 'gpu':
    return f'{count:,} x {name}, fast links among {topology.shape[1]:,}'
  rings = ', '.join('ring' if topology.wraps(i) else 'line' for i in range(target.torus))
  slices = f', {topology.slices} slices' if topology.slices > 1 else ''
  return f'{count:,} TPU {name} chip{plural}{slices}, torus of {rings}'


def _mode(plan: Plan) -> str:
  if plan.mode == 'analytic':
    return 'analytic: formulas, no compiler'
  when = ', by an earlier plan' if plan.is_cached else ''
  return f'compiled for {plan.topology.target.name} in {plan.compile_seconds:.0f} s{when}'


def _fits(plan: Plan) -> str:
  memory = plan.memory
  if plan.is_refused:
    return f'the compiler needs more than {format_bytes(memory.capacity)} on each device; see the note'
  of = f'{format_bytes(memory.peak)} of {format_bytes(memory.capacity)} on each device'
  return f'{of}, {format_bytes(abs(memory.room))} {"left" if plan.fits else "too much"}'


def _time(plan: Plan) -> str:
  tokens = plan.tokens_per_second
  speed = '' if tokens is None else f', {tokens:,.0f} tokens/s, {tokens / plan.topology.num_chips:,.0f} on each chip'
  return f'{format_seconds(plan.step_seconds)}{speed}'


def _mfu(plan: Plan) -> str:
  if plan.work.tokens is None:
    return f'{plan.work.flops:.4g} a step, MFU {plan.mfu:.1%}'
  whole, causal = plan.work.flops / plan.work.tokens, plan.work.causal_flops / plan.work.tokens
  return f'MFU {plan.mfu:.1%} by 6N + 12LdS = {whole:.4g} a token, {plan.causal_mfu:.1%} by 6N + 6LdS = {causal:.4g}'


def _memory_table(plan: Plan) -> str:
  kinds = plan.memory.by_kind()
  rows = [('memory on each device', 'bytes', 'share')]
  rows += [(name, format_bytes(size), f'{size / plan.memory.peak:.1%}') for name, size in kinds.items() if size > 0]
  live = [entry for entry in plan.memory.live if entry.bytes][:_MOST_ROWS]
  text = _table(rows, right=(1, 2))
  if not live or plan.mode == 'analytic':
    return text
  at_peak = [('live at the peak', 'layer', 'phase', 'bytes', 'largest')]
  at_peak += [(e.kind, e.layer or '-', e.phase, format_bytes(e.bytes), e.largest) for e in live]
  return f'{text}\n\n{_table(at_peak, right=(3,))}'


def _time_table(plan: Plan) -> str:
  cost = plan.cost
  limits = cost.seconds_by_limit(plan.topology.target)
  rows = [('time of a step', 'seconds', 'share')]
  rows += [(n, format_seconds(s), f'{s / cost.seconds:.1%}') for n, s in limits.items() if s > 0]
  layers: dict[str, list[float]] = {}
  for op in cost.operations:
    entry = layers.setdefault(op.layer, [0.0, 0.0, 0.0])
    entry[0] += op.count * op.seconds
    entry[1] += op.count * op.flops
  for c in cost.collectives:
    layers.setdefault(c.layer, [0.0, 0.0, 0.0])[2] += c.count * c.exposed
  ordered = sorted(layers.items(), key=lambda item: -item[1][0] - item[1][2])[:_MOST_ROWS]
  by_layer = [('layer', 'operations', 'FLOPs', 'exposed communication')]
  by_layer += [(n or '(no layer)', format_seconds(s), f'{f:.3g}', format_seconds(e)) for n, (s, f, e) in ordered]
  return f'{_table(rows, right=(1, 2))}\n\n{_table(by_layer, right=(1, 2, 3))}'


def _collectives_table(plan: Plan) -> str:
  groups: dict[tuple[str, ...], list[Communication]] = {}
  for c in plan.cost.collectives:
    groups.setdefault((c.kind, '+'.join(c.axes) or '-', c.layer or '-', c.phase), []).append(c)

  def total(found: Sequence[Communication], what: str) -> float:
    return sum(c.count * getattr(c, what) for c in found)

  ordered = sorted(groups.items(), key=lambda item: -total(item[1], 'seconds'))
  rows: list[tuple[str, ...]] = [
    ('collective', 'over', 'layer', 'phase', 'count', 'fast links', 'network', 'seconds', 'exposed')
  ]
  for key, found in ordered[:_MOST_ROWS]:
    sent = [format_bytes(total(found, f'{kind}_bytes')) for kind in ('fast', 'network')]
    times = [format_seconds(total(found, what)) for what in ('seconds', 'exposed')]
    rows.append((*key, str(sum(c.count for c in found)), *sent, *times))
  lines = [_table(rows, right=(4, 5, 6, 7, 8))]
  if len(ordered) > _MOST_ROWS:
    rest = [c for _, found in ordered[_MOST_ROWS:] for c in found]
    lines.append(f'and {len(ordered) - _MOST_ROWS} more, {format_seconds(total(rest, "seconds"))}')
  return '\n'.join(lines)


def format_seconds(seconds: float) -> str:
  """'1.23 s', '45.6 ms', '7.8 us'."""
  for factor, unit in ((1.0, 's'), (1e3, 'ms')):
    if seconds * factor >= 1:
      return f'{seconds * factor:.3g} {unit}'
  return f'{seconds * 1e6:.3g} us' if seconds else '0 s'


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [
    '  '.join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
    for row in rows
  ]
  return '\n'.join([lines[0], '-' * max(map(len, lines)), *lines[1:]])
