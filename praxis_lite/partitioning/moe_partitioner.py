"""The partitioner for mixtures of experts; `moe.py` explains what it changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from praxis_lite.partitioning import moe
from praxis_lite.partitioning.axis_names import AxisNames
from praxis_lite.partitioning.layout import is_spec
from praxis_lite.partitioning.partitioners import PjitPartitioner
from praxis_lite.partitioning.paths import leaves_by_path, path_matches, path_names
from praxis_lite.partitioning.pjitted import PjittedFnWithContext
from praxis_lite.partitioning.rules import LogicalAxisRules
from praxis_lite.partitioning.specs import complete_spec
from praxis_lite.partitioning.state_specs import dims_by_size, owner_of


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
    self.two_data_axes = moe.uses_two_data_axes(num_experts, len(devices), num_partitions, model_parallel_submesh)
    if self.two_data_axes:
      num_partitions, model_parallel_submesh = len(devices) // num_experts, None
    if logical_axis_rules is None:
      logical_axis_rules = moe.moe_logical_axis_rules(self.two_data_axes)
    super().__init__(
      num_partitions, model_parallel_submesh, devices=devices, logical_axis_rules=logical_axis_rules, **kwargs
    )
    self._state_filter = state_filter

  @property
  def data_axes(self) -> tuple[str, ...]:
    return moe.TWO_DATA_AXES if self.two_data_axes else super().data_axes

  def get_logical_axes(self, train_state: Any) -> Any:
    axes = super().get_logical_axes(train_state)
    pattern = self._state_filter
    if pattern == 'infer':
      pattern = moe.infer_state_filter(train_state.opt_states)
    if pattern is None:
      return axes
    if hasattr(train_state, 'as_logical_axes'):
      return axes.replace(opt_states=moe.prepend_expert(axes.opt_states, pattern))
    return axes.replace(opt_states=_keep_expert(train_state, axes, pattern))

  def get_mesh_axes(self, train_state: Any) -> Any:
    specs = super().get_mesh_axes(train_state)
    if not self.two_data_axes:
      return specs
    return jax.tree.map(lambda spec: complete_spec(moe.override_partition_spec(spec), len(spec)), specs)

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
      override = functools.partial(jax.tree.map, moe.override_partition_spec, is_leaf=is_spec)
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
    if not path_matches(pattern, moe.slot_path(path, owner)):
      return names
    expert = names_of[owner].index('expert')
    dims = dims_by_size(path, slot.shape, params[owner])
    return AxisNames(*('expert' if dim == expert else name for name, dim in zip(names, dims)))

  return jax.tree_util.tree_map_with_path(keep, axes.opt_states, train_state.opt_states)
