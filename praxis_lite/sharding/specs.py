"""Converts split mappings to PartitionSpecs, and defines `Placement`: a spec, and what decided each of its entries.

`weights.py` defines the entries of split mappings. With mesh axes ('replica', 'data', 'mdl'):

    (0, 2)                         PartitionSpec('replica', 'mdl')
    ('data', -1)                   PartitionSpec('data', None)
    (('replica', 'data'), 'mdl')   PartitionSpec(('replica', 'data'), 'mdl')

These functions make specs of full rank, one entry per dimension, because padding is computed from them.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import ShardingError, ShardingFault, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
# Split mappings by rank: {'map_1d': ..., 'map_2d': ...}. None in place of this dict, or of a mapping in it, constrains
# nothing.
MappingsByRank = Mapping[str, SplitDimsMapping] | None
_MAP_KEY = re.compile(r'map_\d+d')


class HasShape(Protocol):
  """An array, a `jax.ShapeDtypeStruct`, or anything else with a shape."""

  @property
  def shape(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class Placement:
  """How an array is split over a mesh, and what decided it."""

  spec: PartitionSpec  # Of full rank.
  why: tuple[str, ...]  # For each dimension, the config field, rule or strategy that decided it.
  remarks: tuple[str, ...] = ()  # Further information, such as that a dimension is padded, or why nothing was split.
  pattern: str | None = None  # The pattern of the strategy that matched, if any.

  def to_stored(self) -> Placement:
    """Returns this placement for a stored array. UNCONSTRAINED becomes None, as the compiler places no stored array."""
    why = tuple(
      f'{why} is UNCONSTRAINED, so the stored array is replicated' if entry is UNCONSTRAINED else why
      for entry, why in zip(self.spec, self.why)
    )
    return dataclasses.replace(self, spec=stored_spec(self.spec), why=why)


def to_partition_spec(
  split_dims_mapping: SplitDimsMapping, mesh_axis_names: Sequence[str], *, rank: int | None = None, path: str = ''
) -> PartitionSpec:
  """Returns the spec of full rank for a split mapping.

  Args:
    split_dims_mapping: one entry per dimension; None splits no dimension.
    mesh_axis_names: names of the mesh axes; an integer in the mapping is an index of this list.
    rank, path: number of dimensions of the tensor, if known; config path of the mapping, for messages.

  Raises:
    ShardingError: an axis is unknown or occurs twice, or the length of the mapping is not `rank`.
  """
  entries = mapping_entries(split_dims_mapping, rank, path)
  spec = PartitionSpec(*(_resolve_entry(entry, tuple(mesh_axis_names), path) for entry in entries))
  check_axes_once(spec, path)
  return spec


def mapping_entries(split_dims_mapping: SplitDimsMapping, rank: int | None = None, path: str = '') -> tuple[Any, ...]:
  """Returns the entries of a mapping; for None, one None per dimension.

  Raises ShardingError if it is not a mapping, or its length is not `rank`.
  """
  if split_dims_mapping is None:
    return (None,) * (rank or 0)
  if isinstance(split_dims_mapping, str) or not isinstance(split_dims_mapping, Sequence | PartitionSpec):
    raise ShardingError(
      f'{_prefix(path)}{split_dims_mapping!r} is not a split mapping; it takes a tuple with one entry per dimension, '
      f'such as ({split_dims_mapping!r}, None)'
    )
  mapping = tuple(split_dims_mapping)
  if rank is not None and len(mapping) != rank:
    sources = split_dims_mapping.sources if isinstance(split_dims_mapping, DeclaredSplit) else ()
    field = f' in {sources[0]}' if sources and sources[0] != path else ''
    raise ShardingError(
      f'{_prefix(path)}mapping {mapping!r} has {number_of(len(mapping), "entry")}, but the tensor has '
      f'{number_of(rank, "dimension")}; '
      f'give one entry per dimension{field}, None where it is not split',
      ShardingFault.WRONG_RANK,
    )
  return mapping


def spec_axes(entry: object) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a spec: () for None and UNCONSTRAINED, ('data',) for 'data'."""
  if isinstance(entry, str):
    return (entry,)
  return tuple(entry) if isinstance(entry, Sequence) else ()


def all_axes(spec: Iterable[object]) -> list[str]:
  """Returns the mesh axes of all entries of a spec, in order."""
  return [axis for entry in spec for axis in spec_axes(entry)]


def axes_to_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
  """The inverse of `spec_axes`: returns None for no axes, and the name itself for one."""
  axes = tuple(axes)
  return None if not axes else axes[0] if len(axes) == 1 else axes


def drop_axes(spec: PartitionSpec, axes: Container[str]) -> PartitionSpec:
  """Returns a spec without these mesh axes; UNCONSTRAINED entries stay."""
  kept = ([axis for axis in spec_axes(entry) if axis not in axes] for entry in spec)
  return PartitionSpec(*(e if e is UNCONSTRAINED else axes_to_entry(own) for e, own in zip(spec, kept)))


def complete_spec(spec: PartitionSpec | None, rank: int) -> PartitionSpec:
  """Returns `spec` with Nones appended up to `rank` entries; None is the fully replicated spec.

  Raises ShardingError if `spec` has more entries than `rank`.
  """
  entries = tuple(spec) if spec is not None else ()
  if len(entries) > rank:
    message = f'{spec} has {number_of(len(entries), "entry")}, but the tensor has {number_of(rank, "dimension")}'
    raise ShardingError(message, ShardingFault.WRONG_RANK)
  return PartitionSpec(*entries, *(None,) * (rank - len(entries)))


def stored_spec(spec: PartitionSpec) -> PartitionSpec:
  """Returns `spec` with None (replicated) for each UNCONSTRAINED, because the compiler does not place stored arrays."""
  return PartitionSpec(*(None if entry is UNCONSTRAINED else entry for entry in spec))


def check_axes_once(spec: PartitionSpec, path: str = '') -> None:
  """Raises ShardingError if a mesh axis occurs twice in `spec`."""
  axes = all_axes(spec)
  twice = next((axis for axis in axes if axes.count(axis) > 1), None)
  if twice is not None:
    raise ShardingError(
      f'{_prefix(path)}mesh axis {twice!r} occurs twice in {tuple(spec)!r}; an axis can split one dimension only',
      ShardingFault.AXIS_TWICE,
    )


def shard_on_batch_dim_partition_spec(mesh_names: Sequence[str], x: HasShape) -> PartitionSpec:
  """Returns a spec that splits dimension 0 of `x` over all mesh axes, and no other dimension."""
  return complete_spec(PartitionSpec(axes_to_entry(mesh_names)) if x.shape else None, len(x.shape))


def get_input_partition_specs(mesh_names: Sequence[str], inputs_shape: Any) -> Any:
  """Applies `shard_on_batch_dim_partition_spec` to every leaf of a tree of objects with a shape."""
  return jax.tree.map(lambda x: shard_on_batch_dim_partition_spec(mesh_names, x), inputs_shape)


def infer_partition_spec_based_on_rank_fn(
  mapping_dict: MappingsByRank, mesh_names: Sequence[str], x: HasShape
) -> PartitionSpec | None:
  """Returns the spec that `place_by_rank` gives to `x`; None if `x` is not constrained."""
  placement = place_by_rank(mapping_dict, mesh_names, x)
  return None if placement is None else placement.spec


def place_by_rank(
  mapping_dict: MappingsByRank, mesh_names: Sequence[str], x: HasShape, path: str = 'inputs_split_mapping'
) -> Placement | None:
  """Returns how `mapping_dict`, at the config path `path`, splits `x`; None if `x` is a scalar or is not constrained.

  Raises ShardingError if there is no mapping for this rank, it is not valid, or a key does not have the form `map_Nd`.
  """
  if mapping_dict is None or not x.shape:
    return None
  unknown = next((key for key in mapping_dict if not _MAP_KEY.fullmatch(key)), None)
  if unknown is not None:
    raise ShardingError(f'{path}.{unknown}: its keys are map_1d, map_2d, ..., one for each rank')
  rank = len(x.shape)
  key = f'map_{rank}d'
  if key not in mapping_dict:
    raise ShardingError(
      f'{path} has no {key!r}, and an input of shape {tuple(x.shape)} needs it; it has {sorted(mapping_dict)}. '
      f'Set {key}=None to leave such inputs as they are.{did_you_mean(key, mapping_dict)}',
      ShardingFault.NO_INPUT_MAPPING,
    )
  if mapping_dict[key] is None:
    return None
  field = f'{path}.{key}'
  return Placement(to_partition_spec(mapping_dict[key], mesh_names, rank=rank, path=field), (field,) * rank)


def _resolve_entry(entry: object, names: tuple[str, ...], path: str) -> object:
  if entry is UNCONSTRAINED:
    return entry
  axes = entry if isinstance(entry, tuple | list) else [entry]
  return axes_to_entry([axis for axis in (_resolve_axis(e, names, path) for e in axes) if axis is not None])


def _resolve_axis(axis: object, names: tuple[str, ...], path: str) -> str | None:
  if axis is None:
    return None
  if isinstance(axis, str):
    if axis not in names:
      raise ShardingError(
        f'{_prefix(path)}axis {axis!r} is not a mesh axis; mesh_axis_names = {names!r}.{did_you_mean(axis, names)}',
        ShardingFault.UNKNOWN_AXIS,
      )
    return axis
  try:
    index = operator.index(axis)  # type: ignore[arg-type]
  except TypeError:
    raise ShardingError(
      f'{_prefix(path)}{axis!r} is not a mesh axis name, an index into {names!r}, a tuple of those, or None',
      ShardingFault.UNKNOWN_AXIS,
    ) from None
  if index == -1:
    return None
  if not 0 <= index < len(names):
    message = f'{_prefix(path)}axis {index} is out of range; mesh_axis_names = {names!r}'
    raise ShardingError(message, ShardingFault.UNKNOWN_AXIS)
  return names[index]


def _prefix(path: str) -> str:
  return f'{path}: ' if path else ''
