"""Where arrays are stored on a mesh, as a pure function of declarations and mesh sizes.

This room knows no step, learner or model. Names of the rooms above it that Praxis and T5X have under `partitioning` can
be imported from here too; they are loaded when they are first used.
"""

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
from praxis_lite.partitioning.guards import GuardedJit
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
  from praxis_lite.explain import *  # noqa: F403
  from praxis_lite.t5x import *  # noqa: F403
  from praxis_lite.training import *  # noqa: F403

_ABOVE = {
  'training': """
    PartitionedModel PartitionedTask TrainState accumulate_gradients decode_step eval_step_single_learner
    get_partitioned_spmd_model_decode_fn initialize_partitioned_model_states partition_spmd_model sync_gradients
    train_step_single_learner
  """,
  't5x': """
    AxisNames BasePartitioner BasePjitPartitioner DataLayout LocalChunkInfo LocalChunker MoePjitPartitioner
    PjitPartitioner PjittedFnWithContext bounds_from_last_device data_partition_spec default_mesh default_moe_mesh
    get_coords get_cpu_mesh get_gpu_mesh get_mesh
  """,
  'explain': 'format_parameter_table parameter_table',
}


def __getattr__(name: str) -> object:
  for room, names in _ABOVE.items():
    if name in names.split():
      return getattr(importlib.import_module(f'praxis_lite.{room}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
