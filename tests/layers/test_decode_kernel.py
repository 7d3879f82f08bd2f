"""The kernel that reads a cache for a single token is dense attention; which caches it takes, and what TPUs compile."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import LENGTHS, D, decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.instruments.plan.compilers import devices_of, missing_compiler
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import AttentionSpec, MultiHeadAttention, RelativeBias, cached_attention, dot_product_attention
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.decode_kernel import attend_by_kernel
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.masks import ArrayMask, Causal
from praxis_lite.sharding import GuardedJit

WHY_NOT = missing_compiler(parse_topology('v5e:2x2'))


@pytest.fixture
def on_tpu(monkeypatch):
  """Caches of any size choose as on a TPU; the kernel itself still knows that it runs on a CPU."""
  monkeypatch.setattr(cached_attention, 'platform', lambda: 'tpu')
  monkeypatch.setattr(cached_attention, '_KERNEL_FROM', 1)


def drawn(*shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), dtype)


HEADS, SLOTS = ((4, 4), (6, 2), (3, 1)), (1, 128, 301)
KINDS = (('float32', None, True), ('float32', 2.0, False), ('bfloat16', None, False))


def cases():
  """All of them; a third, with each pair of values once, are quick."""
  for (i, heads), (j, slots), (k, kind) in itertools.product(*map(enumerate, (HEADS, SLOTS, KINDS))):
    yield pytest.param(*heads, slots, *kind, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)


@pytest.mark.parametrize('N, K, slots, dtype, soft_cap, has_sinks', cases())
def test_the_kernel_is_dense_attention(N, K, slots, dtype, soft_cap, has_sinks, monkeypatch):
  monkeypatch.setattr('praxis_lite.layers.decode_kernel._MOST_SLOTS', 128)  # 301 slots are pages with a part of one.
  query = drawn(3, N, 8, dtype=dtype)
  key, value = drawn(2, 3, K, slots, 8, dtype=dtype), drawn(2, 3, K, slots, 8, dtype=dtype)[::-1]
  seen = np.random.default_rng(0).random((3, slots)) < 0.4
  seen[:, 0], seen[1, : slots // 2], seen[1, -1], sinks = True, False, True, drawn(N) if has_sinks else None
  run = jax.jit(attend_by_kernel, static_argnames='formula')
  found = run(query, key, value, jnp.asarray(seen), 1, formula=Formula(0.7, soft_cap), sinks=sinks)
  dense = dot_product_attention(
    query[:, None],
    *(jnp.swapaxes(x[1], 1, 2) for x in (key, value)),
    ArrayMask(jnp.asarray(seen)[:, None, None]),
    spec=AttentionSpec(0.7, soft_cap, 'dense'),
    sinks=sinks,
  )[:, 0]
  assert found.dtype == dense.dtype == dtype
  tolerance = 1e-5 if dtype == 'float32' else 0.02
  np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, dense)), atol=tolerance, rtol=tolerance)


def test_a_row_that_sees_no_slot_has_zeros():
  seen = jnp.asarray(np.repeat([[False], [True]], 5, axis=1))
  out = attend_by_kernel(drawn(2, 2, 4), drawn(1, 2, 1, 5, 4), drawn(1, 2, 1, 5, 4), seen, formula=Formula(1.0))
  assert not out[0].any() and out[1].all()


def gradients_of_sum(attend, query, key, value, sinks):
  """Gradients of a weighted sum of the results, as a model's loss would have them."""
  weights = drawn(*query.shape[:2], value.shape[-1], 1)[..., 0]
  return jax.jit(jax.grad(lambda *args: jnp.sum(weights * attend(*args)), argnums=(0, 1, 2, 3)))(
    query, key, value, sinks
  )


@pytest.mark.slow_cases
@pytest.mark.parametrize('shape', [(1, 2, 3), (2, 2, 1), ()])
def test_gradients_are_those_of_dense_attention(shape):
  """One row sees no slot, and slots of another layer have no gradient."""
  split = RowSplit(('data',), ('mdl',)) if shape else None
  query, key, value = drawn(2, 6, 4), drawn(2, 2, 3, 9, 4), drawn(2, 2, 3, 9, 4)[::-1]
  seen = jnp.asarray(np.random.default_rng(1).random((2, 9)) < 0.6).at[1].set(False)

  def by_kernel(query, key, value, sinks):
    return attend_by_kernel(query, key, value, seen, 1, formula=Formula(0.7, 2.0), sinks=sinks, split=split)

  def densely(query, key, value, sinks):
    cache = (jnp.swapaxes(x[1], 1, 2) for x in (key, value))
    mask, spec = ArrayMask(seen[:, None, None]), AttentionSpec(0.7, 2.0, 'dense')
    dense = dot_product_attention(query[:, None], *cache, mask, spec=spec, sinks=sinks)[:, 0]
    return jnp.where(jnp.any(seen, axis=1)[:, None, None], dense, 0)

  wanted = gradients_of_sum(densely, query, key, value, drawn(6))
  if shape:
    mesh = jax.make_mesh(shape, ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
      found = gradients_of_sum(by_kernel, query, key, value, drawn(6))
  else:
    found = gradients_of_sum(by_kernel, query, key, value, drawn(6))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), found, wanted)


def build(**fields):
  config = Config(MultiHeadAttention, input_dims=D, num_heads=4, num_kv_heads=2, dims_per_head=4, causal=True)
  return config.set(**fields).instantiate()


def count_kernels(layer):
  """The number of kernels in a step of one token."""
  variables = drawn_variables(layer.abstract_init())
  state = layer.apply(variables, 2, 17, method='init_decode_state')[1].decode_state
  pos = np.zeros((2, 1), np.int32)

  def step(x):
    return layer.apply(variables, x, pos, decode_state=state, method='extend_step')[0]

  return str(jax.make_jaxpr(step)(inputs()[:, :1])).count('pallas_call')


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields',
  [
    {'cache_page_size': 4, 'logit_soft_cap': 2.0, 'scale': 0.3},
    {'sliding_window': 6, 'use_sinks': True},
    {'local_chunk': 5, 'cache_page_size': 4, 'num_kv_heads': 1},
  ],
)
def test_decoding_by_the_kernel_equals_one_pass_of_rows_of_different_lengths(fields, on_tpu):
  layer = build(**fields)
  assert count_kernels(layer) == 1
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  np.testing.assert_allclose(decoded(layer, variables, x)[0], expected(layer, variables, x), atol=5e-6)


def test_decoding_has_the_gradients_that_it_has_without_the_kernel(on_tpu, monkeypatch):
  layer = build(use_sinks=True)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  state = layer.apply(variables, 2, 17, method='init_decode_state')[1].decode_state

  def differentiated():
    def loss(variables):
      decode_state, total = state, 0.0
      for t in range(2):
        token, pos = x[:, t : t + 1], np.full((2, 1), t, np.int32)
        y, side = layer.apply(variables, token, pos, decode_state=decode_state, method='extend_step')
        decode_state, total = side.decode_state, total + jnp.sum(y**2)
      return total

    return 'pallas_call' in str(jax.make_jaxpr(loss)(variables)), jax.jit(jax.grad(loss))(variables)

  has_kernel, found = differentiated()
  monkeypatch.setattr(cached_attention, 'platform', lambda: 'cpu')
  has_none, wanted = differentiated()
  assert (has_kernel, has_none) == (True, False)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6), found, wanted)


def test_a_placed_cache_in_a_stack_is_read_where_it_is(on_tpu):
  layer = build(cache_page_size=4)
  cached = layer._cached_attention()
  own = cached.empty(2, 17, 2, 4)._replace(slot=jnp.zeros(2, jnp.int32))
  stack = jax.tree.map(lambda x: jnp.stack([x, x + 1, x]), own)._replace(turn=jnp.asarray(2))
  heads = drawn(2, 13, 4, 4), drawn(2, 13, 2, 4), drawn(2, 13, 2, 4)[::-1]
  pos = jnp.where(np.arange(13) < LENGTHS[:, None], np.arange(13), -1)
  token, at = tuple(x[:, :1] + 1 for x in heads), jnp.asarray(LENGTHS)[:, None]
  results = []
  for cache in (own, stack):
    cache = jax.jit(lambda cache: cached.extend(*heads, pos, cache, Causal())[1])(cache)
    results.append(jax.jit(lambda cache: cached.extend(*token, at, cache, Causal())[0])(cache))
  dense = [
    jnp.concatenate([x[:, :7], jnp.where(pos[:, 7:, None, None] >= 0, x[:, 7:], 0), y], axis=1)
    for x, y in zip(heads[1:], token[1:])
  ]
  mask = jnp.concatenate([pos >= 0, jnp.ones((2, 1), bool)], axis=1)[:, None, None]
  wanted = dot_product_attention(token[0], *dense, ArrayMask(mask), spec=AttentionSpec(None, None, 'dense'))
  for found in results:
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize(
  'fields, reason',
  [
    ({}, ''),
    ({'cache_dtype': 'int8'}, 'takes bfloat16 and float32, not int8'),
    ({'fprop_dtype': jnp.float16}, 'takes bfloat16 and float32, not float16'),
    ({'relative_bias_tpl': Config(RelativeBias, num_buckets=8, max_distance=8)}, 'has no bias'),
    ({'implementation': 'dense'}, "is chosen by 'auto' and 'splash', and .*implementation is 'dense'"),
  ],
)
def test_the_reason_for_another_way_is_said(fields, reason, on_tpu):
  layer = build(**fields)
  obstacle = layer._cached_attention().kernel_obstacle(layer.fprop_dtype, 17, 2)
  assert bool(re.search(reason, obstacle)) and bool(obstacle) == bool(reason)
  assert count_kernels(layer) == (not reason)


def test_other_platforms_and_small_caches_have_no_kernel(monkeypatch):
  cached = build()._cached_attention()
  assert cached.kernel_obstacle(jnp.float32, 4096) == "is for TPUs, and the platform is 'cpu'"
  monkeypatch.setattr(cached_attention, 'platform', lambda: 'tpu')
  assert cached.kernel_obstacle(jnp.float32, 255) == 'is for caches of at least 256 slots, not 255'
  assert not cached.kernel_obstacle(jnp.float32, 256)


def on_mesh(blnh, blkh, shape=(1, 2, 3)):
  names = ('replica', 'data', 'mdl')
  mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 3)
  config = Config(MultiHeadAttention, input_dims=D, num_heads=6, num_kv_heads=3, causal=True, mesh_axis_names=names)
  config.set(dims_per_head=5, cache_page_size=4).activation_split_dims_mapping.set(blnh=blnh, blkh=blkh)
  return config, mesh


BLNH = ('data', None, 'mdl', None)


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(1, 2, 3), (2, 2, 1)], ids=str)
def test_a_kernel_mapped_over_rows_and_heads_equals_one_device(shape, on_tpu):
  config, mesh = on_mesh(BLNH, BLNH, shape)
  layer = config.instantiate()
  variables, x = drawn_variables(layer.abstract_init()), inputs()

  def wrap(fn):
    def with_mesh(*args):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return fn(*args)

    return lambda *args: GuardedJit(with_mesh)(*jax.device_put(args, jax.NamedSharding(mesh, jax.P())))

  np.testing.assert_allclose(decoded(layer, variables, x, wrap)[0], expected(layer, variables, x), atol=5e-6)


@pytest.mark.parametrize(
  'blnh, blkh, rows, reason',
  [
    (BLNH, BLNH, 2, ''),
    (BLNH, BLNH, 3, 'needs rows that divide evenly, not 3 over 2 devices'),
    (None, None, 2, 'needs .*blnh, which says how the mesh splits rows and heads'),
    (BLNH, None, 2, 'needs .*blkh, which says how the mesh splits the cache'),
    (BLNH, (None, 'data', 'mdl', None), 2, 'needs .*blkh to split rows and heads as blnh does'),
    (('mdl', None, 'data', None), ('mdl', None, 'data', None), 3, 'needs kv heads that divide evenly, not 3 over 2'),
  ],
)
def test_a_cache_that_would_have_to_move_is_read_in_another_way(blnh, blkh, rows, reason, on_tpu):
  config, mesh = on_mesh(blnh, blkh)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    obstacle = config.instantiate()._cached_attention().kernel_obstacle(jnp.float32, 17, rows)
  np.testing.assert_equal(bool(obstacle), bool(reason))
  assert re.match(reason, obstacle)


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize('topology', ['v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize('dtype, S, N, K, H', [('bfloat16', 4096, 32, 8, 128), ('float32', 1000, 8, 8, 64)])
def test_tpus_compile_the_kernel_without_a_copy_of_the_cache(topology, dtype, S, N, K, H, monkeypatch):
  jax.devices()
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  mesh = Mesh(np.array(devices_of(parse_topology(topology))[:4]).reshape(2, 2), ('data', 'mdl'))

  def placed(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  def step(query, key, value, seen, sinks):
    split = RowSplit(('data',), ('mdl',))
    return attend_by_kernel(query, key, value, seen, 1, formula=Formula(0.1, 30.0), sinks=sinks, split=split)

  cache = placed((2, 4, K, S, H), dtype, None, 'data', 'mdl')
  seen, sinks = placed((4, S), bool, 'data'), placed((N,), 'float32', 'mdl')
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = jax.jit(step).lower(placed((4, N, H), dtype, 'data', 'mdl'), cache, cache, seen, sinks).compile()
  assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
  of_cache = cache.size * cache.dtype.itemsize // 4
  assert program.memory_analysis().temp_size_in_bytes < of_cache / 10


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_layer_for_tpus_says_that_it_decodes_by_the_kernel(monkeypatch):
  jax.devices()
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  mesh = Mesh(np.array(devices_of(parse_topology('v5e:2x2'))[:1]), ('data',))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    assert describe_implementations(build(), 1024, False)[0].endswith('; decoding: a kernel for each token')
    (line,) = describe_implementations(build(cache_dtype='int8'), 1024, False)
  assert line.endswith('; decoding: in plain JAX, because its kernel takes bfloat16 and float32, not int8')
