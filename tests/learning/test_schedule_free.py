"""Schedule-free learning: what is evaluated is the average, which a learner keeps as it keeps moving averages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_trees import declarations, values

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner

FREE = Config(optax.contrib.schedule_free_adamw)
SKIP = frozenset({WeightHParamsCollection.SKIP_REGULARIZATION})
WRAPPED = Config(optax.contrib.schedule_free, base_optimizer=Config(optax.adamw, b1=0.0, weight_decay=0.1))


def trained(config: Config, steps: int = 3):
  """(y of each step, the last averages) of a learner on the gradient 2 (y - 1)."""
  weights = declarations()
  learner = config.instantiate().bind(weights)
  params = values(weights)
  states, averages, points = learner.init(params), learner.init_ema(params), [params]
  update = jax.jit(lambda p, s, a, n: learner.update(jax.tree.map(lambda x: 2 * (x - 1), p), 1.0, p, s, a, n))
  for number in range(steps):
    out = update(params, states, averages, jnp.int32(number))
    params, states, averages = out.mdl_vars, out.opt_states, out.ema_vars
    points.append(params)
  return points, states, averages


@pytest.mark.parametrize('per_layer', [None, True], ids=['as one group', 'each layer by itself'])
def test_the_average_is_that_of_optax(per_layer):
  config = Config(Learner, optimizer=FREE, learning_rate=0.1, per_layer_statistics=per_layer)
  points, states, averages = trained(config)
  assert config.instantiate().keeps_averages
  for name, state in states.items():
    found = dict(jax.tree_util.tree_leaves_with_path(state.z))
    assert found, name
    y, x = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (points[-1], averages))
    for path, z in found.items():
      np.testing.assert_allclose(x[path], (y[path] - 0.1 * z) / 0.9, rtol=1e-5, atol=1e-6)
      assert np.abs(np.asarray(x[path] - y[path])).max() > 1e-4


def test_after_the_first_step_the_average_is_z():
  _, states, averages = trained(Config(Learner, optimizer=FREE, learning_rate=0.1), steps=1)
  jax.tree.map(lambda x, z: np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-5), averages, states['all'].z)


def test_before_the_first_step_it_is_the_variable_and_a_skipped_step_keeps_it():
  learner = Config(Learner, optimizer=FREE, learning_rate=0.1).instantiate().bind(declarations())
  params = values(declarations())
  averages = learner.init_ema(params)
  jax.tree.map(np.testing.assert_array_equal, averages, params)
  gradients = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
  out = learner.update(gradients, 1.0, params, learner.init(params), averages, jnp.int32(0))
  jax.tree.map(np.testing.assert_array_equal, out.ema_vars, params)


def test_only_the_rule_that_is_schedule_free_keeps_an_average():
  rules = (
    Config(LearnerRule, name='free', regex=r'lm\.emb.*', learner=Config(Learner, optimizer=FREE, learning_rate=0.1)),
    Config(LearnerRule, name='other', learner=Config(Learner, optimizer=Config(optax.sgd), learning_rate=0.1)),
  )
  points, states, averages = trained(Config(MultiLearner, rules=rules))
  assert list(averages['lm']) == ['emb']
  z = states['free']['all'].z['lm']['emb']['w']
  np.testing.assert_allclose(averages['lm']['emb']['w'], (points[-1]['lm']['emb']['w'] - 0.1 * z) / 0.9, rtol=1e-4)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'ema_decay': 0.9}, r'learner\.ema_decay = 0\.9: a schedule-free optimizer has an average of its own'),
    ({'moments': 'int8'}, r"learner\.moments = 'int8': a schedule-free optimizer keeps points"),
    ({'optimizer': Config(optax.contrib.schedule_free_sgd, b1=0)}, r'learner\.optimizer\.b1 = 0'),
    ({'decoupled_weight_decay': 0.1}, r'decoupled_weight_decay = 0\.1: .* set learner\.optimizer\.weight_decay'),
    (
      {'decoupled_weight_decay': 0.1, 'optimizer': WRAPPED},
      r'decoupled_weight_decay = 0\.1: .* set learner\.optimizer\.base_optimizer\.weight_decay',
    ),
  ],
)
def test_what_has_no_average_is_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    Config(Learner, optimizer=FREE).set(**fields).instantiate()


def test_a_decay_that_respects_marks_is_that_of_the_base_optimizer():
  weights = {'w': WeightHParams((2,)), 'scale': WeightHParams((2,), collections=SKIP)}
  ones = jax.tree.map(lambda w: jnp.ones(w.shape), weights)

  def first_z(optimizer):
    learner = Config(Learner, optimizer=optimizer, learning_rate=0.5).instantiate().bind(weights)
    out = learner.update(jax.tree.map(jnp.zeros_like, ones), 1.0, ones, learner.init(ones), ones, jnp.int32(0))
    return out.opt_states['all'].z

  z = first_z(WRAPPED)
  np.testing.assert_allclose(z['w'], 1 - 0.5 * 0.1, rtol=1e-6)
  np.testing.assert_array_equal(z['scale'], 1)
  with pytest.raises(ConfigError, match=r'use Config\(optax\.contrib\.schedule_free, base_optimizer='):
    first_z(FREE.clone(weight_decay=0.1))
