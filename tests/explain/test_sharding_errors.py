"""Every way to declare a sharding wrongly ends in one message that names where, what, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.bridges.t5x.axis_names import AxisNames, override_axis_names
from praxis_lite.bridges.t5x.moe import infer_state_filter, standard_logical_axis_rules as moe_logical_axis_rules
from praxis_lite.common.errors import ShardingError
from praxis_lite.partitioning import MoePjitPartitioner, PjitPartitioner, default_mesh
from praxis_lite.sharding import (
  infer_partition_spec_based_on_rank_fn,
  infer_sharding,
  logical_to_mesh_axes,
  num_parts,
  register_rule,
  standard_logical_axis_rules,
  to_partition_spec,
  with_sharding_constraint,
)
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.sharding.rules import resolve

NAMES = ('replica', 'data', 'mdl')
MESH = {'data': 8, 'model': 4}
W = {'w': jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
B = {'b': jax.ShapeDtypeStruct((2048,), jnp.float32)}


def strategy(ops: str, params: Any = W) -> Any:
  return infer_sharding(params, [('.*', ops)], MESH)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
  'unknown axis': (
    lambda: to_partition_spec(('data', 'model'), NAMES, path='lm.softmax.weight_split_dims_mapping.wt'),
    "lm.softmax.weight_split_dims_mapping.wt: axis 'model' is not a mesh axis; mesh_axis_names = ",
  ),
  'unknown axis that is nearly one': (lambda: to_partition_spec(('mld',), NAMES), "Did you mean 'mdl'?"),
  'unknown index': (lambda: to_partition_spec((3,), NAMES), 'axis 3 is out of range'),
  'axis twice': (lambda: to_partition_spec(('mdl', ('data', 'mdl')), NAMES), "mesh axis 'mdl' occurs twice"),
  'index and name of one axis': (lambda: to_partition_spec((2, 'mdl'), NAMES), "mesh axis 'mdl' occurs twice"),
  'wrong rank': (lambda: to_partition_spec(('mdl',), NAMES, rank=2), 'has 1 entry, but the tensor has 2 dimensions'),
  'a name for a mapping': (lambda: to_partition_spec('mdl', NAMES), "such as ('mdl', None)"),
  'something else for an axis': (lambda: to_partition_spec((1.5,), NAMES), '1.5 is not a mesh axis name'),
  'no mapping for a rank': (
    lambda: infer_partition_spec_based_on_rank_fn({'map_1d': ('data',)}, NAMES, jnp.zeros((2, 2))),
    "inputs_split_mapping has no 'map_2d', and an input of shape (2, 2) needs it; it has ['map_1d']",
  ),
  'parts of an unknown axis': (lambda: num_parts('mdl', MESH), "axis 'mdl' is not an axis of the mesh"),
  'constraint with too many entries': (
    lambda: with_sharding_constraint(jnp.zeros(4), P('data', None)),
    'has 2 entries, but the tensor has 1 dimension',
  ),
  'neither mesh nor logical axis': (
    lambda: resolve(('embd',), ('data',), (('embed', 'data'),), path='lm.w'),
    "lm.w: 'embd' is neither a mesh axis, of ('data',), nor a logical axis that a rule has. Did you mean 'embed'?",
  ),
  'rule with an unknown mesh axis': (
    lambda: resolve(('embed',), ('data',), (('embed', 'model'),), path='lm.w'),
    "lm.w: rule ('embed', 'model'): axis 'model' is not a mesh axis",
  ),
  'logical axis without a rule': (
    lambda: logical_to_mesh_axes(('embed', 'mlpp'), standard_logical_axis_rules()),
    "no rule has the logical axis 'mlpp'",
  ),
  'logical axis twice': (
    lambda: logical_to_mesh_axes(('embed', 'embed'), standard_logical_axis_rules()),
    "logical axis 'embed' occurs twice",
  ),
  'partitioning dims (3, 1)': (
    lambda: standard_logical_axis_rules(3, 1),
    'activation_partitioning_dims=3, parameter_partitioning_dims=1 is not supported; each is 1 or 2',
  ),
  'an override that matches nothing': (
    lambda: override_axis_names({'w': AxisNames('embed')}, [('v', ('mlp',))]),
    "the axis names override 'v' changes nothing; the paths are w",
  ),
  'no way to say the model parallelism': (PjitPartitioner, 'exactly one of them; neither is given'),
  'both ways': (lambda: PjitPartitioner(num_partitions=2, model_parallel_submesh=(1, 2)), 'exactly one of them'),
  'partitions that do not divide': (lambda: default_mesh(3), 'num_partitions=3 must divide the 8 devices'),
  'more devices than there are': (
    lambda: create_device_mesh((16, 2), None, ('data', 'mdl')),
    'needs 32 devices, and there are 8',
  ),
  'experts with parameter dims 2': (
    lambda: moe_logical_axis_rules(4, 1, parameter_partitioning_dims=2),
    'must be 1',
  ),
  'experts without partitions': (lambda: MoePjitPartitioner(4), 'exactly one of them'),
  'state filter of another optimizer': (lambda: infer_state_filter({'weird': jnp.zeros(2)}), 'for Adafactor only'),
  'replicate after a split': (lambda: strategy('shard_dim("model", 1) | replicate'), 'inconsistent'),
  'a dimension twice': (
    lambda: strategy('shard_dim("model", 0) | shard_dim("data", 0)'),
    "w: dimension 0 is split over 'model' already, not over 'data' too",
  ),
  'an axis twice in a strategy': (
    lambda: strategy('shard_dim("model", 0) | shard_dim("model", 1)'),
    "mesh axis 'model' occurs twice",
  ),
  'a dimension that is not there': (
    lambda: strategy('shard_dim("model", 2)'),
    'w has 2 dimensions, and shard_dim is to split dimension 2; pass ignore_ndim_error=True',
  ),
  'a vector has no second dimension': (lambda: strategy('shard_dim("model", -2)', B), 'b has 1 dimension'),
  'a name for an argument': (lambda: strategy('fsdp(axis=data)'), "'data' is not a literal"),
  'an expression for an argument': (lambda: strategy('fsdp(axis="da" + "ta")'), 'is not a literal'),
  'an argument that a rule does not take': (lambda: strategy('fsdp(axes="data")'), 'fsdp(axis'),
  'an unknown op': (lambda: strategy('fdsp(axis="data")'), 'known ops: '),
  'a rule of a name that is taken': (lambda: register_rule('fsdp')(lambda: None), "'fsdp' is registered already"),
  'no ops at all': (lambda: strategy('fsdp(axis="data"'), 'is not a chain of ops'),
  'an unknown axis in a strategy': (lambda: strategy('fsdp(axis="mdl")'), "axis 'mdl' is not an axis of the mesh"),
  'not a regular expression': (lambda: infer_sharding(W, [('(', 'replicate')], MESH), 'is not a regular expression'),
  'not pairs': (lambda: infer_sharding(W, ['.*'], MESH), 'a strategy is a list of pairs'),
}


@pytest.mark.parametrize('case', CASES)
def test_message(case: str) -> None:
  declare, message = CASES[case]
  with pytest.raises(ShardingError, match=re.escape(message)) as caught:
    declare()
  assert isinstance(caught.value, ValueError)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('ops', ['fdsp(axis="data")'])
def test_an_unknown_rule_is_a_key_error_that_lists_what_is_known(ops: str) -> None:
  with pytest.raises(KeyError) as caught:
    strategy(ops)
  for name in ('fsdp', 'logical_partitioning', 'replicate', 'shard_dim'):
    assert name in str(caught.value)
  assert "Did you mean 'fsdp'?" in str(caught.value)
