"""Two ways in which a mesh splits experts: the meshes, the logical axis rules, and the specs of arguments.

Two data axes, as in the first versions of T5X (Roberts et al., 2022). Experts are split over 'data', and tokens travel
to their experts. With fewer experts than devices and no model parallelism, some devices would have no expert. To avoid
that, the mesh gets a 'model' axis of size devices // experts, which serves as a second data axis:

                                usual          two data axes
    'batch'                     'data'         ('data', 'model')
    'expert'                    'data'         'data'
    rules to 'model'            'model'        None
    'expert_replicas'           None           'model'
    data is split over          ('data',)      (('data', 'model'),)
    a spec of an argument
      ('data',)                 ('data',)      (('data', 'model'),)
      ('model',)                ('model',)     None

An expert axis, as in later versions. 'data' of the usual mesh is split into (data, expert); the size of 'expert' is the
largest divisor that does not exceed the number of expert partitions. The mesh, ('data', 'expert', 'model'), serves
experts and all other layers:

    'batch'                     ('expert', 'data')
    'expert'                    'expert'
    'expert_mlp'                'model'
    'expert_replicas'           'data'
    'unmodeled'                 None
    data is split over          (('expert', 'data'),)
    a spec of an argument
      ('data',)                 (('expert', 'data'),)

`partition` changes only a spec that is given for a whole argument. A tree of specs belongs to parameters or optimizer
state, and the rules have already been applied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.bridges.t5x.meshes import Device, Submesh, default_mesh, get_cpu_mesh, num_model_partitions
from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding.mesh import auto_mesh
from praxis_lite.sharding.rules import LogicalAxisRule, LogicalAxisRules, standard_logical_axis_rules

TWO_DATA_AXES = ('data', 'model')
EXPERT_DATA_AXES = ('expert', 'data')
_EXPERT_MESH_AXES = ('data', 'expert', 'model')
_TWO_DATA_AXES_RULES = (
  *(('expert', 'data'), ('expert_mlp', 'model')),
  *(('expert_group', None), ('expert_replicas', None), ('unmodeled', None)),
)
_EXPERT_AXIS_RULES = (
  *(('expert', 'expert'), ('expert_mlp', 'model')),
  *(('expert_replicas', 'data'), ('unmodeled', None)),
)


# -------------------------------------------------------------------- two data axes


def uses_two_data_axes(
  num_experts: int, num_devices: int, num_partitions: int | None = None, model_parallel_submesh: Submesh = None
) -> bool:
  """Returns whether 'model' serves as a second data axis: if there are fewer experts than devices, and no model
  parallelism.

  Raises ShardingError if neither or both of num_partitions and model_parallel_submesh are given.
  """
  return num_model_partitions(num_partitions, model_parallel_submesh) <= 1 and 0 < num_experts < num_devices


def moe_logical_axis_rules(
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
  """Returns the standard rules and those for experts, with two data axes if `uses_two_data_axes` returns True.

  Args:
    num_experts, num_partitions, model_parallel_submesh: as for `uses_two_data_axes`.
    num_devices: number of devices; by default all devices of JAX. All other arguments are as for the standard rules.

  Raises:
    ShardingError: parameter_partitioning_dims is not 1 (experts use 'data'); or as in `uses_two_data_axes`.
  """
  _check_parameter_dims(parameter_partitioning_dims)
  additional_rules = (*_TWO_DATA_AXES_RULES, *(additional_rules or ()))
  rules = standard_logical_axis_rules(activation_partitioning_dims, 1, additional_rules, override_rules)
  num_devices = jax.device_count() if num_devices is None else num_devices
  if not uses_two_data_axes(num_experts, num_devices, num_partitions, model_parallel_submesh):
    return rules
  fixed = {'batch': TWO_DATA_AXES, 'expert_replicas': 'model'}
  return tuple((name, fixed.get(name, None if axes == 'model' else axes)) for name, axes in rules)


def to_two_data_axes(resources: object) -> object:
  """Converts specs of arguments or results from the usual mesh to one with two data axes."""
  changed = {('data',): PartitionSpec(TWO_DATA_AXES), ('model',): None}
  return _map_whole_arguments(lambda spec: changed.get(tuple(spec), spec), resources)


# -------------------------------------------------------------------- an expert axis


def default_moe_mesh(
  num_expert_partitions: int,
  num_partitions: int | None = None,
  model_parallel_submesh: Submesh = None,
  backend: str | None = None,
  *,
  devices: Sequence[Device] | None = None,
) -> Mesh:
  """Returns the mesh ('data', 'expert', 'model') for experts in at most `num_expert_partitions` partitions.

  Args:
    num_expert_partitions: at most the number of experts. The size of 'expert' is the largest number up to it that
      divides the size of 'data' in the usual mesh.
    num_partitions, model_parallel_submesh, backend, devices: as for `default_mesh`, which makes the usual mesh.

  Raises:
    ShardingError: num_expert_partitions is less than 1; or as in `default_mesh`.
  """
  if num_expert_partitions < 1:
    raise ShardingError(f'num_expert_partitions: expected at least 1, got {num_expert_partitions}')
  usual = default_mesh(num_partitions, model_parallel_submesh, backend, devices=devices)
  data, model = usual.devices.shape
  expert = next(size for size in range(min(num_expert_partitions, data), 0, -1) if data % size == 0)
  return auto_mesh(usual.devices.reshape(-1, expert, model), _EXPERT_MESH_AXES)


def moe_host_mesh(devices: Sequence[Device] | None = None) -> Mesh:
  """Returns the mesh with 'data' over processes and 'expert' over the devices of each process; 'model' has size 1."""
  return auto_mesh(get_cpu_mesh(devices).devices[..., None], _EXPERT_MESH_AXES)


def expert_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
  override_rules: LogicalAxisRules | None = None,
) -> tuple[LogicalAxisRule, ...]:
  """Returns the standard rules and those for experts, for a mesh with an expert axis.

  Raises:
    ShardingError: parameter_partitioning_dims is not 1.
  """
  _check_parameter_dims(parameter_partitioning_dims)
  additional_rules = (*_EXPERT_AXIS_RULES, *(additional_rules or ()))
  rules = standard_logical_axis_rules(activation_partitioning_dims, 1, additional_rules, override_rules)
  return tuple((name, EXPERT_DATA_AXES if (name, axes) == ('batch', 'data') else axes) for name, axes in rules)


def to_expert_axis(resources: object) -> object:
  """Converts specs of arguments or results from the usual mesh to one with an expert axis."""
  return _map_whole_arguments(
    lambda spec: PartitionSpec(EXPERT_DATA_AXES) if tuple(spec) == ('data',) else spec, resources
  )


# -------------------------------------------------------------------- both


def _check_parameter_dims(parameter_partitioning_dims: int) -> None:
  if parameter_partitioning_dims != 1:
    raise ShardingError(
      f'parameter_partitioning_dims={parameter_partitioning_dims} is not supported with experts, which are split over '
      "'data' themselves; it must be 1"
    )


def _map_whole_arguments(fn: Callable[[PartitionSpec], PartitionSpec | None], resources: object) -> object:
  """Applies `fn` to a spec, or to each spec that is an item of a list or tuple; returns anything else unchanged."""
  several = isinstance(resources, tuple | list)
  return jax.tree.map(
    lambda spec: fn(spec) if isinstance(spec, PartitionSpec) else spec,
    resources,
    is_leaf=lambda x: not several or x is not resources,
  )
