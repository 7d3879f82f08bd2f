"""Decides how arrays are split over the devices of a mesh, by pure functions of declarations and mesh sizes.

This package does not depend on steps, learners or models.
"""

from praxis_lite.sharding.batch import batch_size, pad_batch, padded_batch_shape, put_on_mesh
from praxis_lite.sharding.constraints import (
  axis_rules,
  global_mesh_defined,
  reshard_input_based_on_rank_fn,
  with_logical_constraint,
  with_sharding_constraint,
)
from praxis_lite.sharding.explicit import (
  fold_rng_over_axis,
  gather_array_with_mean_grads,
  gather_params,
  shard_module_params,
  shard_params,
)
from praxis_lite.sharding.guards import GuardedJit
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.sharding.padding import local_shape, num_parts, pad_amounts, pad_to, padded_shape, slice_to
from praxis_lite.sharding.placement import place_variables
from praxis_lite.sharding.rules import logical_to_mesh_axes, standard_logical_axis_rules
from praxis_lite.sharding.slots import opt_state_specs
from praxis_lite.sharding.specs import (
  complete_spec,
  get_input_partition_specs,
  infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec,
  spec_axes,
  to_partition_spec,
)
from praxis_lite.sharding.strategies import explain_sharding, infer_sharding, register_rule

__all__ = [
  'GuardedJit',
  'StateLayout',
  'axis_rules',
  'batch_size',
  'complete_spec',
  'create_device_mesh',
  'explain_sharding',
  'fold_rng_over_axis',
  'gather_array_with_mean_grads',
  'gather_params',
  'get_input_partition_specs',
  'global_mesh_defined',
  'infer_partition_spec_based_on_rank_fn',
  'infer_sharding',
  'local_shape',
  'logical_to_mesh_axes',
  'num_parts',
  'opt_state_specs',
  'pad_amounts',
  'pad_batch',
  'pad_to',
  'padded_batch_shape',
  'padded_shape',
  'place_variables',
  'put_on_mesh',
  'register_rule',
  'reshard_input_based_on_rank_fn',
  'shard_module_params',
  'shard_on_batch_dim_partition_spec',
  'shard_params',
  'slice_to',
  'spec_axes',
  'standard_logical_axis_rules',
  'to_partition_spec',
  'with_logical_constraint',
  'with_sharding_constraint',
]
