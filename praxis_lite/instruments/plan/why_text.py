"""Formats why a step communicates, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from praxis_lite.common.figures import format_bytes
from praxis_lite.instruments.explain.explanation import align_columns
from praxis_lite.instruments.plan.cause import Cause, Reason
from praxis_lite.instruments.plan.cost import Communication
from praxis_lite.instruments.plan.planning import Plan

_WIDTH = 100
_MOST_SURPRISES = 3
_NEGLIGIBLE = 1e-3  # The short form omits surprises that send less than this share of all bytes.


def format_why(plan: Plan, every: bool = False) -> str:
  """Returns the causes of a plan's collectives as text: expected ones by kind, then surprises and their remedies.

  Args:
    plan: the plan of a step. If it was not compiled, there are no causes: the text says so if `every`, or else is ''.
    every: lists each collective separately, and includes surprises of negligible cost.
  """
  if plan.mode != 'compiled':
    return 'why it communicates is read from the compiled program, and this step was not compiled' if every else ''
  known = [c for c in plan.collectives if c.cause is not None]
  sections = [_expected_table(known, every)] if any(c.expected for c in known) else []
  surprises = _surprises(plan, every)
  shown = surprises if every else surprises[:_MOST_SURPRISES]
  if shown:
    more = f'; {len(surprises) - len(shown)} more with --why' if len(shown) < len(surprises) else ''
    sections.append('\n'.join([f'surprises: {len(surprises)}{more}', *shown]))
  else:
    sections.append('surprises: none')
  return '\n\n'.join(sections)


def _expected_table(known: Sequence[Communication], every: bool) -> str:
  groups: dict[tuple[str, ...], list[Communication]] = {}
  for c in known:
    if c.expected:
      apart = (c.kind, c.layer or '-', c.phase) if every else ()
      groups.setdefault((str(c.cause), '+'.join(c.axes) or '-', *apart), []).append(c)
  head = ['why it communicates', 'over', *(('collective', 'layer', 'phase') if every else ()), 'sent', 'declared by']
  least = 0.0 if every else _NEGLIGIBLE * sum(map(_bytes_sent, groups.values()))
  ordered = sorted(groups.items(), key=lambda item: -_bytes_sent(item[1]))
  shown = [(key, found) for key, found in ordered if _bytes_sent(found) > least]
  lines = align_columns(
    [head, *((*key, format_bytes(_bytes_sent(found)), '') for key, found in shown)], right={len(head) - 2}
  )
  left = lines[0].index(head[-1])
  rows = [
    f'{line:<{left}}{_declared_by(f, None if every else _WIDTH - left)}' for line, (_, f) in zip(lines[1:], shown)
  ]
  return '\n'.join([lines[0], '-' * min(max(map(len, rows)), 140), *rows])


def _declared_by(found: Iterable[Communication], width: int | None) -> str:
  """Returns the fields that declare some collectives. With a `width`, shows only the first one, cut at its start."""
  fields = list(dict.fromkeys(f for c in found if c.cause for f in c.cause.fields))
  if width is None or not fields:
    return ', '.join(fields) or '-'
  more = f', {len(fields) - 1} more' if len(fields) > 1 else ''
  most = width - len(more)
  return (fields[0] if len(fields[0]) <= most else f'..{fields[0][2 - most :]}') + more


def _surprises(plan: Plan, every: bool) -> list[str]:
  """Returns texts of surprises, grouped by remedy; the group that sends most bytes comes first."""
  least = 0.0 if every else _NEGLIGIBLE * plan.cost.communicated_bytes
  groups: dict[tuple[Reason, str], list[Communication]] = {}
  for c in plan.collectives:
    if c.cause is not None and not c.expected:
      groups.setdefault((c.cause.reason, c.cause.remedy), []).append(c)
  ordered = sorted(
    (found for found in groups.values() if _bytes_sent(found) > least), key=lambda found: -_bytes_sent(found)
  )
  return [*map(_finding, plan.findings), *map(_surprise, ordered)]


def _finding(cause: Cause) -> str:
  where = ', '.join(cause.layers[:3]) or 'the step'
  return '\n'.join([f'  {cause.reason}: {where}', *map(_wrap, filter(None, (cause.what, cause.remedy)))])


def _surprise(found: Sequence[Communication]) -> str:
  most = max(found, key=lambda c: c.count * c.sent_bytes)
  cause, times = most.cause, sum(c.count for c in found)
  over = f' over {"+".join(most.axes)}' if most.axes else ''
  head = f'{cause}: {most.kind}{over} in {most.layer or "the update"} ({most.phase})'
  sent = f'{format_bytes(_bytes_sent(found))} in {times:.6g} collectives of a step'
  what, remedy = (cause.what, cause.remedy) if cause else ('', '')
  return '\n'.join(['  ' + head, _wrap(f'{what}; {sent}'), *([_wrap(remedy)] if remedy else [])])


def _wrap(line: str) -> str:
  indent = ' ' * 4
  return '\n'.join(textwrap.wrap(line, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))


def _bytes_sent(found: Iterable[Communication]) -> float:
  return sum(c.count * c.sent_bytes for c in found)
