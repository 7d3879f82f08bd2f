"""Blockwise attention is dense attention, in values and gradients, and does not do what a mask makes useless."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, arguments, attend
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.programs import called_program, strip_constants
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers import MultiHeadAttention, RelativeBias, blocks
from praxis_lite.layers.attention_spec import AttentionSpec
from praxis_lite.layers.block_arrays import block_indices, key_blocks, mask_blocks, query_blocks
from praxis_lite.layers.block_pairs import needed_pairs
from praxis_lite.layers.blockwise import blockwise_attention
from praxis_lite.layers.dot_product import AttentionCase, choose_attention, dot_product_attention
from praxis_lite.layers.masks import Causal, Segments, SlidingWindow, Visibility
from praxis_lite.sharding import GuardedJit


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', CASES)
def test_blockwise_is_dense(name):
  floats, others, gradient = arguments(CASES[name])

  @jax.jit
  def both(floats, gradient):
    found = []
    for fields in ({'implementation': 'dense'}, {'implementation': 'blockwise', 'block_size': 8}):
      out, pull = jax.vjp(lambda f, fields=fields: attend(f, others, **fields), floats)
      found.append((out, pull(gradient)[0]))
    return found

  dense, blockwise = both(floats, gradient)
  assert dense[0].std() > 0.01
  jax.tree.map(lambda d, b: np.testing.assert_allclose(b, d, atol=1e-5, rtol=1e-5), dense, blockwise)


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', [name for name, case in CASES.items() if case.sinks])
def test_sinks_in_bfloat16_are_those_of_float32_but_for_rounding(name):
  floats, others, gradient = arguments(CASES[name])

  @functools.partial(jax.jit, static_argnums=(2, 3))
  def results(floats, gradient, implementation, dtype):
    def run(floats):
      heads = {name: x.astype(dtype) for name, x in floats.items()}
      return attend(heads, others, implementation=implementation, block_size=None if implementation == 'dense' else 8)

    out, pull = jax.vjp(run, floats)
    return out, pull(gradient.astype(dtype))[0]

  expected = results(floats, gradient, 'dense', jnp.float32)
  for implementation in ('dense', 'blockwise'):
    found = results(floats, gradient, implementation, jnp.bfloat16)
    assert found[0].dtype == jnp.bfloat16
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=0.05 * abs(e).max()), found, expected)


def test_a_bias_of_numpy_is_an_array_like_that_of_jax():
  x, bias = jax.ShapeDtypeStruct((1, 2048, 1, 4), jnp.float32), np.broadcast_to(np.float32(0), (1, 1, 2048, 2048))
  assert jax.eval_shape(lambda x: dot_product_attention(x, x, x, bias=bias), x).shape == x.shape


def pairs(mask, length, size=4, segments=None):
  """The pairs of blocks that are computed, in order."""
  x = jnp.zeros((1, length, 1, 1))
  at = block_indices(length, size)
  if segments is not None:
    ids = jnp.array([segments], jnp.int32)
    mask = mask & Segments(ids, ids)
  mask = mask_blocks(mask, size, size)
  found = needed_pairs(mask, query_blocks(x, at, 1), key_blocks(x, x, at))
  table, flags = np.asarray(found.table)[: int(found.used)], ... if found.flags is None else np.asarray(found.flags)
  return [tuple(pair) for pair in table[flags].tolist()]


def test_only_pairs_of_blocks_that_the_mask_leaves_are_computed():
  assert pairs(Visibility(causal=True), 14) == [(i, j) for i in range(4) for j in range(i + 1)]
  # A window of 5 reaches 4 back: of blocks of 4, into the one before.
  assert pairs(Visibility(causal=True, window=5), 16) == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)]
  assert pairs(Visibility(window=5), 12) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]
  assert len(pairs(Visibility(causal=True, window=5), 4 * 100)) == 2 * 100 - 1
  prefix = Visibility(causal=True, prefix_B=jnp.array([6]))
  assert pairs(prefix, 12) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
  packed = pairs(Visibility(causal=True), 12, segments=[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3])
  assert packed == [(0, 0), (1, 1), (2, 1), (2, 2)]


def test_work_of_a_window_is_linear_and_of_a_causal_pass_half():
  def rounds(length, **rules):
    """How often the loop runs, which the program says where the mask is known."""
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    mask, spec = Visibility(**rules), AttentionSpec(block_size=16)
    program = jax.make_jaxpr(lambda q: blockwise_attention(q, q, q, mask, spec=spec))(x)
    attend = strip_constants(called_program(program.eqns[0]))
    lengths = [e.params['length'] for e in attend.eqns if e.primitive.name == 'scan']
    return lengths[0]

  assert rounds(256) == 16 * 16
  assert rounds(256, causal=True) == 16 * 17 // 2
  assert rounds(512, causal=True, window=32) / rounds(256, causal=True, window=32) < 2.1


def gradient_memory(length, implementation):
  x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

  def loss(q, k, v):
    return jnp.sum(dot_product_attention(q, k, v, causal=True, implementation=implementation, block_size=256) ** 2)

  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_length_and_a_fraction_of_dense():
  """Forward and backward, from the compiler's analysis."""
  at = {length: gradient_memory(length, 'blockwise') for length in (4096, 16384, 65536)}
  assert 3.5 < at[65536] / at[16384] < 4.1
  assert at[65536] / at[4096] < 17
  assert at[16384] < gradient_memory(16384, 'dense') / 20


def test_a_scan_over_layers_keeps_no_masks():
  """JAX would move the masks of all 10 pairs of blocks out of the scan, where nothing but their places is known."""
  x = jax.ShapeDtypeStruct((2, 64, 2, 8), jnp.float32)

  def loss(x):
    def layer(x, _):
      return blockwise_attention(x, x, x, Causal(), spec=AttentionSpec(block_size=16)), None

    return jnp.sum(jax.lax.scan(layer, x, length=3)[0])

  program = jax.jit(jax.grad(loss)).lower(x).as_text()
  assert 'tensor<10x2xi32>' in program, 'the table of pairs'
  assert not re.search(r'tensor<10x[0-9x]*16x16xi1>', program)


def test_a_query_that_sees_no_key_is_finite_with_finite_gradients():
  """Its segment has no keys; nothing else changes."""
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.standard_normal((1, n, 2, 4)), jnp.float32) for n in (9, 7, 7))
  ids, kv_ids = jnp.array([[1, 1, 5, 1, 2, 2, 2, 2, 2]]), jnp.array([[1, 1, 1, 2, 2, 2, 2]])

  def loss(q, k, v, implementation):
    out = dot_product_attention(q, k, v, segment_ids=ids, kv_segment_ids=kv_ids, implementation=implementation)
    return jnp.sum(out[:, 3:] ** 2) + 0.5 * jnp.sum(out[:, :2] ** 2), out

  @jax.jit
  def both(*heads):
    gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    return [gradients(*heads, implementation) for implementation in ('blockwise', 'dense')]

  results = both(q, k, v)
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(results))
  assert (results[0][0][1][:, 2] == 0).all()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), results[0][1], results[1][1])


def test_dropout_drops_its_share_and_keeps_the_mean():
  seeds = jax.random.bits(jax.random.key(0), (64, 8), jnp.uint32)
  factors = np.asarray(blocks.dropout_factors(seeds, jnp.arange(256), 0.3))
  assert np.unique(factors).tolist() == pytest.approx([0.0, 1 / 0.7])
  assert factors.mean() == pytest.approx(1.0, abs=0.01)
  # No row, head or key is like another.
  rows = factors.reshape(512, 256)
  assert abs(rows.mean(axis=1) - 1).max() < 0.2 and abs(rows.mean(axis=0) - 1).max() < 0.15
  for x in (rows, rows.T):
    assert abs(np.corrcoef(x) - np.eye(len(x))).max() < 0.35


@pytest.mark.slow
def test_batch_and_heads_that_are_split_stay_where_they_are():
  """No collective, for heads and rows that divide and that do not; and values and gradients of one device."""
  mesh = jax.make_mesh((2, 2, 2), ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
  spec = PartitionSpec(('replica', 'data'), None, 'mdl', None)

  def gradients(q, k, v):
    def loss(q, k, v):
      q, k, v = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) if on_mesh else x for x in (q, k, v))
      mask, small = Causal() & SlidingWindow(9), AttentionSpec(block_size=8)
      return jnp.sum(blockwise_attention(q, k, v, mask, spec=small) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

  for rows, num_heads, kv_heads in ((8, 4, 2), (3, 3, 3)):
    shapes = ((rows, 20, n, 4) for n in (num_heads, kv_heads, kv_heads))
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    on_mesh = False
    expected = jax.jit(gradients)(*arrays)
    on_mesh = True
    # Arguments of sizes that do not divide are stored whole, and so are results: these are gathered, once each.
    even = rows % 4 == 0
    stored = NamedSharding(mesh, spec if even else PartitionSpec())
    jitted = GuardedJit(gradients, out_shardings=stored)
    placed = jax.device_put(arrays, stored)
    found = {kind: c.count for kind, c in collectives(jitted.lower(*placed).compile()).items() if c.count}
    assert found == {} if even else set(found) <= {'all-gather', 'all-reduce'} and sum(found.values()) <= 6, found
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), jitted(*placed), expected)


CASE = AttentionCase('gpu', jnp.dtype('bfloat16'), 8192, 8192, 128, causal=True)


@pytest.mark.parametrize(
  'change, name, reason',
  [
    ({}, 'cudnn', 'the fused kernel takes this case'),
    ({'platform': 'cpu'}, 'blockwise', 'the logits of 8,192 queries x 8,192 keys are too large'),
    ({'query_len': 512, 'key_len': 512}, 'cudnn', '512 queries x 512 keys, and the fused kernel'),
    ({'query_len': 512, 'key_len': 512, 'platform': 'cpu'}, 'dense', 'the logits of 512 queries x 512 keys are small'),
    ({'query_len': 1023, 'key_len': 1024, 'platform': 'cpu'}, 'dense', 'are small'),
    ({'query_len': 1024, 'key_len': 1024, 'platform': 'cpu'}, 'blockwise', 'are too large'),
    ({'query_len': 1024, 'key_len': 1024, 'soft_cap': True}, 'dense', 'are small'),
    ({'query_len': 1, 'key_len': 1024}, 'dense', 'the logits of 1 queries x 1,024 keys are small'),
    ({'arrays': True}, 'dense', 'as an array'),
    ({'soft_cap': True}, 'blockwise', 'has no logit_soft_cap'),
    ({'sinks': True}, 'blockwise', "cuDNN's kernel has no sinks"),
    ({'dtype': jnp.dtype('float32')}, 'blockwise', 'not in float32'),
    ({'by_rows': True}, 'cudnn', 'the fused kernel takes this case'),
    ({'by_rows': True, 'query_len': 8191}, 'blockwise', 'takes a mask or a bias only for even lengths'),
    ({'by_rows': True, 'query_len': 16384}, 'blockwise', 'would need the mask or the bias as an array'),
    ({'logit_bias': True}, 'blockwise', 'would need the mask or the bias as an array'),
    ({'split': True, 'query_len': 64}, 'blockwise', 'split over a mesh axis'),
    ({'partly_mapped': True}, 'blockwise', 'inside of a shard_map over other axes'),
  ],
)
def test_auto_says_what_it_chooses_and_why(monkeypatch, change, name, reason):
  monkeypatch.setattr('praxis_lite.layers.tokamax_attention.is_installed', lambda: False)
  choice = choose_attention('auto', CASE._replace(**change))
  assert choice.name == name and reason in choice.reason


@pytest.mark.parametrize(
  'implementation, change, message',
  [
    ('cudnn', {'platform': 'cpu'}, "lm.implementation: 'cudnn' needs an NVIDIA GPU, and the platform is 'cpu'"),
    ('cudnn', {'soft_cap': True}, 'has no logit_soft_cap'),
    ('cudnn', {'dims_per_head': 20}, 'multiple of 8'),
    ('cudnn', {'causal': False, 'window': True}, 'sliding_window only with causal attention'),
    ('blockwise', {'arrays': True}, "lm.implementation: 'blockwise' makes the mask of a block from rules"),
    ('flash', {}, "lm.implementation: .*'blockwise'"),
  ],
)
def test_what_an_implementation_cannot_do_is_refused_by_name(implementation, change, message):
  with pytest.raises(ConfigError, match=message):
    choose_attention(implementation, CASE._replace(**change), 'lm.implementation')


@pytest.mark.slow
@pytest.mark.parametrize(
  'rows, sizes, skips', [(4, (2, 2, 2), True), (3, (2, 2, 2), False), (3, (1, 3, 2), True), (3, (1, 2, 3), False)]
)
def test_on_a_mesh_each_device_skips_by_the_segments_of_its_own_rows(rows, sizes, skips):
  """Rows and kv heads in `shard_map`; what does not divide is left to the compiler. Equal to one device."""
  mesh = jax.make_mesh(sizes, ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
  config = Config(MultiHeadAttention, input_dims=6, num_heads=4, num_kv_heads=2, dims_per_head=4, causal=True)
  config.set(implementation='blockwise', block_size=8, use_sinks=True, relative_bias_tpl=Config(RelativeBias))
  sharded = config.clone(mesh_axis_names=mesh.axis_names)
  blnh = (('replica', 'data'), None, 'mdl', None)
  sharded.activation_split_dims_mapping.set(blnh=blnh, blkh=blnh)
  layer = config.instantiate()
  variables = drawn_variables(layer.abstract_init())
  x = np.random.default_rng(1).standard_normal((rows, 20, 6)).astype(np.float32)
  ids = jnp.sort(jax.random.randint(jax.random.key(2), (rows, 20), 0, 4), axis=1).astype(jnp.int32)

  def gradients(layer):
    return jax.value_and_grad(lambda v, x, ids: jnp.sum(layer.apply(v, x, segment_ids=ids)[0] ** 2), argnums=(0, 1))

  def on_mesh(*args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return gradients(sharded.instantiate())(*args)

  jitted = GuardedJit(on_mesh)
  args = jax.device_put((variables, x, ids), NamedSharding(mesh, PartitionSpec()))
  assert ('conditional(' in jitted.lower(*args).compile().as_text()) == skips
  expected = jax.jit(gradients(layer))(variables, x, ids)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jitted(*args), expected)
