"""Layers with updates of low rank against their formulas, and where adapters may be."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, path_name
from praxis_lite.layers import (
  Embedding,
  LatentAttention,
  Linear,
  Lora,
  LoraEmbedding,
  LoraLinear,
  LoraProjection,
  MoeFeedForward,
  Projection,
)
from praxis_lite.models import (
  ADAPTER_VARIABLES,
  add_adapters,
  merge_adapters,
  remove_adapters,
  transformer_lm,
  unmerge_adapters,
)

B, T, D, V = 2, 4, 18, 37
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
IDS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)


def lm(*adapters, experts=None, **fields):
  sizes = {'vocab_size': V, 'model_dims': D, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 15}
  return add_adapters(transformer_lm(**sizes, experts=experts, **fields).set(packed=False), *adapters)


def logits(model, variables):
  return np.asarray(model.apply(variables, IDS, method='logits')[0])


def adapted(config, adapter):
  """The layer of a config, with an adapter, and drawn variables."""
  layer = adapter.instantiate().adapt(config).instantiate(name='x')
  return layer, drawn_variables(layer.abstract_init())


@pytest.mark.parametrize('stabilized, scale', [(False, 6 / 4), (True, 3.0)])
def test_the_formulas(stabilized, scale):
  adapter = Config(Lora, rank=4, alpha=6.0, rank_stabilized=stabilized)
  layer, v = adapted(Config(Linear, input_dims=D, output_dims=5, use_bias=True), adapter)
  expected = X @ v['w'] + v['b'] + scale * (X @ v['lora']['a'] @ v['lora']['b'])
  np.testing.assert_allclose(layer.apply(v, X)[0], expected, atol=1e-5)
  assert isinstance(layer, LoraLinear) and layer.lora.rank == 4


def test_projections_to_heads_and_back():
  to_heads, v = adapted(Config(Projection, in_shape=(D,), out_shape=(3, 4)), Config(Lora, rank=2, alpha=2.0))
  heads = np.einsum('btd,dnh->btnh', X, v['w'] + np.einsum('dr,rnh->dnh', v['lora']['a'], v['lora']['b']))
  np.testing.assert_allclose(to_heads.apply(v, X)[0], heads, atol=1e-5)
  np.testing.assert_allclose(
    to_heads.apply(v, method='weight')[0],
    v['w'] + np.einsum('dr,rnh->dnh', v['lora']['a'], v['lora']['b']),
    atol=1e-6,
  )
  back, w = adapted(Config(Projection, in_shape=(3, 4), out_shape=(D,)), Config(Lora, rank=2, alpha=2.0))
  whole = w['w'] + np.einsum('nhr,rd->nhd', w['lora']['a'], w['lora']['b'])
  np.testing.assert_allclose(back.apply(w, heads)[0], np.einsum('btnh,nhd->btd', heads, whole), atol=1e-5)
  assert isinstance(back, LoraProjection)


def test_tables_of_embeddings():
  table = Config(Embedding, num_classes=V, input_dims=D, scale_sqrt_depth=True)
  layer, v = adapted(table, Config(Lora, rank=2, alpha=2.0))
  expected = D**0.5 * (v['w'] + v['lora']['a'] @ v['lora']['b'])[IDS]
  np.testing.assert_allclose(layer.apply(v, IDS)[0], expected, atol=1e-5)
  assert isinstance(layer, LoraEmbedding)
  wrong = np.array([[-1, V], [0, 1]], np.int32)
  assert np.isnan(layer.apply(v, wrong)[0]).all(-1).tolist() == [[True, True], [False, False]]


def test_the_input_of_an_update_is_dropped_only_in_training():
  layer, v = adapted(Config(Linear, input_dims=D, output_dims=5), Config(Lora, rank=4, dropout_rate=0.5))
  whole = np.asarray(layer.apply(v, X, do_eval=True)[0])
  dropped = np.asarray(layer.apply(v, X, key=jax.random.key(0))[0])
  base = X @ v['w']
  assert not np.allclose(dropped, whole)
  v['lora']['b'][:] = 0
  np.testing.assert_allclose(layer.apply(v, X, key=jax.random.key(0))[0], base, atol=1e-5)


def test_adapters_are_float32_beside_weights_of_16_bits():
  model = lm(Config(Lora)).set(dtype='bfloat16').instantiate()
  for path, weight in leaves(model.abstract_init()).items():
    assert str(weight.as_struct().dtype) == ('float32' if 'lora' in path else 'bfloat16'), path


EXPERTS = Config(MoeFeedForward, num_experts=5, num_shared_experts=1)
EMBEDDING = Config(Lora, layers=r'lm\.embedding', rank=2)


@pytest.mark.slow_cases
@pytest.mark.parametrize('experts', [None, EXPERTS], ids=['dense', 'experts'])
def test_merged_weights_compute_the_same(experts):
  config = lm(EMBEDDING, Config(Lora, rank=3), experts=experts)
  model, base = config.instantiate(), remove_adapters(config).instantiate()
  first = model.init(jax.random.key(0))
  plain = base.init(jax.random.key(0))
  jax.tree.map(np.testing.assert_array_equal, merge_adapters(model, first), plain)  # At first they change nothing.
  variables = drawn_variables(model.abstract_init())
  merged = merge_adapters(model, variables)
  assert leaves(merged).keys() == leaves(plain).keys()
  of_adapters, of_merged = logits(model.lm, variables['lm']), logits(base.lm, merged['lm'])
  np.testing.assert_allclose(of_merged, of_adapters, atol=1e-5)
  unmerged = unmerge_adapters(model, merged, variables)
  assert jax.tree.structure(unmerged) == jax.tree.structure(variables)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), unmerged, variables)
  with pytest.raises(ConfigError, match=r'lm\.embedding\.lora\.a is neither among'):
    unmerge_adapters(model, merged, merged)


@pytest.mark.slow
def test_latent_attention_decodes_with_its_updates():
  """Decoding multiplies by the weights of keys and values in another order."""
  latent = Config(LatentAttention, latent_dims=5, rotary_dims=2, causal=True)
  config = lm(Config(Lora, rank=3))
  latent.rotary_tpl = config.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.rotary_tpl
  config.lm_tpl.transformer_tpl.layers_tpl.attention_tpl = latent
  model = config.instantiate()
  variables = drawn_variables(model.abstract_init())
  whole = logits(model.lm, variables['lm'])
  base = remove_adapters(config).instantiate()
  merged = merge_adapters(model, variables)
  np.testing.assert_allclose(logits(base.lm, merged['lm']), whole, atol=1e-5)
  batch = {'ids': IDS, 'weights': np.ones((B, T), np.float32), 'prompt_lengths': np.full(B, T, np.int32)}
  config.decoder_tpl.set(max_decode_steps=4, temperature=0.0)
  outputs = [
    c.instantiate().apply(v, batch, key=jax.random.key(0), do_eval=True, method='decode')[0][1]
    for c, v in ((config, variables), (remove_adapters(config), merged))
  ]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *outputs)


def test_rules_choose_layers_and_the_first_one_wins():
  adapters = (
    Config(Lora, layers=r'.*\.(query|value)', rank=2),
    Config(Lora, layers=r'.*\.attention\.(key|value)', rank=3),
  )
  declared = leaves(lm(*adapters).instantiate().abstract_init())
  ranks = {path[-3]: w.shape[-1] for path, w in declared.items() if path[-2:] == ('lora', 'a')}
  assert ranks == {'query': 2, 'value': 2, 'key': 3}


def test_without_regexes_all_layers_but_tables_have_one():
  declared = leaves(lm(Config(Lora)).instantiate().abstract_init())
  names = {path[-3] for path in declared if path[-2] == 'lora'}
  assert names == {'query', 'key', 'value', 'out', 'gate', 'up', 'down'}


def test_the_regex_matches_adapters_and_nothing_else():
  declared = leaves(lm(EMBEDDING, Config(Lora), experts=EXPERTS).instantiate().abstract_init())
  for path in declared:
    assert bool(re.fullmatch(ADAPTER_VARIABLES, path_name(path))) == any('lora' in part for part in path), path


@pytest.mark.parametrize(
  'fields, message',
  [
    (
      {'layers': 'query'},
      r"adapters\[0\]\.layers: 'query' matches no layer\. A pattern matches whole paths: write '\.\*",
    ),
    ({'layers': r'.*\.(qurey|value'}, r'adapters\[0\]\.layers: .* is not a regular expression'),
    ({'layers': r'.*_norm'}, r'matches lm\.transformer\.layers\.attention_norm, a RMSNorm, which cannot have a Lora'),
    ({'layers': r'lm\.softmax'}, r'matches lm\.softmax, a FullSoftmax, which cannot have a Lora'),
    ({'rank': 0}, r'adapters\[0\]\.rank: expected at least 1, got 0'),
    ({'rank': -1}, r'adapters\[0\]\.rank: expected at least 1, got -1'),
    ({'alpha': 0.0}, r'adapters\[0\]\.alpha: expected more than 0'),
    ({'dropout_rate': 1.0}, r'adapters\[0\]\.dropout_rate: expected at least 0 and less than 1'),
    ({'dtype': 'int8'}, r'adapters\[0\]\.dtype: expected a floating dtype'),
  ],
)
def test_mistakes(fields, message):
  with pytest.raises(ConfigError, match=message):
    lm(Config(Lora, **fields)).instantiate()


def test_more_mistakes():
  with pytest.raises(ConfigError, match=r'adapters\[0\].*ff.*dropout_rate: experts are multiplied without dropout'):
    lm(Config(Lora, dropout_rate=0.1), experts=EXPERTS).instantiate()
  with pytest.raises(ConfigError, match=r'adapters\[1\]: no layer can have a Lora that an earlier adapter'):
    lm(Config(Lora), Config(Lora)).instantiate()
  with pytest.raises(ConfigError, match=r'adapters\[0\]: expected the config of an adapter'):
    lm(Config(Linear, input_dims=1, output_dims=1)).instantiate()
