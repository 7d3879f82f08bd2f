"""Partitioners jit functions of true arrays for a mesh, whatever their dimensions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.constraints import with_logical_constraint
from praxis_lite.partitioning.rules import standard_logical_axis_rules
from praxis_lite.t5x.chunks import DataLayout, LocalChunkInfo
from praxis_lite.t5x.partitioners import BasePartitioner, PjitPartitioner
from praxis_lite.training.state import TrainState
from praxis_lite.weights import WeightHParams

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
