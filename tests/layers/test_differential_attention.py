"""Differential attention against its formula in NumPy, with caches, and on meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached_decoding import B, D, T, decoded, expected, inputs
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import DifferentialAttention, MultiHeadAttention, PerDimScale, RotaryPositions
from praxis_lite.sharding import GuardedJit

N, K, H = 8, 4, 4


def config(**fields):
  found = Config(DifferentialAttention, input_dims=D, num_heads=N, num_kv_heads=K, dims_per_head=H, causal=True)
  return found.set(**fields)


def by_formula(v, x, lambda_init=0.8):
  """One head after another, with two separate softmaxes each."""
  v = jax.tree.map(np.float64, v)
  first, second = np.exp((v['lambda_query'] * v['lambda_key']).sum(-1))
  factor = first - second + lambda_init
  out = np.zeros((B, T, D))
  for kv_head in range(K // 2):
    value = np.concatenate([x @ v['value']['w'][:, 2 * kv_head + half] for half in (0, 1)], axis=-1)
    for member in range(N // K):
      maps = []
      for half in (0, 1):
        key = 2 * kv_head + half
        logits = (
          (x @ v['query']['w'][:, key * (N // K) + member]) @ (x @ v['key']['w'][:, key]).swapaxes(1, 2) * H**-0.5
        )
        weights = np.where(np.tri(T, dtype=bool), np.exp(logits), 0)
        maps.append(weights / weights.sum(-1, keepdims=True))
      difference = (maps[0] - factor * maps[1]) @ value
      difference /= np.sqrt((difference**2).mean(-1, keepdims=True) + 1e-6)
      head = kv_head * (N // K) + member
      out += (difference * v['head_norm']['scale'] * (1 - lambda_init)) @ v['out']['w'][head]
  return out


@pytest.mark.parametrize('fields', [{'implementation': 'dense'}, {'implementation': 'blockwise', 'lambda_init': 0.3}])
def test_the_formula(fields):
  layer = config(block_size=8, **fields).instantiate()
  variables = drawn_variables(layer.abstract_init())
  y, _ = jax.jit(layer.apply)(variables, inputs())
  np.testing.assert_allclose(y, by_formula(variables, inputs(), layer.lambda_init), atol=2e-5)


def test_there_are_as_many_weights_and_as_large_a_cache_as_with_ordinary_heads():
  layer = config().instantiate()
  ordinary = Config(MultiHeadAttention, input_dims=D, num_heads=N, num_kv_heads=K, dims_per_head=H, causal=True)
  both = layer, ordinary.instantiate()
  ours, theirs = (sum(w.num_active for w in jax.tree.leaves(one.abstract_init())) for one in both)
  assert ours == theirs + 2 * H + 4 * H  # The norm and the vectors of lambda.
  caches = [one.apply({}, 2, 6, method='init_decode_state')[1].decode_state for one in both]
  assert caches[0]['key'].shape == (2, K // 2, 6, 2 * H) and caches[0]['key'].size == caches[1]['key'].size


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields',
  [
    {'combine_qkv': True, 'use_bias': True},
    {
      'rotary_tpl': Config(RotaryPositions),
      'cache_page_size': 4,
      'use_sinks': True,
      'per_dim_scale_tpl': Config(PerDimScale),
    },
    {'local_chunk': 5, 'logit_soft_cap': 2.0},
  ],
  ids=['one weight', 'pages', 'chunks'],
)
def test_decoding_equals_one_pass(fields):
  layer = config(**fields).instantiate()
  variables, x = drawn_variables(layer.abstract_init()), inputs()
  np.testing.assert_allclose(decoded(layer, variables, x)[0], expected(layer, variables, x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['ring', 'all_to_all'])
def test_a_split_sequence_with_split_heads_has_the_gradients_of_one_device(method):
  axes = 'idle', 'context', 'mdl'
  split = config(mesh_axis_names=axes, context_axis='context', context_method=method)
  split.weight_split_dims_mapping.wt = (None, 'mdl', None)
  heads = (None, None, 'mdl', None)
  split.activation_split_dims_mapping.set(blnh=heads, blkh=heads)
  mesh = jax.make_mesh((1, 3, 2), axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:6])

  def gradients(layer, variables, x):
    return jax.value_and_grad(lambda v, x: jnp.sum(layer.apply(v, x)[0] ** 2), argnums=(0, 1))(variables, x)

  def on_mesh(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return gradients(split.instantiate(), variables, x)

  one = config().instantiate()
  variables, x = drawn_variables(one.abstract_init()), inputs()
  found = GuardedJit(on_mesh)(*jax.device_put((variables, x), NamedSharding(mesh, PartitionSpec())))
  wanted = jax.jit(functools.partial(gradients, one))(variables, x)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4 * np.abs(e).max()), found, wanted)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_heads': 3, 'num_kv_heads': None}, r'num_kv_heads: two keys share a value here; .* even number, got 3'),
    ({'num_kv_heads': 1}, r'num_kv_heads: two keys share a value here'),
    ({'lambda_init': 1.0}, r'lambda_init: expected at least 0 and less than 1'),
  ],
)
def test_mistakes_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    config(**fields).instantiate()
