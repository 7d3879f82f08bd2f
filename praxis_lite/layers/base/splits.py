"""How a layer's split mappings become constraints of arrays."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax

from praxis_lite.common.config import Config, config_values
from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.layers.base import call
from praxis_lite.layers.base.call import Exchange, SplitConstraint
from praxis_lite.layers.base.in_call import InCall
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.sharding.rules import resolve
from praxis_lite.sharding.specs import Placement, all_axes, place_by_rank
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping, to_declared_split

InputT = TypeVar('InputT')


class MappedSplits(InCall):
  """The part of a `Layer` that resolves its split mappings, and constrains arrays by them."""

  mesh_axis_names: tuple[str, ...] | None
  logical_axis_rules: tuple[tuple[str, Any], ...] | None
  inputs_split_mapping: dict[str, Any] | None

  def _declare_split_mappings(self) -> None:
    """Checks the split mappings, and records in each which field of this layer sets it, unless a parent has set it."""
    for group in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
      mappings = {}
      for field, mapping in self.split_mappings(group).items():
        self._resolve(mapping, field)
        mappings[field.rpartition('.')[2]] = to_declared_split(mapping, field)
      if any(mapping is not None for mapping in mappings.values()):
        setattr(self, group, getattr(self, group).clone(**mappings))

  def shard(
    self,
    x: jax.Array,
    mapping: str | SplitDimsMapping = 'out',
    remark: str = '',
    exchange: Exchange | None = None,
  ) -> jax.Array:
    """Constrains `x` to be split by a mapping; without a mapping or a mesh, returns `x` unchanged.

    Args:
      x: any array.
      mapping: the field of `activation_split_dims_mapping` that maps `x`; or a mapping, one entry per dimension.
      remark: what `explain` says about `x` besides its split.
      exchange: communication that this constraint causes, if no declaration shows it.

    Raises:
      ConfigError: no such field exists.
      ShardingError: the mapping does not fit the rank of `x` or the mesh.
    """
    field = mapping.sources[0] if isinstance(mapping, DeclaredSplit) and mapping else f'{self.path_name}.shard()'
    if isinstance(mapping, str):
      name, known = mapping, self._activation_mappings
      field = f'{self.path_name}.activation_split_dims_mapping.{name}'
      if field not in known:
        names = [path.rpartition('.')[2] for path in known]
        raise ConfigError(
          f'{self.path_name}.activation_split_dims_mapping has no field {name!r}.{did_you_mean(name, names)} '
          f'Its fields: {", ".join(names) or "none"}.'
        )
      mapping = known[field]
    return self._constrain(x, field, self._resolve(mapping, field, rank=x.ndim), remark, exchange)

  def split_mappings(self, group: str) -> dict[str, SplitDimsMapping]:
    """Returns the mappings in `group`, such as 'weight_split_dims_mapping', by the path of each mapping's field."""
    mappings: Config | None = getattr(self, group)
    fields = {} if mappings is None else config_values(mappings)
    return {f'{self.path_name}.{group}.{field}': mapping for field, mapping in fields.items()}

  def placements(self, group: str) -> dict[str, Placement]:
    """Returns the placements of those `split_mappings` that are set; {} if the mesh axes have no names."""
    resolved = {field: self._resolve(mapping, field) for field, mapping in self.split_mappings(group).items()}
    return {field: placement for field, placement in resolved.items() if placement is not None}

  def change_split_mappings(self, group: str, **mappings: SplitDimsMapping) -> None:
    """Sets mappings of a group in a built layer, so that tools can try them; declared weights keep their mappings."""
    getattr(self, group).set(**mappings)
    self.__dict__.pop('_activation_mappings', None)

  @functools.cached_property
  def _activation_mappings(self) -> dict[str, SplitDimsMapping]:
    """The activation mappings, cached because `shard` needs them at every activation that is traced."""
    return self.split_mappings('activation_split_dims_mapping')

  def _shard_input(self, x: InputT) -> InputT:
    """Constrains the first argument of a call, an array or a tree of them, by `inputs_split_mapping`."""
    mappings, names = self.inputs_split_mapping, self.mesh_axis_names
    if mappings is None or names is None:
      return x
    field = f'{self.path_name}.inputs_split_mapping'

    def shard(leaf: jax.Array) -> jax.Array:
      if not getattr(leaf, 'shape', ()):
        return leaf
      return self._constrain(leaf, f'{field}.map_{leaf.ndim}d', place_by_rank(mappings, names, leaf, field))

    return jax.tree.map(shard, x)

  def _constrain(
    self,
    x: jax.Array,
    field: str,
    placement: Placement | None,
    remark: str = '',
    exchange: Exchange | None = None,
  ) -> jax.Array:
    """Returns `x`, constrained to `placement` unless it is None; notifies the listener of the call."""
    frame = call.frame_holding(self._path)
    if frame is not None and frame.surroundings.listener is not None:
      manual = frame.surroundings.manual_axes
      frame.surroundings.listener(SplitConstraint(field, placement, x.shape, x.dtype, manual, remark, exchange))
    return x if placement is None else with_sharding_constraint(x, placement.spec)

  def _resolve(self, mapping: SplitDimsMapping, field: str, rank: int | None = None) -> Placement | None:
    """Returns the placement of a mapping; None without a mapping, or without names of mesh axes."""
    if mapping is None or self.mesh_axis_names is None:
      return None
    return resolve(mapping, self.mesh_axis_names, self.logical_axis_rules, rank=rank, path=field)

  def _resolve_axes(self, field: str) -> tuple[str, ...]:
    """Returns the mesh axes that `field` names; its value is like one entry of a mapping.

    Returns () if the value is None, or there are no names of mesh axes.
    """
    entry = getattr(self, field)
    placement = None if entry is None else self._resolve((entry,), f'{self.path_name}.{field}', rank=1)
    return () if placement is None else tuple(all_axes(placement.spec))
