"""Caches of every kind against attention in one pass."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import LENGTHS, PROMPT, STEPS, B, D, decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import MultiHeadAttention, RelativeBias, Repeat, RotaryPositions, attention, cached_attention
from praxis_lite.sharding import GuardedJit


def build(**fields):
  config = Config(MultiHeadAttention, input_dims=D, num_heads=4, num_kv_heads=2, dims_per_head=4, causal=True)
  config.set(**fields)
  return config.set(rotary_tpl=Config(RotaryPositions)).instantiate()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields, slots',
  [
    ({'cache_page_size': 64}, 17),
    ({'cache_page_size': 5}, 20),  # The prompt is read as 3 + 5 + 5 tokens.
    ({'cache_page_size': 4, 'logit_soft_cap': 2.0, 'scale': 0.3}, 20),
    ({'cache_page_size': 4, 'relative_bias_tpl': Config(RelativeBias, num_buckets=8, max_distance=8)}, 20),
    ({'cache_page_size': 4, 'num_kv_heads': 1}, 20),
    ({'sliding_window': 6}, 6),
    ({'sliding_window': 6, 'cache_page_size': 4}, 6),
    ({'sliding_window': 3, 'cache_page_size': 5}, 3),
    ({'sliding_window': 1}, 1),
    ({'sliding_window': 99, 'cache_page_size': 4}, 17),
    ({'local_chunk': 6}, 6),
    ({'local_chunk': 5, 'cache_page_size': 4, 'use_sinks': True}, 5),
    ({'use_sinks': True}, 17),
    ({'use_sinks': True, 'cache_page_size': 4, 'logit_soft_cap': 2.0}, 20),
    ({'use_sinks': True, 'sliding_window': 6, 'cache_page_size': 4}, 6),
  ],
)
def test_decoding_equals_one_pass_with_a_cache_no_larger_than_needed(fields, slots):
  layer = build(**fields)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  y, state = decoded(layer, variables, x)
  assert state['key'].shape == (B, layer.num_kv_heads, slots, 4)
  np.testing.assert_allclose(y, expected(layer, variables, x), atol=2e-6)


@pytest.mark.parametrize('fields', [{}, {'sliding_window': 6}], ids=['', 'ring'])
def test_accelerators_read_a_prompt_without_a_loop_where_logits_are_few(fields, monkeypatch):
  monkeypatch.setattr(attention, 'platform', lambda: 'gpu')
  layer = build(cache_page_size=4, **fields)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  scan, scans, found = cached_attention._scan_pages, [], {}
  monkeypatch.setattr(cached_attention, '_scan_pages', lambda *args: scans.append(args) or scan(*args))
  for most in (2**26, 1):
    monkeypatch.setattr(cached_attention, '_MOST_LOGITS', most)
    found[most] = decoded(layer, variables, x)[0]
    assert bool(scans) == (most == 1)
  np.testing.assert_allclose(found[2**26], found[1], atol=2e-6)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'most, slots', [(3, 18), (6, 18), (8, 18), (9, 18), (12, 18), (17, 18), (18, 18), (64, 18)], ids=str
)
@pytest.mark.parametrize(
  'fields', [{}, {'cache_dtype': jnp.float32, 'num_kv_heads': 4, 'use_sinks': True}], ids=['', 'all heads, sinks']
)
def test_accelerators_read_several_pages_at_once_for_a_single_token(most, slots, fields, monkeypatch):
  monkeypatch.setattr(attention, 'platform', lambda: 'gpu')
  monkeypatch.setattr(attention, '_MOST_SLOTS', most)
  layer = build(cache_page_size=3, **fields)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  y, state = decoded(layer, variables, x)
  assert state['key'].shape[2] == slots
  np.testing.assert_allclose(y, expected(layer, variables, x), atol=2e-6)


@pytest.mark.parametrize('fields', [{}, {'cache_page_size': 4}, {'cache_page_size': 4, 'sliding_window': 6}], ids=str)
def test_a_prompt_that_is_a_prefix_is_attended_to_by_all_of_its_tokens(fields):
  layer = build(**fields)
  variables, x, prefix = drawn_variables(layer.abstract_init()), inputs(), jnp.array(LENGTHS)
  out, _ = decoded(layer, variables, x, prefix=(prefix,))
  np.testing.assert_allclose(out, expected(layer, variables, x, prefix_lengths=prefix), atol=1e-5)


@pytest.mark.parametrize('fields', [{}, {'cache_page_size': 4}, {'sliding_window': 6}])
def test_int8_entries_take_a_quarter_and_err_by_a_percent(fields):
  layer = build(cache_dtype='int8', **fields)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  y, state = decoded(layer, variables, x)
  assert state['key'].dtype == state['value'].dtype == jnp.int8
  full = expected(layer, variables, x)
  assert 1e-5 < np.abs(y - full).max() < 0.02 * np.abs(full).max()


def test_decoding_costs_what_was_written():
  """Pages not written are not read: with NaN in them the result is the same."""
  layer = build(cache_page_size=4)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  _, side = layer.apply(variables, B, 64, method='init_decode_state')
  state = jax.tree.map(np.array, side.decode_state)
  state['key'][:, :, 8:] = state['value'][:, :, 8:] = np.nan
  pos = np.tile(np.arange(5), (B, 1))
  y, expected = jax.jit(
    lambda: (
      layer.apply(variables, x[:, :5], pos, decode_state=state, method='extend_step')[0],
      layer.apply(variables, x)[0][:, :5],
    )
  )()
  np.testing.assert_allclose(y, expected, atol=2e-6)


@pytest.mark.slow
def test_columns_that_are_padding_in_all_rows_take_no_slots():
  layer = build()
  variables, x = layer.init(jax.random.key(0)), inputs()
  _, side = layer.apply(variables, B, 8, method='init_decode_state')
  pos = jnp.where(jnp.arange(8) < 5, jnp.arange(8), -1)[None].repeat(B, 0)
  _, side = layer.apply(variables, x[:, :8], pos, decode_state=side.decode_state, method='extend_step')
  assert int(side.decode_state['slot']) == 5
  pos = jnp.full((B, 1), 5)
  y, side = layer.apply(variables, x[:, 5:6], pos, decode_state=side.decode_state, method='extend_step')
  np.testing.assert_allclose(y, layer.apply(variables, x)[0][:, 5:6], atol=2e-6)
  np.testing.assert_array_equal(side.decode_state['pos'][0], [0, 1, 2, 3, 4, 5, -1, -1])


def test_no_array_of_a_long_prompt_holds_prompt_times_cache():
  layer, length = build(cache_page_size=64), 2048
  variables = jax.eval_shape(layer.init, jax.random.key(0))
  _, side = jax.eval_shape(lambda: layer.apply({}, 1, length, method='init_decode_state'))

  def prefill(variables, x, state):
    return layer.apply(variables, x, jnp.arange(length)[None], decode_state=state, method='extend_step')[0]

  x = jax.ShapeDtypeStruct((1, length, D), jnp.float32)
  memory = jax.jit(prefill).lower(variables, x, side.decode_state).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.1 * 4 * length**2 * layer.num_heads


@pytest.mark.slow
@pytest.mark.parametrize(
  'fields, blkh',
  [
    ({'cache_page_size': 4, 'use_sinks': True}, (('replica', 'data'), None, 'mdl', None)),
    ({'sliding_window': 6, 'cache_dtype': 'int8'}, ('data', None, 'mdl', None)),
    ({}, (None, 'data', 'mdl', None)),  # Slots, 17 of them, over an axis: read at once.
  ],
)
def test_a_cache_split_over_a_mesh_equals_one_device(fields, blkh):
  mesh = jax.make_mesh((2, 2, 2), ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
  config = Config(MultiHeadAttention, input_dims=D, num_heads=6, num_kv_heads=3, causal=True, **fields)
  config.set(mesh_axis_names=mesh.axis_names, dims_per_head=5).weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.activation_split_dims_mapping.set(blkh=blkh, blnh=(blkh[0], None, 'mdl', None))
  layer = config.instantiate()
  variables, x = drawn_variables(layer.abstract_init()), inputs()

  def on_mesh(fn):
    def with_mesh(*args):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return fn(*args)

    return lambda *args: GuardedJit(with_mesh)(*jax.device_put(args, jax.NamedSharding(mesh, jax.P())))

  single, _ = decoded(config.clone(mesh_axis_names=None).instantiate(), variables, x)
  np.testing.assert_allclose(decoded(layer, variables, x, on_mesh)[0], single, atol=2e-6)


def test_fields_of_the_cache_are_checked():
  with pytest.raises(ConfigError, match='cache_dtype: expected int8 or a floating dtype, got int32'):
    build(cache_dtype='int32')
  with pytest.raises(ConfigError, match='cache_page_size: expected at least 1, got 0'):
    build(cache_page_size=0)


# Kinds of caches: read at once, by page, and a ring.
_KINDS = [{}, {'cache_page_size': 4, 'cache_dtype': 'int8'}, {'sliding_window': 6, 'cache_page_size': 4}]


@pytest.mark.slow_cases
@pytest.mark.parametrize('fields', _KINDS, ids=str)
def test_a_loop_over_layers_extends_its_caches_in_place(fields):
  attention = Config(MultiHeadAttention, input_dims=D, num_heads=4, num_kv_heads=2, dims_per_head=4, causal=True)
  config = Config(Repeat, layers_tpl=attention.set(**fields), num_layers=3)
  layer, loop = config.instantiate(), config.clone(unroll=1).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), inputs()

  def outputs(layer, variables, x):
    """Of a prompt with padding, and of a loop of single tokens."""
    _, side = layer.apply(variables, B, PROMPT + STEPS, method='init_decode_state')
    pos = jnp.where(np.arange(PROMPT) < LENGTHS[:, None], np.arange(PROMPT), -1)
    y, side = layer.apply(variables, x[:, :PROMPT], pos, decode_state=side.decode_state, method='extend_step')

    def step(state, i):
      at = (LENGTHS + i)[:, None]
      token = jnp.take_along_axis(x, at[..., None], axis=1)
      y, side = layer.apply(variables, token, at, decode_state=state, method='extend_step')
      return side.decode_state, y

    return jnp.where(pos[..., None] < 0, 0, y), jax.lax.scan(step, side.decode_state, jnp.arange(STEPS))[1]

  expected = jax.jit(functools.partial(outputs, layer))(variables, x)
  in_loop = jax.jit(functools.partial(outputs, loop)).lower(variables, x).compile()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), in_loop(variables, x), expected)
  slots = layer.layers._cached_attention().empty(B, PROMPT + STEPS, 2, 4).num_slots
  loops = in_loop.as_text().partition('ENTRY')[0]
  stack = rf'\[3,{B},2,{slots},4\]'
  assert re.search(stack, loops)
  assert not re.search(rf'{stack}\S* copy\(', loops)
