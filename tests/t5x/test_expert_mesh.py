"""The mesh with an axis of its own for experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from test_device_meshes import torus

from praxis_lite.bridges.t5x import MoePjitPartitioner, PjittedFnWithContext, default_mesh, moe, moe_rules
from praxis_lite.bridges.t5x.chunks import DataLayout
from praxis_lite.common.errors import ShardingError
from praxis_lite.partitioning import default_moe_mesh
from praxis_lite.sharding.rules import standard_logical_axis_rules


@pytest.mark.parametrize(
  ('arguments', 'shape'),
  [
    ((16, 1), (1, 8, 1)),
    ((8, 1), (1, 8, 1)),
    ((4, 1), (2, 4, 1)),
    ((3, 1), (4, 2, 1)),
    ((1, 1), (8, 1, 1)),
    ((8, 4), (1, 2, 4)),
    ((8, None, (1, 1, 1, 2)), (1, 4, 2)),
  ],
)
def test_experts_take_the_largest_divisor_of_the_data_axis(arguments: Any, shape: tuple[int, ...]) -> None:
  devices = torus((2, 2, 1, 2))
  mesh = default_moe_mesh(*arguments, devices=devices)
  assert mesh.axis_names == ('data', 'expert', 'model') and mesh.devices.shape == shape
  usual = default_mesh(*arguments[1:], devices=devices)
  assert (mesh.devices.reshape(usual.devices.shape) == usual.devices).all()


def test_meshes_without_links() -> None:
  for make in (moe.get_cpu_mesh, moe.get_gpu_mesh):
    assert dict(make().shape) == {'data': 1, 'expert': 8, 'model': 1}
  with pytest.raises(ShardingError, match='num_expert_partitions: expected at least 1, got 0'):
    default_moe_mesh(0, 1)


def test_rules() -> None:
  extra = [('additional', 'model'), ('expert_magic', 'data')]
  rules = moe_rules.expert_axis_rules(additional_rules=extra)
  usual = standard_logical_axis_rules()
  assert rules[0] == ('batch', ('expert', 'data')) and rules[1 : len(usual)] == usual[1:]
  own = (('expert', 'expert'), ('expert_mlp', 'model'), ('expert_replicas', 'data'), ('unmodeled', None))
  assert rules[len(usual) :] == (*own, *extra)
  with pytest.raises(ShardingError, match='parameter_partitioning_dims=2 is not supported'):
    moe_rules.expert_axis_rules(parameter_partitioning_dims=2)


def test_only_data_specs_of_whole_arguments_change() -> None:
  both = P(('expert', 'data'))
  specs = (P('data'), P('model'), P('expert'), None, P('other'), P(), {'tree': P('data')})
  assert moe_rules.to_expert_axis(specs) == (both, *specs[1:])
  assert moe_rules.to_expert_axis(P('data')) == moe_rules.to_expert_axis(both) == both
  assert moe_rules.to_expert_axis(None) is None


def test_each_host_reads_its_share() -> None:
  partitioner = MoePjitPartitioner(num_expert_partitions=8, num_partitions=1, devices=torus((4, 4, 1, 2)))
  assert dict(partitioner.mesh.shape) == {'data': 4, 'expert': 8, 'model': 1} and partitioner.data_mesh_size == 32
  layouts = [partitioner.get_data_layout(32, host_index=host) for host in range(4)]
  assert layouts == [DataLayout(32, shard, 4, True) for shard in (0, 2, 1, 3)]
  with pytest.raises(ShardingError, match='batch size 12 must be a positive multiple of 32'):
    partitioner.get_data_layout(12, host_index=0)


def test_a_function_is_partitioned_over_experts_and_data() -> None:
  partitioner = MoePjitPartitioner(num_expert_partitions=4, num_partitions=2)
  assert dict(partitioner.mesh.shape) == {'data': 1, 'expert': 4, 'model': 2}
  assert partitioner.data_partition_spec == P(('expert', 'data'))
  double = partitioner.partition(
    lambda w, x: (2 * w, 2 * x), (P('expert', None, 'model'), P('data')), (None, P('data'))
  )
  w, x = double(jnp.ones((4, 3, 2)), jnp.ones((8, 3)))
  assert {s.data.shape for s in x.addressable_shards} == {(2, 3)} and float(w.sum()) == 48


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({}, 'num_experts or num_expert_partitions: exactly one of them; neither is given'),
    ({'num_experts': 4, 'num_expert_partitions': 4}, 'both are given'),
    ({'num_expert_partitions': 4, 'num_partitions': None, 'ici_mesh_shape': (1, 4, 2)}, 'ici_mesh_shape: '),
  ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
  with pytest.raises(ShardingError, match=message):
    MoePjitPartitioner(**{'num_partitions': 1, **arguments})


def test_a_jitted_function_is_called_with_the_mesh_and_the_rules() -> None:
  from praxis_lite.sharding import with_logical_constraint, with_sharding_constraint

  mesh, rules = default_mesh(2), (('batch', 'data'), ('mlp', 'model'))

  def constrained(x: jax.Array) -> jax.Array:
    return with_sharding_constraint(2 * x, P('data', 'model'))

  def named(x: jax.Array) -> jax.Array:
    return with_logical_constraint(2 * x, ('batch', 'mlp'))

  x = jnp.ones((8, 4))
  for fn in (
    PjittedFnWithContext(constrained, mesh),
    PjittedFnWithContext(jax.jit(constrained), mesh),
    PjittedFnWithContext(jax.jit(named), mesh, rules),
    PjittedFnWithContext(named, mesh, logical_axis_rules=rules),
  ):
    for y in (fn(x), fn.lower(x).compile()(x)):
      assert y.sharding.spec == P('data', 'model') and float(y.sum()) == 64
  with pytest.raises(ShardingError, match='needs both resources'):
    PjittedFnWithContext(constrained, mesh, P('data'))
  with pytest.raises(ShardingError, match='arg_shapes need in_axis_resources'):
    PjittedFnWithContext(constrained, mesh, arg_shapes=(x,))
