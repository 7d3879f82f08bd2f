"""explain: what it says of an array is what JAX does with it, and the field it names is the one that decides."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.explain import ArrayKind, explain, explain_task
from praxis_lite.layers import Mlp
from praxis_lite.models import ClassificationModel
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.task import SingleTask

SIZES = {'data': 2, 'mdl': 4}


def classifier(**fields: Any) -> Config:
  """A classifier of vectors of 6 with a hidden layer of 10 and 5 classes, on a mesh data 2 x mdl 4."""
  model = Config(ClassificationModel, num_classes=5, network_tpl=Config(Mlp, input_dims=6, hidden_dims=(10,)))
  mesh = {'mesh_axis_names': ('data', 'mdl'), 'ici_mesh_shape': (2, 4)}
  return Config(SingleTask, model=model, **{**mesh, **fields})


def batch(size: int = 16) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    'image': jax.ShapeDtypeStruct((size, 6), jnp.float32),
    'label': jax.ShapeDtypeStruct((size,), jnp.int32),
    'weights': jax.ShapeDtypeStruct((size,), jnp.float32),
  }


def test_numbers_of_an_uneven_weight() -> None:
  task = classifier()
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = (None, 'mdl')
  e = explain(task, 'network.linear_0.w')
  assert e.kind is ArrayKind.VARIABLE
  assert (e.shape, e.padded_shape, e.local_shape) == ((6, 10), (6, 12), (6, 3))
  assert (e.spec, e.mesh_axes, e.replication) == (P(None, 'mdl'), ('mdl',), 2)
  assert (e.bytes, e.bytes_per_device, e.wasted_bytes) == (240, 72, 48)
  assert e.dims[1].padding == 2
  assert e.why == 'network.linear_0.weight_split_dims_mapping.wt'
  text = str(e)
  assert '48 B, 16.67% of what is stored' in text
  assert '4 parts, each on 2 devices' in text


def test_a_bias_names_the_field_that_its_weight_is_split_by() -> None:
  task = classifier()
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = (None, 'mdl')
  assert explain(task, 'network.linear_0.b').why == 'network.linear_0.weight_split_dims_mapping.wt'


def test_an_attention_projection_names_the_field_of_the_attention_layer() -> None:
  """And changing that field changes the spec: it is the one to set."""
  config = configure(registry.get('lm_sizes.Llama8B'))
  path, field = 'lm.transformer.layers.attention.out.w', 'lm.transformer.layers.attention.weight_split_dims_mapping.wt'
  e = explain(config, path)
  assert e.why == field
  assert e.spec == P(None, 'mdl', None, 'data')
  attention = config.task.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl
  attention.weight_split_dims_mapping.wt = (None, 'data', None)
  assert explain(config, path).spec == P(None, 'data', None, None)


def test_the_stack_dimension_names_the_layer_that_repeats() -> None:
  config = configure(registry.get('lm_sizes.Llama8B'))
  path = 'lm.transformer.layers.ff.up.w'
  assert explain(config, path).sources[0] == 'lm.transformer.weight_split_dims_mapping.stack is not set'
  config.task.model.lm_tpl.transformer_tpl.weight_split_dims_mapping.stack = ('replica',)
  e = explain(config, path)
  assert e.sources[0] == 'lm.transformer.weight_split_dims_mapping.stack'
  assert e.spec == P('replica', 'data', 'mdl')


def test_a_rule_is_named_with_the_logical_axis_it_is_for() -> None:
  task = classifier(logical_axis_rules=(('embed', 'data'), ('mlp', 'mdl'), ('kv', 'mdl')))
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = ('embed', 'mlp')
  e = explain(task, 'network.linear_0.w')
  assert e.spec == P('data', 'mdl')
  assert e.sources[1] == "rule ('mlp', 'mdl'), for 'mlp' in network.linear_0.weight_split_dims_mapping.wt"
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = ('kv', 'mlp')
  e = explain(task, 'network.linear_0.w')
  assert e.spec == P(None, 'mdl')
  assert e.sources[0].endswith("'kv', for which no rule finds a free axis")


def test_a_strategy_is_named_with_its_pattern_and_a_mapping_wins_over_it() -> None:
  task = classifier(strategy=[('.*/b', 'replicate'), ('.*', 'fsdp(axis="data", min_size_to_shard_mb=0)')])
  task.model.softmax_tpl.weight_split_dims_mapping.wt = (None, 'mdl')
  report = explain_task(task)
  hidden = report.find('network/linear_0/w')
  assert hidden.spec == P(None, 'data')
  assert hidden.sources[1] == 'strategy \'.*\': fsdp(axis="data", min_size_to_shard_mb=0)'
  assert hidden.sources[0] == "strategy '.*' does not split it"
  assert report.find('network.linear_0.b').why == "strategy '.*/b' does not split it"
  assert report.find('softmax.w').why == 'softmax.weight_split_dims_mapping.wt'


def test_what_no_pattern_matches_says_so() -> None:
  assert explain(classifier(strategy=[('softmax/w', 'replicate')]), 'softmax.b').why == (
    'no pattern of the strategy matches'
  )


def test_slots_follow_their_variable() -> None:
  task = classifier()
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
  report = explain_task(task)
  slots = [e for e in report.slots if e.owner == 'network.linear_0.w']
  assert slots and all(e.spec == P('data', 'mdl') and e.why == 'as its variable network.linear_0.w' for e in slots)
  assert any(e.why == 'of no variable, so replicated' for e in report.slots)


def test_activations_name_their_field_and_those_without_are_left_to_the_compiler() -> None:
  task = classifier()
  task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out = ('data', 'mdl')
  report = explain_task(task, batch())
  out = report.find('network.linear_0.activation_split_dims_mapping.out')
  assert out is report.find('network.linear_0.out')
  assert (out.shape, out.spec, out.local_shape) == ((16, 10), P('data', 'mdl'), (8, 3))
  assert out.why == 'network.linear_0.activation_split_dims_mapping.out'
  free = report.find('softmax.out')
  assert not free.constrained
  assert free.why == 'softmax.activation_split_dims_mapping.out is not set'
  assert 'at most' in str(free)


def test_a_layer_with_inputs_split_mapping_shows_among_the_activations() -> None:
  task = classifier()
  task.model.softmax_tpl.inputs_split_mapping = {'map_2d': ('data', 'mdl')}
  e = explain(task, 'softmax.inputs_split_mapping.map_2d', batch())
  assert (e.shape, e.spec) == ((16, 10), P('data', 'mdl'))


@pytest.mark.parametrize(
  ('mapping', 'spec', 'local', 'why'),
  [
    ({'map_1d': ('data',), 'map_2d': ('data', None)}, P('data', None), (8, 6), 'train.inputs_split_mapping.map_2d'),
    (
      None,
      P(('data', 'mdl'), None),
      (2, 6),
      'train.inputs_split_mapping.map_2d is not set: dimension 0 over all mesh axes',
    ),
  ],
)
def test_inputs_say_how_rows_are_filled_up_and_split(mapping: Any, spec: Any, local: Any, why: str) -> None:
  task = classifier()
  task.train.inputs_split_mapping = mapping
  e = explain(task, 'inputs.image', batch(13))
  assert (e.shape, e.padded_shape, e.spec, e.local_shape) == ((13, 6), (16, 6), spec, local)
  assert e.why == why
  assert e.remarks == ('enters a step with dimension 0 over all mesh axes, as 16 rows',)


def test_explain_needs_no_device_of_the_mesh() -> None:
  task = classifier(ici_mesh_shape=(512, 8))
  task.model.network_tpl.linear_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
  e = explain(task, 'network.linear_0.w')
  assert (e.num_devices, e.local_shape) == (4096, (1, 2))
  assert math.prod(e.padded_shape) == 512 * 16


@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('network.linear_0.v', "'network.linear_0.v'. Did you mean 'network.linear_0.[wb]'"),
    ('network', 'Below it are network.linear_0.b, network.linear_0.w'),
  ],
)
def test_an_unknown_path_names_what_there_is(path: str, message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    explain(classifier(), path)


def test_a_dataset_without_its_files_still_gives_the_shapes_of_batches() -> None:
  config = configure(registry.get('lm_sizes.Llama8B'))
  assert config.datasets[0].path is REQUIRED
  assert explain(config, 'inputs.ids').shape == (128, 8192)
  assert config.datasets[0].path is REQUIRED


def test_under_shard_map_rows_are_split_over_all_axes_and_activations_are_not_said_to_be_split() -> None:
  task = classifier(partitioning='shard_map')
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  task.model.network_tpl.linear_tpl.activation_split_dims_mapping.out = ('data', 'mdl')
  report = explain_task(task, batch())
  image = report.find('inputs.image')
  assert (image.spec, image.why) == (
    P(('data', 'mdl'), None),
    "partitioning='shard_map': each device takes its own rows",
  )
  assert not any(e.constrained for e in report.activations)
