"""Reshapes of which axes split no dimension evenly: Shardy, or XLA, ends the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from praxis_lite.sharding.guards import guard
from praxis_lite.sharding.propagation import make_collectives_explicit

# Shape, mesh, spec before, shape afterwards, spec afterwards. All but the last two ended the process.
RESHAPES = [
  ((2, 3, 4, 3), {'a': 2, 'b': 3}, P('b', None, None, 'a'), (72,), P('b')),
  ((4, 3, 6), {'b': 3, 'c': 2}, P(), (72,), P(('b', 'c'))),
  ((32, 6, 4), {'a': 2, 'c': 3}, P('c', None, 'a'), (2, 4, 12, 8), P()),
  ((8, 6), {'a': 2, 'b': 3}, P(('a',), 'b'), (2, 4, 6), P('a')),
  ((7, 15), {'a': 2, 'b': 3}, P('b', 'a'), (7, 3, 5), P()),
]


def lowered(before, mesh, spec, after, spec_after):
  mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))

  def program(x):
    x = jnp.abs(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))
    return jax.lax.with_sharding_constraint(x.reshape(after), NamedSharding(mesh, spec_after))

  return jax.jit(program).lower(jnp.zeros(before))


@pytest.mark.parametrize('reshape', RESHAPES, ids=[f'{r[0]} to {r[3]}' for r in RESHAPES])
def test_guards_and_collectives_can_be_read(reshape):
  program, x = lowered(*reshape), np.arange(np.prod(reshape[0]), dtype=np.float32).reshape(reshape[0])
  assert make_collectives_explicit(program.compiler_ir('stablehlo')) is not None
  guard(program)
  np.testing.assert_array_equal(program.compile()(x), x.reshape(reshape[3]))


def test_reshapes_of_several_dimensions_that_do_not_divide():
  """Of 9 rows over 2, and of 6 dims over 4, XLA made another number of entries, and ended the process."""
  program = lowered((9, 12), {'b': 2, 'c': 4}, P('b', 'c'), (3, 3, 6, 2), P(None, None, 'c'))
  x = np.arange(9 * 12, dtype=np.float32).reshape(9, 12)
  assert 'reshape' in {change.op for change in guard(program)}
  np.testing.assert_array_equal(program.compile()(x), x.reshape(3, 3, 6, 2))


def test_reshapes_to_one_row():
  """A row that is split over 2 devices, of entries that are split over 3: XLA ended the process."""
  program = lowered((3, 7, 3), {'a': 2, 'b': 3}, P('b', 'a'), (1, 63), P('a', 'b'))
  x = np.arange(63, dtype=np.float32).reshape(3, 7, 3)
  assert 'reshape' in {change.op for change in guard(program)}
  np.testing.assert_array_equal(program.compile()(x), x.reshape(1, 63))


@pytest.mark.parametrize(
  'reshape', [((25, 1, 1), 2, (5, 5)), ((10, 1, 1), 5, (2, 5)), ((5, 5), 2, (25, 1, 1))], ids=str
)
def test_reshapes_of_dimensions_of_one_entry(reshape):
  before, size, after = reshape
  program = lowered(before, {'a': size}, P('a'), after, P('a'))
  x = np.arange(np.prod(before), dtype=np.float32).reshape(before)
  assert 'reshape' in {change.op for change in guard(program)}
  np.testing.assert_array_equal(program.compile()(x), x.reshape(after))


def test_reshapes_of_one_dimension_that_does_not_divide_stay_as_they_are():
  """Such as of the dims of 6 heads over 4 devices: these are right, and need no communication that XLA does not."""
  program = lowered((4, 5, 24), {'a': 2, 'b': 4}, P('a', None, 'b'), (4, 5, 6, 4), P('a', None, 'b'))
  x = np.arange(480, dtype=np.float32).reshape(4, 5, 24)
  assert 'reshape' not in {change.op for change in guard(program)}
  np.testing.assert_array_equal(program.compile()(x), x.reshape(4, 5, 6, 4))


def test_what_a_reshape_that_divides_communicates_is_seen():
  program = lowered((8, 6), {'a': 2}, P('a'), (48,), P())
  assert 'sdy.all_gather' in str(make_collectives_explicit(program.compiler_ir('stablehlo')))
