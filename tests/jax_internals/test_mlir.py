"""Shardy's passes run by name; a pass that is gone, or refuses a program, is an unknown shape of JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common.jax_internals import UnknownJax
from praxis_lite.common.jax_internals.mlir import collective_groups, ir, run_passes
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.sharding.propagation import Propagation, operations


def lowered_product():
  mesh = create_device_mesh((2,), None, ('data',))
  x = jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec('data')))
  return jax.jit(lambda x: x @ x.T).lower(x).compiler_ir('stablehlo')


def test_shardings_are_propagated_and_read():
  module = lowered_product()
  with module.context:
    (product,) = Propagation(module, {'stablehlo.dot_general'}).instances()
  assert [[axis.name for axis in dim] for dim in product.splits[0]] == [['data'], []]


GROUPS = [
  ('dense<[[0, 3], [1, 4], [2, 5]]> : tensor<3x2xi64>', ((0, 3), (1, 4), (2, 5))),
  ('#stablehlo.replica_group_mesh_axes<mesh = @m, axes = [#stablehlo.axis_ref<name = "a">]>', ((0, 3), (1, 4), (2, 5))),
  ('#stablehlo.replica_group_mesh_axes<mesh = @m, axes = [#stablehlo.axis_ref<name = "b">]>', ((0, 1, 2), (3, 4, 5))),
]
BOTH = '#stablehlo.axis_ref<name = "b">, #stablehlo.axis_ref<name = "a">'
GROUPS += [(f'#stablehlo.replica_group_mesh_axes<mesh = @m, axes = [{BOTH}]>', ((0, 3, 1, 4, 2, 5),))]


class Collective:
  """An operation, of which only the attributes are read."""

  def __init__(self, **attributes):
    self.attributes = attributes


@pytest.mark.parametrize('written, groups', GROUPS, ids=['numbers', 'a', 'b', 'b and a'])
def test_groups_are_numbers_of_devices_or_axes_of_the_mesh(written, groups):
  with lowered_product().context:
    attribute = ir.Attribute.parse(written) if written.startswith('dense') else written
    assert collective_groups(Collective(replica_groups=attribute), {'a': 2, 'b': 3}) == groups


def test_the_groups_of_a_lowered_program_are_those_of_its_axes():
  mesh = create_device_mesh((2, 3), None, ('a', 'b'))
  x = jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec('a', 'b')))
  total = jax.shard_map(
    lambda x: jax.lax.psum(x, 'a'), mesh=mesh, in_specs=x.sharding.spec, out_specs=PartitionSpec(None, 'b')
  )
  module = jax.jit(total).lower(x).compiler_ir('stablehlo')
  with module.context:
    (reduce,) = operations(module.operation, {'stablehlo.all_reduce'})
    assert collective_groups(reduce, {'a': 2, 'b': 3}) == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize('axis', ['name = "c"', 'name = "a", sub_axis_info = (1)2'])
def test_groups_that_are_not_understood(axis):
  with pytest.raises(UnknownJax, match='a collective has the groups'):
    collective_groups(
      Collective(replica_groups=f'#stablehlo.replica_group_mesh_axes<axes = [#stablehlo.axis_ref<{axis}>]>'),
      {'a': 2, 'b': 3},
    )


@pytest.mark.parametrize('pipeline', ['builtin.module(sdy-no-such-pass)', 'builtin.module(', 'func.func(cse)'])
def test_passes_that_there_are_not(pipeline):
  module = lowered_product()
  with module.context, pytest.raises(UnknownJax, match='the passes'):
    run_passes(pipeline, module.operation)


def test_a_program_that_passes_refuse():
  with ir.Context() as context:
    context.allow_unregistered_dialects = True
    root = ir.Operation.parse('"func.func"() ({}) {sym_name = "f", function_type = () -> ()} : () -> ()')
    with pytest.raises(UnknownJax, match='the passes'):
      run_passes('builtin.module(symbol-dce)', root)
