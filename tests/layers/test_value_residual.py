"""Values of the first layer in later ones: against the formula, in scans, with caches, and on meshes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from cached_decoding import D, T, decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  LatentAttention,
  PipelinedTransformer,
  RepeatedTransformer,
  RotaryPositions,
  StackedTransformer,
  TransformerBlock,
  ValueResidual,
)

LAYERS, N, K, H = 3, 4, 2, 4


def config(cls=RepeatedTransformer, block=None, **mixed):
  tpl = Config(TransformerBlock, input_dims=D, hidden_dims=5, num_heads=N, num_kv_heads=K, dims_per_head=H)
  tpl.attention_tpl.set(
    causal=True, rotary_tpl=Config(RotaryPositions), value_residual_tpl=Config(ValueResidual, **mixed)
  )
  tpl.attention_tpl.set(**(block or {}))
  tpl.attention_tpl.weight_split_dims_mapping.wt = ('data', 'mdl', None)
  tpl.ff_tpl.weight_split_dims_mapping.wt = ('data', 'mdl')
  return Config(cls, layers_tpl=tpl, num_layers=LAYERS)


def by_layer(variables):
  """The variables of a scan, as those of separate layers."""
  rest = [jax.tree.map(lambda x, i=i: x[i], variables['layers']) for i in range(LAYERS - 1)]
  return {f'layers_{i}': layer for i, layer in enumerate([variables['first_0'], *rest])}


def by_formula(v, x, first=0.5, own=0.5):
  """One layer after another, with the values of layer 0 in all later ones."""
  plain = Config(TransformerBlock, input_dims=D, hidden_dims=5, num_heads=N, num_kv_heads=K, dims_per_head=H)
  plain.attention_tpl.set(causal=True, rotary_tpl=Config(RotaryPositions))
  block = plain.instantiate()

  def norm(layer, x, name='attention_norm'):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * layer[name]['scale']

  kept = np.einsum('btd,dkh->btkh', norm(v['layers_0'], x), v['layers_0']['attention']['value']['w'])
  for i in range(LAYERS):
    layer = v[f'layers_{i}']
    if i:
      own_value = np.einsum('btd,dkh->btkh', norm(layer, x), layer['attention']['value']['w'])
      factors = [layer['attention'].get('value_residual', {}).get(n, c) for n, c in (('first', first), ('own', own))]
      value = np.expand_dims(factors[0], -1) * kept + np.expand_dims(factors[1], -1) * own_value
    else:
      value = kept
    y = x + attend(block, layer['attention'], norm(layer, x), value)
    x = y + np.asarray(block.ff.apply(layer['ff'], norm(layer, y, 'ff_norm'))[0])
  return x


def attend(block, v, x, value):
  rotary = block.attention.rotary
  query, key = (
    np.asarray(rotary.apply({}, np.einsum('btd,dnh->btnh', x, v[n]['w']), None)[0]) for n in ('query', 'key')
  )
  key, value = (np.repeat(a, N // K, axis=2) for a in (key, value))
  logits = np.einsum('btnh,bsnh->bnts', query, key) * H**-0.5
  weights = np.where(np.tri(T, dtype=bool), np.exp(logits), 0)
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum('bnts,bsnh,nhd->btd', weights, value, v['out']['w'])


@functools.cache
def variables(is_learned):
  return drawn_variables(config(is_learned=is_learned).instantiate().abstract_init())


@pytest.mark.parametrize('mixed', [{'is_learned': True}, {'first_weight': 0.3, 'own_weight': 0.9}], ids=str)
def test_the_formula_in_a_scan_and_in_layers_of_their_own(mixed):
  found = variables('is_learned' in mixed)
  y = jax.jit(config(**mixed).instantiate().apply)(found, inputs())[0]
  factors = {'first': mixed.get('first_weight', 0.5), 'own': mixed.get('own_weight', 0.5)}
  np.testing.assert_allclose(y, by_formula(by_layer(found), inputs(), **factors), atol=3e-5)
  stacked = config(StackedTransformer, **mixed).instantiate()
  np.testing.assert_allclose(stacked.apply(by_layer(found), inputs())[0], y, atol=1e-5)
  assert 'value_residual' not in found['first_0']['attention']


@pytest.mark.slow_cases
@pytest.mark.parametrize('cls', [RepeatedTransformer, StackedTransformer])
def test_caches_give_what_one_pass_gives(cls):
  found = variables(True) if cls is RepeatedTransformer else by_layer(variables(True))
  layer = config(cls, {'cache_page_size': 4}, is_learned=True).instantiate()
  y, _ = decoded(layer, found, inputs())
  np.testing.assert_allclose(y, expected(layer, found, inputs()), atol=2e-5)


def step(layer, variables, x):
  def loss(variables, x):
    y, _ = layer.apply(variables, x)
    return (y * np.cos(np.arange(y.size)).reshape(y.shape)).sum()

  return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)


@pytest.mark.slow
@pytest.mark.parametrize(
  'cls, shape',
  [(RepeatedTransformer, (1, 3, 1)), (RepeatedTransformer, (2, 1, 2)), (PipelinedTransformer, (2, 1, 3))],
  ids=str,
)
def test_a_mesh_gives_what_one_device_gives(cls, shape):
  """In stages of a pipeline, too, where the values of the first block go to each stage with the rows."""
  axes = ('spare', 'data', 'mdl')
  stack = config(cls, is_learned=True).set(mesh_axis_names=axes)
  if cls is PipelinedTransformer:
    stack.set(num_stages=2, num_microbatches=2)
    stack.weight_split_dims_mapping.stages = ('spare',)
  layer = stack.instantiate()
  mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: int(np.prod(shape))])
  found = step_on_mesh(step, layer, variables(True), mesh)(place_variables(layer, variables(True), mesh), inputs())
  expected = step(config(is_learned=True).instantiate(), variables(True), inputs())
  for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, e, atol=2e-5 * (1e-2 + np.abs(e).max()))


def test_what_has_no_first_values_is_refused():
  with pytest.raises(ConfigError, match=r'first_tpl: blocks of a pattern mix their values with those of the first'):
    pattern = config()
    pattern.set(layers_tpl=(pattern.layers_tpl, pattern.layers_tpl.clone())).instantiate()
  with pytest.raises(ConfigError, match=r'value_residual_tpl: the call gives no first_values'):
    block = config().layers_tpl.instantiate()
    block.apply(drawn_variables(block.abstract_init()), inputs())
  with pytest.raises(ConfigError, match=r'value_residual_tpl'):
    latent = Config(LatentAttention, input_dims=D, num_heads=N, dims_per_head=4, latent_dims=5, rotary_dims=0)
    latent.set(value_residual_tpl=Config(ValueResidual)).instantiate()


def test_first_layers_with_other_heads_are_refused():
  stack = config()
  other = stack.layers_tpl.clone(num_kv_heads=N)
  layer = stack.set(first_tpl=(other,)).instantiate()
  with pytest.raises(ConfigError, match=r'all layers need the same num_kv_heads and dims_per_head'):
    layer.apply(drawn_variables(layer.abstract_init()), inputs())
