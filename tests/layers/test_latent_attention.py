"""Latent attention against its formula, its cache against one pass, and its use in models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import LENGTHS, PROMPT, STEPS, B, D, decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import LatentAttention, MultiHeadAttention, RMSNorm, RotaryPositions
from praxis_lite.layers.positions import YarnRotaryScaling
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding import GuardedJit

N, H, P, V, R = 4, 7, 2, 5, 6
YARN = Config(YarnRotaryScaling, factor=4.0, original_max_len=8)


def build(**fields):
  config = Config(LatentAttention, input_dims=D, num_heads=N, dims_per_head=H, rotary_dims=P, value_dims=V)
  config.set(latent_dims=R, causal=True, rotary_tpl=Config(RotaryPositions))
  return config.set(**fields).instantiate()


def rotate(x_BTNP):
  """Rotates each pair of dims i and i + P / 2 by position * 10000^(-2i / P)."""
  half = x_BTNP.shape[-1] // 2
  angle = np.arange(x_BTNP.shape[1])[:, None, None] * 10_000.0 ** -(np.arange(half) / half)
  turned = (x_BTNP[..., :half] + 1j * x_BTNP[..., half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag], axis=-1)


def normalize(x, scale):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def by_formula(w, x, scale):
  """The definition in float64, a head at a time."""
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), w)
  latent = x @ w['latent']['w'] + w['latent'].get('b', 0)
  c, r = normalize(latent[..., :R], w['latent_norm']['scale']), rotate(latent[..., None, R:])[:, :, 0]
  source = x
  if 'query_latent' in w:
    down = x @ w['query_latent']['w'] + w['query_latent'].get('b', 0)
    source = normalize(down, w['query_latent_norm']['scale'])
  out = np.zeros_like(x)
  for n in range(N):
    query = source @ w['query']['w'][:, n]
    query = np.concatenate([query[..., :-P], rotate(query[:, :, None, -P:])[:, :, 0]], axis=-1)
    key = np.concatenate([c @ w['key']['w'][:, n], r], axis=-1)
    logits = scale * np.einsum('bth,bsh->bts', query, key)
    logits[:, np.triu(np.ones(logits.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out += (weights / weights.sum(-1, keepdims=True)) @ (c @ w['value']['w'][:, n]) @ w['out']['w'][n]
  return out


@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
@pytest.mark.parametrize(
  'fields', [{}, {'query_latent_dims': 8, 'use_bias': True, 'use_out_bias': False, 'scale': 0.7}], ids=['plain', 'full']
)
def test_the_formula(fields, implementation):
  layer = build(implementation=implementation, **fields)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  y, _ = layer.apply(variables, x)
  np.testing.assert_allclose(y, by_formula(variables, x, fields.get('scale', H**-0.5)), atol=1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields, slots',
  [
    ({'query_latent_dims': 8, 'use_bias': True}, 17),
    ({'cache_page_size': 4, 'logit_soft_cap': 2.0, 'scale': 0.3, 'value_dims': None}, 20),
    ({'sliding_window': 6, 'cache_page_size': 4, 'use_sinks': True}, 6),
    ({'rotary_dims': 0, 'rotary_tpl': None}, 17),
    (
      {'rotary_tpl': Config(RotaryPositions, scaling_tpl=Config(YarnRotaryScaling, factor=4.0, original_max_len=8))},
      17,
    ),
  ],
)
def test_decoding_equals_one_pass_and_caches_only_the_latent_vector(fields, slots):
  layer = build(**fields)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  y, state = decoded(layer, variables, x)
  assert {name: np.shape(array) for name, array in state.items()} == {
    'key': (B, 1, slots, R + layer.rotary_dims),
    'pos': (B, slots),
    'slot': (),
  }
  np.testing.assert_allclose(y, expected(layer, variables, x), atol=2e-6)


def test_the_cache_may_be_int8():
  layer = build(cache_dtype='int8')
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  y, state = decoded(layer, variables, x)
  assert state['key'].dtype == jnp.int8 and state['key_scale'].shape == (B, 1, PROMPT + STEPS)
  full = expected(layer, variables, x)
  assert 1e-5 < np.abs(y - full).max() < 0.05 * np.abs(full).max()


@pytest.mark.slow_cases
@pytest.mark.parametrize('shape, names', [((2, 2, 2), ('data', 'mdl', 'idle')), ((3, 2), ('mdl', 'data'))], ids=str)
def test_decoding_on_a_mesh_is_that_of_one_device(shape, names):
  """Four heads over two or three devices, and latent dims that the axes do not divide."""
  layer = build(query_latent_dims=5)
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  one_device, _ = decoded(layer, variables, x)
  split = {'blnh': ('data', None, 'mdl', None), 'blkh': ('data', None, 'mdl', None)}
  config = Config(LatentAttention, input_dims=D, num_heads=N, dims_per_head=H, rotary_dims=P, value_dims=V)
  config.set(latent_dims=R, causal=True, rotary_tpl=Config(RotaryPositions), query_latent_dims=5)
  config.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  config.activation_split_dims_mapping.set(**split)
  sharded = config.set(mesh_axis_names=names).instantiate()
  mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[: np.prod(shape)])
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    y, _ = decoded(sharded, variables, x, wrap=GuardedJit)
  np.testing.assert_allclose(y, one_device, atol=2e-6)


def test_a_language_model_of_repeated_blocks_has_it_and_decodes_with_stacked_caches():
  config = transformer_lm(vocab_size=11, model_dims=12, num_layers=3, num_heads=2, dims_per_head=6, hidden_dims=16)
  block = config.lm_tpl.transformer_tpl.layers_tpl
  config.lm_tpl.transformer_tpl.unroll = 1
  rotary = block.attention_tpl.rotary_tpl
  block.attention_tpl = Config(LatentAttention, latent_dims=4, rotary_dims=2, value_dims=5, rotary_tpl=rotary)
  set_sharding(config, batch_axes='data')
  lm = config.set(mesh_axis_names=('data', 'mdl')).instantiate().lm
  variables = drawn_variables(lm.abstract_init())
  ids = np.random.default_rng(0).integers(0, 11, (B, PROMPT))
  whole, _ = lm.apply(variables, ids, method='logits')
  _, side = lm.apply(variables, B, PROMPT, method='init_decode_state')
  pos = np.where(np.arange(PROMPT) < LENGTHS[:, None], np.arange(PROMPT), -1)
  keys = [x.shape for path, x in jax.tree.leaves_with_path(side.decode_state) if path[-1].key == 'key']
  assert keys == [(3, B, 1, PROMPT, 6)]
  last = LENGTHS - 1
  logits, _ = lm.apply(variables, ids, pos, last, decode_state=side.decode_state, method='extend_step')
  np.testing.assert_allclose(logits, whole[np.arange(B), last], atol=1e-5)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_kv_heads': 2}, r'num_kv_heads: each head has its own keys here; expected None, got 2'),
    ({'combine_qkv': True}, r'combine_qkv: latent attention does not support it; leave it unset'),
    ({'qk_norm_tpl': Config(RMSNorm)}, r'qk_norm_tpl: latent attention does not support it'),
    ({'kv_input_dims': 5}, r'kv_input_dims: latent attention does not support it'),
    ({'rotary_tpl': None}, r'rotary_dims: 2, and rotary_tpl is None; expected both or neither'),
    ({'rotary_dims': 0}, r'rotary_dims: 0, and rotary_tpl is set; expected both or neither'),
    ({'rotary_dims': 7}, r'rotary_dims'),
    ({'rotary_dims': 3}, r'rotary\.dims: rotary positions rotate pairs of dims, and 3 is odd'),
    ({'value_dims': 8}, r'value_dims'),
    ({'latent_dims': 0}, r'latent_dims'),
    ({'query_latent_dims': 0}, r'query_latent_dims'),
  ],
)
def test_mistakes_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    build(**fields)


def test_it_attends_to_its_own_sequence_only():
  layer = build(causal=False)
  with pytest.raises(ConfigError, match='latent attention has no cross attention'):
    jax.eval_shape(lambda v: layer.apply(v, inputs(), inputs()), layer.abstract_init())


def test_flops_are_those_of_queries_keys_and_values():
  assert build().token_flops(10).attention == 2 * N * (H + V) * 10
  same = Config(MultiHeadAttention, input_dims=D, num_heads=N, dims_per_head=H).instantiate()
  assert build(value_dims=None).token_flops(10).attention == same.token_flops(10).attention
