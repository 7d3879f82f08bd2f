"""Owner placement: each matrix that a mesh splits is gathered on one device, changed there, and sent back.

Optimizers such as Muon compute products of whole matrices. If a mesh splits a matrix, each of a dozen products would
communicate. Instead, matrices are dealt out over the devices, whole, for one function of a batch of matrices:

    parts of N matrices on each device       [N, m / a, n / b]     on a mesh a x b x c, where c splits no dimension
    take a part of the numbers               [N / c, m / a, n / b]
    all-to-all over a, over b                [N / (a b c), m, n]   whole matrices of this owner
    fn, without communication                [N / (a b c), m, n]
    the same way back; all-gather over c     [N, m / a, n / b]

Matrices of one group have the same shape and are split in the same way, so that they form one batch: those of all
layers of a stack, and of all variables. Each owner gets equally many of each group, filled up with zeros. So the
devices have equal work, and a step takes one exchange each way for each group and split dimension.

With N matrices of m x n entries of s bytes in a group, D devices and N' = N rounded up to a multiple of D, a device

    calls fn on          N' / D matrices
    passes all-to-alls   2 N' m n s / D bytes for each split dimension
    gathers over c       N' m n s c / D bytes, if c > 1

Axes that already deal out the matrices, such as those over experts, are not exchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.figures import format_bytes
from praxis_lite.common.trees import Path
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.sharding.padding import pad_to, padded_shape, slice_to
from praxis_lite.sharding.specs import complete_spec, spec_axes

# Whole matrices [N, m, n] -> changed matrices of the same shape.
MatrixFunction: TypeAlias = Callable[[jax.Array], jax.Array]
Arrays: TypeAlias = dict[Path, jax.Array]
MatrixDims: TypeAlias = optax.contrib.MuonDimensionNumbers

# Below this smaller side, computing a matrix on each device that has it takes less time than sending it: a product of
# its smaller side m takes 2 m FLOPs for each entry, and the exchange 4 bytes.
LEAST_SIDE = 512


class Splits(NamedTuple):
  """How a mesh splits the variables of a step.

  Attributes:
    shapes, specs: true shape, and spec of full rank, of each variable by path.
    sizes: sizes of the mesh axes.
    inside: whether the step runs inside `shard_map`, on this device's parts.
  """

  shapes: Mapping[Path, tuple[int, ...]]
  specs: Mapping[Path, PartitionSpec]
  sizes: Mapping[str, int]
  inside: bool = False


class MatrixSide(NamedTuple):
  """The rows or the columns of a matrix: for each of its dimensions, the size, and the mesh axes that split it."""

  sizes: tuple[int, ...]
  axes: tuple[tuple[str, ...], ...]

  @property
  def size(self) -> int:
    return math.prod(self.sizes)

  def merge_unsplit(self) -> MatrixSide:
    """Returns the same side with each unsplit dimension merged into the dimension before it."""
    sizes, axes = [*self.sizes[:1]], [*self.axes[:1]]
    for size, over in zip(self.sizes[1:], self.axes[1:]):
      if over:
        sizes.append(size)
        axes.append(over)
      else:
        sizes[-1] *= size
    return MatrixSide(tuple(sizes), tuple(axes))


@dataclasses.dataclass(frozen=True)
class SplitMatrix:
  """A variable as a batch of matrices, and how a mesh splits it.

  Attributes:
    shape: its true shape.
    order: its dimensions: those that number matrices, then the rows, then the columns; the smaller side is first.
    num_batch: how many dimensions number matrices.
    batch: these dimensions.
    rows, columns: the two sides, the smaller one first.
  """

  shape: tuple[int, ...]
  order: tuple[int, ...]
  batch: MatrixSide
  rows: MatrixSide
  columns: MatrixSide

  @classmethod
  def from_variable(cls, shape: tuple[int, ...], dims: MatrixDims, axes: Sequence[tuple[str, ...]]) -> SplitMatrix:
    """Returns the matrices of a variable whose dimension i is split over `axes[i]`."""
    sides = [tuple(d % len(shape) for d in _dims(side)) for side in (dims.reduction_axis, dims.output_axis)]
    batch = tuple(d for d in range(len(shape)) if d not in (*sides[0], *sides[1]))

    def side(dims: tuple[int, ...]) -> MatrixSide:
      return MatrixSide(tuple(shape[d] for d in dims), tuple(axes[d] for d in dims))

    # Equal sides are sorted by their splits, so that [D, N H] and [N H, D] are in one group.
    sides.sort(key=lambda dims: (side(dims).size, side(dims).merge_unsplit()))
    return cls(shape, (*batch, *sides[0], *sides[1]), side(batch), side(sides[0]), side(sides[1]))

  @property
  def group(self) -> MatrixGroup:
    rows, columns = self.rows.merge_unsplit(), self.columns.merge_unsplit()
    return MatrixGroup(rows, columns, tuple(a for axes in self.batch.axes for a in axes))

  def to_batch(self, x: jax.Array) -> jax.Array:
    """Returns parts as [matrices, rows..., columns...], in the dimensions of the group."""
    self_sizes = tuple(x.shape[d] for d in self.order)
    num_batch, num_rows = len(self.batch.sizes), len(self.rows.sizes)
    sizes = [math.prod(self_sizes[:num_batch])]
    for side, local in ((self.rows, self_sizes[num_batch:]), (self.columns, self_sizes[num_batch + num_rows :])):
      sizes += MatrixSide(local[: len(side.sizes)], side.axes).merge_unsplit().sizes
    return x.transpose(self.order).reshape(sizes)

  def from_batch(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_batch`, for parts of this shape."""
    back = sorted(range(len(shape)), key=lambda i: self.order[i])
    return x.reshape([shape[d] for d in self.order]).transpose(back)

  def count(self, sizes: Mapping[str, int]) -> int:
    """Returns the number of matrices, filled up, on each of the devices among which `batch` deals them out."""
    return math.prod(-(-size // _parts(axes, sizes)) for size, axes in zip(self.batch.sizes, self.batch.axes))


class MatrixGroup(NamedTuple):
  """What matrices of one batch have in common: both sides, merged, and the mesh axes that deal them out already."""

  rows: MatrixSide
  columns: MatrixSide
  dealt: tuple[str, ...]

  @property
  def split(self) -> list[tuple[int, tuple[str, ...]]]:
    """The split dimensions of a batch [matrices, rows..., columns...], and the mesh axes of each."""
    return [(i, axes) for i, axes in enumerate((*self.rows.axes, *self.columns.axes), start=1) if axes]

  def spread(self, sizes: Mapping[str, int], whole: bool) -> tuple[str, ...]:
    """Returns the mesh axes over which matrices are dealt out that do not split them; none if not `whole`."""
    used = {*self.dealt, *(a for _, axes in self.split for a in axes)}
    return tuple(a for a, size in sizes.items() if whole and size > 1 and a not in used)


@dataclasses.dataclass(frozen=True)
class MatrixExchange:
  """What one group costs in a step.

  Attributes:
    paths: its variables.
    rows, columns: size of each matrix, the smaller side first.
    matrices, computed: number of matrices in it, and on how many a device computes.
    devices: number of owners among which the matrices are dealt out: 1 if each device computes all that it has.
    all_to_all, all_gather: number of entries in the results of these collectives on a device.
    flops: FLOPs of a device.
    why: what decided whether they are dealt out.
  """

  paths: tuple[Path, ...]
  rows: int
  columns: int
  matrices: int
  computed: int
  devices: int
  all_to_all: int
  all_gather: int
  flops: int
  why: str

  def describe(self, itemsize: int) -> str:
    """Returns a sentence for reports; entries have `itemsize` bytes."""
    kinds = {'all-to-alls': self.all_to_all, 'an all-gather': self.all_gather}
    received = [f'{format_bytes(entries * itemsize)} of {kind}' for kind, entries in kinds.items() if entries]
    what = f'{self.matrices:,} {"matrix" if self.matrices == 1 else "matrices"} of {self.rows:,} x {self.columns:,}'
    dealt = f'dealt out over {self.devices} devices' if self.devices > 1 else 'not dealt out'
    work = f'each computes {self.computed:,}, {self.flops:.2e} FLOPs'
    return f'{what}, {dealt} ({self.why}); {", and receives ".join(filter(None, (work, " and ".join(received))))}'


class MatrixOptimizer(optax.GradientTransformationExtraArgs):
  """A transformation whose `update` takes `splits`, and that knows what its matrices cost on a mesh.

  Attributes:
    exchanges: a function of the variables, or their shapes, and of their `Splits`.
  """

  exchanges: Callable[[object, Splits], list[MatrixExchange]]


def change_matrices(
  fn: MatrixFunction, arrays: Arrays, dims: Mapping[Path, MatrixDims], splits: Splits | None, placement: str = 'auto'
) -> Arrays:
  """Returns `fn` of each matrix in each of the arrays.

  Args:
    fn: a function of whole matrices [N, m, n], m <= n, and of nothing else; f(0) = 0.
    arrays: arrays by path, in true shapes, or parts if `splits.inside`.
    dims: for each, which of its dimensions are rows and columns; the others number matrices.
    splits: how the mesh splits the arrays; None if there is no mesh.
    placement: 'owner' deals all matrices out; 'auto' those that the mesh splits, and others from `LEAST_SIDE` on;
      'split' leaves products of split matrices to the compiler.
  """
  if splits is None or math.prod(splits.sizes.values()) == 1 or (placement == 'split' and not splits.inside):
    return {path: _change_whole(fn, x, dims[path]) for path, x in arrays.items()}
  groups = group_matrices(dims, splits, arrays)

  def on_device(parts: Arrays) -> Arrays:
    changed: Arrays = {}
    for group, members in groups.items():
      spread = group.spread(splits.sizes, _spreads(group, placement))
      batches = [matrix.to_batch(parts[path]) for path, matrix in members.items()]
      results = _change_group(fn, batches, group, spread, splits.sizes)
      for (path, matrix), result in zip(members.items(), results):
        changed[path] = matrix.from_batch(result, parts[path].shape)
    return changed

  if splits.inside:
    return on_device(arrays)
  specs = {path: splits.specs[path] for path in arrays}
  mapped = jax.shard_map(on_device, in_specs=(specs,), out_specs=specs, check_vma=False)
  padded = {path: _pad(x, specs[path], splits.sizes) for path, x in arrays.items()}
  return {path: _cut(x, specs[path], arrays[path].shape) for path, x in mapped(padded).items()}


def group_matrices(
  dims: Mapping[Path, MatrixDims], splits: Splits, paths: Sequence[Path] | Mapping[Path, object]
) -> dict[MatrixGroup, dict[Path, SplitMatrix]]:
  """Returns the groups, in the order of their first variables."""
  groups: dict[MatrixGroup, dict[Path, SplitMatrix]] = {}
  for path in paths:
    shape = splits.shapes[path]
    spec = complete_spec(splits.specs[path], len(shape))
    axes = [tuple(a for a in spec_axes(entry) if splits.sizes[a] > 1) for entry in spec]
    matrix = SplitMatrix.from_variable(shape, dims[path], axes)
    groups.setdefault(matrix.group, {})[path] = matrix
  return groups


def plan_exchanges(
  dims: Mapping[Path, MatrixDims], splits: Splits, placement: str, flops: Callable[[int, int], int]
) -> list[MatrixExchange]:
  """Returns what each group of matrices costs in a step; none on one device, or if they are left to the compiler.

  Args:
    dims, splits, placement: as for `change_matrices`.
    flops: FLOPs of one matrix, by its sides.
  """
  found: list[MatrixExchange] = []
  if math.prod(splits.sizes.values()) == 1 or (placement == 'split' and not splits.inside):
    return found
  for group, members in group_matrices(dims, splits, dims).items():
    spread = group.spread(splits.sizes, _spreads(group, placement))
    owners = math.prod(splits.sizes[a] for a in (*spread, *(a for _, axes in group.split for a in axes)))
    number = sum(matrix.count(splits.sizes) for matrix in members.values())
    computed = -(-number // owners)
    rows, columns = (
      math.prod(-(-size // _parts(axes, splits.sizes)) * _parts(axes, splits.sizes) for size, axes in zip(*side))
      for side in (group.rows, group.columns)
    )
    entries = computed * rows * columns  # Of a device, before padding is cut off.
    found.append(
      MatrixExchange(
        tuple(members),
        group.rows.size,
        group.columns.size,
        sum(math.prod(matrix.batch.sizes) for matrix in members.values()),
        computed,
        owners,
        2 * len(group.split) * entries,
        entries * _parts(spread, splits.sizes) if spread else 0,
        computed * flops(group.rows.size, group.columns.size),
        _reason(group, placement, splits.sizes),
      )
    )
  return found


# ---------------------------------------------------------------- on a device


def _change_group(
  fn: MatrixFunction, batches: list[jax.Array], group: MatrixGroup, spread: tuple[str, ...], sizes: Mapping[str, int]
) -> list[jax.Array]:
  """Inside `shard_map`: changes parts [N, rows..., columns...] of several variables."""
  owners = math.prod(sizes[a] for a in (*spread, *(a for _, axes in group.split for a in axes)))
  if owners == 1:
    return [_apply(fn, x, group) for x in batches]
  x = jnp.concatenate(batches) if len(batches) > 1 else batches[0]
  number = len(x)
  x = pad_to(x, (-(-number // owners) * owners, *x.shape[1:]))
  if spread:
    own = len(x) // _parts(spread, sizes)
    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(spread) * own, own)
  for dim, axes in group.split:
    x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
  padded = x.shape
  x = _apply(fn, slice_to(x, (len(x), *group.rows.sizes, *group.columns.sizes)), group)
  x = pad_to(x, padded)
  for dim, axes in reversed(group.split):
    x = jax.lax.all_to_all(x, axes, split_axis=dim, concat_axis=0, tiled=True)
  if spread:
    x = jax.lax.all_gather(x, spread, axis=0, tiled=True)
  ends = list(itertools.accumulate(map(len, batches)))
  return jnp.split(x[:number], ends[:-1])


def _apply(fn: MatrixFunction, x: jax.Array, group: MatrixGroup) -> jax.Array:
  return fn(x.reshape(len(x), group.rows.size, group.columns.size)).reshape(x.shape)


def _change_whole(fn: MatrixFunction, x: jax.Array, dims: MatrixDims) -> jax.Array:
  matrix = SplitMatrix.from_variable(x.shape, dims, ((),) * x.ndim)
  return matrix.from_batch(_apply(fn, matrix.to_batch(x), matrix.group), x.shape)


def _spreads(group: MatrixGroup, placement: str) -> bool:
  """Whether matrices are also dealt out over axes that do not split them."""
  return placement == 'owner' or (placement == 'auto' and (bool(group.split) or group.rows.size >= LEAST_SIDE))


def _reason(group: MatrixGroup, placement: str, sizes: Mapping[str, int]) -> str:
  if group.split:
    return 'the mesh splits them'
  if not group.spread(sizes, whole=True):
    return 'no mesh axis is left'
  if placement == 'owner':
    return "placement='owner'"
  large = group.rows.size >= LEAST_SIDE
  return f'the mesh does not split them, and sides {"from" if large else "below"} {LEAST_SIDE} take ' + (
    'longer to compute than to send' if large else 'longer to send than to compute'
  )


def _pad(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
  x = with_sharding_constraint(x, spec)
  shape = padded_shape(x.shape, spec, sizes)
  return x if shape == x.shape else with_sharding_constraint(pad_to(x, shape), spec)


def _cut(x: jax.Array, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.Array:
  return x if x.shape == shape else with_sharding_constraint(slice_to(x, shape), spec)


def _parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
  return math.prod(sizes[a] for a in axes)


def _dims(side: int | Sequence[int]) -> tuple[int, ...]:
  return (side,) if isinstance(side, int) else tuple(side)
