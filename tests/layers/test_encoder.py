"""The encoder: its formula, what packing and padding may change, and its mistakes."""

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
  Embedding,
  HeadTransform,
  LearnedPositions,
  MoeFeedForward,
  SharedEmbeddingSoftmax,
  TransformerEncoder,
)
from praxis_lite.models import transformer_encoder

B, T, D, V, N = 3, 7, 12, 13, 3
SEGMENTS = np.array([[1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3], [1] * 7], np.int32)
POSITIONS = np.array([[i - list(row).index(s) for i, s in enumerate(row)] for row in SEGMENTS], np.int32)
TYPES = np.array([[0, 1, 0, 0, 1, 0, 0], [0] * 7, [0, 0, 1, 1, 1, 1, 1]], np.int32)
IDS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
STYLES = ('bert', 'pre_norm')


def config(style='bert', **fields):
  sizes = {'vocab_size': V, 'model_dims': D, 'num_layers': 2, 'num_heads': N, 'hidden_dims': 10, 'max_len': 9}
  return transformer_encoder(**{**sizes, 'style': style, **fields})


@functools.cache
def make(style='bert'):
  layer = config(style).instantiate()
  return layer, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(layer.abstract_init()))


def norm(x, of):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12) * of['scale'] + of['bias']


@pytest.mark.parametrize('style', STYLES)
def test_it_is_its_formula(style):
  layer, variables = make(style)
  found, _ = layer.apply(variables, IDS, token_type_ids=TYPES)
  x = variables['embedding']['w'][IDS] + variables['position']['w'][:T] + variables['token_type']['w'][TYPES]
  if style == 'bert':
    x = norm(x, variables['embedding_norm'])
  block = layer.transformer.layers
  for i in range(2):
    of = jax.tree.map(lambda w, i=i: w[i], variables['transformer']['layers'])
    for name in ('attention', 'ff'):
      sublayer = lambda x, name=name, of=of: np.asarray(getattr(block, name).apply(of[name], x)[0])  # noqa: E731
      if style == 'bert':
        x = norm(x + sublayer(x), of[f'{name}_norm'])
      else:
        x = x + sublayer(norm(x, of[f'{name}_norm']))
  expected = x if style == 'bert' else norm(x, variables['final_norm'])
  np.testing.assert_allclose(found, expected, atol=3e-5)


def test_tokens_attend_in_both_directions_and_not_to_padding():
  layer, variables = make()
  known, _ = layer.apply(variables, IDS, segment_ids=SEGMENTS, segment_pos=POSITIONS)
  for row, at, changed in ((0, 4, {2, 3, 4}), (1, 0, {0, 1}), (2, 6, set(range(7))), (0, 6, set())):
    other = IDS.copy()
    other[row, at] = (other[row, at] + 1) % V
    new, _ = layer.apply(variables, other, segment_ids=SEGMENTS, segment_pos=POSITIONS)
    differs = (np.abs(np.asarray(new) - np.asarray(known)).max(-1) > 1e-6) & (SEGMENTS > 0)
    assert {(row, place) for place in changed} == {(r, t) for r, t in np.argwhere(differs)}


@pytest.mark.slow
def test_packed_rows_have_the_states_of_their_segments_alone():
  layer, variables = make()
  packed, _ = layer.apply(variables, IDS, segment_ids=SEGMENTS, segment_pos=POSITIONS, token_type_ids=TYPES)
  for row in range(B):
    for segment in range(1, SEGMENTS[row].max() + 1):
      of = SEGMENTS[row] == segment
      alone, _ = layer.apply(variables, IDS[row : row + 1, of], token_type_ids=TYPES[row : row + 1, of])
      np.testing.assert_allclose(np.asarray(packed)[row, of], alone[0], atol=1e-5)


def test_layers_apart_compute_what_a_scan_over_them_computes():
  layer, variables = config(repeat=False).instantiate(), make()[1]
  below = variables['transformer']['layers']
  apart = {**variables, 'transformer': {f'layers_{i}': jax.tree.map(lambda w, i=i: w[i], below) for i in range(2)}}
  expected, _ = make()[0].apply(variables, IDS, segment_ids=SEGMENTS)
  found, _ = layer.apply(apart, IDS, segment_ids=SEGMENTS)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_positions_may_begin_later_in_their_table():
  layer, variables = config().set(first_position=2).instantiate(), make()[1]
  assert layer.max_positions == 7
  found, _ = layer.apply(variables, IDS)
  rolled = {**variables, 'position': {'w': np.roll(variables['position']['w'], -2, axis=0)}}
  expected, _ = make()[0].apply(rolled, IDS)
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_experts_know_the_padding():
  """Tokens of padding take no place of an expert, so their ids do not matter."""
  p = config()
  p.transformer_tpl.layers_tpl.ff_tpl = Config(MoeFeedForward, num_experts=3, dispatch='capacity', capacity_factor=0.5)
  layer = p.instantiate()
  variables = drawn_variables(layer.abstract_init())
  first, other = (
    np.asarray(layer.apply(variables, np.where(SEGMENTS > 0, IDS, fill), segment_ids=SEGMENTS)[0]) for fill in (0, 5)
  )
  np.testing.assert_array_equal(first[SEGMENTS > 0], other[SEGMENTS > 0])


def test_parts_are_optional():
  bare = Config(TransformerEncoder, vocab_size=V, model_dims=D, num_layers=1, num_heads=N, embedding_norm_tpl=None)
  shapes = jax.tree.map(lambda w: w.shape, bare.instantiate().abstract_init())
  assert set(shapes) == {'embedding', 'transformer'} and shapes['embedding'] == {'w': (V, D)}
  assert bare.instantiate().max_positions is None
  shared = bare.clone(embedding_tpl=Config(SharedEmbeddingSoftmax, use_bias=True)).instantiate()
  assert set(shared.abstract_init()['embedding']) == {'w', 'b'}
  no_bias = bare.clone(use_bias=False, embedding_norm_tpl=bare.transformer_tpl.layers_tpl.norm_tpl.clone())
  names = {path[-1].key for path, _ in jax.tree.leaves_with_path(no_bias.instantiate().abstract_init())}
  assert names == {'w', 'scale'}


def test_a_transform_is_its_formula():
  for fields, f in (({}, lambda y: np.asarray(jax.nn.gelu(y, approximate=False))), ({'activation': 'tanh'}, np.tanh)):
    layer = Config(HeadTransform, dims=D, **fields).instantiate()
    variables, x = drawn_variables(layer.abstract_init()), np.random.default_rng(0).standard_normal((2, D))
    y = f(x.astype(np.float32) @ variables['linear']['w'] + variables['linear']['b'])
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    expected = y * variables['norm']['scale'] + variables['norm']['bias']
    np.testing.assert_allclose(layer.apply(variables, x.astype(np.float32))[0], expected, atol=1e-5)


@pytest.mark.parametrize('first, room', [(0, ': 5'), (2, ': 5, less first_position = 2,')])
def test_a_row_longer_than_the_positions_is_refused(first, room):
  layer = config(max_len=5).set(first_position=first).instantiate()
  variables = jax.eval_shape(layer.init, jax.random.key(0))
  with pytest.raises(ConfigError, match=rf'position_tpl\.max_len{room} is less than .* length, 7; .* {7 + first}'):
    jax.eval_shape(layer.apply, variables, IDS)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r"style: expected 'bert' or 'pre_norm', got 'gpt'"):
    config('gpt')
  with pytest.raises(ConfigError, match=r'first_position: expected at least 0, got -1'):
    config().set(first_position=-1).instantiate()
  with pytest.raises(ConfigError, match=r'activation'):
    Config(HeadTransform, dims=D, activation='softer').instantiate()
  unknown, _ = make()[0].apply(make()[1], np.full((1, 2), V, np.int32))
  assert np.isnan(unknown).all()  # As of an embedding alone.
  assert jnp.isfinite(make()[0].apply(make()[1], IDS, segment_ids=np.zeros_like(SEGMENTS))[0]).all()


def test_token_types_without_a_table_have_no_effect():
  layer = config(num_token_types=0).instantiate()
  variables = drawn_variables(layer.abstract_init())
  assert 'token_type' not in variables
  found, expected = layer.apply(variables, IDS, token_type_ids=TYPES)[0], layer.apply(variables, IDS)[0]
  np.testing.assert_array_equal(found, expected)
  assert isinstance(make()[0].token_type, Embedding) and isinstance(make()[0].position, LearnedPositions)
