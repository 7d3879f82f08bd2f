"""Losses, gradients and steps of small models, for tests that compare them."""

from __future__ import annotations

import jax
import numpy as np
import optax
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

AXES = ('spare', 'replica', 'data', 'mdl')


def loss_and_gradients(model, variables, batch, **kwargs):
  def loss(v):
    (metrics, _), _ = model.apply(v, batch, **kwargs)
    return metrics['loss'][0]

  return jax.jit(jax.value_and_grad(loss))(variables)


def assert_close(found, expected, tolerance=3e-5):
  """Relative to the largest entry of each array."""

  def check(path, a, b):
    atol = tolerance * (1 + np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))

  jax.tree_util.tree_map_with_path(check, found, expected)


def take_a_step(model, batch, mesh=None, rows=('replica', 'data'), trained=(), frozen=(), **fields):
  """Returns the loss of a model's config, and the variables after a step of SGD with rate 1, so all gradients.

  `rows` are the mesh axes that split the rows of a batch; `trained` and `frozen` are regexes of variables.
  """
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0)
  task.train.learner.set(bprop_variable_inclusion=trained, bprop_variable_exclusion=frozen)
  task.train.inputs_split_mapping = {
    'map_1d': (rows,),
    'map_2d': (rows, None),
    'map_3d': (rows, None, None),
    'map_4d': (rows, None, None, None),
  }
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  out = partitioned.train_step(drawn_state(partitioned), jax.random.key(1), batch)
  return float(out.weighted_loss), leaves_by_path(partitioned.unpad(out.state).mdl_vars)
