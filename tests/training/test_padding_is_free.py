"""Dimensions one short of divisible compile to the communication of the divisible ones."""

import jax
import jax.numpy as jnp
import pytest

from praxis_lite.common.config import Config
from praxis_lite.instruments.testing import collectives
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask


def step_of(batch, vocab, dims, heads, hidden, mesh):
  model = transformer_lm(
    vocab_size=vocab, model_dims=dims, num_layers=2, num_heads=heads, dims_per_head=8, hidden_dims=hidden
  )
  config = Config(SingleTask, model=set_sharding(model.set(packed=False), batch_axes='data'))
  config.set(mesh_axis_names=('data', 'mdl'), ici_mesh_shape=mesh)
  config.train.inputs_split_mapping = {'map_2d': ('data', None)}
  dtypes = {'ids': jnp.int32, 'labels': jnp.int32, 'weights': jnp.float32}
  struct = {name: jax.ShapeDtypeStruct((batch, 16), dtype) for name, dtype in dtypes.items()}
  return PartitionedTask(config.instantiate(), struct).train_step


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', [(2, 4), (4, 2)], ids=str)
def test_one_short_of_divisible_communicates_as_divisible(mesh):
  even = collectives(step_of(8, 64, 32, 4, 64, mesh).compiled)
  short = collectives(step_of(7, 63, 31, 3, 63, mesh).compiled)
  assert sum(c.count for c in even.values()) > 0
  assert {kind: c.count for kind, c in short.items()} == {kind: c.count for kind, c in even.items()}
  # No array moves whole: an array's bytes are at most its padded ones.
  for kind, moved in short.items():
    assert moved.bytes <= even[kind].bytes
