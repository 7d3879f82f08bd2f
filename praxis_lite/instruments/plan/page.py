"""Plans as self-contained HTML pages.

a step, or decoding   memory, timeline, roofline, and collectives
the cheapest run      a plot of time against money, and a table
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from praxis_lite.common.figures import duration, format_bytes, format_seconds, number_of
from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.explain.page import fill_page, write_file
from praxis_lite.instruments.plan.cheapest import CheapestRun, Option
from praxis_lite.instruments.plan.cheapest_text import (
  format_goal,
  format_money,
  format_reached,
  left_out_lines,
  mark_of,
  most_text,
  recommendation,
  setting_text,
)
from praxis_lite.instruments.plan.cost import Communication, Operation, Span
from praxis_lite.instruments.plan.inference import InferencePlan
from praxis_lite.instruments.plan.planning import Plan, ProgramPlan, bottleneck_of
from praxis_lite.instruments.plan.report import chips_text, mode_text

# The operation that fills an array part by part in a loop, and the name of such an array on the page.
_FILLED_BY, _KEPT = 'dynamic_update_slice', 'kept in each round of a loop'
_PACKAGE = 'praxis_lite.instruments.plan'
_SCRIPTS = ('memory', 'timeline', 'roofline', 'tables', 'plan')


def write_plan_page(path: str, plan: Plan | InferencePlan, title: str, remarks: Sequence[str] = ()) -> pathlib.Path:
  """Writes the page to the file `path` and returns its path. Raises UserError if the file cannot be written.

  `title` says what was planned; the page shows `remarks` next to the plan's notes.
  """
  return write_file(path, render_plan_page(plan, title, remarks))


def render_plan_page(plan: Plan | InferencePlan, title: str, remarks: Sequence[str] = ()) -> str:
  """Returns the page as HTML."""
  data = page_data(plan, title, remarks)
  return fill_page(_PACKAGE, f'{title}: plan', data, 'plan', _SCRIPTS)


def page_data(plan: Plan | InferencePlan, title: str, remarks: Sequence[str] = ()) -> dict[str, object]:
  """Returns the data of the page, ready for JSON. Times are in seconds; figures are for one device."""
  memory, cost, target = plan.memory, plan.cost, plan.topology.target
  return {
    'title': title,
    'headline': _inference_headline(plan) if isinstance(plan, InferencePlan) else _headline(plan),
    'notes': [*plan.notes, *(line for remark in remarks for line in remark.splitlines())],
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
    'collectives': [{**dataclasses.asdict(c), 'phase': _phase(c.phase, plan)} for c in cost.collectives],
    'schedule': _schedule(cost.schedule, _places(cost.operations, cost.collectives), memory.over_time),
  }


def _headline(plan: Plan) -> dict[str, object]:
  work = plan.work
  return {
    **_about(plan),
    'work': 'step',
    'parameters': work.parameters,
    'active': work.active_parameters,
    'range': plan.seconds_range,
    'tokens': work.tokens,
    'tokensPerSecond': plan.tokens_per_second,
    'mfu': plan.mfu,
    'causalMfu': plan.causal_mfu if work.is_by_token else None,
    'bottleneck': plan.bottleneck,
  }


def _inference_headline(plan: InferencePlan) -> dict[str, object]:
  (rows, length, tokens), first, later = plan.requests, plan.first_token_seconds, plan.token_seconds
  factors = plan.factors
  times = [('first token', first, f'{rows * length / first:,.0f} tokens/s read')] if plan.is_time_known else []
  if plan.is_time_known and later is not None:
    least = format_seconds(plan.least_token_seconds)
    times.append(('each later token', later, f'{rows / later:,.0f} tokens/s; at least {least}'))
  caches = f'{format_bytes(plan.cache_bytes / rows)} a row'
  return {
    **_about(plan),
    'work': 'program',
    'requests': (
      f'{number_of(rows, "prompt")} of {number_of(length, "token")}, {number_of(tokens, "token")} after each,'
    ),
    'times': [[name, t, factors and [factor * t for factor in factors], more] for name, t, more in times],
    'more': [
      ['caches', format_bytes(plan.cache_bytes), f'on all devices, {caches}'],
      ['largest batch', number_of(plan.largest_rows, 'row'), 'about, of these lengths'],
    ],
    'bottleneck': bottleneck_of(plan.cost, plan.topology, 'the time'),
  }


def _about(plan: ProgramPlan) -> dict[str, object]:
  """Returns the data that plans of steps and of decoding have in common."""
  return {
    'model': plan.name,
    'topology': plan.topology.name,
    'chips': chips_text(plan.topology),
    'numChips': plan.topology.num_chips,
    'mesh': format_mesh(plan.mesh),
    'mode': plan.mode,
    'modeText': mode_text(plan),
    'fits': plan.fits,
    'refused': plan.is_refused,
    'seconds': plan.cost.seconds,
    'isTimeKnown': plan.is_time_known,
  }


def _leaves(plan: ProgramPlan) -> Iterator[list[object]]:
  """Yields the parts of the memory at its peak, as [kind, layer, phase, name, bytes, description]."""
  memory, inputs = plan.memory, 0
  for array in memory.state.arrays:
    inputs += array.bytes if array.kind == 'inputs' else 0
    yield [array.kind, array.layer, '', array.name, array.bytes, array.shape]
  if unused := inputs - memory.bytes_by_kind().get('inputs', 0):
    yield ['inputs', '', '', 'not used by the step', -unused, '']
  for live in memory.live:
    phase = _phase(live.phase, plan)
    for buffer in live.buffers:
      times = f', {buffer.count} of them' if buffer.count > 1 else ''
      name = _KEPT if buffer.operation == _FILLED_BY else buffer.operation or buffer.shape
      yield [live.kind, live.layer, phase, name, buffer.bytes, f'{buffer.shape}{times}']
    if not live.buffers:
      yield [live.kind, live.layer, phase, live.kind, live.bytes, live.largest]
  if memory.code:
    yield ['program', '', '', 'program', memory.code, '']


def _operation(op: Operation, plan: ProgramPlan) -> list[object]:
  limit = op.limit(plan.topology.target)
  return [op.name, op.layer, _phase(op.phase, plan), op.opcode, op.count, op.flops, op.bytes, op.seconds, limit]


def _phase(phase: str, plan: ProgramPlan) -> str:
  """Returns the name of a phase on the page: decoding has no updates, so operations without a phase are 'other'."""
  return 'other' if isinstance(plan, InferencePlan) and phase == 'update' else phase


def _places(operations: Iterable[Operation], collectives: Iterable[Communication]) -> dict[str, int]:
  """Returns an index for each name: 0, 1, ... for operations, and -1, -2, ... for collectives."""
  places = {c.name: -1 - i for i, c in enumerate(collectives)}
  return places | {op.name: i for i, op in enumerate(operations)}


def _schedule(spans: Sequence[Span], places: Mapping[str, int], live: Mapping[str, int]) -> list[list[object]]:
  """Returns a row for each span: [index or name, start, end, live bytes].

  The row of a loop has two more entries: the number of iterations, and the rows of the spans inside.
  """
  found: list[list[object]] = []
  for span in spans:
    row: list[object] = [places.get(span.name, span.name), span.start, span.end, live.get(span.name, 0)]
    found.append([*row, span.rounds, _schedule(span.inside, places, live)] if span.inside else row)
  return found


# ---------------------------------------------------------------- the cheapest run


def write_page_of_cheapest(path: str, found: CheapestRun, title: str) -> pathlib.Path:
  """Writes the page to the file `path`, as `write_file` does. `title` says what is trained."""
  return write_file(path, render_page_of_cheapest(found, title))


def render_page_of_cheapest(found: CheapestRun, title: str) -> str:
  """Returns the page as HTML."""
  data = page_of_cheapest(found, title)
  return fill_page(_PACKAGE, f'{title}: cheapest run', data, 'cheapest', ('cheapest',))


def page_of_cheapest(found: CheapestRun, title: str) -> dict[str, object]:
  """Returns the data of the page, ready for JSON. Times are in seconds."""
  return {
    'title': title,
    'goal': format_goal(found.goal),
    'budget': found.goal.budget,
    'seconds': found.goal.seconds,
    'hasGoal': found.goal.budget is not None or found.goal.seconds is not None,
    'verdict': recommendation(found),
    'leftOut': [line.strip() for line in left_out_lines(found)],
    'options': [_cheapest_option(option, found) for option in found.options],
  }


def _cheapest_option(option: Option, found: CheapestRun) -> dict[str, object]:
  known, is_limited = option.factors, math.isfinite(option.largest(1.0))
  return {
    'name': option.topology.name,
    'kind': option.topology.target.name,
    'chips': option.topology.num_chips,
    'how': mark_of(option),
    'isCompiled': option.is_compiled,
    'isBest': option is found.best,
    'isUnbeaten': option in found.frontier,
    'seconds': option.seconds,
    'money': option.money,
    'factors': [known.least, known.largest] if known and is_limited else None,
    'timeText': duration(option.seconds),
    'timeMost': '' if known is None else most_text(duration, option, option.seconds),
    'moneyText': format_money(option.money),
    'moneyMost': '' if known is None else most_text(format_money, option, option.money),
    'reached': format_reached(option, found.goal),
    'step': option.step_seconds,
    'memory': option.peak,
    'setting': setting_text(option),
  }
