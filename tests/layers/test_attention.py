"""Attention against a plain NumPy form of the same formulas; axes as in praxis_lite/layers/attention.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, ShardingError
from praxis_lite.layers.alibi import AlibiBias, alibi_slopes
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.normalizations import RMSNorm
from praxis_lite.layers.positions import RelativeBias, RotaryPositions
from praxis_lite.layers.projections import PerDimScale

B, T, D, N, H = 2, 6, 12, 4, 3
K, RMS = 2, Config(RMSNorm)


def numpy_attention(x, kv, weights, mask, cap=None):
  """One query, one head at a time. `mask`: [B, T, S] bool."""
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
  num_kv_heads = w['key']['w'].shape[1]

  def project(name, y):
    return np.einsum('btd,dnh->btnh', y, w[name]['w']) + w[name].get('b', 0.0)

  q, k, v = project('query', x), project('key', kv), project('value', kv)
  context = np.zeros(q.shape)
  for b in range(x.shape[0]):
    for n in range(q.shape[2]):
      g = n // (q.shape[2] // num_kv_heads)
      for t in range(x.shape[1]):
        logits = k[b, :, g] @ q[b, t, n] / np.sqrt(q.shape[-1])
        if cap:
          logits = cap * np.tanh(logits / cap)
        seen = np.exp(logits - logits.max()) * mask[b, t]
        sink = np.exp(w['sinks'][n] - logits.max()) if 'sinks' in w else 0.0
        context[b, t, n] = (seen / (seen.sum() + sink)) @ v[b, :, g]
  if 'output_gate' in w:
    context = context / (1 + np.exp(-project('output_gate', x)))
  return np.einsum('btnh,nhd->btd', context, w['out']['w']) + w['out'].get('b', 0.0)


def build(**fields):
  return Config(MultiHeadAttention, **{'input_dims': D, 'num_heads': N, 'dims_per_head': H, **fields}).instantiate()


def run(layer, variables, *args, **kwargs):
  """`layer.apply`, jitted."""
  method = kwargs.pop('method', '__call__')
  return jax.jit(lambda v, a, k: layer.apply(v, *a, method=method, **k))(variables, args, kwargs)


def random_variables(layer, seed=0):
  """Values with biases that are not zero."""
  return jax.tree.map(lambda x: 3 * x, drawn_variables(layer.abstract_init(), seed))


def inputs(seed=7, length=T, dims=D):
  return jnp.asarray(np.random.default_rng(seed).standard_normal((B, length, dims)), jnp.float32)


SEGMENT_IDS = np.array([[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0]], np.int32)
QUERY, KEY = np.arange(T)[:, None], np.arange(T)[None]
CAUSAL = np.broadcast_to(KEY <= QUERY, (B, T, T))
WINDOW = np.broadcast_to(abs(QUERY - KEY) < 3, (B, T, T))
CHUNKS = np.broadcast_to(QUERY // 4 == KEY // 4, (B, T, T))
SEGMENTS = SEGMENT_IDS[:, :, None] == SEGMENT_IDS[:, None, :]
ALL = np.ones((B, T, T), bool)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields, mask',
  [
    ({}, ALL),
    ({'use_bias': True}, ALL),
    ({'causal': True, 'num_kv_heads': 2}, CAUSAL),
    ({'causal': True, 'num_kv_heads': 1, 'sliding_window': 3}, CAUSAL & WINDOW),
    ({'sliding_window': 3}, WINDOW),
    ({'causal': True, 'local_chunk': 4, 'num_kv_heads': 2}, CAUSAL & CHUNKS),
    ({'local_chunk': 4, 'sliding_window': 3}, WINDOW & CHUNKS),
    ({'causal': True, 'num_kv_heads': 2, 'logit_soft_cap': 0.7}, CAUSAL),
    ({'sliding_window': 3, 'logit_soft_cap': 0.7}, WINDOW),
    ({'use_sinks': True}, ALL),
    ({'use_bias': True, 'gate_output': True, 'num_kv_heads': 2}, ALL),
    ({'causal': True, 'num_kv_heads': 2, 'logit_soft_cap': 0.7, 'use_sinks': True}, CAUSAL),
  ],
)
@pytest.mark.parametrize('segments', [False, True])
def test_attention_is_the_formula(fields, mask, segments):
  layer = build(**fields)
  variables, x = random_variables(layer), inputs()
  y, _ = run(layer, variables, x, segment_ids=SEGMENT_IDS if segments else None)
  expected = numpy_attention(x, x, variables, mask & SEGMENTS if segments else mask, fields.get('logit_soft_cap'))
  np.testing.assert_allclose(y, expected, atol=2e-5)


@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
@pytest.mark.parametrize('given', ['segments and positions', 'positions alone'])
def test_chunks_of_packed_rows_begin_where_their_sequences_begin(implementation, given):
  layer = build(causal=True, local_chunk=3, implementation=implementation, block_size=2)
  variables, x = random_variables(layer), inputs()
  positions = np.array([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, -1, -1]], np.int32)
  segments = SEGMENT_IDS if given == 'segments and positions' else None
  y, _ = run(layer, variables, x, segment_ids=segments, segment_pos=positions)
  chunk = np.maximum(positions, 0) // 3
  mask = CAUSAL & (chunk[:, :, None] == chunk[:, None, :])
  expected = numpy_attention(x, x, variables, mask if segments is None else mask & SEGMENTS)
  np.testing.assert_allclose(y, expected, atol=2e-5)


def test_sinks_are_a_number_for_each_head_that_starts_as_zero():
  layer = build(use_sinks=True)
  assert layer.init(jax.random.key(0))['sinks'].tolist() == [0.0] * N
  assert 'sinks' not in build().abstract_init()
  layer = Config(MultiHeadAttention, input_dims=D, num_heads=N, use_sinks=True, mesh_axis_names=('data', 'mdl'))
  layer.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  assert tuple(layer.instantiate().abstract_init()['sinks'].tensor_split_dims_mapping) == ('mdl',)


@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_a_query_without_keys_attends_to_the_sink_alone(implementation):
  layer = build(use_sinks=True, implementation=implementation, use_bias=True)
  variables = random_variables(layer)
  ids = np.array([[1, 1, 2], [1, 1, 1]], np.int32), np.array([[1, 1, 1, 1], [1, 1, 1, 1]], np.int32)

  def loss(variables, x, kv):
    y, _ = layer.apply(variables, x, kv, segment_ids=ids[0], kv_segment_ids=ids[1])
    return jnp.sum(y**2), y

  x, kv = inputs(length=3), inputs(8, length=4)
  (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(variables, x, kv)
  np.testing.assert_allclose(y[0, 2], variables['out']['b'], atol=1e-6)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
  assert (gradients[1][0, 2] == 0).all() and (gradients[0]['sinks'] != 0).all()


@pytest.mark.parametrize('cap', [0.0, -1.0])
def test_a_soft_cap_is_positive(cap):
  with pytest.raises(ConfigError, match='logit_soft_cap: expected more than 0, got'):
    build(logit_soft_cap=cap)


def test_a_mask_of_another_shape_is_named():
  layer = build()
  with pytest.raises(DataError, match=r"operation 'and' got incompatible shapes"):
    run(layer, random_variables(layer), inputs(), mask=jnp.ones((T, T - 1), bool))


@pytest.mark.parametrize('cap', [None, 2.0])
def test_any_mask_per_head_is_applied(cap):
  layer = build(num_kv_heads=2, logit_soft_cap=cap)
  variables, x = random_variables(layer), inputs()
  mask_BNTS = jax.random.bernoulli(jax.random.key(3), 0.6, (B, N, T, T)) | jnp.eye(T, dtype=bool)
  y, _ = run(layer, variables, x, mask=mask_BNTS)
  heads = []
  for n in range(N):  # the output is a sum over heads: take each alone, under its own mask
    alone = {**variables, 'out': {'w': jnp.where(jnp.arange(N)[:, None, None] == n, variables['out']['w'], 0.0)}}
    heads.append(numpy_attention(x, x, alone, np.asarray(mask_BNTS[:, n]), cap))
  np.testing.assert_allclose(y, sum(heads), atol=2e-5)


def test_attention_to_another_sequence():
  layer = build(kv_input_dims=5, num_kv_heads=2)
  variables, x, kv = random_variables(layer), inputs(), inputs(8, length=4, dims=5)
  kv_segment_ids = np.array([[1, 1, 2, 2], [1, 1, 1, 0]], np.int32)
  segment_ids = np.maximum(SEGMENT_IDS, 1)
  y, _ = run(layer, variables, x, kv, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
  mask = segment_ids[:, :, None] == kv_segment_ids[:, None, :]
  np.testing.assert_allclose(y, numpy_attention(x, kv, variables, mask), atol=2e-5)


def test_grouped_heads_are_heads_with_shared_keys_and_values():
  grouped, full = build(num_kv_heads=2), build(num_kv_heads=N)
  assert jax.tree.map(jnp.shape, full.init(jax.random.key(0))) == jax.tree.map(
    jnp.shape, build().init(jax.random.key(0))
  )
  variables, x = random_variables(grouped), inputs()
  repeated = {name: {'w': jnp.repeat(variables[name]['w'], 2, axis=1)} for name in ('key', 'value')}
  np.testing.assert_allclose(run(grouped, variables, x)[0], run(full, {**variables, **repeated}, x)[0], atol=1e-5)


@pytest.mark.parametrize('num_kv_heads', [N, 2, 1])
def test_combined_qkv_is_three_projections(num_kv_heads):
  fields = {'causal': True, 'num_kv_heads': num_kv_heads, 'use_bias': True}
  three, combined = build(**fields), build(combine_qkv=True, **fields)
  variables, x = random_variables(three), inputs()

  def combine(leaf, axis):
    query, key, value = (variables[name][leaf] for name in ('query', 'key', 'value'))
    grouped = query.reshape(*query.shape[:axis], num_kv_heads, -1, H)
    return jnp.concatenate([grouped, key[..., None, :], value[..., None, :]], axis=-2)

  one = {'qkv': {'w': combine('w', 1), 'b': combine('b', 0)}, 'out': variables['out']}
  np.testing.assert_allclose(run(three, variables, x)[0], run(combined, one, x)[0], atol=1e-5)


@pytest.mark.parametrize('cap', [None, 5.0])
def test_fully_masked_query_is_finite_with_finite_gradients(cap):
  layer = build(logit_soft_cap=cap)
  variables, x = random_variables(layer), inputs()
  mask = jnp.ones((B, 1, T, T), bool).at[0, :, 2].set(False)

  def loss(v, x):
    return jnp.sum(layer.apply(v, x, mask=mask)[0] ** 2)

  value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)
  assert jnp.isfinite(value)
  assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize('cap', [None, 3.0])
def test_softmax_is_float32_when_the_layer_is_bfloat16(cap):
  layer = build(fprop_dtype=jnp.bfloat16, causal=True, logit_soft_cap=cap)
  variables, x = layer.init(jax.random.key(0)), inputs().astype(jnp.bfloat16)
  jaxpr = str(jax.make_jaxpr(lambda v, x: layer.apply(v, x)[0])(variables, x))
  exponentials = [line.strip() for line in jaxpr.splitlines() if ' exp ' in line]
  assert exponentials and all(':f32[' in line for line in exponentials)
  assert run(layer, variables, x)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  'fields',
  [
    {},
    {'num_kv_heads': 2, 'combine_qkv': True, 'use_bias': True},
    {'sliding_window': 3},
    {'local_chunk': 4},
    {'local_chunk': 2, 'sliding_window': 3, 'use_sinks': True},
    {'num_kv_heads': 2, 'combine_qkv': True, 'use_bias': True, 'gate_output': True},
    {'logit_soft_cap': 1.0, 'num_kv_heads': 1},
    {'rotary_tpl': Config(RotaryPositions), 'dims_per_head': 4, 'qk_norm_tpl': RMS},
    {'rotary_tpl': Config(RotaryPositions), 'dims_per_head': 4, 'qk_norm_tpl': RMS, 'qk_norm_over': 'heads'},
    {'relative_bias_tpl': Config(RelativeBias, num_buckets=4, max_distance=5)},
    {'relative_bias_tpl': Config(AlibiBias), 'num_kv_heads': 2},
    {'rotary_tpl': Config(RotaryPositions), 'dims_per_head': 4, 'per_dim_scale_tpl': Config(PerDimScale)},
    {
      'relative_bias_tpl': Config(RelativeBias, num_buckets=4, max_distance=5),
      'logit_soft_cap': 2.0,
      'num_kv_heads': 2,
    },
  ],
)
def test_incremental_equals_full(fields):
  layer = build(causal=True, **fields)
  variables, x = random_variables(layer), inputs()
  full, _ = run(layer, variables, x)
  _, side = layer.apply(variables, B, T, method='init_decode_state')
  step = jax.jit(lambda x, pos, s: layer.apply(variables, x, pos, decode_state=s, method='extend_step'))
  steps = []
  for t in range(T):
    y, side = step(x[:, t : t + 1], jnp.full((B, 1), t), side.decode_state)
    steps.append(y)
  np.testing.assert_allclose(jnp.concatenate(steps, axis=1), full, atol=1e-5)


@pytest.mark.parametrize('over, groups', [('head', (N, K)), ('heads', (1, 1))])
def test_queries_and_keys_are_normalized_over_a_head_or_over_all_heads(over, groups):
  layer = build(num_kv_heads=K, qk_norm_tpl=RMS, qk_norm_over=over)
  variables, x = random_variables(layer), inputs()
  found = layer.apply(variables, x, x, None, method='_project')[0]
  for name, heads, parts in zip(('query', 'key'), found, groups):
    plain = np.einsum('btd,dnh->btnh', x, variables[name]['w'])
    by_group = plain.reshape(*x.shape[:2], parts, -1)
    by_group = by_group / np.sqrt((by_group**2).mean(-1, keepdims=True) + 1e-6) * variables[f'{name}_norm']['scale']
    np.testing.assert_allclose(heads, by_group.reshape(plain.shape), atol=1e-5)


def test_what_is_normalized_is_checked():
  with pytest.raises(ConfigError, match=r"qk_norm_over: expected 'head' or 'heads', got 'all'"):
    build(qk_norm_tpl=RMS, qk_norm_over='all')


def test_what_is_attended_to_depends_on_offsets_of_rotary_positions_alone():
  layer = build(rotary_tpl=Config(RotaryPositions), dims_per_head=4)
  variables, x = random_variables(layer), inputs()
  pos = jnp.tile(jnp.arange(T), (B, 1))
  y, _ = run(layer, variables, x, segment_pos=pos)
  np.testing.assert_allclose(run(layer, variables, x, segment_pos=pos + 17)[0], y, atol=1e-5)
  np.testing.assert_allclose(run(layer, variables, x)[0], y, atol=1e-6)
  assert not np.allclose(run(layer, variables, x, segment_pos=2 * pos)[0], y, atol=1e-2)


def test_slopes_of_alibi_are_those_of_the_paper():
  np.testing.assert_array_equal(alibi_slopes(8), 1 / 2.0 ** np.arange(1, 9))
  np.testing.assert_allclose(alibi_slopes(16), 2.0 ** (-np.arange(1, 17) / 2))
  np.testing.assert_allclose(alibi_slopes(6), 2.0 ** -np.array([2, 4, 6, 8, 1, 3]))  # Of 4 heads, and of 8.
  np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])


@pytest.mark.parametrize('causal', [True, False])
def test_alibi_subtracts_distances_in_every_implementation(causal):
  mask = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
  pos = jnp.asarray([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 9]])
  distance = np.abs(np.asarray(pos)[:, :, None] - np.asarray(pos)[:, None, :])
  bias = -(2.0 ** -(8 * np.arange(1, N + 1) / N))[:, None, None] * distance[:, None]
  plain = build(causal=causal)
  variables, x = random_variables(plain), inputs()
  expected = run(plain, variables, x, mask=jnp.asarray(mask), logit_bias=jnp.asarray(bias, jnp.float32))[0]
  for implementation in ('dense', 'blockwise'):
    layer = build(causal=causal, relative_bias_tpl=Config(AlibiBias), implementation=implementation, block_size=2)
    np.testing.assert_allclose(run(layer, variables, x, segment_pos=pos)[0], expected, atol=1e-5)


def test_queries_are_scaled_by_dim():
  layer, plain = build(per_dim_scale_tpl=Config(PerDimScale)), build()
  variables, x = random_variables(layer), inputs()
  by = np.log1p(np.exp(variables['per_dim_scale']['w'])) / np.log(2)
  scaled = {**variables, 'query': {'w': variables['query']['w'] * by}}
  del scaled['per_dim_scale']
  np.testing.assert_allclose(run(layer, variables, x)[0], run(plain, scaled, x)[0], atol=1e-5)
  at_first = {**variables, 'per_dim_scale': {'w': np.zeros(H, np.float32)}}
  del (alone := dict(variables))['per_dim_scale']
  np.testing.assert_allclose(run(layer, at_first, x)[0], run(plain, alone, x)[0], atol=1e-6)


def test_a_relative_bias_of_minus_infinity_is_a_mask():
  layer = build(relative_bias_tpl=Config(RelativeBias, num_buckets=8, max_distance=8), causal=True)
  variables, x = random_variables(layer), inputs()
  # The first four buckets are offsets 0 to 3: leaving those is a window of four.
  variables['relative_bias']['w'] = jnp.where(jnp.arange(8)[:, None] < 4, 0.0, -1e9) * jnp.ones((8, N))
  del (alone := dict(variables))['relative_bias']
  expected, _ = run(build(sliding_window=4, causal=True), alone, x)
  np.testing.assert_allclose(run(layer, variables, x)[0], expected, atol=1e-5)


def test_prompts_of_different_lengths_in_one_pass_then_steps_equal_full():
  layer = build(causal=True, sliding_window=4)
  variables, x = random_variables(layer), inputs()
  full, _ = run(layer, variables, x)
  lengths, prompt = np.array([2, 4]), 4
  pos = np.where(np.arange(prompt) < lengths[:, None], np.arange(prompt), -1)
  x_prompt = jnp.where((pos >= 0)[..., None], x[:, :prompt], 1e3)  # padding must not matter
  _, side = layer.apply(variables, B, T, method='init_decode_state')
  y, side = run(layer, variables, x_prompt, pos, decode_state=side.decode_state, method='extend_step')
  for b in range(B):
    np.testing.assert_allclose(y[b, : lengths[b]], full[b, : lengths[b]], atol=1e-5)
  for step in range(2):
    x_step = jnp.take_along_axis(x, (lengths + step)[:, None, None], axis=1)
    y, side = layer.apply(
      variables, x_step, (lengths + step)[:, None], decode_state=side.decode_state, method='extend_step'
    )
    for b in range(B):
      np.testing.assert_allclose(y[b, 0], full[b, lengths[b] + step], atol=1e-5)


def test_heads_that_do_not_divide_the_mesh_equal_one_device():
  mesh = jax.make_mesh((2, 2, 2), ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
  config = Config(MultiHeadAttention, input_dims=9, num_heads=3, num_kv_heads=1, dims_per_head=5, causal=True)
  config.set(mesh_axis_names=mesh.axis_names)
  config.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.activation_split_dims_mapping.set(
    blnh=(('replica', 'data'), None, 'mdl', None),
    blkh=(('replica', 'data'), None, 'mdl', None),
    out=(('replica', 'data'), None, None),
  )
  layer = config.instantiate()
  variables, x = random_variables(layer), inputs(dims=9)

  def loss(v, x):
    return jnp.sum(jnp.square(layer.apply(v, x, segment_ids=SEGMENT_IDS)[0]))

  def on_mesh(v, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.value_and_grad(loss)(v, x)

  replicated = jax.NamedSharding(mesh, jax.P())
  compiled = jax.jit(on_mesh, in_shardings=replicated).lower(variables, x).compile()
  assert 'all-reduce' in compiled.as_text()
  got, expected = compiled(*jax.device_put((variables, x), replicated)), jax.jit(jax.value_and_grad(loss))(variables, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), got, expected)


def test_weights_of_all_projections_take_the_split_of_the_layer():
  config = Config(MultiHeadAttention, input_dims=D, num_heads=N, num_kv_heads=2, use_bias=True)
  config.set(mesh_axis_names=('data', 'mdl')).weight_split_dims_mapping.wt = ('data', 'mdl', None)
  weights = config.instantiate().abstract_init()
  assert {name: w['w'].shape for name, w in weights.items()} == {
    'query': (D, 4, 3),
    'key': (D, 2, 3),
    'value': (D, 2, 3),
    'out': (4, 3, D),
  }
  assert weights['key']['w'].tensor_split_dims_mapping == ('data', 'mdl', None)
  assert weights['key']['b'].tensor_split_dims_mapping == ('mdl', None)
  assert weights['out']['w'].tensor_split_dims_mapping == ('mdl', None, 'data')
  assert weights['out']['b'].tensor_split_dims_mapping == ('data',)
  combined = config.clone(combine_qkv=True).instantiate().abstract_init()
  assert combined['qkv']['w'].tensor_split_dims_mapping == ('data', 'mdl', None, None)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_kv_heads': 3}, 'num_kv_heads: 3 does not divide num_heads, 4'),
    ({'num_heads': 5, 'dims_per_head': None}, 'dims_per_head: num_heads, 5, does not divide the model dims, 12'),
    ({'sliding_window': 0}, 'sliding_window: expected at least 1'),
    ({'local_chunk': 0}, 'local_chunk: expected at least 1'),
    ({'combine_qkv': True, 'kv_input_dims': 5}, 'combine_qkv'),
  ],
)
def test_contradictory_hyperparameters_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    build(**fields)


def test_mapping_of_the_wrong_rank_names_the_field():
  config = Config(MultiHeadAttention, input_dims=D, num_heads=N, mesh_axis_names=('data', 'mdl'))
  config.weight_split_dims_mapping.wt = ('data', 'mdl')
  with pytest.raises(ShardingError, match=r'weight_split_dims_mapping\.wt'):
    config.instantiate()


def test_decoding_needs_causal_attention_and_a_cache():
  x, pos = inputs(length=1), jnp.zeros((B, 1), jnp.int32)
  for fields, message in (({}, 'causal'), ({'causal': True}, 'init_decode_state')):
    layer = build(**fields)
    with pytest.raises(ConfigError, match=message):
      layer.apply(layer.init(jax.random.key(0)), x, pos, method='extend_step')
