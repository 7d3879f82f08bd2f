"""Mixtures of experts: the second data axis, the rules of experts, and the expert axis of optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.bridges.t5x import moe
from praxis_lite.bridges.t5x.axis_names import AxisNames
from praxis_lite.bridges.t5x.chunks import DataLayout
from praxis_lite.bridges.t5x.meshes import DescribedDevice
from praxis_lite.bridges.t5x.moe import MoePjitPartitioner, infer_state_filter, prepend_expert
from praxis_lite.bridges.t5x.moe_rules import to_two_data_axes, uses_two_data_axes
from praxis_lite.bridges.t5x.partitioners import PjitPartitioner
from praxis_lite.common.errors import ShardingError
from praxis_lite.common.trees import path_matches
from praxis_lite.sharding.rules import logical_to_mesh_axes, standard_logical_axis_rules
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.state import TrainState


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
  rules = moe.standard_logical_axis_rules(8, 1)
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
  usual, two = moe.standard_logical_axis_rules(8, 1), moe.standard_logical_axis_rules(4, 1)
  changed = {'batch': ('data', 'model'), 'expert_replicas': 'model'}
  for (name, axes), (same_name, new_axes) in zip(usual, two):
    assert name == same_name
    assert new_axes == changed.get(name, None if axes == 'model' else axes)


def test_two_parameter_dimensions_are_refused() -> None:
  with pytest.raises(ValueError, match='parameter_partitioning_dims=2 is not supported with experts'):
    moe.standard_logical_axis_rules(4, 1, parameter_partitioning_dims=2)


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
  assert to_two_data_axes(spec) == overridden
  assert to_two_data_axes((spec, {'tree': spec})) == (overridden, {'tree': spec})


def test_data_partition_spec() -> None:
  assert moe.data_partition_spec(True) == P(('data', 'model'))
  assert moe.data_partition_spec(False) == P('data')


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
  pattern = infer_state_filter(factored)
  assert pattern is not None
  for path, matches in {
    'expert/kernel/v_row': True,
    'mlp/experts/w/v_col': True,
    'expert/kernel/m': False,
    'kernel/v_col': False,
    'expert/bias/v_row': False,
  }.items():
    assert path_matches(pattern, tuple(path.split('/'))) is matches, path
  assert infer_state_filter(jax.eval_shape(optax.adafactor(1e-3, factored=False).init, STRUCTS)) is None
  assert infer_state_filter({'all': jax.eval_shape(optax.adam(1e-3).init, STRUCTS)}) is None
  with pytest.raises(ValueError, match=r'Adafactor only.* pass state_filter='):
    infer_state_filter({'momentum': STRUCTS})


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
  plain = MoePjitPartitioner(4, num_partitions=1, state_filter=None).get_logical_axes(state)
  assert plain.opt_states[0].v_row['expert']['kernel'] == (None, None)
  axes = MoePjitPartitioner(4, num_partitions=1, state_filter='infer').get_logical_axes(state)
  assert axes.opt_states[0].v_row['expert']['kernel'] == ('expert', None)
  assert axes.opt_states[0].v_col['expert']['kernel'] == ('expert', None)
  assert axes.opt_states[0].v_row['dense']['kernel'] == (None,)
  assert axes.mdl_vars == plain.mdl_vars
  inferring = MoePjitPartitioner(4, num_partitions=1)
  assert inferring.get_logical_axes(state.replace(opt_states={'mu': STRUCTS})).opt_states == {'mu': plain.mdl_vars}
  rows = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[:-1], s.dtype), STRUCTS)
  with pytest.raises(ShardingError, match='Adafactor only'):
    inferring.get_logical_axes(state.replace(opt_states={'rows': rows}))


def test_two_data_axes_leave_parameters_and_slots_as_the_rules_say() -> None:
  weights = {
    'expert': {'b': WeightHParams((4,), tensor_split_dims_mapping=('expert',))},
    'router': {'w': WeightHParams((6,), tensor_split_dims_mapping=('expert_replicas',))},
  }
  structs = jax.tree.map(lambda w: w.as_struct(), weights)
  state = TrainState(
    jax.ShapeDtypeStruct((), jnp.int32), weights, jax.eval_shape(optax.adam(1e-3).init, structs), structs
  )
  partitioner = MoePjitPartitioner(4, num_partitions=1)
  specs, layout = partitioner.get_mesh_axes(state), partitioner.get_layout(state)
  expected = {'expert': {'b': P('data')}, 'router': {'w': P('model')}}
  assert specs.mdl_vars == specs.ema_vars == specs.opt_states[0].mu == specs.opt_states[0].nu == expected
  assert layout.padded_shapes.mdl_vars['expert']['b'].shape == (4,)


def test_only_the_specs_passed_to_partition_themselves_are_overridden() -> None:
  partitioner = MoePjitPartitioner(4, num_partitions=1)
  fn = partitioner.partition(
    lambda params, x, y: (params, x, y), ({'b': P('data')}, P('data'), P('model')), ({'b': P('data')}, P('data'), None)
  )
  params, x, y = fn({'b': jnp.ones(4)}, jnp.ones(16), jnp.ones(3))
  assert {s.data.shape for s in params['b'].addressable_shards} == {(1,)}
  assert {s.data.shape for s in x.addressable_shards} == {(2,)}
  assert {s.data.shape for s in y.addressable_shards} == {(3,)}
  both = partitioner.partition(lambda x: x, P('data'), P('data'))
  assert {s.data.shape for s in both(jnp.ones(16)).addressable_shards} == {(2,)}


def test_expert_is_prepended_to_axes_that_are_none_too() -> None:
  axes = {'mlp': {'ema': AxisNames('embed', 'mlp'), 'sq_ema': None}, 'logits': {'ema': None}}
  expected = {'mlp': {'ema': ('expert', 'embed', 'mlp'), 'sq_ema': ('expert',)}, 'logits': {'ema': None}}
  assert prepend_expert(axes, '.*mlp.*') == prepend_expert(axes, lambda path: 'mlp/' in path) == expected


def test_states_that_know_their_axes_get_the_expert_axis_where_the_filter_says() -> None:
  class Knowing:
    def as_logical_axes(self) -> Any:
      slots = {'mlp': {'wo': {'ema': AxisNames('embed', 'mlp'), 'sq_ema': None}}, 'logits': None}
      return TrainState(AxisNames(), {'mlp': {'wo': AxisNames('embed', 'mlp')}}, slots)

  seen = []

  def of_mlp(path: str) -> bool:
    seen.append(path)
    return path.startswith('mlp/')

  for given in (of_mlp, r'mlp/.*'):
    axes = MoePjitPartitioner(8, num_partitions=1, state_filter=given).get_logical_axes(Knowing())
    assert axes.opt_states == {
      'mlp': {'wo': {'ema': ('expert', 'embed', 'mlp'), 'sq_ema': ('expert',)}},
      'logits': None,
    }
    assert axes.mdl_vars == {'mlp': {'wo': ('embed', 'mlp')}}
  assert sorted(seen) == ['logits', 'mlp/wo/ema', 'mlp/wo/sq_ema']


def test_state_filters_may_be_functions_of_the_path() -> None:
  state = state_of(optax.adafactor(1e-3, min_dim_size_to_factor=2))
  only_rows = MoePjitPartitioner(4, num_partitions=1, state_filter=lambda path: path == 'expert/kernel/v_row')
  slots = only_rows.get_logical_axes(state).opt_states[0]
  assert slots.v_row['expert']['kernel'] == ('expert', None) and slots.v_col['expert']['kernel'] == (None, None)


@pytest.mark.parametrize('name', ['kernel', 'w'])
def test_factored_adafactor_is_inferred_for_weights_of_either_name(name: str) -> None:
  weights = {'experts': {name: WEIGHTS['expert']['kernel']}, 'dense': {name: WEIGHTS['dense']['kernel']}}
  structs = jax.tree.map(lambda w: w.as_struct(), weights)
  init = optax.adafactor(1e-3, min_dim_size_to_factor=2).init
  state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), weights, {'all': jax.eval_shape(init, structs)})
  specs = MoePjitPartitioner(4, num_partitions=1).get_mesh_axes(state)
  slots = specs.opt_states['all'][0]
  assert slots.v_row['experts'][name] == slots.v_col['experts'][name] == P('data', None)
  assert slots.v_row['dense'][name] == P(None) and slots.v['experts'][name] == P(None)


@pytest.mark.parametrize('tx', [optax.adam(1e-3), optax.sgd(1e-3), optax.chain(optax.clip(1.0), optax.lion(1e-3))])
def test_other_optimizers_inherit_without_a_filter(tx: Any) -> None:
  state = state_of(tx)
  axes = MoePjitPartitioner(4, num_partitions=1).get_logical_axes(state)
  expected = PjitPartitioner(1, logical_axis_rules=moe.standard_logical_axis_rules(4, 1)).get_logical_axes(state)
  assert axes == expected


def test_overrides_of_state_names_win_over_the_filter() -> None:
  partitioner = MoePjitPartitioner(
    4, num_partitions=1, state_axis_names_overrides=[('opt_states/0/v_row/expert/kernel', (None, 'embed'))]
  )
  slots = partitioner.get_logical_axes(state_of(optax.adafactor(1e-3, min_dim_size_to_factor=2))).opt_states[0]
  assert slots.v_row['expert']['kernel'] == (None, 'embed') and slots.v_col['expert']['kernel'] == ('expert', None)


def test_states_for_inference_have_no_slots() -> None:
  class Knowing:
    mdl_vars = None

    def as_logical_axes(self) -> Any:
      return TrainState(None, {'w': AxisNames('vocab', 'embed')}, None)

  partitioner = MoePjitPartitioner(8, num_partitions=1)
  axes = partitioner.get_logical_axes(TrainState(None, WEIGHTS, None))
  assert axes.mdl_vars['expert']['kernel'] == ('expert', 'embed', 'expert_mlp') and axes.opt_states is None
  assert partitioner.get_logical_axes(Knowing()).mdl_vars == {'w': ('vocab', 'embed')}


def test_rules_and_data_spec_have_the_names_of_t5x() -> None:
  assert moe.data_partition_spec(two_data_axes=True) == P(('data', 'model'))
  assert moe.data_partition_spec(two_data_axes=False) == P('data')
  extra = [('additional', 'model'), ('expert_magic', 'data')]
  two = dict(moe.standard_logical_axis_rules(num_experts=1, num_partitions=1, additional_rules=extra))
  assert two['batch'] == ('data', 'model') and two['expert_replicas'] == 'model' and two['expert_magic'] == 'data'
  assert {two[name] for name in ('vocab', 'mlp', 'heads', 'joined_kv', 'expert_mlp', 'additional')} == {None}
  one = moe.standard_logical_axis_rules(num_experts=1, num_partitions=2, additional_rules=extra)
  assert one[: len(standard_logical_axis_rules())] == standard_logical_axis_rules() and one[-2:] == tuple(extra)
  assert moe.standard_logical_axis_rules(4, num_partitions=1, num_devices=4) == moe.standard_logical_axis_rules(
    0, model_parallel_submesh=(1, 1)
  )


def test_each_host_reads_its_share_over_both_data_axes() -> None:
  assert MoePjitPartitioner(8, num_partitions=1).get_data_layout(32) == DataLayout(32, 0, 1, True)
  assert MoePjitPartitioner(4, num_partitions=1).get_data_layout() == DataLayout(8, 0, 1, True)
  with pytest.raises(ShardingError, match='batch size 12 must be a positive multiple of 8'):
    MoePjitPartitioner(4, num_partitions=1).get_data_layout(12)
  chips = [
    DescribedDevice(2 * x + 8 * y + core, x // 2 + 2 * (y // 2), (x, y, 0), core, 'tpu', 'TPU v3')
    for y in range(4)
    for x in range(4)
    for core in range(2)
  ]
  partitioner = MoePjitPartitioner(8, num_partitions=1, devices=chips)
  assert dict(partitioner.mesh.shape) == {'data': 8, 'model': 4} and partitioner.data_mesh_size == 32
  layouts = [partitioner.get_data_layout(32, host_index=host) for host in range(4)]
  assert layouts == [DataLayout(32, shard, 4, True) for shard in (0, 2, 1, 3)]
