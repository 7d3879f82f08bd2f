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
from praxis_lite.layers import (
  AlibiBias,
  AttentionSpec,
  LatentAttention,
  MultiHeadAttention,
  RelativeAttention,
  RelativeBias,
  RotaryPositions,
  cached_attention,
  dot_product_attention,
)
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.decode_kernel import attend_by_kernel
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.kv_cache import KVCache, to_entries, to_slots
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


# N, K, and dims, of which multiples of 128 have other pages.
HEADS, SLOTS = ((4, 4, 8), (6, 2, 128), (3, 1, 12)), (1, 128, 301)
# Dtypes of queries and entries, tokens, soft cap, whether there are sinks, rows of a bias, whether there are values.
KINDS = (
  ('float32', 'float32', 1, None, True, None, True),
  ('float32', 'int8', 3, 2.0, False, 1, True),
  ('bfloat16', 'bfloat16', 1, None, False, 3, True),
  ('bfloat16', 'int8', 2, 3.0, True, None, False),
  ('float32', 'float8_e4m3fn', 2, None, True, 3, False),
)


def cases():
  """All of them; those that are quick have each value once."""
  for (i, heads), (j, slots), (k, kind) in itertools.product(*map(enumerate, (HEADS, SLOTS, KINDS))):
    yield pytest.param(*heads, slots, *kind, marks=() if (i, j) == (k % 3, (k + k // 3) % 3) else pytest.mark.slow)


def stacked_caches(layers, rows, K, slots, dims, dtype, has_values=True, turn=1):
  """The drawn caches of some layers, of which one has its turn."""
  key, value = drawn(layers, rows, slots, K, dims), drawn(layers, rows, slots, K, dims)[::-1]
  pos = jnp.zeros((layers, rows, slots), jnp.int32)
  own = jax.vmap(lambda *arrays: to_slots(to_entries(*arrays, dtype)))
  return own(key, value if has_values else None, pos)._replace(turn=jnp.int32(turn))


def densely(query, cache, seen, formula, bias=None, sinks=None):
  """Attention of tokens to a cache with all logits at once; 0 for a token that sees no slot."""
  out = dot_product_attention(
    query,
    *cache.unstack().read(query.dtype),
    ArrayMask(seen[:, None]),
    spec=AttentionSpec(formula.scale, formula.soft_cap, 'dense'),
    bias=bias,
    sinks=sinks,
  )
  return jnp.where(jnp.any(seen, axis=2)[..., None, None], out, 0)


@pytest.mark.parametrize('N, K, dims, slots, dtype, entries, T, soft_cap, has_sinks, bias_rows, has_values', cases())
def test_the_kernel_is_dense_attention(
  N, K, dims, slots, dtype, entries, T, soft_cap, has_sinks, bias_rows, has_values, monkeypatch
):
  monkeypatch.setattr('praxis_lite.layers.decode_kernel._MOST_SLOTS', 128)  # 301 slots are pages with a part of one.
  query, cache = drawn(3, T, N, dims, dtype=dtype), stacked_caches(2, 3, K, slots, dims, entries, has_values)
  seen = np.random.default_rng(0).random((3, T, slots)) < 0.4
  seen[:, :, 0], seen[1, :, : slots // 2], seen[1, :, -1], seen[2, 0] = True, False, True, False
  more = {
    'formula': Formula(dims**-0.5, soft_cap),
    'bias': None if bias_rows is None else drawn(bias_rows, N, T, slots),
    'sinks': drawn(N) if has_sinks else None,
  }
  run = jax.jit(attend_by_kernel, static_argnames='formula')
  found = run(query, cache, jnp.asarray(seen), **more)
  dense = densely(query, cache, seen, **more)
  assert found.dtype == dense.dtype == dtype
  tolerance = 1e-5 if dtype == 'float32' else 0.02
  np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, dense)), atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases
@pytest.mark.parametrize('K', [2, 1])
@pytest.mark.parametrize('shape', [(1, 2, 3), (2, 2, 1), ()])
def test_gradients_are_those_of_dense_attention(shape, K):
  """One token of one row sees no slot, and slots of another layer have no gradient. One head is copied, not split."""
  split = RowSplit(('data',), ('mdl',)) if shape else None
  if shape == (1, 2, 3):
    K = 3 if K == 2 else 1
  caches = stacked_caches(2, 2, K, 9, 4, 'float32')
  seen = jnp.asarray(np.random.default_rng(1).random((2, 2, 9)) < 0.6).at[1, 0].set(False)
  inputs = drawn(2, 2, 6, 4), caches.key, caches.value, drawn(2, 6, 2, 9), drawn(6)

  def gradients(attend, **more):
    """Gradients of a weighted sum of the results, as a model's loss would have them."""

    def loss(query, key, value, bias, sinks):
      out = attend(query, caches._replace(key=key, value=value), seen, Formula(0.7, 2.0), bias, sinks, **more)
      return jnp.sum(drawn(*out.shape, 1)[..., 0] * out)

    return jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*inputs)

  def by_kernel(query, cache, seen, formula, bias, sinks):
    return attend_by_kernel(query, cache, seen, formula=formula, bias=bias, sinks=sinks, split=split)

  wanted = gradients(densely)
  if shape:
    mesh = jax.make_mesh(shape, ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
      found = gradients(by_kernel)
  else:
    found = gradients(by_kernel)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), found, wanted)


def build(kind=MultiHeadAttention, **fields):
  config = Config(kind, input_dims=D, num_heads=4, dims_per_head=4, causal=True)
  if kind is MultiHeadAttention:
    config.num_kv_heads = 2
  return config.set(**fields).instantiate()


LATENT = {'kind': LatentAttention, 'latent_dims': 6, 'rotary_dims': 2, 'rotary_tpl': Config(RotaryPositions)}


def count_kernels(layer, tokens=1):
  """The number of kernels in a step of some tokens."""
  variables = drawn_variables(layer.abstract_init())
  state = layer.apply(variables, 2, 17, method='init_decode_state')[1].decode_state
  pos = np.tile(np.arange(tokens, dtype=np.int32), (2, 1))

  def step(x):
    return layer.apply(variables, x, pos, decode_state=state, method='extend_step')[0]

  return str(jax.make_jaxpr(step)(inputs()[:, :tokens])).count('pallas_call')


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields',
  [
    {'cache_page_size': 4, 'logit_soft_cap': 2.0, 'scale': 0.3},
    {'sliding_window': 6, 'use_sinks': True},
    {'local_chunk': 5, 'cache_page_size': 4, 'num_kv_heads': 1},
    {'relative_bias_tpl': Config(RelativeBias, num_buckets=8, max_distance=8), 'cache_page_size': 4},
    {'relative_bias_tpl': Config(AlibiBias)},
    LATENT | {'cache_page_size': 4},
    {'kind': RelativeAttention},
  ],
)
def test_decoding_by_the_kernel_equals_one_pass_of_rows_of_different_lengths(fields, on_tpu):
  layer = build(**fields)
  assert count_kernels(layer) == 1
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  np.testing.assert_allclose(decoded(layer, variables, x)[0], expected(layer, variables, x), atol=5e-6)


@pytest.mark.slow_cases
@pytest.mark.parametrize('fields', [{'use_sinks': True, 'sliding_window': 6}, {'cache_page_size': 4}, LATENT])
def test_caches_of_int8_decode_as_they_do_without_the_kernel(fields, on_tpu, monkeypatch):
  """Without the kernel, products of entries and scales are rounded to the dtype of the queries, here float32."""
  layer = build(cache_dtype='int8', **fields)
  assert count_kernels(layer) == 1
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  found, _ = decoded(layer, variables, x)
  monkeypatch.setattr(cached_attention, 'platform', lambda: 'cpu')
  np.testing.assert_allclose(found, decoded(layer, variables, x)[0], atol=5e-6)


def test_several_tokens_are_computed_by_the_kernel_if_they_are_few(on_tpu, monkeypatch):
  layer = build()
  assert count_kernels(layer, tokens=5) == count_kernels(build(cache_page_size=2), tokens=5) == 1
  assert count_kernels(build(sliding_window=6), tokens=5) == 0  # The first may see what the last one overwrites.
  monkeypatch.setattr(cached_attention, '_MOST_KERNEL_QUERIES', 9)
  assert (count_kernels(layer, tokens=4), count_kernels(layer, tokens=5)) == (1, 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize('entries, heads', [('int8', 8), ('float32', 3)])
def test_heads_that_do_not_fit_together_take_turns(entries, heads, monkeypatch):
  monkeypatch.setattr('praxis_lite.layers.decode_kernel._MOST_QUERIES', 3 * 8 * 2)
  cache, seen = (
    stacked_caches(1, 2, 3 * heads, 5, 8, entries, turn=0),
    jnp.ones((2, 2, 5), bool).at[1, 0, 2:].set(False),
  )
  query, more = drawn(2, 2, 3 * heads, 8), {'formula': Formula(0.3), 'sinks': drawn(3 * heads)}
  found = attend_by_kernel(query, cache, seen, **more)
  np.testing.assert_allclose(found, densely(query, cache, seen, **more), atol=1e-5)


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
    ({'cache_dtype': 'int8'}, ''),
    ({'cache_dtype': 'float16'}, 'takes bfloat16, float32, int8, float8_e4m3fn and float8_e5m2, not float16'),
    ({'fprop_dtype': jnp.float16}, 'takes bfloat16 and float32, not float16'),
    ({'implementation': 'dense'}, "is chosen by 'auto' and 'splash', and .*implementation is 'dense'"),
  ],
)
def test_the_reason_for_another_way_is_said(fields, reason, on_tpu):
  layer = build(**fields)
  obstacle = layer._cached_attention().kernel_obstacle(layer.fprop_dtype, 17, 8, 2)
  assert bool(re.search(reason, obstacle)) and bool(obstacle) == bool(reason)
  assert count_kernels(layer) == (not reason)


def test_other_platforms_and_small_caches_have_no_kernel(monkeypatch):
  cached = build()._cached_attention()
  assert cached.kernel_obstacle(jnp.float32, 4096, 8) == "is for TPUs and GPUs, and the platform is 'cpu'"
  monkeypatch.setattr(cached_attention, 'platform', lambda: 'tpu')
  assert cached.kernel_obstacle(jnp.float32, 255, 8) == 'is for caches of at least 256 slots, not 255'
  assert not cached.kernel_obstacle(jnp.float32, 256, 8)


def on_mesh(blnh, blkh, shape=(1, 2, 3), kind=MultiHeadAttention, **fields):
  names = ('replica', 'data', 'mdl')
  mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 3)
  config = Config(kind, input_dims=D, num_heads=6, causal=True, mesh_axis_names=names)
  if kind is MultiHeadAttention:
    config.num_kv_heads = 3
  config.set(dims_per_head=5, cache_page_size=4, **fields)
  config.activation_split_dims_mapping.set(blnh=blnh, blkh=blkh)
  return config, mesh


BLNH = ('data', None, 'mdl', None)


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape, fields',
  [
    ((1, 2, 3), {}),
    ((2, 2, 1), {}),
    ((2, 2, 2), {'num_kv_heads': 2, 'use_sinks': True}),
    ((2, 1, 3), {'relative_bias_tpl': Config(AlibiBias)}),
    ((1, 2, 3), LATENT),
    ((1, 2, 3), {'num_kv_heads': 1}),
  ],
  ids=str,
)
def test_a_kernel_mapped_over_rows_and_heads_equals_one_device(shape, fields, on_tpu):
  one_head = fields.get('num_kv_heads') == 1
  config, mesh = on_mesh(BLNH, ('data', None, None, None) if one_head else BLNH, shape, **fields)
  layer = config.instantiate()
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    assert count_kernels(layer) == 1
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
    (BLNH, ('data', None, None, None), 2, 'needs .*blkh to split rows and heads as blnh does'),
    (('mdl', None, 'data', None), ('mdl', None, 'data', None), 3, 'needs kv heads that divide evenly, not 3 over 2'),
  ],
)
def test_a_cache_that_would_have_to_move_is_read_in_another_way(blnh, blkh, rows, reason, on_tpu):
  config, mesh = on_mesh(blnh, blkh)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    obstacle = config.instantiate()._cached_attention().kernel_obstacle(jnp.float32, 17, 8, rows)
  np.testing.assert_equal(bool(obstacle), bool(reason))
  assert re.match(reason, obstacle)


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize('topology', ['v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize(
  'dtype, entries, T, S, N, K, H, bias_rows',
  [
    ('bfloat16', 'bfloat16', 1, 4096, 32, 8, 128, None),
    ('float32', 'float32', 1, 1000, 8, 8, 64, None),
    ('bfloat16', 'int8', 5, 4000, 16, 4, 128, 1),
    ('bfloat16', 'float8_e4m3fn', 1, 4096, 32, 8, 128, 4),
    ('bfloat16', 'int8', 1, 4096, 128, 1, 576, None),  # Keys that are the values.
  ],
)
def test_tpus_compile_the_kernel_without_a_copy_of_the_cache(
  topology, dtype, entries, T, S, N, K, H, bias_rows, monkeypatch
):
  jax.devices()
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  mesh = Mesh(np.array(devices_of(parse_topology(topology))[:4]).reshape(2, 2), ('data', 'mdl'))

  def placed(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  def step(query, cache, seen, bias, sinks):
    split = RowSplit(('data',), ('mdl',))
    return attend_by_kernel(query, cache, seen, formula=Formula(0.1, 30.0), bias=bias, sinks=sinks, split=split)

  places = None, 'data', 'mdl' if K > 1 else None
  key = placed((2, 4, K, S, H), entries, *places)
  scale = placed((2, 4, K, S), 'float32', *places) if entries == 'int8' else None
  value, value_scale = (key, scale) if K > 1 else (None, None)
  cache = KVCache(key, value, placed((2, 4, S), 'int32', None, 'data'), key_scale=scale, value_scale=value_scale)
  cache = cache._replace(turn=placed((), 'int32'))
  bias = (
    None if bias_rows is None else placed((bias_rows, N, T, S), 'float32', 'data' if bias_rows > 1 else None, 'mdl')
  )
  query, seen = placed((4, T, N, H), dtype, 'data', None, 'mdl'), placed((4, T, S), bool, 'data')
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = jax.jit(step).lower(query, cache, seen, bias, placed((N,), 'float32', 'mdl')).compile()
  assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
  of_cache = 2 * key.sharding.shard_shape(key.shape)[1] * K * S * H * key.dtype.itemsize // (2 if K > 1 else 1)
  assert program.memory_analysis().temp_size_in_bytes < of_cache / 10


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_layer_for_tpus_says_that_it_decodes_by_the_kernel(monkeypatch):
  jax.devices()
  monkeypatch.delenv('XLA_FLAGS', raising=False)
  mesh = Mesh(np.array(devices_of(parse_topology('v5e:2x2'))[:1]), ('data',))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    assert describe_implementations(build(), 1024, False)[0].endswith('; decoding: a kernel for each token')
    (line,) = describe_implementations(build(implementation='dense'), 1024, False)
  assert line.endswith("is chosen by 'auto' and 'splash', and MultiHeadAttention.implementation is 'dense'")
