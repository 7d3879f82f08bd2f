"""Training a task on a mesh: its state, its steps, and the two ways a step runs."""

from praxis_lite.training.microbatches import accumulate_gradients, sync_gradients
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import (
  PartitionedModel,
  PartitionedTask,
  get_partitioned_spmd_model_decode_fn,
  partition_spmd_model,
)
from praxis_lite.training.state import TrainState, initialize_partitioned_model_states, unpadded
from praxis_lite.training.steps import decode_step, eval_step_single_learner, train_step_single_learner
