"""check: what is wrong with a task's shardings, found before anything is compiled, each with its remedy.

    error     unknown axis, axis used twice, mapping of the wrong rank, a rule or strategy that does not fit
    warning   unused axis, large replicated weight, padding, a product whose operands do not fit, shadowed rule, unused
              pattern, optimizer slot unlike its weight

A warning is a fact, with what it costs; whether it is meant so, the user knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from praxis_lite.errors import ShardingError, UserError
from praxis_lite.explain import warnings
from praxis_lite.explain.problems import Limits, Problem, Severity
from praxis_lite.explain.report import (
  explain_activations,
  explain_inputs,
  explain_slots,
  explain_variables,
  task_and_inputs,
)
from praxis_lite.explain.tracing import abstract_mesh, trace_model
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.placement import place_variables
from praxis_lite.partitioning.specs import infer_partition_spec_based_on_rank_fn
from praxis_lite.partitioning.strategies import parse_strategy
from praxis_lite.task import SingleTask
from praxis_lite.training.state import state_layout
from praxis_lite.trees import leaves_by_path


def check(
  task_or_experiment: Any,
  inputs_struct: Any = None,
  *,
  mesh_sizes: Mapping[str, int] | None = None,
  limits: Limits | None = None,
  layout: StateLayout | None = None,
) -> list[Problem]:
  """Returns the problems of a task's shardings, errors first. No device is used and nothing is compiled.

  Args:
    task_or_experiment: a task or its config, an experiment class, or what `configure` made of one.
    inputs_struct: shapes and dtypes of a batch; by default those of the experiment's data. Without any, activations
      and inputs are not checked.
    mesh_sizes: size of each mesh axis; by default those the task asks for.
    limits: from where on something is a problem.
    layout: of the train state, where it is not the task's own.
  """
  limits = limits or Limits()
  try:
    jax_task, inputs_struct = task_and_inputs(task_or_experiment, inputs_struct)
    sizes = dict(jax_task.mesh_sizes() if mesh_sizes is None else mesh_sizes)
  except ShardingError as error:
    return [_error(error)]
  problems = [*warnings.shadowed(jax_task), *_placing_errors(jax_task, sizes)]
  problems += _input_errors(jax_task, inputs_struct, sizes)
  if any(p.severity is Severity.ERROR for p in problems):
    return problems
  trace = None
  if inputs_struct is not None:
    try:
      trace = trace_model(jax_task, inputs_struct, sizes)
    except ShardingError as error:
      return [*problems, _error(error)]
  variables = explain_variables(jax_task, sizes)
  layout = layout or state_layout(jax_task, abstract_mesh(sizes))
  slots = explain_slots(layout, sizes)
  activations = [] if trace is None else explain_activations(jax_task, trace, sizes)
  inputs = [] if inputs_struct is None else explain_inputs(jax_task, inputs_struct, sizes)
  problems += warnings.unused_patterns(jax_task)
  if trace is not None:
    problems += warnings.unused_axes([*variables, *activations, *inputs], sizes)
    # Under shard_map, weights are gathered where they are used, and mappings of activations do nothing.
    if jax_task.partitioning != 'shard_map':
      problems += warnings.mismatches(jax_task, trace, variables, sizes)
  problems += warnings.replicated(variables, slots, limits)
  problems += warnings.unlike_slots(slots, layout)
  problems += warnings.padding([*variables, *activations, *inputs], limits)
  return problems


def has_errors(problems: Sequence[Problem]) -> bool:
  """Whether one of them keeps the task from running."""
  return any(p.severity is Severity.ERROR for p in problems)


# ---------------------------------------------------------------- errors


def _error(error: UserError, path: str = 'task') -> Problem:
  """What raised, as a problem. Messages begin with the path they are about and end with what would be right."""
  head, separator, rest = str(error).partition(': ')
  if separator and ' ' not in head:
    path, text = head, rest
  else:
    text = str(error)
  return Problem(Severity.ERROR, _kind(text), path, text, '')


def _kind(text: str) -> str:
  for part, kind in (
    ('occurs twice', 'axis used twice'),
    ('is not a mesh axis', 'unknown axis'),
    ('is not an axis', 'unknown axis'),
    ('out of range', 'unknown axis'),
    ('neither a mesh axis', 'unknown axis'),
    ('entries, but', 'wrong rank'),
    ('inputs_split_mapping has no', 'missing input mapping'),
  ):
    if part in text:
      return kind
  return 'invalid sharding'


def _placing_errors(jax_task: SingleTask, sizes: Mapping[str, int]) -> list[Problem]:
  """What keeps variables from being placed: all of it, not the first alone."""
  try:
    parse_strategy(jax_task.strategy or ())
  except ShardingError as error:
    return [_error(error, 'task.strategy')]
  problems: dict[str, Problem] = {}
  for path, weight in leaves_by_path(jax_task.model.abstract_init()).items():
    tree: Any = weight
    for name in reversed(path):
      tree = {name: tree}
    try:
      place_variables(tree, sizes, rules=jax_task.logical_axis_rules, strategy=jax_task.strategy)
    except ShardingError as error:
      problems.setdefault(str(error), _error(error, '.'.join(path)))
  return list(problems.values())


def _input_errors(jax_task: SingleTask, inputs_struct: Any, sizes: Mapping[str, int]) -> list[Problem]:
  problems: dict[str, Problem] = {}
  for path, struct in leaves_by_path(inputs_struct).items():
    try:
      infer_partition_spec_based_on_rank_fn(jax_task.train.inputs_split_mapping, tuple(sizes), struct)
    except ShardingError as error:
      problems.setdefault(str(error), _error(error, f'inputs.{".".join(path)}'))
  return list(problems.values())
