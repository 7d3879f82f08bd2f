"""Weights split over axes that rows are split over are gathered first: XLA is wrong about them as they lie."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.config import Config
from praxis_lite.layers import ConvNet
from praxis_lite.models import ClassificationModel, set_sharding, transformer_lm
from praxis_lite.partitioning.guards import gathered_specs
from praxis_lite.partitioning.specs import to_partition_spec
from praxis_lite.task import SingleTask
from praxis_lite.training.partitioned_task import PartitionedTask, partition_spmd_model
from praxis_lite.trees import leaves_by_path

AXES = ('replica', 'data', 'mdl')
ROWS = ('replica', 'data')
INPUTS = {f'map_{rank}d': (ROWS, *(None,) * (rank - 1)) for rank in (1, 2, 3, 4)}


def images(rows=5):
  rng = np.random.default_rng(0)
  label = np.arange(rows, dtype=np.int32) % 3
  return {'image': rng.standard_normal((rows, 9, 7, 2)).astype(np.float32), 'label': label}


def classifier(mesh=None, softmax=None, conv=None, out=(ROWS, None, None, 'mdl'), inputs=None):
  network = Config(ConvNet, input_channels=2, channels=(5, 7), norm_tpl=None)
  model = Config(ClassificationModel, num_classes=3, network_tpl=network)
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0)
  if mesh:
    network.conv_tpl.activation_split_dims_mapping.out = out
    network.conv_tpl.weight_split_dims_mapping.wt = conv
    model.softmax_tpl.weight_split_dims_mapping.wt = softmax
    task.train.inputs_split_mapping = inputs
  return task


def variables_after_a_step(task, batch):
  model = partition_spmd_model(task, jax.random.key(0), jax.eval_shape(lambda: batch))
  state = model.train_step(model.partitioned_train_state, jax.random.key(1), batch).state
  shapes = task.instantiate().model.abstract_init()
  return jax.tree.map(lambda w, x: np.asarray(x)[tuple(map(slice, w.full_shape))], shapes, state.mdl_vars)


@pytest.mark.slow
@pytest.mark.parametrize(
  'fields',
  [
    {'softmax': ('data', 'mdl')},
    {'softmax': ('data', 'mdl'), 'inputs': INPUTS},
    {'conv': (None, None, 'data', 'mdl')},
    {'softmax': ('data', 'mdl'), 'conv': (None, None, 'data', 'mdl'), 'out': None, 'inputs': INPUTS},
  ],
  ids=['softmax', 'softmax and inputs', 'conv', 'no activations'],
)
def test_gradients_of_a_classifier_on_2x2x2_are_those_of_one_device(fields):
  expected = variables_after_a_step(classifier(), images())
  found = variables_after_a_step(classifier((2, 2, 2), **fields), images())
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def lm_task(mesh, batch_axes=ROWS):
  lm = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2, hidden_dims=16)
  task = Config(SingleTask, model=set_sharding(lm, batch_axes=batch_axes), mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.inputs_split_mapping = {'map_2d': (batch_axes, None)}
  return task


def gathered(mesh, **fields):
  task = lm_task(mesh, **fields).instantiate()
  struct = {name: jax.ShapeDtypeStruct((8, 4), dtype) for name, dtype in (('ids', 'int32'), ('labels', 'int32'))}
  struct['weights'] = jax.ShapeDtypeStruct((8, 4), 'float32')
  partitioned = PartitionedTask(task, struct)
  rows = [to_partition_spec(m, AXES) for m in task.train.inputs_split_mapping.values()]
  specs = leaves_by_path(partitioned.state_specs.mdl_vars)
  return gathered_specs(specs, [*rows, *task.model.activation_specs()], dict(partitioned.mesh.shape))


def test_weights_keep_the_axes_that_split_no_rows():
  specs = gathered((2, 2, 2))
  assert specs['lm', 'softmax', 'w'] == P(None, 'mdl')
  assert specs['lm', 'transformer', 'layers', 'attention', 'query', 'w'] == P(None, None, 'mdl', None)
  assert ('lm', 'final_norm', 'scale') not in specs


@pytest.mark.parametrize(('mesh', 'axes'), [((1, 4, 2), ROWS), ((2, 2, 2), 'data'), ((2, 1, 4), ROWS)])
def test_where_one_axis_splits_rows_nothing_is_gathered(mesh, axes):
  assert gathered(mesh, batch_axes=axes) == {}
