"""Equations are read as every release of JAX has them, and one of an unknown shape is said to be so."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec as P

from praxis_lite.common.jax_internals import UnknownJax
from praxis_lite.common.jax_internals.programs import (
  ScanSizes,
  WhileSizes,
  bind,
  called_program,
  mapped_axes,
  program_in,
  scan_sizes,
  strip_constants,
  while_sizes,
)


def equation(name, fn, *args):
  return next(eqn for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns if eqn.primitive.name == name)


def scanned(consts, carry, slices):
  """A scan with so many constants, carried and sliced arrays, and as many stacked results as sliced arrays."""

  def run(fixed, start, xs):
    def body(state, x):
      total = sum(fixed, jnp.float32(0)) + sum(x, jnp.float32(0))
      return [s + total for s in state], [y + total for y in x]

    return lax.scan(body, start, xs, length=4)

  one = jnp.float32(1)
  return equation('scan', run, [one] * consts, [one] * carry, [jnp.ones(4)] * slices)


@pytest.mark.parametrize('sizes', [(0, 1, 0), (2, 1, 0), (0, 0, 3), (1, 2, 3), (3, 2, 1), (0, 3, 1)], ids=str)
def test_the_operands_of_a_scan(sizes):
  assert scan_sizes(scanned(*sizes)) == ScanSizes(*sizes)


def test_the_operands_of_scans_that_jax_makes_of_a_scan():
  def loss(x, w, rows):
    return lax.scan(lambda c, row: (jnp.sin(c * w + row.sum()), c), x, rows)[1].sum()

  args = (jnp.float32(1), jnp.float32(2), jnp.ones((4, 3)))
  scans = [e for e in jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*args).jaxpr.eqns if e.primitive.name == 'scan']
  assert len(scans) == 2
  for eqn in (*scans, equation('scan', jax.vmap(loss, (0, None, None)), jnp.ones(5), *args[1:])):
    sizes = scan_sizes(eqn)
    assert sum(sizes) == len(eqn.invars) and sizes.carry <= len(eqn.outvars)
    for outer, inner in zip(eqn.invars[sizes.consts + sizes.carry :], eqn.params['jaxpr'].in_avals[-sizes.slices :]):
      assert outer.aval.shape == (4, *inner.shape)
    for outer, inner in zip(eqn.invars[: sizes.consts], eqn.params['jaxpr'].in_avals):
      assert outer.aval.shape == inner.shape


def test_the_operands_of_a_while():
  def run(limit, step, x, y):
    return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + step, s[1] * step), (x, y))

  assert while_sizes(equation('while', run, 9.0, 2.0, 1.0, 1.0)) == WhileSizes(1, 1, 2)


def parts(*sizes):
  return types.SimpleNamespace(unpack=lambda: tuple([None] * size for size in sizes))


@pytest.mark.parametrize(
  'params, sizes',
  [({'num_consts': 1, 'num_carry': 2}, (1, 2, 3)), ({'ft_in': parts(1, 2, 3), 'ft_out': parts(2, 3)}, (1, 2, 3))],
  ids=['up to 0.10', 'from 0.11 on'],
)
def test_both_ways_to_say_it_are_known_wherever_they_are_met(params, sizes):
  eqn = types.SimpleNamespace(primitive=jax.lax.scan, params=params, invars=[None] * 6, outvars=[None] * 5)
  assert scan_sizes(eqn) == sizes


UNKNOWN = [
  {},
  {'num_consts': 1},
  {'num_consts': 3, 'num_carry': 4},
  {'num_consts': 0, 'num_carry': 6},
  {'num_consts': None, 'num_carry': 1},
  {'ft_in': None},
  {'ft_in': (1, 2, 3)},
  {'ft_in': parts(1, 5)},
  {'ft_in': parts(1, 2, 3, 4)},
  {'ft_in': types.SimpleNamespace(unpack=lambda: (1, 2, 3))},
]


@pytest.mark.parametrize('params', UNKNOWN, ids=range(len(UNKNOWN)))
def test_an_unknown_shape_is_said_to_be_one(params):
  for name, sizes in (('scan', scan_sizes), ('while', while_sizes)):
    kind = types.SimpleNamespace(name=name)
    with pytest.raises(UnknownJax, match=name):
      sizes(types.SimpleNamespace(primitive=kind, params=params, invars=[None] * 6, outvars=[None] * 5))


def test_an_operation_is_bound_again_whatever_it_calls():
  def fn(x):
    y = jnp.sin(x) + lax.cond(x > 0, jnp.cos, jnp.tan, x)
    values, places = lax.top_k(jnp.stack([y, x]), 1)
    return jax.jit(jnp.exp)(jax.nn.relu(y)) + values[0] + lax.while_loop(lambda c: c < 3, lambda c: c + 1.0, x), places

  closed, x = jax.make_jaxpr(fn)(2.0), jnp.float32(0.5)
  values = dict(zip(closed.jaxpr.invars, [x])) | dict(zip(closed.jaxpr.constvars, closed.consts))
  for eqn in closed.jaxpr.eqns:
    results = bind(eqn, [a.val if isinstance(a, Literal) else values[a] for a in eqn.invars])
    values.update(zip(eqn.outvars, results, strict=True))
  for got, wanted in zip([values[v] for v in closed.jaxpr.outvars], fn(x), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
  with pytest.raises(UnknownJax, match='binding'):
    bind(types.SimpleNamespace(primitive=types.SimpleNamespace(), params={}), [])


def doubled():
  @jax.custom_vjp
  def double(x):
    return x * 2

  double.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
  return double


def shifted():
  @jax.custom_jvp
  def shift(x):
    return x + 1

  shift.defjvp(lambda x, t: (x[0] + 1, t[0]))
  return shift


CALLS = {
  'jit': lambda: jax.jit(jnp.sin),
  'remat2': lambda: jax.checkpoint(jnp.sin),
  'custom_vjp_call': doubled,
  'custom_jvp_call': shifted,
  'shard_map': lambda: jax.shard_map(jnp.sin, mesh=jax.make_mesh((1,), ('a',)), in_specs=P(), out_specs=P()),
}


@pytest.mark.parametrize('name', CALLS)
def test_the_program_that_an_operation_calls(name):
  eqn = equation(name, CALLS[name](), 1.0)
  program = called_program(eqn)
  assert program is program_in(eqn.params)
  inner = strip_constants(program)
  assert len(inner.invars) == len(eqn.invars) == 1 and len(inner.eqns) == 1
  assert inner.eqns[0].primitive.name == {'custom_vjp_call': 'mul', 'custom_jvp_call': 'add'}.get(name, 'sin')


def test_the_axes_that_shard_map_maps():
  mesh = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)

  def inner(x):
    return jax.shard_map(jnp.sin, in_specs=P('a'), out_specs=P('a'), axis_names={'a'})(x)

  def outer(x):
    return jax.shard_map(inner, in_specs=P('b'), out_specs=P('b'), axis_names={'b'})(x)

  x = jnp.ones(8)
  both = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P('a'), out_specs=P('a'))
  assert mapped_axes(equation('shard_map', both, x)) == {'a': 2, 'b': 4}
  with jax.set_mesh(mesh):
    around = equation('shard_map', outer, x)
  assert mapped_axes(around) == {'b': 4}
  (within,) = [e for e in strip_constants(called_program(around)).eqns if e.primitive.name == 'shard_map']
  assert mapped_axes(within) == {'a': 2}
  for params in ({}, {'mesh': mesh}, {'mesh': mesh, 'manual_axes': 3}, {'mesh': None, 'newly_manual_axes': ('a',)}):
    with pytest.raises(UnknownJax, match='shard_map'):
      mapped_axes(types.SimpleNamespace(params=params))


def test_operations_that_call_no_program():
  assert called_program(equation('sin', jnp.sin, 1.0)) is None
  assert program_in({'jaxpr': 'of another release'}) is None
