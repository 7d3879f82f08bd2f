"""Grouped products by kernels in Pallas: the choice, the interpreted kernels, and compiles for H100."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.jax_internals.devices import abstract_device
from praxis_lite.instruments.plan.compilers import devices_of, missing_compiler
from praxis_lite.instruments.plan.cost import cost_of
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import MoeFeedForward, grouped_kernels, grouped_matmul as module
from praxis_lite.layers.grouped_matmul import ProductCase, choose_grouped_matmul, grouped_matmul
from praxis_lite.sharding.constraints import unmapped_axes
from praxis_lite.sharding.mesh import abstract_mesh, bind_mesh
from praxis_lite.training.flops import count_flops

triton = functools.partial(grouped_matmul, implementation='triton')
CASES = {
  'full': (64, [20, 44]),
  'empty groups': (64, [0, 40, 0, 0, 24, 0]),
  'rows after the last group': (100, [3, 0, 64, 20]),
  'all empty': (64, [0, 0]),
}


def masked(x, w, sizes):
  row, ends = jnp.arange(x.shape[0])[:, None], jnp.cumsum(sizes)
  in_group = (row < ends) & (row >= ends - sizes)
  return jnp.einsum('mk,gkn,mg->mn', x, w, in_group.astype(x.dtype), precision='highest')


def operands(rows, sizes, K=6, N=5, seed=0):
  rng = np.random.default_rng(seed)
  x, w = rng.standard_normal((rows, K)), rng.standard_normal((len(sizes), K, N))
  return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.asarray(sizes, jnp.int32)


def results(fn, x, w, sizes):
  return fn(x, w, sizes), *jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w, sizes))), (0, 1))(x, w)


def check_close(found, expected):
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.max(abs(other), initial=0)))


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
  module.why_no_kernel_for.cache_clear()
  yield
  monkeypatch.undo()
  module.why_no_kernel_for.cache_clear()
  jax.clear_caches()


@pytest.fixture
def on_gpu(monkeypatch):
  monkeypatch.setattr('praxis_lite.layers.grouped_matmul.platform', lambda: 'gpu')


@pytest.fixture
def plain_kernels(monkeypatch):
  """Replaces the kernels by formulas that compile faster."""

  def multiply(rows, weights, sizes, transposed):
    return masked(rows, weights.swapaxes(1, 2) if transposed else weights, sizes)

  def sum_outer_products(left, right, sizes):
    zeros = jnp.zeros((len(sizes), left.shape[1], right.shape[1]))
    return jax.vjp(lambda w: masked(left, w, sizes), zeros)[1](right)[0]

  monkeypatch.setattr(grouped_kernels, 'multiply', jax.jit(multiply, static_argnames='transposed'))
  monkeypatch.setattr(grouped_kernels, 'sum_outer_products', jax.jit(sum_outer_products))


# ---------------------------------------------------------------- choices


def test_what_it_does_not_take_falls_back_with_the_reason(on_gpu):
  assert choose_grouped_matmul('auto') == ('triton', 'there is a kernel for GPUs of NVIDIA')
  for case, reason in (
    (ProductCase(jnp.float64), 'not float64'),
    (ProductCase(rows=15), 'at least 16 rows, not 15'),
    (ProductCase(unmapped=('data',)), "may split operands over 'data'"),
  ):
    name, found = choose_grouped_matmul('triton', case=case)
    assert name == 'blocks' and reason in found


def test_in_stages_of_a_pipeline_each_device_runs_the_kernel_for_its_own(monkeypatch, on_gpu, plain_kernels):
  """Also with more stages than devices. If the compiler had to split the kernel, it would send the operands."""
  mapped, multiply = [], grouped_kernels.multiply

  def spy(*args, **kwargs):
    mapped.append(not unmapped_axes())
    return multiply(*args, **kwargs)

  monkeypatch.setattr(grouped_kernels, 'multiply', spy)
  stages = [operands(*CASES['empty groups'], seed=seed) for seed in range(4)]
  mesh = jax.make_mesh((2,), ('stage',), axis_types=(AxisType.Auto,))
  in_stage = functools.partial(results, functools.partial(triton, stage_axes=('stage',)))

  def in_stages(*args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.vmap(in_stage)(*args)

  stacked = jax.device_put(jax.tree.map(lambda *x: jnp.stack(x), *stages), NamedSharding(mesh, PartitionSpec('stage')))
  compiled = jax.jit(in_stages).lower(*stacked).compile()
  assert any(mapped) and not re.search('all-|permute', compiled.as_text())
  found = jax.device_get(compiled(*stacked))
  for i, one in enumerate(stages):
    check_close(jax.tree.map(lambda x, i=i: x[i], found), results(masked, *one))


@pytest.mark.parametrize(
  ('capability', 'reason'), [('7.5', 'compute capability 8.0 and newer, not 7.5'), ('gfx942', 'NVIDIA'), ('9.0', '')]
)
def test_chips(monkeypatch, on_gpu, plain_kernels, capability, reason):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  gpu = types.SimpleNamespace(compute_capability=capability, device_kind='NVIDIA', platform='gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [gpu])
  name, found = choose_grouped_matmul('auto')
  assert name == ('blocks' if reason else 'triton') and reason in found


def test_the_kernels_are_lowered_for_a_known_chip(on_gpu):
  """JAX 0.12 asks the chip of the ambient mesh; older releases do not."""
  h100 = abstract_device('NVIDIA H100 80GB HBM3', 'gpu')
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('a',), (AxisType.Auto,), abstract_device=h100)):
    assert choose_grouped_matmul('triton') == ('triton', 'there is a kernel for GPUs of NVIDIA')


def test_a_jax_whose_pallas_differs(monkeypatch, on_gpu):
  monkeypatch.setattr(grouped_kernels, 'multiply', lambda *_: jnp.missing)
  name, reason = choose_grouped_matmul('auto')
  assert name == 'blocks' and "'triton' fails on this JAX: " in reason and 'times as long' in reason
  args = operands(*CASES['empty groups'])
  check_close(results(triton, *args), results(masked, *args))


def test_other_platforms_keep_their_implementations():
  assert choose_grouped_matmul('auto').name == 'blocks'
  assert choose_grouped_matmul('triton', 'ff.grouped_matmul').reason.startswith("ff.grouped_matmul is 'triton', which")
  with jax.sharding.use_abstract_mesh(abstract_mesh({'a': 1}, 'tpu')):
    assert choose_grouped_matmul('triton').name == 'xla'


def test_experts_say_which_axes_are_not_mapped(plain_kernels):
  experts = Config(MoeFeedForward, input_dims=4, hidden_dims=8, num_experts=2).instantiate()
  with jax.sharding.use_abstract_mesh(abstract_mesh({'replica': 2}, 'gpu')):
    assert "may split operands over 'replica'" in experts.implementation_of(16, packed=False)
  with jax.sharding.use_abstract_mesh(abstract_mesh({'replica': 1}, 'gpu')):
    assert "products of experts by 'triton' on gpu" in experts.implementation_of(16, packed=False)


# ---------------------------------------------------------------- products


@pytest.mark.slow_cases
@pytest.mark.parametrize('case', CASES)
def test_products_and_gradients(on_gpu, case):
  args = operands(*CASES[case])
  check_close(results(triton, *args), results(masked, *args))
  assert 'pallas_call' in str(jax.make_jaxpr(triton)(*args))


def test_vmap_and_flops(on_gpu):
  x, w, sizes = (jnp.stack(a) for a in zip(*(operands(64, s, seed=len(s)) for s in ([9, 0, 20], [1, 60, 3]))))
  check_close(*(results(jax.vmap(fn), x, w, sizes) for fn in (triton, masked)))
  loss = jax.grad(lambda x, w: jnp.sum(triton(x, w, sizes[0])), (0, 1))
  assert count_flops(jax.make_jaxpr(loss)(x[0], w[0])) == 3 * 2 * 64 * 6 * 5


@pytest.mark.slow_cases
@pytest.mark.parametrize('expert_axis', ['data', None], ids=['exchanged', 'not exchanged'])
def test_experts_on_a_mesh_are_those_of_one_device(on_gpu, plain_kernels, expert_axis):
  experts = Config(MoeFeedForward, input_dims=4, hidden_dims=6, num_experts=5, expert_axis=expert_axis)
  experts.activation_split_dims_mapping.out = ('data', None, None)
  mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
  layer = experts.set(mesh_axis_names=('data',)).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), jax.random.normal(jax.random.key(0), (4, 8, 4))

  def step(layer, variables, x):
    return jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x)[0])), (0, 1))(variables, x)

  placed = jax.device_put((variables, x), NamedSharding(mesh, PartitionSpec()))
  found = jax.jit(bind_mesh(functools.partial(step, layer), mesh)).trace(*placed)
  assert 'sum_outer_products' in str(found.jaxpr)
  one_device = experts.clone(grouped_matmul='blocks', expert_axis=None).instantiate()
  expected = jax.jit(functools.partial(step, one_device))(variables, x)
  check_close(jax.tree.leaves(found.lower().compile()(*placed)), jax.tree.leaves(expected))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  ('rows', 'sizes', 'K', 'N'),
  [(700, [300, 100, 17, 0, 200], 70, 260), (300, [3, 0, 64, 20], 150, 130), (20, [5, 1, 2, 1], 16, 16)],
  ids=['several tiles', 'rows after the last group', 'fewer rows than a tile'],
)
def test_sizes_that_tiles_do_not_divide(on_gpu, rows, sizes, K, N):
  args = operands(rows, sizes, K, N)
  with jax.default_matmul_precision('highest'):
    check_close(results(triton, *args), results(masked, *args))


@pytest.mark.slow_cases
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
def test_short_floats_are_summed_in_float32(on_gpu, dtype):
  x, w, sizes = operands(300, [100, 0, 180], 512, 40)
  x, w = x.astype(dtype), w.astype(dtype)
  wide = masked(x.astype(jnp.float32), w.astype(jnp.float32), sizes)
  found = triton(x, w, sizes)
  assert found.dtype == dtype
  np.testing.assert_allclose(found.astype(jnp.float32), wide, rtol=2 * jnp.finfo(dtype).eps, atol=1e-4)


def test_a_table_has_each_row_once_and_no_tile_for_rows_of_other_groups():
  sizes = jnp.asarray([5, 0, 16, 1, 40, 0], jnp.int32)
  ends = jnp.cumsum(sizes)
  table = grouped_kernels._table_of_tiles(ends - sizes, ends, 16, 62 // 16 + 6)
  tiles = [(int(g), int(a), int(b)) for g, a, b in zip(*table) if a < b]
  assert tiles == [(0, 0, 5), (2, 5, 21), (3, 21, 22), (4, 22, 62), (4, 38, 62), (4, 54, 62)]


def test_programs_cover_the_grid_once_and_share_what_they_read():
  places = jax.vmap(lambda i: grouped_kernels._place(i, 19, 5))(jnp.arange(95))
  found = list(zip(*(x.tolist() for x in places)))
  assert sorted(found) == [(row, column) for row in range(19) for column in range(5)]
  assert {row for row, _ in found[:40]} == set(range(8)) and {row for row, _ in found[80:]} == {16, 17, 18}


def test_compiled_for_h100_it_is_three_calls_with_the_flops_of_the_rows():
  topology = parse_topology('h100:1')
  if missing := missing_compiler(topology):
    pytest.skip(missing)
  mesh = jax.sharding.Mesh(np.array(devices_of(topology)), ('a',))
  at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  M, G, K, N = 8192, 16, 256, 384
  shapes = ((M, K), jnp.bfloat16), ((G, K, N), jnp.bfloat16), ((G,), jnp.int32)
  x, w, sizes = (jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape, dtype in shapes)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    step = jax.grad(lambda x, w, sizes: jnp.sum(grouped_matmul(x, w, sizes).astype(jnp.float32) ** 2), (0, 1))
    lowered = jax.jit(step).trace(x, w, sizes).lower()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'Unsupported .version' not in str(error):
      raise
    pytest.skip(f'the assembler is older than triton: {str(error).splitlines()[0]}')
  program = parse(compiled)
  cost = cost_of(program, topology.target, Links(topology))
  calls = [op for op in cost.operations if op.opcode == 'custom-call' and op.flops]
  assert [op.flops for op in calls] == [2 * M * K * N] * 3 and cost.flops == 3 * 2 * M * K * N
  one = 2 * (M * K + M * N + G * K * N)
  assert all(one <= op.bytes <= 1.01 * one for op in calls)
  assert compiled.memory_analysis().temp_size_in_bytes <= 3 * 2 * M * N + 4 * G * K * N  # Not the rows of each group.
