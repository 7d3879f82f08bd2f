"""Factors of updates for a model with `Mup`: how large the updates of an optimizer are, and what that needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.sharding.weights import Growth, WeightHParams, WeightHParamsCollection, WeightInit
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner, muon, shampoo, soap
from praxis_lite.training.learning.praxis_adafactor import adafactor

BIAS = frozenset({WeightHParamsCollection.SKIP_REGULARIZATION})
INIT = WeightInit.GaussianFanIn()


def weights(depth: float = 1.0, exponent: float = 0.5):
  """Fan in n = 4 times, fan out m = 2 times that of the base."""

  def grown(*shape: int, base: tuple[int, ...], **fields) -> WeightHParams:
    return WeightHParams(shape, init=INIT, growth=Growth(base, depth, exponent), **fields)

  return {
    'hidden': grown(8, 6, base=(2, 3)),
    'heads': grown(8, 2, 3, base=(2, 1, 3), fan_in_axes=(0,), fan_out_axes=(1, 2)),
    'input': grown(3, 6, base=(3, 3)),
    'output': grown(8, 5, base=(2, 5)),
    'table': grown(5, 6, base=(5, 3), fan_in_axes=(1,), fan_out_axes=(0,)),
    'bias': grown(2, 3, base=(1, 3), collections=BIAS),
    'kernel': grown(3, 3, 8, 6, base=(3, 3, 2, 3)),
    'channels': grown(4, 6, base=(4, 3), fan_in_axes=(0,), fan_out_axes=(0,)),
    'scalar': grown(base=()),
    'same': grown(2, 3, base=(2, 3)),
  }


def factors(optimizer, declared=None, **fields) -> dict[str, float]:
  learner = Config(Learner, optimizer=Config(optimizer) if callable(optimizer) else optimizer, **fields).instantiate()
  bound = learner.bind(weights() if declared is None else declared)
  return {path[0]: factor for path, factor in bound._factors.items()}


ADAM = {'hidden': 1 / 4, 'heads': 1 / 4, 'input': 1, 'output': 1 / 4, 'table': 1, 'bias': 1, 'kernel': 1 / 4}
ADAM |= {'channels': 1, 'scalar': 1, 'same': 1}
SGD = {'hidden': 1 / 2, 'heads': 1 / 2, 'input': 2, 'output': 1 / 4, 'table': 2, 'bias': 2, 'kernel': 1 / 2}
SGD |= {'channels': 2, 'scalar': 1, 'same': 1}


@pytest.mark.parametrize(
  ('optimizer', 'expected'),
  [
    (optax.adamw, ADAM),
    (optax.lion, ADAM),
    (optax.rmsprop, ADAM),
    (Config(optax.sgd, momentum=0.9), SGD),
    # LAMB multiplies by the norms of variables, which are drawn at 1/2 and 1/4 of the size.
    (optax.lamb, ADAM | {'hidden': 1 / 2, 'heads': 1 / 2, 'output': 1, 'kernel': 1 / 2}),
  ],
  ids=['adamw', 'lion', 'rmsprop', 'momentum', 'lamb'],
)
def test_factors_follow_from_fans_and_from_what_the_optimizer_does(optimizer, expected):
  assert factors(optimizer) == pytest.approx(expected)


def test_muon_divides_its_own_factor_of_the_shape():
  """The update of a matrix [8, 6] should be sqrt(m / n) as large as that of [2, 3]; Muon multiplies by its shapes."""
  by_itself = max(1, 6 / 8) ** 0.5 / max(1, 3 / 2) ** 0.5
  assert factors(optax.contrib.muon)['hidden'] == pytest.approx((2 / 4) ** 0.5 / by_itself)
  consistent = factors(Config(optax.contrib.muon, consistent_rms=0.2))
  assert consistent['hidden'] == pytest.approx((2 / 4) ** 0.5 / (8 / 3) ** 0.5)
  assert consistent['table'] == consistent['bias'] == 1 and consistent['kernel'] == 1 / 4  # These are not matrices.


@pytest.mark.parametrize('optimizer', [soap, shampoo])
def test_other_optimizers_of_matrices_need_to_be_told(optimizer):
  """The size of their updates depends on how much gradients of several steps differ, so one step does not show it."""
  with pytest.raises(ConfigError, match=rf'learner\.update_size: mup .* updates of {optimizer.__name__}'):
    factors(optimizer)
  assert factors(optimizer, update_size='normalized') == pytest.approx(ADAM)


@pytest.mark.parametrize('fields', [{}, {'consistent_rms': 0.2}])
def test_the_muon_of_owners_has_the_factors_of_that_of_optax(fields):
  declared = weights() | {'wide': WeightHParams((256, 1024), init=INIT, growth=Growth((64, 64), 1.0, 0.5))}
  of_optax = factors(Config(optax.contrib.muon, **fields), declared)
  assert of_optax['wide'] == pytest.approx(1.0 if not fields else 1 / 2)
  assert factors(Config(muon, **fields), declared) == pytest.approx(of_optax)
  assert factors(Config(muon, **fields), declared, update_size='spectral')['wide'] == pytest.approx(of_optax['wide'])


@pytest.mark.parametrize(('exponent', 'adam', 'sgd'), [(0.5, 3**-0.5, 1.0), (1.0, 1.0, 3.0)])
def test_three_times_the_layers(exponent, adam, sgd):
  declared = weights(3.0, exponent)
  assert factors(optax.adam, declared) == pytest.approx({name: value * adam for name, value in ADAM.items()})
  assert factors(optax.sgd, declared) == pytest.approx({name: value * sgd for name, value in SGD.items()})


def test_without_a_base_nothing_is_multiplied():
  declared = {'w': WeightHParams((8, 6), init=INIT)}
  assert factors(optax.novograd, declared) == {}


def test_an_optimizer_that_fits_no_rule_is_refused_unless_its_size_is_given():
  with pytest.raises(ConfigError, match='update_size: mup cannot find out how large the updates of novograd'):
    factors(optax.novograd)
  assert factors(optax.novograd, update_size='normalized') == pytest.approx(ADAM)
  with pytest.raises(ConfigError, match="update_size: expected 'auto', "):
    Config(Learner, update_size='large').instantiate()
  with pytest.raises(ConfigError, match='schedule_free_adamw keeps points of its own'):
    factors(optax.contrib.schedule_free_adamw)


def step(config: Config, gradient: float):
  """The changes of variables of ones."""
  declared = weights()
  learner = config.instantiate().bind(declared)
  ones = jax.tree.map(lambda w: jnp.ones(w.full_shape), declared)
  gradients = jax.tree.map(lambda x: gradient * x, ones)
  new = learner.update(gradients, jnp.float32(1), ones, learner.init(ones), None, jnp.int32(0)).mdl_vars
  return {name: float(np.ravel(x)[0]) - 1 for name, x in new.items()}


@pytest.mark.parametrize(
  'decay',
  [
    {'optimizer': Config(optax.adamw, weight_decay=0.1)},
    {'optimizer': Config(optax.adam), 'decoupled_weight_decay': 0.1},
  ],
  ids=['of the optimizer', 'of the learner'],
)
def test_updates_are_multiplied_and_decay_is_not(decay):
  found, only_decay = (step(Config(Learner, learning_rate=0.01, **decay), gradient) for gradient in (3.0, 0.0))
  for name, factor in ADAM.items():
    of_decay = 0.0 if name == 'bias' else -0.001
    assert only_decay[name] == pytest.approx(of_decay, abs=1e-6), name
    assert found[name] == pytest.approx(-0.01 * factor + of_decay, abs=1e-6), name


def test_the_decays_of_muon_are_not_multiplied_and_spare_marked_variables():
  """Without a gradient, matrices decay by one of them, and tables and filters by the other."""
  found = step(Config(Learner, learning_rate=0.01, optimizer=Config(muon, adam_weight_decay=0.1)), 0.0)
  assert found['kernel'] == pytest.approx(-0.001, abs=1e-6)  # Whose updates have a factor of 1 / 4.
  assert found['table'] == pytest.approx(-0.001, abs=1e-6)
  assert found['bias'] == found['hidden'] == 0
  with pytest.raises(ConfigError, match='adam_weight_decay of muon decays every variable, but bias is marked'):
    step(Config(Learner, optimizer=Config(optax.contrib.muon, adam_weight_decay=0.1)), 0.0)


@pytest.mark.parametrize(
  'optimizer',
  [
    Config(optax.lamb, weight_decay=0.1),
    Config(optax.adafactor, weight_decay_rate=1e-5),
    Config(adafactor, weight_decay=0.1),
    Config(optax.chain, Config(optax.clip, 1.0), Config(optax.lamb, weight_decay=0.1)),
  ],
  ids=['lamb', 'adafactor', 'that of Praxis', 'in a chain'],
)
def test_a_decay_of_an_optimizer_that_measures_variables_is_refused(optimizer):
  # A variable divided by its factor would have another norm, and the update would lose the factor.
  with pytest.raises(ConfigError, match=r'updates are relative .* set learner\.decoupled_weight_decay'):
    factors(optimizer)
  without = {'learning_rate': 0.01, 'decoupled_weight_decay': 0.1, 'optimizer': Config(target(optimizer))}
  if target(optimizer) is not optax.chain:
    assert step(Config(Learner, **without), 0.0)['hidden'] == pytest.approx(-0.001, abs=1e-6)


def test_each_rule_of_a_multi_learner_has_the_factors_of_its_optimizer():
  rules = (
    Config(LearnerRule, name='sgd', regex='hidden|input', learner=Config(Learner, optimizer=Config(optax.sgd))),
    Config(LearnerRule, name='adam', learner=Config(Learner, optimizer=Config(optax.adam)), update_factor=2.0),
  )
  for rule in rules:
    rule.learner.learning_rate = 0.01
  found = step(Config(MultiLearner, rules=rules), 1.0)
  assert [found[name] for name in ('hidden', 'input', 'output')] == pytest.approx([-0.005, -0.02, -0.005], abs=1e-6)
