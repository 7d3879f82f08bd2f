"""Encoder and decoder against formulas, packed against apart, and token by token against one pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  CrossAttention,
  DecoderBlock,
  Embedding,
  FullSoftmax,
  LearnedPositions,
  MoeFeedForward,
  PerDimScale,
  RelativeBias,
  RMSNorm,
  SinusoidalPositions,
  StackedTransformer,
  TransformerBlock,
  TransformerEncoderDecoder,
)
from praxis_lite.layers.positions import relative_position_bucket
from praxis_lite.layers.transformer_block import NORM_POLICIES

B, T, S, D, N, H, V = 3, 7, 9, 8, 2, 3, 13


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(*shape, seed=1):
  return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def cross(**fields):
  return Config(CrossAttention, input_dims=D, num_heads=N, dims_per_head=H, **fields).instantiate()


def model(**fields):
  config = Config(TransformerEncoderDecoder, vocab_size=V, model_dims=D, num_layers=2, num_encoder_layers=3)
  config.set(num_heads=N, dims_per_head=H, hidden_dims=10)
  config.relative_bias_tpl = Config(RelativeBias, num_buckets=8, max_distance=6)
  return config.set(**fields)


@functools.cache
def drawn():
  return drawn_variables(model().instantiate().abstract_init())


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


# ------------------------------------------------------------------ cross attention

TARGETS = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 3, 3, 3], [1] * 7], np.int32)
SOURCES = np.array([[1, 1, 2, 2, 2, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3, 3, 3], [1] * 8 + [0]], np.int32)


@pytest.mark.parametrize('targets', [TARGETS, None], ids=['packed', 'apart'])
@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
def test_a_target_attends_to_the_source_of_its_segment(targets, implementation):
  layer = cross(implementation=implementation, block_size=2)
  variables, x, source = drawn_variables(layer.abstract_init()), normal(B, T, D), normal(B, S, D, seed=2)
  found, _ = jax.jit(layer.apply)(variables, x, source, segment_ids=targets, kv_segment_ids=SOURCES)
  query, key, value = (
    np.einsum('btd,dnh->bnth', of, variables[name]['w'])
    for name, of in (('query', x), ('key', source), ('value', source))
  )
  allowed = (SOURCES > 0)[:, None] if targets is None else targets[:, :, None] == SOURCES[:, None]
  logits = np.where(allowed[:, None], query @ key.swapaxes(-1, -2) / np.sqrt(H), -1e30)
  expected = np.einsum('bnth,nhd->btd', softmax(logits) @ value, variables['out']['w'])
  real = np.ones((B, T), bool) if targets is None else targets > 0
  np.testing.assert_allclose(np.asarray(found)[real], expected[real], atol=1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields, tolerance',
  [
    ({}, 1e-5),
    ({'cache_page_size': 4}, 1e-5),  # Nine sources take three pages.
    ({'num_kv_heads': 1, 'use_bias': True, 'qk_norm_tpl': Config(RMSNorm)}, 1e-5),
    ({'num_kv_heads': 1, 'qk_norm_tpl': Config(RMSNorm), 'qk_norm_over': 'heads'}, 1e-5),
    ({'per_dim_scale_tpl': Config(PerDimScale)}, 1e-5),
    ({'cache_dtype': 'int8'}, 0.02),
    ({'logit_soft_cap': 1.0, 'scale': 1.0}, 1e-5),
    ({'use_sinks': True}, 1e-5),
  ],
  ids=['whole', 'pages', 'grouped', 'all heads', 'dims', 'int8', 'cap', 'sinks'],
)
def test_kept_keys_and_values_give_what_one_pass_gives(fields, tolerance):
  layer = cross(**fields)
  variables, x, source = drawn_variables(layer.abstract_init()), normal(B, T, D), normal(B, S, D, seed=2)
  paddings = np.where(SOURCES > 0, 1, 0).astype(np.int32)
  expected, _ = layer.apply(variables, x, source, kv_segment_ids=paddings)
  _, side = layer.apply(variables, source, paddings, method='read_source')
  found, after = layer.apply(
    variables, x, np.zeros((B, T), np.int32), decode_state=side.decode_state, method='attend_to_source'
  )
  np.testing.assert_allclose(found, expected, atol=tolerance)
  jax.tree.map(np.testing.assert_array_equal, after.decode_state, side.decode_state)
  if 'cache_dtype' in fields:
    assert side.decode_state['key'].dtype == jnp.int8


def test_mistakes_of_cross_attention_are_named():
  with pytest.raises(ConfigError, match='causal: cross attention does not support it'):
    cross(causal=True)
  layer = cross()
  variables = drawn_variables(layer.abstract_init())
  with pytest.raises(ConfigError, match='attend_to_source needs the decode state that read_source makes'):
    layer.apply(variables, normal(B, 1, D), np.zeros((B, 1), np.int32), method='attend_to_source')
  block = Config(DecoderBlock, input_dims=D, hidden_dims=5, num_heads=N).instantiate()
  with pytest.raises(ConfigError, match='a block of a decoder attends to a source; pass source_BSD'):
    block.apply(drawn_variables(block.abstract_init()), normal(B, T, D))


# ------------------------------------------------------------------ the block


def rms(x, variable):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * variable['scale']


@pytest.mark.parametrize('policy', NORM_POLICIES)
def test_a_block_of_a_decoder_is_its_formula(policy):
  layer = Config(DecoderBlock, input_dims=D, hidden_dims=12, num_heads=N, norm_policy=policy).instantiate()
  variables, x, source = drawn_variables(layer.abstract_init()), normal(B, T, D), normal(B, S, D, seed=2)
  found, _ = jax.jit(layer.apply)(variables, x, source)
  sublayers = {
    'attention': lambda x: layer.attention.apply(variables['attention'], x)[0],
    'cross_attention': lambda x: layer.cross_attention.apply(variables['cross_attention'], x, source)[0],
    'ff': lambda x: layer.ff.apply(variables['ff'], x)[0],
  }
  for name, sublayer in sublayers.items():
    norm = variables[f'{name}_norm']
    if policy == 'post':
      x = rms(x + np.asarray(sublayer(x)), norm)
    elif policy == 'post_sublayer':
      x = x + rms(np.asarray(sublayer(x)), norm)
    else:
      y = np.asarray(sublayer(rms(x, norm)))
      x = x + (rms(y, variables[f'{name}_out_norm']) if policy == 'primer_hybrid' else y)
  np.testing.assert_allclose(found, x, atol=2e-5)


# ------------------------------------------------------------------ shared biases


def test_all_blocks_of_a_stack_share_a_bias_of_offsets():
  """Against blocks that get the bias as an array, looked up by hand; the encoder's has buckets for both directions."""
  layer, variables = model().instantiate(), drawn()
  for stack, bidirectional in (('encoder', True), ('decoder', False)):
    offset = np.arange(T)[None, :] - np.arange(T)[:, None]
    buckets = np.asarray(relative_position_bucket(jnp.asarray(offset), 8, 6, bidirectional))
    bias_NTT = np.moveaxis(np.asarray(variables[f'{stack}_bias']['w'])[buckets], -1, 0)
    more = {'source_BSD': normal(B, S, D, seed=2)} if stack == 'decoder' else {}
    x = normal(B, T, D)
    below = variables[stack]['layers']
    for i in range(3 if stack == 'encoder' else 2):
      of_block = jax.tree.map(lambda w, i=i: w[i], below)
      x, _ = getattr(layer, stack).layers.apply(of_block, x, logit_bias=bias_NTT[None], **more)
    if stack == 'encoder':
      embedded = normal(B, T, D)
      found, _ = layer.encoder.apply(variables['encoder'], embedded, logit_bias=bias_NTT[None])
      np.testing.assert_allclose(found, x, atol=1e-5)
      ids = tokens(B, T)
      table = np.asarray(variables['softmax']['w'])
      by_hand, _ = layer.encoder.apply(variables['encoder'], table[ids], logit_bias=bias_NTT[None])
      encoded, _ = layer.apply(variables, ids, method='encode')
      np.testing.assert_allclose(encoded, rms(np.asarray(by_hand), variables['encoder_norm']), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('implementation', ['blockwise', 'dense'])
def test_attention_in_blocks_computes_the_same_with_the_same_gradients(implementation):
  """Blockwise attention gets the bias as a function; with 'auto', a short row gets it as an array."""
  ids, labels, sources = tokens(B, T), tokens(B, T, seed=2), tokens(B, S, seed=3)

  def run(config):
    layer = config.instantiate()

    def loss(v):
      out, _ = layer.apply(v, sources, ids, labels, source_segment_ids=SOURCES, segment_ids=TARGETS)
      return jnp.sum(out.xent * (TARGETS > 0))

    return jax.jit(jax.value_and_grad(loss))(drawn())

  other = model()
  for stack in other.encoder_tpl, other.decoder_tpl:
    stack.layers_tpl.attention_tpl.set(implementation=implementation, block_size=2)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), run(other), run(model()))


def test_an_attention_layer_knows_that_it_shares_a_bias():
  """So `explain` names the implementation that runs; cross attention has none."""
  layer = model().instantiate()
  assert layer.encoder.layers.attention._has_bias and layer.decoder.layers.attention._has_bias
  assert not layer.decoder.layers.cross_attention._has_bias
  without = model(relative_bias_tpl=None, position_tpl=Config(SinusoidalPositions)).instantiate()
  assert not without.encoder.layers.attention._has_bias
  assert not Config(TransformerBlock, input_dims=D, hidden_dims=5, num_heads=N).instantiate().attention._has_bias


def test_two_biases_of_a_layer_are_refused():
  config = model()
  config.encoder_tpl.layers_tpl.attention_tpl.relative_bias_tpl = Config(RelativeBias)
  layer = config.instantiate()
  with pytest.raises(ConfigError, match='relative_bias_tpl: the call gives a logit_bias too; set one of them to None'):
    jax.eval_shape(lambda key: layer.apply(layer.init(key), tokens(B, T), method='encode'), jax.random.key(0))


# ------------------------------------------------------------------ the whole model


def apart(ids, segments, width):
  """The segments of packed rows, one in each row, and their segment ids."""
  rows = [ids[b, segments[b] == s] for b in range(len(ids)) for s in range(1, segments[b].max() + 1)]
  out, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.int32)
  for row, values in enumerate(rows):
    out[row, : len(values)], mask[row, : len(values)] = values, 1
  return out, mask


def positions(segments):
  return np.array([[i - list(row).index(s) for i, s in enumerate(row)] for row in segments], np.int32)


POSITIONS = {
  'relative': {},
  'sinusoidal': {'relative_bias_tpl': None, 'position_tpl': Config(SinusoidalPositions)},
  'learned': {'relative_bias_tpl': None, 'position_tpl': Config(LearnedPositions, max_len=S)},
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', POSITIONS)
def test_packed_rows_have_the_logits_of_their_segments_alone(kind):
  layer = model(**POSITIONS[kind]).instantiate()
  variables = drawn_variables(layer.abstract_init())
  sources, ids = tokens(B, S), tokens(B, T, seed=4)
  packed, _ = layer.apply(
    variables,
    sources,
    ids,
    source_segment_ids=SOURCES,
    source_segment_pos=positions(SOURCES),
    segment_ids=TARGETS,
    segment_pos=positions(TARGETS),
    method='logits',
  )
  (alone_sources, of_sources), (alone, of_targets) = apart(sources, SOURCES, S), apart(ids, TARGETS, T)
  found, _ = layer.apply(variables, alone_sources, alone, source_segment_ids=of_sources, method='logits')
  expected = np.concatenate(
    [np.asarray(packed)[b, TARGETS[b] == s] for b in range(B) for s in range(1, TARGETS[b].max() + 1)]
  )
  np.testing.assert_allclose(np.asarray(found)[of_targets > 0], expected, atol=1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', POSITIONS)
@pytest.mark.parametrize('num_layers', [2, 6], ids=['unrolled', 'loop'])
def test_token_by_token_gives_the_logits_of_one_pass(kind, num_layers):
  config = model(num_layers=num_layers, **POSITIONS[kind])
  layer = config.instantiate()
  variables = drawn_variables(layer.abstract_init())
  sources, ids, of_sources = tokens(B, S), tokens(B, T, seed=4), (SOURCES > 0).astype(np.int32)
  expected, _ = layer.apply(variables, sources, ids, source_segment_ids=of_sources, method='logits')
  _, side = layer.apply(variables, sources, of_sources, T, method='init_decode_state')
  lengths, state = np.array([3, 1, 2]), side.decode_state

  @jax.jit
  def extend(ids, pos, last, state):
    logits, side = layer.apply(variables, ids, pos, last, decode_state=state, method='extend_step')
    return logits, side.decode_state

  pos = np.where(np.arange(3) < lengths[:, None], np.arange(3), -1).astype(np.int32)
  logits, state = extend(ids[:, :3], pos, lengths - 1, state)
  np.testing.assert_allclose(logits, np.asarray(expected)[np.arange(B), lengths - 1], atol=1e-5)
  for step in range(4):
    at = lengths + step
    logits, state = extend(ids[np.arange(B), at][:, None], at[:, None].astype(np.int32), np.zeros(B, np.int32), state)
    np.testing.assert_allclose(logits, np.asarray(expected)[np.arange(B), at], atol=1e-5)


@pytest.mark.slow
def test_layers_apart_compute_what_a_scan_over_them_computes():
  apart = model()
  apart.encoder_tpl = Config(StackedTransformer)
  apart.decoder_tpl = Config(StackedTransformer, layers_tpl=Config(DecoderBlock), remat='full')
  layer, variables = apart.instantiate(), dict(drawn())
  for stack, count in (('encoder', 3), ('decoder', 2)):
    below = variables[stack]['layers']
    variables[stack] = {f'layers_{i}': jax.tree.map(lambda w, i=i: w[i], below) for i in range(count)}
  arguments = tokens(B, S), tokens(B, T), tokens(B, T, seed=2)
  expected, _ = model().instantiate().apply(drawn(), *arguments)
  found, _ = layer.apply(variables, *arguments)
  np.testing.assert_allclose(found.xent, expected.xent, atol=1e-5)
  _, side = layer.apply(variables, arguments[0], None, T, method='init_decode_state')
  first = arguments[1][:, :1], np.zeros((B, 1), np.int32), np.zeros(B, np.int32)
  logits, _ = layer.apply(variables, *first, decode_state=side.decode_state, method='extend_step')
  np.testing.assert_allclose(logits, expected.logits[:, 0], atol=1e-5)


def test_tables_are_shared_or_separate():
  def shapes(**fields):
    tree = model(**fields).instantiate().abstract_init()
    return {name: tree[name]['w'].shape for name in ('embedding', 'decoder_embedding', 'softmax') if name in tree}

  assert shapes() == {'softmax': (V, D)}
  untied = {'embedding_tpl': Config(Embedding), 'softmax_tpl': Config(FullSoftmax)}
  assert shapes(**untied) == {'embedding': (V, D), 'softmax': (D, V)}
  both = shapes(**untied, decoder_embedding_tpl=Config(Embedding))
  assert both == {'embedding': (V, D), 'decoder_embedding': (V, D), 'softmax': (D, V)}
  with pytest.raises(ConfigError, match='a FullSoftmax has none to share'):
    model(softmax_tpl=Config(FullSoftmax)).instantiate()


def test_t5_divides_logits_by_the_square_root_of_the_dims():
  arguments = tokens(B, S), tokens(B, T)
  whole, _ = model().instantiate().apply(drawn(), *arguments, method='logits')
  scaled, _ = model(scale_output_sqrt_depth=True).instantiate().apply(drawn(), *arguments, method='logits')
  np.testing.assert_allclose(scaled, whole / np.sqrt(D), rtol=1e-5, atol=1e-6)


def test_a_row_longer_than_the_positions_is_refused():
  layer = model(relative_bias_tpl=None, position_tpl=Config(LearnedPositions, max_len=T)).instantiate()
  variables = jax.eval_shape(layer.init, jax.random.key(0))
  assert layer.max_positions == T
  with pytest.raises(ConfigError, match=r'position_tpl\.max_len: 7 is less than the sequence length, 9'):
    jax.eval_shape(lambda v: layer.apply(v, tokens(B, S), tokens(B, T), method='logits'), variables)
  with pytest.raises(ConfigError, match=r'max_len: 7 is less than the sequence length, 8'):
    jax.eval_shape(lambda v: layer.apply(v, tokens(B, T), None, T + 1, method='init_decode_state'), variables)


def test_biases_are_off_and_on_by_one_field():
  def biases(use_bias):
    paths = jax.tree.leaves_with_path(model(use_bias=use_bias).instantiate().abstract_init())
    return {path[-2].key for path, _ in paths if path[-1].key == 'b'}

  assert biases(True) == {'query', 'key', 'value', 'out', 'up', 'gate', 'down'}
  assert biases(False) == biases(None) == set()


@pytest.mark.slow
def test_experts_know_the_padding_of_both_sides():
  """Tokens of padding take no place of an expert, so their ids do not matter."""
  config = model()
  for stack in config.encoder_tpl, config.decoder_tpl:
    stack.layers_tpl.ff_tpl = Config(MoeFeedForward, num_experts=3, dispatch='capacity', capacity_factor=0.5)
  layer = config.instantiate()
  variables = drawn_variables(layer.abstract_init())
  of_sources, of_targets = (SOURCES > 0).astype(np.int32), (TARGETS > 0).astype(np.int32)

  def run(fill):
    sources, ids = np.where(of_sources, tokens(B, S), fill), np.where(of_targets, tokens(B, T), fill)
    out, _ = layer.apply(
      variables, sources, ids, source_segment_ids=of_sources, segment_ids=of_targets, method='logits'
    )
    return np.asarray(out)[of_targets > 0]

  np.testing.assert_array_equal(run(0), run(V - 1))


def test_the_mask_of_cross_attention_refuses_a_misspelt_argument():
  layer = Config(CrossAttention, input_dims=D, num_heads=N, dims_per_head=H).instantiate(name='x')
  with pytest.raises(TypeError, match='kv_segments'):
    layer.attention_mask(kv_segments=jnp.ones((B, S), jnp.int32))
