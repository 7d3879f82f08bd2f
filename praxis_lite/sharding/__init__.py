"""Where arrays are stored on a mesh, as a pure function of declarations and mesh sizes.

This package does not depend on steps, learners or models.
"""

from praxis_lite.sharding.batch import (
  batch_size as batch_size,
  pad_batch as pad_batch,
  padded_batch_shape as padded_batch_shape,
  put_on_mesh as put_on_mesh,
)
from praxis_lite.sharding.constraints import (
  axis_rules as axis_rules,
  global_mesh_defined as global_mesh_defined,
  reshard_input_based_on_rank_fn as reshard_input_based_on_rank_fn,
  with_logical_constraint as with_logical_constraint,
  with_sharding_constraint as with_sharding_constraint,
)
from praxis_lite.sharding.explicit import (
  fold_rng_over_axis as fold_rng_over_axis,
  gather_array_with_mean_grads as gather_array_with_mean_grads,
  gather_params as gather_params,
  shard_module_params as shard_module_params,
  shard_params as shard_params,
)
from praxis_lite.sharding.guards import GuardedJit as GuardedJit
from praxis_lite.sharding.layout import StateLayout as StateLayout
from praxis_lite.sharding.mesh import create_device_mesh as create_device_mesh
from praxis_lite.sharding.padding import (
  local_shape as local_shape,
  num_parts as num_parts,
  pad_amounts as pad_amounts,
  pad_to as pad_to,
  padded_shape as padded_shape,
  slice_to as slice_to,
)
from praxis_lite.sharding.placement import place_variables as place_variables
from praxis_lite.sharding.rules import (
  logical_to_mesh_axes as logical_to_mesh_axes,
  standard_logical_axis_rules as standard_logical_axis_rules,
)
from praxis_lite.sharding.slots import opt_state_specs as opt_state_specs
from praxis_lite.sharding.specs import (
  complete_spec as complete_spec,
  get_input_partition_specs as get_input_partition_specs,
  infer_partition_spec_based_on_rank_fn as infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec as shard_on_batch_dim_partition_spec,
  spec_axes as spec_axes,
  to_partition_spec as to_partition_spec,
)
from praxis_lite.sharding.strategies import (
  explain_sharding as explain_sharding,
  infer_sharding as infer_sharding,
  register_rule as register_rule,
)
