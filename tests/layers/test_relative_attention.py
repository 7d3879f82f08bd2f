"""Relative positions and memory of Transformer-XL: by loops in NumPy, by the recurrence over chunks, and on meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import D, T, decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  MemoryAttention,
  MultiHeadAttention,
  RelativeAttention,
  RelativeBias,
  RepeatedTransformer,
  RotaryPositions,
  TransformerBlock,
)

N, H, R = 3, 4, 6
HUGE = 1e30


def config(cls=RelativeAttention, **fields):
  own = {'position_dims': R} if issubclass(cls, RelativeAttention) else {}
  return Config(cls, input_dims=D, num_heads=N, dims_per_head=H, causal=True, **own, **fields)


def built(layer_config):
  layer = layer_config.instantiate()
  return layer, drawn_variables(layer.abstract_init())


def by_loops(v, x, pos, allows):
  """The formula of the paper, with a vector of sines and cosines for the offset of each pair."""
  v = jax.tree.map(np.float64, v)
  rates = 10_000.0 ** -np.linspace(0, 1, R // 2)
  out = np.zeros(x.shape)
  for b, n in np.ndindex(len(x), N):
    query, key, value = (x[b] @ v[name]['w'][:, n] for name in ('query', 'key', 'value'))
    logits = np.full((x.shape[1],) * 2, -HUGE)
    for i, j in np.ndindex(*logits.shape):
      if allows(b, i, j):
        angle = (pos[b, i] - pos[b, j]) * rates
        offset = np.concatenate([np.sin(angle), np.cos(angle)]) @ v['relative'][:, n]
        content = (query[i] + v['content_bias'][n]) @ key[j]
        logits[i, j] = (content + (query[i] + v['position_bias'][n]) @ offset) * H**-0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out[b] += (weights / weights.sum(-1, keepdims=True)) @ value @ v['out']['w'][n]
  return out


def test_the_formula_in_packed_rows_and_in_both_directions():
  x = inputs()
  layer, variables = built(config())
  ids = np.array([[1] * 9 + [2] * 14, [1] * 23], np.int32)
  pos = np.array([[*range(9), *range(14)], [*range(23)]], np.int32)
  y, _ = jax.jit(layer.apply)(variables, x, segment_ids=ids, segment_pos=pos)
  wanted = by_loops(variables, x, pos, lambda b, i, j: j <= i and ids[b, i] == ids[b, j])
  np.testing.assert_allclose(y, wanted, atol=2e-5)
  bidirectional = config().set(causal=False, sliding_window=4).instantiate()  # As in a Conformer.
  y, _ = jax.jit(bidirectional.apply)(variables, x)
  index = np.tile(np.arange(T), (2, 1))
  np.testing.assert_allclose(y, by_loops(variables, x, index, lambda b, i, j: abs(i - j) < 4), atol=2e-5)


def recurrence(layers, variables, x, chunk, memory):
  """Layers with residuals, chunk by chunk: each layer's inputs are kept for the next chunk, without gradients."""
  kept, out = [x[:, :0]] * len(layers), []
  for start in range(0, x.shape[1], chunk):
    here = x[:, start : start + chunk]
    for i, (layer, v) in enumerate(zip(layers, variables)):
      before = jax.lax.stop_gradient(kept[i])
      kept[i] = jnp.concatenate([before, here], axis=1)[:, -memory:] if memory else here[:, :0]
      seen = jnp.concatenate([before, here], axis=1)
      # A layer without a memory of its own sees the kept inputs as the beginning of its row.
      here += layer.apply(v, seen)[0][:, before.shape[1] :]
    out.append(here)
  return jnp.concatenate(out, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize('memory', [5, 2, 0, 12])
def test_two_layers_have_the_result_and_the_gradients_of_the_recurrence_over_chunks(memory):
  """The last chunk is not full."""
  x = inputs()[:, :13]
  layers = [config(chunk_length=5, memory_length=memory).instantiate() for _ in range(2)]
  plain = [config().instantiate() for _ in range(2)]
  variables = [drawn_variables(layer.abstract_init(), seed=i) for i, layer in enumerate(layers)]

  def one_pass(variables, x):
    for layer, v in zip(layers, variables):
      x += layer.apply(v, x)[0]
    return x

  def step(run):
    loss = lambda v, x: jnp.sum(jnp.sin(run(v, x)))  # noqa: E731
    return jax.jit(lambda v, x: (run(v, x), jax.grad(loss, argnums=(0, 1))(v, x)))(variables, x)

  found, wanted = step(one_pass), step(lambda v, x: recurrence(plain, v, x, 5, memory))
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-5 * max(1, np.abs(e).max())), found, wanted)
  without = jax.jit(lambda v, x: layers[0].apply(v, x, do_eval=True)[0])(variables[0], x)
  np.testing.assert_allclose(without, layers[0].apply(variables[0], x)[0], atol=1e-5)


def test_no_gradient_flows_into_the_memory_and_segments_begin_with_an_empty_one():
  x = inputs()[:1]
  layer, variables = built(config(MemoryAttention, chunk_length=4, memory_length=3, rotary_tpl=Config(RotaryPositions)))

  def of_token(x, t, **packed):
    return jnp.sum(layer.apply(variables, x, **packed)[0][0, t] ** 2)

  moved = jax.jit(jax.grad(of_token))(x, 9)[0]
  np.testing.assert_array_equal(np.flatnonzero(np.abs(moved).max(-1) > 0), [8, 9])
  changed = jax.jit(jax.grad(lambda x: layer.apply(variables, x, do_eval=True)[0][0, 9].sum()))(x)[0]
  np.testing.assert_array_equal(np.flatnonzero(np.abs(changed).max(-1) > 0), [5, 6, 7, 8, 9])
  ids = np.array([[1] * 6 + [2] * 17], np.int32)
  pos = np.array([[*range(6), *range(17)]], np.int32)
  moved = jax.jit(jax.grad(of_token))(x, 11, segment_ids=ids, segment_pos=pos)[0]
  np.testing.assert_array_equal(np.flatnonzero(np.abs(moved).max(-1) > 0), [10, 11])
  seen = jax.jit(lambda x: layer.apply(variables, x, segment_ids=ids, segment_pos=pos, do_eval=True)[0])
  alone = jax.jit(lambda x: layer.apply(variables, x, do_eval=True)[0])(x[:, 6:])
  np.testing.assert_allclose(seen(x)[:, 6:], alone, atol=1e-5)
  trained = jax.jit(lambda x: layer.apply(variables, x, segment_ids=ids, segment_pos=pos)[0])(x)
  np.testing.assert_allclose(trained, seen(x), atol=1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'cls, fields',
  [
    (RelativeAttention, {'chunk_length': 4, 'memory_length': 3}),
    (RelativeAttention, {'num_kv_heads': 1, 'use_sinks': True, 'combine_qkv': True, 'cache_page_size': 4}),
    (MemoryAttention, {'chunk_length': 6, 'rotary_tpl': Config(RotaryPositions), 'cache_page_size': 4}),
    (RelativeAttention, {'chunk_length': 30, 'memory_length': 0, 'use_bias': True, 'scale': 0.3}),
  ],
  ids=['relative memory', 'relative', 'rotary memory', 'one chunk'],
)
def test_decoding_equals_one_pass(cls, fields):
  layer, variables = built(config(cls, **fields))
  x = inputs()
  np.testing.assert_allclose(decoded(layer, variables, x)[0], expected(layer, variables, x), atol=1e-5)


def test_a_cache_keeps_a_chunk_and_a_memory():
  layer = config(chunk_length=4, memory_length=3).instantiate()
  state = layer.apply({}, 2, 30, method='init_decode_state')[1].decode_state
  assert state['key'].shape == (2, N, 7, H)


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [(1, 3, 1), (2, 2, 2), (1, 1, 3), (2, 3, 1)])
@pytest.mark.parametrize('repeated', [True, False])
def test_a_mesh_has_all_gradients_of_one_device(sizes, repeated):
  """Chunks of 3 tokens, 2 rows, 3 heads; one axis splits nothing."""
  axes = ('spare', 'data', 'mdl')
  attention = config(chunk_length=3, memory_length=2, mesh_axis_names=axes)
  block = Config(TransformerBlock, input_dims=D, hidden_dims=7, num_heads=N, dims_per_head=H)
  block.attention_tpl = attention
  block.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  block.attention_tpl.activation_split_dims_mapping.set(
    blnh=('data', None, 'mdl', None), blkh=('data', None, 'mdl', None), out=('data', None, None)
  )
  block.activation_split_dims_mapping.out = ('data', None, None)
  whole = Config(RepeatedTransformer, layers_tpl=block, num_layers=3, mesh_axis_names=axes) if repeated else block
  layer, variables = built(whole.set(mesh_axis_names=axes))
  x = np.random.default_rng(0).standard_normal((2, 6, D)).astype(np.float32)

  def step(layer, variables, x):
    loss = lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x)[0]))  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

  size = int(np.prod(sizes))
  mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:size])
  found = step_on_mesh(step, layer, variables, mesh)(place_variables(layer, variables, mesh), x)
  wanted = jax.jit(functools.partial(step, layer))(variables, x)

  def check(a, e):
    a = np.asarray(a)[tuple(map(slice, e.shape))]
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4 * np.abs(e).max())

  jax.tree.map(check, found, wanted)


def test_bfloat16_is_near_float32():
  x = inputs()
  layer, variables = built(config(chunk_length=4))
  narrow = config(chunk_length=4, fprop_dtype='bfloat16').instantiate()
  y, _ = jax.jit(narrow.apply)(variables, x)
  assert y.dtype == jnp.bfloat16
  wanted = jax.jit(layer.apply)(variables, x)[0]
  np.testing.assert_allclose(y.astype(np.float32), wanted, atol=0.05 * np.abs(wanted).max())


def test_without_chunks_a_memory_attention_is_an_ordinary_one():
  layer, variables = built(config(MemoryAttention))
  y, _ = jax.jit(layer.apply)(variables, inputs())
  np.testing.assert_array_equal(y, jax.jit(config(MultiHeadAttention).instantiate().apply)(variables, inputs())[0])


@pytest.mark.parametrize(
  'cls, fields, message',
  [
    (MemoryAttention, {'memory_length': 3}, r'memory_length: 3 needs a chunk_length; it is None'),
    (MemoryAttention, {'chunk_length': 0}, r'chunk_length: expected at least 1'),
    (MemoryAttention, {'chunk_length': 4, 'causal': False}, r'causal: a memory needs causal attention; set it to True'),
    (
      MemoryAttention,
      {'chunk_length': 4, 'relative_bias_tpl': Config(RelativeBias)},
      r'relative_bias_tpl: not possible',
    ),
    (RelativeAttention, {'rotary_tpl': Config(RotaryPositions)}, r'rotary_tpl: relative attention does not support it'),
    (RelativeAttention, {'position_dims': 5}, r'position_dims: expected an even number of at least 2, got 5'),
  ],
)
def test_mistakes_are_named(cls, fields, message):
  with pytest.raises(ConfigError, match=message):
    config(cls).set(**fields).instantiate()


def test_cross_attention_is_refused():
  x = inputs()
  for cls, message in (
    (MemoryAttention, 'cross attention has no memory'),
    (RelativeAttention, 'has no cross attention'),
  ):
    layer, variables = built(config(cls, chunk_length=4 if cls is MemoryAttention else None))
    with pytest.raises(ConfigError, match=message):
      layer.apply(variables, x, x)
