"""Each guard is still needed: the smallest program that it guards against is wrong on this XLA without it.

A test here that fails says that XLA has become right, and that its guard in `partitioning/guards.py` can go.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_lite.partitioning import guards

RNG = np.random.default_rng(0)


def mesh(*names):
  return jax.make_mesh((2,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))


def on(mesh, fn, args, specs, out_spec):
  """The result of a program over arrays split by `specs`, constrained inside, where they need not divide."""

  def constrained(*args):
    placed = [jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)) for x, s in zip(args, specs)]
    return jax.lax.with_sharding_constraint(fn(*placed), NamedSharding(mesh, out_spec))

  with jax.set_mesh(mesh):
    return np.asarray(jax.jit(constrained)(*args))


def product(x, w):
  return jnp.einsum('bv,cv->bc', x, w)


PRODUCT_MESH = ('r', 'd', 'm')
PRODUCT = RNG.normal(size=(8, 32)).astype(np.float32), RNG.normal(size=(64, 32)).astype(np.float32)
PRODUCT_SPECS = (P(('r', 'd'), 'm'), P('d', 'm'))


def test_product_with_a_weight_over_one_of_two_row_axes():
  right = product(*PRODUCT)
  wrong = on(mesh(*PRODUCT_MESH), product, PRODUCT, PRODUCT_SPECS, P(('r', 'd'), 'm'))
  assert not np.allclose(wrong, right, atol=1e-3)


def test_product_with_the_weight_gathered_is_right():
  used = guards.gathered_specs({('w',): PRODUCT_SPECS[1]}, [PRODUCT_SPECS[0]], {'r': 2, 'd': 2, 'm': 2})
  assert used == {('w',): P(None, 'm')}
  found = on(mesh(*PRODUCT_MESH), product, PRODUCT, (PRODUCT_SPECS[0], used['w',]), P(('r', 'd'), 'm'))
  np.testing.assert_allclose(found, product(*PRODUCT), atol=1e-4)


IMAGES = RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)
FILTERS = RNG.normal(size=(3, 3, 3, 4)).astype(np.float32)


def filter_gradient(guarded):
  def gradient(x, w):
    def total(w):
      image, filters = (guards.whole_images(x), guards.whole_filters(w)) if guarded else (x, w)
      y = jax.lax.conv_general_dilated(image, filters, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
      return jnp.sum(jnp.sin(guards.whole_images(y) if guarded else y))

    return jax.grad(total)(w)

  return gradient


@pytest.mark.parametrize('guarded', [False, True])
def test_convolution_of_split_images(guarded):
  right = filter_gradient(False)(IMAGES, FILTERS)
  found = on(mesh('a', 'b'), filter_gradient(guarded), (IMAGES, FILTERS), (P(None, 'a'), P()), P())
  assert np.allclose(found, right, rtol=1e-3, atol=1e-3) == guarded


TABLE = RNG.normal(size=(5, 4)).astype(np.float32)
IDS = np.array([1, 2, 3], np.int32)


def lookup_gradient(guarded):
  def gradient(table, ids):
    def total(table):
      rows = jnp.take(table, ids, axis=0, mode='fill', fill_value=jnp.nan)
      return jnp.sum(jnp.cos(guards.zero_past_end(rows) if guarded else rows))

    return jax.grad(total)(table)

  return gradient


@pytest.mark.parametrize('guarded', [False, True])
def test_gradient_of_a_lookup_of_uneven_ids(guarded):
  right = lookup_gradient(False)(TABLE, IDS)
  found = on(mesh('a', 'b'), lookup_gradient(guarded), (TABLE, IDS), (P(), P('a')), P())
  assert np.allclose(found, right, atol=1e-4) == guarded
