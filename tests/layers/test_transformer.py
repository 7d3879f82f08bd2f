"""Blocks against their formula; stacks against each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.feedforward import FeedForward
from praxis_lite.layers.normalizations import LayerNorm
from praxis_lite.layers.transformer import RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import NORM_POLICIES, TransformerBlock
from praxis_lite.layers.transformer_lm import TransformerLm

B, T, D, LAYERS = 2, 5, 8, 2


def block(**fields):
  config = Config(TransformerBlock, **{'input_dims': D, 'hidden_dims': 12, 'num_heads': 2, **fields})
  config.attention_tpl.causal = True
  return config


def stack(cls, layers=None, **fields):
  return Config(cls, layers_tpl=layers or block(), num_layers=LAYERS, **fields).instantiate()


def stacked_variables(variables):
  """Variables of a `StackedTransformer` as those of a `RepeatedTransformer`."""
  layers = [variables[f'layers_{i}'] for i in range(LAYERS)]
  return {'layers': jax.tree.map(lambda *xs: jnp.stack(xs), *layers)}


def x_BTD():
  return np.random.default_rng(3).standard_normal((B, T, D)).astype(np.float32)


def rms(x, scale):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize('policy', NORM_POLICIES)
def test_block_is_its_formula(policy):
  layer = block(norm_policy=policy).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), x_BTD()
  y, _ = jax.jit(layer.apply)(variables, x)

  def attention(x):
    return np.asarray(layer.attention.apply(variables['attention'], x)[0])

  def feed_forward(x):
    gate, up, down = (np.asarray(variables['ff'][name]['w']) for name in ('gate', 'up', 'down'))
    return (x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down

  scales = {name: variable['scale'] for name, variable in variables.items() if 'scale' in variable}
  if policy == 'pre':
    x = x + attention(rms(x, scales['attention_norm']))
    expected = x + feed_forward(rms(x, scales['ff_norm']))
  elif policy == 'post_sublayer':
    x = x + rms(attention(x), scales['attention_norm'])
    expected = x + rms(feed_forward(x), scales['ff_norm'])
  elif policy == 'primer_hybrid':
    x = x + rms(attention(rms(x, scales['attention_norm'])), scales['attention_out_norm'])
    expected = x + rms(feed_forward(rms(x, scales['ff_norm'])), scales['ff_out_norm'])
  else:
    x = rms(x + attention(x), scales['attention_norm'])
    expected = rms(x + feed_forward(x), scales['ff_norm'])
  np.testing.assert_allclose(y, expected, atol=2e-5)


def test_norm_and_feed_forward_can_be_others():
  config = block(norm_tpl=Config(LayerNorm), ff_tpl=Config(FeedForward))
  weights = config.instantiate().abstract_init()
  assert set(weights['attention_norm']) == {'scale', 'bias'}
  assert set(weights['ff']) == {'up', 'down'}


def test_stacked_equals_repeated_with_the_same_weights():
  stacked, repeated = stack(StackedTransformer), stack(RepeatedTransformer)
  variables = drawn_variables(stacked.abstract_init())
  segment_ids = jnp.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])

  def run(layer, variables):
    def loss(v, x):
      return jnp.sum(layer.apply(v, x, segment_ids=segment_ids)[0] ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x_BTD())

  value, (grads, grad_x) = run(stacked, variables)
  got = run(repeated, stacked_variables(variables))
  expected = (value, (stacked_variables(grads), grad_x))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize('cls', [StackedTransformer, RepeatedTransformer])
def test_no_remat_policy_changes_values_or_gradients(cls):
  layers = block(dropout_tpl=Config(Dropout, rate=0.2))
  variables = drawn_variables(stack(cls, layers).abstract_init())

  def run(policy):
    names = ('query_proj', 'context', 'ffn_up') if policy == 'save_names' else ()
    layer = stack(cls, layers, remat=policy, remat_save_names=names)

    def loss(v):
      return jnp.sum(layer.apply(v, x_BTD(), key=jax.random.key(1))[0] ** 2)

    return jax.jit(jax.value_and_grad(loss))(variables)

  expected = run('none')
  for policy in ('full', 'save_names'):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(policy), expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize('cls', [StackedTransformer, RepeatedTransformer])
@pytest.mark.parametrize('policy', ['pre', 'post'])
def test_incremental_equals_full(cls, policy):
  layer = stack(cls, block(num_kv_heads=1, norm_policy=policy))
  variables, x = drawn_variables(layer.abstract_init()), x_BTD()
  full, _ = jax.jit(layer.apply)(variables, x)
  _, side = layer.apply(variables, B, T, method='init_decode_state')

  @jax.jit
  def extend(x, pos, state):
    return layer.apply(variables, x, pos, decode_state=state, method='extend_step')

  y, side = extend(x[:, :3], jnp.tile(jnp.arange(3), (B, 1)), side.decode_state)
  steps = [y]
  for t in range(3, T):
    y, side = extend(x[:, t : t + 1], jnp.full((B, 1), t), side.decode_state)
    steps.append(y)
  np.testing.assert_allclose(jnp.concatenate(steps, axis=1), full, atol=1e-5)


def test_windows_of_layers_alternate():
  layer = stack(StackedTransformer, sliding_windows=(2, None))
  variables, x = drawn_variables(layer.abstract_init()), x_BTD()
  expected = x
  for i, window in enumerate((2, None)):
    one = block()
    one.attention_tpl.sliding_window = window
    expected, _ = one.instantiate().apply(variables[f'layers_{i}'], expected)
  np.testing.assert_allclose(layer.apply(variables, x)[0], expected, atol=1e-6)
  assert [b.attention.sliding_window for b in stack(StackedTransformer, sliding_windows=(2,)).layers] == [2, 2]


def test_dropout_is_of_training_only():
  layer = stack(RepeatedTransformer, block(dropout_tpl=Config(Dropout, rate=0.5)))
  variables, x = drawn_variables(layer.abstract_init()), x_BTD()
  key = jax.random.key(1)
  plain, _ = stack(RepeatedTransformer).apply(variables, x)
  np.testing.assert_array_equal(layer.apply(variables, x, key=key, do_eval=True)[0], plain)
  assert not np.allclose(layer.apply(variables, x, key=key)[0], plain)


def test_unknown_norm_policy_is_named():
  expected = r"norm_policy: expected 'pre', 'post', 'post_sublayer' or 'primer_hybrid', got 'sandwich'"
  with pytest.raises(ConfigError, match=expected):
    block(norm_policy='sandwich').instantiate()


def pattern_lm(cls, **fields):
  """Three blocks of a language model: a local one with a gated feed-forward layer, a global one without, in turn."""
  local, whole = Config(TransformerBlock), Config(TransformerBlock, ff_tpl=Config(FeedForward))
  local.attention_tpl.sliding_window = 2
  config = Config(TransformerLm, vocab_size=7, model_dims=D, num_layers=3, num_heads=2, use_bias=True)
  return config.set(transformer_tpl=Config(cls, layers_tpl=(local, whole), **fields)).instantiate()


@pytest.mark.slow
def test_a_pattern_of_blocks_equals_them_in_sequence():
  """Values, gradients and decoding; the scan has one round, and the third block comes after it."""
  stacked = pattern_lm(StackedTransformer)
  repeated = pattern_lm(RepeatedTransformer, remat=('none', 'full'))
  variables = drawn_variables(stacked.abstract_init())
  ids = jax.random.randint(jax.random.key(1), (B, T), 0, 7)
  blocks = repeated.transformer.layers
  assert [(b.input_dims, b.hidden_dims, b.attention.causal, b.ff.use_bias) for b in blocks] == [
    (D, 4 * D, True, True)
  ] * 2
  assert [b.attention.sliding_window for b in [*blocks, *repeated.transformer.rest]] == [2, None, 2]

  def in_scan(variables):
    layers = [variables['transformer'][f'layers_{i}'] for i in range(3)]
    first, second = (jax.tree.map(lambda x: x[None], layer) for layer in layers[:2])
    return {**variables, 'transformer': {'layers_0': first, 'layers_1': second, 'rest_0': layers[2]}}

  def run(layer, variables):
    def loss(v):
      return jnp.mean(layer.apply(v, ids, ids)[0].xent)

    return jax.jit(jax.value_and_grad(loss))(variables)

  value, grads = run(stacked, variables)
  got = run(repeated, in_scan(variables))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, (value, in_scan(grads)))
  variables = in_scan(variables)
  full, _ = jax.jit(lambda v: repeated.apply(v, ids, method='logits'))(variables)
  _, side = repeated.apply(variables, B, T, method='init_decode_state')

  @jax.jit
  def extend(ids, pos, state):
    last = jnp.zeros(B, jnp.int32)
    return repeated.apply(variables, ids, pos, last, decode_state=state, method='extend_step')

  for t in range(T):
    logits, side = extend(ids[:, t : t + 1], jnp.full((B, 1), t), side.decode_state)
    np.testing.assert_allclose(logits, full[:, t], atol=1e-5)


def test_windows_and_a_pattern_exclude_each_other():
  for cls in (StackedTransformer, RepeatedTransformer):
    assert [b.attention.sliding_window for b in stack(cls, sliding_windows=(2, None)).layers] == [2, None]
    with pytest.raises(
      ConfigError, match='sliding_windows: layers_tpl is a pattern of 2 blocks; set the attention_tpl'
    ):
      stack(cls, (block(), block()), sliding_windows=(2, None))
    with pytest.raises(ConfigError, match='sliding_windows: expected the windows of one or more blocks, or None'):
      stack(cls, sliding_windows=())
