"""How the mesh splits the arrays of an attention layer: by rows and heads, and by length (context parallelism).

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax

from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.sequence_parts import CONTEXT_METHODS, ContextMethod, SequenceSplit
from praxis_lite.sharding.constraints import manual_axes, unmapped_axes
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement, spec_axes
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping


@dataclasses.dataclass(frozen=True)
class AttentionMesh:
  """The fields of an attention layer that are about the mesh."""

  path: str  # Path of the layer, for messages.
  resolve: Callable[[SplitDimsMapping, str], Placement | None]  # (mapping of rank 4, its field) -> placement.
  context_axis: str | None  # See `MultiHeadAttention`.
  context_method: ContextMethod
  blnh: SplitDimsMapping  # Mapping of queries.
  blkh: SplitDimsMapping  # Mapping of keys and values.

  def check(self, implementation: str) -> None:
    """Raises ConfigError or ShardingError if `context_axis` cannot split the length."""
    check_choice(f'{self.path}.context_method', self.context_method, CONTEXT_METHODS)
    if self.context_axis is None:
      return
    field = f'{self.path}.context_axis'
    if implementation not in ('auto', 'blockwise'):
      raise ConfigError(
        f'{field}: a split sequence is attended to in blocks, and {self.path}.implementation is '
        f"{implementation!r}; set it to 'auto' or 'blockwise'"
      )
    for name, mapping in (('blnh', self.blnh), ('blkh', self.blkh)):
      if mapping is not None and len(mapping) == 4 and mapping[1] not in (None, self.context_axis):
        raise ConfigError(
          f'{self.path}.activation_split_dims_mapping.{name}: it splits the length over {mapping[1]!r}, and '
          f'{field} is {self.context_axis!r}; leave the second entry None'
        )
    # Raises an error if the mesh does not have the axis, or if it splits another dimension of the queries.
    self.resolve(self.context_mapping('blnh'), field)
    self.resolve(self.context_mapping('blkh'), field)

  def context_mapping(self, name: str) -> SplitDimsMapping:
    """Returns the mapping `blnh` or `blkh` with the length split over `context_axis`."""
    mapping, path = getattr(self, name), f'{self.path}.activation_split_dims_mapping.{name}'
    split = DeclaredSplit.from_field((UNCONSTRAINED,) * 4 if mapping is None else mapping, path)
    own = DeclaredSplit((self.context_axis,), (f'{self.path}.context_axis',))
    return split[:1].followed_by(own).followed_by(split[2:])

  def sequence_split(self) -> SequenceSplit | None:
    """Returns how the arrays are split if `context_axis` splits the length; otherwise None."""
    field = f'{self.path}.context_axis'
    placement = None if self.context_axis is None else self.resolve(self.context_mapping('blnh'), field)
    if placement is None:
      return None
    batch, axes, heads = (spec_axes(entry) for entry in placement.spec[:3])
    mesh = jax.sharding.get_abstract_mesh()
    if math.prod(mesh.shape.get(axis, 1) for axis in axes) == 1:
      return None
    if len(axes) != 1:
      raise ConfigError(f'{field}: {self.context_axis!r} stands for the mesh axes {axes}; it must be one')
    if manual_axes():
      raise ConfigError(
        f"{field}: under partitioning='shard_map' each device has whole sequences; set task.partitioning='auto', or "
        'leave it None'
      )
    return SequenceSplit(axes[0], self.context_method, batch, heads, others_split=self.blnh is None)

  def row_split(self, num_rows: int, num_kv_heads: int) -> RowSplit | None:
    """Returns how the mesh splits rows and heads; None if it also splits another dimension, or splits unevenly.

    With None, no device knows which blocks are empty in all of its rows, so no block is skipped because of its data.
    """
    placement = self.resolve(self.blnh, f'{self.path}.activation_split_dims_mapping.blnh')
    sizes = unmapped_axes()
    if placement is None or not sizes or manual_axes() or UNCONSTRAINED in tuple(placement.spec):
      return None
    batch, length, heads, dims = (tuple(a for a in spec_axes(entry) if a in sizes) for entry in placement.spec)
    parts = (num_rows, batch), (num_kv_heads, heads)
    divide = not any(size % math.prod(sizes[a] for a in axes) for size, axes in parts)
    return RowSplit(batch, heads) if divide and not (length or dims) and {*batch, *heads} == {*sizes} else None
