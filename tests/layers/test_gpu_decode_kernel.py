"""The kernel that attends to a cache on a GPU: interpreted, it is dense attention; and which caches take it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import LENGTHS, PROMPT, STEPS, B, D, decoded, expected, inputs
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.instruments.plan.compilers import devices_of, missing_compiler
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import AttentionSpec, MultiHeadAttention, RelativeBias, cached_attention, dot_product_attention
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.gpu_decode_kernel import attend_one_token
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.masks import ArrayMask

WHY_NOT = missing_compiler(parse_topology('h100:1'))


@pytest.fixture
def on_gpu(monkeypatch):
  """Caches of any size, and heads of 4 dims, choose as on one GPU; the kernel still knows that it runs on a CPU."""
  for name, value in {'platform': lambda: 'gpu', 'memory_of_single_gpu': lambda: 8e10}.items():
    monkeypatch.setattr(cached_attention, name, value)
  monkeypatch.setattr(cached_attention, 'why_no_kernel_for', lambda kind: '')
  for name, value in {'_KERNEL_FROM': 1, '_FEWEST_GPU_DIMS': 1}.items():
    monkeypatch.setattr(cached_attention, name, value)


def build(**fields):
  heads = {'num_heads': 4, 'num_kv_heads': 2, 'dims_per_head': 4}
  return Config(MultiHeadAttention, input_dims=D, causal=True, **heads | fields).instantiate()


def drawn(*shape, dtype=jnp.float32, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def densely(query, key, value, seen, formula, sinks):
  """With all logits at once; 0 for a row that sees no slot."""
  out = dot_product_attention(
    query[:, None],
    *(jnp.swapaxes(x, 1, 2) for x in (key, value)),
    ArrayMask(seen[:, None, None]),
    spec=AttentionSpec(formula.scale, formula.soft_cap, 'dense'),
    sinks=sinks,
  )
  return jnp.where(jnp.any(seen, axis=1)[:, None, None], out[:, 0], 0)


# Rows, heads, kv heads, slots, dims, dtype, soft cap, whether there are sinks, programs.
CASES = {
  'one row': (1, 2, 2, 200, 16, 'float32', None, False, 512),
  'grouped heads, sinks': (3, 6, 2, 64, 32, 'float32', None, True, 512),
  'one kv head, a soft cap': (2, 17, 1, 130, 16, 'float32', 3.0, False, 3),
  'one slot': (2, 2, 1, 1, 16, 'float32', None, True, 512),
  'bfloat16, several steps of a program': (2, 4, 2, 301, 16, 'bfloat16', 2.0, True, 4),
}


@pytest.mark.parametrize('rows, N, K, slots, dims, dtype, cap, has_sinks, programs', CASES.values(), ids=CASES)
def test_the_kernel_is_dense_attention(rows, N, K, slots, dims, dtype, cap, has_sinks, programs, monkeypatch):
  """The first row sees some slots, the second only early ones, and the last none if there are three."""
  monkeypatch.setattr('praxis_lite.layers.gpu_decode_kernel._PROGRAMS', programs)
  query, key, value = drawn(rows, N, dims, dtype=dtype), *drawn(2, rows, K, slots, dims, dtype=dtype, seed=1)
  seen = np.random.default_rng(2).random((rows, slots)) < 0.5
  seen[:, 0], seen[1:, slots // 3 + 1 :], seen[2:] = True, False, False
  formula, sinks = Formula(dims**-0.5, cap), drawn(N, seed=3) if has_sinks else None
  run = jax.jit(functools.partial(attend_one_token, formula=formula, sinks=sinks))
  found, wanted = run(query, key, value, jnp.asarray(seen)), densely(query, key, value, seen, formula, sinks)
  assert found.dtype == wanted.dtype == dtype
  tolerance = 1e-5 if dtype == 'float32' else 0.02
  np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, wanted)), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('cap, has_sinks', [(None, False), (2.0, True)])
def test_gradients_are_those_of_dense_attention(cap, has_sinks):
  query, key, value = drawn(3, 4, 16), *drawn(2, 3, 2, 9, 16, seed=1)
  seen, sinks = jnp.arange(9) < jnp.asarray([[9], [4], [0]]), drawn(4, seed=3) if has_sinks else None

  def gradients(attend):
    of = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
    return jax.grad(lambda q, k, v, s: jnp.sum(jnp.sin(attend(q, k, v, seen, Formula(0.3, cap), s))), of)(
      query, key, value, sinks
    )

  for found, wanted in zip(gradients(attend_one_token), gradients(densely), strict=True):
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def steps_with_kernels(layer, tokens=1):
  """The number of kernels in a step of some tokens."""
  variables = drawn_variables(layer.abstract_init())
  state = layer.apply(variables, B, PROMPT + STEPS, method='init_decode_state')[1].decode_state
  pos = np.tile(np.arange(tokens, dtype=np.int32), (B, 1))

  def step(x):
    return layer.apply(variables, x, pos, decode_state=state, method='extend_step')[0]

  return str(jax.make_jaxpr(step)(inputs()[:, :tokens])).count('pallas_call')


@pytest.mark.parametrize(
  'fields', [{'cache_page_size': 4, 'logit_soft_cap': 2.0, 'scale': 0.3}, {'sliding_window': 6, 'use_sinks': True}]
)
def test_decoding_by_the_kernel_equals_one_pass_of_rows_of_different_lengths(fields, on_gpu):
  layer = build(**fields)
  assert (steps_with_kernels(layer), steps_with_kernels(layer, tokens=2)) == (1, 0)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  assert (LENGTHS < PROMPT).any()
  np.testing.assert_allclose(decoded(layer, variables, x)[0], expected(layer, variables, x), atol=5e-6)


@pytest.mark.parametrize(
  'fields, reason',
  [
    ({}, ''),
    ({'cache_dtype': 'int8'}, 'takes queries and a cache in bfloat16 or in float32 on GPUs'),
    ({'fprop_dtype': jnp.float16}, 'takes queries and a cache in bfloat16 or in float32 on GPUs'),
    ({'cache_dtype': 'bfloat16'}, 'takes queries and a cache in bfloat16 or in float32 on GPUs'),
    ({'dims_per_head': 6}, 'takes heads whose dims are a power of 2, of at least 1, on GPUs, not 6'),
    ({'relative_bias_tpl': Config(RelativeBias, num_buckets=8, max_distance=8)}, 'adds no bias to logits on GPUs'),
    ({'implementation': 'dense'}, "is chosen by 'auto' and 'splash', and .*implementation is 'dense'"),
  ],
)
def test_the_reason_for_another_way_is_said(fields, reason, on_gpu):
  layer = build(**fields)
  obstacle = layer._cached_attention().kernel_obstacle(layer.fprop_dtype, 17, layer.dims_per_head)
  assert re.fullmatch(reason, obstacle)
  assert steps_with_kernels(layer) == (not reason)


def test_an_exported_step_of_any_number_of_rows_is_in_plain_jax(on_gpu):
  layer = build()
  variables = drawn_variables(layer.abstract_init())

  def step(x):
    state = layer.apply(variables, x.shape[0], 17, method='init_decode_state')[1].decode_state
    pos = jnp.zeros(x.shape[:2], jnp.int32)
    return layer.apply(variables, x, pos, decode_state=state, method='extend_step')[0]

  rows = jax.export.symbolic_shape('rows')
  exported = jax.export.export(jax.jit(step))(jax.ShapeDtypeStruct((*rows, 1, D), jnp.float32))
  x = inputs()[:, :1]
  np.testing.assert_allclose(exported.call(x), step(x), atol=1e-6)


def test_several_gpus_and_unknown_ones_have_no_kernel(on_gpu, monkeypatch):
  monkeypatch.setattr(cached_attention, 'memory_of_single_gpu', lambda: 0.0)
  layer = build()
  obstacle = layer._cached_attention().kernel_obstacle(layer.fprop_dtype, 17, 4)
  assert obstacle == 'is for a single GPU that is known'
  monkeypatch.setattr('praxis_lite.layers.attention.platform', lambda: 'gpu')
  (line,) = describe_implementations(layer, 17, packed=False)
  assert line.endswith('decoding: in plain JAX, because its kernel is for a single GPU that is known')


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
@pytest.mark.parametrize('dtype, dims', [('bfloat16', 128), ('float32', 64), ('bfloat16', 256)])
def test_it_compiles_for_an_h100_without_copies_of_the_cache(dtype, dims):
  mesh = jax.sharding.Mesh(np.array(devices_of(parse_topology('h100:1'))), ('a',))
  at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shapes = (1, 16, dims), (1, 8, 1536, dims), (1, 8, 1536, dims), (1, 1536)
  arrays = [jax.ShapeDtypeStruct(x, of, sharding=at) for x, of in zip(shapes, (dtype, dtype, dtype, bool))]
  attend = functools.partial(attend_one_token, formula=Formula(dims**-0.5))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = jax.jit(attend).trace(*arrays).lower()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'Unsupported .version' not in str(error):
      raise
    pytest.skip(f'the assembler is older than triton: {str(error).splitlines()[0]}')
  assert compiled.as_text().count('__gpu$xla.gpu.triton') == 1
  assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
