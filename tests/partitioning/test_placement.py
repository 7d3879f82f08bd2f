"""A mapping wins over a rule, a rule over a strategy, and every spec says which it was."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.placement import place_variables, placed_specs
from praxis_lite.partitioning.rules import standard_logical_axis_rules
from praxis_lite.weights import WeightHParams

MESH = {'data': 2, 'model': 4}
RULES = standard_logical_axis_rules(1, 2)
STRATEGY = [('.*', 'fsdp("data", 0)')]


def test_precedence_and_sources() -> None:
  weights = {
    'mapped': WeightHParams((6, 4), tensor_split_dims_mapping=('model', None)),
    'named': WeightHParams((6, 4), tensor_split_dims_mapping=('embed', 'mlp')),
    'mixed': WeightHParams((6, 4), tensor_split_dims_mapping=('data', 'embed')),
    'free': WeightHParams((6, 4)),
    'stacked': WeightHParams((6, 4)).repeated(3, 'model'),
  }
  placed = place_variables(weights, MESH, rules=RULES, strategy=STRATEGY)
  assert placed_specs(placed) == {
    'mapped': P('model', None),
    'named': P('data', 'model'),
    'mixed': P('data', None),
    'free': P('data', None),
    'stacked': P('model', 'data', None),
  }
  by_strategy = 'strategy \'.*\': fsdp("data", 0)'
  assert placed['mapped'].sources == ('mapping', '')
  assert placed['named'].sources == ("rule ('embed', 'data')", "rule ('mlp', 'model')")
  assert placed['mixed'].sources == ('mapping', '')
  assert placed['free'].sources == (by_strategy, '')
  assert placed['stacked'].sources == ('mapping', by_strategy, '')


def test_without_anything_weights_are_replicated() -> None:
  placed = place_variables({'w': WeightHParams((6, 4))}, MESH)['w']
  assert placed.spec == P(None, None) and placed.sources == ('', '')


def test_errors_name_the_variable() -> None:
  weights = {'lm': {'w': WeightHParams((6, 4), tensor_split_dims_mapping=('modle', None))}}
  with pytest.raises(
    ShardingError, match=r"lm.w.tensor_split_dims_mapping: 'modle' is neither .* Did you mean 'model'"
  ):
    place_variables(weights, MESH, rules=RULES)
