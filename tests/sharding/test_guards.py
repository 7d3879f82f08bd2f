"""Each guard is still needed, and suffices: the smallest program that it guards against, without it and with it.

A test here that fails without the guard says that XLA has become right, and that the guard in
`sharding/guards/` can go.
"""

import math
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from quick_xla import xla_flags
from warm_python import finished

from praxis_lite.common import jax_internals
from praxis_lite.common.errors import ShardingError
from praxis_lite.instruments.testing import collectives
from praxis_lite.sharding.guards import guard
from praxis_lite.sharding.guards.arrays import PRODUCT
from praxis_lite.sharding.propagation import Propagation

guards = sys.modules['praxis_lite.sharding.guards.guard']  # The package has a function of this name.
RNG = np.random.default_rng(0)
JAX = tuple(int(part) for part in jax.__version__.split('.')[:3])
GUARDED = pytest.mark.parametrize('guarded', [False, True])


def mesh_of(*names, sizes=None):
  sizes = sizes or (2,) * len(names)
  return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def constrained(mesh, fn, specs, out_spec):
  """A function of arrays split by `specs`, stated inside, where they need not divide."""

  def program(*args):
    placed = [jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)) for x, s in zip(args, specs)]
    return jax.lax.with_sharding_constraint(fn(*placed), NamedSharding(mesh, out_spec))

  return program


def run(program, args, guarded=True):
  """The result of a program, and what the guards changed of it."""
  lowered = jax.jit(program).lower(*args)
  changed = guard(lowered) if guarded else []
  return np.asarray(lowered.compile()(*args)), changed


def exit_code(code, num_devices=None):
  """The exit code of a process of its own that runs code with the names of this file."""
  env = os.environ | {'PYTHONPATH': os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])}
  if num_devices is not None:
    env['XLA_FLAGS'] = xla_flags(num_devices)
  code = f'from {pathlib.Path(__file__).stem} import *\n{code}'
  return finished(code, env=env).returncode


def aborts(test):
  """Whether XLA ends the process in which a test of this file runs its program without guards."""
  stem = pathlib.Path(__file__).stem
  return (
    exit_code(f"""
import {stem} as tests
tests.run = lambda *args: run(*args[:2], False)
tests.{test}(True)
""")
    < 0
  )


def integers(*shape):
  return RNG.integers(-3, 4, shape).astype(np.float32)  # Their sums and products are exact.


RESHARD_CASES = [
  ((2, 2, 2, 2), (8, 4, 4, 4), [
    (('d', ('a', 'b')), (None, 'b', ('c', 'd'), 'a')),
    (('b', None, ('d', 'a'), 'c'), (None, 'c', 'b', ('d', 'a'))),
    ((('d', 'c'), 'b'), ('b', None, ('a', 'c'), 'd')),
  ]),
  ((2, 2, 6), (8, 12, 2, 8), [
    (('b', 'a', 'c', None), ('c', None, 'b', 'a')),
    ((None, 'b', None, 'c'), ('c', None, 'a', 'b')),
  ]),
  ((3, 2, 2), (4, 6, 2, 1, 2), [(('c', 'a', 'b'), (None, 'b', 'a', None, 'c'))]),
  ((2, 2, 3, 2), (12, 4, 6, 4), [('bcda', ('b', 'a', 'c'))]),
]  # fmt: skip
RESHARDS = """
shape, specs = {shape}, {specs}
x, mesh, in_two_steps = integers(*shape), mesh_of(*'abcd'[: len({sizes})], sizes={sizes}), False
for before, after in specs:
  for between in jnp.abs, lambda x: x:  # Another operation than the constraints needs the reshard, or one of these.
    program = constrained(mesh, lambda x: jnp.abs(between(x)), [P(*before)], P(*after))
    found, changed = run(program, (x,), {guarded})
    assert np.array_equal(found, abs(x))
    in_two_steps |= 'operand 0 in two steps' in [what for change in changed for what in change.mended]
    program = constrained(mesh, lambda x: x + 1, [P(*before)], P(*after))
    assert np.array_equal(run(lambda x: 2 * program(x), (x,), {guarded})[0], 2 * x + 2)
assert in_two_steps == {guarded}
"""

# The concatenation is split as its result, so Shardy reshards each of its operands.
CONCATENATION = """
x, mesh, split = integers(8, 4, 2, 2), mesh_of('a', 'b', 'c', sizes=(6, 2, 2)), P('a', None, 'b', 'c')
for first in jnp.abs, lambda x: x:  # The result of an operation is resharded, or that of a constraint.
  join = constrained(mesh, lambda x, y: jnp.concatenate([first(x), first(y)], 3), [split] * 2, P('c', 'b', 'a'))
  found, changed = run(lambda x: join(x + 1, 2 * x), (x,), {guarded})
  assert np.array_equal(found, np.concatenate([first(x + 1), first(2 * x)], 3))
  assert ['concatenate'] * {guarded} == [change.op for change in changed if len(change.mended) == 2]
"""


@pytest.mark.slow
@GUARDED
@pytest.mark.parametrize(
  ('sizes', 'shape', 'specs'), RESHARD_CASES, ids=['four axes', 'an axis of 6', 'five dimensions', 'three dimensions']
)
def test_reshards_of_four_dimensions(guarded, sizes, shape, specs):
  code = exit_code(RESHARDS.format(guarded=guarded, sizes=sizes, shape=shape, specs=specs), math.prod(sizes))
  assert code == 0 if guarded else code < 0


# The constraints that make the gradient's reshard in two steps change how the broadcast condition is split.
CHOICE = """
x, c, mesh = integers(2, 6, 12, 2), integers(2, 6, 1, 2), mesh_of('a', 'b', 'c', sizes=(2, 4, 2))
def total(x, c):
  choose = constrained(mesh, lambda x: jnp.where(c > 0, x, 0), [P('b', 'a', None, 'c')], P('a', None, 'c', 'b'))
  y = choose(x)
  return jnp.sum(y * (jnp.arange(y.size).reshape(y.shape) % 5 - 2).astype(y.dtype)), y
lowered = jax.jit(jax.grad(total, has_aux=True)).lower(x, c)
if {guarded}:
  guard(lowered)
gradient, chosen = lowered.compile()(x, c)
assert np.array_equal(gradient, (c > 0) * (np.arange(x.size).reshape(x.shape) % 5 - 2))
assert np.array_equal(chosen, (c > 0) * x)
"""


@pytest.mark.slow
@GUARDED
def test_reshards_that_follow_from_the_constraints_of_others(guarded):
  code = exit_code(CHOICE.format(guarded=guarded), 16)
  assert code == 0 if guarded else code < 0


@pytest.mark.slow
@GUARDED
def test_reshards_of_four_dimensions_that_shardy_inserts_for_an_operation(guarded):
  code = exit_code(CONCATENATION.format(guarded=guarded), 24)
  assert code == 0 if guarded else code < 0


@pytest.mark.slow
def test_a_reshard_in_a_function_that_is_called_with_arrays_of_other_splits():
  code = """
mesh, x, (one, other) = mesh_of('a', 'b', 'c', sizes=(3, 2, 2)), integers(4, 6, 2, 1, 2), [
  NamedSharding(mesh_of('a', 'b', 'c', sizes=(3, 2, 2)), P(*split)) for split in ((None, 'b', 'a', None, 'c'), 'cab')
]
at = jax.lax.with_sharding_constraint
fn = jax.jit(lambda x: at(jnp.abs(x), one))
found, changed = run(lambda x: fn(at(x, one)) + fn(at(x + 1, other)), (x,), True)
assert np.array_equal(found, abs(x) + abs(x + 1)) and 'abs' in [change.op for change in changed]
"""
  assert exit_code(code, 12) == 0


# ---------------------------------------------------------------- products


def product(x, w):
  return jnp.einsum('bv,cv->bc', x, w)


@GUARDED
def test_product_with_a_weight_over_one_of_two_row_axes(guarded):
  x, w = integers(8, 32), integers(64, 32)
  program = constrained(mesh_of('r', 'd', 'm'), product, (P(('r', 'd'), 'm'), P('d', 'm')), P(('r', 'd'), 'm'))
  found, changed = run(program, (x, w), guarded)
  assert np.array_equal(found, product(x, w)) == guarded
  assert [g.op for g in changed] == ['dot_general'] * guarded


@pytest.mark.slow
@GUARDED
def test_product_beside_an_axis_of_3(guarded):
  code = f"""
mesh, x, w = mesh_of('a', 'b', 'c', sizes=(2, 2, 3)), integers(12, 4, 8), integers(8, 12)
for out in (P(None, 'a', 'c'), P(None, None, 'c')):
  program = constrained(mesh, lambda x, w: x @ w + jnp.ones(12), (P('b', None, 'a'), P('b', 'a')), out)
  assert np.array_equal(run(program, (x, w), {guarded})[0], x @ w + 1) == {guarded}
"""
  assert exit_code(code, 12) == 0


PRODUCTS = [
  # An axis that is summed over, and rows over the others in another order than the product's.
  ('bi,bj->ij', (P('c'), P('c', 'b')), P('c', ('a', 'b')), {'b': 2, 'i': 2, 'j': 4}),
  # Operands that are summed over different axes.
  ('bv,vc->bc', (P('b', 'c'), P('a', ('b', 'c'))), P(('c', 'b'), 'a'), {'b': 4, 'v': 2, 'c': 8}),
  # A dimension that both operands and the product have, split in different ways.
  ('ed,etd->et', (P(None, 'c'), P(('c', 'b'), None, 'a')), P('a', ('b', 'c')), {'e': 2, 'd': 2, 't': 2}),
  ('etd,edf->etf', (P(('c', 'b'), None, 'a'), P(None, 'b')), P('a', ('b', 'c')), {'e': 2, 'd': 2, 't': 8, 'f': 2}),
]


@GUARDED
@pytest.mark.parametrize(('equation', 'specs', 'out', 'sizes'), PRODUCTS, ids=[p[0] for p in PRODUCTS])
def test_products_that_fuzzing_found(guarded, equation, specs, out, sizes):
  args = [integers(*(sizes[letter] for letter in letters)) for letters in equation.partition('->')[0].split(',')]
  program = constrained(mesh_of('a', 'b', 'c'), lambda *xs: jnp.einsum(equation, *xs), specs, out)
  found, _ = run(program, args, guarded)
  assert np.array_equal(found, np.einsum(equation, *args)) == guarded


def random_spec(rng, letters):
  entries = {letter: [] for letter in letters}
  for axis in rng.permutation(list('abc')) if rng.random() < 0.5 else 'abc':
    if rng.random() < 0.8:
      entries[letters[rng.integers(len(letters))]].append(str(axis))
  return P(*(tuple(axes) or None for axes in entries.values()))


@pytest.mark.slow
def test_random_products_are_right():
  """150 of them, 15 in a program: what a program takes by itself is most of what a small one takes."""
  rng = np.random.default_rng(2026)
  mesh, wrong = mesh_of('a', 'b', 'c'), []

  def drawn():
    equation = ['bv,vc->bc', 'gmk,gkn->gmn', 'btd,dnh->btnh', 'km,kn->mn', 'btnh,dnh->btd'][rng.integers(5)]
    letters, out = equation.split('->')
    sizes = {letter: int(rng.choice([3, 8, 8, 16])) for letter in sorted({*letters} - {','})}
    args = [integers(*(sizes[letter] for letter in names)) for names in letters.split(',')]
    specs = [random_spec(rng, names) for names in letters.split(',')]
    program = constrained(mesh, lambda *xs: jnp.einsum(equation, *xs), specs, random_spec(rng, out))
    return program, args, np.einsum(equation, *args), (equation, sizes, specs)

  for _ in range(10):
    programs, arguments, expected, names = zip(*(drawn() for _ in range(15)))
    lowered = jax.jit(lambda all_args, programs=programs: [f(*xs) for f, xs in zip(programs, all_args)]).lower(
      arguments
    )
    guard(lowered)
    found = lowered.compile()(arguments)
    wrong += [name for name, a, b in zip(names, found, expected) if not np.array_equal(a, b)]
  assert not wrong


@pytest.mark.parametrize('rows', [('r', 'd'), ('d', 'r')])
def test_products_of_the_usual_layouts_stay_as_they_are(rows):
  """Fully sharded weights, replicated rows and tensor parallelism: activations that are whole in D."""

  def loss(w, v, x):
    hidden = constrained(mesh, lambda x, w: jnp.tanh(x @ w), (P(rows), P('d', 'm')), P(rows, 'm'))(x, w)
    return jnp.sum(constrained(mesh, jnp.matmul, (P(rows, 'm'), P('m', 'd')), P(rows))(hidden, v) ** 2)

  mesh = mesh_of('r', 'd', 'm')
  stored = (P('d', 'm'), P('m', 'd'))
  gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=tuple(NamedSharding(mesh, s) for s in stored))
  programs = [gradients.lower(integers(16, 32), integers(32, 16), integers(8, 16)) for _ in range(2)]
  assert guard(programs[1]) == []
  unguarded, guarded = (program.compile() for program in programs)
  assert collectives(guarded) == collectives(unguarded)
  assert guarded.memory_analysis().temp_size_in_bytes == unguarded.memory_analysis().temp_size_in_bytes


def test_a_function_called_twice_is_right_for_both_calls():
  @jax.jit
  def inner(x, w):
    return product(x, w)

  def program(x, w):
    one = constrained(mesh, inner, (P(('r', 'd'), 'm'), P('d', 'm')), P(('r', 'd'), 'm'))(x, w)
    return one + constrained(mesh, inner, (P('r'), P()), P('r'))(x + 1, w)

  mesh, x, w = mesh_of('r', 'd', 'm'), integers(8, 32), integers(64, 32)
  np.testing.assert_array_equal(run(program, (x, w))[0], product(x, w) + product(x + 1, w))


def test_what_shard_map_computes_is_left_alone():
  mesh = mesh_of('r', 'd', 'm')
  program = jax.shard_map(product, mesh=mesh, in_specs=(P(('r', 'd')), P()), out_specs=P(('r', 'd')))
  x, w = integers(8, 32), integers(64, 32)
  found, changed = run(program, (x, w))
  assert changed == []
  np.testing.assert_array_equal(found, product(x, w))


def test_without_shardy_it_is_an_error():
  program = constrained(mesh_of('a'), product, (P('a'), P()), P())
  jax.config.update('jax_use_shardy_partitioner', False)
  try:
    lowered = jax.jit(program).lower(integers(2, 2), integers(2, 2))
    with pytest.raises(ShardingError, match='jax_use_shardy_partitioner is False'):
      guard(lowered)
  finally:
    jax.config.update('jax_use_shardy_partitioner', True)


# ---------------------------------------------------------------- images


def convolve(x, w, groups=1):
  return jax.lax.conv_general_dilated(
    x, w, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=groups
  )


def filter_gradient(groups, x_spec, w_spec, mesh):
  def gradient(x, w):
    def total(w):
      y = constrained(mesh, lambda x, w: convolve(x, w, groups), (x_spec, w_spec), x_spec)(x, w)
      return jnp.sum(y**2)

    return jax.grad(total)(w)

  return gradient


@GUARDED
def test_convolution_of_split_images(guarded):
  x, w = integers(2, 8, 8, 3), integers(3, 3, 3, 4)
  right = filter_gradient(1, P(), P(), mesh_of('a'))(x, w)
  found, _ = run(filter_gradient(1, P(None, 'a'), P(), mesh_of('a', 'b')), (x, w), guarded)
  assert np.array_equal(found, right) == guarded


@GUARDED
@pytest.mark.parametrize('groups', [2, 8])
def test_filter_gradient_of_a_grouped_convolution(guarded, groups):
  x, w = integers(8, 6, 6, 8), integers(3, 3, 8 // groups, 8)
  right = filter_gradient(groups, P(), P(), mesh_of('a'))(x, w)
  found, _ = run(filter_gradient(groups, P('a'), P(), mesh_of('a', 'b')), (x, w), guarded)
  assert np.array_equal(found, right) == guarded


def test_grouped_convolution_with_split_channels():
  x, w = integers(8, 6, 6, 8), integers(3, 3, 1, 8)
  right = filter_gradient(8, P(), P(), mesh_of('a'))(x, w)
  split = filter_gradient(8, P('a', None, None, 'b'), P(None, None, None, 'b'), mesh_of('r', 'a', 'b'))
  np.testing.assert_array_equal(run(split, (x, w))[0], right)


@GUARDED
def test_gradient_of_overlapping_max_pooling(guarded):
  def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), 'VALID')

  def gradient(pool):
    return jax.grad(lambda x: jnp.sum(pool(x) * jnp.arange(1.0, 8.0)))

  x = np.array([0, 1, 2, 9, 3, 1, 0, 2], np.float32)
  found, _ = run(gradient(constrained(mesh_of('a'), pool, [P('a')], P('a'))), (x,), guarded)
  assert np.array_equal(found, gradient(pool)(x)) == guarded


@GUARDED
def test_gradient_of_max_pooling_that_is_split_in_another_way(guarded):
  def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2), (1, 1, 1), 'VALID')

  def gradient(pool):
    return jax.grad(lambda x: jnp.sum(pool(x) * jnp.arange(1.0, 5.0)[None, :, None]))

  x = np.array([[[1, 2], [4, 3], [5, 6], [8, 7]]], np.float32)
  found, _ = run(gradient(constrained(mesh_of('a'), pool, [P(None, None, 'a')], P('a'))), (x,), guarded)
  assert np.array_equal(found, gradient(pool)(x)) == guarded


@GUARDED
def test_sums_over_windows_with_padding(guarded):
  def pool(x):
    return jax.lax.reduce_window(x, jnp.inf, jax.lax.min, (3,), (1,), [(1, 0)])

  if not guarded and JAX > (0, 10, 0):  # That release computes it rightly.
    assert aborts('test_sums_over_windows_with_padding')
    return
  x = np.array([-6, -7], np.float32)
  np.testing.assert_array_equal(run(constrained(mesh_of('a'), pool, [P()], P('a')), (x,))[0], pool(x))


@GUARDED
def test_convolution_that_is_a_permuted_product(guarded):
  def gradient(mesh):
    program = constrained(
      mesh, convolve, (P('c', None, None, 'b'), P(None, None, ('a', 'b'), 'c')), P('a', None, None, ('c', 'b'))
    )
    return lambda x, w: jax.grad(lambda w: jnp.sum(program(x, w) ** 2))(w)

  x, w = integers(1, 1, 2, 3), integers(1, 1, 3, 2)
  found, _ = run(gradient(mesh_of('a', 'b', 'c')), (x, w), guarded)
  assert np.array_equal(found, jax.grad(lambda w: jnp.sum(convolve(x, w) ** 2))(w)) == guarded


@GUARDED
def test_grouped_convolution_that_is_a_product(guarded):
  x, w = integers(2, 3, 3, 4), integers(1, 1, 2, 4)
  channels = P(None, None, None, 'a')
  program = constrained(mesh_of('a'), lambda x, w: convolve(x, w, groups=2), (channels, channels), channels)
  found, _ = run(program, (x, w), guarded)
  assert np.array_equal(found, convolve(x, w, groups=2)) == guarded


@GUARDED
def test_grouped_convolution_with_a_split_filter(guarded):
  x, w = integers(2, 4, 4, 4) + 4, integers(1, 1, 1, 4) + 4
  spec = P(None, None, 'a')
  right = filter_gradient(4, P(), P(), mesh_of('a'))(x, w)
  found, _ = run(filter_gradient(4, P(), spec, mesh_of('a')), (x, w), guarded)
  assert np.array_equal(found, right) == guarded


@pytest.mark.parametrize('sizes', [(2, 4), (4, 2)])
@pytest.mark.parametrize('rows', ['c', None])
def test_filter_gradient_that_is_split_by_part_of_an_axis(rows, sizes):
  mesh = mesh_of('c', 'b', sizes=sizes)
  x, d = integers(4, 4, 4, 4), integers(4, 4, 4, 12)

  def gradient(x, d):
    def total(w):
      return jnp.sum(constrained(mesh, lambda x: convolve(x, w, 2), [P(rows)], P())(x) * d)

    return jnp.reshape(jax.grad(total)(jnp.zeros((1, 1, 2, 12))), -1)

  found, _ = run(constrained(mesh, gradient, (P(rows), P(rows)), P('b')), (x, d))
  groups = zip(np.split(x, 2, -1), np.split(d, 2, -1))
  right = np.concatenate([np.einsum('nhwc,nhwd->cd', *group) for group in groups], 1)
  np.testing.assert_array_equal(found, right.ravel())


def test_grouped_convolution_whose_rows_are_split_over_two_axes():
  x, w = integers(3, 2, 9, 2), integers(1, 1, 1, 2)

  def grouped(x, w):
    numbers = ('HCWN', 'WIHO', 'WCHN')
    return jax.lax.conv_general_dilated(x, w, (1, 3), 'SAME', dimension_numbers=numbers, feature_group_count=2)

  mesh = jax.make_mesh((2, 3), ('b', 'd'), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
  program = constrained(mesh, grouped, (P('b'), P()), P(None, None, None, ('b', 'd')))
  np.testing.assert_array_equal(run(program, (x, w))[0], grouped(x, w))


@pytest.mark.parametrize('guarded, rounds', [(False, 6), (True, 6), (True, 1)])
def test_convolution_beside_a_sort_of_its_filter(monkeypatch, guarded, rounds):
  """XLA takes away a sort along one entry before it propagates shardings, Shardy does not.

  After the last round, which restricts the results, the convolution is pinned too.
  """
  monkeypatch.setattr(guards, '_MAX_ROUNDS', rounds)
  mesh = mesh_of('a', 'b')

  def program(x, w, keys):
    split = NamedSharding(mesh, P(None, None, 'a'))
    numbers = ('NHC', 'OIH', 'NHC')
    y = jax.lax.conv_general_dilated(x, w, (3,), [(0, 2)], dimension_numbers=numbers)
    ordered = jax.lax.sort((keys, w), dimension=1, num_keys=1)[1]
    return jax.lax.with_sharding_constraint(y, split), jax.lax.with_sharding_constraint(ordered, split)

  x, w = integers(2, 2, 1) + 4, integers(3, 1, 2) + 4
  lowered = jax.jit(program).lower(x, w, integers(3, 1, 2))
  if guarded:
    guard(lowered)
  found, _ = lowered.compile()(x, w, integers(3, 1, 2))
  assert np.array_equal(found[:, 0], np.einsum('nh,oh->no', x[..., 0], w[:, 0])) == guarded


# ---------------------------------------------------------------- lookups

TABLE = integers(5, 4)
IDS = np.array([1, 2, 3], np.int32)


def lookup_gradient(mesh, specs, out):
  def gradient(table, ids):
    def total(table):
      rows = constrained(mesh, lambda table, ids: jnp.take(table, ids, axis=0), specs, out)(table, ids)
      return jnp.sum((rows + 1) ** 2)

    return jax.grad(total)(table)

  return gradient


@GUARDED
def test_gradient_of_a_lookup_of_uneven_ids(guarded):
  right = lookup_gradient(mesh_of('a'), (P(), P()), P())(TABLE, IDS)
  found, changed = run(lookup_gradient(mesh_of('a', 'b'), (P(), P('a')), P('a')), (TABLE, IDS), guarded)
  assert np.array_equal(found, right) == guarded
  assert [g.mended for g in changed if g.op == 'scatter'] == [('masked padding of dimension 0',)] * guarded


def test_gradient_of_a_lookup_of_one_id_that_is_split():
  """The mask of its padding was always true: XLA knows the only position there is."""
  ids = np.array([0], np.int32)
  right = lookup_gradient(mesh_of('a'), (P(), P()), P())(TABLE, ids)
  found, _ = run(lookup_gradient(mesh_of('a', 'b'), (P(), P('a')), P('a')), (TABLE, ids))
  np.testing.assert_array_equal(found, right)


@GUARDED
def test_scatter_of_ids_that_are_split_otherwise_than_their_updates(guarded):
  def scatter(table, ids, updates):
    return table.at[:, ids].add(updates)

  args = integers(2, 1), np.zeros(2, np.int32), integers(2, 2) + 4
  program = constrained(mesh_of('a', 'b', 'c'), scatter, (P(), P(('a', 'b')), P(None, 'c')), P())
  found, _ = run(program, args, guarded)
  assert np.array_equal(found, scatter(jnp.asarray(args[0]), *args[1:])) == guarded


def test_scatter_of_uneven_ids_over_an_axis_of_the_table():
  def scatter(table, ids, updates):
    return jax.vmap(lambda table, i, u: table.at[i].add(u))(table, ids, updates)

  args = integers(1, 2, 1), np.array([[1, 0]], np.int32), integers(1, 2, 1)
  program = constrained(mesh_of('a', 'b', sizes=(4, 2)), scatter, (P(), P(None, 'b'), P('a')), P(None, 'a'))
  np.testing.assert_array_equal(run(program, args)[0], scatter(jnp.asarray(args[0]), *args[1:]))


@pytest.mark.parametrize('rows', [P('a'), P()])
@pytest.mark.parametrize('method', ['set', 'max'])
def test_scatter_of_uneven_ids(method, rows):
  def scatter(table, ids, rows):
    return getattr(table.at[ids], method)(rows)

  rows_ = np.stack([TABLE[0] + 7] * len(IDS))
  program = constrained(mesh_of('a', 'b'), scatter, (P(), P('a'), rows), P())
  np.testing.assert_array_equal(run(program, (TABLE, IDS, rows_))[0], scatter(jnp.asarray(TABLE), IDS, rows_))


@GUARDED
def test_lookup_with_table_and_ids_over_the_same_axis(guarded):
  mesh = mesh_of('r', 'm', sizes=(4, 2))
  table, ids = integers(97, 30), RNG.integers(0, 97, (7, 19)).astype(np.int32)

  def program(table, ids):
    return constrained(mesh, lambda table, ids: jnp.sum(jnp.take(table, ids, axis=0) ** 2), specs, P())(table, ids)

  specs = (P(None, 'r'), P('m', 'r'))
  if not guarded:
    with pytest.raises(jax.errors.JaxRuntimeError):
      run(program, (table, ids), guarded)
    return
  assert run(program, (table, ids))[0] == np.sum(table[ids] ** 2)


def test_lookup_with_ids_that_are_split_twice():
  """XLA would split the ids as they are stated first, Shardy as they are stated last; it does not compile then."""
  mesh, rows = mesh_of('a', 'b', 'c'), integers(2, 2)

  def gradient(ids, rows):
    def write(rows):
      specs = (P('a'), P(('c', 'a')))
      return constrained(mesh, lambda ids, rows: table.at[ids].add(rows), specs, P(None, 'b'))(ids, rows)

    table = jnp.zeros((2, 2))
    return jax.grad(lambda rows: jnp.sum(write(rows) * jnp.arange(4.0).reshape(2, 2)))(rows)

  np.testing.assert_array_equal(run(gradient, (np.array([1, 0], np.int32), rows))[0], [[2, 3], [0, 1]])


@pytest.mark.slow
@GUARDED
def test_lookup_of_a_few_ids_over_three_axes(guarded):
  """XLA adds up the rows of other devices where more devices share the rows of the table than its dims."""
  code = f"""
for sizes, few in ((2, 3, 2), 6), ((2, 4, 2), 6), ((3, 2, 2), 6), ((2, 8, 2), 16):
  for num_ids in few, 60:
    table, ids = integers(24, 12), np.arange(num_ids, dtype=np.int32) * 7 % 24
    mesh = mesh_of('a', 'b', 'c', sizes=sizes)
    program = constrained(mesh, lambda t, i: jnp.take(t, i, axis=0), [P('b', 'a'), P('c')], P('c', 'a'))
    found, changes = run(program, (table, ids), {guarded})
    assert np.array_equal(found, table[ids]) == ({guarded} or num_ids == 60 or sizes[1] == 2), (sizes, num_ids)
    assert any(change.op == 'gather' for change in changes) == ({guarded} and num_ids == few), (sizes, num_ids)
"""
  assert exit_code(code, 32) == 0


BATCH_IN_SHARD_MAP = """
mesh = mesh_of('a', 'b', 'c', 'd', sizes=(3, 2, 2, 2))
table, ids = integers(2, 144), np.arange(288, dtype=np.int32).reshape(2, 144) * 7 % 144

def look_up(table, ids):
  at = jax.lax.with_sharding_constraint
  return at(jax.vmap(lambda t, i: t[i])(at(table, P('b', 'a')), at(ids, P('b'))), P('b'))

program = jax.shard_map(look_up, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={{'d'}}, check_vma=False)
assert np.array_equal(run(program, (table, ids), {guarded})[0], np.take_along_axis(table, ids, 1))
"""


@pytest.mark.slow
@GUARDED
def test_lookups_of_a_batch_in_shard_map(guarded):
  code = exit_code(BATCH_IN_SHARD_MAP.format(guarded=guarded), 24)
  assert code == 0 if guarded else code < 0


@pytest.mark.parametrize('in_a_function', [False, True])
@pytest.mark.parametrize(('of_table', 'of_ids', 'out'), [('-b', '--', '-b'), ('--', 'b-', 'b-')])
def test_lookup_in_shard_map_of_arrays_that_are_split(of_table, of_ids, out, in_a_function):
  """Unless constraints hold them, XLA may split ids and the entries of rows over one axis, and abort the process."""
  mesh, table, ids = mesh_of('a', 'b', 'c'), integers(96, 12), np.arange(48, dtype=np.int32)[:, None] * 7 % 96
  numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
  of_table, of_ids, out = (P(*(None if axis == '-' else axis for axis in split)) for split in (of_table, of_ids, out))

  def look_up(x, i):
    return jax.lax.gather(x, i, numbers, (1, 12))

  take = constrained(mesh, jax.jit(look_up) if in_a_function else look_up, [of_table, of_ids], out)
  mapped = jax.shard_map(take, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={'a'}, check_vma=False)
  lowered = jax.jit(mapped).lower(table, ids)
  guard(lowered)
  made_by = dict(re.findall(r'(%\w+) = (.*)', lowered.as_text().partition('func private')[2] or lowered.as_text()))
  (gather,) = (op for op in made_by.values() if 'stablehlo.gather' in op)
  for operand, split in zip(re.findall(r'%\w+', gather), (of_table, of_ids)):
    stated = re.findall(r'{("\w")?}', made_by[operand].partition('[')[2].partition(']')[0])
    assert 'sdy.sharding_constraint' in made_by[operand] and stated == [f'"{axis}"' if axis else '' for axis in split]
  assert np.array_equal(lowered.compile()(table, ids), table[ids[:, 0]])


def test_lookups_of_a_batch_in_a_function_that_is_called_with_arrays_of_other_splits():
  """Each of its calls keeps its splits: pipelines gathered gradients of biases, which have the shape of norms."""
  x, i, mesh = integers(2, 3, 4), np.array([2, 0]), mesh_of('a', 'b')
  look_up = jax.jit(jax.vmap(lambda x, i: x[i]))
  whole, split = (constrained(mesh, look_up, [P('a', None, d), P('a')], P('a', d)) for d in (None, 'b'))
  lowered = jax.jit(lambda x, y, i: (whole(x, i), split(y, i))).lower(x, x, i)
  guard(lowered)
  compiled = lowered.compile()
  for found in compiled(x, x, i):
    assert np.array_equal(found, x[np.arange(2), i])
  assert not collectives(compiled)['all-gather'].count


@GUARDED
def test_gradient_of_the_largest_of_all(guarded):
  """XLA splits the updates over the axis that is not used, and writes their padding to the first entry."""
  x, mesh = np.array([-0.5, 2, 3], np.float32), mesh_of('a', 'b')

  def gradient(x):
    def total(x):
      x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('a')))
      return jnp.sum(jax.lax.top_k(jnp.abs(x), 3)[0] * (jnp.arange(3) + 1))

    return jax.grad(total)(x)

  assert np.array_equal(run(gradient, (x,), guarded)[0], [-3, 2, 1]) == guarded


@GUARDED
def test_diagonal(guarded):
  x = np.array([[[3], [5]]], np.float32)
  program = constrained(mesh_of('a', 'b', sizes=(2, 4)), jnp.diagonal, [P(None, 'a')], P('a', 'b'))
  found, _ = run(program, (x,), guarded)
  assert np.array_equal(found, jnp.diagonal(x)) == guarded


@GUARDED
def test_lookup_of_slices_that_are_split_unevenly(guarded):
  def read(x, ids):
    return x[:, :, ids]

  x, ids = integers(4, 15, 1), np.array([0, 0, 0, 0], np.int32)
  out = constrained(mesh_of('a', 'b', 'c'), lambda y: y, [P('c', 'b', 'a')], P('c', 'b', 'a'))

  def program(x, ids):
    return out(read(x, ids))

  if not guarded:
    with pytest.raises(jax.errors.JaxRuntimeError):
      run(program, (x, ids), guarded)
    return
  np.testing.assert_array_equal(run(program, (x, ids))[0], read(x, ids))


@pytest.mark.slow
def test_lookups_by_two_ids():
  """Values and gradients of all forms; `tools/enumerate_splits.py --kinds="functions of lookups"` has more."""
  forms = (
    (lambda x, i, j: x[:, :, i, j], P(None, None, 'a')),
    (lambda x, i, j: x[:, :, i[0], j[0]], P(None, 'a')),
    (lambda x, i, j: x[i, :, j], P(None, None, 'a')),
    (lambda x, i, j: x[i[0], :, j[0]], P('a')),
    (lambda x, i, j: x[:, i], P(None, None, 'a')),
    (lambda x, i, j: x[i], P('a', 'b')),
  )
  mesh, x = mesh_of('a', 'b'), integers(3, 4, 5, 6)
  ids = np.array([2, 0, 2], np.int32), np.array([1, 3, 3], np.int32)

  def all_forms(x, i, j, split):
    found = []
    for fn, out in forms:
      for spec in (P(), P(None, None, 'a', 'b'), P('b', 'a')):
        lookup = split(lambda x, fn=fn: fn(x, i, j), spec, out)
        found += [lookup(x), jax.grad(lambda x, lookup=lookup: jnp.sum(lookup(x) ** 2))(x)]
    return jnp.concatenate([jnp.ravel(y) for y in found])

  def split(fn, spec, out):
    return constrained(mesh, fn, [spec], out)

  found, _ = run(lambda x, *ids: all_forms(x, *ids, split), (x, *ids))
  np.testing.assert_array_equal(found, all_forms(x, *ids, lambda fn, spec, out: fn))


@GUARDED
@pytest.mark.parametrize('out', [P(), P(None, 'a')])
def test_scatter_of_one_row_into_an_uneven_table(guarded, out):
  table, ids, rows = np.array([[1, 2, 3, 4]], np.float32), np.array([2], np.int32), np.ones((1, 1), np.float32)

  def write(table, ids, rows):
    return table.at[:, ids].add(rows)

  program = constrained(mesh_of('a', sizes=(3,)), write, (P(None, 'a'), P(), P()), out)
  found, _ = run(program, (table, ids, rows), guarded)
  assert np.array_equal(found, write(jnp.asarray(table), ids, rows)) == (guarded or JAX >= (0, 12))


@GUARDED
def test_slices_are_scattered(guarded):
  def gradient(ids, weights):
    update = jax.vmap(lambda x, u, i: jax.lax.dynamic_update_slice(x, u, (i, 0)))
    write = constrained(mesh, lambda x: update(x, jnp.zeros((1, 1, 1)), ids), [P()], P(None, 'a'))
    return jax.grad(lambda x: jnp.sum(write(x) * weights))(jnp.zeros((1, 3, 1)))

  mesh, weights = mesh_of('a'), np.array([[[5], [2], [3]]], np.float32)
  found, _ = run(gradient, (np.array([1], np.int32), weights), guarded)
  assert np.array_equal(found.ravel(), [5, 0, 3]) == (guarded or JAX >= (0, 12))


def test_scatter_of_one_row_past_the_end():
  """It is dropped; the gradient of a lookup of one row is such a scatter."""

  def write(table, ids, rows):
    return table.at[ids].add(rows)

  args = integers(6, 4), np.array([6], np.int32), integers(1, 4) + 4
  program = constrained(mesh_of('a', 'b', sizes=(2, 3)), write, (P('b'), P(), P(None, 'a')), P('b'))
  np.testing.assert_array_equal(run(program, args)[0], args[0])


def test_gradient_of_a_lookup_of_one_row():
  def gradient(x, read):
    return jax.grad(lambda x: jnp.sum(read(x[jnp.argsort(x[:, 0, 0], stable=True)]) * jnp.arange(6.0)))(x)

  x = integers(1, 4, 6)
  split = constrained(mesh_of('b', 'd'), lambda rows: rows, [P('b')], P('b'))
  np.testing.assert_array_equal(run(lambda x: gradient(x, split), (x,))[0], gradient(x, lambda rows: rows))


@pytest.mark.parametrize('method', ['add', 'max'])
@pytest.mark.parametrize(
  'specs, out',
  [
    ((P(None, ('a', 'b')), P('b'), P(None, 'b')), P('b')),
    ((P('a'), P(None), P('a')), P()),
    ((P(None, ('a', 'b')), P('a'), P(None, ('a', 'b'))), P('b', 'a')),
  ],
)
def test_scatters_that_enumeration_found(specs, out, method):
  """`tools/enumerate_splits.py --kinds=scatters` has thousands more."""

  def write(table, ids, rows):
    return getattr(table.at[ids], method)(rows)

  args = integers(12, 12), RNG.integers(0, 13, 12).astype(np.int32), integers(12, 12) + 4
  found, _ = run(constrained(mesh_of('a', 'b', sizes=(2, 3)), write, specs, out), args)
  np.testing.assert_array_equal(found, write(jnp.asarray(args[0]), *args[1:]))


@GUARDED
def test_gradient_of_a_sort(guarded):
  def gradient(x, weights):
    sort = constrained(mesh_of('a'), lambda x: jnp.sort(x, axis=1), [P('a')], P())
    return jax.grad(lambda x: jnp.sum(sort(x) * weights))(x)

  x, weights = integers(3, 4), integers(3, 4)
  if not guarded:
    assert aborts('test_gradient_of_a_sort')
    return
  right = np.take_along_axis(weights, np.argsort(np.argsort(x, axis=1, kind='stable'), axis=1), axis=1)
  np.testing.assert_array_equal(run(gradient, (x, weights))[0], right)


# ---------------------------------------------------------------- slices and pads


@GUARDED
def test_dynamic_slices_that_begin_past_the_end(guarded):
  def read(x, begin):
    return jax.lax.dynamic_slice(x, (begin,), (2,))

  def write(x, begin):
    return jax.lax.dynamic_update_slice(x, x[:1] + 5, (begin,))

  x, begin = np.array([1, 2, 3], np.float32), np.array(3, np.int32)
  for fn in (read, write):
    found, _ = run(constrained(mesh_of('a'), fn, (P('a'), P()), P('a')), (x, begin), guarded)
    assert np.array_equal(found, fn(x, begin)) == (guarded or (fn is read and JAX >= (0, 12)))


@GUARDED
def test_sums_over_pads_that_crop(guarded):
  """They are wrong on one device too."""

  def sums(x):
    return jax.lax.cumsum(jax.lax.pad(x, 0.0, [(1, -1, 0), (0, 0, 2)]), reverse=True)

  found, _ = run(sums, (np.array([[1], [2]], np.float32),), guarded)
  assert np.array_equal(found, [[1], [1]]) == (guarded or JAX >= (0, 12))


@GUARDED
@pytest.mark.parametrize('dtype', [np.int32, np.uint8, np.int8])
def test_slices_of_slices(guarded, dtype):
  """They are wrong on one device too."""

  def read(x, begin):
    return jax.lax.dynamic_slice(jax.lax.dynamic_slice(x, (begin,), (4,)), (begin - 2,), (2,))

  x = np.arange(5, dtype=np.float32)
  found, _ = run(read, (x, dtype(3)), guarded)
  assert np.array_equal(found, [2, 3]) == (guarded or JAX >= (0, 12))


@GUARDED
@pytest.mark.parametrize('reshaped', [False, True])
@pytest.mark.parametrize('begin', [(0, 2), (2, 2), (5, 0), (1, 1)])
def test_slices_of_one_entry_of_slices_and_their_gradients(guarded, reshaped, begin):
  def read(x, begin):
    inner = jax.lax.dynamic_slice(x, (begin[0],), (2,))
    if reshaped:
      return jax.lax.dynamic_slice(inner.reshape(1, 2), (0, begin[1]), (1, 1)).reshape(1)
    return jax.lax.dynamic_slice(inner, (begin[1],), (1,))

  def gradient(x, begin):  # An update in an update is added to x.
    return jax.grad(lambda x: jnp.sum(read(x, begin)) + jnp.sum(x * x))(x)

  x, wrong = np.arange(1, 6, dtype=np.float32), 0
  place = min(begin[0], 3) + min(begin[1], 1)
  for fn, expected in ((read, x[place : place + 1]), (gradient, 2 * x + (np.arange(5) == place))):
    found, _ = run(fn, (x, np.array(begin, np.int32)), guarded)
    wrong += not np.array_equal(found, expected)
  assert (wrong == 0) == (guarded or JAX >= (0, 12) or begin == (1, 1))


@pytest.mark.parametrize('before', ['called', 'lowered', 'compiled'])
def test_a_function_that_was_jitted_before_is_guarded(before):
  """JAX keeps what it has lowered and compiled for a function, and compiles it once."""

  def read(x, begin):
    return jax.lax.dynamic_slice(jax.lax.dynamic_slice(x, (begin,), (4,)), (begin - 2,), (2,))

  args = np.arange(5, dtype=np.float32), np.int32(3)
  plain = jax.jit(read)
  if before == 'called':
    plain(*args)
  else:
    lowered = plain.lower(*args)
    if before == 'compiled':
      lowered.compile()
  np.testing.assert_array_equal(guards.GuardedJit(read)(*args), [2, 3])


def test_starts_that_the_type_of_an_id_cannot_hold_are_not_clamped():
  x = np.arange(300, dtype=np.float32)
  found, _ = run(lambda x, begin: jax.lax.dynamic_slice(x, (begin,), (4,)), (x, np.int8(127)))
  np.testing.assert_array_equal(found, x[127:131])


def test_starts_in_several_dimensions():
  def read(x, begin):
    return jax.vmap(lambda i: jax.lax.dynamic_slice(x, (i[0], 0, i[1]), (2, 2, 1)))(begin)

  x, begin = integers(4, 3, 5), np.array([[3, 1], [0, 4], [-1, 2], [2, 9]], np.int32)
  np.testing.assert_array_equal(run(read, (x, begin))[0], read(x, begin))


@GUARDED
def test_slices_of_a_batch_that_are_split(guarded):
  def read(x, begin):
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 4, 0))(x, begin)

  x, begin = integers(4, 5, 1), np.array([5, 0, 3, 1], np.int32)
  mesh = jax.make_mesh((4, 2), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
  found, _ = run(constrained(mesh, read, (P(), P()), P('a', 'b')), (x, begin), guarded)
  assert np.array_equal(found, read(x, begin)) == (guarded or JAX >= (0, 12))


@GUARDED
def test_gradient_of_writing_slices_of_a_batch(guarded):
  def gradient(updates, split):
    def write(x, update, begin):
      return jax.lax.dynamic_update_slice_in_dim(x, update, begin, 0)

    def total(updates):
      found = jax.vmap(write)(np.zeros((2, 3, 6), np.float32), split(updates), np.array([3, 1], np.int32))
      return jnp.sum(found * jnp.arange(36.0).reshape(2, 3, 6))

    return jax.grad(total)(updates)

  updates = integers(2, 2, 6)
  split = constrained(mesh_of('a', 'b'), lambda u: u, [P('a', 'b')], P('a', 'b'))
  found, _ = run(lambda u: gradient(u, split), (updates,), guarded)
  assert np.array_equal(found, gradient(updates, lambda u: u)) == (guarded or JAX >= (0, 12))


@GUARDED
@pytest.mark.parametrize('spec, out', [(P('a'), P()), (P(), P('a')), (P('a'), P('a'))])
def test_slices_with_strides(guarded, spec, out):
  def read(x):
    return jax.lax.slice(x, (1,), (2,), (3,))

  x = np.array([5, 7], np.float32)
  split = constrained(mesh_of('a'), read, [spec], out)
  found, changed = run(split, (x,), guarded)
  assert np.array_equal(found, [7]) == guarded
  assert [change.op for change in changed if change.op == 'slice'] == ['slice'] * guarded


@pytest.mark.parametrize('size', [2, 3, 5])
def test_slices_beside_slices_of_no_entry(size):
  """XLA takes away what has no entry, and split a slice beside it in a way in which its size was wrong."""

  def scan(x):
    return jax.lax.associative_scan(jnp.add, x)

  x = integers(size)
  found, _ = run(constrained(mesh_of('a'), scan, [P('a')], P()), (x,))
  np.testing.assert_array_equal(found, np.cumsum(x))


def test_arrays_of_no_entry_of_a_library_call_pin_no_slices():
  """cuDNN's attention takes such arrays. Pinned slices made XLA move what stages of a pipeline send by all-to-alls."""

  def program(x):
    call = jax.ffi.ffi_call('some_library_call', jax.ShapeDtypeStruct((), jnp.float32))
    return jnp.roll(x, 1) + call(jnp.zeros(0))

  lowered = jax.jit(constrained(mesh_of('a'), program, [P('a')], P('a'))).lower(integers(8))
  before = lowered.as_text()
  assert 'tensor<0xf32>' in before
  assert not guard(lowered)
  assert lowered.as_text() == before


@GUARDED
def test_slices_with_strides_compile(guarded):
  def read(x):
    return jax.lax.slice(x, (4, 1), (5, 2), (3, 1))

  def gradient(x, read):
    return jax.grad(lambda x: jnp.sum(read(x) ** 2))(x)

  x, mesh = integers(5, 2), mesh_of('a', 'b', sizes=(4, 2))
  over = NamedSharding(mesh, P(('a', 'b')))
  split = constrained(mesh, read, [P(None, ('a', 'b'))], P(('b', 'a')))

  def program(x):
    total = jax.lax.with_sharding_constraint(jnp.sum(split(x), -1), over)
    return jnp.concatenate([total, gradient(x, split).ravel()])

  if not guarded:
    with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
      run(program, (x,), guarded)
    return
  np.testing.assert_array_equal(run(program, (x,))[0], [x[4, 1], *gradient(x, read).ravel()])


@GUARDED
@pytest.mark.parametrize('edges', [(-1, 0, 0), (1, 1, 1)])
def test_pads_that_crop(guarded, edges):
  def pad(x):
    return jax.lax.pad(x, np.float32(0), [edges])

  x = np.arange(4, dtype=np.float32)
  found, _ = run(constrained(mesh_of('a'), pad, [P()], P('a')), (x,), guarded)
  is_right = JAX == (0, 10, 0) and edges[0] > 0
  assert np.array_equal(found, pad(x)) == (guarded or is_right)


@pytest.mark.parametrize('rows, crop', [(8, 1), (16, 3), (7, 2), (13, 1)])
def test_pads_that_crop_what_was_padded_for_a_mesh(rows, crop):
  def pad(x):
    return jax.lax.pad(x, np.float32(0), [(0, -crop, 0)])

  x = np.arange(rows, dtype=np.float32)
  program = constrained(mesh_of('a', sizes=(4,)), pad, [P('a')], P('a'))
  found, changed = run(program, (x,))
  assert np.array_equal(found, pad(x))
  is_kept = -(-rows // 4) == -(-(rows - crop) // 4)
  assert ('pad' in {change.op for change in changed}) == (not is_kept)


@pytest.mark.slow_cases
@GUARDED
def test_pads_that_crop_and_pad_between_entries(guarded):
  if not guarded:
    assert aborts('test_pads_that_crop_and_pad_between_entries')
    return
  for n, edges, size in (
    (2, (-1, 0, 2), 2),
    (3, (-1, 0, 2), 5),
    (4, (1, -1, 1), 6),
    (2, (0, -2, 3), 7),
    (5, (2, 3, 0), 4),
  ):

    def pad(x, edges=edges):
      return jax.lax.pad(x, np.float32(0), [edges])

    def gradient(pad):
      return jax.grad(lambda y: jnp.sum(pad(y) ** 2))

    mesh = jax.make_mesh((n,), ('a',), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    split, x = constrained(mesh, pad, [P('a')], P('a')), 1 + np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(run(split, (x,))[0], pad(x))
    np.testing.assert_array_equal(run(gradient(split), (x,))[0], gradient(pad)(x))


# ---------------------------------------------------------------- results


@GUARDED
@pytest.mark.parametrize('rows, axes, over', [(2, 'a', 1), (6, 'a', 1), (6, 'ba', 2), (3, 'ab', 1), (8, 'ab', 8)])
def test_results_that_do_not_divide(guarded, rows, axes, over):
  mesh, x = mesh_of('a', 'b', sizes=(4, 2)), integers(rows, 3)
  lowered = jax.jit(constrained(mesh, lambda x: (x * 2)[None], [P()], P(None, (*axes,)))).lower(x)
  changed = guard(lowered) if guarded else []
  # What is split over part of an axis, of two rows over 4 devices, JAX cannot say any more.
  if not guarded and (0, 11) <= JAX < (0, 12) and axes == 'a':
    with pytest.raises(ValueError, match='not divisible'):
      lowered.compile()
    return
  found = lowered.compile()(x)
  np.testing.assert_array_equal(found, (x * 2)[None])
  assert [change.op for change in changed] == (['return'] if guarded and over < 8 else [])
  if guarded:
    assert found.addressable_shards[0].data.shape == (1, rows // over, 3)


def test_several_results_some_of_which_do_not_divide():
  def program(x, y, z, n):
    state = jax.lax.with_sharding_constraint
    split = NamedSharding(mesh_of('a', sizes=(4,)), P('a'))
    return {'x': state(x * 2, split), 'y': state(y * 2, split)}, z * 2, None, n * 2, state(x, split)

  args = (integers(2, 3), integers(8), np.float32(3), np.array([], np.int32))
  lowered = jax.jit(program).lower(*args)
  (changed,) = guard(lowered)
  assert [len(split) and len(split[0]) for split in changed.after] == [0, 1, 0, 0, 0]
  (found, z, none, n, x) = lowered.compile()(*args)
  assert none is None
  for one, arg in zip((found['x'], found['y'], z, n, x), (*(2 * a for a in args), args[0]), strict=True):
    np.testing.assert_array_equal(one, arg)


def test_results_leave_the_rest_of_a_program_as_it_is(monkeypatch):
  """The product before the result is split as it was; a second round of propagation finds nothing to change."""
  rounds = []
  instances = Propagation.instances
  monkeypatch.setattr(Propagation, 'instances', lambda self: rounds.append(1) or instances(self))
  mesh, x = mesh_of('a', sizes=(4,)), integers(2, 3)
  program = constrained(mesh, lambda x: (x @ x.T) * 2, [P('a')], P('a'))
  lowered = jax.jit(program).lower(x)
  (changed,) = guard(lowered)
  assert changed.op == 'return' and len(rounds) == 2
  module = lowered.compiler_ir()
  with module.context:
    (product,) = instances(Propagation(module, {PRODUCT}))
  assert len(product.splits[0][0]) == len(product.splits[2][0]) == 1
  np.testing.assert_array_equal(lowered.compile()(x), (x @ x.T) * 2)


# ---------------------------------------------------------------- releases


def test_a_release_for_which_guards_were_not_shown(monkeypatch, capsys):
  def compile_on(mesh, rows):
    run(constrained(mesh, lambda x: x * 2, [P('a')], P('a')), [integers(rows)])

  monkeypatch.setattr(jax_internals, 'told', [])
  compile_on(mesh_of('a'), 2)
  assert not capsys.readouterr().out
  monkeypatch.setattr(guards, 'jaxlib_release', lambda: (0, 13, 1))
  compile_on(mesh_of('a', sizes=(1,)), 4)
  assert not capsys.readouterr().out  # On one device nothing is split.
  compile_on(mesh_of('a'), 6)
  (line,) = capsys.readouterr().out.splitlines()
  assert 'JAX 0.10 to 0.12, not with 0.13.1' in line and 'praxis-lite verify' in line
  compile_on(mesh_of('a'), 8)
  assert not capsys.readouterr().out


def test_this_release_is_one_for_which_guards_were_shown():
  assert JAX[:2] in guards.SHOWN


# ---------------------------------------------------------------- Fourier transforms

TRANSFORMS = {
  'rfft': (jnp.fft.rfft, (5, 7), P(None, 'a')),
  'rfft, even': (jnp.fft.rfft, (5, 6), P('b', 'a')),
  'irfft': (lambda x: jnp.fft.irfft(x.astype(jnp.complex64)), (5, 4), P(None, ('b', 'a'))),
  'fft': (jnp.fft.fft, (4, 6), P('a', 'b')),
  'ifft': (jnp.fft.ifft, (3, 7), P(None, 'b')),
  'fft2': (jnp.fft.fft2, (3, 4, 6), P('b', 'a')),
  'rfftn': (lambda x: jnp.fft.rfftn(x, axes=(0, 1)), (4, 6), P('b', 'a')),
  'along the first dimension': (lambda x: jnp.fft.fft(x, axis=0), (6, 5), P(('a', 'b'))),
  'rows': (jnp.fft.rfft, (5, 6), P(('a', 'b'))),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('out', [P(), P('a', 'b')], ids=['whole', 'split'])
@pytest.mark.parametrize('name', TRANSFORMS)
def test_fourier_transforms(name, out):
  """Without guards, most of these end in an INTERNAL error, and some end the process."""
  transform, shape, spec = TRANSFORMS[name]
  mesh = mesh_of('a', 'b', sizes=(4, 2))
  x = RNG.normal(size=shape).astype(np.float32)

  def values(x, transform):
    weights = jnp.arange(1.0, 1 + jax.eval_shape(transform, x).size).reshape(jax.eval_shape(transform, x).shape)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(jnp.real(transform(x) * (1 + 2j)) * weights))(x)
    return jnp.concatenate([jnp.abs(transform(x)).ravel(), gradient.ravel(), value[None]])

  found, _ = run(lambda x: values(x, constrained(mesh, transform, [spec], out)), (x,))
  np.testing.assert_allclose(found, values(x, transform), rtol=1e-4, atol=1e-2)


@GUARDED
def test_the_gradient_of_a_transform_of_split_entries(guarded):
  def gradient(x, transform):
    return jax.grad(lambda x: jnp.sum(jnp.real(transform(x)) ** 2))(x)

  split = constrained(mesh_of('a', sizes=(4,)), jnp.fft.rfft, [P(None, 'a')], P())
  x = integers(5, 7)
  if not guarded:
    with pytest.raises(jax.errors.JaxRuntimeError, match='INTERNAL'):
      run(lambda x: gradient(x, split), (x,), guarded)
    return
  found, changed = run(lambda x: gradient(x, split), (x,))
  np.testing.assert_allclose(found, gradient(x, jnp.fft.rfft), atol=1e-3)
  assert 'fft' in {change.op for change in changed}


# ---------------------------------------------------------------- one device

CROPS = [
  # The shape of x, of w, paddings, and groups of channels and of rows.
  ((3, 6, 3, 2), (2, 2, 2, 3), [(-1, 1), (-1, 1)], 1, 1),
  ((5, 5, 4), (2, 2, 6), [(-2, 2)], 2, 1),
  ((4, 6, 3), (3, 3, 4), [(1, -1)], 1, 2),
  ((2, 7, 3), (3, 1, 6), [(-1, 1)], 3, 1),
  ((2, 4, 3), (1, 3, 2), [(-2, -1)], 1, 1),
  ((2, 1, 3), (1, 3, 2), [(-2, 4)], 1, 1),  # More than there is: some of the other edge too.
  ((2, 2, 3), (2, 3, 2), [(5, -3)], 1, 1),
]


@pytest.mark.parametrize('dtype', [np.float32, np.float16])
@pytest.mark.parametrize('x, w, padding, groups, of_rows', CROPS)
def test_convolutions_that_crop(x, w, padding, groups, of_rows, dtype):
  x, w = integers(*x), integers(*w)
  names = ('NHWC', 'HWIO', 'NHWC') if x.ndim == 4 else ('NHC', 'HIO', 'NHC')

  def conv(x, w, padding):
    return jax.lax.conv_general_dilated(
      x, w, (1,) * len(padding), padding, None, None, names, feature_group_count=groups, batch_group_count=of_rows
    )

  found, _ = run(lambda x, w: conv(x, w, padding), (x.astype(dtype), w.astype(dtype)))
  # What is padded and then cropped is what is only padded, without its first and last entries.
  whole = conv(x, w, [(max(low, 0), max(high, 0)) for low, high in padding])
  cropped = [slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(whole.shape[1:], padding)]
  np.testing.assert_array_equal(found, whole[:, *cropped])


def test_the_gradient_of_a_convolution_with_groups_of_rows_and_more_padding_than_filter():
  """Without guards, the gradient by the image differs from run to run."""
  x, w = integers(5, 9, 5), integers(2, 5, 15)

  def loss(x, w):
    names = ('HNC', 'HIO', 'HNC')
    return jnp.sum(jax.lax.conv_general_dilated(x, w, (1,), [(2, 0)], None, None, names, batch_group_count=3) ** 2)

  found, _ = run(jax.grad(loss), (x, w))
  with jax.enable_x64():
    np.testing.assert_array_equal(found, jax.grad(loss)(x.astype(np.float64), w.astype(np.float64)))


FACTORIZATIONS = {
  'cholesky': jnp.linalg.cholesky,
  'eigh': lambda x: jnp.linalg.eigh(x)[0],
  'eigvals': lambda x: jnp.sum(jnp.linalg.eigvals(x) ** 2, -1).real,
  'expm': jax.scipy.linalg.expm,
  'inv': jnp.linalg.inv,
  'qr': lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
  'svd': lambda x: jnp.linalg.svd(x)[1],
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('batch, spec', [((4,), P('a')), ((4, 3), P('b', ('a',))), ((3,), P(None, 'a', 'b'))])
@pytest.mark.parametrize('name', FACTORIZATIONS)
def test_calls_of_lapack_are_for_one_matrix(name, batch, spec):
  """Calls for several matrices may wait for ever: several beside each other, or one on several devices."""
  factorize = FACTORIZATIONS[name]
  x = RNG.normal(size=(*batch, 3, 3)).astype(np.float32)
  x = (x @ x.swapaxes(-1, -2) + 3 * np.eye(3, dtype=np.float32)) * np.float32(0.3)
  for mesh in (mesh_of('a', 'b', sizes=(2, 4)), mesh_of('a', 'b', sizes=(1, 1))):
    program = constrained(mesh, factorize, [spec], P(*spec[:1]))
    lowered = jax.jit(lambda x, program=program: program(x) + program(x + 1)).lower(x)
    guard(lowered)
    if JAX < (0, 11, 2):
      calls = re.findall(r'custom_call"?.*lapack_.*\(tensor<([0-9x]*)x3x3xf32>', str(lowered.compiler_ir('stablehlo')))
      assert calls
      assert all(math.prod(int(n) for n in call.split('x')) <= mesh.size for call in calls)
    np.testing.assert_allclose(lowered.compile()(x), factorize(x) + factorize(x + 1), rtol=1e-3, atol=1e-3)


def test_factorizations_in_branches_run():
  def roots(x):
    return jnp.linalg.eigh(x)[1] + jnp.linalg.eigh(x + 1)[1] + jnp.linalg.inv(x)

  x = np.stack([np.eye(3, dtype=np.float32)] * 2)
  for program in (
    lambda x: jax.lax.cond(x.sum() > 0, roots, lambda x: x, x),
    lambda x: jax.lax.switch(1, [lambda x: x, roots, lambda x: x + 1], x),
    lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jax.lax.cond(y.sum() > 0, roots, lambda y: y, y), x),
  ):
    found, changed = run(program, (x,))
    assert np.isfinite(found).all()
    assert changed == []
