"""A plan as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from praxis_lite.common.figures import format_bytes, format_seconds, number_of
from praxis_lite.instruments.explain.explanation import align_columns, format_mesh
from praxis_lite.instruments.plan.compilers import missing_compiler
from praxis_lite.instruments.plan.cost import Cause, Communication
from praxis_lite.instruments.plan.planning import Plan, ProgramPlan
from praxis_lite.instruments.plan.targets import find_target
from praxis_lite.instruments.plan.topology import Topology

_MOST_ROWS = 8
_MOST_SURPRISES = 3
_NEGLIGIBLE = 1e-3  # The short form omits surprises that send less than this share of all bytes.
_WIDTH, _BAR, _NARROWEST = 100, 40, 12  # Widths of a line, a bar and the narrowest shortened column, in characters.


def format_plan(plan: Plan, *, every_cause: bool = False) -> str:
  """Returns a plan as text: whether it fits, memory, time, communication and its causes, and what is uncertain.

  Args:
    plan: the plan.
    every_cause: lists each collective with its cause, instead of a line for each kind; see `format_why`.
  """
  topology, work = plan.topology, plan.work
  active = '' if work.active_parameters == work.parameters else f' ({work.active_parameters:,} active for each token)'
  rows = [
    ('model', f'{plan.name}: {number_of(work.parameters, "parameter")}{active}'),
    ('topology', f'{topology.name}: {chips_text(topology)}'),
    ('mesh', format_mesh(plan.mesh)),
    *(('pipeline', line) for line in plan.pipelines),
    ('mode', mode_text(plan)),
    ('fits' if plan.fits else 'does not fit', _fits(plan)),
    ('step', _time(plan)),
    ('model FLOPs', _mfu(plan)),
    ('bottleneck', plan.bottleneck if plan.is_time_known else 'not known'),
  ]
  sections = [format_head(rows), _memory_table(plan), _time_table(plan)]
  sections += [_collectives_table(plan) if plan.collectives else '', format_why(plan, every_cause)]
  sections += ['\n'.join(wrap_line(str(slow), 6) for slow in plan.slow_paths)]
  sections += ['\n'.join(wrap_line(f'note: {note}', 6) for note in plan.notes)]
  return '\n\n'.join(filter(None, sections))


def format_head(rows: Sequence[tuple[str, str]]) -> str:
  """Returns rows (name, text) as lines, with the names in a column and the texts wrapped."""
  width = max(len(name) for name, _ in rows)
  return '\n'.join(wrap_line(f'{name:<{width}}  {text}', width + 2) for name, text in rows)


def chips_text(topology: Topology) -> str:
  target = topology.target
  count, name = topology.num_chips, target.cuda.name if target.cuda else target.name
  if target.kind == 'cpu':
    return number_of(count, 'simulated device')
  plural = 's' if count > 1 else ''
  network = ''
  if target.network != find_target(target.name).network:
    network = f', {8e-9 * target.network * target.chips_per_host:,.0f} Gbit/s from each host'
  if target.kind == 'gpu':
    return f'{count:,} x {name}, fast links among {topology.shape[1]:,}{network}'
  rings = ', '.join('ring' if topology.wraps(i) else 'line' for i in range(target.torus))
  slices = f', {topology.slices} slices' if topology.slices > 1 else ''
  return f'{count:,} TPU {name} chip{plural}{slices}, torus of {rings}{network}'


def mode_text(plan: ProgramPlan) -> str:
  if plan.mode == 'analytic':
    missing = f' ({plan.failure})' if plan.failure and plan.failure == missing_compiler(plan.topology) else ''
    return f'analytic: formulas, no compiler{missing}'
  when = ', by an earlier plan' if plan.is_cached else ''
  return f'compiled for {plan.topology.target.name} in {plan.compile_seconds:.0f} s{when}'


def _fits(plan: Plan) -> str:
  memory = plan.memory
  if plan.is_refused and memory.room >= 0:  # The compiler did not say how much memory it needs.
    return f'the compiler needs more than {format_bytes(memory.capacity)} on each device; see the note'
  of = f'{format_bytes(memory.peak)} of {format_bytes(memory.capacity)} on each device'
  return f'{of}, {format_bytes(abs(memory.room))} {"left" if plan.fits else "too much"}'


def _time(plan: Plan) -> str:
  if not plan.is_time_known:
    return 'not known: how often some loops run depends on data; see the notes'
  tokens, limits = plan.tokens_per_second, plan.seconds_range
  speed = '' if tokens is None else f', {tokens:,.0f} tokens/s, {tokens / plan.topology.num_chips:,.0f} on each chip'
  near = f'; by the errors of earlier plans {format_range(limits)}' if limits else ''
  return f'{format_seconds(plan.step_seconds)}{speed}{near}'


def format_range(seconds: tuple[float, float]) -> str:
  """Returns a range of times, such as '2.13 s to 3.41 s'."""
  return ' to '.join(map(format_seconds, seconds))


def _mfu(plan: Plan) -> str:
  used, used_causal = (f'MFU {share:.1%} by ' if plan.is_time_known else '' for share in (plan.mfu, plan.causal_mfu))
  if plan.work.tokens is None or not plan.work.is_by_token:
    return f'{plan.work.flops:.4g} a step{f", {used[:-4]}" if used else ""}'
  whole, causal = plan.work.flops / plan.work.tokens, plan.work.causal_flops / plan.work.tokens
  return f'{used}6N + 12LdS = {whole:.3g} a token, {used_causal.removeprefix("MFU ")}6N + 6LdS = {causal:.3g}'


def _memory_table(plan: Plan) -> str:
  memory = plan.memory
  rows = [('memory on each device', f'of {format_bytes(memory.capacity)}'.ljust(_BAR), 'bytes', 'of peak')]
  whole, below = max(memory.capacity, memory.peak), 0
  for name, size in memory.bytes_by_kind().items():
    if size < 0:  # Negative if the schedule counts some memory twice.
      rows.append(('used again', '', f'-{format_bytes(-size)}', f'{size / memory.peak:.1%}'))
    elif size:
      rows.append((name, _bar(below, size, whole), format_bytes(size), f'{size / memory.peak:.1%}'))
    below += size
  if plan.fits:
    rows.append(('left', _bar(memory.peak, memory.room, whole, '.'), format_bytes(memory.room), ''))
  elif memory.room < 0:
    rows.append(('too much', _bar(memory.capacity, -memory.room, whole, '!'), format_bytes(-memory.room), ''))
  text = format_table(rows, right=(2, 3))
  live = memory.live[:_MOST_ROWS]
  if not live:
    return text
  at_peak = [('live at the peak', 'layer', 'phase', 'bytes', 'largest')]
  at_peak += [(e.kind, e.layer or '-', e.phase, format_bytes(e.bytes), e.largest) for e in live]
  return f'{text}\n\n{format_table(at_peak, right=(3,), cut=1)}'


def _time_table(plan: Plan) -> str:
  cost, below = plan.cost, 0.0
  rows = [('time of a step', ''.ljust(_BAR), 'seconds', 'share')]
  for name, seconds in cost.seconds_by_limit(plan.topology.target).items():
    if seconds > 0:
      rows.append((name, _bar(below, seconds, cost.seconds), format_seconds(seconds), f'{seconds / cost.seconds:.1%}'))
      below += seconds
  layers: dict[str, list[float]] = {}
  for op in cost.operations:
    entry = layers.setdefault(op.layer, [0.0, 0.0, 0.0])
    entry[0] += op.count * op.seconds
    entry[1] += op.count * op.flops
  for c in cost.collectives:
    layers.setdefault(c.layer, [0.0, 0.0, 0.0])[2] += c.count * c.exposed
  ordered = sorted(layers.items(), key=lambda item: -item[1][0] - item[1][2])[:_MOST_ROWS]
  longest = max((seconds + exposed for _, (seconds, _, exposed) in ordered), default=1.0)
  by_layer = [('layer', f'{"=" * 3} operations, {"~" * 3} waits', 'FLOPs', 'operations', 'waits')]
  for name, (seconds, flops, exposed) in ordered:
    bar = _bar(0, seconds, longest, '=', 24) + _bar(seconds, exposed, longest, '~', 24).lstrip()
    by_layer.append((name or '(no layer)', bar, f'{flops:.3g}', format_seconds(seconds), format_seconds(exposed)))
  return f'{format_table(rows, right=(2, 3))}\n\n{format_table(by_layer, right=(2, 3, 4), cut=0)}'


def _bar(below: float, size: float, whole: float, letter: str = '#', width: int = _BAR) -> str:
  """Returns a bar that marks `below` to `below + size` of `whole`, with at least one character if size > 0."""
  start, end = (round(width * value / whole) for value in (below, below + size))
  return ' ' * min(start, width - 1) + letter * max(end - start, size > 0)


def _collectives_table(plan: Plan) -> str:
  every = {axis for axis, size in plan.mesh.items() if size > 1}

  def row(c: Communication) -> tuple[str, ...]:
    over = 'all axes' if len(c.axes) > 1 and every == {*c.axes} else '+'.join(c.axes) or '-'
    return c.kind, over, c.layer or '-', c.phase

  ordered = _groups_of(plan.collectives, row, 'seconds')
  rows: list[tuple[str, ...]] = [('collective', 'over', 'layer', 'phase', 'sent', 'seconds', 'exposed')]
  for key, found in ordered[:_MOST_ROWS]:
    times = [format_seconds(_total(found, what)) for what in ('seconds', 'exposed')]
    mark = '*' if _total(found, 'network_bytes') else ' '
    rows.append((*key, f'{format_bytes(_total(found, "sent_bytes"))}{mark}', *times))
  lines = [format_table(rows, right=(4, 5, 6), cut=2)]
  if len(ordered) > _MOST_ROWS:
    rest = [c for _, found in ordered[_MOST_ROWS:] for c in found]
    lines.append(f'and {len(ordered) - _MOST_ROWS} more, {format_seconds(_total(rest, "seconds"))}')
  sent = [format_bytes(_total(plan.collectives, f'{kind}_bytes')) for kind in ('fast', 'network')]
  lines.append(f'each device sends {sent[0]} over fast links and {sent[1]} over the network (*)')
  return '\n'.join(lines)


def _groups_of(
  collectives: Iterable[Communication], key: Callable[[Communication], tuple[str, ...]], what: str = 'sent_bytes'
) -> list[tuple[tuple[str, ...], list[Communication]]]:
  """Returns collectives grouped by a key; the group with the largest total of a field comes first."""
  groups: dict[tuple[str, ...], list[Communication]] = {}
  for c in collectives:
    groups.setdefault(key(c), []).append(c)
  return sorted(groups.items(), key=lambda item: -_total(item[1], what))


def _total(found: Iterable[Communication], what: str = 'sent_bytes') -> float:
  return sum(c.count * getattr(c, what) for c in found)


# ---------------------------------------------------------------- why it communicates


def format_why(plan: Plan, every: bool = False) -> str:
  """Returns the causes of a plan's collectives as text: expected ones by kind, then surprises and their remedies.

  Args:
    plan: the plan of a step. Only a compiled step has known causes. Without them, the text is '', or says so if
      `every`.
    every: lists each collective separately, and includes surprises of negligible cost.
  """
  if plan.mode != 'compiled':
    return 'why it communicates is read from the compiled program, and this step was not compiled' if every else ''
  known = [c for c in plan.collectives if c.cause is not None]
  sections = [_expected_table(known, every)] if any(c.expected for c in known) else []
  surprises = _surprises(plan, every)
  shown = surprises if every else surprises[:_MOST_SURPRISES]
  more = f'; {len(surprises) - len(shown)} more with --why' if len(shown) < len(surprises) else ''
  sections.append('\n'.join([f'surprises: {len(surprises) or "none"}{more}', *shown]))
  return '\n\n'.join(sections)


def _expected_table(known: Sequence[Communication], every: bool) -> str:
  def row(c: Communication) -> tuple[str, ...]:
    return str(c.cause), '+'.join(c.axes) or '-', *((c.kind, c.layer or '-', c.phase) if every else ())

  expected = [c for c in known if c.expected]
  head = ['why it communicates', 'over', *(('collective', 'layer', 'phase') if every else ()), 'sent', 'declared by']
  least = 0.0 if every else _NEGLIGIBLE * _total(expected)
  shown = [(key, found) for key, found in _groups_of(expected, row) if _total(found) > least]
  cells = [(*key, format_bytes(_total(found)), '') for key, found in shown]
  lines = align_columns([head, *cells], right={len(head) - 2})
  left = lines[0].index(head[-1])
  width = None if every else _WIDTH - left
  rows = [f'{line:<{left}}{_declared_by(found, width)}' for line, (_, found) in zip(lines[1:], shown)]
  return '\n'.join([lines[0], '-' * min(max(map(len, rows)), 140), *rows])


def _declared_by(found: Iterable[Communication], width: int | None) -> str:
  """Returns the paths of the fields that declare some collectives; '-' if there are none.

  If `width` is given, only the first path, cut at its beginning, and the number of further ones are returned.
  """
  fields = list(dict.fromkeys(f for c in found if c.cause for f in c.cause.fields))
  if width is None or not fields:
    return ', '.join(fields) or '-'
  more = f', {len(fields) - 1} more' if len(fields) > 1 else ''
  return _ending(fields[0], width - len(more)) + more


def _surprises(plan: Plan, every: bool) -> list[str]:
  """Returns texts of surprises, grouped by remedy; the group that sends most bytes comes first."""
  least = 0.0 if every else _NEGLIGIBLE * plan.cost.communicated_bytes
  surprises = (c for c in plan.collectives if not c.expected)
  groups = _groups_of(surprises, lambda c: (c.cause.reason, c.cause.remedy) if c.cause else ())
  return [*map(_finding, plan.findings), *(_surprise(found) for _, found in groups if _total(found) > least)]


def _finding(cause: Cause) -> str:
  where = ', '.join(cause.layers[:3]) or 'the step'
  return '\n'.join([f'  {cause.reason}: {where}', *_indent_lines(cause.what, cause.remedy)])


def _surprise(found: Sequence[Communication]) -> str:
  most = max(found, key=lambda c: c.count * c.sent_bytes)
  over = f' over {"+".join(most.axes)}' if most.axes else ''
  sent = f'{format_bytes(_total(found))} in {sum(c.count for c in found):.6g} collectives of a step'
  what, remedy = (most.cause.what, most.cause.remedy) if most.cause else ('', '')
  head = f'  {most.cause}: {most.kind}{over} in {most.layer or "the update"} ({most.phase})'
  return '\n'.join([head, *_indent_lines(f'{what}; {sent}', remedy)])


def _indent_lines(*lines: str) -> list[str]:
  return [wrap_line(f'    {line}', 4) for line in lines if line]


# ---------------------------------------------------------------- layout


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int], cut: int | None = None) -> str:
  """Returns rows of cells as a table; the first row is the head, and columns in `right` are aligned to the right.

  If a line would be too long for a terminal, the cells of column `cut` are shortened at their beginning.
  """
  if cut is not None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    others = sum(widths) - widths[cut] + 2 * (len(widths) - 1)
    most = max(_WIDTH - others, _NARROWEST)
    rows = [[_ending(cell, most) if i == cut else cell for i, cell in enumerate(row)] for row in rows]
  lines = align_columns(rows, right)
  return '\n'.join([lines[0], '-' * max(map(len, lines)), *lines[1:]])


def wrap_line(line: str, indent: int) -> str:
  return '\n'.join(textwrap.wrap(line, _WIDTH, subsequent_indent=' ' * indent, break_on_hyphens=False))


def _ending(text: str, width: int) -> str:
  return text if len(text) <= width else f'..{text[len(text) - width + 2 :]}'
