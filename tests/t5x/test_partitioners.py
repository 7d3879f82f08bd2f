"""Partitioners jit functions of true arrays for a mesh, whatever their dimensions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax_boxes import LogicallyPartitioned
from jax.sharding import PartitionSpec as P

from praxis_lite.bridges.t5x.chunks import DataLayout, LocalChunkInfo
from praxis_lite.bridges.t5x.partitioners import BasePartitioner, BasePjitPartitioner, PjitPartitioner
from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding.constraints import with_logical_constraint
from praxis_lite.sharding.rules import standard_logical_axis_rules
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.state import TrainState

# Nothing here divides by 2 or 4: 5 embed, 7 mlp, 9 vocabulary.
WEIGHTS = {
  'emb': {'w': WeightHParams((9, 5), tensor_split_dims_mapping=('vocab', 'embed'))},
  'ff': {'w': WeightHParams((5, 7), tensor_split_dims_mapping=('embed', 'mlp'))},
}
STRUCTS = jax.tree.map(lambda w: w.as_struct(), WEIGHTS)
TX = optax.adam(1e-2)
STATE = TrainState(
  step=jax.ShapeDtypeStruct((), jnp.int32), mdl_vars=WEIGHTS, opt_states=jax.eval_shape(TX.init, STRUCTS)
)
IDS = np.arange(8, dtype=np.int32) % 9


def init(key: jax.Array) -> TrainState:
  params = jax.tree.map(lambda s: jax.random.normal(key, s.shape), STRUCTS)
  return TrainState(jnp.zeros((), jnp.int32), params, TX.init(params))


def train_step(state: TrainState, ids_B: jax.Array) -> tuple[TrainState, jax.Array]:
  def loss(params: Any) -> jax.Array:
    h_BF = with_logical_constraint(params['emb']['w'][ids_B] @ params['ff']['w'], ('batch', 'mlp'))
    return jnp.mean((h_BF @ params['ff']['w'].T - 1) ** 2) + jnp.mean(params['emb']['w'])

  value, grads = jax.value_and_grad(loss)(state.mdl_vars)
  updates, opt_states = TX.update(grads, state.opt_states, state.mdl_vars)
  params = optax.apply_updates(state.mdl_vars, updates)
  return state.replace(step=state.step + 1, mdl_vars=params, opt_states=opt_states), value


def make_partitioner(**kwargs: Any) -> PjitPartitioner:
  return PjitPartitioner(num_partitions=4, logical_axis_rules=standard_logical_axis_rules(1, 2), **kwargs)


def part_shapes(x: jax.Array) -> set[tuple[int, ...]]:
  return {shard.data.shape for shard in x.addressable_shards}


def test_uneven_state_trains_as_on_one_device() -> None:
  partitioner = make_partitioner()
  axes, layout = partitioner.get_mesh_axes(STATE), partitioner.get_layout(STATE)
  step = partitioner.partition(
    train_step,
    (axes, partitioner.data_partition_spec),
    (axes, None),
    donate_argnums=0,
    arg_shapes=(layout.unpadded_shapes, None),
  )
  state, true = partitioner.initialize(init, STATE, jax.random.key(0)), init(jax.random.key(0))
  assert state.mdl_vars['emb']['w'].shape == (12, 6) and part_shapes(state.mdl_vars['emb']['w']) == {(3, 3)}
  assert part_shapes(state.opt_states[0].mu['ff']['w']) == {(3, 2)}
  expected_step = jax.jit(train_step)
  for _ in range(3):
    state, loss = step(state, IDS)
    true, true_loss = expected_step(true, IDS)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-5)
  np.testing.assert_allclose(state.mdl_vars['emb']['w'][:9, :5], true.mdl_vars['emb']['w'], rtol=1e-5)
  assert (
    not np.asarray(state.mdl_vars['emb']['w'])[9:].any() and not np.asarray(state.mdl_vars['emb']['w'])[:, 5:].any()
  )


def test_compile_gives_a_program_for_padded_arrays() -> None:
  partitioner = make_partitioner()
  axes, shapes = partitioner.get_mesh_axes(STATE), partitioner.get_layout(STATE).unpadded_shapes
  spec = partitioner.data_partition_spec
  fn = partitioner.partition(train_step, (axes, spec), (axes, None), arg_shapes=(shapes, None))
  compiled = partitioner.compile(fn, shapes, jax.ShapeDtypeStruct((8,), jnp.int32))
  assert 'all-reduce' in str(compiled.as_text())
  state = partitioner.move_params_to_devices(init(jax.random.key(0)), axes)
  ids = jax.device_put(IDS, jax.sharding.NamedSharding(partitioner.mesh, spec))
  np.testing.assert_array_equal(compiled(state, ids)[1], fn(state, ids)[1])


def test_parameters_can_stay_in_host_memory() -> None:
  partitioner = make_partitioner(params_on_devices=False)
  axes, layout = partitioner.get_mesh_axes(STATE), partitioner.get_layout(STATE)
  state = partitioner.initialize(init, STATE, jax.random.key(0))
  host = state.mdl_vars['emb']['w']
  assert isinstance(host, np.ndarray) and host.shape == (9, 5)
  assert isinstance(state.opt_states[0].mu['emb']['w'], jax.Array)
  step = partitioner.partition(train_step, (axes, None), (axes, None), arg_shapes=(layout.unpadded_shapes, None))
  moved = partitioner.move_params_to_devices(state, axes)
  assert part_shapes(moved.mdl_vars['emb']['w']) == {(3, 3)}
  np.testing.assert_array_equal(step(state, IDS)[1], step(moved, IDS)[1])


def test_logical_and_mesh_axes_of_a_state() -> None:
  partitioner = make_partitioner(
    params_axis_names_overrides=[('ff/w', ('mlp', 'embed'))],
    state_axis_names_overrides=[('opt_states/0/nu/emb/w', (None, 'embed'))],
  )
  axes = partitioner.get_logical_axes(STATE)
  assert axes.mdl_vars['ff']['w'] == axes.opt_states[0].mu['ff']['w'] == ('mlp', 'embed')
  assert axes.opt_states[0].mu['emb']['w'] == ('vocab', 'embed') and axes.step == ()
  specs = partitioner.get_mesh_axes(STATE)
  assert specs.mdl_vars == {'emb': {'w': P('model', 'data')}, 'ff': {'w': P('model', 'data')}}
  assert specs.opt_states[0].nu['emb']['w'] == P(None, 'data')


def test_states_that_know_their_axes_are_asked() -> None:
  class Knowing:
    def as_logical_axes(self) -> Any:
      return make_partitioner().get_logical_axes(STATE)

  assert make_partitioner().get_mesh_axes(Knowing()).mdl_vars['emb']['w'] == P('model', 'data')


def test_names_without_a_rule_name_the_variable() -> None:
  state = STATE.replace(mdl_vars={'lm': {'w': WeightHParams((4, 4), tensor_split_dims_mapping=('embed', 'mpl'))}})
  with pytest.raises(ShardingError, match=r"mdl_vars.lm.w: 'mpl' is neither .* Did you mean 'mlp'"):
    make_partitioner().get_mesh_axes(state)


def test_a_rule_to_unconstrained_replicates_what_is_stored() -> None:
  rules = [('batch', 'data'), ('embed', P.UNCONSTRAINED), ('vocab', 'model'), ('mlp', 'model')]
  axes = PjitPartitioner(num_partitions=2, logical_axis_rules=rules).get_mesh_axes(STATE)
  assert axes.mdl_vars == {'emb': {'w': P('model', None)}, 'ff': {'w': P(None, 'model')}}


def test_data_properties() -> None:
  partitioner = make_partitioner()
  assert dict(partitioner.mesh.shape) == {'data': 2, 'model': 4}
  assert partitioner.data_partition_spec == P('data')
  assert (partitioner.data_mesh_size, partitioner.data_shards, partitioner.data_shard_id) == (2, 1, 0)
  assert partitioner.get_data_layout() == DataLayout(2, 0, 1, True)
  assert partitioner.get_data_layout(6, host_index=0).batch_size == 6
  assert partitioner.get_local_chunk_info((8, 4), ('data', None)) == LocalChunkInfo((slice(0, 8), slice(None)), 0)
  with pytest.raises(ShardingError, match='batch size 3 must be'):
    partitioner.get_data_layout(3)


def test_slices_add_a_replica_axis_to_the_batch() -> None:
  partitioner = PjitPartitioner(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(2, 1, 1))
  assert dict(partitioner.mesh.shape) == {'replica': 2, 'data': 2, 'model': 2}
  assert ('batch', ('replica', 'data')) in partitioner.logical_axis_rules
  assert partitioner.data_partition_spec == P(('replica', 'data')) and partitioner.data_mesh_size == 4
  assert partitioner.get_data_layout(8) == DataLayout(8, 0, 1, True)


@pytest.mark.parametrize('ici', [None, (1, 2, 2)])
def test_without_a_rule_for_batches_data_is_split_over_the_data_axes(ici: Any) -> None:
  where: Any = {'num_partitions': 2} if ici is None else {'ici_mesh_shape': ici, 'dcn_mesh_shape': (2, 1, 1)}
  partitioner = PjitPartitioner(logical_axis_rules=(('mlp', 'model'),), **where)
  axes = ('data',) if ici is None else ('replica', 'data')
  assert partitioner.data_axes == axes and partitioner.data_partition_spec == P(axes)
  assert (partitioner.data_mesh_size, partitioner.data_shards, partitioner.data_shard_id) == (4, 1, 0)
  assert partitioner.get_data_layout(8) == DataLayout(8, 0, 1, True)


def test_a_rule_for_batches_decides_over_which_axes_data_is_split() -> None:
  assert PjitPartitioner(2, logical_axis_rules=[('batch', ('data', 'model'))]).data_mesh_size == 8
  assert PjitPartitioner(2, logical_axis_rules=[('batch', None)]).data_partition_spec == P(None)


def test_one_spec_may_stand_for_all_arguments() -> None:
  partitioner = PjitPartitioner(2)

  def add(x: jax.Array, tree: Any) -> Any:
    return {'sum': x + tree['y'], 'x': x}

  x, tree = jnp.arange(8.0).reshape(4, 2), {'y': jnp.ones((4, 2))}
  for spec, part in ((None, (4, 2)), (P('data'), (1, 2)), (P(None, 'model'), (4, 1))):
    out = partitioner.partition(add, spec, spec)(x, tree)
    assert part_shapes(out['sum']) == part_shapes(out['x']) == {part}
    np.testing.assert_array_equal(out['sum'], x + 1)
  for last in (1, -1):
    scaled = partitioner.partition(lambda x, text: len(text) * x, P('data'), P('data'), static_argnums=last)
    np.testing.assert_array_equal(scaled(x, 'abc'), 3 * x)
  shapes = (jax.ShapeDtypeStruct((5, 2), jnp.float32),)
  padded = partitioner.partition(lambda x: x + 1, P('data'), P('data'), arg_shapes=shapes)(jnp.zeros((5, 2)))
  assert padded.shape == (8, 2) and padded.sum() == 10
  with pytest.raises(ShardingError, match=r'argument 1, y, of shape \(3,\) does not divide'):
    partitioner.partition(add, P('data'), None)(jnp.ones(4), {'y': jnp.ones(3)})


def test_base_pjit_partitioner_replicates_states() -> None:
  partitioner = BasePjitPartitioner(2)
  logical = partitioner.get_logical_axes(STATE)
  assert isinstance(logical, TrainState) and not jax.tree.leaves(logical)
  assert set(logical.mdl_vars) == set(WEIGHTS) and logical.mdl_vars['emb']['w'] is None
  assert not jax.tree.leaves(partitioner.get_mesh_axes(STATE))
  assert partitioner.data_partition_spec == P('data') and partitioner.logical_axis_rules == ()
  state = partitioner.initialize(init, STATE, jax.random.key(0))
  assert part_shapes(state.mdl_vars['emb']['w']) == {(9, 5)}
  step = partitioner.partition(train_step, (None, P('data')), (None, None))
  np.testing.assert_allclose(step(state, IDS)[1], jax.jit(train_step)(init(jax.random.key(0)), IDS)[1], rtol=1e-5)


@pytest.mark.parametrize('momentum', [None, 0.9])
@pytest.mark.parametrize('factored', [True, False])
def test_mesh_axes_of_adafactor(factored: bool, momentum: float | None) -> None:
  weights = {
    'logits': WeightHParams((16, 16), tensor_split_dims_mapping=('vocab', 'embed')),
    'mlp': {'wo': {'kernel': WeightHParams((32, 16), tensor_split_dims_mapping=('embed', 'mlp'))}},
  }
  tx = optax.adafactor(1e-3, min_dim_size_to_factor=8, factored=factored, momentum=momentum)
  structs = jax.tree.map(lambda w: w.as_struct(), weights)
  state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), weights, jax.eval_shape(tx.init, structs))
  rules = (('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model'))
  specs = PjitPartitioner(1, logical_axis_rules=rules).get_mesh_axes(state)
  params = {'logits': P('model', None), 'mlp': {'wo': {'kernel': P(None, 'model')}}}
  replicated = {'logits': P(None), 'mlp': {'wo': {'kernel': P(None)}}}
  assert specs.mdl_vars == params
  assert specs.opt_states[0].v_row == specs.opt_states[0].v_col == replicated
  assert specs.opt_states[0].v == (replicated if factored else params)
  if momentum is not None:
    assert params in [getattr(slot, 'trace', getattr(slot, 'ema', None)) for slot in specs.opt_states]


@dataclasses.dataclass(frozen=True)
class InferenceState:
  step: Any
  mdl_vars: Any


jax.tree_util.register_dataclass(InferenceState, data_fields=['step', 'mdl_vars'], meta_fields=[])


@pytest.mark.parametrize('state', [TrainState(None, WEIGHTS, None), InferenceState(None, WEIGHTS)])
def test_states_for_inference_have_no_slots(state: Any) -> None:
  partitioner = make_partitioner()
  axes, specs = partitioner.get_logical_axes(state), partitioner.get_mesh_axes(state)
  assert type(axes) is type(state) and axes.step is None and axes.mdl_vars['ff']['w'] == ('embed', 'mlp')
  assert specs.mdl_vars == {'emb': {'w': P('model', 'data')}, 'ff': {'w': P('data', 'model')}}
  placed = partitioner.move_params_to_devices(
    dataclasses.replace(state, mdl_vars=init(jax.random.key(0)).mdl_vars), specs
  )
  assert part_shapes(placed.mdl_vars['emb']['w']) == {(3, 3)}


def test_what_rules_leave_to_the_compiler_is_stored_replicated() -> None:
  rules = (('batch', 'data'), ('vocab', P.UNCONSTRAINED), ('embed', 'model'), ('mlp', None))
  partitioner = PjitPartitioner(2, logical_axis_rules=rules)
  axes, layout = partitioner.get_mesh_axes(STATE), partitioner.get_layout(STATE)
  state = partitioner.initialize(init, STATE, jax.random.key(0))
  assert part_shapes(state.mdl_vars['emb']['w']) == {(9, 3)}
  step = partitioner.partition(train_step, (axes, None), (axes, None), arg_shapes=(layout.unpadded_shapes, None))
  assert part_shapes(step(state, IDS)[0].mdl_vars['emb']['w']) == {(9, 3)}


def test_static_arguments_and_scalars() -> None:
  partitioner = PjitPartitioner(2)

  def scale(x: jax.Array, times: int, y: jax.Array) -> tuple[jax.Array, float]:
    return x * times + y, 1.5

  fn = partitioner.partition(scale, (P('data'), None), (P('data'), None), static_argnums=1)
  out, half = fn(jnp.ones((8, 3)), 3, jnp.ones(()))
  assert part_shapes(out) == {(2, 3)} and out.sum() == 96 and half == 1.5


def test_what_does_not_fit_is_said() -> None:
  partitioner = PjitPartitioner(2)
  with pytest.raises(ShardingError, match=r'argument 0, w, of shape \(5, 2\) does not divide by .*arg_shapes\[0\]'):
    partitioner.partition(lambda t: t, (P('data'),), P('data'))({'w': jnp.ones((5, 2))})
  fn = partitioner.partition(
    lambda x: x, (P('data'),), P('data'), arg_shapes=(jax.ShapeDtypeStruct((5,), jnp.float32),)
  )
  assert fn(jnp.ones(5)).shape == (8,)
  with pytest.raises(ShardingError, match=r'has shape \(6,\); expected \(5,\), or \(8,\) with its padding'):
    fn(jnp.ones(6))
  with pytest.raises(ShardingError, match='1 in_axis_resources are given for 2 arguments'):
    fn(jnp.ones(5), jnp.ones(5))
  with pytest.raises(ShardingError, match='1 in_axis_resources are given, and 0 arg_shapes'):
    partitioner.partition(lambda x: x, (P('data'),), None, arg_shapes=())
  with pytest.raises(ValueError, match='neither is given'):
    PjitPartitioner()
  with pytest.raises(TypeError, match='abstract'):
    BasePartitioner(2)  # type: ignore[abstract]


def test_names_in_boxes_of_flax_are_used() -> None:
  def boxed(weight: WeightHParams) -> LogicallyPartitioned:
    return LogicallyPartitioned(weight.as_struct(), tuple(weight.full_split_dims_mapping))

  params = jax.tree.map(boxed, WEIGHTS)
  for tx in (TX, optax.adafactor(1e-3, min_dim_size_to_factor=2)):
    plain = dataclasses.replace(STATE, opt_states=jax.eval_shape(tx.init, STRUCTS))
    state = TrainState(STATE.step, params, jax.eval_shape(tx.init, params), params)
    partitioner = make_partitioner(params_axis_names_overrides=[('ff.w', ('mlp', 'embed'))])
    specs, expected = partitioner.get_mesh_axes(state), partitioner.get_mesh_axes(plain)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert jax.tree.leaves(specs.mdl_vars) == jax.tree.leaves(specs.ema_vars) == jax.tree.leaves(expected.mdl_vars)
    assert jax.tree.leaves(specs.opt_states) == jax.tree.leaves(expected.opt_states)
    shapes = partitioner.get_layout(state).padded_shapes
    assert [s.shape for s in jax.tree.leaves(shapes.mdl_vars)] == [
      s.shape for s in jax.tree.leaves(partitioner.get_layout(plain).padded_shapes.mdl_vars)
    ]


def test_a_state_with_boxes_of_flax_is_made_and_placed() -> None:
  names = {'emb': {'w': ('vocab', 'embed')}, 'ff': {'w': ('embed', 'mlp')}}

  def make(key: jax.Array) -> TrainState:
    values = init(key).mdl_vars
    params = jax.tree.map(LogicallyPartitioned, values, names)
    return TrainState(jnp.zeros((), jnp.int32), params, TX.init(params))

  key, partitioner = jax.random.key(0), make_partitioner()
  state = partitioner.initialize(make, jax.eval_shape(make, key), key)
  expected = partitioner.initialize(init, STATE, key)
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(x, y)
    assert x.sharding == y.sharding
