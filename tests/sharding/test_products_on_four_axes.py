"""Products on a mesh of four axes, or of three of which one is split by part, which eight devices cannot have."""

import os

import pytest
from quick_xla import xla_flags
from warm_python import finished

from praxis_lite.sharding.propagation import Axis
from tools.splits.products import product_programs
from tools.splits.workers import Worker

GRADIENT = """
import jax, jax.numpy as jnp, numpy as np
from praxis_lite.sharding.guards import guard

mesh = jax.make_mesh((2, 2, 2, 2), ('a', 'b', 'c', 'd'), axis_types=(jax.sharding.AxisType.Auto,) * 4)
rng = np.random.default_rng(0)
u, rows, v, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (8, 5), (6, 8), (4, 2, 6, 4)))

def gradient(on_mesh):
  def at(x, *spec):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec))) if on_mesh else x

  def loss(w, u, rows, v, begin):
    updated = jax.lax.dynamic_update_slice_in_dim(u, at(rows, 'a'), begin, 1)
    x = (u @ at(v, None, 'c')).reshape(8, 2, 4)
    y = jnp.tanh(jnp.einsum('hge,egfj->jfh', x, at(w, 'd', None, 'c', 'b')))
    return jnp.sum(y * (jnp.arange(y.size).reshape(y.shape) % 5 - 2)) , (jnp.roll(updated, 1, axis=1), y)

  args = (w, u, rows, v, 1)
  lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*args)
  guard(lowered)
  return lowered.compile()(*args)[1]

np.testing.assert_allclose(gradient(True), gradient(False), rtol=1e-3, atol=1e-3)
"""


SUM = """
import jax, jax.numpy as jnp, numpy as np
from praxis_lite.sharding.guards import guard

mesh = jax.make_mesh((2, 2, 2, 2), ('a', 'b', 'c', 'd'), axis_types=(jax.sharding.AxisType.Auto,) * 4)
rng = np.random.default_rng(0)
x, y, u, v = (rng.integers(-3, 4, (6, 6, 6)).astype(np.float32) for _ in range(4))

def at(x, *spec):
  return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec)))

def total(x, y, u, v):
  one = jnp.einsum('gbv,gcv->gbc', at(u, 'c'), at(v, 'c', ('a', 'b')))
  return one + jnp.einsum('gbv,gcv->gbc', at(x, ('d', 'a'), 'c', 'b'), at(y, ('d', 'a'), None, 'b'))

lowered = jax.jit(total).lower(x, y, u, v)
guard(lowered)
found = lowered.compile()(x, y, u, v)
expected = np.einsum('gbv,gcv->gbc', u, v) + np.einsum('gbv,gcv->gbc', x, y)
np.testing.assert_array_equal(found, expected)
"""


def run(program):
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags(devices=16)}
  done = finished(program, env=env)
  assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_gradient_of_a_product_of_which_one_operand_is_gathered():
  run(GRADIENT)


@pytest.mark.slow
def test_sum_of_products_that_is_returned():
  """The sum is split over ('d', 'a') and more of 6 entries, so that less of it has to be returned."""
  run(SUM)


@pytest.mark.slow
def test_products_over_parts_of_an_axis():
  """On a mesh 2 x 4 x 2, which is one of 2 x 2 x 2 x 2 where half of the axis of 4 splits something."""
  a, major, minor, c = Axis('a', 2), Axis('b', 2), Axis('b', 2, 2), Axis('c', 2)
  cases = [
    (((a, minor), (c,)), ((c,), (a, major)), ((), (a, major))),  # x is gathered.
    (((minor, a), (c,)), ((c,), (a, major)), ((minor, a), ())),  # w is.
    (((a,), (c,)), ((c,), (Axis('b', 4),)), ((), (Axis('b', 4),))),  # x is, and b is whole.
  ]
  worker = Worker((2, 4, 2))
  number = next(i for i, program in enumerate(product_programs()) if program.name.startswith('bv,vc->bc'))
  without, with_guards = (worker.run('products', number, cases, guarded) for guarded in (False, True))
  worker.close()
  assert [found.outcome for found in without] == ['wrong', 'wrong', 'right']
  assert [found.outcome for found in with_guards] == ['right'] * 3
  assert [found.guarded for found in with_guards] == [True, True, False]
