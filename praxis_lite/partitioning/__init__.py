"""Where tensors live: meshes, specs, padding, rules, strategies. Knows weights and errors, no layer, model or task."""

from praxis_lite.partitioning.batch import batch_size, pad_batch, padded_batch_shape, put_on_mesh
from praxis_lite.partitioning.constraints import (
  global_mesh_defined,
  reshard_input_based_on_rank_fn,
  with_sharding_constraint,
)
from praxis_lite.partitioning.mesh import create_device_mesh
from praxis_lite.partitioning.padding import local_shape, num_parts, pad_amounts, pad_to, padded_shape, slice_to
from praxis_lite.partitioning.specs import (
  complete_spec,
  get_input_partition_specs,
  infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec,
  spec_axes,
  to_partition_spec,
)
from praxis_lite.partitioning.state_specs import opt_state_specs

__all__ = [
  'batch_size',
  'complete_spec',
  'create_device_mesh',
  'get_input_partition_specs',
  'global_mesh_defined',
  'infer_partition_spec_based_on_rank_fn',
  'local_shape',
  'num_parts',
  'opt_state_specs',
  'pad_amounts',
  'pad_batch',
  'pad_to',
  'padded_batch_shape',
  'padded_shape',
  'put_on_mesh',
  'reshard_input_based_on_rank_fn',
  'shard_on_batch_dim_partition_spec',
  'slice_to',
  'spec_axes',
  'to_partition_spec',
  'with_sharding_constraint',
]
