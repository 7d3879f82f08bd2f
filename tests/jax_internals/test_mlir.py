"""Shardy's passes run by name; a pass that is gone, or refuses a program, is an unknown shape of JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common.jax_internals import UnknownJax
from praxis_lite.common.jax_internals.mlir import ir, run_passes
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.sharding.propagation import Propagation


def lowered_product():
  mesh = create_device_mesh((2,), None, ('data',))
  x = jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec('data')))
  return jax.jit(lambda x: x @ x.T).lower(x).compiler_ir('stablehlo')


def test_shardings_are_propagated_and_read():
  module = lowered_product()
  with module.context:
    (product,) = Propagation(module, {'stablehlo.dot_general'}).instances()
  assert [[axis.name for axis in dim] for dim in product.splits[0]] == [['data'], []]


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
