"""Training of a task on a mesh: its state, its steps, and how steps are executed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from praxis_lite.common.importing import lazy_names

if TYPE_CHECKING:
  from praxis_lite.training.adapters import train_adapters as train_adapters
  from praxis_lite.training.microbatches import (
    accumulate_gradients as accumulate_gradients,
    sync_gradients as sync_gradients,
  )
  from praxis_lite.training.partitioned_step import PartitionedStep as PartitionedStep
  from praxis_lite.training.partitioned_task import (
    PartitionedModel as PartitionedModel,
    PartitionedTask as PartitionedTask,
    get_partitioned_spmd_model_decode_fn as get_partitioned_spmd_model_decode_fn,
    partition_spmd_model as partition_spmd_model,
  )
  from praxis_lite.training.post_training import (
    train_distillation as train_distillation,
    train_on_policy as train_on_policy,
    train_policy as train_policy,
    train_preferences as train_preferences,
    train_rewards as train_rewards,
  )
  from praxis_lite.training.state import (
    TrainState as TrainState,
    initialize_partitioned_model_states as initialize_partitioned_model_states,
    unpad as unpad,
  )
  from praxis_lite.training.steps import (
    decode_step as decode_step,
    eval_step_single_learner as eval_step_single_learner,
    loss_and_gradients as loss_and_gradients,
    train_step_single_learner as train_step_single_learner,
  )

__getattr__, __dir__, __all__ = lazy_names(
  __name__,
  {
    'praxis_lite.training.adapters': 'train_adapters',
    'praxis_lite.training.microbatches': 'accumulate_gradients sync_gradients',
    'praxis_lite.training.partitioned_step': 'PartitionedStep',
    'praxis_lite.training.partitioned_task': 'PartitionedModel PartitionedTask '
    'get_partitioned_spmd_model_decode_fn partition_spmd_model',
    'praxis_lite.training.post_training': 'train_distillation train_on_policy train_policy train_preferences '
    'train_rewards',
    'praxis_lite.training.state': 'TrainState initialize_partitioned_model_states unpad',
    'praxis_lite.training.steps': 'decode_step eval_step_single_learner loss_and_gradients train_step_single_learner',
  },
)
