"""Partitioning mixtures of experts: a second data axis, rules for experts, and the axes of their optimizer state.

Experts are split over 'data': each device along it holds some of them, and tokens travel to their experts. With fewer
experts than devices and no model parallelism, devices would be left without an expert. The mesh then gets a 'model'
axis of devices // experts all the same, and that axis serves as a second data axis:

                         usual          two data axes
    'batch'              'data'         ('data', 'model')
    'expert'             'data'         'data'
    rules to 'model'     'model'        None
    'expert_replicas'    None           'model'
    spec ('data',)       ('data',)      (('data', 'model'),)
    spec ('model',)      ('model',)     None
    data is split over   ('data',)      (('data', 'model'),)

After the mixture-of-experts partitioner of T5X (Roberts et al., 2022).

The partitioner for mixtures of experts; `moe.py` explains what it changes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.layout import is_spec
from praxis_lite.partitioning.rules import LogicalAxisRule, LogicalAxisRules, standard_logical_axis_rules
from praxis_lite.partitioning.slots import dims_by_size, owner_of
from praxis_lite.partitioning.specs import complete_spec
from praxis_lite.t5x.axis_names import AxisNames
from praxis_lite.t5x.meshes import check_one_of
from praxis_lite.t5x.partitioners import PjitPartitioner, PjittedFnWithContext
from praxis_lite.trees import Path, leaves_by_path, path_matches, path_names

TWO_DATA_AXES = ('data', 'model')
FACTORED_EXPERT_STATE = r'.*expert.*/kernel/v_.*'

_EXPERT_RULES: tuple[LogicalAxisRule, ...] = (
  ('expert', 'data'),
  ('expert_mlp', 'model'),
  ('expert_group', None),
  ('expert_replicas', None),
  ('unmodeled', None),
)


def uses_two_data_axes(
  num_experts: int,
  num_devices: int,
  num_partitions: int | None = None,
  model_parallel_submesh: Sequence[int] | None = None,
) -> bool:
  """Whether the 'model' axis serves as a second data axis: fewer experts than devices, and no model parallelism.

  Raises:
    ShardingError: neither or both of num_partitions and model_parallel_submesh are given.
  """
  check_one_of(num_partitions, model_parallel_submesh)
  model_parallelism = num_partitions if num_partitions is not None else math.prod(model_parallel_submesh or ())
  return model_parallelism <= 1 and 0 < num_experts < num_devices


def moe_logical_axis_rules(
  two_data_axes: bool = False,
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
  override_rules: LogicalAxisRules | None = None,
) -> tuple[LogicalAxisRule, ...]:
  """Returns the standard rules and those for experts; see `standard_logical_axis_rules` for the arguments.

  Raises:
    ShardingError: parameter_partitioning_dims is not 1: experts take 'data'.
  """
  if parameter_partitioning_dims != 1:
    raise ShardingError(
      f'parameter_partitioning_dims={parameter_partitioning_dims} is not supported with experts, which are themselves '
      "split over 'data'; it must be 1"
    )
  rules = standard_logical_axis_rules(
    activation_partitioning_dims, 1, (*_EXPERT_RULES, *(additional_rules or ())), override_rules
  )
  return tuple(_with_two_data_axes(rule) for rule in rules) if two_data_axes else rules


def override_partition_spec(spec: PartitionSpec | None) -> PartitionSpec | None:
  """Returns a spec as it is with two data axes. Only specs of exactly one dimension change; see the table above."""
  if spec == PartitionSpec('data'):
    return PartitionSpec(TWO_DATA_AXES)
  return None if spec == PartitionSpec('model') else spec


def moe_data_partition_spec(two_data_axes: bool) -> PartitionSpec:
  """The spec of the batch dimension."""
  return PartitionSpec(TWO_DATA_AXES) if two_data_axes else PartitionSpec('data')


def prepend_expert(axes: Any, pattern: str | None) -> Any:
  """Returns a tree of AxisNames with 'expert' put before those of the arrays whose path `pattern` matches.

  Optimizer state that is factored per expert has one more axis than its rules name. None matches nothing.
  """

  def prepend(key_path: Any, names: AxisNames) -> AxisNames:
    matches = pattern is not None and path_matches(pattern, path_names(key_path))
    return AxisNames('expert', *names) if matches else names

  return jax.tree_util.tree_map_with_path(prepend, axes)


def infer_state_filter(opt_states: Any) -> str | None:
  """Returns the pattern of the optimizer state that has an expert axis of its own, by the optimizer that it shows.

  Args:
    opt_states: state of the optimizer, as arrays or shapes.

  Returns:
    `.*expert.*/kernel/v_.*` for Adafactor with factored statistics, None for Adafactor without; it matches paths that
    begin with the parameter and end with the slot, 'mlp/expert/kernel/v_row'; see `slot_path`.

  Raises:
    ShardingError: another optimizer, whose state one has to know to write the pattern.
  """
  rows = [slot for path, slot in leaves_by_path(opt_states).items() if 'v_row' in path]
  if not rows:
    raise ShardingError(
      'the optimizer state with an expert axis can be inferred for Adafactor only; pass state_filter=, a pattern such '
      f'as {FACTORED_EXPERT_STATE!r}, or None for no such state'
    )
  return FACTORED_EXPERT_STATE if any(tuple(row.shape) != (1,) for row in rows) else None


def slot_path(path: Path, owner: Path) -> Path:
  """('mlp', 'expert', 'kernel', 'v_row') of the slot ('0', 'v_row', 'mlp', 'expert', 'kernel'): owner first."""
  before = path[: len(path) - len(owner)]
  return (*owner, *before[-1:])


def _with_two_data_axes(rule: LogicalAxisRule) -> LogicalAxisRule:
  name, axes = rule
  if name == 'batch':
    return name, TWO_DATA_AXES
  if name == 'expert_replicas':
    return name, 'model'
  return (name, None) if axes == 'model' else rule


class MoePjitPartitioner(PjitPartitioner):
  """Splits experts over 'data', and uses 'model' as a second data axis where there are fewer experts than devices.

  Args:
    num_experts: number of experts; 0 for none.
    num_partitions, model_parallel_submesh: as for `PjitPartitioner`.
    logical_axis_rules: the rules; by default `moe_logical_axis_rules`.
    state_filter: pattern of the optimizer slots that keep the expert axis of their parameter, though they do not have
      its
      shape, on paths such as 'mlp/expert/kernel/v_row'; 'infer' finds it for Adafactor.
    **kwargs: as for `PjitPartitioner`.

  Raises:
    ShardingError: neither or both of num_partitions and model_parallel_submesh are given.
  """

  def __init__(
    self,
    num_experts: int,
    num_partitions: int | None = None,
    model_parallel_submesh: Sequence[int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    logical_axis_rules: LogicalAxisRules | None = None,
    state_filter: str | None = None,
    **kwargs: Any,
  ):
    devices = jax.devices(backend) if devices is None else devices
    self.two_data_axes = uses_two_data_axes(num_experts, len(devices), num_partitions, model_parallel_submesh)
    if self.two_data_axes:
      num_partitions, model_parallel_submesh = len(devices) // num_experts, None
    if logical_axis_rules is None:
      logical_axis_rules = moe_logical_axis_rules(self.two_data_axes)
    super().__init__(
      num_partitions, model_parallel_submesh, devices=devices, logical_axis_rules=logical_axis_rules, **kwargs
    )
    self._state_filter = state_filter

  @property
  def data_axes(self) -> tuple[str, ...]:
    return TWO_DATA_AXES if self.two_data_axes else super().data_axes

  def get_logical_axes(self, train_state: Any) -> Any:
    axes = super().get_logical_axes(train_state)
    pattern = self._state_filter
    if pattern == 'infer':
      pattern = infer_state_filter(train_state.opt_states)
    if pattern is None:
      return axes
    if hasattr(train_state, 'as_logical_axes'):
      return axes.replace(opt_states=prepend_expert(axes.opt_states, pattern))
    return axes.replace(opt_states=_keep_expert(train_state, axes, pattern))

  def get_mesh_axes(self, train_state: Any) -> Any:
    specs = super().get_mesh_axes(train_state)
    if not self.two_data_axes:
      return specs
    return jax.tree.map(lambda spec: complete_spec(override_partition_spec(spec), len(spec)), specs)

  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: Any,
    out_axis_resources: Any,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    arg_shapes: Sequence[Any] | None = None,
  ) -> PjittedFnWithContext:
    if self.two_data_axes:
      override = functools.partial(jax.tree.map, override_partition_spec, is_leaf=is_spec)
      in_axis_resources, out_axis_resources = override(in_axis_resources), override(out_axis_resources)
    return super().partition(fn, in_axis_resources, out_axis_resources, static_argnums, donate_argnums, arg_shapes)


def _keep_expert(train_state: Any, axes: Any, pattern: str) -> Any:
  """Names 'expert' in each slot that matches, the axis that comes from its parameter's."""
  params = {path: weight.full_shape for path, weight in leaves_by_path(train_state.mdl_vars).items()}
  names_of = leaves_by_path(axes.mdl_vars)

  def keep(key_path: Any, names: AxisNames, slot: Any) -> AxisNames:
    path = path_names(key_path)
    owner = owner_of(path, params)
    if owner is None or 'expert' in names or 'expert' not in names_of[owner]:
      return names
    if not path_matches(pattern, slot_path(path, owner)):
      return names
    expert = names_of[owner].index('expert')
    dims = dims_by_size(path, slot.shape, params[owner])
    return AxisNames(*('expert' if dim == expert else name for name, dim in zip(names, dims)))

  return jax.tree_util.tree_map_with_path(keep, axes.opt_states, train_state.opt_states)
