"""Mixtures of experts: the second data axis, the rules of experts, and the expert axis of optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.rules import logical_to_mesh_axes, standard_logical_axis_rules
from praxis_lite.t5x.axis_names import AxisNames
from praxis_lite.t5x.moe import (
  MoePjitPartitioner,
  infer_state_filter,
  moe_data_partition_spec,
  moe_logical_axis_rules,
  override_partition_spec,
  prepend_expert,
  uses_two_data_axes,
)
from praxis_lite.training.state import TrainState
from praxis_lite.weights import WeightHParams


@pytest.mark.parametrize(
  ('num_experts', 'num_partitions', 'submesh', 'two'),
  [
    (4, 1, None, True),
    (4, None, (1, 1, 1, 1), True),
    (4, 2, None, False),
    (4, None, (1, 2), False),
    (0, 1, None, False),
    (8, 1, None, False),
    (16, 1, None, False),
  ],
)
def test_two_data_axes_with_fewer_experts_than_devices(
  num_experts: int, num_partitions: int | None, submesh: Any, two: bool
) -> None:
  assert uses_two_data_axes(num_experts, 8, num_partitions, submesh) is two


@pytest.mark.parametrize('given', [{}, {'num_partitions': 1, 'model_parallel_submesh': (1, 1)}])
def test_exactly_one_way_to_say_the_model_parallelism(given: dict[str, Any]) -> None:
  with pytest.raises(ValueError, match='exactly one of them'):
    uses_two_data_axes(4, 8, **given)
  with pytest.raises(ValueError, match='exactly one of them'):
    MoePjitPartitioner(4, **given)


def test_rules_of_experts_follow_the_standard_ones() -> None:
  rules = moe_logical_axis_rules()
  assert rules[: len(standard_logical_axis_rules())] == standard_logical_axis_rules()
  assert dict(rules[len(standard_logical_axis_rules()) :]) == {
    'expert': 'data',
    'expert_mlp': 'model',
    'expert_group': None,
    'expert_replicas': None,
    'unmodeled': None,
  }
  assert tuple(logical_to_mesh_axes(('expert', 'embed', 'expert_mlp'), rules)) == ('data', None, 'model')


def test_rules_with_two_data_axes() -> None:
  usual, two = moe_logical_axis_rules(), moe_logical_axis_rules(two_data_axes=True)
  changed = {'batch': ('data', 'model'), 'expert_replicas': 'model'}
  for (name, axes), (same_name, new_axes) in zip(usual, two):
    assert name == same_name
    assert new_axes == changed.get(name, None if axes == 'model' else axes)


def test_two_parameter_dimensions_are_refused() -> None:
  with pytest.raises(ValueError, match='parameter_partitioning_dims=2 is not supported with experts'):
    moe_logical_axis_rules(parameter_partitioning_dims=2)


@pytest.mark.parametrize(
  ('spec', 'overridden'),
  [
    (P('data'), P(('data', 'model'))),
    (P('model'), None),
    (None, None),
    (P(), P()),
    (P(None), P(None)),
    (P('data', None), P('data', None)),
    (P('model', 'data'), P('model', 'data')),
    (P(None, 'model'), P(None, 'model')),
    (P(('data', 'model')), P(('data', 'model'))),
  ],
)
def test_raw_specs_with_two_data_axes(spec: Any, overridden: Any) -> None:
  assert override_partition_spec(spec) == overridden


def test_data_partition_spec() -> None:
  assert moe_data_partition_spec(True) == P(('data', 'model'))
  assert moe_data_partition_spec(False) == P('data')


def test_expert_is_prepended_to_the_state_that_matches_only() -> None:
  axes = {
    'encoder': {'expert': {'kernel': {'v_row': AxisNames('embed', 'mlp'), 'm': AxisNames('embed', 'mlp')}}},
    'decoder': {'kernel': {'v_row': AxisNames('embed')}},
  }
  out = prepend_expert(axes, r'.*expert.*/kernel/v_.*')
  assert out['encoder']['expert']['kernel'] == {'v_row': ('expert', 'embed', 'mlp'), 'm': ('embed', 'mlp')}
  assert out['decoder'] == axes['decoder']
  assert prepend_expert(axes, None) == axes


WEIGHTS = {
  'expert': {'kernel': WeightHParams((4, 8, 12), tensor_split_dims_mapping=('expert', 'embed', 'expert_mlp'))},
  'dense': {'kernel': WeightHParams((8, 12), tensor_split_dims_mapping=('embed', 'mlp'))},
}
STRUCTS = jax.tree.map(lambda w: w.as_struct(), WEIGHTS)


def state_of(tx: Any) -> TrainState:
  return TrainState(jax.ShapeDtypeStruct((), jnp.int32), WEIGHTS, jax.eval_shape(tx.init, STRUCTS))


def test_the_state_filter_is_inferred_for_adafactor_only() -> None:
  factored = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=2).init, STRUCTS)
  assert infer_state_filter(factored) == r'.*expert.*/kernel/v_.*'
  assert infer_state_filter(jax.eval_shape(optax.adafactor(1e-3, factored=False).init, STRUCTS)) is None
  with pytest.raises(ValueError, match='Adafactor only; pass state_filter='):
    infer_state_filter(jax.eval_shape(optax.adam(1e-3).init, STRUCTS))


def test_partitioner_with_fewer_experts_than_devices() -> None:
  partitioner = MoePjitPartitioner(4, num_partitions=1)
  assert partitioner.two_data_axes and dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
  assert partitioner.data_partition_spec == P(('data', 'model')) and partitioner.data_mesh_size == 8
  specs = partitioner.get_mesh_axes(state_of(optax.adam(1e-3)))
  assert specs.mdl_vars['expert']['kernel'] == P('data', None, None)
  assert specs.mdl_vars['dense']['kernel'] == P(None, None)
  assert specs.opt_states[0].mu == specs.mdl_vars
  double = partitioner.partition(lambda x: 2 * x, (P('data'),), P('data'))
  assert {s.data.shape for s in double(jnp.ones(16)).addressable_shards} == {(2,)}


def test_partitioner_with_as_many_experts_as_devices() -> None:
  partitioner = MoePjitPartitioner(8, num_partitions=2)
  assert not partitioner.two_data_axes and dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
  assert partitioner.data_partition_spec == P('data')
  specs = partitioner.get_mesh_axes(state_of(optax.adam(1e-3)))
  assert specs.mdl_vars['expert']['kernel'] == P('data', None, 'model')
  assert specs.mdl_vars['dense']['kernel'] == P(None, 'model')


def test_factored_slots_of_experts_keep_the_expert_axis() -> None:
  state = state_of(optax.adafactor(1e-3, min_dim_size_to_factor=2))
  plain = MoePjitPartitioner(4, num_partitions=1).get_logical_axes(state)
  assert plain.opt_states[0].v_row['expert']['kernel'] == (None, None)
  axes = MoePjitPartitioner(4, num_partitions=1, state_filter='infer').get_logical_axes(state)
  assert axes.opt_states[0].v_row['expert']['kernel'] == ('expert', None)
  assert axes.opt_states[0].v_col['expert']['kernel'] == ('expert', None)
  assert axes.opt_states[0].v_row['dense']['kernel'] == (None,)
  assert axes.mdl_vars == plain.mdl_vars
  with pytest.raises(ShardingError, match='Adafactor only'):
    MoePjitPartitioner(4, num_partitions=1, state_filter='infer').get_logical_axes(state_of(optax.adam(1e-3)))
