"""Train states of T5X, by stand-ins with their surface: the expert axis of optimizer state, whatever the optimizer."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.bridges.t5x.moe import MoePjitPartitioner, infer_state_filter_of
from praxis_lite.common.errors import ShardingError
from praxis_lite.common.trees import path_matches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptimizerState:
  step: Any
  param_states: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
  optimizer_def: Any
  state: OptimizerState
  target: Any


jax.tree_util.register_dataclass(Optimizer, data_fields=['state', 'target'], meta_fields=['optimizer_def'])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParamState:
  """The slots of a parameter in T5X's Adafactor."""

  v_row: Any = None
  v_col: Any = None
  v: Any = None


NAMES = {'experts': {'kernel': P('embed', 'mlp')}, 'logits': P('vocab', 'embed')}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlaxOptimTrainState:
  _optimizer: Optimizer

  def as_logical_axes(self) -> FlaxOptimTrainState:
    like = jax.tree.structure(NAMES)

    def is_tree(x: Any) -> bool:
      return jax.tree.structure(x) == like

    slots = jax.tree.map(
      lambda x: NAMES if is_tree(x) else None if isinstance(x, jax.Array) else x,
      self._optimizer.state.param_states,
      is_leaf=lambda x: is_tree(x) or isinstance(x, P),
    )
    return FlaxOptimTrainState(Optimizer(self._optimizer.optimizer_def, OptimizerState(None, slots), NAMES))


def params() -> dict[str, Any]:
  return {'experts': {'kernel': jnp.ones((32, 16))}, 'logits': jnp.ones((16, 16))}


class OptaxWrapper:
  optax_optimizer = optax.adam(1e-3)


class Adafactor:
  def __init__(self, factored: bool = True) -> None:
    self.hyper_params = types.SimpleNamespace(factored=factored)


class MultiOptimizer:
  def __init__(self, *optimizers: Any) -> None:
    self.sub_optimizers = optimizers


def adam_state() -> FlaxOptimTrainState:
  state = OptaxWrapper.optax_optimizer.init(params())
  return FlaxOptimTrainState(Optimizer(OptaxWrapper(), OptimizerState(0, state), params()))


FILTERS = [
  {'state_filter_fn': lambda path: path == '0/mu/experts/kernel'},
  {'state_filter_fn': r'0/mu/experts/.*'},
  {'state_filter': r'0/mu/experts/.*'},
]


@pytest.mark.parametrize('given', FILTERS)
@pytest.mark.parametrize('experts', [{'num_experts': 8}, {'num_expert_partitions': 8}])
def test_the_filter_puts_the_expert_axis_before_the_names_of_slots(experts: dict[str, int], given: Any) -> None:
  axes: Any = MoePjitPartitioner(**experts, num_partitions=1, **given).get_logical_axes(adam_state())
  slots = axes._optimizer.state.param_states[0]
  assert slots.mu == {'experts': {'kernel': P('expert', 'embed', 'mlp')}, 'logits': P('vocab', 'embed')}
  assert slots.nu == axes._optimizer.target == NAMES and slots.count is None
  assert all(isinstance(names, P) for names in jax.tree.leaves(slots.mu))


def test_specs_of_a_mesh_follow() -> None:
  partitioner = MoePjitPartitioner(8, num_partitions=2, state_filter_fn=r'.*/mu/experts/.*')
  specs: Any = partitioner.get_mesh_axes(adam_state())
  assert specs._optimizer.state.param_states[0].mu['experts']['kernel'] == P('data', None, 'model')
  assert specs._optimizer.target['experts']['kernel'] == P(None, 'model')


def test_factored_slots_without_names_get_the_expert_axis_by_default() -> None:
  slots = {'experts': {'kernel': ParamState()}, 'logits': ParamState(v=P('vocab', 'embed'))}
  state = FlaxOptimTrainState(Optimizer(Adafactor(), OptimizerState(0, slots), params()))
  expected = {'experts': {'kernel': ParamState(v_row=P('expert'), v_col=P('expert'))}, 'logits': slots['logits']}
  expected['experts']['kernel'] = dataclasses.replace(expected['experts']['kernel'], v=P('expert'))
  axes: Any = MoePjitPartitioner(8, num_partitions=1, state_filter_fn=r'experts/kernel/v.*').get_logical_axes(state)
  assert axes._optimizer.state.param_states == expected
  axes = MoePjitPartitioner(8, num_partitions=1).get_logical_axes(state)
  expected['experts']['kernel'] = dataclasses.replace(expected['experts']['kernel'], v=None)
  assert axes._optimizer.state.param_states == expected
  unfactored = dataclasses.replace(
    state, _optimizer=dataclasses.replace(state._optimizer, optimizer_def=Adafactor(False))
  )
  assert MoePjitPartitioner(8, num_partitions=1).get_logical_axes(unfactored)._optimizer.state.param_states == slots


def test_the_filter_is_inferred_from_the_definition_of_the_optimizer() -> None:
  pattern = infer_state_filter_of(Adafactor())
  assert pattern == infer_state_filter_of(MultiOptimizer(Adafactor(), Adafactor())) and pattern is not None
  assert path_matches(pattern, ('mlp', 'expert', 'kernel', 'v_row')) and not path_matches(pattern, ('kernel', 'v_row'))
  for inherits in (Adafactor(False), OptaxWrapper(), MultiOptimizer(), MultiOptimizer(Adafactor(False))):
    assert infer_state_filter_of(inherits) is None
  for definition, message in (
    (MultiOptimizer(Adafactor(), Adafactor(False)), 'all suboptimizers must be either factored or unfactored'),
    (MultiOptimizer(Adafactor(), OptaxWrapper()), 'have the same type; they are Adafactor, OptaxWrapper'),
    (object(), 'object: .* can be inferred only for Adafactor and .* pass state_filter_fn='),
  ):
    with pytest.raises(ShardingError, match=message):
      infer_state_filter_of(definition)


def test_states_for_inference_have_no_slots() -> None:
  @dataclasses.dataclass
  class InferenceState:
    params: Any

    def as_logical_axes(self) -> InferenceState:
      return InferenceState(NAMES)

  axes: Any = MoePjitPartitioner(8, num_partitions=1).get_logical_axes(InferenceState(params()))  # type: ignore[arg-type]
  assert axes.params == NAMES


def test_arguments_by_position_are_those_of_t5x() -> None:
  rules = (('batch', 'data'), ('embed', None), ('mlp', None), ('vocab', None), ('expert', 'data'))
  partitioner = MoePjitPartitioner(8, 1, None, False, rules, lambda path: True)
  assert not partitioner.params_on_devices and partitioner.logical_axis_rules == rules
  axes: Any = partitioner.get_logical_axes(adam_state())
  assert axes._optimizer.state.param_states[0].nu['logits'] == P('expert', 'vocab', 'embed')
  with pytest.raises(ShardingError, match='two names for one filter'):
    MoePjitPartitioner(8, 1, state_filter='a', state_filter_fn='b')
