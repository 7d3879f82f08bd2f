"""Explicit collectives: training through `jax.shard_map`, for those who want to see and control the communication."""

from praxis_lite.partitioning.explicit.gradients import accumulate_gradients, sync_gradients, sync_metrics
from praxis_lite.partitioning.explicit.rng import fold_rng_over_axis
from praxis_lite.partitioning.explicit.sharded_params import (
  ShardedParam,
  gather_array_with_mean_grads,
  gather_params,
  shard_params,
)
from praxis_lite.partitioning.explicit.tensor_parallel import column_parallel_linear, row_parallel_linear

__all__ = [
  'ShardedParam',
  'accumulate_gradients',
  'column_parallel_linear',
  'fold_rng_over_axis',
  'gather_array_with_mean_grads',
  'gather_params',
  'row_parallel_linear',
  'shard_params',
  'sync_gradients',
  'sync_metrics',
]
