"""Layers that DoRA and IA3 scale, against their formulas, and merged."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, map_with_path, node_at, select
from praxis_lite.layers import Dora, Ia3, Linear, Projection
from praxis_lite.models import add_adapters, merge_adapters, remove_adapters, transformer_lm, unmerge_adapters
from praxis_lite.sharding.growth import fan_growth
from praxis_lite.sharding.weights import Growth
from praxis_lite.training.learning.matrices import matrix_dims

X = np.random.default_rng(0).standard_normal((2, 4, 18)).astype(np.float32)
IDS = np.random.default_rng(0).integers(0, 37, (2, 4)).astype(np.int32)


def built(config, adapter, name='x'):
  layer = adapter.instantiate().adapt_at(name, config).instantiate(name='x')
  return layer, drawn_variables(layer.abstract_init())


def test_dora_is_the_formula():
  adapter = Config(Dora, rank=4, alpha=6.0)
  for config, outputs in (
    (Config(Linear, input_dims=18, output_dims=5, use_bias=True), (5,)),
    (Config(Projection, in_shape=(18,), out_shape=(3, 2), use_bias=True), (3, 2)),
    (Config(Projection, in_shape=(2, 9), out_shape=(5,)), (5,)),
  ):
    layer, v = built(config, adapter)
    x = X.reshape(2, 4, 2, 9) if v['w'].shape[:2] == (2, 9) else X
    rows, w = X.reshape(-1, 18), v['w'].reshape(18, -1)
    total = w + 1.5 * v['lora']['a'].reshape(18, 4) @ v['lora']['b'].reshape(4, -1)
    magnitude = (1 + v['dora_magnitude'].reshape(-1)) * np.linalg.norm(w, axis=0)
    directed = total * magnitude / np.linalg.norm(total, axis=0)
    expected = rows @ directed + v.get('b', np.zeros(outputs)).reshape(-1)
    np.testing.assert_allclose(layer.apply(v, x)[0], expected.reshape(2, 4, *outputs), atol=2e-5)
    merged = layer.merge_variables(v)
    np.testing.assert_allclose(merged['w'].reshape(18, -1), directed, atol=1e-5)
    assert merged.keys() == {*v} - {'lora', 'dora_magnitude'}


@pytest.mark.parametrize('of_inputs', [False, True])
def test_ia3_is_the_formula(of_inputs):
  adapter = Config(Ia3, layers='x', of_inputs='x' if of_inputs else 'y')
  for config in (
    Config(Linear, input_dims=18, output_dims=5, use_bias=True),
    Config(Projection, in_shape=(18,), out_shape=(3, 2), use_bias=True),
  ):
    layer, v = built(config, adapter)
    w, b, scale = v['w'].reshape(18, -1), v['b'].reshape(-1), v['ia3_scale'].reshape(-1)
    expected = (X * scale) @ w + b if of_inputs else (X @ w + b) * scale
    np.testing.assert_allclose(layer.apply(v, X)[0].reshape(expected.shape), expected, atol=1e-5)


@pytest.mark.parametrize(
  'adapter', [Config(Dora, rank=2), Config(Ia3, layers='x', of_inputs='y'), Config(Ia3, layers='x', of_inputs='x')]
)
@pytest.mark.parametrize('in_shape, out_shape', [((18,), (3, 2)), ((4, 3), (5,)), ((4, 3), (3, 2))])
def test_scales_are_vectors_for_mup_and_muon(adapter, in_shape, out_shape):
  layer, _ = built(Config(Projection, in_shape=in_shape, out_shape=out_shape), adapter)
  weights = leaves(layer.abstract_init())
  ((path, weight),) = ((p, w) for p, w in weights.items() if p[-1] in ('dora_magnitude', 'ia3_scale'))
  grown = dataclasses.replace(weight, growth=Growth((1, *weight.shape[1:])))
  shapes = map_with_path(lambda p, w: w.as_struct(), select(layer.abstract_init(), path.__eq__))
  assert fan_growth(grown) == (1.0, weight.shape[0])
  assert node_at(matrix_dims({path: weight}, shapes), path) is None


@pytest.mark.slow_cases
@pytest.mark.parametrize('adapter', [Config(Dora, rank=2), Config(Ia3)], ids=['dora', 'ia3'])
def test_a_model_begins_as_it_was_and_is_the_same_when_merged(adapter):
  sizes = {'vocab_size': 37, 'model_dims': 18, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 15, 'use_bias': True}
  config = add_adapters(transformer_lm(**sizes).set(packed=False), adapter)
  model, plain = config.instantiate(), remove_adapters(config).instantiate()

  @jax.jit
  def logits(v):
    return model.lm.apply(v['lm'], IDS, method='logits')[0]

  def of_plain(v):
    return np.asarray(plain.lm.apply(v['lm'], IDS, method='logits')[0])

  start = jax.jit(model.init)(jax.random.key(0))
  declared = leaves(plain.abstract_init())
  base = select(start, lambda path: path in declared)
  np.testing.assert_allclose(logits(start), of_plain(base), atol=1e-5)
  variables = drawn_variables(model.abstract_init())
  merged = merge_adapters(model, variables)
  assert leaves(merged).keys() == declared.keys()
  np.testing.assert_allclose(of_plain(merged), logits(variables), atol=1e-5)
  if adapter.instantiate().__class__ is Dora:
    with pytest.raises(ConfigError, match='DoRA cannot be taken out of a merged weight'):
      unmerge_adapters(model, merged, variables)
  else:
    again = leaves(unmerge_adapters(model, merged, variables))
    for path, value in leaves(variables).items():
      np.testing.assert_allclose(again[path], value, atol=1e-6, err_msg=str(path))


def test_mistakes_are_named():
  lm = transformer_lm(vocab_size=37, model_dims=18, num_layers=1, num_heads=3, hidden_dims=15)
  with pytest.raises(ConfigError, match=r'which cannot have a Dora; let it match only linear layers and projections'):
    add_adapters(lm.clone(), Config(Dora, layers=r'lm\.embedding')).instantiate()
  with pytest.raises(ConfigError, match=r"of_inputs: '\(' is not a regular expression"):
    add_adapters(lm.clone(), Config(Ia3, of_inputs='(')).instantiate()
  for pattern in (r'lm\..*\.ff\.dwon', r'.*\.query', ('.*', 'x')):  # The second one is a layer without an adapter.
    with pytest.raises(ConfigError, match=r'adapters\[0\].of_inputs: .* matches no layer that has this adapter'):
      add_adapters(lm.clone(), Config(Ia3, of_inputs=pattern)).instantiate()
  for fields in ({'of_inputs': ()}, {'layers': r'.*\.attention\.key'}, {'of_inputs': r'.*\.key'}):
    add_adapters(lm.clone(), Config(Ia3, **fields)).instantiate()
  with pytest.raises(ConfigError, match=r'dtype: expected a floating dtype'):
    add_adapters(lm.clone(), Config(Ia3, dtype='int8')).instantiate()
