"""Batches of fewer rows than a mesh and a pipeline have places for: steps of staged experts are those of one device."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.layers import MoeFeedForward
from praxis_lite.models import set_pipeline, transformer_lm
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

T, V = 3, 13


def task(mesh, accumulated, windows=None, **fields):
  experts = Config(MoeFeedForward, num_experts=3, num_experts_per_token=1)
  experts.router_tpl.set(load_balance_loss_weight=0.5, z_loss_weight=0.5, bias_update_rate=0.125)
  model = transformer_lm(
    vocab_size=V, model_dims=4, num_layers=7 if windows else 3, num_heads=1, hidden_dims=4, experts=experts
  )
  model.lm_tpl.transformer_tpl.sliding_windows = windows
  set_pipeline(model, **fields)
  config = Config(SingleTask, model=model, mesh_axis_names=tuple(mesh))
  config.ici_mesh_shape = tuple(mesh.values())
  config.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0, num_microbatches=accumulated)
  rows = 'data' if 'data' in mesh else None
  config.train.inputs_split_mapping = {'map_1d': (rows,), 'map_2d': (rows, None)}
  return config.instantiate()


def step(mesh, rows, accumulated, **fields):
  """Returns loss, metrics, summaries, and all variables after a step of plain descent: gradients and updates."""
  rng = np.random.default_rng(0)
  ids, labels = rng.integers(0, V, (2, rows, T)).astype(np.int32)
  batch = {'ids': ids, 'labels': labels, 'weights': np.ones((rows, T), np.float32)}
  on_mesh = PartitionedTask(task(mesh, accumulated, **fields), batch)
  shapes = on_mesh.unpadded_state_shapes.mdl_vars
  out = on_mesh.train_step(drawn_state(on_mesh), jax.random.key(1), batch)
  variables = jax.tree.map(lambda x, s: np.asarray(x)[tuple(map(slice, s.shape))], out.state.mdl_vars, shapes)
  summaries = {name: summary.value for name, summary in out.summaries.items()}
  return jax.device_get((out.weighted_loss, out.mean_metrics, summaries, variables))


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh, rows, accumulated, fields',
  [
    ({'stage': 2, 'unused': 3}, 1, 3, {'num_stages': 2, 'num_microbatches': 4}),
    ({'stage': 3, 'data': 2}, 3, 1, {'num_stages': 3, 'num_microbatches': 5}),
    ({'stage': 2, 'data': 3}, 3, 1, {'num_stages': 2, 'num_microbatches': 4, 'batch_axes': 'data'}),
    ({'stage': 2, 'data': 3}, 3, 1, {'num_stages': 2, 'num_microbatches': 4, 'gather_axes': 'data'}),
    # Local and global attention in turn, and one layer in no stage.
    ({'stage': 3, 'data': 2}, 3, 1, {'num_stages': 3, 'num_microbatches': 2, 'windows': (2, None)}),
  ],
)
def test_a_step_is_that_of_one_device(mesh, rows, accumulated, fields):
  got = step(mesh, rows, accumulated, **fields)
  expected = step(dict.fromkeys(mesh, 1), rows, accumulated, **fields)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
