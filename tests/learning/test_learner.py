"""What a learner does to gradients, variables, slots and averages in a step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_trees import NON_TRAINABLE, SKIP, declarations, unrolled, values, weight

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.training.learning import Learner, LinearRamp


def sgd(**fields: Any) -> Learner:
  return Config(Learner, **{'optimizer': Config(optax.sgd), 'learning_rate': 1.0, **fields}).instantiate()


def one_step(learner: Learner, weights: Any, params: Any, grads: Any, *, loss: float = 1.0, step: int = 0) -> Any:
  bound = learner.bind(weights)
  state, ema = bound.init(params), bound.init_ema(params)
  return bound.update(grads, jnp.float32(loss), params, state, ema, jnp.int32(step))


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize('limit', [0.5, 5.0, 13.0, 100.0])
def test_global_norm_clipping_scales_by_c_over_max_of_norm_and_c(limit: float) -> None:
  weights = {'a': weight(2), 'b': weight(1)}
  grads = {'a': jnp.array([3.0, 4.0]), 'b': jnp.array([12.0])}
  zeros = jax.tree.map(jnp.zeros_like, grads)
  out = one_step(sgd(clip_gradient_norm_to_value=limit), weights, zeros, grads)
  scale = limit / max(13.0, limit)
  np.testing.assert_allclose(out.mdl_vars['a'], [-3 * scale, -4 * scale], rtol=1e-6)
  np.testing.assert_allclose(out.mdl_vars['b'], [-12 * scale], rtol=1e-6)
  assert float(out.stats['grad_norm']) == 13.0, 'the norm that is reported is that before clipping'


def test_single_norm_clipping_takes_each_variable_and_each_layer_by_itself() -> None:
  weights = {'a': weight(2), 'stack': weight(2, repeat=(2,))}
  grads = {'a': jnp.array([3.0, 4.0]), 'stack': jnp.array([[0.3, 0.4], [30.0, 40.0]])}
  out = one_step(sgd(clip_gradient_single_norm_to_value=1.0), weights, jax.tree.map(jnp.zeros_like, grads), grads)
  np.testing.assert_allclose(out.mdl_vars['a'], [-0.6, -0.8], rtol=1e-6)
  np.testing.assert_allclose(out.mdl_vars['stack'], [[-0.3, -0.4], [-0.6, -0.8]], rtol=1e-6)


def test_clipping_by_value_comes_before_clipping_by_norm() -> None:
  weights = {'a': weight(2)}
  learner = sgd(clip_gradient_value=4.0, clip_gradient_norm_to_value=2.5)
  out = one_step(learner, weights, {'a': jnp.zeros(2)}, {'a': jnp.array([-3.0, 9.0])})
  np.testing.assert_allclose(out.mdl_vars['a'], [1.5, -2.0], rtol=1e-6)


def test_units_are_clipped_by_the_norms_of_their_weights() -> None:
  """A unit is an output: each of N H in [D, N, H]; of a stack, in each layer. A bias is one, and a table's row."""
  weights = {
    'query': dataclasses.replace(weight(5, 2, 3, repeat=(2,)), fan_in_axes=(0,), fan_out_axes=(1, 2)),
    'plain': weight(4, 3),
    'table': dataclasses.replace(weight(7, 2), fan_in_axes=(1,), fan_out_axes=(0,)),
    'bias': weight(3, marks=(SKIP,)),
    'scalar': weight(),
  }
  axes = {'query': (1,), 'plain': (0,), 'table': (1,), 'bias': (0,), 'scalar': ()}
  params, grads = values(weights), jax.tree.map(lambda x: 10 * x, values(weights, 1))
  params['plain'] = params['plain'].at[:, 0].set(0.0)
  out = one_step(sgd(clip_gradient_unit_ratio=0.1), weights, params, grads)
  for name, along in axes.items():
    norm = lambda x, along=along: np.sqrt(np.sum(np.square(x), axis=along, keepdims=True))  # noqa: E731
    limit = 0.1 * np.maximum(norm(params[name]), 1e-3)
    expected = grads[name] * np.minimum(1.0, limit / norm(grads[name]))
    np.testing.assert_allclose(params[name] - out.mdl_vars[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
  split = {('query',): (2,), ('plain',): (1,)}
  bound = sgd(clip_gradient_unit_ratio=0.1).bind(weights)
  assert bound.needs_whole(split) == ('learner.optimizer', [])
  assert bound.needs_whole({('plain',): (0,)})[0] == 'learner.clip_gradient_unit_ratio'


def test_a_norm_far_above_those_of_past_steps_is_reduced() -> None:
  """Zclip, against a loop in NumPy; the first 25 norms are never reduced, and a zero gradient stays zero."""
  weights = {'a': weight(2)}
  bound = sgd(clip_gradient_z_score=2.0).bind(weights)
  params, state = {'a': jnp.zeros(2)}, bound.init({'a': jnp.zeros(2)})
  norms = [*np.random.default_rng(0).uniform(1, 2, 40), 50.0, 1.5, 0.0]
  norms[3] = 9.0
  step = jax.jit(lambda p, s, g: bound.update({'a': g}, jnp.float32(0), p, s, None, jnp.int32(0)))
  mean = variance = 0.0
  for count, norm in enumerate(norms):
    out = step(params, state, jnp.array([0.6, -0.8]) * norm)
    moved = np.asarray(params['a'] - out.mdl_vars['a'])
    params, state = out.mdl_vars, out.opt_states
    z = (norm - mean) / np.sqrt(variance) if variance else 0.0
    limited = mean + 4 / z * np.sqrt(variance) if z > 2 and count >= 25 else norm
    np.testing.assert_allclose(moved, np.array([0.6, -0.8]) * limited, rtol=1e-4, atol=1e-5)
    new = max(0.03, 1 / (count + 1))
    mean, variance = mean + new * (limited - mean), (1 - new) * (variance + new * (limited - mean) ** 2)
  assert limited == 0 and np.isfinite(params['a']).all()
  assert set(state) == {'all', 'gradient_norms'}
  with pytest.raises(ConfigError, match=r'learner\.clip_gradient_z_score: expected less than inf, got inf'):
    sgd(clip_gradient_z_score=math.inf)


# ---------------------------------------------------------------- decay


def test_independent_decay_follows_the_schedule_but_not_the_rate() -> None:
  for rate in (1.0, 0.01):
    learner = sgd(learning_rate=rate, independent_weight_decay=0.25, schedule=lambda step: 0.5)
    weights = {'w': weight(), 'spared': weight(marks=(SKIP,))}
    out = one_step(learner, weights, dict.fromkeys(weights, jnp.float32(2)), dict.fromkeys(weights, jnp.float32(0)))
    assert {name: float(x) for name, x in out.mdl_vars.items()} == {'w': 1.75, 'spared': 2.0}


@pytest.mark.parametrize('field', ['l2_regularizer_weight', 'decoupled_weight_decay'])
@pytest.mark.parametrize(('marks', 'expected'), [((), -3.0), ((SKIP,), 1.0)])
def test_decay_of_a_variable_of_2_with_gradient_1(field: str, marks: Any, expected: float) -> None:
  out = one_step(sgd(**{field: 2.0}), {'w': weight(marks=marks)}, {'w': jnp.float32(2)}, {'w': jnp.float32(1)})
  assert float(out.mdl_vars['w']) == expected


def test_l2_and_decoupled_decay_exclude_each_other() -> None:
  with pytest.raises(ValueError, match='l2_regularizer_weight and decoupled_weight_decay'):
    sgd(l2_regularizer_weight=1.0, decoupled_weight_decay=1.0)


def test_l2_is_not_clipped_and_reaches_the_optimizer() -> None:
  """The regularizer's gradient joins that of the loss after clipping."""
  learner = sgd(l2_regularizer_weight=2.0, clip_gradient_value=1.0)
  assert float(one_step(learner, {'w': weight()}, {'w': jnp.float32(2)}, {'w': jnp.float32(9)}).mdl_vars['w']) == -3.0
  signs = sgd(l2_regularizer_weight=2.0, optimizer=Config(optax.sign_sgd))
  assert float(one_step(signs, {'w': weight()}, {'w': jnp.float32(2)}, {'w': jnp.float32(1)}).mdl_vars['w']) == 1.0


def test_decoupled_decay_follows_the_learning_rate_but_not_the_optimizer() -> None:
  learner = sgd(decoupled_weight_decay=0.5, learning_rate=0.1, optimizer=Config(optax.adam))
  out = one_step(learner, {'w': weight()}, {'w': jnp.float32(2)}, {'w': jnp.float32(0)})
  np.testing.assert_allclose(out.mdl_vars['w'], 2 - 0.1 * 0.5 * 2, rtol=1e-6)


# ---------------------------------------------------------------- not finite


@pytest.mark.slow_cases
@pytest.mark.parametrize('on_nonfinite', ['skip', 'raise'])
@pytest.mark.parametrize(
  ('loss', 'gradient'), [(np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, -np.inf), (1.0, 1e30)]
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(
  on_nonfinite: str, loss: float, gradient: float
) -> None:
  learner = sgd(optimizer=Config(optax.adamw), ema_decay=0.9, on_nonfinite=on_nonfinite, clip_gradient_norm_to_value=1)
  weights = declarations()
  params = values(weights)
  bound = learner.bind(weights)
  state, ema = bound.init(params), bound.init_ema(params)
  update = jax.jit(bound.update)
  good = update(params, jnp.float32(1), params, state, ema, jnp.int32(0))
  assert float(good.stats['skipped']) == 0.0
  assert bool(good.finite)
  grads = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(gradient), params)
  before = good.mdl_vars, good.opt_states, good.ema_vars
  bad = update(grads, jnp.float32(loss), *before, jnp.int32(1))
  assert float(bad.stats['skipped']) == 1.0
  assert not bool(bad.finite)
  jax.tree.map(np.testing.assert_array_equal, (bad.mdl_vars, bad.opt_states, bad.ema_vars), before)
  # And the run goes on as if the step had not been.
  after, unharmed = (update(params, jnp.float32(1), *x, jnp.int32(2)) for x in ((bad[:3]), before))
  jax.tree.map(np.testing.assert_array_equal, after.mdl_vars, unharmed.mdl_vars)


def test_steps_that_are_not_finite_may_be_ignored() -> None:
  out = one_step(sgd(on_nonfinite='ignore'), {'w': weight()}, {'w': jnp.float32(2)}, {'w': jnp.float32(np.nan)})
  assert np.isnan(out.mdl_vars['w'])
  assert 'skipped' not in out.stats
  assert out.finite is None


# ---------------------------------------------------------------- moving averages


def test_moving_averages_follow_the_recursion_with_their_warm_up() -> None:
  weights, decay = {'w': weight(3)}, 0.3
  learner = sgd(ema_decay=decay, learning_rate=0.1).bind(weights)
  params: Any = {'w': jnp.array([1.0, 2.0, 3.0])}
  state, ema = learner.init(params), learner.init_ema(params)
  expected = np.array([1.0, 2.0, 3.0])
  for t in range(6):
    out = learner.update({'w': params['w']}, jnp.float32(0), params, state, ema, jnp.int32(t))
    params, state, ema = out.mdl_vars, out.opt_states, out.ema_vars
    d = min(decay, (1 + t) / (10 + t))
    expected = d * expected + (1 - d) * np.asarray(params['w'])
    np.testing.assert_allclose(ema['w'], expected, rtol=1e-6)


def test_moving_averages_are_of_trained_variables_only_and_are_copies() -> None:
  weights = {'w': weight(2), 'stat': weight(2, marks=(NON_TRAINABLE,))}
  params = {'w': jnp.ones(2), 'stat': jnp.ones(2)}
  ema = sgd(ema_decay=0.9).bind(weights).init_ema(params)
  assert ema.keys() == {'w'}
  params['w'].delete()  # As donation does.
  np.testing.assert_array_equal(ema['w'], 1.0)
  assert sgd().bind(weights).init_ema(params) is None


# ---------------------------------------------------------------- which variables


def names(tree: Any) -> set[str]:
  return {jax.tree_util.keystr(p, simple=True, separator='.') for p, _ in jax.tree_util.tree_leaves_with_path(tree)}


ALL = {'lm.emb.w', 'lm.layers.ff.w', 'lm.layers.ff.b', 'lm.deep.w', 'lm.scale'}


@pytest.mark.parametrize(
  ('fields', 'trained'),
  [
    ({}, ALL),
    ({'bprop_variable_exclusion': (r'lm\.emb\..*',)}, ALL - {'lm.emb.w'}),
    ({'bprop_variable_exclusion': r'.*\.w'}, {'lm.layers.ff.b', 'lm.scale'}),
    ({'bprop_variable_inclusion': [r'lm\.layers\..*', r'lm\.scale']}, {'lm.layers.ff.w', 'lm.layers.ff.b', 'lm.scale'}),
    (
      {'bprop_variable_inclusion': (r'lm\.layers\..*',), 'bprop_variable_exclusion': (r'.*\.b',)},
      {'lm.layers.ff.w'},
    ),
  ],
)
def test_only_variables_that_are_included_and_not_excluded_are_trained(fields: Any, trained: set[str]) -> None:
  weights = declarations() | {'moving': {'mean': weight(2, marks=(NON_TRAINABLE,))}}
  params = values(weights)
  learner = Config(Learner, optimizer=Config(optax.adam), ema_decay=0.9, **fields).instantiate()
  bound = learner.bind(weights)
  mine, rest = bound.split(params)
  assert names(mine) == trained
  assert names(rest) == (ALL | {'moving.mean'}) - trained
  assert {n for n in ALL | {'moving.mean'} if bound.is_trained(tuple(n.split('.')))} == trained

  state = bound.init(params)
  slots = names(state) - {'all.0.count'}
  assert slots == {f'all.0.{slot}.{name}' for slot in ('mu', 'nu') for name in trained}
  out = one_step(learner, weights, params, mine)
  assert names(out.mdl_vars) == names(params)
  assert names(out.ema_vars) == trained
  for name in names(params):
    assert np.array_equal(_at(out.mdl_vars, name), _at(params, name)) == (name not in trained)


def _at(tree: Any, name: str) -> Any:
  for part in name.split('.'):
    tree = tree[part]
  return tree


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'bprop_variable_exclusion': (r'lm.embed.w',)}, r"bprop_variable_exclusion: 'lm.embed.w'.*mean 'lm\.emb\.w'"),
    (
      {'bprop_variable_inclusion': ('lm',)},
      r"'lm' matches no variable\. A pattern .* whole paths: write 'lm\.\*', ",
    ),
    ({'bprop_variable_inclusion': ('mb|x',)}, r"'mb|x' .*: write '\.\*\(mb\|x\)\.\*', which matches \d+\.$"),
    ({'bprop_variable_exclusion': ('(',)}, r"'\(' is not a regular expression"),
    ({'bprop_variable_exclusion': ('.*',)}, r'leave no variable to train'),
  ],
)
def test_patterns_that_select_nothing_are_refused(fields: Any, message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    sgd(**fields).bind(declarations())


# ---------------------------------------------------------------- the rest


def test_stats_hold_rate_and_norm_of_what_the_layers_alone_would_have() -> None:
  weights = declarations()
  params, grads = values(weights), values(weights, 1)
  learner = sgd(learning_rate=0.5, schedule=Config(LinearRamp, start=(0, 0.0), limit=(10, 1.0)), report_param_norm=True)
  out = one_step(learner, weights, params, grads, step=4)
  np.testing.assert_allclose(out.stats['learning_rate'], 0.2, rtol=1e-6)
  np.testing.assert_allclose(learner.learning_rate_at(4), 0.2, rtol=1e-6)
  np.testing.assert_allclose(out.stats['grad_norm'], optax.global_norm(unrolled(grads, weights)), rtol=1e-6)
  np.testing.assert_allclose(out.stats['param_norm'], optax.global_norm(out.mdl_vars), rtol=1e-6)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'on_nonfinite': 'skipp'}, r"on_nonfinite.*'skipp'.*Did you mean 'skip'"),
    ({'num_microbatches': 0}, r'num_microbatches: expected at least 1, got 0'),
    ({'ema_decay': 1.0}, r'ema_decay: expected at least 0 and less than 1'),
    ({'clip_gradient_norm_to_value': -1.0}, r'clip_gradient_norm_to_value'),
    ({'clip_gradient_value': float('nan')}, r'clip_gradient_value'),
    ({'learning_rate': float('nan')}, r'learner\.learning_rate: expected a finite number of at least 0, got nan'),
    ({'learning_rate': float('inf')}, r'learner\.learning_rate: .*, got inf'),
    ({'learning_rate': -1.0}, r'learner\.learning_rate: .*, got -1'),
    ({'decoupled_weight_decay': float('nan')}, r'learner\.decoupled_weight_decay: .*, got nan'),
    ({'l2_regularizer_weight': -0.1}, r'learner\.l2_regularizer_weight: .*, got -0\.1'),
    ({'optimizer': optax.adam}, r'learner\.optimizer: expected a Config'),
    ({'schedule': 0.1}, r'learner\.schedule: expected a function of the step, or its Config, got 0\.1'),
  ],
)
def test_values_that_cannot_be_are_refused(fields: Any, message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    sgd(**fields)


# ---------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize('optimizer', [optax.sgd, optax.adam])
def test_small_updates_of_bfloat16_variables_are_not_lost_on_average(optimizer: Any) -> None:
  weights = {'w': weight(1000, 3), 'other': weight(4)}
  params = {'w': 1 + 0.5 * jax.random.uniform(jax.random.key(0), (1000, 3)).astype(jnp.bfloat16), 'other': jnp.ones(4)}
  random = jax.random.uniform(jax.random.key(1), (20, 1000, 3)) * 2e-4
  fields = {'optimizer': Config(optimizer), 'learning_rate': 1.0 if optimizer is optax.sgd else 1e-4}
  lost, kept = (sgd(round_stochastically=rounds, **fields) for rounds in (False, True))
  grads = {'w': random[0].astype(jnp.bfloat16), 'other': jnp.ones(4)}
  assert (one_step(lost, weights, params, grads).mdl_vars['w'] == params['w']).all()
  bound = kept.bind(weights)
  state, first = bound.init(params), params
  assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(state))
  step = jax.jit(lambda p, s, g, n: bound.update(g, jnp.float32(0), p, s, None, n))
  for number in range(20):
    out = step(params, state, grads | {'w': random[number].astype(jnp.bfloat16)}, jnp.int32(number))
    params, state = out.mdl_vars, out.opt_states
  assert {name: x.dtype for name, x in params.items()} == {'w': jnp.bfloat16, 'other': jnp.float32}
  moved = np.mean(np.float64(first['w']) - np.float64(params['w']))
  assert moved == pytest.approx(2e-3, rel=0.15)
