"""Partitioning mixtures of experts: a second data axis, rules for experts, and the axes of their optimizer state.

Experts are split over 'data', and tokens travel to their experts. With fewer experts than devices and no model
parallelism, devices would be left without an expert. The mesh then gets a 'model' axis of devices // experts all the
same, and that axis serves as a second data axis:

                                usual          two data axes
    'batch'                     'data'         ('data', 'model')
    'expert'                    'data'         'data'
    rules to 'model'            'model'        None
    'expert_replicas'           None           'model'
    data is split over          ('data',)      (('data', 'model'),)
    a spec in itself passed to `partition`, not one in a tree of parameters, which the rules have decided:
      ('data',)                 ('data',)      (('data', 'model'),)
      ('model',)                ('model',)     None

After the mixture-of-experts partitioner of T5X (Roberts et al., 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning import rules as base_rules
from praxis_lite.partitioning.rules import LogicalAxisRule, LogicalAxisRules
from praxis_lite.t5x.axis_names import AxisNames, KeptNames
from praxis_lite.t5x.meshes import Device, Submesh, num_model_partitions
from praxis_lite.t5x.partitioners import PjitPartitioner
from praxis_lite.trees import Path, leaves_by_path, map_with_path, path_matches

if TYPE_CHECKING:
  from praxis_lite.training.state import TrainState

T = TypeVar('T')
# What tells whether an optimizer slot keeps the expert axis: a pattern on its path, or a function of it.
StateFilter = str | Callable[[str], bool]

TWO_DATA_AXES = ('data', 'model')
FACTORED_EXPERT_STATE = r'.*expert.*/(kernel|w)/v_.*'

_EXPERT_RULES = (
  *(('expert', 'data'), ('expert_mlp', 'model')),
  *(('expert_group', None), ('expert_replicas', None), ('unmodeled', None)),
)


def uses_two_data_axes(
  num_experts: int, num_devices: int, num_partitions: int | None = None, model_parallel_submesh: Submesh = None
) -> bool:
  """Returns whether 'model' serves as a second data axis: fewer experts than devices, and no model parallelism.

  Raises ShardingError if neither or both of num_partitions and model_parallel_submesh are given.
  """
  return num_model_partitions(num_partitions, model_parallel_submesh) <= 1 and 0 < num_experts < num_devices


def standard_logical_axis_rules(
  num_experts: int,
  num_partitions: int | None = None,
  model_parallel_submesh: Submesh = None,
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
  override_rules: LogicalAxisRules | None = None,
  *,
  num_devices: int | None = None,
) -> tuple[LogicalAxisRule, ...]:
  """Returns the standard rules and those for experts, with two data axes where `uses_two_data_axes` says so.

  Args:
    num_experts, num_partitions, model_parallel_submesh: as for `uses_two_data_axes`.
    num_devices: all of JAX by default. All other arguments are as for the standard rules.

  Raises:
    ShardingError: parameter_partitioning_dims is not 1: experts take 'data'; or as `uses_two_data_axes`.
  """
  if parameter_partitioning_dims != 1:
    raise ShardingError(
      f'parameter_partitioning_dims={parameter_partitioning_dims} is not supported with experts, which are themselves '
      "split over 'data'; it must be 1"
    )
  rules = base_rules.standard_logical_axis_rules(
    activation_partitioning_dims, 1, (*_EXPERT_RULES, *(additional_rules or ())), override_rules
  )
  num_devices = jax.device_count() if num_devices is None else num_devices
  if not uses_two_data_axes(num_experts, num_devices, num_partitions, model_parallel_submesh):
    return rules
  fixed = {'batch': TWO_DATA_AXES, 'expert_replicas': 'model'}
  return tuple((name, fixed.get(name, None if axes == 'model' else axes)) for name, axes in rules)


def data_partition_spec(two_data_axes: bool) -> PartitionSpec:
  """Returns the spec of the batch dimension."""
  return PartitionSpec(TWO_DATA_AXES if two_data_axes else 'data')


def override_partition_specs(resources: object) -> object:
  """Returns the specs of arguments or results as they are with two data axes; see the table above.

  Only a spec that stands for a whole argument changes: trees of specs are those of parameters and optimizer state.
  """

  def override(spec: object) -> object:
    if not isinstance(spec, PartitionSpec) or len(spec) != 1:
      return spec
    return {'data': PartitionSpec(TWO_DATA_AXES), 'model': None}.get(spec[0], spec)

  several = isinstance(resources, tuple | list)
  return jax.tree.map(override, resources, is_leaf=lambda x: not several or x is not resources)


def prepend_expert(axes: T, state_filter: StateFilter | None) -> T:
  """Returns a tree of AxisNames, or None, with 'expert' put before those of the arrays that the filter accepts.

  Optimizer state that is factored per expert has one more axis than its rules name. None accepts nothing.
  """
  accepts = _as_function(state_filter)

  def prepended(path: Path, names: AxisNames | None) -> AxisNames | None:
    return AxisNames('expert', *(names or ())) if accepts('/'.join(path)) else names

  return map_with_path(prepended, axes, is_leaf=lambda x: x is None)


def infer_state_filter(opt_states: object) -> str | None:
  """Returns the pattern of the slots that keep an expert axis of their own, by the optimizer whose state is given.

  For Adafactor with factored statistics, these are those of experts, such as 'mlp/expert/w/v_row'. None for any other
  transformation of optax: its state inherits the axes of the parameters. Raises ShardingError if it is not of optax.
  """
  rows = [slot for path, slot in leaves_by_path(opt_states).items() if 'v_row' in path]
  if rows:
    return FACTORED_EXPERT_STATE if any(slot.shape[-1:] != (1,) for slot in rows) else None
  # Every transformation of optax keeps a tuple, which a learner may have several of in a dict.
  if any(not isinstance(state, tuple) for state in jax.tree.leaves(opt_states, is_leaf=lambda x: isinstance(x, tuple))):
    raise ShardingError(
      'the optimizer state with an expert axis can be inferred for Adafactor only, and for what inherits all axes, as '
      f'the other optimizers of optax do; pass state_filter=, a pattern such as {FACTORED_EXPERT_STATE!r}, or None'
    )
  return None


class MoePjitPartitioner(PjitPartitioner):
  """Splits experts over 'data', and uses 'model' as a second data axis where there are fewer experts than devices.

  Args:
    num_experts: number of experts; 0 for none.
    logical_axis_rules: the rules; by default `standard_logical_axis_rules` of this module.
    state_filter: which optimizer slots keep the expert axis of their parameter, though they do not have its shape: a
      pattern on paths such as 'mlp/expert/w/v_row', or a function of them; 'infer' finds those of a factored Adafactor;
      None for none.
    num_partitions, model_parallel_submesh, **kwargs: as for `PjitPartitioner`.
  """

  def __init__(
    self,
    num_experts: int,
    num_partitions: int | None = None,
    model_parallel_submesh: Submesh = None,
    *,
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    logical_axis_rules: LogicalAxisRules | None = None,
    state_filter: StateFilter | None = 'infer',
    **kwargs: Any,
  ):
    devices = jax.devices(backend) if devices is None else devices
    where = num_partitions, model_parallel_submesh
    self.two_data_axes = uses_two_data_axes(num_experts, len(devices), *where)
    if logical_axis_rules is None:
      logical_axis_rules = standard_logical_axis_rules(num_experts, *where, num_devices=len(devices))
    if self.two_data_axes:
      where = len(devices) // num_experts, None
    super().__init__(*where, devices=devices, logical_axis_rules=logical_axis_rules, **kwargs)
    self._state_filter = state_filter

  @property
  def data_axes(self) -> tuple[str, ...]:
    return TWO_DATA_AXES if self.two_data_axes else super().data_axes

  def get_logical_axes(self, train_state: TrainState) -> TrainState[AxisNames]:
    axes = super().get_logical_axes(train_state)
    if not hasattr(train_state, 'as_logical_axes') or getattr(axes, 'opt_states', None) is None:
      return axes
    state_filter = self._filter_of(getattr(train_state, 'opt_states', None))
    return dataclasses.replace(axes, opt_states=prepend_expert(axes.opt_states, state_filter))

  def _overridden(self, resources: object) -> object:
    return override_partition_specs(resources) if self.two_data_axes else resources

  def _kept_names(self, opt_states: object) -> KeptNames:
    # Inferred only if there is a slot that does not inherit all names.
    accepts = functools.cache(lambda: _as_function(self._filter_of(opt_states)))
    return lambda path: ('expert',) if accepts()(path) else ()

  def _filter_of(self, opt_states: object) -> StateFilter | None:
    return infer_state_filter(opt_states) if self._state_filter == 'infer' else self._state_filter


def _as_function(state_filter: StateFilter | None) -> Callable[[str], bool]:
  if callable(state_filter):
    return state_filter
  return lambda path: state_filter is not None and path_matches(state_filter, tuple(path.split('/')))
