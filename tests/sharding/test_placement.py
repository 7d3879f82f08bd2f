"""A mapping wins over a rule, a rule over a strategy, and every spec says which it was."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding.placement import place_variables, placed_specs
from praxis_lite.sharding.rules import standard_logical_axis_rules
from praxis_lite.sharding.weights import WeightHParams

MESH = {'data': 2, 'model': 4}
RULES = standard_logical_axis_rules(1, 2)
STRATEGY = [('.*', 'fsdp("data", 0)')]


def test_precedence_and_sources() -> None:
  weights = {
    'mapped': WeightHParams((6, 4), tensor_split_dims_mapping=('model', None)),
    'named': WeightHParams((6, 4), tensor_split_dims_mapping=('embed', 'mlp')),
    'mixed': WeightHParams((6, 4), tensor_split_dims_mapping=('data', 'embed')),
    'free': WeightHParams((6, 4)),
    'stacked': WeightHParams((6, 4)).repeat(3, 'model'),
  }
  placed = place_variables(weights, MESH, rules=RULES, strategy=STRATEGY)
  assert placed_specs(placed) == {
    'mapped': P('model', None),
    'named': P('data', 'model'),
    'mixed': P('data', None),
    'free': P('data', None),
    'stacked': P('model', 'data', None),
  }
  by_strategy, field = 'strategy \'.*\': fsdp("data", 0)', 'tensor_split_dims_mapping'
  left = "strategy '.*' does not split it"
  assert placed['mapped'].why == (field, field)
  assert placed['named'].why == (
    f"rule ('embed', 'data'), for 'embed' in {field}",
    f"rule ('mlp', 'model'), for 'mlp' in {field}",
  )
  assert placed['mixed'].why == (field, f"{field}: 'embed', for which no rule finds a free axis")
  assert placed['free'].why == (by_strategy, left)
  assert placed['stacked'].why == ('the split of the stack', by_strategy, left)


def test_without_anything_weights_are_replicated() -> None:
  placed = place_variables({'w': WeightHParams((6, 4))}, MESH)['w']
  assert placed.spec == P(None, None) and placed.why == ('tensor_split_dims_mapping is not set',) * 2


def test_errors_name_the_variable() -> None:
  weights = {'lm': {'w': WeightHParams((6, 4), tensor_split_dims_mapping=('modle', None))}}
  with pytest.raises(
    ShardingError, match=r"lm.w.tensor_split_dims_mapping: 'modle' is neither .* Did you mean 'model'"
  ):
    place_variables(weights, MESH, rules=RULES)


def test_a_stored_array_cannot_be_left_to_the_compiler() -> None:
  weights = {
    'ruled': WeightHParams((6, 4), tensor_split_dims_mapping=('embed', 'mlp')),
    'mapped': WeightHParams((6, 4), tensor_split_dims_mapping=('model', P.UNCONSTRAINED)),
  }
  placed = place_variables(weights, MESH, rules=(('embed', P.UNCONSTRAINED), ('mlp', 'model')))
  assert placed_specs(placed) == {'ruled': P(None, 'model'), 'mapped': P('model', None)}
  assert 'UNCONSTRAINED' in placed['ruled'].why[0] and 'replicated' in placed['ruled'].why[0]


def test_a_strategy_with_logical_partitioning_places_weights_that_are_declared_by_logical_names() -> None:
  weights = {
    'named': WeightHParams((6, 4), tensor_split_dims_mapping=('embed', 'mlp')),
    'mixed': WeightHParams((6, 4), tensor_split_dims_mapping=('model', 'embed')),
    'mapped': WeightHParams((6, 4), tensor_split_dims_mapping=('model', None)),
    'free': WeightHParams((6, 4)),
  }
  rules = (('embed', None), ('mlp', 'model'))
  # The rules of the task, and what they leave is split further; without the strategy it would be replicated.
  placed = place_variables(weights, MESH, rules=rules, strategy=[('.*', 'logical_partitioning | fsdp("data", 0)')])
  assert placed_specs(placed) == {
    'named': P('data', 'model'),
    'mixed': P('model', 'data'),
    'mapped': P('model', None),
    'free': P('data', None),
  }
  assert "rule ('mlp', 'model')" in placed['named'].why[1] and placed['named'].why[1].startswith('strategy')
  # Rules of its own win over the task's.
  own = [('.*', 'logical_partitioning(rules=(("embed", "data"), ("mlp", None)))')]
  assert placed_specs(place_variables(weights, MESH, rules=rules, strategy=own))['named'] == P('data', None)
  # A pattern without it leaves such weights to the rules, and so does one that does not match.
  for strategy in ([('.*', 'fsdp("data", 0)')], [('free', 'logical_partitioning')]):
    assert placed_specs(place_variables(weights, MESH, rules=rules, strategy=strategy))['named'] == P(None, 'model')
