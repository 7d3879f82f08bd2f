"""Collectives are counted in real compiled programs whose communication is known by construction."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from praxis_lite.instruments.testing import Collective, assert_collectives, collectives
from praxis_lite.sharding.mesh import create_device_mesh


@pytest.fixture(scope='module')
def mesh():
  return create_device_mesh((8,), mesh_axis_names=('data',))


def compiled(mesh, fn, in_specs, out_spec, *shapes):
  def shard(spec):
    return NamedSharding(mesh, spec)

  structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return jax.jit(fn, in_shardings=[shard(s) for s in in_specs], out_shardings=shard(out_spec)).lower(*structs).compile()


def test_a_sum_over_a_split_dimension_is_one_all_reduce_of_the_result(mesh):
  program = compiled(mesh, lambda x: x.sum(0), [P('data')], P(), (16, 32))
  found = collectives(program)
  assert found['all-reduce'].count == 1
  assert found['all-reduce'].bytes == 32 * 4
  assert sum(c.count for c in found.values()) == 1


def test_elementwise_work_communicates_nothing(mesh):
  program = compiled(mesh, lambda x: x * 2, [P('data')], P('data'), (16, 32))
  assert all(c == Collective(0, 0) for c in collectives(program).values())


def test_a_loop_counts_each_trip(mesh):
  def loop(x, ws):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

  program = compiled(mesh, loop, [P(None, 'data'), P(None, 'data', None)], P(None, 'data'), (4, 16), (5, 16, 16))
  found = collectives(program)
  assert sum(c.count for c in found.values()) >= 5
  assert any(c.count % 5 == 0 and c.count for c in found.values())


def test_assert_collectives_lists_what_there_is(mesh):
  program = compiled(mesh, lambda x: x.sum(0), [P('data')], P(), (16, 32))
  assert_collectives(program, {'all-reduce': 1, 'all-gather': 0})
  with pytest.raises(AssertionError, match='all-reduce: 1 time, 128 bytes'):
    assert_collectives(program, {'all-reduce': 2})
  with pytest.raises(KeyError, match='all_reduce'):
    assert_collectives(program, {'all_reduce': 1})


def test_text_that_is_not_hlo_is_refused():
  with pytest.raises(ValueError, match='ENTRY'):
    collectives('nothing')
