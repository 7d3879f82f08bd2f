"""What runs and wastes memory, time or communication: each function looks for one kind of it.

Everything here is a fact with what it costs. Whether it is meant so, the user knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.explain.contractions import Mismatch, Split, find_mismatches
from praxis_lite.explain.explanation import Explanation, Kind, format_mesh
from praxis_lite.explain.parameter_table import format_bytes
from praxis_lite.explain.problems import Limits, Problem, Severity
from praxis_lite.explain.tracing import Trace
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.rules import shadowed_rules
from praxis_lite.partitioning.specs import spec_axes
from praxis_lite.task import SingleTask
from praxis_lite.trees import leaves_by_path, path_matches


def _warn(kind: str, path: str, message: str, remedy: str) -> Problem:
  return Problem(Severity.WARNING, kind, path, message, remedy)


def shadowed(jax_task: SingleTask) -> list[Problem]:
  """Rules that can never decide anything."""
  rules = jax_task.logical_axis_rules or ()
  return [
    _warn(
      'shadowed rule',
      f'task.logical_axis_rules[{later}]',
      f'{tuple(rules[later])!r} never decides anything: rule {earlier}, {tuple(rules[earlier])!r}, always does',
      'remove it, or move it before that rule',
    )
    for later, earlier in shadowed_rules(rules)
  ]


def unused_patterns(jax_task: SingleTask) -> list[Problem]:
  """Patterns of the strategy that decide no variable."""
  strategy = jax_task.strategy
  if strategy is None:
    return []
  weights = leaves_by_path(jax_task.model.abstract_init())
  problems = []
  for i, (pattern, _) in enumerate(strategy):
    matched = [path for path in weights if path_matches(pattern, path)]
    free = [path for path in matched if weights[path].tensor_split_dims_mapping is None]
    left = [path for path in free if not any(path_matches(earlier, path) for earlier, _ in strategy[:i])]
    if left:
      continue
    if not matched:
      why, remedy = 'no variable has a path that it matches', 'correct it (it must match the whole path), or remove it'
    elif not free:
      why, remedy = (
        'all variables that it matches have mappings of their own, which win',
        'remove those, or the pattern',
      )
    else:
      why, remedy = 'earlier patterns match all its variables first', 'move it before them, or remove it'
    problems.append(_warn('unused pattern', f'task.strategy[{i}]', f'{pattern!r} decides nothing: {why}', remedy))
  return problems


def unused_axes(explained: Sequence[Explanation], sizes: Mapping[str, int]) -> list[Problem]:
  """Mesh axes that split nothing."""
  used = {axis for e in explained for axis in e.mesh_axes}
  return [
    _warn(
      'unused axis',
      f'mesh axis {axis}',
      f'no weight, activation or input is split over it: on mesh {format_mesh(sizes)}, groups of {size} devices hold '
      'and compute the same',
      f'name {axis!r} in a split mapping, a rule or inputs_split_mapping, or give the mesh axis size 1',
    )
    for axis, size in sizes.items()
    if size > 1 and axis not in used
  ]


def replicated(variables: Sequence[Explanation], slots: Sequence[Explanation], limits: Limits) -> list[Problem]:
  """Large weights, and large slots of no weight, that every device holds whole."""
  problems = []
  for e in variables:
    if e.num_devices > 1 and e.replication == e.num_devices and e.bytes >= limits.replicated_bytes:
      message = f'{format_bytes(e.bytes)} are whole on each of {e.num_devices} devices'
      problems.append(_warn('replicated weight', e.path, f'{message}: {e.why}', _where_to_split(e)))
  for e in slots:
    if e.owner or e.num_devices == 1 or e.bytes < limits.replicated_bytes:
      continue
    message = f'{format_bytes(e.bytes)} are whole on each of {e.num_devices} devices, as it is of no variable'
    remedy = 'keep in the optimizer state trees like that of the parameters, so that slots follow them'
    problems.append(_warn('replicated slot', e.path, message, remedy))
  return problems


def _where_to_split(e: Explanation) -> str:
  dim = max(range(len(e.shape)), key=lambda i: (e.shape[i], i))
  free = [axis for axis, size in e.mesh_sizes.items() if size > 1]
  return f'split dimension {dim}, of size {e.shape[dim]}, over {" or ".join(map(repr, free))}'


def unlike_slots(slots: Sequence[Explanation], layout: StateLayout) -> list[Problem]:
  """Slots of the shape of their weight that are split in another way."""
  variables = {'.'.join(p): s for p, s in leaves_by_path(layout.unpadded_shapes.mdl_vars).items()}
  specs = {'.'.join(p): s for p, s in leaves_by_path(layout.specs.mdl_vars).items()}
  problems = []
  for e in slots:
    if not e.owner or e.shape != tuple(variables[e.owner].shape):
      continue
    have, want = ([_effective(entry, e.mesh_sizes) for entry in spec] for spec in (e.spec, specs[e.owner]))
    if have != want:
      message = f'is split as {tuple(e.spec)!r}, and its variable {e.owner} as {tuple(specs[e.owner])!r}'
      remedy = 'give both the same spec: otherwise each step moves the one to the other'
      problems.append(_warn('slot unlike its weight', e.path, message, remedy))
  return problems


def _effective(entry: Any, sizes: Mapping[str, int]) -> tuple[str, ...]:
  return tuple(axis for axis in spec_axes(entry) if sizes[axis] > 1)


def padding(explained: Sequence[Explanation], limits: Limits) -> list[Problem]:
  """Arrays of which much is padding, and batches of which many rows are."""
  problems = []
  rows_reported = False
  for e in explained:
    fraction = e.wasted_bytes / max(e.bytes + e.wasted_bytes, 1)
    if fraction <= limits.wasted_fraction:
      continue
    if e.kind is Kind.INPUT:
      if not rows_reported:
        rows_reported = True
        problems.append(_batch_padding(e, fraction))
    elif e.wasted_bytes >= limits.wasted_bytes:
      worst = max(range(len(e.dims)), key=lambda i: e.dims[i].padding / max(e.dims[i].padded, 1))
      dim = e.dims[worst]
      message = (
        f'{fraction:.1%} of it, {format_bytes(e.wasted_bytes)}, is padding: dimension {worst} has {dim.size} and is '
        f'split in {dim.parts}'
      )
      remedy = f'make it a multiple of {dim.parts}, such as {dim.padded}, or split it over fewer devices ({dim.source})'
      problems.append(_warn('padding', e.path, message, remedy))
  return problems


def _batch_padding(e: Explanation, fraction: float) -> Problem:
  rows = e.dims[0]
  step = math.prod(e.mesh_sizes.values())
  return _warn(
    'padding',
    'inputs',
    f'{fraction:.1%} of the rows of a batch only fill up the mesh: {rows.size} examples are computed as {rows.padded}',
    f'make the batch size a multiple of the {step} devices (times the microbatches), such as {rows.padded}',
  )


def mismatches(
  jax_task: SingleTask, trace: Trace, variables: Sequence[Explanation], sizes: Mapping[str, int]
) -> list[Problem]:
  """Products for which an operand is moved; see `contractions.py`."""
  by_path = {e.path: e for e in variables}
  paths = ['.'.join(p) for p in leaves_by_path(jax_task.model.abstract_init())]
  num_inputs = len(trace.jaxpr.jaxpr.invars) - len(paths)
  splits: list[Split | None] = [
    Split(tuple(_effective(entry, sizes) for entry in by_path[path].spec), path, is_weight=True) for path in paths
  ]
  found = find_mismatches(trace.jaxpr, [*splits, *[None] * num_inputs], sizes)
  return list(dict.fromkeys(_mismatch(m, by_path) for m in found))


def _mismatch(m: Mismatch, variables: Mapping[str, Explanation]) -> Problem:
  weight = next((label for label in (m.left, m.right) if label in variables), m.right)
  other = m.left if weight == m.right else m.right
  axes, other_axes = (m.right_axes, m.left_axes) if weight == m.right else (m.left_axes, m.right_axes)
  if m.shared:
    message = (
      f'the sum over {m.size} with {other} is split over {m.shared!r} in one of them, which splits another '
      'dimension of the other: one of them is moved at each use'
    )
  else:
    message = (
      f'the sum over {m.size} is split over {axes} here and over {other_axes} in {other}: one of them is moved at each '
      'use'
    )
  field = f' ({variables[weight].why})' if weight in variables else ''
  return _warn('mismatch', weight, message, f'split the summed dimension of both over the same axes{field}')
