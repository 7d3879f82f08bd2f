"""Logical axis rules: tensors name the meaning of their dimensions, and rules say which mesh axes split these.

A rule is a pair (logical name, mesh axes), where mesh axes are an axis, a tuple of axes, None for 'not split', or
PartitionSpec.UNCONSTRAINED for 'left to the compiler'. Rules are tried in order. A rule decides a dimension if the
dimension has its name and is not decided yet, and if none of its mesh axes splits another dimension of the same array.
With the rules

    ('mlp', 'model'), ('embed', 'model'), ('embed', 'data')

    ('embed', 'mlp')  'mlp' takes 'model'; the second rule finds it taken; the third gives 'data'   ('data', 'model')
    ('mlp', None)     a dimension without a name is not split                                      ('model', None)

A name may have several rules; later ones apply if the earlier ones find no free axis. A name without a rule is an
error. The standard rules come from T5X (Roberts et al., 2022), which follows Xu et al., GSPMD, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ShardingError, ShardingFault, did_you_mean
from praxis_lite.sharding.specs import (
  UNCONSTRAINED,
  Placement,
  all_axes,
  axes_to_entry,
  mapping_entries,
  spec_axes,
  to_partition_spec,
)
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping

LogicalAxisRule = tuple[str, Any]
LogicalAxisRules = Sequence[LogicalAxisRule]

_REPLICATED = ('relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack', 'mlp_activations')


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: LogicalAxisRules | None = None,
  override_rules: LogicalAxisRules | None = None,
) -> tuple[LogicalAxisRule, ...]:
  """Returns the rules for transformers on a mesh ('data', 'model').

  Args:
    activation_partitioning_dims: 1 splits activations over 'model' only between the layers' matrices; 2 also splits
      their 'embed' dimension.
    parameter_partitioning_dims: 1 splits parameters over 'model'; 2 also over 'data', like fully sharded training.
    additional_rules: appended to the standard rules: they apply to names without a standard rule, and never override.
    override_rules: put before the standard rules, so they win.

  Raises:
    ShardingError: a number of dimensions is not 1 or 2.
  """
  dims = (activation_partitioning_dims, parameter_partitioning_dims)
  if any(d not in (1, 2) for d in dims):
    raise ShardingError(
      f'activation_partitioning_dims={dims[0]}, parameter_partitioning_dims={dims[1]} is not supported; each is 1 or 2'
    )
  embed = {(1, 1): (None,), (2, 1): ('model',), (1, 2): ('data',), (2, 2): ('model', 'data')}[dims]
  of_embed = tuple(('embed', axis) for axis in embed)
  # T5X's order: if 'embed' is split, its rule comes after those of the other split names; if not, before that of 'mlp'.
  return (
    *(override_rules or ()),
    *(('batch', 'data'), ('vocab', 'model')),
    *(of_embed if embed == (None,) else ()),
    *(('mlp', 'model'), ('heads', 'model'), ('kv', None), ('joined_kv', 'model')),
    *(() if embed == (None,) else of_embed),
    *((name, None) for name in _REPLICATED),
    *(additional_rules or ()),
  )


def match_rules(
  names: Sequence[object], rules: LogicalAxisRules, taken: Sequence[str] = (), path: str = ''
) -> tuple[int | None, ...]:
  """Returns for each dimension the index of the rule that decides it; None if it has no name or finds no free axis.

  `names` are logical names, None or UNCONSTRAINED. `path` is where the names come from, for errors. The mesh axes
  `taken` are not free. Raises ShardingError if a name occurs twice, or if no rule has it.
  """
  named = [name for name in names if name is not None and name is not UNCONSTRAINED]
  prefix = f'{path}: ' if path else ''
  known = {name for name, _ in rules}
  for name in named:
    if named.count(name) > 1:
      raise ShardingError(f'{prefix}logical axis {name!r} occurs twice in {tuple(names)!r}', ShardingFault.AXIS_TWICE)
    if name not in known:
      raise ShardingError(
        f'{prefix}no rule has the logical axis {name!r}; add ({name!r}, <mesh axis>), or ({name!r}, None) if it '
        f'is not split.{did_you_mean(str(name), known)}'
      )
  decided: dict[object, int] = {}
  used = set(taken)
  for i, (name, axes) in enumerate(rules):
    if name in named and name not in decided and used.isdisjoint(spec_axes(axes)):
      decided[name] = i
      used.update(spec_axes(axes))
  return tuple(decided.get(name) for name in names)


def logical_to_mesh_axes(names: Sequence[object], rules: LogicalAxisRules, *, path: str = '') -> PartitionSpec:
  """Returns the spec that `rules` give to a tensor with these logical names; UNCONSTRAINED entries remain.

  Arguments and errors are the same as for `match_rules`.
  """
  deciding = match_rules(names, rules, path=path)
  unnamed = [name if name is UNCONSTRAINED else None for name in names]
  return PartitionSpec(*(e if i is None else _entry(rules[i]) for e, i in zip(unnamed, deciding)))


def resolve(
  split_dims_mapping: SplitDimsMapping,
  mesh_axis_names: Sequence[str],
  rules: LogicalAxisRules | None = None,
  *,
  rank: int | None = None,
  path: str = '',
) -> Placement:
  """Returns the `Placement` of a mapping, which may name logical axes and mesh axes.

  Mesh axes in the mapping are taken before any rule is tried. If a name is a mesh axis and also has a rule, it is a
  logical name.

  Args: the same as for `to_partition_spec`, and
    rules: the logical axis rules.
    path: config path of the mapping; a `DeclaredSplit` has its own path for each dimension.

  Raises:
    ShardingError: see `to_partition_spec`; or a rule that applies names an axis that the mesh does not have; or a
      name is neither a logical name nor a mesh axis.
  """
  entries = mapping_entries(split_dims_mapping, rank, path)
  rules = tuple(rules or ())
  names = logical_names(entries, rules)
  for entry, name in zip(entries, names):
    if rules and isinstance(entry, str) and name is None and entry not in mesh_axis_names:
      logical = sorted({name for name, _ in rules})
      raise ShardingError(
        f'{path + ": " if path else ""}{entry!r} is neither a mesh axis, of {tuple(mesh_axis_names)!r}, nor a logical '
        f'axis that a rule has.{did_you_mean(entry, [*mesh_axis_names, *logical])}',
        ShardingFault.UNKNOWN_AXIS,
      )
  direct = tuple(entry if name is None else None for name, entry in zip(names, entries))
  spec = list(to_partition_spec(direct, mesh_axis_names, path=path))
  unset = f'{path} is not set' if split_dims_mapping is None else path
  sources = split_dims_mapping.sources if isinstance(split_dims_mapping, DeclaredSplit) else (unset,) * len(entries)
  why = list(sources)
  taken = all_axes(spec)
  for dim, index in enumerate(match_rules(names, rules, taken, path)):
    if index is not None:
      rule = f'rule {tuple(rules[index])!r}'
      where = f'{path}: {rule}' if path else rule
      spec[dim] = to_partition_spec((_entry(rules[index]),), mesh_axis_names, path=where)[0]
      why[dim] = f'{rule}, for {names[dim]!r} in {sources[dim]}'
    elif names[dim] is not None:
      why[dim] = f'{sources[dim]}: {names[dim]!r}, for which no rule finds a free axis'
  return Placement(PartitionSpec(*spec), tuple(why))


def logical_names(entries: Sequence[object], rules: LogicalAxisRules) -> tuple[str | None, ...]:
  """Returns one entry per dimension: the entry of the mapping if it is a logical name with a rule, otherwise None."""
  logical = {name for name, _ in rules}
  return tuple(entry if isinstance(entry, str) and entry in logical else None for entry in entries)


def shadowed_rules(rules: LogicalAxisRules) -> tuple[tuple[int, int], ...]:
  """Returns indices (rule, earlier rule) for each rule without effect: the earlier rule always applies instead."""
  # A rule is shadowed by an earlier rule of the same name that needs only mesh axes that the later rule needs too.
  found: dict[int, int] = {}
  for later, (name, axes) in enumerate(rules):
    for earlier, (other, other_axes) in enumerate(rules[:later]):
      if name == other and set(spec_axes(other_axes)) <= set(spec_axes(axes)):
        found.setdefault(later, earlier)
  return tuple(found.items())


def _entry(rule: LogicalAxisRule) -> object:
  return UNCONSTRAINED if rule[1] is UNCONSTRAINED else axes_to_entry(spec_axes(rule[1]))
