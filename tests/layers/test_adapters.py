"""Residual adapters against their formula, task by task."""

from __future__ import annotations

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, path_name
from praxis_lite.layers import (
  AdaptedFeedForward,
  FeedForward,
  MoeFeedForward,
  MultitaskResidualAdapter,
  RepeatedTransformer,
  RMSNormNoScale,
  TransformerBlock,
)

B, T, D, F, K = 3, 4, 6, 5, 3
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)


def adapter(**fields):
  config = Config(MultitaskResidualAdapter, input_dims=D, bottleneck_dims=F, activation='tanh', **fields)
  return config.instantiate()


def drawn(layer, seed=1):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), layer.abstract_init())


def by_hand(v, x, task):
  h = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
  return x + np.tanh(h @ v['down_w'][task] + v['down_b'][task]) @ v['up_w'][task] + v['up_b'][task]


@pytest.mark.slow_cases
@pytest.mark.parametrize('fields', [{}, {'num_tasks': 3}, {'norm_tpl': None}], ids=str)
def test_an_adapter_is_the_identity_at_first(fields):
  layer, tasks = adapter(**fields), None if fields.get('num_tasks', 1) == 1 else np.arange(3)
  variables = layer.init(jax.random.key(0))
  np.testing.assert_array_equal(layer.apply(variables, X, tasks)[0], X)
  np.testing.assert_array_equal(layer.apply(variables, X, tasks, add_residual=False)[0], 0 * X)
  assert np.asarray(variables['down_w']).any()

  def loss(variables):
    return jnp.sum(layer.apply(variables, X, tasks)[0] ** 2)

  assert np.asarray(jax.grad(loss)(variables)['up_w']).any(), 'it would never learn'


@pytest.mark.parametrize('shape', [(B,), (B, T)], ids=str)
def test_each_row_or_token_uses_the_weights_of_its_task(shape):
  layer = adapter(num_tasks=K, norm_tpl=Config(RMSNormNoScale))
  v, tasks = drawn(layer), np.random.default_rng(2).integers(0, K, shape)
  y, _ = layer.apply(v, X, tasks)
  of_tokens = np.broadcast_to(tasks.reshape(*shape, *(1,) * (2 - len(shape))), (B, T))
  expected = [[by_hand(v, X[b, t], of_tokens[b, t]) for t in range(T)] for b in range(B)]
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
  change, _ = layer.apply(v, X, tasks, add_residual=False)
  np.testing.assert_allclose(change, y - X, rtol=1e-4, atol=1e-4)


def test_one_task_needs_no_ids_and_rows_may_have_no_length():
  layer = adapter(norm_tpl=Config(RMSNormNoScale))
  v = drawn(layer)
  np.testing.assert_allclose(layer.apply(v, X[0])[0], by_hand(v, X[0], 0), rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(layer.apply(v, X[0])[0], layer.apply(v, X[0], np.zeros(T, np.int32))[0])


def test_gradients_reach_only_the_weights_of_the_tasks():
  layer = adapter(num_tasks=K)
  v, tasks = drawn(layer), np.array([2, 0, 2])
  grads = jax.grad(lambda v: jnp.sum(layer.apply(v, X, tasks)[0] ** 2))(v)
  for name in ('down_w', 'down_b', 'up_w', 'up_b'):
    assert [bool(np.asarray(g).any()) for g in grads[name]] == [True, False, True], name


def test_a_task_that_does_not_exist_is_nan():
  layer = adapter(num_tasks=K)
  y, _ = layer.apply(drawn(layer), X, np.array([0, 3, -1]))
  assert np.isfinite(y[0]).all() and np.isnan(y[1:]).all()


@pytest.mark.parametrize('tasks, message', [
  (None, 'num_tasks is 3, so a call needs `tasks`'),
  (np.zeros(T, np.int32), r'`tasks` has shape \(4,\), and x \(3, 4, 6\); expected the first dimensions of x'),
  (np.zeros((B, T, D), np.int32), r'`tasks` has shape \(3, 4, 6\)'),
])  # fmt: skip
def test_tasks_of_another_shape_are_refused(tasks, message):
  layer = adapter(num_tasks=K)
  with pytest.raises(ConfigError, match=message):
    layer.apply(drawn(layer), X, tasks)


def test_an_unknown_activation_is_refused():
  with pytest.raises(ConfigError, match=r"MultitaskResidualAdapter\.activation: unknown activation 'tan'"):
    Config(MultitaskResidualAdapter, input_dims=D, bottleneck_dims=F, activation='tan').instantiate()


# ---------------------------------------------------------------- in a transformer


def adapted(mode, ff=FeedForward, **fields):
  config = Config(AdaptedFeedForward, mode=mode, ff_tpl=Config(ff, **fields))
  config.adapter_tpl.set(bottleneck_dims=F, activation='tanh')
  return config


@pytest.mark.parametrize('mode', ['sequential', 'parallel'])
def test_an_adapted_feed_forward_layer_adds_the_change_of_its_adapter(mode):
  layer = adapted(mode).set(input_dims=D, hidden_dims=7).instantiate()
  v = drawn(layer)
  plain = Config(FeedForward, input_dims=D, hidden_dims=7).instantiate().apply(v['ff'], X)[0]
  change, _ = layer.adapter.apply(v['adapter'], plain if mode == 'sequential' else X, add_residual=False)
  np.testing.assert_allclose(layer.apply(v, X)[0], plain + change, rtol=1e-4, atol=1e-4)
  assert np.abs(change).max() > 0.1


@pytest.mark.slow
def test_experts_with_an_adapter_still_leave_out_padding():
  layer = adapted('sequential', MoeFeedForward, num_experts=3).set(input_dims=D, hidden_dims=7).instantiate()
  v, paddings = drawn(layer), np.arange(T) >= np.array([[4], [2], [1]])
  y, _ = layer.apply(v, jnp.asarray(X), paddings=paddings, key=jax.random.key(0))
  noise = np.where(paddings[..., None], 9 * X[::-1], X)
  other, _ = layer.apply(v, jnp.asarray(noise), paddings=paddings, key=jax.random.key(0))
  np.testing.assert_allclose(np.where(paddings[..., None], 0, y), np.where(paddings[..., None], 0, other), rtol=1e-4)


def test_a_block_with_adapters_computes_what_the_block_did_until_they_are_trained():
  plain = Config(TransformerBlock, input_dims=D, hidden_dims=7, num_heads=2)
  with_adapter = plain.clone(ff_tpl=adapted('sequential', target(plain.ff_tpl)))
  layer, new = plain.instantiate(), with_adapter.instantiate()
  v = drawn(layer)
  adapter_v = new.ff.adapter.init(jax.random.key(0))
  y, _ = new.apply(v | {'ff': {'ff': v['ff'], 'adapter': adapter_v}}, X)
  np.testing.assert_allclose(y, layer.apply(v, X)[0], rtol=1e-6)


def test_the_rules_of_the_guide_find_the_variables_of_a_model_without_adapters():
  """Those of docs/training.md, which tells how to add adapters to a model that is trained."""
  guide = (pathlib.Path(__file__).parents[2] / 'docs' / 'training.md').read_text()
  rules = ast.literal_eval(re.search(r"`rules = (\(\(r'\.\*.*\))`", guide)[1])
  block = Config(TransformerBlock, input_dims=D, hidden_dims=7, num_heads=2)
  stack = Config(RepeatedTransformer, num_layers=2, layers_tpl=block)
  new = stack.clone(layers_tpl=block.clone(ff_tpl=adapted('sequential', target(block.ff_tpl))))
  plain, paths = (leaves(config.instantiate().abstract_init()) for config in (stack, new))
  found = set()
  for path in map(path_name, paths):
    pattern, source = next(((p, s) for p, s in rules if re.fullmatch(p, path)), (path, path))
    assert (source is None) == ('.adapter.' in path), path
    found |= set() if source is None else {re.sub(f'^{pattern}$', source, path) if source != path else path}
  assert found == set(map(path_name, plain))


def test_an_unknown_mode_is_refused():
  with pytest.raises(ConfigError, match=r"AdaptedFeedForward\.mode: expected 'sequential' or 'parallel'"):
    adapted('serial').set(input_dims=D, hidden_dims=7).instantiate()
