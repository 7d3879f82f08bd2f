"""Optimizer state inherits the specs of its parameters, for every optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.layers import Repeat
from praxis_lite.layers.base import Layer
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding import opt_state_specs
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.state import state_layout
from praxis_lite.training.task import SingleTask

PARAMS = {
  'emb': {'w': jnp.zeros((6, 4))},
  'layers': {'ff': {'w': jnp.zeros((3, 4, 4)), 'b': jnp.zeros((3, 4))}},
  'scale': jnp.zeros((4,)),
  'temperature': jnp.zeros(()),
}
SPECS = {
  'emb': {'w': P('mdl', 'data')},
  'layers': {'ff': {'w': P('stage', 'data', 'mdl'), 'b': P('stage', 'mdl')}},
  'scale': P('mdl'),
  'temperature': P(),
}

_ALONE = """
  adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
  novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi
"""
_CONTRIB = 'acprop ademamix adopt cocob dadapt_adamw galore madgrad momo_adam muon prodigy sophia'

# Every optimizer of optax and optax.contrib that can be made with a learning rate alone, and ways of combining them.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
  **{name: functools.partial(getattr(optax, name), 1e-3) for name in _ALONE.split()},
  **{'contrib.' + name: functools.partial(getattr(optax.contrib, name), 1e-3) for name in _CONTRIB.split()},
  'momentum': lambda: optax.sgd(1e-3, momentum=0.9, nesterov=True),
  'polyak': optax.polyak_sgd,
  'lbfgs': lambda: optax.lbfgs(1e-3, memory_size=2),
  'factored': lambda: optax.adafactor(1e-3, min_dim_size_to_factor=2, momentum=0.9),
  'masked': lambda: optax.masked(optax.adam(1e-3), {'emb': True, 'layers': False, 'scale': True, 'temperature': False}),
  'multi_transform': lambda: optax.multi_transform(
    {'a': optax.adam(1e-3), 'b': optax.sgd(1e-3, momentum=0.9)},
    {'emb': 'a', 'layers': 'b', 'scale': 'a', 'temperature': 'b'},
  ),
  'multi_steps': lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4),
  'chain': lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9)),
  'hyperparams': lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
  'schedule_free': lambda: optax.contrib.schedule_free_adamw(1e-3),
  'apply_if_finite': lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
  'lookahead-like': lambda: optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda step: 1.0)),
}


def named(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(p, simple=True, separator='.'): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def derive(tx: Any, params: Any = PARAMS, specs: Any = SPECS, trace: bool = True) -> dict[str, tuple[Any, P]]:
  """{path of a slot: (shape, spec)}."""
  structs = jax.eval_shape(lambda: params)
  state = jax.eval_shape(tx.init, structs)
  derived = opt_state_specs(structs, specs, state, tx.init if trace else None)
  assert named(derived).keys() == named(state).keys()
  return {k: (x.shape, named(derived)[k]) for k, x in named(state).items()}


@pytest.mark.parametrize('name', OPTIMIZERS)
@pytest.mark.parametrize('trace', [True, False])
def test_every_slot_has_a_spec_of_its_rank_and_moments_inherit(name: str, trace: bool) -> None:
  shapes, specs = named(PARAMS), named(SPECS)
  for path, (shape, spec) in derive(OPTIMIZERS[name](), trace=trace).items():
    assert len(spec) == len(shape), path
    axes = [a for a in spec if a is not None]
    assert len(set(axes)) == len(axes), path
    owner = max((p for p in shapes if path == p or path.endswith('.' + p)), key=len, default=None)
    if owner is not None and shape == shapes[owner].shape:
      assert tuple(spec) == tuple(specs[owner]), path
    elif owner is None and len(shape) < 2 and not path.split('.')[-1].isdigit():
      assert not axes, path


def test_parametrisation_covers_slots_that_inherit() -> None:
  adam = derive(optax.adamw(1e-3))
  assert adam['0.mu.layers.ff.w'] == ((3, 4, 4), P('stage', 'data', 'mdl'))
  assert adam['0.nu.emb.w'] == ((6, 4), P('mdl', 'data'))
  assert adam['0.count'] == ((), P())


@pytest.mark.parametrize('trace', [True, False])
@pytest.mark.parametrize('shape', [(8, 8), (8, 16), (16, 8), (8, 8, 8), (16, 4, 8), (4, 8, 8), (8, 2, 8)])
def test_factored_slots_lose_the_entry_of_the_dimension_that_was_reduced(shape: tuple[int, ...], trace: bool) -> None:
  axes = ('x', 'y', 'z')[: len(shape)]
  slots = derive(optax.adafactor(1e-3, min_dim_size_to_factor=4), {'w': jnp.zeros(shape)}, {'w': P(*axes)}, trace=trace)
  # Oracle: reduce gradients that mark one dimension, and see which statistics notice.
  order = np.argsort(np.asarray(shape))
  largest, second = int(order[-1]), int(order[-2])
  assert tuple(slots['0.v_row.w'][1]) == tuple(a for i, a in enumerate(axes) if i != largest)
  assert tuple(slots['0.v_col.w'][1]) == tuple(a for i, a in enumerate(axes) if i != second)
  assert slots['0.v.w'] == ((1,), P(None))


def test_square_statistics_follow_the_dimension_they_index() -> None:
  """Checked against what the optimizer does: a gradient in row 2 only shows at index 2 of the slot on the rows."""
  tx, w = optax.adafactor(1e-3, min_dim_size_to_factor=4), {'w': jnp.zeros((8, 8))}
  gradient = {'w': jnp.zeros((8, 8)).at[2, :].set(1.0)}
  state = named(tx.update(gradient, tx.init(w), w)[1])
  specs = derive(tx, w, {'w': P('rows', 'columns')})
  for slot in ('0.v_row.w', '0.v_col.w'):
    on_rows = np.ptp(np.asarray(state[slot])) > 0
    assert specs[slot][1] == (P('rows') if on_rows else P('columns'))


def test_per_dimension_accumulators_of_a_square_weight_are_told_apart() -> None:
  slots = derive(optax.sm3(1e-3), {'w': jnp.zeros((8, 8))}, {'w': P('x', 'y')})
  assert [slots['0.mu.w.0'][1], slots['0.mu.w.1'][1]] == [P('x'), P('y')]


def test_states_mapped_over_a_repeat_prefix_keep_its_entry() -> None:
  tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)

  class Mapped:
    init = staticmethod(jax.vmap(tx.init))

  params = {'a': jnp.zeros((4, 4, 4)), 'b': jnp.zeros((4, 9)), 'c': jnp.zeros((4, 8, 4))}
  specs = {'a': P('stage', 'x', 'y'), 'b': P('stage', 'x'), 'c': P('stage', 'x', 'y')}
  slots = derive(Mapped, params, specs)
  assert slots['0.v_row.a'] == ((4, 4), P('stage', 'x'))
  assert slots['0.v_col.a'] == ((4, 4), P('stage', 'y'))
  assert slots['0.v_row.c'] == ((4, 4), P('stage', 'y'))
  assert slots['0.v.b'] == ((4, 9), P('stage', 'x'))
  assert slots['0.v.a'][0] == (4, 1)


def test_names_that_nest_in_each_other_go_to_the_longest_match() -> None:
  params = {'w': jnp.zeros((4, 6)), 'deep': {'w': jnp.zeros((4, 6))}}
  slots = derive(optax.adam(1e-3), params, {'w': P('x', None), 'deep': {'w': P(None, 'y')}})
  assert slots['0.mu.w'][1] == P('x', None)
  assert slots['0.mu.deep.w'][1] == P(None, 'y')


def test_short_and_missing_specs_are_completed() -> None:
  params = {'a': jnp.zeros((4, 6)), 'b': jnp.zeros((4, 6))}
  slots = derive(optax.adam(1e-3), params, {'a': P('x'), 'b': None})
  assert tuple(slots['0.mu.a'][1]) == ('x', None)
  assert tuple(slots['0.mu.b'][1]) == (None, None)


# ---------------------------------------------------------------- which of equal dimensions a slot has lost


def factored_rms(learning_rate: float, keep: Callable[[tuple[int, ...]], int]) -> optax.GradientTransformation:
  """Keeps the mean square over all dimensions but one, in slots whose names do not say which."""

  def init(params: Any) -> Any:
    return {'means': jax.tree.map(lambda p: jnp.zeros(p.shape[keep(p.shape)]), params)}

  def update(grads: Any, state: Any, params: Any = None) -> Any:
    def others(g: jax.Array) -> tuple[int, ...]:
      return tuple(i for i in range(g.ndim) if i != keep(g.shape))

    means = jax.tree.map(lambda g, m: 0.9 * m + 0.1 * jnp.mean(g * g, others(g)), grads, state['means'])
    scaled = jax.tree.map(lambda g, m: -learning_rate * g / jnp.sqrt(jnp.expand_dims(m, others(g))), grads, means)
    return scaled, {'means': means}

  return optax.GradientTransformation(init, update)


def earlier_of_equal_is_lost(learning_rate: float) -> optax.GradientTransformation:
  return factored_rms(learning_rate, keep=lambda shape: len(shape) - 1 - int(np.argmin(shape[::-1])))


def later_of_equal_is_lost(learning_rate: float) -> optax.GradientTransformation:
  return factored_rms(learning_rate, keep=lambda shape: int(np.argmin(shape)))


class Matrices(Layer):
  def setup(self) -> None:
    for name, shape in (('square', (8, 8)), ('wide', (8, 16)), ('high', (16, 8))):
      self.create_variable(name, WeightHParams(shape, tensor_split_dims_mapping=('rows', 'columns')))


class StackedMatrices(BaseModel):
  def setup(self) -> None:
    self.create_child('alone', Config(Matrices))
    self.create_child('stack', Config(Repeat, layers_tpl=Config(Matrices), num_layers=3))


def slot_specs(optimizer: Config) -> dict[str, P]:
  task = Config(SingleTask, model=Config(StackedMatrices), mesh_axis_names=('rows', 'columns'), ici_mesh_shape=(2, 2))
  task.train.learner.optimizer = optimizer
  return named(state_layout(task.instantiate(), abstract_mesh({'rows': 2, 'columns': 2})).specs.opt_states)


@pytest.mark.parametrize('optimizer', [earlier_of_equal_is_lost, later_of_equal_is_lost])
def test_slots_of_square_weights_keep_the_axis_they_run_along(optimizer: Callable[..., Any]) -> None:
  slots = slot_specs(Config(optimizer))
  of_square = 'columns' if optimizer is earlier_of_equal_is_lost else 'rows'
  for name, axis in {'square': of_square, 'wide': 'rows', 'high': 'columns'}.items():
    found = {path: tuple(spec) for path, spec in slots.items() if path.endswith(name)}
    assert len(found) == 2, name
    for path, spec in found.items():
      assert spec == ((None, axis) if 'stack' in path else (axis,)), path


def test_both_factors_of_a_square_weight_run_along_the_axis_that_their_entries_show() -> None:
  slots = slot_specs(Config(optax.adafactor, min_dim_size_to_factor=4))
  gradient = {'w': jnp.zeros((8, 8)).at[2, :].set(1.0)}
  tx = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
  state = named(tx.update(gradient, tx.init(gradient), gradient)[1])
  for slot in ('v_row', 'v_col'):
    axis = 'rows' if np.ptp(np.asarray(state[f'{slot}.w'])) > 0 else 'columns'
    found = {path: tuple(spec) for path, spec in slots.items() if slot in path and path.endswith('square')}
    assert len(found) == 2
    for path, spec in found.items():
      assert spec == ((None, axis) if 'stack' in path else (axis,)), path
