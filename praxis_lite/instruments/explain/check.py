"""check: finds problems in a task's shardings before anything is compiled, and proposes a remedy for each.

error     unknown axis, axis used twice, mapping of the wrong rank, a rule or strategy that does not fit, a step that
          cannot be traced
warning   unused axis, large replicated weight, padding, a product whose operands are split differently, shadowed rule,
          unused pattern, optimizer slot split unlike its weight, experts that are gathered, are unbalanced or see
          later tokens, number of stages that is not a multiple of its mesh axis, rows that are longer than a table of
          positions
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.errors import ShardingError, ShardingFault, UserError
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.jax_internals import reading, unless_unknown
from praxis_lite.common.trees import insert, leaves_by_path, path_matches, path_name
from praxis_lite.instruments.explain.contractions import Mismatch, Split, find_mismatches, splitting_axes
from praxis_lite.instruments.explain.explanation import ArrayKind, Explanation, ShardingReport, format_mesh
from praxis_lite.instruments.explain.report import (
  Explained,
  TracedStep,
  declared_exchanges,
  report_of,
  task_and_inputs,
  trace_task,
)
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.sharding.mesh import abstract_mesh, device_kind
from praxis_lite.sharding.placement import place_variables
from praxis_lite.sharding.rules import shadowed_rules
from praxis_lite.sharding.specs import place_by_rank
from praxis_lite.sharding.strategies import unused_patterns
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.slow_paths import find_slow_paths
from praxis_lite.training.state import place_task_variables, state_layout
from praxis_lite.training.task import SingleTask


class Severity(enum.StrEnum):
  """A task with an error does not run; a task with a warning runs, but wastes memory, time or communication."""

  ERROR = 'error'
  WARNING = 'warning'


@dataclasses.dataclass(frozen=True)
class Problem:
  """A problem with a sharding.

  Attributes:
    severity: whether the problem keeps the task from running.
    kind: the kind of problem, such as 'unused axis'.
    path: the field, rule, variable or axis that has the problem.
    message, remedy: what was found, and what to change.
  """

  severity: Severity
  kind: str
  path: str
  message: str
  remedy: str

  def __str__(self) -> str:
    remedy = f'\n    {self.remedy}' if self.remedy else ''
    return f'{self.severity}: {self.kind}: {self.path}: {self.message}{remedy}'


@dataclasses.dataclass(frozen=True)
class WarningLimits:
  """Thresholds of warnings.

  Attributes:
    replicated_bytes: smallest replicated weight that is reported, in bytes.
    wasted_fraction: largest share of padding in a stored array, or in the rows of a batch, that is not reported.
    wasted_bytes: smallest padding of a stored array that is reported, in bytes.
  """

  replicated_bytes: int = 64 * 2**20
  wasted_fraction: float = 0.1
  wasted_bytes: int = 2**20


def check(
  task_or_experiment: Explained,
  inputs_struct: Mapping[str, object] | None = None,
  *,
  mesh_sizes: Mapping[str, int] | None = None,
  limits: WarningLimits | None = None,
  layout: StateLayout | None = None,
) -> list[Problem]:
  """Returns the problems in a task's shardings. Uses no device and compiles nothing.

  If there are errors, only some of the warnings are found.

  Args:
    task_or_experiment, inputs_struct, mesh_sizes: see `explain`. Activations are checked only if
      the shapes of a batch are known.
    limits: thresholds of warnings.
    layout: layout of the train state; by default the task's own.
  """
  limits = limits or WarningLimits()
  try:
    jax_task, inputs_struct = task_and_inputs(task_or_experiment, inputs_struct)
    sizes = dict(jax_task.mesh_sizes() if mesh_sizes is None else mesh_sizes)
  except ShardingError as error:
    return [_error(error)]
  problems = [*_shadowed_rules(jax_task), *_placing_errors(jax_task, inputs_struct, sizes)]
  problems += _unknown_exchanges(jax_task, sizes)
  if has_errors(problems):
    return problems
  layout = layout or state_layout(jax_task, abstract_mesh(sizes))
  try:
    step = None if inputs_struct is None else trace_task(jax_task, layout, inputs_struct)
  except UserError as error:
    return [*problems, _error(error)]
  report = report_of(jax_task, layout, step)
  problems += _unused_patterns(jax_task, sizes)
  if step is not None:
    problems += _unused_axes(report, sizes)
    problems += _mismatches(step, report.variables, sizes)
    problems += _slow_paths(step, jax_task, sizes)
  problems += _find_replicated(report.variables, report.slots, limits)
  problems += _unlike_slots(report.slots, layout)
  problems += [_warn(*problem) for layer in jax_task.model.descendants() for problem in layer.problems(sizes)]
  problems += _far_positions(jax_task.model, inputs_struct or {})
  problems += _padding([*report.variables, *report.activations], limits)
  if step is not None:
    problems += _batch_padding(report.inputs, step.task, limits)
  return problems


def has_errors(problems: Sequence[Problem]) -> bool:
  """Whether any of the problems keeps the task from running."""
  return any(p.severity is Severity.ERROR for p in problems)


def format_problems(problems: Sequence[Problem]) -> str:
  """Returns the problems and their number as text, errors first."""
  if not problems:
    return 'no problems found'
  ordered = sorted(problems, key=lambda p: p.severity is not Severity.ERROR)
  counts = [(sum(p.severity is severity for p in problems), severity) for severity in Severity]
  total = ', '.join(f'{number_of(count, severity)}' for count, severity in counts)
  return '\n\n'.join([*map(str, ordered), total])


# ---------------------------------------------------------------- errors


def _error(error: UserError, path: str = 'task') -> Problem:
  """Converts an exception to a problem. The path is the first word of the message if ': ' follows, or else `path`."""
  head, separator, text = str(error).partition(': ')
  path, text = (head, text) if separator and ' ' not in head else (path, str(error))
  kind = str(error.fault) if isinstance(error, ShardingError) else 'error in the step'
  return Problem(Severity.ERROR, kind, path, text, '')


def _placing_errors(
  jax_task: SingleTask, inputs_struct: Mapping[str, object] | None, sizes: Mapping[str, int]
) -> list[Problem]:
  """Returns a problem for every variable and input that cannot be placed, without repeated messages."""
  rules, strategy, mapping = jax_task.logical_axis_rules, jax_task.strategy, jax_task.train.inputs_split_mapping
  variables, inputs = leaves_by_path(jax_task.model.abstract_init()), leaves_by_path({'inputs': inputs_struct})
  found: dict[str, Problem] = {}
  for place, arrays in (
    (lambda path, x: place_variables(insert({}, path, x), sizes, rules=rules, strategy=strategy), variables),
    (lambda path, x: place_by_rank(mapping, tuple(sizes), x), inputs),
  ):
    for path, x in arrays.items():
      try:
        place(path, x)
      except ShardingError as error:
        found.setdefault(str(error), _error(error, path_name(path)))
  return list(found.values())


def _slow_paths(step: TracedStep, jax_task: SingleTask, sizes: Mapping[str, int]) -> list[Problem]:
  """Returns a warning for each slow path of the step on this machine's kind of chip, if its figures are known."""
  accelerator = accelerator_of(device_kind())
  if accelerator is None:
    return []
  found = find_slow_paths(step.jaxpr, jax_task.model, accelerator, math.prod(sizes.values()))
  return [_warn('slow path', slow.layer or 'the step', f'{slow.what}, {slow.cost}', slow.remedy) for slow in found]


def _unknown_exchanges(jax_task: SingleTask, sizes: Mapping[str, int]) -> Iterator[Problem]:
  """Yields a problem for each layer that communicates over an axis that the mesh does not have."""
  for field, exchange in declared_exchanges(jax_task.model).items():
    for axis in exchange.axes:
      if axis not in sizes:
        message = f'{exchange.purpose}: axis {axis!r} is not an axis of the mesh {dict(sizes)}'
        yield Problem(Severity.ERROR, str(ShardingFault.UNKNOWN_AXIS), field, message, '')


# ---------------------------------------------------------------- warnings


def _warn(kind: str, path: str, message: str, remedy: str) -> Problem:
  return Problem(Severity.WARNING, kind, path, message, remedy)


def _shadowed_rules(jax_task: SingleTask) -> Iterator[Problem]:
  rules = jax_task.logical_axis_rules or ()
  for later, earlier in shadowed_rules(rules):
    message = f'{tuple(rules[later])!r} never decides anything: rule {earlier}, {tuple(rules[earlier])!r}, always does'
    yield _warn('shadowed rule', f'task.logical_axis_rules[{later}]', message, 'remove it, or move it before that rule')


def _unused_patterns(jax_task: SingleTask, sizes: Mapping[str, int]) -> Iterator[Problem]:
  """Yields a problem for each pattern of the strategy that splits no variable."""
  placements = leaves_by_path(place_task_variables(jax_task, sizes))
  strategy = jax_task.strategy or ()
  by_strategy = {path: placement for path, placement in placements.items() if placement.pattern is not None}
  for i in unused_patterns(by_strategy, strategy):
    pattern = strategy[i][0]
    if any(path_matches(pattern, path) for path in by_strategy):
      why, remedy = 'earlier patterns match all its variables first', 'move it before them, or remove it'
    elif any(path_matches(pattern, path) for path in placements):
      why = 'all variables that it matches have mappings of their own, which win'
      remedy = 'remove those, or the pattern'
    else:
      why, remedy = 'no variable has a path that it matches', 'correct it (it must match the whole path), or remove it'
    yield _warn('unused pattern', f'task.strategy[{i}]', f'{pattern!r} decides nothing: {why}', remedy)


def _unused_axes(report: ShardingReport, sizes: Mapping[str, int]) -> Iterator[Problem]:
  """Yields a problem for each mesh axis that splits nothing and that no layer communicates over."""
  used = {axis for e in report.arrays() for axis in e.mesh_axes}
  used |= {axis for exchange in report.exchanges.values() for axis in exchange.axes}
  for axis, size in sizes.items():
    if size > 1 and axis not in used:
      message = (
        f'no weight, activation or input is split over it: on mesh {format_mesh(sizes)}, groups of '
        f'{number_of(size, "device")} hold and compute the same'
      )
      remedy = f'name {axis!r} in a split mapping, a rule or inputs_split_mapping, or give the mesh axis size 1'
      yield _warn('unused axis', f'mesh axis {axis}', message, remedy)


def _find_replicated(
  variables: Sequence[Explanation], slots: Sequence[Explanation], limits: WarningLimits
) -> Iterator[Problem]:
  """Yields a problem for each large replicated weight, and each large replicated slot that belongs to no weight."""
  for e in (*variables, *slots):
    if e.owner or e.num_devices == 1 or e.replication < e.num_devices or e.bytes < limits.replicated_bytes:
      continue
    message = f'{format_bytes(e.bytes)} are replicated on all {e.num_devices} devices'
    if e.kind is ArrayKind.VARIABLE:
      dim = max(range(len(e.shape)), key=lambda i: (e.shape[i], i))
      free = ' or '.join(repr(axis) for axis, size in e.mesh_sizes.items() if size > 1)
      remedy = f'split dimension {dim}, of size {e.shape[dim]}, over {free}'
      yield _warn('replicated weight', e.path, f'{message}: {e.why}', remedy)
    else:
      remedy = 'store slots in trees like that of the parameters, so that each slot is split as its parameter'
      yield _warn('replicated slot', e.path, f'{message}, because it belongs to no variable', remedy)


def _unlike_slots(slots: Sequence[Explanation], layout: StateLayout) -> Iterator[Problem]:
  """Yields a problem for each slot that has the shape of its weight but is split differently."""
  shapes = {path_name(p): s.shape for p, s in leaves_by_path(layout.unpadded_shapes.mdl_vars).items()}
  specs = {path_name(p): s for p, s in leaves_by_path(layout.specs.mdl_vars).items()}
  for e in slots:
    if not e.owner or e.shape != shapes[e.owner]:
      continue
    if splitting_axes(e.spec, e.mesh_sizes) != splitting_axes(specs[e.owner], e.mesh_sizes):
      message = f'is split as {tuple(e.spec)!r}, and its variable {e.owner} as {tuple(specs[e.owner])!r}'
      remedy = 'give both the same spec: otherwise each step moves the one to the other'
      yield _warn('slot unlike its weight', e.path, message, remedy)


def _far_positions(model: BaseModel, inputs_struct: Mapping[str, object]) -> Iterator[Problem]:
  """Yields a warning for each table of positions that is shorter than a row; the segments of a row may still fit."""
  for name, limit in model.position_limits().items():
    length = getattr(inputs_struct.get(name), 'shape', (0, 0))[1]
    if length > limit.num_positions:
      message = (
        f'{limit.max_len} is enough for segments of {number_of(limit.num_positions, "token")}, and rows have {length}; '
        'vectors of further tokens would be NaN, so training refuses data with such segments'
      )
      remedy = f'set it to {length + limit.first}, unless no segment of the data is longer than {limit.num_positions}'
      yield _warn('rows longer than positions', f'task.model.{limit.field}', message, remedy)


def _padding(explained: Sequence[Explanation], limits: WarningLimits) -> Iterator[Problem]:
  """Yields a problem for each array with too much padding."""
  for e in explained:
    if e.wasted_fraction <= limits.wasted_fraction or e.wasted_bytes < limits.wasted_bytes:
      continue
    worst, dim = max(enumerate(e.dims), key=lambda numbered: numbered[1].padding / max(numbered[1].padded, 1))
    message = (
      f'{e.wasted_fraction:.1%} of it, {format_bytes(e.wasted_bytes)}, is padding: dimension {worst} has {dim.size} '
      f'and is split in {dim.parts}'
    )
    remedy = f'make it a multiple of {dim.parts}, such as {dim.padded}, or split it over fewer devices ({dim.source})'
    yield _warn('padding', e.path, message, remedy)


def _batch_padding(inputs: Sequence[Explanation], task: PartitionedTask, limits: WarningLimits) -> Iterator[Problem]:
  """Yields a problem if too many rows of a batch are padding.

  It yields only one problem for the whole batch, because all arrays of a batch have the same number of rows.
  """
  if e := next((e for e in inputs if e.wasted_fraction > limits.wasted_fraction), None):
    size, rows = e.dims[0].size, e.dims[0].padded
    parts, microbatches = task.row_parts, task.jax_task.learner.num_microbatches
    over = f'{"all " if 1 < parts == e.num_devices else ""}{number_of(parts, "device")}'
    over += f' and in {microbatches} microbatches' if microbatches > 1 else ''
    message = (
      f'{e.wasted_fraction:.1%} of the rows of a batch only fill up the mesh: {size} examples are computed as {rows}, '
      f'because rows enter the step split over {over}'
    )
    remedy = f'make the batch size a multiple of {parts * microbatches}, such as {rows}'
    yield _warn('padding', 'inputs', message, remedy)


def _mismatches(step: TracedStep, variables: Sequence[Explanation], sizes: Mapping[str, int]) -> list[Problem]:
  """Returns a problem for each matrix product that needs an operand to be moved; see `contractions.py`."""
  by_path = {e.path: e for e in variables}
  splits: list[Split | None] = [None] * len(step.jaxpr.in_avals)
  for i, path in enumerate(leaves_by_path(step.task.state_shapes)):
    if path[0] == 'mdl_vars':
      name = path_name(path[1:])
      splits[i] = Split(splitting_axes(by_path[name].spec, sizes), name, is_weight=True)

  def found() -> list[Mismatch]:
    with reading('a traced step'):
      return find_mismatches(step.jaxpr, splits, sizes)

  mismatches: list[Mismatch] = unless_unknown(
    'no advice on products whose operands are split in different ways', found, []
  )
  return list(dict.fromkeys(_mismatch(m, by_path) for m in mismatches))


def _mismatch(m: Mismatch, variables: Mapping[str, Explanation]) -> Problem:
  weight, axes, other, other_axes = m.right, m.right_axes, m.left, m.left_axes
  if m.left in variables:
    weight, axes, other, other_axes = other, other_axes, weight, axes
  if m.shared:
    message = (
      f'the sum over {m.size} with {other} is split over {m.shared!r} in one of them, which splits another dimension '
      'of the other'
    )
  else:
    message = f'the sum over {m.size} is split over {axes} here and over {other_axes} in {other}'
  field = f' ({variables[weight].why})' if weight in variables else ''
  remedy = f'split the summed dimension of both over the same axes{field}'
  return _warn('mismatch', weight, f'{message}: one of them is moved at each use', remedy)
