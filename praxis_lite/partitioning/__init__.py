"""The names in the `partitioning` modules of Praxis and T5X, imported from where they are defined.

They are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from praxis_lite.common.importing import lazy_names

if TYPE_CHECKING:
  from praxis_lite.bridges.t5x import (
    AxisNames as AxisNames,
    BasePartitioner as BasePartitioner,
    BasePjitPartitioner as BasePjitPartitioner,
    DataLayout as DataLayout,
    LocalChunker as LocalChunker,
    LocalChunkInfo as LocalChunkInfo,
    MoePjitPartitioner as MoePjitPartitioner,
    PjitPartitioner as PjitPartitioner,
    PjittedFnWithContext as PjittedFnWithContext,
    bounds_from_last_device as bounds_from_last_device,
    data_partition_spec as data_partition_spec,
    default_mesh as default_mesh,
    default_moe_mesh as default_moe_mesh,
    get_coords as get_coords,
    get_cpu_mesh as get_cpu_mesh,
    get_gpu_mesh as get_gpu_mesh,
    get_mesh as get_mesh,
  )
  from praxis_lite.instruments.explain import (
    format_parameter_table as format_parameter_table,
    parameter_table as parameter_table,
  )
  from praxis_lite.instruments.testing import assert_collectives as assert_collectives, collectives as collectives
  from praxis_lite.sharding import (
    GuardedJit as GuardedJit,
    StateLayout as StateLayout,
    axis_rules as axis_rules,
    batch_size as batch_size,
    complete_spec as complete_spec,
    create_device_mesh as create_device_mesh,
    explain_sharding as explain_sharding,
    fold_rng_over_axis as fold_rng_over_axis,
    gather_array_with_mean_grads as gather_array_with_mean_grads,
    gather_params as gather_params,
    get_input_partition_specs as get_input_partition_specs,
    global_mesh_defined as global_mesh_defined,
    infer_partition_spec_based_on_rank_fn as infer_partition_spec_based_on_rank_fn,
    infer_sharding as infer_sharding,
    local_shape as local_shape,
    logical_to_mesh_axes as logical_to_mesh_axes,
    num_parts as num_parts,
    opt_state_specs as opt_state_specs,
    pad_amounts as pad_amounts,
    pad_batch as pad_batch,
    pad_to as pad_to,
    padded_batch_shape as padded_batch_shape,
    padded_shape as padded_shape,
    place_variables as place_variables,
    put_on_mesh as put_on_mesh,
    register_rule as register_rule,
    reshard_input_based_on_rank_fn as reshard_input_based_on_rank_fn,
    shard_module_params as shard_module_params,
    shard_on_batch_dim_partition_spec as shard_on_batch_dim_partition_spec,
    shard_params as shard_params,
    slice_to as slice_to,
    spec_axes as spec_axes,
    standard_logical_axis_rules as standard_logical_axis_rules,
    to_partition_spec as to_partition_spec,
    with_logical_constraint as with_logical_constraint,
    with_sharding_constraint as with_sharding_constraint,
  )
  from praxis_lite.training import (
    PartitionedModel as PartitionedModel,
    PartitionedTask as PartitionedTask,
    TrainState as TrainState,
    accumulate_gradients as accumulate_gradients,
    decode_step as decode_step,
    eval_step_single_learner as eval_step_single_learner,
    get_partitioned_spmd_model_decode_fn as get_partitioned_spmd_model_decode_fn,
    initialize_partitioned_model_states as initialize_partitioned_model_states,
    partition_spmd_model as partition_spmd_model,
    sync_gradients as sync_gradients,
    train_step_single_learner as train_step_single_learner,
  )

__getattr__, __dir__, __all__ = lazy_names(
  __name__,
  {
    'praxis_lite.sharding': """
      GuardedJit StateLayout axis_rules batch_size complete_spec
      create_device_mesh explain_sharding fold_rng_over_axis gather_array_with_mean_grads gather_params
      get_input_partition_specs global_mesh_defined infer_partition_spec_based_on_rank_fn infer_sharding
      local_shape logical_to_mesh_axes num_parts opt_state_specs pad_amounts pad_batch pad_to
      padded_batch_shape padded_shape place_variables put_on_mesh register_rule
      reshard_input_based_on_rank_fn shard_module_params shard_on_batch_dim_partition_spec shard_params
      slice_to spec_axes standard_logical_axis_rules to_partition_spec with_logical_constraint
      with_sharding_constraint
    """,
    'praxis_lite.training': """
      PartitionedModel PartitionedTask TrainState accumulate_gradients decode_step
      eval_step_single_learner get_partitioned_spmd_model_decode_fn initialize_partitioned_model_states
      partition_spmd_model sync_gradients train_step_single_learner
    """,
    'praxis_lite.bridges.t5x': """
      AxisNames BasePartitioner BasePjitPartitioner DataLayout LocalChunkInfo LocalChunker
      MoePjitPartitioner PjitPartitioner PjittedFnWithContext bounds_from_last_device data_partition_spec
      default_mesh default_moe_mesh get_coords get_cpu_mesh get_gpu_mesh get_mesh
    """,
    'praxis_lite.instruments.explain': 'format_parameter_table parameter_table',
    'praxis_lite.instruments.testing': 'assert_collectives collectives',
  },
)
