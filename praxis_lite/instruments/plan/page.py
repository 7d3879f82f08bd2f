"""A plan as one self-contained HTML page: memory, the timeline of a step, the roofline, and collectives."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.explain.page import fill_page, write_file
from praxis_lite.instruments.plan.cost import Communication, Operation, Span
from praxis_lite.instruments.plan.planning import Plan
from praxis_lite.instruments.plan.report import chips_text, mode_text

# The operation that fills an array part by part in a loop, and what to call such an array.
_FILLED_BY, _KEPT = 'dynamic_update_slice', 'kept in each round of a loop'
_SCRIPTS = ('memory', 'timeline', 'roofline', 'tables', 'plan')


def write_plan_page(path: str, plan: Plan, title: str) -> pathlib.Path:
  """Writes the page to the file `path` and returns its path. Raises UserError if the file cannot be written.

  Creates missing parent directories. `title` says what was planned.
  """
  return write_file(path, render_plan_page(plan, title))


def render_plan_page(plan: Plan, title: str) -> str:
  """Returns the page as HTML."""
  return fill_page('praxis_lite.instruments.plan', f'{title}: plan', page_data(plan, title), 'plan', _SCRIPTS)


def page_data(plan: Plan, title: str) -> dict[str, object]:
  """Returns the data of the page, ready for JSON. Times are in seconds; figures are for one device."""
  memory, cost, target = plan.memory, plan.cost, plan.topology.target
  return {
    'title': title,
    'headline': _headline(plan),
    'notes': list(plan.notes),
    'limits': cost.seconds_by_limit(target),
    'chip': {
      'name': target.name,
      'peaks': {dtype: target.peak(dtype) for dtype in target.peaks},
      'bandwidth': target.device_bandwidth,
      'link': target.link,
      'network': target.network,
      'source': target.source,
      'efficiency': dataclasses.asdict(target.efficiency),
    },
    'memory': {
      'capacity': memory.capacity,
      'peak': memory.peak,
      'always': memory.peak - memory.temporaries,
      'kinds': memory.bytes_by_kind(),
      'leaves': list(_leaves(plan)),
    },
    'operations': [_operation(op, plan) for op in cost.operations],
    'collectives': [dataclasses.asdict(c) for c in cost.collectives],
    'schedule': _schedule(cost.schedule, _places(cost.operations, cost.collectives), memory.over_time),
  }


def _headline(plan: Plan) -> dict[str, object]:
  work = plan.work
  return {
    'model': plan.name,
    'parameters': work.parameters,
    'active': work.active_parameters,
    'topology': plan.topology.name,
    'chips': chips_text(plan.topology),
    'numChips': plan.topology.num_chips,
    'mesh': format_mesh(plan.mesh),
    'mode': plan.mode,
    'modeText': mode_text(plan.mode, plan.topology, plan.compile_seconds, plan.is_cached),
    'fits': plan.fits,
    'refused': plan.is_refused,
    'seconds': plan.step_seconds,
    'isTimeKnown': plan.is_time_known,
    'range': plan.seconds_range,
    'tokens': work.tokens,
    'tokensPerSecond': plan.tokens_per_second,
    'mfu': plan.mfu,
    'causalMfu': plan.causal_mfu,
    'bottleneck': plan.bottleneck,
  }


def _leaves(plan: Plan) -> Iterator[list[object]]:
  """Yields the content of memory at the peak, as [kind, layer, phase, name, bytes, description]."""
  memory, inputs = plan.memory, 0
  for array in memory.state.arrays:
    inputs += array.bytes if array.kind == 'inputs' else 0
    yield [array.kind, array.layer, '', array.name, array.bytes, array.shape]
  if unused := inputs - memory.bytes_by_kind().get('inputs', 0):
    yield ['inputs', '', '', 'not used by the step', -unused, '']
  for live in memory.live:
    for buffer in live.buffers:
      times = f', {buffer.count} of them' if buffer.count > 1 else ''
      name = _KEPT if buffer.operation == _FILLED_BY else buffer.operation or buffer.shape
      yield [live.kind, live.layer, live.phase, name, buffer.bytes, f'{buffer.shape}{times}']
    if not live.buffers:
      yield [live.kind, live.layer, live.phase, live.kind, live.bytes, live.largest]
  if memory.code:
    yield ['program', '', '', 'program', memory.code, '']


def _operation(op: Operation, plan: Plan) -> list[object]:
  limit = op.limit(plan.topology.target)
  return [op.name, op.layer, op.phase, op.opcode, op.count, op.flops, op.bytes, op.seconds, limit]


def _places(operations: Iterable[Operation], collectives: Iterable[Communication]) -> dict[str, int]:
  """Returns an index by name: 0, 1, ... for operations, and -1, -2, ... for collectives."""
  places = {c.name: -1 - i for i, c in enumerate(collectives)}
  return places | {op.name: i for i, op in enumerate(operations)}


def _schedule(spans: Sequence[Span], places: Mapping[str, int], live: Mapping[str, int]) -> list[list[object]]:
  """Returns a row for each span: [index or name, start, end, live bytes], and for a loop [..., iterations, rows]."""
  found: list[list[object]] = []
  for span in spans:
    row: list[object] = [places.get(span.name, span.name), span.start, span.end, live.get(span.name, 0)]
    found.append([*row, span.rounds, _schedule(span.inside, places, live)] if span.inside else row)
  return found
