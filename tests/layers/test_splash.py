"""Splash attention, whose kernels a CPU interprets, is dense attention; and what a program for TPUs has of it."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.devices import abstract_device
from praxis_lite.layers import (
  AttentionSpec,
  Band,
  Causal,
  FunctionMask,
  MultiHeadAttention,
  Paddings,
  Pipelined,
  Prefix,
  Segments,
  SlidingWindow,
  dot_product,
  dot_product_attention,
)
from praxis_lite.layers.implementations import describe_implementations
from praxis_lite.layers.splash import largest_splash_block, mask_obstacle
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.flops import count_flops

# The interpreted kernels are large programs, which run for milliseconds: most of a test is the time of the compiler.
FAST_COMPILE = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
IDS = jnp.asarray(np.repeat([[1, 2, 3, 0], [4, 4, 5, 5]], 50, axis=1), jnp.int32)
PADDINGS = jnp.arange(140) > jnp.array([[100], [139]])


def drawn(seed, *shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def results(implementation, mask, heads, gradient, soft_cap=None):
  """The output, and the gradients of queries, keys, values, and perhaps sinks."""
  spec = AttentionSpec(implementation=implementation, block_size=128, logit_soft_cap=soft_cap)

  def attend(query, key, value, sinks=None):
    return dot_product_attention(query, key, value, mask, spec=spec, sinks=sinks)

  def run(heads, gradient):
    out, pullback = jax.vjp(attend, *heads)
    return out, *pullback(gradient)

  return jax.jit(run, compiler_options=FAST_COMPILE)(heads, gradient)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'mask, sizes, others',
  [
    (Causal(), (200, 200, 2, 1, 64), {}),
    (SlidingWindow(50) & Segments(IDS, IDS), (200, 200, 2, 2, 96), {}),
    ((Causal() | Prefix(jnp.array([150, 7]))) & Segments(IDS, IDS), (200, 200, 2, 1, 128), {}),
    (Paddings(PADDINGS), (200, 140, 2, 1, 192), {'soft_cap': 3.0}),
    (Causal() & SlidingWindow(60), (200, 200, 2, 1, 64), {'dtype': jnp.bfloat16, 'sinks': True}),
    (Causal() & SlidingWindow(60) & Segments(IDS, IDS), (200, 200, 3, 1, 64), {'soft_cap': 3.0, 'sinks': True}),
  ],
  ids=[
    'causal',
    'two-sided window of packed rows',
    'prefix of packed rows',
    'padded keys, soft cap',
    'sinks, bfloat16',
    'sinks, window of packed rows, soft cap',
  ],
)
def test_values_and_gradients_are_those_of_dense_attention(mask, sizes, others):
  T, S, N, K, H = sizes
  dtype = others.pop('dtype', jnp.float32)
  heads = drawn(0, 2, T, N, H, dtype=dtype), *(drawn(i, 2, S, K, H, dtype=dtype) for i in (1, 2))
  if others.pop('sinks', False):
    heads += (jnp.arange(N, dtype=dtype),)
  gradient = drawn(3, 2, T, N, H, dtype=dtype)
  expected = results('dense', mask, heads, gradient, **others)
  found = results('splash', mask, heads, gradient, **others)
  tolerance = 1e-5 if dtype == jnp.float32 else 0.04
  for e, f in zip(expected, found):
    assert e.dtype == f.dtype
    np.testing.assert_allclose(np.asarray(f, np.float32), np.asarray(e, np.float32), atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- on a mesh


RING = {'context_axis': 'spare'}
ALL_TO_ALL = {**RING, 'context_method': 'all_to_all'}


def layer_results(implementation, mesh, has_prefixes=False, **fields):
  """The output of a layer, and its gradients: of all weights and of the input."""
  config = Config(MultiHeadAttention, input_dims=12, num_heads=6, num_kv_heads=2, dims_per_head=8, causal=True)
  config.activation_split_dims_mapping.set(blnh=('data', None, 'mdl', None))
  layer = config.set(mesh_axis_names=('data', 'spare', 'mdl'), block_size=128, **fields)
  layer = layer.set(implementation=implementation).instantiate()
  x = drawn(1, 2, 200, 12)
  inputs = {'segment_ids': IDS, 'prefix_lengths': jnp.array([150, 7]) if has_prefixes else None}

  def loss(variables, x):
    out = layer.apply(variables, x, **inputs)[0]
    return jnp.sum(out * jnp.cos(out)), out

  run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), compiler_options=FAST_COMPILE)
  args = drawn_variables(layer.abstract_init()), x
  if mesh is None:
    return run(*args)
  with jax.set_mesh(jax.make_mesh(mesh, ('data', 'spare', 'mdl'), axis_types=(AxisType.Auto,) * 3)):
    return run(*args)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'mesh, fields',
  [
    ((1, 2, 3), {'use_sinks': True}),
    pytest.param((2, 1, 3), {'use_sinks': True}, marks=pytest.mark.slow),
    ((1, 3, 1), {**ALL_TO_ALL, 'has_prefixes': True, 'logit_soft_cap': 2.0}),
    pytest.param((1, 2, 3), {**ALL_TO_ALL, 'sliding_window': 40, 'use_sinks': True}, marks=pytest.mark.slow),
    ((1, 3, 1), RING),
    pytest.param((1, 3, 1), {**RING, 'sliding_window': 40, 'use_sinks': True}, marks=pytest.mark.slow),
    pytest.param((2, 2, 1), {**RING, 'logit_soft_cap': 2.0, 'use_sinks': True}, marks=pytest.mark.slow),
    pytest.param((1, 2, 1), {**RING, 'has_prefixes': True, 'logit_soft_cap': 2.0}, marks=pytest.mark.slow),
  ],
  ids=[
    'heads over 3, which share two kv heads, and copies over 2',
    'rows and heads',
    'all-to-all, prefixes and soft cap',
    'all-to-all of heads over 3, and a window',
    'ring',
    'ring and a window',
    'rows, ring and soft cap',
    'ring, prefixes and soft cap',
  ],
)
def test_on_a_mesh_results_and_gradients_are_those_of_one_device(mesh, fields):
  same = {name: value for name, value in fields.items() if not name.startswith('context')}
  expected, found = layer_results('dense', None, **same), layer_results('splash', mesh, **fields)
  for e, f in zip(jax.tree.leaves(expected), jax.tree.leaves(found)):
    np.testing.assert_allclose(f, e, atol=2e-5 * max(1.0, float(abs(e).max())))


def traced_for_tpu(fn, *args, mesh=(1, 1, 1)):
  """A jaxpr for TPUs, which this process lacks, with the mesh axes of `layer_results`."""
  names = ('data', 'spare', 'mdl')
  with jax.sharding.use_abstract_mesh(abstract_mesh(dict(zip(names, mesh)), 'tpu')):
    return jax.make_jaxpr(fn)(*args)


def implementation_on(mesh, blnh=('data', None, 'mdl', None), **fields):
  config = Config(MultiHeadAttention, input_dims=12, num_heads=6, num_kv_heads=2, causal=True, **fields)
  config.activation_split_dims_mapping.set(blnh=blnh)
  layer = config.set(mesh_axis_names=('data', 'spare', 'mdl')).instantiate()
  chosen = []
  traced_for_tpu(lambda: chosen.append(layer.implementation_of(8192, False)), mesh=mesh)
  return chosen[0]


@pytest.mark.parametrize(
  'mesh, fields, text',
  [
    ((2, 2, 3), {}, 'splash on tpu: 8,192 queries x 8,192 keys, and the fused kernel takes this case'),
    ((1, 1, 1), {'blnh': None}, 'splash on tpu'),
    ((2, 1, 1), {'blnh': None}, 'blockwise on tpu: .* the fused kernel needs .*blnh, which says how the mesh splits'),
    ((2, 1, 4), {}, 'needs heads that divide evenly, not 6 with 2 kv heads over 4 devices'),
    ((2, 2, 1), {'blnh': ('data', 'spare', None, None)}, r"whole sequences and heads.*splits them over \('spare',\)"),
    ((1, 2, 1), {'context_axis': 'spare'}, "splash on tpu, ring over 'spare'"),
    ((1, 2, 1), {'context_axis': 'spare', 'blnh': None}, 'blockwise on tpu, ring .*: the sequence is split .* needs'),
    ((1, 2, 1), {'context_axis': 'spare', 'context_method': 'all_to_all'}, 'splash on tpu, all-to-all'),
    ((1, 1, 1), {'dropout_rate': 0.1}, 'blockwise on tpu: .* the fused kernel has no dropout'),
    ((1, 1, 1), {'fprop_dtype': 'float16'}, 'in bfloat16 or float32, not in float16'),
  ],
)
def test_auto_on_a_tpu_says_what_it_chooses_and_why(mesh, fields, text):
  assert re.search(text, implementation_on(mesh, **fields))


def test_without_the_kernels_auto_falls_back_and_says_so(monkeypatch):
  monkeypatch.setattr(dot_product, 'has_splash', lambda: False)
  assert implementation_on((1, 1, 1)).startswith('blockwise on tpu')
  assert 'has an unknown interface' in implementation_on((1, 1, 1))


@pytest.mark.parametrize(
  'kind, dtype, text',
  [
    ('TPU v3', 'bfloat16', 'blockwise on tpu: .* the fused kernel computes in float32 on TPU v3, not in bfloat16'),
    ('TPU v3', 'float32', 'splash on tpu'),
    ('TPU v5 lite', 'bfloat16', 'splash on tpu'),
  ],
)
def test_old_chips_have_kernels_in_float32_alone(kind, dtype, text):
  """Their compiler refuses products of bfloat16 in kernels."""
  layer = Config(MultiHeadAttention, input_dims=12, num_heads=6, causal=True, fprop_dtype=dtype).instantiate()
  mesh = AbstractMesh((1,), ('data',), (AxisType.Auto,), abstract_device=abstract_device(kind, 'tpu'))
  with jax.sharding.use_abstract_mesh(mesh):
    assert re.search(text, layer.implementation_of(8192, False))


def test_rows_that_do_not_divide_are_left_to_blocks():
  config = Config(MultiHeadAttention, input_dims=12, num_heads=2, causal=True, mesh_axis_names=('data', 'spare', 'mdl'))
  config.activation_split_dims_mapping.set(blnh=('data', None, None, None))
  layer = config.instantiate()
  variables = jax.eval_shape(lambda: layer.init(jax.random.key(0)))
  for rows, kernels in ((4, 1), (3, 0)):
    x = jax.ShapeDtypeStruct((rows, 2048, 12), jnp.float32)
    program = traced_for_tpu(lambda v, x: layer.apply(v, x)[0], variables, x, mesh=(2, 1, 1))
    assert str(program).count('name=splash_mha_fwd_residuals') == kernels


def stages_of_attention(number, implementation='auto', **fields):
  attention = Config(MultiHeadAttention, input_dims=12, num_heads=6, num_kv_heads=2, causal=True)
  attention.set(implementation=implementation).activation_split_dims_mapping.set(blnh=('data', None, 'mdl', None))
  stages = Config(Pipelined, layers_tpl=attention, num_layers=4, num_stages=number, num_microbatches=2, **fields)
  stages.set(mesh_axis_names=('data', 'spare', 'mdl')).weight_split_dims_mapping.set(stages=('spare',))
  return stages.instantiate()


def test_stages_of_a_pipeline_that_do_not_divide_are_left_to_blocks():
  def describe(mesh, number):
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict(zip(('data', 'spare', 'mdl'), mesh)), 'tpu')):
      return describe_implementations(stages_of_attention(number), 8192, False)

  lines = [*describe((2, 2, 1), 2), *describe((1, 3, 1), 4)]
  assert 'splash on tpu' in lines[0] and 'decoding: in plain JAX, because its kernel cannot be mapped' in lines[0]
  assert 'blockwise on tpu' in lines[1] and 'needs stages of a pipeline that divide evenly' in lines[1]


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh, number, batch_axes', [((1, 2, 3), 2, None), ((2, 2, 2), 2, 'data'), ((2, 2, 1), 4, 'data')], ids=str
)
def test_in_the_stages_of_a_pipeline(mesh, number, batch_axes):
  """Kernels are mapped over rows, heads and stages, two of which a device may have, also where rows are its own."""
  kernels = stages_of_attention(number, 'splash', batch_axes=batch_axes, stage_remat='full')
  dense = stages_of_attention(number, 'dense')
  variables = drawn_variables(dense.abstract_init())
  x = jax.random.normal(jax.random.key(1), (4, 140, 12))
  ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 140)).cumsum(axis=1) // 20 + 1, jnp.int32)

  def step(layer):
    return jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x, segment_ids=ids)[0])), (0, 1))

  expected = jax.jit(step(dense))(variables, x)
  axes = jax.make_mesh(mesh, ('data', 'spare', 'mdl'), axis_types=(AxisType.Auto,) * 3)

  def on_mesh(variables, x):
    with jax.sharding.use_abstract_mesh(axes.abstract_mesh):
      return step(kernels)(variables, x)

  placed = jax.device_put((variables, x), NamedSharding(axes, PartitionSpec()))
  found = GuardedJit(on_mesh, out_shardings=NamedSharding(axes, PartitionSpec()))(*placed)
  for e, f in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    np.testing.assert_allclose(f, e, atol=2e-5 * max(1.0, float(abs(e).max())))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
  'mask, lengths, reason',
  [
    (Causal() & Segments(IDS, IDS) & Paddings(PADDINGS), (200, 200), ''),
    (Band(), (200, 140), ''),
    (Causal(), (200, 140), 'as many keys as queries, not 200 and 140'),
    (Band(ahead=-1), (200, 200), "excludes a query's own index"),
    ((Causal() | Prefix(jnp.ones(2, int))) & SlidingWindow(9), (200, 200), 'no window together with prefixes'),
    (Causal() & FunctionMask(lambda q, k: q != k), (200, 200), 'not the mask FunctionMask'),
    (Causal() & (SlidingWindow(9) | Segments(IDS, IDS)), (200, 200), r'not the mask \(SlidingWindow | Segments\)'),
    (Segments(IDS, IDS) & Segments(IDS, IDS), (200, 200), 'not the mask Segments'),
  ],
)
def test_a_mask_that_the_kernels_cannot_apply_has_its_reason(mask, lengths, reason):
  found = mask_obstacle(mask, *lengths)
  assert bool(found) == bool(reason) and reason.replace('\\', '') in found


def test_an_impossible_call_is_refused_in_one_line():
  x = jnp.ones((1, 8, 2, 4))
  with pytest.raises(ConfigError, match="'splash' takes no mask or bias as an array; 'auto' chooses"):
    dot_product_attention(x, x, x, jnp.ones((8, 8), bool), implementation='splash')
  with pytest.raises(ConfigError, match="'splash' needs the argument `split`"):
    traced_for_tpu(lambda x: dot_product_attention(x, x, x, implementation='splash'), x, mesh=(2, 1, 1))


# ---------------------------------------------------------------- the programs


def test_flops_are_those_of_the_blocks_that_the_kernels_compute():
  q = jax.ShapeDtypeStruct((2, 1000, 4, 64), jnp.bfloat16)
  block = 4 * 2 * 4 * 256 * 256 * 64  # 4 H for each logit of 2 rows and 4 heads.
  for mask, pairs in ((Causal(), 10), (Band(), 16), (Causal() & SlidingWindow(257), 7)):
    spec = AttentionSpec(implementation='splash', block_size=256)
    attend = functools.partial(dot_product_attention, mask=mask, spec=spec)
    assert count_flops(traced_for_tpu(lambda q, attend=attend: attend(q, q, q), q)) == pairs * block
    step = jax.grad(lambda q, attend=attend: attend(q, q, q).astype(jnp.float32).sum())
    # Backward there are three products for the gradient of queries, and four for those of keys and values.
    assert count_flops(traced_for_tpu(step, q)) == pytest.approx(pairs * block * 9 / 2, rel=1e-2)


@pytest.mark.parametrize(
  'H, dtype, soft_cap, block',
  [
    (128, 'bfloat16', None, 1024),
    (128, 'bfloat16', 50.0, 512),
    (256, 'bfloat16', None, 512),
    (64, 'float32', None, 512),
    (512, 'float32', None, 256),
  ],
)
def test_blocks_fit_in_the_memory_of_a_core(H, dtype, soft_cap, block):
  """The compilers for v4, v5e or v5p refuse kernels with larger blocks."""
  for given, expected in ((None, block), (4096, block), (200, 256)):
    assert largest_splash_block(given, jax.ShapeDtypeStruct((1, 2048, 1, H), dtype), soft_cap) == expected


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'remat, forward, context, kernels',
  [
    ('none', 1, {}, 1),
    ('products', 1, {}, 1),
    ('full', 2, {}, 1),
    ('products', 1, ALL_TO_ALL, 1),
    ('full', 2, ALL_TO_ALL, 1),
    ('products', 1, RING, 4),
  ],
)
def test_what_attention_keeps_is_not_computed_again(remat, forward, context, kernels):
  config = transformer_lm(vocab_size=64, model_dims=32, num_layers=2, num_heads=2, fprop_dtype=jnp.bfloat16)
  set_sharding(config, batch_axes='data', context_axis='spare' if context else None)
  config.lm_tpl.transformer_tpl.set(remat=remat).layers_tpl.attention_tpl.set(**context)
  model = config.set(mesh_axis_names=('data', 'spare', 'mdl')).instantiate()
  batch = {name: jax.ShapeDtypeStruct((2, 512), jnp.int32) for name in ('ids', 'labels', 'segment_ids', 'segment_pos')}
  batch['weights'] = jax.ShapeDtypeStruct((2, 512), jnp.float32)
  variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  gradients = jax.grad(lambda v, b: model.apply(v, b)[0][0]['loss'][0])
  program = str(traced_for_tpu(gradients, variables, batch, mesh=(1, 2 if context else 1, 1)))
  # In the body of a loop over layers. In a ring, the keys of both devices are two runs each.
  assert program.count('name=splash_mha_fwd') == forward * kernels
  assert program.count('name=splash_mha_dq') == program.count('name=splash_mha_dkv') == kernels
  assert not re.search(r'2,(256|512),(256|512)\]', program)  # No logits of several heads or rows.
