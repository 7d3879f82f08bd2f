"""What is kept in the memory of the host between its uses; on CPU devices it is a memory space of its own name."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding import host_memory
from praxis_lite.training.learning import Learner
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

AXES = ('replica', 'data', 'mdl')
SIZES = {'vocab_size': 13, 'model_dims': 12, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 9}


def partitioned(mesh, offloaded, names=(), **fields):
  model = set_sharding(transformer_lm(**SIZES, remat='full'), mdl_axis=None if fields else 'mdl')
  model.lm_tpl.transformer_tpl.remat_offload_names = names
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  batch = ('replica', 'data')
  task.train.set(inputs_split_mapping={'map_1d': (batch,), 'map_2d': (batch, None)}, offload_optimizer_state=offloaded)
  task.train.learner = Config(Learner, optimizer=Config(optax.adamw), learning_rate=0.01)
  return PartitionedTask(task.instantiate(), data().batch_struct())


def data():
  return Config(SyntheticLMInput, seq_len=6, vocab_size=13, batch_size=5, is_training=True).instantiate()


def two_steps(built):
  source, state = data(), drawn_state(built)
  for _ in range(2):
    out = built.train_step(state, jax.random.key(1), source.get_next())
    state = out.state
  return state, float(out.weighted_loss)


def memories(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.fixture(scope='module')
def plain():
  built = partitioned((1, 1, 1), False)
  state, loss = two_steps(built)
  assert memories(state) == {'device'}
  return built, built.unpad(state), loss


WAYS = {'compiler': ((2, 2, 2), {}), 'explicit collectives': ((1, 3, 1), {'partitioning': 'shard_map'})}


@pytest.mark.slow
@pytest.mark.parametrize('way', WAYS)
def test_a_step_with_everything_offloaded_is_the_step_without(way, plain, tmp_path):
  """Uneven dimensions; the optimizer's state is in the memory of the host before and after a step, and is restored
  there or on the devices from one checkpoint."""
  mesh, fields = WAYS[way]
  without, expected, expected_loss = plain
  offloading = partitioned(mesh, True, ('context', 'ffn_up'), **fields)
  state, loss = two_steps(offloading)
  assert memories(state.opt_states) == {'pinned_host'}
  assert memories(state.mdl_vars) == {'device'}
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  values = offloading.unpad(state)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), values, expected)
  if fields:
    return
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(2, state, offloading.unpadded_state_shapes, None)
  for built, memory in ((without, 'device'), (offloading, 'pinned_host')):
    restored = checkpointer.restore(built.state_shapes, built.unpadded_state_shapes)
    assert memories(restored.opt_states) == {memory}
    jax.tree.map(np.testing.assert_array_equal, built.unpad(restored), values)
  checkpointer.close()


@pytest.mark.parametrize(
  ('offloaded', 'names', 'field'),
  [
    (True, (), 'task.train.offload_optimizer_state'),
    (False, ('context',), 'lm.transformer.remat_offload_names'),
  ],
)
def test_devices_without_the_memory_are_refused(offloaded, names, field, monkeypatch):
  monkeypatch.setattr(host_memory, 'memory_kinds', lambda device: ['device'])
  with pytest.raises(ConfigError, match=rf"^{field}: it offloads to the memory of the host, 'pinned_host', .* \(cpu\)"):
    partitioned((1, 1, 1), offloaded, names)
