"""Where tensors live: meshes, specs, padding, rules, strategies. Knows weights and errors, no layer, model or task."""

from praxis_lite.partitioning.axis_names import AxisNames
from praxis_lite.partitioning.batch import batch_size, pad_batch, padded_batch_shape, put_on_mesh
from praxis_lite.partitioning.chunks import LocalChunker, LocalChunkInfo
from praxis_lite.partitioning.collectives import assert_collectives, collectives
from praxis_lite.partitioning.constraints import (
  global_mesh_defined,
  reshard_input_based_on_rank_fn,
  with_sharding_constraint,
)
from praxis_lite.partitioning.data_layout import DataLayout
from praxis_lite.partitioning.device_meshes import (
  bounds_from_last_device,
  default_mesh,
  get_coords,
  get_cpu_mesh,
  get_gpu_mesh,
  get_mesh,
)
from praxis_lite.partitioning.explicit import (
  accumulate_gradients,
  fold_rng_over_axis,
  gather_array_with_mean_grads,
  gather_params,
  shard_params,
  sync_gradients,
)
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.logical_constraints import axis_rules, with_logical_constraint
from praxis_lite.partitioning.mesh import create_device_mesh
from praxis_lite.partitioning.model_states import initialize_partitioned_model_states
from praxis_lite.partitioning.moe_partitioner import MoePjitPartitioner
from praxis_lite.partitioning.padding import local_shape, num_parts, pad_amounts, pad_to, padded_shape, slice_to
from praxis_lite.partitioning.parameter_table import format_parameter_table, parameter_table
from praxis_lite.partitioning.partitioners import BasePartitioner, BasePjitPartitioner, PjitPartitioner
from praxis_lite.partitioning.pjitted import PjittedFnWithContext
from praxis_lite.partitioning.placement import place_variables
from praxis_lite.partitioning.rules import logical_to_mesh_axes, standard_logical_axis_rules
from praxis_lite.partitioning.specs import (
  complete_spec,
  get_input_partition_specs,
  infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec,
  spec_axes,
  to_partition_spec,
)
from praxis_lite.partitioning.spmd import (
  PartitionedModel,
  PartitionedTask,
  get_partitioned_spmd_model_decode_fn,
  partition_spmd_model,
)
from praxis_lite.partitioning.state_specs import opt_state_specs
from praxis_lite.partitioning.steps import decode_step, eval_step_single_learner, train_step_single_learner
from praxis_lite.partitioning.strategies import explain_sharding, infer_sharding
from praxis_lite.partitioning.strategy_rules import register_rule
from praxis_lite.partitioning.train_state import TrainState

__all__ = [
  'AxisNames',
  'BasePartitioner',
  'BasePjitPartitioner',
  'DataLayout',
  'LocalChunkInfo',
  'LocalChunker',
  'MoePjitPartitioner',
  'PartitionedModel',
  'PartitionedTask',
  'PjitPartitioner',
  'PjittedFnWithContext',
  'StateLayout',
  'TrainState',
  'accumulate_gradients',
  'assert_collectives',
  'axis_rules',
  'batch_size',
  'bounds_from_last_device',
  'collectives',
  'complete_spec',
  'create_device_mesh',
  'decode_step',
  'default_mesh',
  'eval_step_single_learner',
  'explain_sharding',
  'fold_rng_over_axis',
  'format_parameter_table',
  'gather_array_with_mean_grads',
  'gather_params',
  'get_coords',
  'get_cpu_mesh',
  'get_gpu_mesh',
  'get_input_partition_specs',
  'get_mesh',
  'get_partitioned_spmd_model_decode_fn',
  'global_mesh_defined',
  'infer_partition_spec_based_on_rank_fn',
  'infer_sharding',
  'initialize_partitioned_model_states',
  'local_shape',
  'logical_to_mesh_axes',
  'num_parts',
  'opt_state_specs',
  'pad_amounts',
  'pad_batch',
  'pad_to',
  'padded_batch_shape',
  'padded_shape',
  'parameter_table',
  'partition_spmd_model',
  'place_variables',
  'put_on_mesh',
  'register_rule',
  'reshard_input_based_on_rank_fn',
  'shard_on_batch_dim_partition_spec',
  'shard_params',
  'slice_to',
  'spec_axes',
  'standard_logical_axis_rules',
  'sync_gradients',
  'to_partition_spec',
  'train_step_single_learner',
  'with_logical_constraint',
  'with_sharding_constraint',
]
