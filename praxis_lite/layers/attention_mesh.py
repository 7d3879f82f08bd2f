"""How the mesh splits the arrays of an attention layer: by rows and heads, and by length (context parallelism).

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax

from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.figures import number_of
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.sequence_parts import CONTEXT_METHODS, ContextMethod, SequenceSplit
from praxis_lite.layers.stages import Stages
from praxis_lite.sharding.constraints import manual_axes, unmapped_axes
from praxis_lite.sharding.specs import UNCONSTRAINED, Placement, spec_axes
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping


@dataclasses.dataclass(frozen=True)
class AttentionMesh:
  """The fields of an attention layer that concern the mesh."""

  path: str  # Path of the layer, for messages.
  resolve: Callable[[SplitDimsMapping, str], Placement | None]  # (mapping of rank 4, its field) -> placement.
  context_axis: str | None  # See `MultiHeadAttention`.
  context_method: ContextMethod
  blnh: SplitDimsMapping  # Mapping of queries.
  blkh: SplitDimsMapping  # Mapping of keys and values.
  stages: Stages | None = None  # The stages of a pipeline around the layer.

  def check(self, implementation: str) -> None:
    """Raises ConfigError or ShardingError if `context_axis` cannot split the length."""
    check_choice(f'{self.path}.context_method', self.context_method, CONTEXT_METHODS)
    if self.context_axis is None:
      return
    field = f'{self.path}.context_axis'
    if implementation not in ('auto', 'blockwise', 'splash'):
      raise ConfigError(
        f'{field}: a split sequence is attended to in blocks, and {self.path}.implementation is '
        f"{implementation!r}; set it to 'auto', 'blockwise' or 'splash'"
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
    split = DeclaredSplit.make((UNCONSTRAINED,) * 4 if mapping is None else mapping, path)
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
      raise ConfigError(f'{field}: {self.context_axis!r} stands for the mesh axes {axes}; it must stand for one axis')
    if manual_axes():
      raise ConfigError(
        f"{field}: under partitioning='shard_map' each device has whole sequences; set task.partitioning='auto', or "
        'leave it None'
      )
    return SequenceSplit(axes[0], self.context_method, batch, heads, others_split=self.blnh is None)

  def row_split(self, num_rows: int, num_kv_heads: int) -> RowSplit | None:
    """Returns how the mesh splits rows and heads; None unless every mesh axis splits rows or heads evenly.

    If it is None, devices do not know which blocks the data mask in all of their rows, so they do not skip such blocks.
    """
    split, _ = self.kernel_split(num_kv_heads, num_kv_heads, num_rows)
    return split if split and {*split.batch_axes, *split.head_axes} == {*unmapped_axes()} else None

  def kernel_split(self, num_heads: int, num_kv_heads: int, num_rows: int | None = None) -> tuple[RowSplit | None, str]:
    """Returns how the mesh splits rows and heads for a kernel that the compiler cannot split, and an obstacle.

    The obstacle says why the kernel cannot run on this mesh, as the end of a sentence; '' if it can. (None, '') means
    that each device has its part already. Mesh axes that split neither rows nor heads hold copies. Heads divide evenly
    if each kv head, repeated if necessary, is on one device. `num_rows` is None if it is not known yet.
    """
    sizes = unmapped_axes()
    if not sizes:
      return None, ''
    stage_axes = () if self.stages is None else self.stages.even_axes(sizes)
    if stage_axes is None:
      return None, 'needs stages of a pipeline that divide evenly'
    field = f'{self.path}.activation_split_dims_mapping.blnh'
    placement = self.resolve(self.blnh, field)
    if placement is None or UNCONSTRAINED in tuple(placement.spec):
      return None, f'needs {field}, which says how the mesh splits rows and heads'
    batch, length, heads, dims = (tuple(a for a in spec_axes(entry) if a in sizes) for entry in placement.spec)
    if length or dims:
      return None, f'needs whole sequences and heads on each device, and {field} splits them over {(*length, *dims)}'
    row_parts, parts = (math.prod(sizes[a] for a in axes) for axes in (batch, heads))
    if num_rows is not None and num_rows % row_parts:
      return None, f'needs rows that divide evenly, not {num_rows} over {number_of(row_parts, "device")}'
    if num_heads // num_kv_heads % (math.lcm(num_kv_heads, parts) // num_kv_heads):
      found = f'{num_heads} with {num_kv_heads} kv heads over {number_of(parts, "device")}'
      return None, f'needs heads that divide evenly, not {found}'
    return RowSplit(batch, heads, stage_axes), ''

  def pass_split(
    self, is_sequence_split: bool, num_heads: int, num_kv_heads: int, num_rows: int | None = None
  ) -> tuple[RowSplit | None, str]:
    """Returns the result of `kernel_split` if the length is not split. Otherwise returns a pair: None, and an obstacle.

    If the length is split, the only obstacle is that `blnh` is not set; if it is set, the obstacle is ''.
    """
    if not is_sequence_split:
      return self.kernel_split(num_heads, num_kv_heads, num_rows)
    undeclared = f'needs {self.path}.activation_split_dims_mapping.blnh, which says how the mesh splits the heads'
    return None, undeclared if self.blnh is None else ''

  def cache_kernel_split(
    self, num_heads: int, num_kv_heads: int, num_rows: int | None = None
  ) -> tuple[RowSplit | None, str]:
    """Returns the result of `kernel_split` for a kernel that also reads a cache of keys and values in place.

    If the cache has one kv head, devices that split the heads of queries may share it.
    """
    split, obstacle = self.kernel_split(num_heads, num_kv_heads, num_rows)
    if obstacle or split is None:
      return split, obstacle
    if split.stage_axes or manual_axes():
      where = 'the stages of a pipeline' if split.stage_axes else 'a shard_map over other axes'
      return None, f'cannot be mapped over the mesh inside of {where}'
    return split, self._cache_obstacle(split, num_kv_heads)

  def _cache_obstacle(self, split: RowSplit, num_kv_heads: int) -> str:
    """Returns why a kernel with this split cannot read a cache in place, as the end of a sentence; '' if it can."""
    sizes, field = unmapped_axes(), f'{self.path}.activation_split_dims_mapping.blkh'
    placement = self.resolve(self.blkh, field)
    if placement is None:
      return f'needs {field}, which says how the mesh splits the cache'
    found = [tuple(a for a in spec_axes(e) if a in sizes) for e in placement.spec if e is not UNCONSTRAINED]
    if num_kv_heads == 1 and found == [split.batch_axes, (), (), ()]:
      return ''
    if found != [split.batch_axes, (), split.head_axes, ()]:
      return f'needs {field} to split rows and heads as blnh does, and nothing else'
    parts = math.prod(sizes[a] for a in split.head_axes)
    uneven = f'needs kv heads that divide evenly, not {num_kv_heads} over {number_of(parts, "device")}'
    return uneven if num_kv_heads % parts else ''
