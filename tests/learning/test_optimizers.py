"""Every optimizer works under a learner, and treats repeated layers as if each stood alone."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_trees import LAYERS, declarations, restacked, unrolled, values, weight

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.linears import bias_weight
from praxis_lite.training.learning import Learner, adafactor, cautious, mars, optimizer as optimizer_module, sophia

RATE = 0.05
LOSS = np.float32(300.0)

_ALONE = """
  adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw novograd
  optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi
"""
_CONTRIB = """
  acprop ademamix adopt cocob madgrad momo momo_adam muon schedule_free_adamw schedule_free_sgd simplified_ademamix
"""


def clipped_lamb(learning_rate: float) -> optax.GradientTransformation:
  """An optimizer of a user's own."""
  return optax.chain(optax.clip_by_block_rms(0.5), optax.lamb(learning_rate))


OPTIMIZERS: dict[str, Config] = {
  **{name: Config(getattr(optax, name)) for name in _ALONE.split()},
  **{name: Config(getattr(optax.contrib, name)) for name in _CONTRIB.split()},
  # Those that estimate a step size start at one large enough to show in three steps.
  'dadapt_adamw': Config(optax.contrib.dadapt_adamw, estim_lr0=0.1),
  'dog': Config(optax.contrib.dog, init_step=('distance', 0.1)),
  'dowg': Config(optax.contrib.dowg, init_estim_sq_dist=0.1),
  'prodigy': Config(optax.contrib.prodigy, estim_lr0=0.1),
  'adafactor': Config(optax.adafactor, min_dim_size_to_factor=4, momentum=0.9),
  'adafactor_of_praxis': Config(adafactor, min_dim_size_to_factor=4, beta1=0.9, weight_decay=0.1),
  'cautious': Config(cautious, Config(optax.adam)),
  'mars': Config(mars, Config(optax.adam, b1=0.95, b2=0.99)),
  'like_sophia': Config(sophia, batch_weight=4.0, rho=0.01, refresh_every=2),
  'galore': Config(optax.contrib.galore, rank=2, update_proj_gap=2),
  'mechanize': Config(optax.contrib.mechanize, Config(optax.sgd), s_init=0.1),
  'optimistic_adam': Config(optax.optimistic_adam, optimism=0.1),
  'adaptive_grad_clip': Config(optax.chain, Config(optax.adaptive_grad_clip, 0.01), Config(optax.sgd)),
  'lbfgs': Config(optax.lbfgs, memory_size=2, linesearch=None),
  'momentum': Config(optax.sgd, momentum=0.9, nesterov=True),
  'user': Config(clipped_lamb),
  'chain': Config(
    optax.chain,
    Config(optax.clip_by_global_norm, 1.0),
    Config(optax.scale_by_adam, b2=0.99),
    Config(optax.scale_by_learning_rate),
  ),
  'partition': Config(
    optax.partition,
    {'adam': Config(optax.adamw, weight_decay=0.1), 'lamb': Config(optax.lamb)},
    lambda params: jax.tree.map(lambda p: 'adam' if p.ndim == 1 else 'lamb', params),
  ),
}

# Those of optax that no training step fits, and why.
UNFIT = {
  'sophia': 'evaluates the loss again; refused',
  'dpsgd': 'takes the gradient of each example',
  'noisy_sgd': 'draws numbers, so layers of a stack get others than alone',
  'schedule_free': 'wraps another; its two presets are here',
  'polyak_sgd': 'takes the size of its step from the loss, whatever the learning rate',
}


def test_all_optimizers_of_optax_are_here_or_do_not_fit() -> None:
  found = {
    name
    for module in (optax, optax.contrib)
    for name, made in vars(module).items()
    if inspect.isfunction(made) and 'learning_rate' in inspect.signature(made).parameters
    if not name.startswith(('_', 'scale_by'))
  }
  assert found - OPTIMIZERS.keys() <= UNFIT.keys()
  assert found & UNFIT.keys() & OPTIMIZERS.keys() == set()


def gradients_of_steps(weights: Any) -> list[Any]:
  return [values(weights, seed, spread=4.0) for seed in (1, 2, 3)]


def plain_optax(config: Config, weights: Any, params: Any, gradients: list[Any]) -> Any:
  """Oracle: optax by itself on a tree with each layer's weights in arrays of their own."""
  tx = optax.with_extra_args_support(_with_mask(_with_rate(config)).instantiate())
  params, state = unrolled(params, weights), tx.init(unrolled(params, weights))

  @jax.jit
  def step(params: Any, state: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, state, params, value=LOSS)
    return optax.apply_updates(params, updates), state

  for grads in gradients:
    params, state = step(params, state, unrolled(grads, weights))
  return restacked(params, weights)


def _with_rate(config: Config) -> Config:
  copy = config.clone()
  nested = [v for v in copy.__arguments__.values() if isinstance(v, Config)]
  nested += [c for v in copy.__arguments__.values() if isinstance(v, dict) for c in v.values()]
  for c in [copy, *nested]:
    if 'learning_rate' in c.__signature_info__.parameters:
      c.learning_rate = RATE
  return copy


def learned(learner: Learner, weights: Any, params: Any, gradients: list[Any]) -> tuple[Any, Any]:
  bound = learner.bind(weights)
  state = first = bound.init(params)

  @jax.jit
  def step(params: Any, state: Any, grads: Any, number: Any) -> Any:
    return bound.update(grads, LOSS, params, state, None, number)

  for number, grads in enumerate(gradients):
    out = step(params, state, grads, jnp.int32(number))
    params, state = out.mdl_vars, out.opt_states
  same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), first, state)
  assert all(jax.tree.leaves(same))
  return params, state


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_a_stack_of_layers_is_trained_as_its_layers_alone(name: str) -> None:
  weights = declarations()
  params, gradients = values(weights), gradients_of_steps(weights)
  # What L-BFGS looks at is not found out; by stacks, as by layers, it is what it looks at of all variables.
  per_layer = False if name == 'lbfgs' else None
  learner = Config(Learner, optimizer=OPTIMIZERS[name], learning_rate=RATE, per_layer_statistics=per_layer)
  actual, _ = learned(learner.instantiate(), weights, params, gradients)
  expected = plain_optax(OPTIMIZERS[name], weights, params, gradients)
  changes = []
  for (path, start), want in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(expected)):
    got = functools.reduce(lambda tree, entry: tree[entry.key], path, actual)
    changes.append(float(jnp.max(jnp.abs(want - start))))
    tolerance = 2e-3 * changes[-1] + 1e-6
    np.testing.assert_allclose(got - start, want - start, atol=tolerance, err_msg=jax.tree_util.keystr(path))
  assert max(changes) > 1e-4, 'the optimizer did nothing that could be compared'


def _with_mask(config: Config) -> Config:
  """The mask of the marked variables of `declarations()`, by rank of a layer's weight: vectors are marked."""
  vectors = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
  nested = [c for v in config.__arguments__.values() if isinstance(v, dict) for c in v.values()]
  for c in [config, *nested]:
    for mask in {'mask', 'weight_decay_mask'} & set(c.__signature_info__.parameters):
      setattr(c, mask, vectors)
  return config


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', ['lamb', 'adafactor'])
def test_the_comparison_with_single_layers_would_notice_statistics_over_the_stack(name: str) -> None:
  weights = declarations()
  params, gradients = values(weights), gradients_of_steps(weights)
  learner = Config(Learner, optimizer=OPTIMIZERS[name], learning_rate=RATE, per_layer_statistics=False).instantiate()
  actual, _ = learned(learner, weights, params, gradients)
  expected = plain_optax(OPTIMIZERS[name], weights, params, gradients)
  w, v = actual['lm']['layers']['ff']['w'], expected['lm']['layers']['ff']['w']
  assert not np.allclose(w, v, rtol=1e-2)


@pytest.mark.parametrize(
  ('optimizer', 'message'),
  [
    (
      Config(cautious, optax.adam),
      r'expected a config of it, as in Config\(cautious, Config\(optax\.adam\)\), got adam$',
    ),
    (Config(mars, optax.adam), r'expected a config of it, as in Config\(mars, Config\(optax\.adam\)\), got adam$'),
    (Config(cautious, None), r'expected a config of it, .* got None'),
    (Config(sophia, batch_weight=0), r'batch_weight: expected more than 0 .*, got 0'),
    (Config(sophia, batch_weight=8, refresh_every=0), r'refresh_every: expected at least 1, got 0'),
    (Config(mars, Config(optax.adam), b1=1.0), r'b1: expected at least 0 and less than 1, got 1\.0'),
    (Config(mars, Config(optax.adam), gamma=-1.0), r'gamma: expected at least 0 .*, got -1\.0'),
    (Config(mars, Config(optax.adam), gamma=float('nan')), r'gamma: .*, got nan'),
  ],
)
def test_what_the_variants_of_an_optimizer_cannot_use_is_named(optimizer: Config, message: str) -> None:
  learner = Config(Learner, optimizer=optimizer, learning_rate=RATE).instantiate()
  with pytest.raises(ConfigError, match=r'learner\.optimizer\..*' + message):
    learner.bind(declarations()).init(values(declarations()))


def test_a_norm_of_all_variables_is_not_taken_layer_by_layer() -> None:
  parts = (
    Config(optax.clip_by_global_norm, 1.0),
    Config(optax.scale_by_trust_ratio),
    Config(optax.scale_by_learning_rate),
  )
  optimizer, weights = Config(optax.chain, *parts), declarations()
  with pytest.raises(ConfigError, match=r'clip_by_global_norm looks at all .* learner.clip_gradient_norm_to_value'):
    Config(Learner, optimizer=optimizer).instantiate().bind(weights).init(values(weights))
  for chosen in (True, False):
    learner = Config(Learner, optimizer=optimizer, per_layer_statistics=chosen).instantiate()
    assert learner.bind(weights).init(values(weights))
  alone = {'w': weight(3, 2)}
  assert set(Config(Learner, optimizer=optimizer).instantiate().bind(alone).init(values(alone))) == {'all'}


def test_slots_of_adam_are_named_by_their_variables() -> None:
  weights = declarations()
  state = Config(Learner, optimizer=Config(optax.adam)).instantiate().bind(weights).init(values(weights))
  names = {jax.tree_util.keystr(p, simple=True, separator='.') for p, _ in jax.tree_util.tree_leaves_with_path(state)}
  assert {'all.0.count', 'all.0.mu.lm.layers.ff.w', 'all.0.nu.lm.emb.w'} <= names


@pytest.mark.slow
def test_slots_of_mapped_optimizers_are_stacked_and_counts_are_not() -> None:
  weights = declarations()
  state = Config(Learner, optimizer=OPTIMIZERS['muon']).instantiate().bind(weights).init(values(weights))
  shapes = {
    jax.tree_util.keystr(p, simple=True, separator='.'): x.shape for p, x in jax.tree_util.tree_leaves_with_path(state)
  }
  muon = 'repeated_3.inner_states.muon.inner_state.0.'
  assert shapes[muon + 'mu.lm.layers.ff.w'] == (LAYERS, 4, 5)
  assert shapes[muon + 'ns_coeffs'] == (3,)
  assert shapes[muon + 'count'] == ()
  assert shapes['repeated_2_2.inner_states.muon.inner_state.0.mu.lm.deep.w'] == (2, 2, 5, 4)
  assert not any('.ff.' in name for name in shapes if name.startswith('single'))


def scale_by_own_history(learning_rate: float) -> optax.GradientTransformation:
  """Keeps a number that depends on the gradients but carries no variable's name."""

  def init(params: Any) -> Any:
    return {'seen': jnp.zeros(())}

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    seen = state['seen'] + optax.global_norm(updates)
    return jax.tree.map(lambda u: -learning_rate * u / seen, updates), {'seen': seen}

  return optax.GradientTransformation(init, update)


def test_a_nameless_statistic_that_differs_between_layers_is_kept_per_layer() -> None:
  weights = {'w': weight(4, repeat=(3,))}
  fields = {'learning_rate': 1.0, 'per_layer_statistics': True}
  learner = Config(Learner, optimizer=Config(scale_by_own_history), **fields).instantiate()
  params, grads = {'w': jnp.zeros((3, 4))}, {'w': jnp.array([[1.0], [2.0], [5.0]]) * jnp.ones((3, 4))}
  actual, state = learned(learner, weights, params, [grads])
  np.testing.assert_allclose(state['repeated_3']['seen'], [2.0, 4.0, 10.0])
  np.testing.assert_allclose(actual['w'], -np.full((3, 4), 0.5))


def test_a_statistic_of_all_variables_in_an_optimizer_of_a_users_own_is_that_of_all_layers() -> None:
  weights = {'w': weight(4, repeat=(3,))}
  learner = Config(Learner, optimizer=Config(scale_by_own_history), learning_rate=1.0).instantiate()
  params, grads = {'w': jnp.zeros((3, 4))}, {'w': jnp.array([[1.0], [2.0], [5.0]]) * jnp.ones((3, 4))}
  actual, state = learned(learner, weights, params, [grads])
  norm = np.sqrt(4 * (1 + 4 + 25))
  np.testing.assert_allclose(state['all']['seen'], norm, rtol=1e-6)
  np.testing.assert_allclose(actual['w'], -np.asarray(grads['w']) / norm, rtol=1e-6)


def lamb_of_a_clipped_gradient(learning_rate: float) -> optax.GradientTransformation:
  """Looks at all variables together, and at each."""
  return optax.chain(optax.clip_by_global_norm(0.5), optax.lamb(learning_rate))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  ('optimizer', 'at_fault'),
  [
    (Config(optax.adamw), []),
    (OPTIMIZERS['chain'], ['clip_by_global_norm']),
    (OPTIMIZERS['partition'], ['lamb']),
    (Config(optax.apply_if_finite, Config(optax.adam), 3), ['apply_if_finite']),
    (Config(optax.apply_if_finite, Config(optax.lamb), 3), ['apply_if_finite', 'lamb']),
    (Config(optax.chain, Config(optax.add_noise, 0.1, 0.5, 0), Config(optax.sgd)), ['add_noise']),
    (Config(optax.chain, optax.scale_by_trust_ratio(), Config(optax.sgd)), ['chain']),
    (
      Config(
        optax.chain, Config(optax.scale_by_schedule, Config(optax.linear_schedule, 1.0, 0.0, 9)), Config(optax.sgd)
      ),
      [],
    ),
    (Config(lamb_of_a_clipped_gradient), ['lamb_of_a_clipped_gradient']),
  ],
)
def test_what_needs_whole_variables_is_named(optimizer: Config, at_fault: list[str]) -> None:
  learner = Config(Learner, optimizer=optimizer).instantiate().bind(declarations())
  assert learner.needs_whole({('lm', 'emb', 'w'): (0,)}) == ('learner.optimizer', at_fault)
  assert learner.needs_whole({}) == ('learner.optimizer', [])


def test_an_optimizer_of_a_users_own_that_looks_at_all_and_at_each_is_refused_where_layers_are_repeated() -> None:
  learner = Config(Learner, optimizer=Config(lamb_of_a_clipped_gradient)).instantiate()
  with pytest.raises(ConfigError, match=r'lamb_of_a_clipped_gradient looks at all variables together'):
    learner.bind(declarations()).init(values(declarations()))
  assert learner.bind({'w': weight(2)}).init({'w': jnp.ones(2)})


def test_low_precision_slots_keep_their_dtype() -> None:
  weights = {'w': weight(4, 4)}
  params = {'w': jnp.ones((4, 4), jnp.bfloat16)}
  for optimizer in (Config(optax.lars), Config(optax.sgd, momentum=0.9), Config(optax.adafactor, momentum=0.9)):
    learner = Config(Learner, optimizer=optimizer).instantiate()
    actual, _ = learned(learner, weights, params, [params, params])
    assert actual['w'].dtype == jnp.bfloat16


# ---------------------------------------------------------------- what is filled in


@pytest.mark.slow
def test_weight_decay_of_the_optimizer_spares_marked_variables() -> None:
  weights = declarations()
  params = values(weights)
  zeros = jax.tree.map(jnp.zeros_like, params)
  for optimizer in (
    Config(optax.adamw, weight_decay=0.5),
    Config(optax.chain, Config(optax.add_decayed_weights, 0.5), Config(optax.scale_by_learning_rate)),
    Config(optax.adafactor, weight_decay_rate=0.5, multiply_by_parameter_scale=False),
    Config(optax.contrib.muon, weight_decay=0.5),
  ):
    learner = Config(Learner, optimizer=optimizer, learning_rate=0.1).instantiate()
    actual, _ = learned(learner, weights, params, [zeros])
    np.testing.assert_array_equal(actual['lm']['scale'], params['lm']['scale'])
    np.testing.assert_array_equal(actual['lm']['layers']['ff']['b'], params['lm']['layers']['ff']['b'])
    assert not np.allclose(actual['lm']['layers']['ff']['w'], params['lm']['layers']['ff']['w'])


def test_a_mask_that_is_given_is_kept() -> None:
  weights = {'a': weight(2), 'b': weight(2)}
  optimizer = Config(optax.adamw, weight_decay=0.5, mask={'a': True, 'b': False})
  learner = Config(Learner, optimizer=optimizer, learning_rate=0.1).instantiate()
  params = jax.tree.map(lambda w: jnp.ones(w.shape), weights)
  actual, _ = learned(learner, weights, params, [jax.tree.map(jnp.zeros_like, params)])
  np.testing.assert_allclose(actual['a'], 0.95)
  np.testing.assert_array_equal(actual['b'], 1.0)


def test_weight_decay_that_cannot_spare_marked_variables_is_refused() -> None:
  weights = declarations()
  learner = Config(Learner, optimizer=Config(optax.contrib.prodigy, weight_decay=0.1)).instantiate()
  with pytest.raises(ConfigError, match=r'weight_decay of prodigy.*lm\.layers\.ff\.b.*decoupled_weight_decay'):
    learner.bind(weights).init(values(weights))
  unmarked = {'w': weight(2)}
  learner.bind(unmarked).init({'w': jnp.ones(2)})


@pytest.mark.parametrize(
  ('optimizer', 'message'),
  [
    (Config(optax.adam, learning_rate=0.1), r'learner\.optimizer\.learning_rate: set learner\.learning_rate'),
    (Config(optax.scale_by_adam), r'scale_by_adam takes no learning_rate'),
    (Config(optax.exponential_decay, 1.0, 1, 0.5), r'exponential_decay takes no learning_rate'),
    (Config(lambda learning_rate: 3), r'returned int, not an optax transformation'),
  ],
)
def test_optimizers_that_cannot_work_are_refused(optimizer: Config, message: str) -> None:
  weights = {'w': weight(2)}
  with pytest.raises(ConfigError, match=message):
    Config(Learner, optimizer=optimizer).instantiate().bind(weights).init({'w': jnp.ones(2)})


@pytest.mark.parametrize(('optimizer', 'missing'), [(optax.lbfgs, 'value_fn'), (optax.contrib.sophia, 'obj_fn')])
def test_an_optimizer_that_must_evaluate_the_loss_again_is_refused(optimizer: Any, missing: str) -> None:
  weights, params = {'w': weight(2)}, {'w': jnp.ones(2)}
  learner = Config(Learner, optimizer=Config(optimizer)).instantiate()
  with pytest.raises(ConfigError, match=f'it needs what a training step does not have: .*{missing}'):
    learned(learner, weights, params, [params])


# ---------------------------------------------------------------- matrices


@pytest.mark.slow
def test_muon_knows_the_matrices_in_weights_of_any_rank() -> None:
  """Heads belong to the rows or columns, each expert is a matrix, and so is each layer of a stack."""
  ways = {'query': ((5, 3, 2), (0,), (1, 2)), 'out': ((3, 2, 5), (0, 1), (2,)), 'experts': ((2, 5, 3), (1,), (2,))}
  plain = {'linear': weight(5, 3), 'scale': weight(5), 'filters': weight(2, 2, 3)}
  plain['table'] = dataclasses.replace(weight(7, 5), fan_in_axes=(1,), fan_out_axes=(0,))
  plain['bias'] = bias_weight((3, 2))  # Of heads.
  weights = {
    name: dataclasses.replace(weight(*shape, repeat=(LAYERS,)), fan_in_axes=rows, fan_out_axes=columns)
    for name, (shape, rows, columns) in ways.items()
  }
  params, grads = values(weights | plain), values(weights | plain, 1)
  learner = Config(Learner, optimizer=Config(optax.contrib.muon), learning_rate=RATE)
  actual, state = learned(learner.instantiate(), weights | plain, params, [grads])
  stacks, _ = learned(learner.clone(per_layer_statistics=False).instantiate(), weights | plain, params, [grads])

  def matrix(name: str, x: Any) -> list[Any]:
    layers = [x] if name == 'linear' else list(x)
    return [m for layer in layers for m in (layer if name == 'experts' else [layer.reshape(*_matrix_shape[name])])]

  _matrix_shape = {'query': (5, 6), 'out': (6, 5), 'linear': (5, 3)}
  tx = optax.contrib.muon(RATE)
  for name in (*ways, 'linear'):
    before, gradients = matrix(name, params[name]), matrix(name, grads[name])
    updates = jax.jit(lambda g, x: tx.update(g, tx.init(x), x)[0])(gradients, before)
    for got in (actual, stacks):
      for a, b, update in zip(matrix(name, got[name]), before, updates, strict=True):
        np.testing.assert_allclose(a - b, update, rtol=1e-3, atol=1e-5, err_msg=name)
  slots = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state['single'])]
  assert {'muon' in slot for slot in slots if re.search('filters|table|scale|bias', slot)} == {False}
  assert {'muon' in slot for slot in slots if 'linear' in slot} == {True}


@pytest.mark.slow
def test_an_optimizer_that_is_not_understood_and_looks_at_all_variables_names_the_field_to_set() -> None:
  """L-BFGS does to stacks what it does to layers, which is not found out; its user can say so."""
  weights = declarations()
  learner = Config(Learner, optimizer=OPTIMIZERS['lbfgs']).instantiate()
  with pytest.raises(ConfigError, match=r'lbfgs looks at all variables together.*per_layer_statistics.*False'):
    learner.bind(weights).init(values(weights))


def test_optimizers_get_the_value_of_the_schedule_at_the_step_of_the_state() -> None:
  """An optimizer's own count lags behind after a skipped step; the rate must not."""
  weights, params = {'w': weight(2)}, {'w': jnp.zeros(2)}
  schedule = Config(optax.piecewise_constant_schedule, 1.0, {10: 0.5})
  learner = (
    Config(Learner, optimizer=Config(optax.sgd), learning_rate=2.0, schedule=schedule).instantiate().bind(weights)
  )
  state = learner.init(params)
  for step, rate in ((0, 2.0), (11, 1.0)):
    out = learner.update({'w': jnp.ones(2)}, jnp.float32(0), params, state, None, jnp.int32(step))
    np.testing.assert_allclose(out.mdl_vars['w'], -rate)
    assert float(out.stats['learning_rate']) == rate


def test_what_is_read_from_an_optimizer_is_kept_for_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of another task, whose mesh splits the variables in another way; and not of one that differs, or has changed."""
  asked = []
  monkeypatch.setattr(optimizer_module, 'is_stackable', lambda *args: not asked.append(args))

  def groups(config: Config, weights: Any) -> int:
    Config(Learner, optimizer=config).instantiate().bind(weights).init(values(weights))
    return len(asked)

  weights, config = {'w': weight(2, 3, repeat=(2,))}, Config(optax.lamb, b1=0.123)
  split = {'w': dataclasses.replace(weights['w'], tensor_split_dims_mapping=('data', None))}
  assert [groups(config, weights), groups(config.clone(), weights), groups(config, split)] == [1, 1, 1]
  assert groups(config, {'w': weight(2, 3, repeat=(3,))}) == 2
  config.b1 = 0.124
  assert [groups(config, weights), groups(Config(optax.lamb, b1=np.array([0.1, 0.2])), weights)] == [3, 4]


def test_sophia_clips_steps_of_newton() -> None:
  """Against NumPy; the curvature is that of the first and the third step."""
  tx = sophia(0.1, batch_weight=8.0, b1=0.9, b2=0.5, rho=0.2, refresh_every=2, weight_decay=0.5)
  v = np.array([1.0, -2.0, 0.5], np.float32)
  state, m, h = tx.init(v), np.zeros(3), np.zeros(3)
  for i, g in enumerate(np.array([[1.0, 0.1, 0.0], [0.5, 3.0, 0.0], [-4.0, 0.2, 1.0]], np.float32)):
    update, state = tx.update(g, state, v)
    m = 0.9 * m + 0.1 * g
    h = 0.5 * h + 0.5 * 8 * g**2 if i != 1 else h
    wanted = -0.1 * (np.clip(m / np.maximum(0.2 * h, 1e-15), -1, 1) + 0.5 * v)
    np.testing.assert_allclose(update, wanted, rtol=1e-5)
    v = v + update
