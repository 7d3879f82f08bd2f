"""Strategies: shardings of whole trees by patterns on the paths of their variables.

A strategy is a list of pairs (pattern, rules). Each variable takes the first pattern that matches its whole path, and
the rules of that pattern, applied from left to right, give its spec; a variable that no pattern matches is
replicated. Nothing distinguishes optimizer slots from parameters: one pass over the train state covers both.

    mesh: data = 8, model = 4
    strategy = [('.*/embedding/.*', 'shard_dim("model", 0) | fsdp(axis="data")'),
                ('.*', 'fsdp(axis="data")')]

    lm/embedding/w (32000, 4096)   shard_dim gives ('model', None), fsdp adds the largest one left: ('model', 'data')
    lm/ff/w        (4096, 16384)   (None, 'data')
    lm/norm/scale  (4096,)         smaller than fsdp cares for: (None,)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning import builtin_rules  # noqa: F401  Registers them.
from praxis_lite.partitioning.padding import MeshLike, axis_sizes, num_parts
from praxis_lite.partitioning.paths import Path, leaves_by_path, path_matches, path_names
from praxis_lite.partitioning.specs import check_axes_once
from praxis_lite.partitioning.strategy_rules import Change, Rule, Spec, Variable, parse_rules

Strategy = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Decision:
  """A spec and where it comes from.

  Attributes:
    spec: of full rank.
    sources: for each dimension, what split it; '' where it is not split.
    remarks: what is worth knowing besides, such as padding, or why nothing was split.
    pattern: the pattern of the strategy that matched, if one did.
  """

  spec: PartitionSpec
  sources: tuple[str, ...]
  remarks: tuple[str, ...] = ()
  pattern: str | None = None


def infer_sharding(params: Any, strategy: Strategy, mesh: MeshLike) -> Any:
  """Returns the tree of full-rank PartitionSpecs that a strategy gives to a tree.

  Args:
    params: tree of arrays, shapes with dtypes, or weight declarations: parameters, or a whole train state.
    strategy: pairs (pattern, rules).
    mesh: the mesh, or the sizes of its axes.

  Raises:
    ShardingError: a pattern or rule is malformed, or rules contradict each other on a variable, which is named.
  """
  return jax.tree.map(lambda decision: decision.spec, explain_sharding(params, strategy, mesh))


def explain_sharding(params: Any, strategy: Strategy, mesh: MeshLike) -> Any:
  """As `infer_sharding`, with a `Decision` for each variable."""
  parsed, sizes = parse_strategy(strategy), axis_sizes(mesh)

  def decide_one(key_path: Any, leaf: Any) -> Decision:
    path = path_names(key_path)
    return decide(path, as_variable(path, leaf), parsed, sizes)

  return jax.tree_util.tree_map_with_path(decide_one, params)


def unused_patterns(params: Any, strategy: Strategy) -> list[str]:
  """Returns the patterns that decide no variable, because they match none or earlier ones match first."""
  used = {
    next((i for i, (p, _) in enumerate(strategy) if path_matches(p, path)), None) for path in leaves_by_path(params)
  }
  return [pattern for i, (pattern, _) in enumerate(strategy) if i not in used]


def parse_strategy(strategy: Strategy) -> list[tuple[str, list[tuple[str, Rule]]]]:
  """Returns [(pattern, [(text, rule)])]."""
  for pair in strategy:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
      raise ShardingError(f'a strategy is a list of pairs (pattern, rules), such as (".*", "replicate"); not {pair!r}')
  return [(pattern, parse_rules(rules)) for pattern, rules in strategy]


def as_variable(path: Path, leaf: Any) -> Variable:
  """Describes an array, a shape with a dtype, or a weight declaration."""
  shape = getattr(leaf, 'full_shape', leaf.shape)
  axes = getattr(leaf, 'logical_axes', None)
  if axes is None and getattr(leaf, 'tensor_split_dims_mapping', None) is not None:
    axes = leaf.full_split_dims_mapping
  dtype = leaf.dtype if hasattr(leaf.dtype, 'itemsize') else np.dtype(leaf.dtype or np.float32)
  return Variable('.'.join(path), tuple(shape), dtype, None if axes is None else tuple(axes))


def decide(
  path: Path,
  variable: Variable,
  parsed: Sequence[tuple[str, list[tuple[str, Rule]]]],
  sizes: Mapping[str, int],
  start: Spec | None = None,
) -> Decision:
  """Returns the decision on one variable, whose dimensions may be split in part already, by `start`."""
  spec: Spec = (None,) * len(variable.shape) if start is None else start
  sources, remarks = [''] * len(spec), []
  matched = next(((pattern, rules) for pattern, rules in parsed if path_matches(pattern, path)), None)
  if matched is None:
    return Decision(PartitionSpec(*spec), tuple(sources), ('no pattern of the strategy matches it',))
  pattern, rules = matched
  for text, rule in rules:
    result = rule(spec, variable, sizes)
    new, remark = result if isinstance(result, Change) else (tuple(result), '')
    _check(new, variable, sizes, text)
    for dim in range(len(spec)):
      if new[dim] != spec[dim]:
        sources[dim] = f'strategy {pattern!r}: {text}'
    remarks += [remark] if remark else []
    spec = new
  return Decision(PartitionSpec(*spec), tuple(sources), tuple(remarks), pattern)


def _check(spec: Spec, variable: Variable, sizes: Mapping[str, int], text: str) -> None:
  if len(spec) != len(variable.shape):
    raise ShardingError(f'{variable.name}: {text} gives {len(spec)} entries to {len(variable.shape)} dimensions')
  for entry in spec:
    num_parts(entry, sizes)
  check_axes_once(PartitionSpec(*spec), f'{variable.name}: {text}')
