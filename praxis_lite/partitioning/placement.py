"""Where each variable goes when an experiment declares it in several ways, and which of them decided.

    mapping on the weight     ('data', None)      wins
    logical names and rules   ('embed', 'mlp')    where the mapping names them
    strategy                  [('.*', ...)]       for weights that declare no mapping
    otherwise                                     replicated

A mapping may mix mesh axes and logical names; the mesh axes are taken first. The dimensions that a repeating layer adds
are split as that layer says, also for weights that leave the rest to a strategy.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.errors import located
from praxis_lite.partitioning.padding import MeshLike, axis_sizes
from praxis_lite.partitioning.rules import LogicalAxisRules, match_rules, resolve_split_mapping
from praxis_lite.partitioning.specs import spec_axes
from praxis_lite.partitioning.strategies import Decision, Strategy, as_variable, decide, parse_strategy
from praxis_lite.trees import path_names
from praxis_lite.weights import WeightHParams


def place_variables(
  weights: Any, mesh: MeshLike, *, rules: LogicalAxisRules | None = None, strategy: Strategy | None = None
) -> Any:
  """Returns a tree with a `Decision` for each weight declaration.

  Args:
    weights: tree of `WeightHParams`.
    mesh: the mesh, or the sizes of its axes in order.
    rules: logical axis rules, for mappings that name logical axes.
    strategy: for weights without a mapping.

  Raises:
    ShardingError: something that decides does not fit the variable or the mesh; the variable is named.
  """
  sizes = axis_sizes(mesh)
  with located('task.strategy'):
    parsed = parse_strategy(strategy or ())

  def place(key_path: Any, weight: WeightHParams) -> Decision:
    path = path_names(key_path)
    name = '.'.join(path)
    mapping = weight.full_split_dims_mapping
    spec = resolve_split_mapping(
      mapping, tuple(sizes), rules, rank=len(weight.full_shape), path=f'{name}.tensor_split_dims_mapping'
    )
    sources = _mapping_sources(mapping, spec, rules)
    remarks: tuple[str, ...] = ()
    pattern = None
    if weight.tensor_split_dims_mapping is None and strategy is not None:
      with located('task.strategy'):
        chosen = decide(path, as_variable(path, weight), parsed, sizes, tuple(spec))
      spec, remarks, pattern = chosen.spec, chosen.remarks, chosen.pattern
      sources = tuple(theirs or own for own, theirs in zip(sources, chosen.sources))
    return Decision(spec, sources, remarks, pattern)

  return jax.tree_util.tree_map_with_path(place, weights)


def placed_specs(decisions: Any) -> Any:
  """The specs of a tree of decisions."""
  return jax.tree.map(lambda decision: decision.spec, decisions)


def _mapping_sources(mapping: Any, spec: PartitionSpec, rules: LogicalAxisRules | None) -> tuple[str, ...]:
  logical = {name for name, _ in rules or ()}
  names = [entry if isinstance(entry, str) and entry in logical else None for entry in mapping]
  taken = [axis for name, entry in zip(names, spec) if name is None for axis in spec_axes(entry)]
  deciding = match_rules(names, rules or (), taken)
  return tuple(
    '' if entry is None else 'mapping' if index is None else f'rule {tuple((rules or ())[index])!r}'
    for entry, index in zip(spec, deciding)
  )
