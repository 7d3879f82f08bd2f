"""Language models with experts: a step on a mesh is that of one device, however it runs."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.layers import MoeFeedForward
from praxis_lite.models import set_pipeline, set_sharding, transformer_lm
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

AXES = ('stage', 'replica', 'data', 'mdl')
B, T, V = 8, 6, 37


def packed_batch():
  """Two segments in each row, padding in some, rows that weigh nothing; as many tokens in each half of the batch."""
  ids = np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
  weights, segments = np.ones((B, T), np.float32), np.ones((B, T), np.int32)
  segments[:, 3:] = 2
  segments[6, 4:] = weights[6, 4:] = weights[1, 4:] = weights[2] = weights[5] = 0
  positions = np.tile(np.arange(3, dtype=np.int32), (B, 2))
  return {
    **{'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights},
    **{'segment_ids': segments, 'segment_pos': positions},
  }


def model(remat='none', first=(20,), **losses):
  """One dense block and one with experts, the shared one gated; or two with experts, all of one kind."""
  experts = Config(MoeFeedForward, num_experts=5, num_shared_experts=1, shared_expert_gate=True)
  experts.router_tpl.set(**losses)
  sizes = {'vocab_size': V, 'model_dims': 18, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 15}
  return set_sharding(
    transformer_lm(**sizes, experts=experts, first_hidden_dims=first, remat=remat), expert_axis='data'
  )


LOSSES = {'z_loss_weight': 0.01, 'load_balance_loss_weight': 0.1}


def after_a_step(model, batch, mesh=None, microbatches=1, **fields):
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0, num_microbatches=microbatches)
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  out = partitioned.train_step(drawn_state(partitioned), jax.random.key(1), batch)
  variables = leaves_by_path(partitioned.unpad(out.state).mdl_vars)
  metrics = {name: float(mean) for name, (mean, _) in out.mean_metrics.items() if name.startswith('aux/')}
  summaries = {name.rpartition('/')[2]: np.asarray(s.value) for name, s in out.summaries.items()}
  return float(out.weighted_loss), variables, metrics, summaries


def assert_same_step(found, expected):
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  for path, one in expected[1].items():
    np.testing.assert_allclose(
      found[1][path], one, rtol=0, atol=1e-5 * (1 + np.abs(one).max()), err_msg=path_name(path)
    )


@functools.cache
def on_one_device(first=(20,)):
  return after_a_step(model(first=first, **LOSSES, load_balance_scope='row'), packed_batch())


@pytest.mark.slow
def test_microbatches_and_remat_on_a_mesh():
  """Losses that are means over tokens, or over rows, do not depend on how a batch is cut."""
  small = model('full', **LOSSES, load_balance_scope='row')
  found, expected = after_a_step(small, packed_batch(), (1, 2, 2, 2), microbatches=2), on_one_device()
  assert_same_step(found, expected)
  assert found[2].keys() == expected[2].keys() and len(found[2]) == 2
  for name, value in expected[2].items():
    np.testing.assert_allclose(found[2][name], value, rtol=1e-5)


@pytest.mark.slow
def test_explicit_collectives():
  """Each device has tokens of its own, and of unequal number; sums over all are the router's, weights are gathered."""
  own = model(**LOSSES, load_balance_scope='row')
  found = after_a_step(own, packed_batch(), (1, 1, 4, 1), partitioning='shard_map')
  assert_same_step(found, on_one_device())
  for name, value in on_one_device()[3].items():
    np.testing.assert_allclose(found[3][name], value, rtol=1e-5)


@pytest.mark.slow
def test_in_a_pipeline():
  """Losses are those of a microbatch, and are then averaged."""
  blocks = model(first=(), **LOSSES, load_balance_scope='row')
  pipelined = set_pipeline(blocks, num_stages=2, num_microbatches=2)
  assert_same_step(after_a_step(pipelined, packed_batch(), (2, 1, 2, 2)), on_one_device(()))
