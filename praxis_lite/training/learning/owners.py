"""Owner placement: each matrix that a mesh splits is gathered on one device, changed there, and sent back.

Optimizers such as Muon compute products of whole matrices. If a mesh splits a matrix, each of a dozen products would
communicate. Instead, whole matrices are distributed over the devices, and each device applies fn to its matrices:

    shards of N matrices on each device      [N, m / a, n / b]     on a mesh a x b x c, where c splits no dimension
    slice of the N matrices                  [N / c, m / a, n / b]
    all-to-all over a, over b                [N / (a b c), m, n]   whole matrices of this owner
    fn, without communication                [N / (a b c), m, n]
    the same way back; all-gather over c     [N, m / a, n / b]

Matrices of the same shape that are split in the same way form one group, whichever layers and variables they belong to.
A group is one batch. Each owner gets the same number of matrices of each group, padded with zero matrices. So the
devices have equal work, and a step takes one exchange each way for each group and split dimension.

With N matrices of m x n entries of s bytes in a group, D devices and N' = N rounded up to a multiple of D, a device

    calls fn on             N' / D matrices
    receives in all-to-alls 2 N' m n s / D bytes for each split dimension
    gathers over c          N' m n s c / D bytes, if c > 1

Mesh axes that already distribute whole matrices, such as those over experts, are not exchanged.

Optimizers such as SOAP and Shampoo also keep square arrays for the rows and columns of each matrix, [N, m, m] and
[N, n, n]. No device stores a whole array: each is split along its first side over all owners, so that a state does not
depend on the mesh. It is sent with one all-to-all each way, like the matrix. A device

    receives in all-to-alls N' m m s / D bytes for each array of rows that fn takes, and for each that it returns
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from praxis_lite.common.trees import Path
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.sharding.padding import pad_to, padded_shape, slice_to
from praxis_lite.sharding.specs import axes_to_entry, complete_spec, spec_axes

# Whole matrices [N, m, n] -> changed matrices of the same shape.
MatrixFunction: TypeAlias = Callable[[jax.Array], jax.Array]
Arrays: TypeAlias = dict[Path, jax.Array]


class PerSide(NamedTuple):
  """Two values of the same kind, such as square arrays: one for the input side of matrices, one for the output side."""

  inputs: Any
  outputs: Any


def is_square_array(path: Path, owner: Path) -> bool:
  """Whether the array at `path` in an optimizer's state belongs to a `PerSide`.

  `path` must end with `owner`, the path of the array's variable.
  """
  before = path[: len(path) - len(owner)]
  return before[-1:] in {(side,) for side in PerSide._fields}


class MatrixBatch(NamedTuple):
  """Whole matrices of equal shape, and their square arrays."""

  matrices: dict[str, jax.Array]  # Arrays [N, m, n], m <= n, by name.
  rows: dict[str, jax.Array]  # Arrays [N, m, m] by name; {} if the side is too large for square arrays.
  columns: dict[str, jax.Array]  # Arrays [N, n, n].


BatchFunction: TypeAlias = Callable[[MatrixBatch], MatrixBatch]
# Arrays of an optimizer by name: arrays like the variables, and square arrays of their sides.
Matrices: TypeAlias = dict[str, Arrays]
Squares: TypeAlias = dict[str, PerSide]
MatrixDims: TypeAlias = optax.contrib.MuonDimensionNumbers

# If the smaller side m of a matrix is below this, each device that has the matrix computes its update. This takes less
# time than an exchange: a product takes 2 m FLOPs for each entry, and an exchange moves 4 bytes.
LEAST_SIDE = 512


class Splits(NamedTuple):
  """How a mesh splits the variables of a step."""

  shapes: Mapping[Path, tuple[int, ...]]  # The true shape of each variable.
  specs: Mapping[Path, PartitionSpec]  # The spec of each variable, of full rank.
  sizes: Mapping[str, int]  # The sizes of the mesh axes.
  inside: bool = False  # Whether the step runs inside `shard_map`, on this device's shards.


class MatrixSide(NamedTuple):
  """The rows or the columns of a matrix: for each of its dimensions, the size, and the mesh axes that split it."""

  sizes: tuple[int, ...]
  axes: tuple[tuple[str, ...], ...]

  @property
  def size(self) -> int:
    return math.prod(self.sizes)

  def merge_unsplit(self) -> MatrixSide:
    """Returns the side with each unsplit dimension merged into the dimension before it."""
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
  """A variable as a batch of matrices, and how a mesh splits it."""

  shape: tuple[int, ...]  # The true shape of the variable.
  order: tuple[int, ...]  # A permutation of its dimensions: those that index matrices, then the rows, then the columns.
  batch: MatrixSide  # The dimensions that index matrices.
  rows: MatrixSide  # The smaller side.
  columns: MatrixSide
  is_turned: bool  # Whether the rows are the outputs of the matrix.

  @classmethod
  def make(cls, shape: tuple[int, ...], dims: MatrixDims, axes: Sequence[tuple[str, ...]]) -> SplitMatrix:
    """Returns the matrices of a variable whose dimension i is split over `axes[i]`."""
    sides = [tuple(d % len(shape) for d in dims_of_side(side)) for side in (dims.reduction_axis, dims.output_axis)]
    batch = tuple(d for d in range(len(shape)) if d not in (*sides[0], *sides[1]))

    def side(dims: tuple[int, ...]) -> MatrixSide:
      return MatrixSide(tuple(shape[d] for d in dims), tuple(axes[d] for d in dims))

    # Sides of equal size are sorted by their splits, so that [D, N H] and [N H, D] are in one group.
    inputs = sides[0]
    sides.sort(key=lambda dims: (side(dims).size, side(dims).merge_unsplit()))
    order = (*batch, *sides[0], *sides[1])
    return cls(shape, order, side(batch), side(sides[0]), side(sides[1]), sides[0] is not inputs)

  @property
  def group(self) -> MatrixGroup:
    rows, columns = self.rows.merge_unsplit(), self.columns.merge_unsplit()
    return MatrixGroup(rows, columns, tuple(a for axes in self.batch.axes for a in axes))

  def to_batch(self, x: jax.Array) -> jax.Array:
    """Reshapes a shard of the variable to [matrices, rows..., columns...], the dimensions of the group."""
    self_sizes = tuple(x.shape[d] for d in self.order)
    num_batch, num_rows = len(self.batch.sizes), len(self.rows.sizes)
    sizes = [math.prod(self_sizes[:num_batch])]
    for side, local in ((self.rows, self_sizes[num_batch:]), (self.columns, self_sizes[num_batch + num_rows :])):
      sizes += MatrixSide(local[: len(side.sizes)], side.axes).merge_unsplit().sizes
    return x.transpose(self.order).reshape(sizes)

  def to_parts(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes a batch to a shard of shape `shape`; the inverse of `to_batch`."""
    back = sorted(range(len(shape)), key=lambda i: self.order[i])
    return x.reshape([shape[d] for d in self.order]).transpose(back)

  def turn(self, sides: PerSide) -> PerSide:
    """Converts (inputs, outputs) to (rows, columns), or back: exchanges the two values if `is_turned`."""
    return PerSide(sides.outputs, sides.inputs) if self.is_turned else sides

  def square_shapes(self) -> PerSide:
    """Returns the shapes of the square arrays of all matrices of the variable."""
    return self.turn(PerSide(*((*self.batch.sizes, side.size, side.size) for side in (self.rows, self.columns))))

  def count(self, sizes: Mapping[str, int]) -> int:
    """Returns the number of matrices on each device, including padding if devices split the batch."""
    return math.prod(-(-size // axes_size(axes, sizes)) for size, axes in zip(self.batch.sizes, self.batch.axes))


class MatrixGroup(NamedTuple):
  """The common properties of the matrices in a batch: both sides, merged, and the mesh axes that split the batch."""

  rows: MatrixSide
  columns: MatrixSide
  dealt: tuple[str, ...]

  @property
  def split(self) -> list[tuple[int, tuple[str, ...]]]:
    """The split dimensions of a batch [matrices, rows..., columns...], and the mesh axes of each."""
    return [(i, axes) for i, axes in enumerate((*self.rows.axes, *self.columns.axes), start=1) if axes]

  def spread(self, sizes: Mapping[str, int], whole: bool) -> tuple[str, ...]:
    """Returns the mesh axes, of more than one device, that split neither matrices nor batch; () unless `whole`."""
    used = {*self.dealt, *(a for _, axes in self.split for a in axes)}
    return tuple(a for a, size in sizes.items() if whole and size > 1 and a not in used)

  def owner_axes(self, sizes: Mapping[str, int], placement: str) -> tuple[str, ...]:
    """Returns the mesh axes of the owners over which matrices are distributed, in the order of exchanges."""
    # Whether the matrices are also distributed over mesh axes that do not split them.
    spreads = placement == 'owner' or (placement == 'auto' and (bool(self.split) or self.rows.size >= LEAST_SIDE))
    return (*self.spread(sizes, spreads), *(a for _, axes in self.split for a in axes))


def change_matrices(
  fn: MatrixFunction, arrays: Arrays, dims: Mapping[Path, MatrixDims], splits: Splits | None, placement: str = 'auto'
) -> Arrays:
  """Applies `fn` to all matrices in the arrays; see `change_batches`."""

  def change(batch: MatrixBatch) -> MatrixBatch:
    return MatrixBatch({'x': fn(batch.matrices['x'])}, {}, {})

  return change_batches(change, {'x': arrays}, {}, dims, splits, placement)[0]['x']


def change_batches(
  fn: BatchFunction,
  matrices: Matrices,
  squares: Squares,
  dims: Mapping[Path, MatrixDims],
  splits: Splits | None,
  placement: str = 'auto',
  returns: Sequence[str] = ('x',),
) -> tuple[Matrices, Squares]:
  """Applies `fn` to all matrices of some variables; returns the changed matrices and square arrays, by name and path.

  Args:
    fn: a function of whole matrices and their square arrays. It must not use other arrays that are split over devices.
      Its result for a matrix must only depend on this matrix, and be finite if all its inputs are zero.
    matrices: arrays by name and path, in true shapes, or shards if `splits.inside`.
    squares: square arrays by name, side and path, in the shapes of `square_shapes`, or shards by `square_specs`.
    dims: for each variable, which of its dimensions are rows and columns; the others index matrices.
    splits: how the mesh splits the variables; None if there is no mesh.
    placement: 'owner' distributes all matrices; 'auto' distributes the matrices that the mesh splits, and also others
      whose smaller side is at least `LEAST_SIDE`; 'split' leaves products of split matrices to the compiler.
    returns: names of the matrices that `fn` returns. `fn` must also return a square array for each one that it gets.
  """
  given, paths = (matrices, squares), next(iter(matrices.values()))
  if splits is None or math.prod(splits.sizes.values()) == 1 or (placement == 'split' and not splits.inside):
    alone = {path: SplitMatrix.make(x.shape, dims[path], ((),) * x.ndim) for path, x in paths.items()}
    return _change_groups(fn, given, [(matrix.group, {path: matrix}) for path, matrix in alone.items()], {}, placement)
  groups = list(group_matrices(dims, splits, paths).items())

  def change_parts(parts: tuple[Matrices, Squares]) -> tuple[Matrices, Squares]:
    return _change_groups(fn, parts, groups, splits.sizes, placement)

  if splits.inside:
    return change_parts(given)
  specs, specs_of_squares = {path: splits.specs[path] for path in paths}, square_specs(dims, splits, placement, paths)
  of_squares = {
    name: PerSide(*({path: specs_of_squares[path] for path in side} for side in sides))
    for name, sides in squares.items()
  }
  in_specs, out_specs = (dict.fromkeys(matrices, specs), of_squares), (dict.fromkeys(returns, specs), of_squares)
  shapes = jax.tree.map(jnp.shape, (dict.fromkeys(returns, paths), squares))
  padded = jax.tree.map(lambda x, spec: _pad(x, spec, splits.sizes), given, in_specs)
  changed = jax.shard_map(change_parts, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(padded)
  return jax.tree.map(_cut, changed, out_specs, shapes)


def square_specs(
  dims: Mapping[Path, MatrixDims], splits: Splits, placement: str, paths: Iterable[Path]
) -> dict[Path, PartitionSpec]:
  """Returns the specs of the square arrays, which are split like the batch of matrices.

  The owners split the first side of each square array.
  """
  return {
    path: PartitionSpec(
      *map(axes_to_entry, matrix.batch.axes), axes_to_entry(group.owner_axes(splits.sizes, placement)), None
    )
    for group, members in group_matrices(dims, splits, paths).items()
    for path, matrix in members.items()
  }


def group_matrices(
  dims: Mapping[Path, MatrixDims], splits: Splits, paths: Iterable[Path]
) -> dict[MatrixGroup, dict[Path, SplitMatrix]]:
  """Returns the groups of matrices and the variables of each, in the order of their first variables."""
  groups: dict[MatrixGroup, dict[Path, SplitMatrix]] = {}
  for path in paths:
    shape = splits.shapes[path]
    spec = complete_spec(splits.specs[path], len(shape))
    axes = [tuple(a for a in spec_axes(entry) if splits.sizes[a] > 1) for entry in spec]
    matrix = SplitMatrix.make(shape, dims[path], axes)
    groups.setdefault(matrix.group, {})[path] = matrix
  return groups


# ---------------------------------------------------------------- on a device


def _change_groups(
  fn: BatchFunction,
  parts: tuple[Matrices, Squares],
  groups: Iterable[tuple[MatrixGroup, Mapping[Path, SplitMatrix]]],
  sizes: Mapping[str, int],
  placement: str,
) -> tuple[Matrices, Squares]:
  """Applies `fn` to this device's shards of all variables. Runs inside `shard_map`, or on one device."""
  matrices, squares = parts
  part_shapes = {path: x.shape for path, x in next(iter(matrices.values())).items()}
  changed, changed_squares = defaultdict[str, Arrays](dict), {name: PerSide({}, {}) for name in squares}
  for group, members in groups:
    exchange = OwnerExchange(group, group.owner_axes(sizes, placement), sizes)
    of_matrices = {name: [m.to_batch(arrays[path]) for path, m in members.items()] for name, arrays in matrices.items()}
    rows, columns = (_squares_of_side(squares, members, side) for side in (0, 1))
    batches = next(iter(of_matrices.values()))
    ends = list(itertools.accumulate(map(len, batches)))
    result = fn(
      MatrixBatch(
        {name: exchange.gather(_concatenate(x)) for name, x in of_matrices.items()},
        {name: exchange.gather_square(_concatenate(x), 0) for name, x in rows.items()},
        {name: exchange.gather_square(_concatenate(x), 1) for name, x in columns.items()},
      )
    )
    for name, x in result.matrices.items():
      scattered = jnp.split(exchange.scatter(x, (ends[-1], *batches[0].shape[1:])), ends[:-1])
      for (path, matrix), part in zip(members.items(), scattered):
        changed[name][path] = matrix.to_parts(part, part_shapes[path])
    for side, arrays in enumerate((result.rows, result.columns)):
      for name, x in arrays.items():
        scattered = jnp.split(exchange.scatter_square(x, side, ends[-1]), ends[:-1])
        for (path, matrix), part in zip(members.items(), scattered):
          given = matrix.turn(squares[name])[side][path]
          matrix.turn(changed_squares[name])[side][path] = part.reshape(given.shape)
  return dict(changed), changed_squares


def _squares_of_side(squares: Squares, members: Mapping[Path, SplitMatrix], side: int) -> dict[str, list[jax.Array]]:
  """Returns, by name, the square arrays of the rows (0) or columns (1), one [N, m, m] for each variable of a group."""
  found = {}
  for name, sides in squares.items():
    arrays = [matrix.turn(sides)[side].get(path) for path, matrix in members.items()]
    if arrays[0] is not None:  # Whether a side has a square array depends only on its size, which is equal in a group.
      found[name] = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
  return found


class OwnerExchange(NamedTuple):
  """Sends shards of the matrices of one group to their owners, and back."""

  group: MatrixGroup
  owner_axes: tuple[str, ...]
  sizes: Mapping[str, int]

  @property
  def owners(self) -> int:
    return axes_size(self.owner_axes, self.sizes)

  @property
  def spread(self) -> tuple[str, ...]:
    """The part of `owner_axes` that does not split the matrices."""
    return self.owner_axes[: len(self.owner_axes) - sum(len(axes) for _, axes in self.group.split)]

  def gather(self, x: jax.Array) -> jax.Array:
    """Returns whole matrices [N / owners, m, n], given shards [N, rows..., columns...]; N is padded with zeros."""
    if self.owners > 1:
      x = self._fill_up(x)
      if self.spread:
        own = len(x) // axes_size(self.spread, self.sizes)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.spread) * own, own)
      for dim, axes in self.group.split:
        x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
      x = slice_to(x, (len(x), *self.group.rows.sizes, *self.group.columns.sizes))
    return x.reshape(len(x), self.group.rows.size, self.group.columns.size)

  def scatter(self, x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns shards of shape `shape`, given whole matrices; the inverse of `gather`."""
    x = x.reshape(len(x), *self.group.rows.sizes, *self.group.columns.sizes)
    if self.owners == 1:
      return x
    axes = (*self.group.rows.axes, *self.group.columns.axes)
    x = pad_to(x, (len(x), *(size * axes_size(over, self.sizes) for size, over in zip(shape[1:], axes))))
    for dim, over in reversed(self.group.split):
      x = jax.lax.all_to_all(x, over, split_axis=dim, concat_axis=0, tiled=True)
    if self.spread:
      x = jax.lax.all_gather(x, self.spread, axis=0, tiled=True)
    return x[: shape[0]]

  def gather_square(self, x: jax.Array, side: int) -> jax.Array:
    """Returns whole square arrays [N / owners, m, m] of a side, given shards [N, m / owners, m]."""
    if self.owners == 1:
      return x
    x = jax.lax.all_to_all(self._fill_up(x), self.owner_axes, split_axis=0, concat_axis=1, tiled=True)
    return x[:, : self._size(side)]

  def scatter_square(self, x: jax.Array, side: int, number: int) -> jax.Array:
    """Returns shards of the square arrays of `number` matrices, given whole ones; the inverse of `gather_square`."""
    if self.owners == 1:
      return x
    size = self._size(side)
    x = pad_to(x, (len(x), -(-size // self.owners) * self.owners, size))
    return jax.lax.all_to_all(x, self.owner_axes, split_axis=1, concat_axis=0, tiled=True)[:number]

  def _size(self, side: int) -> int:
    return (self.group.rows, self.group.columns)[side].size

  def _fill_up(self, x: jax.Array) -> jax.Array:
    return pad_to(x, (-(-len(x) // self.owners) * self.owners, *x.shape[1:]))


def _concatenate(batches: Sequence[jax.Array]) -> jax.Array:
  return jnp.concatenate(batches) if len(batches) > 1 else batches[0]


def _pad(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
  x = with_sharding_constraint(x, spec)
  shape = padded_shape(x.shape, spec, sizes)
  return x if shape == x.shape else with_sharding_constraint(pad_to(x, shape), spec)


def _cut(x: jax.Array, spec: PartitionSpec, shape: tuple[int, ...]) -> jax.Array:
  return x if x.shape == shape else with_sharding_constraint(slice_to(x, shape), spec)


def axes_size(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
  """Returns the number of devices along these mesh axes."""
  return math.prod(sizes[a] for a in axes)


def dims_of_side(side: int | Sequence[int]) -> tuple[int, ...]:
  """Returns the dimensions of one side of matrices as a tuple."""
  return (side,) if isinstance(side, int) else tuple(side)
