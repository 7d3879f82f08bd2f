"""The partitioner of mixtures of experts, and the axes of their optimizer state. See `moe_rules.py` for the splits.

This module has the names of T5X's `t5x.contrib.moe.partitioning` (Roberts et al., 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.bridges.t5x.axis_names import AxisNames, KeptNames
from praxis_lite.bridges.t5x.meshes import Device, Submesh, default_mesh
from praxis_lite.bridges.t5x.moe_rules import (
  EXPERT_DATA_AXES,
  TWO_DATA_AXES,
  default_moe_mesh as default_moe_mesh,
  expert_axis_rules,
  moe_host_mesh as get_cpu_mesh,  # noqa: F401 (T5X's names)
  moe_host_mesh as get_gpu_mesh,  # noqa: F401
  moe_logical_axis_rules as standard_logical_axis_rules,
  to_expert_axis,
  to_two_data_axes,
  uses_two_data_axes,
)
from praxis_lite.bridges.t5x.partitioners import PjitPartitioner
from praxis_lite.common.errors import ShardingError
from praxis_lite.common.trees import Path, leaves_by_path, map_with_path, path_matches
from praxis_lite.sharding.rules import LogicalAxisRules

if TYPE_CHECKING:
  from praxis_lite.training.state import TrainState

T = TypeVar('T')
# Decides whether an optimizer slot keeps the expert axis: a pattern on its path, or a function of the path.
StateFilter = str | Callable[[str], bool]

FACTORED_EXPERT_STATE = r'.*expert.*/(kernel|w)/v_.*'


def data_partition_spec(two_data_axes: bool) -> PartitionSpec:
  """Returns the spec that splits batches: over both data axes if `two_data_axes`, otherwise only over 'data'."""
  return PartitionSpec(TWO_DATA_AXES if two_data_axes else 'data')


def prepend_expert(axes: T, state_filter: StateFilter | None, kind: type = AxisNames) -> T:
  """Returns a tree of names in which 'expert' precedes the names of each array that the filter accepts.

  If an optimizer factors its statistics for each expert separately, their arrays have one axis more than their names.
  Names that are AxisNames or a PartitionSpec stay of their type; names that are None become of type `kind`. A filter of
  None accepts no array.
  """
  accepts = _to_predicate(state_filter)

  def prepend(path: Path, names: Any) -> Any:
    new = kind if names is None else PartitionSpec if isinstance(names, PartitionSpec) else AxisNames
    return new('expert', *(names or ())) if accepts('/'.join(path)) else names

  return map_with_path(prepend, axes, is_leaf=lambda x: x is None)


def infer_state_filter(opt_states: object) -> str | None:
  """Infers from an optimizer's state the pattern of the slots that keep an expert axis.

  For Adafactor with factored statistics, these are the slots of experts, such as 'mlp/expert/w/v_row'. For any other
  optax transformation the result is None, because its state inherits the axes of the parameters. Raises ShardingError
  if the state is not from optax.
  """
  rows = [slot for path, slot in leaves_by_path(opt_states).items() if 'v_row' in path]
  if rows:
    return FACTORED_EXPERT_STATE if any(slot.shape[-1:] != (1,) for slot in rows) else None
  # The state of every optax transformation is a tuple; a learner may have a dict of several such states.
  if any(not isinstance(state, tuple) for state in jax.tree.leaves(opt_states, is_leaf=lambda x: isinstance(x, tuple))):
    raise ShardingError(
      'which optimizer state has an expert axis can be inferred for Adafactor only, and for optimizers of optax whose '
      f'state inherits all axes; pass state_filter=, a pattern such as {FACTORED_EXPERT_STATE!r}, or None'
    )
  return None


def infer_state_filter_of(optimizer_def: Any) -> str | None:
  """Infers the pattern of `infer_state_filter` from the definition of a T5X optimizer; None if no slot is factored.

  An optimizer whose hyperparameters have `factored` is treated as Adafactor. An optimizer with an attribute
  `optax_optimizer` wraps an optax transformation, and the result is None. Several `sub_optimizers` must have one type
  and give one result.

  Raises:
    ShardingError: the optimizer is not one of these, or its sub-optimizers differ in type or result.
  """
  several = getattr(optimizer_def, 'sub_optimizers', None)
  if several is not None:
    if len({type(optimizer) for optimizer in several}) > 1:
      raise ShardingError(
        f'{type(optimizer_def).__name__}: which state has an expert axis can be inferred only if all suboptimizers '
        f'have the same type; they are {", ".join(type(o).__name__ for o in several)}; pass state_filter_fn='
      )
    inferred = [infer_state_filter_of(optimizer) for optimizer in several]
    if len({*inferred}) > 1:
      raise ShardingError(
        f'{type(optimizer_def).__name__}: all suboptimizers must be either factored or unfactored to infer which state '
        'has an expert axis; pass state_filter_fn='
      )
    return inferred[0] if inferred else None
  if hasattr(optimizer_def, 'optax_optimizer'):
    return None
  factored = getattr(getattr(optimizer_def, 'hyper_params', None), 'factored', None)
  if factored is None:
    raise ShardingError(
      f'{type(optimizer_def).__name__}: which state has an expert axis can be inferred only for Adafactor and wrappers '
      f'of optax; pass state_filter_fn=, a pattern such as {FACTORED_EXPERT_STATE!r} or a function of the path'
    )
  return FACTORED_EXPERT_STATE if factored else None


class MoePjitPartitioner(PjitPartitioner):
  """A partitioner that splits experts over 'data'; with fewer experts than devices, 'model' is a second data axis.

  With `num_expert_partitions`, experts have a separate mesh axis; see `moe_rules.py`.

  The partitioner adds the expert axis to those arrays of optimizer state that the filter accepts, if the train state
  knows its logical axes. The states of this package and T5X's `FlaxOptimTrainState` know them.

  Args:
    num_experts: number of experts; 0 if there are none. Must be None with `num_expert_partitions`.
    params_on_devices: see `PjitPartitioner`.
    logical_axis_rules: the rules; by default `moe_logical_axis_rules`, or `expert_axis_rules` with
      `num_expert_partitions`.
    state_filter: which optimizer slots keep the expert axis of their parameter, even if they do not have its shape: a
      pattern on paths such as 'mlp/expert/w/v_row', or a function of such paths; 'infer' finds those of a factored
      Adafactor; None means no slots.
    state_filter_fn: T5X's name for the filter; in this argument None means 'infer'.
    num_expert_partitions: the largest number of parts that the experts are split into; replaces `num_experts`.
    num_partitions, model_parallel_submesh, **kwargs: as for `PjitPartitioner`.

  Raises:
    ShardingError: neither or both of num_experts and num_expert_partitions are given, or both filters; or
      num_expert_partitions with ici_mesh_shape; or as in `PjitPartitioner`.
  """

  def __init__(
    self,
    num_experts: int | None = None,
    num_partitions: int | None = None,
    model_parallel_submesh: Submesh = None,
    params_on_devices: bool = True,
    logical_axis_rules: LogicalAxisRules | None = None,
    state_filter_fn: StateFilter | None = None,
    *,
    num_expert_partitions: int | None = None,
    devices: Sequence[Device] | None = None,
    backend: str | None = None,
    state_filter: StateFilter | None = 'infer',
    **kwargs: Any,
  ):
    if (num_experts is None) == (num_expert_partitions is None):
      given = 'neither is' if num_experts is None else 'both are'
      raise ShardingError(f'pass num_experts or num_expert_partitions: exactly one of them; {given} given')
    if state_filter_fn is not None and state_filter != 'infer':
      raise ShardingError('state_filter and state_filter_fn are two names for one filter; give one of them')
    devices = jax.devices(backend) if devices is None else devices
    where = num_partitions, model_parallel_submesh
    self._num_expert_partitions = num_expert_partitions
    self.two_data_axes = False
    if num_experts is None:
      rules = expert_axis_rules()
    else:
      self.two_data_axes = uses_two_data_axes(num_experts, len(devices), *where)
      rules = standard_logical_axis_rules(num_experts, *where, num_devices=len(devices))
      if self.two_data_axes:
        where = len(devices) // num_experts, None
    logical_axis_rules = rules if logical_axis_rules is None else logical_axis_rules
    super().__init__(*where, params_on_devices, devices=devices, logical_axis_rules=logical_axis_rules, **kwargs)
    if num_expert_partitions is not None and self._mesh_args[3] is not None:
      raise ShardingError('ici_mesh_shape: the mesh of num_expert_partitions has other axes; give num_partitions')
    self._state_filter = state_filter if state_filter_fn is None else state_filter_fn

  @functools.cached_property
  def mesh(self) -> Mesh:
    if self._num_expert_partitions is None:
      return default_mesh(*self._mesh_args)
    num_partitions, submesh, *_, devices = self._mesh_args
    return default_moe_mesh(self._num_expert_partitions, num_partitions, submesh, devices=devices)

  @property
  def data_axes(self) -> tuple[str, ...]:
    if self._num_expert_partitions is not None:
      return EXPERT_DATA_AXES
    return TWO_DATA_AXES if self.two_data_axes else super().data_axes

  def get_logical_axes(self, train_state: TrainState) -> TrainState[AxisNames]:
    axes = super().get_logical_axes(train_state)
    if not hasattr(train_state, 'as_logical_axes'):
      return axes
    if getattr(axes, 'opt_states', None) is not None:
      state_filter = self._filter_of(getattr(train_state, 'opt_states', None))
      return dataclasses.replace(axes, opt_states=prepend_expert(axes.opt_states, state_filter))
    return axes if getattr(axes, '_optimizer', None) is None else self._t5x_axes(axes, train_state)

  def _t5x_axes(self, axes: Any, train_state: Any) -> Any:
    """Returns the axes of a T5X train state, after adding the expert axis to those of its optimizer's state."""
    state_filter = self._state_filter
    if state_filter == 'infer':
      state_filter = infer_state_filter_of(train_state._optimizer.optimizer_def)
    state = axes._optimizer.state
    slots = prepend_expert(state.param_states, state_filter, PartitionSpec)
    optimizer = dataclasses.replace(axes._optimizer, state=dataclasses.replace(state, param_states=slots))
    return dataclasses.replace(axes, _optimizer=optimizer)

  def _override_specs(self, resources: object) -> object:
    if self._num_expert_partitions is not None:
      return to_expert_axis(resources)
    return to_two_data_axes(resources) if self.two_data_axes else resources

  def _kept_names(self, opt_states: object) -> KeptNames:
    # The filter is inferred only if a slot does not inherit all names.
    accepts = functools.cache(lambda: _to_predicate(self._filter_of(opt_states)))
    return lambda path: ('expert',) if accepts()(path) else ()

  def _filter_of(self, opt_states: object) -> StateFilter | None:
    return infer_state_filter(opt_states) if self._state_filter == 'infer' else self._state_filter


def _to_predicate(state_filter: StateFilter | None) -> Callable[[str], bool]:
  if callable(state_filter):
    return state_filter
  return lambda path: state_filter is not None and path_matches(state_filter, tuple(path.split('/')))
