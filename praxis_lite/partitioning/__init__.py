"""Where arrays are stored on a mesh, as a pure function of declarations and mesh sizes.

This room knows no step, learner or model. Names of the rooms above it that Praxis and T5X have under `partitioning` can
be imported from here too; they are loaded when they are first used.
"""

# ruff: noqa: F403, F405 - the names of the rooms above are listed in `__all__`.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from praxis_lite.partitioning.batch import batch_size, pad_batch, padded_batch_shape, put_on_mesh
from praxis_lite.partitioning.constraints import (
  axis_rules,
  global_mesh_defined,
  reshard_input_based_on_rank_fn,
  with_logical_constraint,
  with_sharding_constraint,
)
from praxis_lite.partitioning.explicit import (
  fold_rng_over_axis,
  gather_array_with_mean_grads,
  gather_params,
  shard_module_params,
  shard_params,
)
from praxis_lite.partitioning.hlo import assert_collectives, collectives
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.partitioning.mesh import create_device_mesh
from praxis_lite.partitioning.padding import local_shape, num_parts, pad_amounts, pad_to, padded_shape, slice_to
from praxis_lite.partitioning.placement import place_variables
from praxis_lite.partitioning.rules import logical_to_mesh_axes, standard_logical_axis_rules
from praxis_lite.partitioning.slots import opt_state_specs
from praxis_lite.partitioning.specs import (
  complete_spec,
  get_input_partition_specs,
  infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec,
  spec_axes,
  to_partition_spec,
)
from praxis_lite.partitioning.strategies import explain_sharding, infer_sharding, register_rule

if TYPE_CHECKING:
  from praxis_lite.explain import format_parameter_table, parameter_table
  from praxis_lite.t5x import *
  from praxis_lite.training import *

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
  'data_partition_spec',
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
  'shard_module_params',
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


def __getattr__(name: str) -> object:
  if name not in __all__:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  rooms = (importlib.import_module(f'praxis_lite.{room}') for room in ('training', 't5x', 'explain'))
  return next(getattr(room, name) for room in rooms if hasattr(room, name))
