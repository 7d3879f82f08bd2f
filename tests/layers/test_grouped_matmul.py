"""Grouped products by blocks, compared with a product that masks each row's weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.programs import inner_programs
from praxis_lite.layers import MoeFeedForward
from praxis_lite.layers.grouped_matmul import GROUPED_PRODUCT, choose_grouped_matmul, grouped_matmul
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.remat import REMAT_POLICIES, Remat
from praxis_lite.sharding.guards import GuardedJit
from praxis_lite.sharding.mesh import abstract_mesh, bind_mesh
from praxis_lite.training.flops import count_flops

K, N = 7, 5
CASES = {
  'one row': (1, [1]),
  'one group': (70, [70]),
  'one group that is not full': (70, [50]),
  'empty groups': (64, [0, 40, 0, 0, 24, 0]),
  'all empty': (8, [0, 0, 0]),
  'more groups than rows': (3, [0, 1, 0, 0, 2, 0, 0, 0, 0]),
  'rows after the last group': (100, [3, 64, 20]),
  'several blocks of odd groups': (700, [257, 1, 300, 99]),
}


def operands(rows, sizes, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  x, w = rng.standard_normal((rows, K)), rng.standard_normal((len(sizes), K, N))
  return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


def masked(x, w, sizes):
  row, ends = jnp.arange(x.shape[0])[:, None], jnp.cumsum(sizes)
  in_group = (row < ends) & (row >= ends - sizes)
  return jnp.einsum('mk,gkn,mg->mn', x, w, in_group.astype(x.dtype))


def results(fn, x, w, sizes):
  """Returns the output, and the gradients of both operands."""

  def loss(x, w):
    return jnp.sum(jnp.sin(fn(x, w, sizes).astype(jnp.float32)))

  return jax.jit(lambda x, w: (fn(x, w, sizes), *jax.grad(loss, (0, 1))(x, w)))(x, w)


def check_close(found, expected, tolerance=1e-5):
  for one, other in zip(found, expected, strict=True):
    assert one.dtype == other.dtype
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.max(abs(other), initial=0)))


def products_of(jaxpr):
  """Returns the products in a program and in the programs that it calls."""
  found = [equation for equation in jaxpr.eqns if equation.primitive.name == 'dot_general']
  return found + [dot for equation in jaxpr.eqns for inner in inner_programs(equation) for dot in products_of(inner)]


blocks = functools.partial(grouped_matmul, implementation='blocks')


@pytest.mark.slow_cases
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_products_and_gradients(case, platform, monkeypatch):
  monkeypatch.setattr('praxis_lite.layers.grouped_matmul.platform', lambda: platform)
  args = operands(*CASES[case])
  check_close(results(blocks, *args), results(masked, *args))
  # On a GPU, the number of iterations is known, so that it does not wait for the host.
  fn = functools.partial(grouped_matmul, implementation='blocks')  # Another function, so that it is traced again.
  assert ('while' in str(jax.make_jaxpr(fn)(*args))) == (platform == 'cpu' and len(args[2]) > 1)


@pytest.mark.parametrize(('rows', 'groups', 'trips'), [(8192, 4, 3 + 4), (96, 6, 6), (4097, 2, 3)])
def test_blocks_on_a_gpu_are_few(rows, groups, trips, monkeypatch):
  monkeypatch.setattr('praxis_lite.layers.grouped_matmul.platform', lambda: 'gpu')
  fn = functools.partial(grouped_matmul, implementation='blocks')
  args = operands(rows, [1] * (groups - 1) + [rows - groups + 1])  # These need all trips.
  assert f'length={trips}' in str(jax.make_jaxpr(fn)(*args)).replace(' ', '')
  check_close(results(fn, *args), results(masked, *args))


def test_no_rows_and_no_groups():
  x, w, sizes = operands(0, [0, 0])
  assert blocks(x, w, sizes).shape == (0, N)
  x, w, sizes = operands(4, [])
  np.testing.assert_array_equal(blocks(x, w, sizes), np.zeros((4, N)))


@pytest.mark.slow_cases
@pytest.mark.parametrize(('dtype', 'tolerance'), [(jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)])
def test_sums_of_short_floats_are_long(dtype, tolerance):
  x, w, sizes = operands(600, [300, 300], dtype)
  expected = results(masked, x.astype(jnp.float32), w.astype(jnp.float32), sizes)
  check_close(results(blocks, x, w, sizes), [y.astype(dtype) for y in expected], tolerance)
  ones = jnp.ones((600, K), dtype)  # A sum of 300 ones is exact, and it would not be if sums were bfloat16.
  gradient = jax.grad(lambda w: jnp.sum(blocks(ones, w, sizes).astype(jnp.float32)))(w)
  np.testing.assert_array_equal(gradient.astype(jnp.float32), 300)


@pytest.mark.parametrize('dtype', [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize('implementation', ['blocks', 'xla'])
def test_weights_of_eight_bits(dtype, implementation):
  x, w, sizes = operands(100, [30, 60], jnp.bfloat16)
  short = (4 * w).astype(dtype)
  found = grouped_matmul(x, short, sizes, implementation)
  np.testing.assert_array_equal(found, grouped_matmul(x, short.astype(jnp.bfloat16), sizes, implementation))
  assert found.dtype == jnp.bfloat16 and np.any(found)


@pytest.mark.parametrize('sizes', [[600], [300, 200]], ids=['one group', 'two groups'])
def test_gradients_multiply_short_floats(sizes):
  x, w, sizes = operands(600, sizes, jnp.bfloat16)
  loss = jax.grad(lambda x, w: jnp.sum(blocks(x, w, sizes).astype(jnp.float32) ** 2), (0, 1))
  dtypes = [tuple(v.aval.dtype.name for v in dot.invars) for dot in products_of(jax.make_jaxpr(loss)(x, w))]
  assert dtypes == [('bfloat16', 'bfloat16')] * 3


def test_float64():
  with jax.enable_x64(True):
    args = operands(100, [30, 60], jnp.float64)
    check_close(results(blocks, *args), results(masked, *args), 1e-13)


def test_rows_of_other_groups_do_not_matter():
  x, w, sizes = operands(90, [40, 30])
  bad = x.at[40:70].set(jnp.nan).at[80].set(jnp.inf)  # Those of group 1, and one after it.
  out, pullback = jax.vjp(lambda w: blocks(bad, w, sizes)[:40], w)
  np.testing.assert_array_equal(out, blocks(x, w, sizes)[:40])
  assert np.isfinite(pullback(jnp.ones_like(out))[0][0]).all()
  np.testing.assert_array_equal(blocks(bad, w, sizes)[70:], 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize('mapped', [(0, 0, 0), (0, None, 0), (0, 0, None), (None, 0, None)])
def test_vmap(mapped):
  cases = [operands(50, sizes, seed=i) for i, sizes in enumerate(([10, 0, 40], [5, 5, 5], [0, 0, 0], [0, 50, 0]))]
  args = [jnp.stack(x) if axis == 0 else x[0] for axis, x in zip(mapped, zip(*cases))]
  both = [jax.vmap(fn, mapped) for fn in (blocks, masked)]
  check_close(*(results(fn, *args) for fn in both))
  twice = [jax.vmap(fn, tuple(axis if axis is None else 1 for axis in mapped)) for fn in both]
  args = [x if axis is None else jnp.stack([x, 2 * x], 1) for axis, x in zip(mapped, args)]
  args[2] = args[2] if mapped[2] is None else jnp.minimum(args[2], 10)
  check_close(*(results(fn, *args) for fn in twice), 3e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('sizes', [(2,), (3,), (2, 2)], ids=str)
def test_a_vmap_over_a_dimension_that_the_mesh_splits(sizes):
  mesh = jax.make_mesh(sizes, ('stage', 'b')[: len(sizes)], axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
  cases = [operands(50, groups, seed=i) for i, groups in enumerate(([10, 0, 40], [5, 5, 5], [0, 0, 0], [0, 50, 0]))]
  args = [jnp.stack(x) for x in zip(*cases)]

  def loss(x, w, sizes, fn):
    at = NamedSharding(mesh, P('stage'))
    x, w, sizes = (jax.lax.with_sharding_constraint(a, at) for a in (x, w, sizes))
    return jnp.sum(jnp.sin(jax.vmap(fn)(x, w, sizes)))

  found = GuardedJit(bind_mesh(jax.grad(functools.partial(loss, fn=blocks), (0, 1)), mesh))(*args)
  check_close(
    found, jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(jax.vmap(masked)(x, w, args[2]))), (0, 1)))(*args[:2])
  )


def test_gradients_of_gradients():
  x, w, sizes = operands(90, [40, 30])

  def loss(fn, x, w):
    return sum(jnp.sum(jnp.cos(g)) for g in jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w, sizes))), (0, 1))(x, w))

  check_close(*(jax.jit(jax.grad(functools.partial(loss, fn), (0, 1)))(x, w) for fn in (blocks, masked)))


def test_flops_are_those_of_rows_and_not_of_groups():
  x, w, sizes = operands(300, [30] * 8)

  def loss(x, w):
    return jnp.sum(blocks(x, w, sizes))

  assert count_flops(jax.make_jaxpr(loss)(x, w)) == 2 * 300 * K * N
  assert count_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)) == 3 * 2 * 300 * K * N
  mapped = jax.make_jaxpr(jax.vmap(jax.grad(loss, (0, 1))))(jnp.stack([x, x]), jnp.stack([w, w]))
  assert count_flops(mapped) == 2 * 3 * 2 * 300 * K * N


def test_flops_in_a_loop_over_layers():
  x, w, sizes = operands(300, [30] * 8)
  w = jnp.stack([w @ w.swapaxes(1, 2)] * 3)  # Three layers of K x K.

  def loss(x, w):
    return jnp.sum(jax.lax.scan(lambda x, w: (blocks(x, w, sizes), None), x, w)[0])

  assert count_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)) == 3 * 3 * 2 * 300 * K * K


@pytest.mark.parametrize('policy', [p for p in REMAT_POLICIES if p not in ('auto', 'none')])
def test_rematerialisation_keeps_them_as_products(policy):
  x, w, sizes = operands(300, [30] * 8)
  remat = Remat((policy,), (GROUPED_PRODUCT,) if policy == 'save_names' else (), ())
  loss = remat(lambda x, w: jnp.sum(jnp.sin(blocks(x, w, sizes))), in_scan=True)
  products = count_flops(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)) / (2 * 300 * K * N)
  assert products == (4 if policy == 'full' else 3)


def test_a_choice_is_explained():
  assert choose_grouped_matmul('auto').name == 'blocks'
  with jax.sharding.use_abstract_mesh(abstract_mesh({'a': 1}, 'tpu')):
    assert choose_grouped_matmul('auto') == ('xla', 'XLA has a kernel for TPU')
  assert choose_grouped_matmul('xla', 'ff.grouped_matmul') == ('xla', "ff.grouped_matmul is 'xla'")
  experts = Config(MoeFeedForward, input_dims=4, hidden_dims=8, num_experts=2)
  (line,) = describe_implementations(experts.instantiate(), 16, packed=False)
  assert line.endswith(
    "products of experts by 'blocks' on cpu: on cpu, 'xla' multiplies every row by the weights of every group"
  )
  assert not describe_implementations(experts.clone(dispatch='capacity').instantiate(), 16, packed=False)
  with pytest.raises(ConfigError, match=r"grouped_matmul.*'block'.*'blocks'"):
    experts.clone(grouped_matmul='block').instantiate()


def test_a_layer_is_built_without_asking_for_devices(monkeypatch):
  # A plan for other chips has to set environment variables before JAX looks for devices.
  monkeypatch.setattr('praxis_lite.layers.grouped_matmul.platform', lambda: pytest.fail('asks for devices'))
  Config(MoeFeedForward, input_dims=4, hidden_dims=8, num_experts=2).instantiate()


@pytest.mark.slow
def test_experts_are_those_of_the_other_implementation():
  experts = Config(MoeFeedForward, input_dims=K, hidden_dims=6, num_experts=5)
  x = jax.random.normal(jax.random.key(1), (2, 9, K))
  variables = experts.instantiate().init(jax.random.key(0))

  def gradients(implementation):
    layer = experts.clone(grouped_matmul=implementation).instantiate()
    return jax.tree.leaves(jax.jit(jax.grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x)[0])), (0, 1)))(variables, x))

  check_close(gradients('blocks'), gradients('xla'))
