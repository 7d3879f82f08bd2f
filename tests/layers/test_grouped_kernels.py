"""Grouped products by kernels of tokamax: the choice, a stand-in for tokamax, the kernel, and compiles for H100."""

import contextlib
import functools
import importlib.util
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from drawn_state import drawn_variables
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.jax_internals.devices import abstract_device
from praxis_lite.instruments.plan.compilers import devices_of, missing_compiler
from praxis_lite.instruments.plan.cost import cost_of
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import MoeFeedForward, grouped_kernels
from praxis_lite.layers.grouped_matmul import ProductCase, choose_grouped_matmul, grouped_matmul
from praxis_lite.sharding.mesh import abstract_mesh, bind_mesh
from praxis_lite.training.flops import count_flops

needs_tokamax = pytest.mark.skipif(
  importlib.util.find_spec('tokamax') is None, reason='tokamax is not installed: praxis_lite[kernels]'
)
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
  grouped_kernels._why_no_kernel.cache_clear()
  yield
  monkeypatch.undo()
  grouped_kernels._why_no_kernel.cache_clear()
  jax.clear_caches()


@pytest.fixture
def on_gpu(monkeypatch):
  monkeypatch.setattr('praxis_lite.layers.grouped_matmul.platform', lambda: 'gpu')


def ragged_dot_that_leaves_garbage(left, right, sizes, numbers, *, implementation):
  """Computes what the kernel does, and like it writes nothing sensible for missing rows and empty groups."""
  assert implementation == 'triton'
  out = jax.lax.ragged_dot_general(left, right, sizes, numbers, precision='highest')
  if out.ndim == 3:
    return jnp.where(sizes[:, None, None] > 0, out, jnp.nan)
  return jnp.where(jnp.arange(len(out))[:, None] < sizes.sum(), out, jnp.nan)


def put_tokamax(monkeypatch, ragged_dot=ragged_dot_that_leaves_garbage):
  module = types.ModuleType('tokamax')
  module.__spec__ = importlib.util.spec_from_loader('tokamax', None)
  module.ragged_dot_general = ragged_dot
  module.config = types.SimpleNamespace(cross_compile=contextlib.nullcontext)
  monkeypatch.setitem(sys.modules, 'tokamax', module)


def hide_tokamax(monkeypatch):
  real = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name == 'tokamax' else real(name))


# ---------------------------------------------------------------- choices


@pytest.mark.slow
def test_without_the_extra_blocks_replace_it_and_say_so(monkeypatch, on_gpu):
  hide_tokamax(monkeypatch)
  for implementation in ('auto', 'triton'):
    name, reason = choose_grouped_matmul(implementation)
    assert name == 'blocks' and 'install praxis_lite[kernels]' in reason and 'times as long' in reason
  args = operands(*CASES['empty groups'])
  check_close(results(triton, *args), results(masked, *args))


def test_what_it_does_not_take_falls_back_with_the_reason(monkeypatch, on_gpu):
  put_tokamax(monkeypatch)
  assert choose_grouped_matmul('auto') == ('triton', 'tokamax has a kernel for GPUs')
  for case, reason in (
    (ProductCase(jnp.float64), 'not float64'),
    (ProductCase(rows=15), 'at least 16 rows, not 15'),
    (ProductCase(unmapped=('data',)), "may split operands over 'data'"),
  ):
    name, found = choose_grouped_matmul('triton', case=case)
    assert name == 'blocks' and reason in found


@pytest.mark.parametrize(
  ('capability', 'reason'), [('7.5', 'compute capability 8.0 and newer, not 7.5'), ('gfx942', 'NVIDIA'), ('9.0', '')]
)
def test_chips(monkeypatch, on_gpu, capability, reason):
  put_tokamax(monkeypatch)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  gpu = types.SimpleNamespace(compute_capability=capability, device_kind='NVIDIA', platform='gpu')
  monkeypatch.setattr(jax, 'devices', lambda: [gpu])
  name, found = choose_grouped_matmul('auto')
  assert name == ('blocks' if reason else 'triton') and reason in found


def test_a_tokamax_that_does_not_fit_this_jax(monkeypatch, on_gpu):
  def unknown(*args, **kwargs):
    raise ValueError('Unknown implementation: triton\nmore')

  put_tokamax(monkeypatch, unknown)
  name, reason = choose_grouped_matmul('auto')
  assert name == 'blocks' and 'lacks packages: Unknown implementation: triton; install' in reason


def test_other_platforms_keep_their_implementations(monkeypatch):
  put_tokamax(monkeypatch)
  assert choose_grouped_matmul('auto').name == 'blocks'
  assert choose_grouped_matmul('triton', 'ff.grouped_matmul').reason.startswith("ff.grouped_matmul is 'triton', which")
  with jax.sharding.use_abstract_mesh(abstract_mesh({'a': 1}, 'tpu')):
    assert choose_grouped_matmul('triton').name == 'xla'


def test_experts_say_which_axes_are_not_mapped(monkeypatch):
  put_tokamax(monkeypatch)
  experts = Config(MoeFeedForward, input_dims=4, hidden_dims=8, num_experts=2).instantiate()
  with jax.sharding.use_abstract_mesh(abstract_mesh({'replica': 2}, 'gpu')):
    assert "may split operands over 'replica'" in experts.implementation_of(16, packed=False)
  with jax.sharding.use_abstract_mesh(abstract_mesh({'replica': 1}, 'gpu')):
    assert "products of experts by 'triton' on gpu" in experts.implementation_of(16, packed=False)


def test_tokamax_is_not_imported_for_other_platforms(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokamax', None)  # Importing it fails.
  args = operands(*CASES['full'])
  check_close(results(grouped_matmul, *args), results(masked, *args))


# ---------------------------------------------------------------- flags


@pytest.fixture
def own_flags(monkeypatch):
  """The flags of a program that has set one, and parsed none."""
  values = flags.FlagValues()
  for name in ('set', 'other'):
    flags.DEFINE_string(name, 'default', '', flag_values=values)
  values.set = 'by hand'
  monkeypatch.setattr(flags, 'FLAGS', values)
  return values


def ragged_dot_that_reads_flags(*args, **kwargs):
  time.sleep(0.002)  # So that threads meet here.
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(['a notebook', '-f', 'kernel.json'])
  return ragged_dot_that_leaves_garbage(*args, **kwargs)


def is_unparsed(values):
  with pytest.raises(flags.UnparsedFlagAccessError):
    _ = values.other
  return not values.is_parsed() and values['set'].value == 'by hand'


def test_flags_of_a_program_that_has_not_parsed_them_stay_as_they_are(monkeypatch, on_gpu, own_flags):
  put_tokamax(monkeypatch, ragged_dot_that_reads_flags)
  args = operands(*CASES['full'])
  with ThreadPoolExecutor(4) as threads:
    found = list(threads.map(lambda _: grouped_kernels.multiply(*args, False), range(4)))
  check_close(found, [masked(*args)] * 4)
  assert is_unparsed(own_flags)
  put_tokamax(monkeypatch, lambda *args, **kwargs: pytest.fail('in the kernel'))
  with pytest.raises(pytest.fail.Exception):
    grouped_kernels.multiply(*args, False)
  assert is_unparsed(own_flags)


def test_parsed_flags_stay_parsed(monkeypatch, on_gpu, own_flags):
  put_tokamax(monkeypatch, ragged_dot_that_reads_flags)
  own_flags(['a program', '--other=given'])
  triton(*operands(*CASES['full']))
  assert own_flags.is_parsed() and (own_flags.set, own_flags.other) == ('by hand', 'given')


@needs_tokamax
def test_tokamax_reads_no_flags_of_others(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['a notebook', '-f', 'kernel.json'])
  were_parsed = flags.FLAGS.is_parsed()
  h100 = abstract_device('NVIDIA H100 80GB HBM3', 'gpu')  # The package triton lowers for a known chip alone.
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('a',), (AxisType.Auto,), abstract_device=h100)):
    assert choose_grouped_matmul('triton') == ('triton', 'tokamax has a kernel for GPUs')
  assert flags.FLAGS.is_parsed() == were_parsed


# ---------------------------------------------------------------- products


@pytest.mark.slow_cases
@pytest.mark.parametrize('case', CASES)
def test_products_and_gradients(monkeypatch, on_gpu, case):
  put_tokamax(monkeypatch)
  args = operands(*CASES[case])
  check_close(results(triton, *args), results(masked, *args))
  assert 'ragged_dot' in str(jax.make_jaxpr(triton)(*args))


def test_vmap_and_flops(monkeypatch, on_gpu):
  put_tokamax(monkeypatch)
  x, w, sizes = (jnp.stack(a) for a in zip(*(operands(64, s, seed=len(s)) for s in ([9, 0, 20], [1, 60, 3]))))
  check_close(*(results(jax.vmap(fn), x, w, sizes) for fn in (triton, masked)))
  loss = jax.grad(lambda x, w: jnp.sum(triton(x, w, sizes[0])), (0, 1))
  assert count_flops(jax.make_jaxpr(loss)(x[0], w[0])) == 3 * 2 * 64 * 6 * 5


@pytest.mark.slow_cases
@pytest.mark.parametrize('expert_axis', ['data', None], ids=['exchanged', 'not exchanged'])
def test_experts_on_a_mesh_are_those_of_one_device(monkeypatch, on_gpu, expert_axis):
  put_tokamax(monkeypatch)
  experts = Config(MoeFeedForward, input_dims=4, hidden_dims=6, num_experts=5, expert_axis=expert_axis)
  experts.activation_split_dims_mapping.out = ('data', None, None)
  mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
  layer = experts.set(mesh_axis_names=('data',)).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), jax.random.normal(jax.random.key(0), (4, 8, 4))

  def step(layer, variables, x):
    return jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x)[0])), (0, 1))(variables, x)

  placed = jax.device_put((variables, x), NamedSharding(mesh, PartitionSpec()))
  found = jax.jit(bind_mesh(functools.partial(step, layer), mesh)).trace(*placed)
  assert 'ragged_dot' in str(found.jaxpr)
  one_device = experts.clone(grouped_matmul='blocks', expert_axis=None).instantiate()
  expected = jax.jit(functools.partial(step, one_device))(variables, x)
  check_close(jax.tree.leaves(found.lower().compile()(*placed)), jax.tree.leaves(expected))


# ---------------------------------------------------------------- tokamax itself


@needs_tokamax
@pytest.mark.parametrize('sizes', [[100, 150], [0, 30, 0, 100]], ids=str)
def test_the_kernel_itself_interpreted(monkeypatch, on_gpu, sizes):
  pallas = pytest.importorskip('jax.experimental.pallas')
  pytest.importorskip('tokamax._src.ops.ragged_dot.pallas_triton', reason='this tokamax has no kernel in Pallas')
  monkeypatch.setattr(pallas, 'pallas_call', functools.partial(pallas.pallas_call, interpret=True))
  # Multiples of 128, and 128 rows after the last group: an interpreted kernel moves reads that end outside of an array.
  args = operands(sum(sizes) + 128, sizes, K=128, N=256)
  with jax.default_matmul_precision('highest'):
    check_close(results(triton, *args), results(masked, *args))


@needs_tokamax
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
