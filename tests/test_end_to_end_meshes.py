"""The uneven language model on meshes of 8, 5 and 7 devices: the loss curve of one device, on padded, sharded state.

Sizes of `lm.StdlibLmMixed` made smaller, and still dividing by nothing: 259 ids, 22 model dims, 45 hidden dims, 3 heads
and 6 rows in a batch.
"""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest

from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.instruments.explain import format_parameter_table, parameter_table
from praxis_lite.instruments.explain.explanation import format_shape
from praxis_lite.partitioning import partition_spmd_model
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

STEPS = 50
AXES = ('replica', 'data', 'mdl')
SMALLER = {
  'task.model.model_dims': 22,
  'task.model.hidden_dims': 45,
  'task.model.dims_per_head': 6,
  'task.model.num_layers': 2,
  'task.train.num_train_steps': STEPS,
  'datasets[*].seq_len': 16,
  'datasets[*].batch_size': 6,
  'datasets[*].path.max_bytes': 100_000,
}
MESHES = {'2x2x2': (2, 2, 2), '5 mdl': (1, 1, 5), '7 data': (1, 7, 1)}


@functools.cache
def experiment():
  config = configure(registry.get('lm.StdlibLmMixed'))
  apply_overrides(config.roots(), [f'{path}={value}' for path, value in SMALLER.items()])
  return config


@functools.cache
def batches():
  data = experiment().datasets[0].instantiate()
  return [data.get_next() for _ in range(STEPS)]


def train(shape):
  """Returns (the loss of each step, the last state, the partitioned model) of a run on a mesh of this shape."""
  mesh = create_device_mesh(shape, None, AXES)
  struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches()[0])
  model = partition_spmd_model(experiment().task, jax.random.key(0), struct, mesh=mesh)
  state, key, losses = model.partitioned_train_state, jax.random.key(1), []
  for batch in batches():
    state, loss, *_ = model.train_step(state, key, batch)
    losses.append(float(loss))
  return np.array(losses), state, model


@functools.cache
def losses_of_one_device():
  return train((1, 1, 1))[0]


@pytest.mark.slow
@pytest.mark.parametrize('shape', MESHES.values(), ids=MESHES)
def test_the_loss_curve_is_that_of_one_device_on_padded_and_sharded_state(shape):
  expected = losses_of_one_device()
  assert expected[-1] < expected[0] - 1  # It learns, so there is a curve to compare.
  losses, state, model = train(shape)
  np.testing.assert_allclose(losses, expected, rtol=1e-4)

  task = experiment().task.instantiate()
  sizes = dict(zip(AXES, shape))
  rows = {row.path: row for row in parameter_table(task, sizes)}
  table = format_parameter_table(list(rows.values()), sizes)
  printed = {line.split()[0]: line for line in table.splitlines()}
  flat, _ = jax.tree_util.tree_flatten_with_path(state.mdl_vars)
  arrays = {jax.tree_util.keystr(path, simple=True, separator='.'): x for path, x in flat}
  assert arrays.keys() == rows.keys()
  for path, x in arrays.items():
    row = rows[path]
    # What is printed is what each device has, and no device has more.
    assert {s.data.shape for s in x.addressable_shards} == {row.local_shape}, path
    assert f' {format_shape(row.local_shape)} ' in printed[path], path
    assert len(x.addressable_shards) == math.prod(shape)
    assert x.shape == row.padded_shape, path
    assert not np.any(beyond(x, row.shape)), path
  split = [path for path, x in arrays.items() if not x.sharding.is_fully_replicated]
  padded = [path for path, row in rows.items() if row.padded_shape != row.shape]
  assert len(split) >= 7, split
  assert 'lm.softmax.w' in padded and len(padded) >= 5, padded
  # The optimizer's slots lie as their parameters do.
  slots = [x for x in jax.tree.leaves(state.opt_states) if x.shape == arrays['lm.softmax.w'].shape]
  assert len(slots) >= 2 and all(x.sharding == arrays['lm.softmax.w'].sharding for x in slots)
  assert sum(math.prod(row.shape) for row in rows.values()) == model.total_num_params


def beyond(x, true_shape):
  """The elements of a padded array that are padding."""
  is_padding = np.ones(x.shape, bool)
  is_padding[tuple(map(slice, true_shape))] = False
  return np.asarray(x)[is_padding]
