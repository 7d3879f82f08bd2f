"""The report as a table for a terminal: each array with its split, its cost, and why."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.explain.explanation import Explanation, format_mesh
from praxis_lite.explain.parameter_table import format_bytes, format_shape, format_spec
from praxis_lite.explain.report import ShardingReport

_HEADER = ('array', 'shape', 'dtype', 'split', 'each device', 'padding', 'copies', 'per device', 'why')
_RIGHT = {6, 7}


def format_report(report: ShardingReport) -> str:
  """Returns the tables of parameters, optimizer slots, activations and inputs, with totals."""
  sections = [f'mesh {format_mesh(report.mesh_sizes)}']
  for title, rows in (
    ('Parameters', report.variables),
    ('Optimizer slots and averages', report.slots),
    ('Activations', report.activations),
    ('Inputs', report.inputs),
  ):
    if rows:
      sections.append(f'{title}: {_total(rows, adds_up=title != "Activations")}\n{format_explanations(rows)}')
  if not report.inputs:
    sections.append('Activations and inputs: not known, as the shapes of a batch take its data to know')
  return '\n\n'.join(sections)


def format_explanations(rows: Sequence[Explanation]) -> str:
  """Returns the rows as aligned text under a header."""
  body = [
    (
      e.path,
      format_shape(e.shape),
      e.dtype.name,
      format_spec(e.spec) if e.constrained else 'free',
      format_shape(e.local_shape) if e.constrained else '?',
      ', '.join(f'+{d.padding}' if d.padding else '-' for d in e.dims) if e.wasted_bytes else '-',
      f'x{e.replication}' if e.constrained else '?',
      ('' if e.constrained else '<= ') + format_bytes(e.bytes_per_device),
      e.why,
    )
    for e in rows
  ]
  widths = [max(len(line[i]) for line in (_HEADER, *body)) for i in range(len(_HEADER))]

  def aligned(line: Sequence[str]) -> str:
    return '  '.join(c.rjust(w) if i in _RIGHT else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()

  lines = [aligned(line) for line in (_HEADER, *body)]
  return '\n'.join([lines[0], '-' * min(max(map(len, lines)), 160), *lines[1:]])


def _total(rows: Sequence[Explanation], adds_up: bool) -> str:
  if not adds_up:
    return f'{len(rows)}, of one layer each where layers repeat'
  on_each = format_bytes(sum(e.bytes_per_device for e in rows))
  return f'{format_bytes(sum(e.bytes for e in rows))}, {on_each} on each device'
