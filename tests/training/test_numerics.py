"""`train --verify_numerics` computes the gradients of the first step a second time, and compares their norms."""

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, NumericsError
from praxis_lite.layers import ConvNet, Mlp
from praxis_lite.layers.dropout import Dropout
from praxis_lite.models import ClassificationModel, set_sharding, transformer_lm
from praxis_lite.training import numerics, partitioned_step
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

KEY = jax.random.key(0)


def images(rows=7):
  image = np.random.default_rng(0).standard_normal((rows, 6, 6, 4)).astype(np.float32)
  return {'image': image, 'label': np.arange(rows, dtype=np.int32) % 3, 'weights': np.ones(rows, np.float32)}


def classifier(groups=1, mesh=(2, 2), **fields):
  network = Config(ConvNet, input_channels=4, channels=(4,), norm_tpl=None)
  network.conv_tpl.groups = groups
  model = Config(ClassificationModel, num_classes=3, network_tpl=network)
  task = Config(SingleTask, model=model, mesh_axis_names=('data', 'mdl'), ici_mesh_shape=mesh, **fields)
  task.train.inputs_split_mapping = {f'map_{n}d': ('data', *(None,) * (n - 1)) for n in (1, 4)}
  return task


def compared(task, batch):
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=0.1)
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  inputs = partitioned.train_step.put_inputs(batch)
  return numerics.compare_gradients(partitioned, drawn_state(partitioned), KEY, inputs)


def test_right_gradients_are_those_of_one_device():
  found = compared(classifier(), images())
  assert found.reference == 'on one device'
  assert found.num_norms == 4  # Filter, bias, and those of the softmax.
  assert found.worst < 1e-5


@pytest.mark.slow
def test_each_repeated_layer_has_a_norm():
  model = set_sharding(transformer_lm(vocab_size=11, model_dims=8, num_layers=3, num_heads=2, hidden_dims=16))
  task = Config(SingleTask, model=model, mesh_axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(2, 2, 2))
  ids = np.arange(24, dtype=np.int32).reshape(4, 6) % 11
  found = compared(task, {'ids': ids, 'labels': ids, 'weights': np.ones((4, 6), np.float32)})
  assert found.num_norms == 3 + 3 * 9  # Two tables, the last norm; per layer 2 norms, 4 of attention, 3 of the MLP.
  assert found.worst < 1e-4


def test_a_wrong_gradient_is_named_with_its_mapping(monkeypatch):
  """Without guards, XLA doubles the gradient of a grouped convolution's filter."""
  monkeypatch.setattr(partitioned_step, 'guard', lambda lowered: [])
  with pytest.raises(NumericsError, match=r'norm of network\.conv_0\.w \(.*\): .* instead of .*Nothing was trained'):
    compared(classifier(groups=4), images(8))


@pytest.mark.slow
def test_explicit_collectives_are_compared_too():
  task = classifier(partitioning='shard_map')
  assert compared(task, images(8)).worst < 1e-5


def test_where_one_device_has_not_the_memory_the_other_partitioning_is_the_reference(monkeypatch):
  class TooLarge(PartitionedTask):
    def __init__(self, *args, mesh=None, **kwargs):
      if mesh is not None and mesh.size == 1:
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')
      super().__init__(*args, mesh=mesh, **kwargs)

  monkeypatch.setattr(numerics, 'PartitionedTask', TooLarge)
  found = compared(classifier(), images(8))
  assert found.reference == "with partitioning='shard_map'"
  assert found.worst < 1e-5


@pytest.mark.slow
def test_random_numbers_of_each_device_cannot_be_compared():
  network = Config(Mlp, input_dims=6 * 6 * 4, hidden_dims=(8,), dropout_tpl=Config(Dropout, rate=0.5))
  task = classifier(partitioning='shard_map')
  task.model.network_tpl = network
  with pytest.raises(ConfigError, match='under shard_map each device draws its own'):
    compared(task, images(8))
