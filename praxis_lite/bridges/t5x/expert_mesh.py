"""A mesh with a separate axis for experts, and its rules, as in later versions of T5X.

The axis 'data' of the usual mesh is split into (data, expert); the size of 'expert' is the largest divisor that does
not exceed the number of expert partitions. The mesh, ('data', 'expert', 'model'), serves experts and all other layers:

    'batch'                 ('expert', 'data')
    'expert'                'expert'
    'expert_mlp'            'model'
    'expert_replicas'       'data'
    'unmodeled'             None
    data is split over      (('expert', 'data'),)
    a single spec passed to `partition`, but not a spec in a tree of parameters, which the rules have decided:
      ('data',)             (('expert', 'data'),)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, PartitionSpec

from praxis_lite.bridges.t5x import meshes
from praxis_lite.bridges.t5x.meshes import Device, Submesh
from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding import rules as base_rules
from praxis_lite.sharding.mesh import auto_mesh
from praxis_lite.sharding.rules import LogicalAxisRule, LogicalAxisRules

DATA_AXES = ('expert', 'data')
_NAMES = ('data', 'expert', 'model')
_EXPERT_RULES = (
  *(('expert', 'expert'), ('expert_mlp', 'model')),
  *(('expert_replicas', 'data'), ('unmodeled', None)),
)


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
  usual = meshes.default_mesh(num_partitions, model_parallel_submesh, backend, devices=devices)
  data, model = usual.devices.shape
  expert = next(size for size in range(min(num_expert_partitions, data), 0, -1) if data % size == 0)
  return auto_mesh(usual.devices.reshape(-1, expert, model), _NAMES)


def get_cpu_mesh(devices: Sequence[Device] | None = None) -> Mesh:
  """Returns the mesh with 'data' over processes and 'expert' over the devices of each process; 'model' has size 1."""
  usual = meshes.get_cpu_mesh(devices)
  return auto_mesh(usual.devices[..., None], _NAMES)


def get_gpu_mesh(devices: Sequence[Device] | None = None) -> Mesh:
  """Like `get_cpu_mesh`."""
  return get_cpu_mesh(devices)


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
  override_rules: LogicalAxisRules | None = None,
) -> tuple[LogicalAxisRule, ...]:
  """Returns the standard rules and those for experts, for a mesh ('data', 'expert', 'model').

  Raises:
    ShardingError: parameter_partitioning_dims is not 1.
  """
  if parameter_partitioning_dims != 1:
    raise ShardingError(
      f'parameter_partitioning_dims={parameter_partitioning_dims} is not supported with experts; it must be 1'
    )
  rules = base_rules.standard_logical_axis_rules(
    activation_partitioning_dims, 1, (*_EXPERT_RULES, *(additional_rules or ())), override_rules
  )
  return tuple((name, DATA_AXES if (name, axes) == ('batch', 'data') else axes) for name, axes in rules)


def override_partition_specs(resources: object) -> object:
  """Returns the specs of arguments or results for a mesh with experts; see the table above.

  Only a single spec for a whole argument changes: trees of specs belong to parameters and optimizer state.
  """

  def override(spec: object) -> object:
    return PartitionSpec(DATA_AXES) if isinstance(spec, PartitionSpec) and tuple(spec) == ('data',) else spec

  several = isinstance(resources, tuple | list)
  return jax.tree.map(override, resources, is_leaf=lambda x: not several or x is not resources)
