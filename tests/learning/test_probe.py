"""What is read from the program of an optimizer is what it does, measured: for all of optax, and for a user's own."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_trees import weight

from praxis_lite.common.config import Config
from praxis_lite.common.trees import NestedDict
from praxis_lite.training.learning import optimizer
from praxis_lite.training.learning.optimizer import ELEMENTWISE
from praxis_lite.training.learning.probe import is_elementwise, is_stackable, looks_at_all

# Small enough to be quick, with a square matrix, and sizes that some optimizers treat apart.
WEIGHTS = {'stack': weight(4, 4, repeat=(2,)), 'rows': weight(3, repeat=(2,)), 'flat': weight(4, 6)}

Build = Callable[[jax.Array], optax.GradientTransformationExtraArgs]

# Arguments that factories need, or without which nothing would show within two steps.
_ARGUMENTS: dict[str, dict[str, object]] = {
  'adafactor': {'min_dim_size_to_factor': 4},
  'adaptive_grad_clip': {'clipping': 0.01},
  'add_decayed_weights': {'weight_decay': 0.1},
  'add_noise': {'eta': 0.1, 'gamma': 0.5, 'key': 0},
  'centralize': {},
  'clip': {'max_delta': 0.1},
  'clip_by_block_rms': {'threshold': 0.1},
  'clip_by_global_norm': {'max_norm': 0.1},
  'dadapt_adamw': {'estim_lr0': 0.1},
  'differentially_private_aggregate': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1, 'key': 0},
  'dog': {'init_step': ('distance', 0.1)},
  'dowg': {'init_estim_sq_dist': 0.1},
  'dpsgd': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1, 'key': 0},
  'ema': {'decay': 0.9},
  'identity': {},
  'keep_params_nonnegative': {},
  'lbfgs': {'memory_size': 2, 'linesearch': None},
  'noisy_sgd': {'key': 0},
  'normalize_by_update_norm': {},
  'polyak_sgd': {},
  'prodigy': {'estim_lr0': 0.1},
  'scale': {'step_size': 0.5},
  'scale_by_factored_rms': {'min_dim_size_to_factor': 4},
  'scale_by_lbfgs': {'memory_size': 2},
  'scale_by_schedule': {'step_size_fn': lambda step: 0.5**step},
  'set_to_zero': {},
  'sgd': {'momentum': 0.9, 'nesterov': True},
  'trace': {'decay': 0.9},
  'zero_nans': {},
}
_ELEMENTWISE = """
  adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw optimistic_adam_v2
  optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum yogi
  acprop ademamix adopt cocob madgrad schedule_free_adamw schedule_free_sgd simplified_ademamix
  add_decayed_weights clip ema identity keep_params_nonnegative scale scale_by_adadelta scale_by_adam
  scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_learning_rate scale_by_lion scale_by_radam
  scale_by_rms scale_by_rss scale_by_schedule scale_by_sign scale_by_stddev scale_by_yogi set_to_zero trace zero_nans
"""
_GLOBAL = 'apply_if_finite clip_by_global_norm dadapt_adamw dog dowg lbfgs momo momo_adam polyak_sgd prodigy'
_DRAWING = 'add_noise noisy_sgd'
# Those need what a training step does not have: gradients of each example, or the loss as a function.
_UNTRACEABLE = 'differentially_private_aggregate dpsgd sophia'
# What these look at makes no difference within two steps.
_QUIET = 'adaptive_grad_clip apply_if_finite dadapt_adamw momo momo_adam prodigy'
# Stackable in truth: mapped over layers for nothing, or, since it looks at all variables, to be set by hand.
_NOT_SHOWN = 'lbfgs scale_by_factored_rms scale_by_lbfgs'
# Those take further optimizers or searches, or trees of dimension numbers.
_LEFT_OUT = 'scale_by_backtracking_linesearch scale_by_muon scale_by_zoom_linesearch schedule_free'


def _factories() -> dict[str, Build]:
  """All of optax that gives a transformation, and takes a learning rate, scales or has arguments above."""
  found: dict[str, Build] = {'apply_if_finite': lambda rate: optax.apply_if_finite(optax.adam(rate), 3)}
  for module in (optax.contrib, optax):
    for name in dir(module):
      factory = getattr(module, name)
      if (
        not isinstance(factory, (types.FunctionType, functools.partial))
        or name.startswith('_')
        or name in _LEFT_OUT.split()
      ):
        continue
      parameters = inspect.signature(factory).parameters
      if 'learning_rate' in parameters or name.startswith('scale_by_') or name in _ARGUMENTS:
        found[name] = _builder(factory, _ARGUMENTS.get(name, {}), 'learning_rate' in parameters)
  return found


def _builder(
  factory: Callable[..., optax.GradientTransformation], fields: dict[str, object], takes_rate: bool
) -> Build:
  def build(rate: jax.Array) -> optax.GradientTransformationExtraArgs:
    rates = {'learning_rate': rate} if takes_rate else {}
    return optax.with_extra_args_support(factory(**fields, **rates))

  return build


FACTORIES = _factories()


# ---------------------------------------------------------------- the truth, measured


def _values(seed: int) -> NestedDict:
  """Random values of another scale for each variable and layer, so that what is taken over several shows."""
  numbers = np.random.default_rng(seed)

  def value(w: object) -> np.ndarray:
    drawn = numbers.normal(size=w.full_shape).astype(np.float32)
    return drawn * np.float32([1, 5]).reshape(2, *(1 for _ in w.shape)) if w.repeat_prefix else drawn * 3

  return jax.tree.map(value, WEIGHTS)


def _updates(build: Build, params: NestedDict, gradients: list[NestedDict]) -> list[object]:
  """The updates of some steps, without a compile of each: operations on small arrays are compiled but once."""
  with jax.disable_jit():
    optimizer = build(jnp.float32(0.1))
    state, made = optimizer.init(params), []
    for gradient in gradients:
      updates, state = optimizer.update(gradient, state, params, value=jnp.float32(300.0))
      params = optax.apply_updates(params, updates)
      made.append(updates)
  return made


def _close(a: object, b: object) -> bool:
  return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-3, atol=1e-6), a, b)))


PARAMS, GRADIENTS = _values(0), [_values(1), _values(2)]


def _unrolled(tree: NestedDict) -> NestedDict:
  return {'stack': list(tree['stack']), 'rows': list(tree['rows']), 'flat': tree['flat']}


@functools.lru_cache(maxsize=1)  # A test compares others with them.
def _plain_updates(build: Build) -> list[object]:
  return _updates(build, PARAMS, GRADIENTS)


def _does_the_same_to_layers(build: Build) -> bool:
  stacked = [_unrolled(u) for u in _plain_updates(build)]
  return _close(stacked, _updates(build, _unrolled(PARAMS), [_unrolled(g) for g in GRADIENTS]))


def _does_the_same_to_parts(build: Build) -> bool:
  def part(tree: NestedDict, take: slice) -> NestedDict:
    return {'stack': tree['stack'][:, take], 'rows': tree['rows'], 'flat': tree['flat'][..., take]}

  whole = [part(u, slice(1, 3)) for u in _plain_updates(build)]
  return _close(whole, _updates(build, part(PARAMS, slice(1, 3)), [part(g, slice(1, 3)) for g in GRADIENTS]))


def _looks_elsewhere(build: Build) -> bool:
  """Whether the updates of one variable change with the gradients of another."""
  changed = [{**g, 'flat': 7 * g['flat'] + 1} for g in GRADIENTS]
  pairs = zip(_plain_updates(build), _updates(build, PARAMS, changed))
  return not all(_close([a['stack'], a['rows']], [b['stack'], b['rows']]) for a, b in pairs)


# ---------------------------------------------------------------- of optax


def test_the_factories_are_all_of_optax() -> None:
  assert len(FACTORIES) > 75
  assert {*_ELEMENTWISE.split(), *_GLOBAL.split(), *_DRAWING.split()} <= FACTORIES.keys()
  assert {'lamb', 'adafactor', 'muon', 'scale_by_trust_ratio', 'scale_by_factored_rms', 'sm3'} <= FACTORIES.keys()


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', FACTORIES)
def test_what_is_read_from_an_optimizer_is_what_it_does(name: str) -> None:
  build = FACTORIES[name]
  stackable, elementwise = is_stackable(build, WEIGHTS), is_elementwise(build, WEIGHTS)
  at_all = looks_at_all(build, WEIGHTS)
  if name in _UNTRACEABLE.split():
    assert not (stackable or elementwise or at_all)
    return
  if name in _DRAWING.split():
    assert (stackable, elementwise, at_all) == (True, False, False), 'draws differ, and are not of parts'
    return
  assert elementwise >= (name in _ELEMENTWISE.split())
  assert at_all >= (name in _GLOBAL.split())
  assert stackable == (_does_the_same_to_layers(build) and name not in _NOT_SHOWN.split())
  assert elementwise == (_does_the_same_to_parts(build) and name not in _QUIET.split())
  assert at_all == (_looks_elsewhere(build) or name in {*_QUIET.split()} & {*_GLOBAL.split()})


# ---------------------------------------------------------------- of a user's own


def _each(fn: Callable[[jax.Array, jax.Array], jax.Array]) -> Build:
  """An optimizer without state: a function of each gradient and its parameter."""
  return lambda rate: optax.with_extra_args_support(
    optax.stateless(lambda grads, params: jax.tree.map(lambda g, p: -rate * fn(g, p), grads, params))
  )


def _all(fn: Callable[[list[jax.Array]], jax.Array]) -> Build:
  """An optimizer that scales all gradients by a function of all."""
  return lambda rate: optax.with_extra_args_support(
    optax.stateless(lambda grads, _: jax.tree.map(lambda g: rate * fn(jax.tree.leaves(grads)) * g, grads))
  )


def _norms(grads: list[jax.Array]) -> list[jax.Array]:
  return [jnp.sqrt(jnp.mean(g * g)) for g in grads]


def _with_history(rate: jax.Array) -> optax.GradientTransformationExtraArgs:
  """What it takes over all variables shows in the step after."""

  def init(params: NestedDict) -> dict[str, jax.Array]:
    return {'norm': jnp.ones(())}

  def update(grads: NestedDict, state: dict[str, jax.Array], params: object = None) -> tuple[NestedDict, object]:
    return jax.tree.map(lambda g: -rate * g / state['norm'], grads), {'norm': optax.global_norm(grads)}

  return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _with_moments_of_entries(rate: jax.Array) -> optax.GradientTransformationExtraArgs:
  """A slot that starts as the parameter, and moments that are kept in a tuple."""

  def init(params: NestedDict) -> tuple[NestedDict, NestedDict]:
    return params, jax.tree.map(jnp.zeros_like, params)

  def update(
    grads: NestedDict, state: tuple[NestedDict, NestedDict], params: object = None
  ) -> tuple[NestedDict, object]:
    moments = jax.tree.map(lambda g, m: 0.9 * m + g * g, grads, state[1])
    return jax.tree.map(lambda g, m, s: -rate * g / jnp.sqrt(m) + 0.1 * s, grads, moments, state[0]), (
      state[0],
      moments,
    )

  return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _swapped(rate: jax.Array) -> optax.GradientTransformationExtraArgs:
  """Gives a variable the gradient of another of its shape; here, of the first layer of a list."""

  def update(grads: NestedDict, params: object) -> NestedDict:
    leaves, structure = jax.tree.flatten(grads)
    same = [next(x for x in leaves if x.shape == g.shape) for g in leaves]
    return jax.tree.unflatten(structure, same)

  return optax.with_extra_args_support(optax.stateless(update))


def _needs_more(rate: jax.Array) -> optax.GradientTransformationExtraArgs:
  raise ValueError('of trees of its own only')


# (optimizer, is_stackable, is_elementwise, looks_at_all)
_OWN: dict[str, tuple[Build, bool, bool, bool]] = {
  'clipped entries': (_each(lambda g, p: jnp.clip(g, -0.1, 0.1) + 0.1 * p), True, True, False),
  'branches by sign': (_each(lambda g, p: jax.lax.select(g * p > 0, g, jnp.zeros_like(g))), True, True, False),
  'moments': (_with_moments_of_entries, True, True, False),
  'a loop by entry': (_each(lambda g, p: jax.lax.fori_loop(0, 3, lambda i, x: x / 2 + g, p)), True, True, False),
  'by the size': (_each(lambda g, p: g / np.sqrt(g.size)), False, False, False),
  'by the rank': (_each(lambda g, p: g / g.ndim), False, True, False),
  'by the number of variables': (_all(lambda grads: 1 / len(grads)), False, True, False),
  'by place': (_each(lambda g, p: g * jnp.arange(g.shape[-1])), False, False, False),
  'reversed': (_each(lambda g, p: jnp.flip(g, -1)), False, False, False),
  'running sums': (_each(lambda g, p: jnp.cumsum(g, -1)), False, False, False),
  'unit norm': (_each(lambda g, p: g / jnp.linalg.norm(g)), False, False, False),
  'unit rows': (_each(lambda g, p: g / jnp.sqrt(jnp.sum(g * g, -1, keepdims=True))), False, False, False),
  'unit columns of a stack': (_each(lambda g, p: g / jnp.sqrt(jnp.sum(g * g, 0, keepdims=True))), False, False, False),
  'largest of the variable': (_each(lambda g, p: g / jnp.max(jnp.abs(g))), False, False, False),
  'largest of all': (_all(lambda gs: 1 / jnp.max(jnp.array([jnp.max(jnp.abs(g)) for g in gs]))), True, False, True),
  'sum of squares of all': (_all(lambda gs: sum(jnp.vdot(g, g) for g in gs)), True, False, True),
  'mean of means': (_all(lambda gs: sum(_norms(gs))), False, False, True),
  'the norm of the last step': (_with_history, True, False, True),
  'gradients of others': (_swapped, False, True, False),
  'one vector': (lambda rate: optax.flatten(optax.adam(rate)), False, False, False),
  'cannot be traced': (_needs_more, False, False, False),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', _OWN)
def test_what_is_read_from_an_optimizer_of_a_users_own_is_what_it_does(name: str) -> None:
  build, stackable, elementwise, at_all = _OWN[name]
  assert is_stackable(build, WEIGHTS) == stackable
  assert is_elementwise(build, WEIGHTS) == elementwise
  assert looks_at_all(build, WEIGHTS) == at_all
  if name == 'cannot be traced':
    return
  # An answer that is not sure is no, never yes.
  assert stackable <= _does_the_same_to_layers(build)
  assert elementwise <= _does_the_same_to_parts(build)
  assert at_all <= _looks_elsewhere(build)


def test_variables_are_judged_where_the_optimizer_treats_them_apart() -> None:
  """LAMB for matrices, by their names: stackable where no stack is among them."""

  def label(params: NestedDict) -> NestedDict:
    return {name: 'lamb' if name == 'flat' else 'adam' for name in params}

  def build(rate: jax.Array) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(optax.partition({'lamb': optax.lamb(rate), 'adam': optax.adam(rate)}, label))

  assert is_stackable(build, WEIGHTS)
  assert not is_elementwise(build, WEIGHTS)
  assert is_elementwise(build, {name: WEIGHTS[name] for name in ('stack', 'rows')})


def test_a_norm_of_all_is_found_beside_an_optimizer_that_treats_small_variables_differently() -> None:
  large = {'stack': weight(256, 300, repeat=(4,)), 'flat': weight(512, 300)}
  for clips in (False, True):

    def build(rate: jax.Array, clips: bool = clips) -> optax.GradientTransformationExtraArgs:
      before = optax.clip_by_global_norm(1.0) if clips else optax.identity()
      return optax.with_extra_args_support(optax.chain(before, optax.adafactor(rate)))

    assert looks_at_all(build, large) == clips
    assert not is_stackable(build, large) and not is_elementwise(build, large)


def test_a_stack_of_more_layers_than_the_layers_have_rows_may_be_treated_in_another_way() -> None:
  along_the_longest = _each(lambda g, p: g / jnp.sum(jnp.abs(g), axis=int(np.argmax(g.shape)), keepdims=True))
  assert is_stackable(along_the_longest, {'few': weight(4, 6, repeat=(3,))})
  assert not is_stackable(along_the_longest, {'many': weight(4, 6, repeat=(9,))})


# What else the factories in `ELEMENTWISE` may be given; switches are also turned over, and dtypes set.
_PLAIN: dict[str, object] = {'weight_decay': 0.1, 'momentum': 0.9, 'decay': 0.9, 'step_size': 0.5, 'mode': 'smooth'}


def _fields_of(factory: Callable[..., object], extremes: bool) -> dict[str, object]:
  """Settings of a factory: those it needs, or with `extremes` all that are plain and may make a difference."""
  fields: dict[str, object] = {}
  for name, parameter in inspect.signature(factory).parameters.items():
    is_needed = parameter.default is parameter.empty
    if name in _PLAIN and (is_needed or extremes):
      fields[name] = _PLAIN[name]
    elif extremes and isinstance(parameter.default, bool):
      fields[name] = not parameter.default
    elif extremes and name.endswith('dtype'):
      fields[name] = 'bfloat16'
  return fields


@pytest.mark.parametrize('extremes', [False, True])
def test_what_is_said_to_be_elementwise_is_so_with_all_its_settings(extremes):
  for factory in ELEMENTWISE:
    takes_rate = 'learning_rate' in inspect.signature(factory).parameters
    build = _builder(factory, _fields_of(factory, extremes), takes_rate)
    if factory is optax.chain:
      build = functools.partial(_chained, extremes=extremes)
    assert is_elementwise(build, WEIGHTS) and is_stackable(build, WEIGHTS), factory.__name__


def _chained(rate: jax.Array, extremes: bool) -> optax.GradientTransformationExtraArgs:
  parts = (factory(**_fields_of(factory, extremes)) for factory in (optax.scale_by_adam, optax.add_decayed_weights))
  return optax.chain(*parts, optax.scale_by_learning_rate(rate))


@pytest.mark.parametrize('fields', [{}, {'mask': lambda params: jax.tree.map(lambda x: x.ndim > 1, params)}])
def test_the_settings_of_an_elementwise_factory_may_be_functions_which_are_looked_at(monkeypatch, fields):
  looked = []
  monkeypatch.setattr(
    optimizer, 'is_stackable', lambda build, weights: looked.append(1) or is_stackable(build, weights)
  )
  config = Config(optax.chain, Config(optax.scale_by_adam), Config(optax.add_decayed_weights, **fields))
  made = optimizer.GroupedOptimizer(config, WEIGHTS)
  assert set(made._groups) == ({'single', 'repeated_2'} if fields else {'all'}) and bool(looked) == bool(fields)
