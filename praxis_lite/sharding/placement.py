"""Decides where each variable is stored if an experiment declares it in several ways, and records what decided.

    mapping on the weight     ('data', None)      wins
    logical names and rules   ('embed', 'mlp')    for dimensions that have a name; mesh axes in the mapping go first
    strategy                  [('.*', ...)]       for weights that declare no mapping
    otherwise                                     replicated

The dimensions that a repeating layer adds are split by that layer, even if a strategy decides about the other
dimensions. A strategy also decides about a weight whose mapping has logical names, if the ops of the pattern that
matches the weight include `logical_partitioning`. These ops start from the mesh axes in the mapping. Other ops may act
before and after `logical_partitioning`, as in 'logical_partitioning | fsdp("data")'.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import prefix_errors
from praxis_lite.common.trees import Path, map_with_path, path_name
from praxis_lite.sharding.padding import MeshLike, axis_sizes
from praxis_lite.sharding.rules import LogicalAxisRules, logical_names, resolve
from praxis_lite.sharding.specs import Placement
from praxis_lite.sharding.strategies import Strategy, decide, first_match, parse_strategy, to_variable
from praxis_lite.sharding.weights import WeightHParams


def place_variables(
  weights: object, mesh: MeshLike, *, rules: LogicalAxisRules | None = None, strategy: Strategy | None = None
) -> Any:
  """Returns a tree with a `Placement` for each weight declaration.

  Args:
    weights: tree of `WeightHParams`.
    mesh: the mesh, or the sizes of its axes in order.
    rules: logical axis rules, for mappings that name logical axes.
    strategy: the strategy for weights without a mapping.

  Raises:
    ShardingError: a mapping, rule or strategy does not fit the variable, which the message names, or the mesh.
  """
  sizes = axis_sizes(mesh)
  with prefix_errors('task.strategy'):
    parsed = parse_strategy(strategy or ())

  def place(path: Path, weight: WeightHParams) -> Placement:
    mapping = weight.full_split_dims_mapping
    where = f'{path_name(path)}.tensor_split_dims_mapping'
    declared = resolve(mapping, tuple(sizes), rules, rank=len(weight.full_shape), path=where).to_stored()
    named = [name is not None for name in logical_names(mapping, rules or ())]
    if strategy is None or (weight.tensor_split_dims_mapping is not None and not any(named)):
      return declared
    matched = first_match(path, parsed)
    if any(named) and not any(op.for_named for op in (matched[1] if matched else ())):
      return declared
    # The strategy decides all dimensions except those with declared mesh axes.
    given = (None if by_name else entry for by_name, entry in zip(named, declared.spec))
    start = dataclasses.replace(declared, spec=PartitionSpec(*given))
    with prefix_errors('task.strategy'):
      chosen = decide(path, to_variable(path, weight, rules), parsed, sizes, start)
    stack = len(weight.repeat_prefix)
    why = tuple(
      declared.why[dim] if dim < stack and declared.spec[dim] == chosen.spec[dim] else reason
      for dim, reason in enumerate(chosen.why)
    )
    return dataclasses.replace(chosen, why=why)

  return map_with_path(place, weights)


def placed_specs(placements: object) -> Any:
  """Returns the specs of a tree of placements."""
  return jax.tree.map(lambda placement: placement.spec, placements)
