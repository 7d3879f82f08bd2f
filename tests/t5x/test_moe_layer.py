"""The mixture-of-experts partitioner drives the layer: its mesh and rules split tokens and experts."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state
from jax.sharding import PartitionSpec as P

from praxis_lite.bridges.t5x.moe import MoePjitPartitioner
from praxis_lite.common.config import Config
from praxis_lite.common.trees import node_at
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers import MoeFeedForward
from praxis_lite.models import transformer_lm
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import TrainState
from praxis_lite.training.task import SingleTask

IDS = np.random.default_rng(0).integers(0, 11, (8, 5)).astype(np.int32)
BATCH = {'ids': IDS[:, :-1], 'labels': IDS[:, 1:], 'weights': np.ones((8, 4), np.float32)}
MOE = ('lm', 'transformer', 'layers', 'ff')


def task():
  experts = Config(MoeFeedForward, num_experts=4, dispatch='capacity')
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=1, num_heads=2, hidden_dims=6, experts=experts)
  model.packed = False
  return Config(SingleTask, model=model)


def named(config):
  """With the logical names of T5X for what the layer splits."""
  lm = config.model.lm_tpl
  block = lm.transformer_tpl.layers_tpl
  for layer in (lm, block, block.ff_tpl):
    layer.activation_split_dims_mapping.out = ('batch', 'length', 'embed')
  block.ff_tpl.expert_axis = 'expert'
  block.ff_tpl.weight_split_dims_mapping.wt = ('expert', 'embed', 'expert_mlp')
  block.ff_tpl.router_tpl.weight_split_dims_mapping.wt = ('embed', 'unmodeled')
  for layer in (lm.embedding_tpl, lm.softmax_tpl):
    layer.weight_split_dims_mapping.wt = ('vocab', 'embed') if layer is lm.embedding_tpl else ('embed', 'vocab')
  for norm in (lm.final_norm_tpl, block.norm_tpl):
    norm.weight_split_dims_mapping.wt = ('embed',)
  block.attention_tpl.weight_split_dims_mapping.wt = ('embed', 'heads', 'kv')
  return config


def after_a_step(config, partitioner=None):
  config.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0)
  if partitioner is not None:
    config.set(mesh_axis_names=partitioner.mesh.axis_names, logical_axis_rules=partitioner.logical_axis_rules)
  model = PartitionedTask(config.instantiate(), jax.eval_shape(lambda: BATCH), partitioner=partitioner)
  out = model.train_step(drawn_state(model), jax.random.key(1), BATCH)
  return model, float(out.weighted_loss), model.unpad(out.state).mdl_vars


@pytest.mark.slow
def test_a_step_with_two_data_axes_is_that_of_one_device():
  partitioner = MoePjitPartitioner(4, num_partitions=1)
  model, loss, variables = after_a_step(named(task()), partitioner=partitioner)
  assert node_at(model.state_specs.mdl_vars, (*MOE, 'up')) == P(None, 'data', None, None)
  # Forward and backward: tokens, the weights of their choices, and outputs.
  assert collectives(model.train_step.compiled)['all-to-all'].count == 6
  _, expected, on_one = after_a_step(task())
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), variables, on_one)


def test_hidden_dims_of_experts_are_split_over_the_model_axis():
  partitioner = MoePjitPartitioner(4, num_partitions=2)
  rules = {'mesh_axis_names': partitioner.mesh.axis_names, 'logical_axis_rules': partitioner.logical_axis_rules}
  layer = named(task()).model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl
  layer = layer.set(input_dims=8, hidden_dims=6, **rules).instantiate()
  assert layer.expert_parts(dict(partitioner.mesh.shape)) == (4, True)
  specs = partitioner.get_mesh_axes(TrainState(None, layer.abstract_init(), None)).mdl_vars
  assert specs['up'] == P('data', None, 'model') and specs['down'] == P('data', 'model', None)
