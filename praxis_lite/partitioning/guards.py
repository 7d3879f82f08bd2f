"""Guards: operations that XLA's partitioner computes wrongly without an error, and what is stated so that it does not.

`guard` reads a lowered program, the backward pass and a user's own layers included, and how Shardy will split each of
its arrays (`partitioning/propagation.py`). Where an operation is one of those below, the program is told to split its
arrays in another way around it; all else stays as it is. Each guard names the smallest program that shows the fault,
and the test in `tests/partitioning/test_guards.py` that runs this program without the guard: when it fails, XLA has
become right and the guard can go. All faults were seen with jaxlib 0.4.36 to 0.12, on CPU and in programs compiled for
GPU, with Shardy and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from praxis_lite.errors import ConfigError, ShardingError
from praxis_lite.partitioning.propagation import Axis, Instance, Propagation, Split, num_parts, operations

T = TypeVar('T')
# How often what a guard states may lead to splits that another one guards.
_MAX_ROUNDS = 6


class Guarded(NamedTuple):
  """An operation that a guard changed.

  Attributes:
    op: its name, such as 'dot_general'.
    where: the operation as it is named in profiles.
    shapes: the global shape of each operand, then of each result.
    before, after: how these were split, and how they are split now.
  """

  op: str
  where: str
  shapes: tuple[tuple[int, ...], ...]
  before: tuple[Split, ...]
  after: tuple[Split, ...]


def guard(lowered: jax.stages.Lowered) -> list[Guarded]:
  """Changes a lowered program, before it is compiled, where XLA would compute it wrongly; returns what it changed.

  Raises:
    ShardingError: Shardy, JAX's default, is turned off.
    ConfigError: the CPU would wait forever for several calls of LAPACK in one branch.
  """
  module = lowered.compiler_ir('stablehlo')
  if module is None:
    return []
  with module.context:
    _refuse_lapack_in_branches(module.operation)
    propagation = Propagation(module, {*_GUARDS, _PRODUCT, _TRANSPOSE})
    # Lowered without Shardy, a program says nothing of its mesh but its size.
    attributes = module.operation.attributes
    on_mesh = 'mhlo.num_partitions' in attributes and ir.IntegerAttr(attributes['mhlo.num_partitions']).value > 1
    if on_mesh and not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
      raise ShardingError('jax_use_shardy_partitioner is False; what guards against wrong programs needs it to be True')
    changed: dict[int, Guarded] = {}
    for round_ in range(_MAX_ROUNDS if propagation.sites else 0):
      instances = propagation.instances()
      found = [*_to_change(instances)]
      for (site, before, _), after in found:
        if round_ == _MAX_ROUNDS - 1:  # They do not agree; what is not split is computed rightly.
          after = tuple(((),) * len(shape) for shape in site.shapes)
        site.state(before, after)
        first = changed[id(site)].before if id(site) in changed else before
        changed[id(site)] = Guarded(site.op.name.partition('.')[2], site.where, site.shapes, first, after)
      if not found:
        _keep(instances)
        break
    return [*changed.values()]


class GuardedJit(Generic[T]):
  """`jax.jit` with guards, for a training loop of your own; the steps of a `PartitionedTask` have them anyway.

  Args:
    fn, options: as for `jax.jit`; of static arguments, `static_argnums`.
  """

  def __init__(self, fn: Callable[..., T], *, static_argnums: int | Sequence[int] = (), **options: Any):
    self.jitted = jax.jit(fn, static_argnums=static_argnums, **options)
    self._static = {static_argnums} if isinstance(static_argnums, int) else {*static_argnums}
    self._compiled: dict[Hashable, jax.stages.Compiled] = {}

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """The lowered program for some arguments, or their `jax.ShapeDtypeStruct`s, already guarded."""
    lowered = self.jitted.lower(*args, **kwargs)
    guard(lowered)
    return lowered

  def __call__(self, *args: Any, **kwargs: Any) -> T:
    dynamic = [x for i, x in enumerate(args) if i not in self._static]
    leaves, structure = jax.tree.flatten((dynamic, kwargs))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
      return self.jitted(*args, **kwargs)
    types = tuple((jax.typeof(x), getattr(x, 'sharding', None)) for x in leaves)
    key = (structure, types, tuple(x for i, x in enumerate(args) if i in self._static))
    if key not in self._compiled:
      self._compiled[key] = self.lower(*args, **kwargs).compile()
    return self._compiled[key](*dynamic, **kwargs)


def _to_change(instances: Sequence[Instance]) -> Iterator[tuple[Instance, tuple[Split, ...]]]:
  """The operations that are computed wrongly, each with splits that are computed rightly."""
  transposes = {instance.site.op: instance for instance in instances if instance.site.op.name == _TRANSPOSE}
  for instance in instances:
    name = instance.site.op.name
    if name == _PRODUCT:
      after = _product(instance, transposes)
    else:
      after = _GUARDS[name](instance) if name in _GUARDS else None
    if after is not None:
      yield instance, after


# ---------------------------------------------------------------- products

_PRODUCT, _TRANSPOSE = 'stablehlo.dot_general', 'stablehlo.transpose'
_GATHER, _SCATTER = 'stablehlo.gather', 'stablehlo.scatter'

# The axes of each dimension of an array, by the name of the dimension in the product.
_Entries = dict[str, tuple[Axis, ...]]


def _product(product: Instance, transposes: Mapping[ir.Operation, Instance]) -> tuple[Split, ...] | None:
  """Keeps rows of a product from coming back permuted. On a mesh r 2 x d 2 x m 2:

      y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

  XLA groups the devices by an axis that splits both a contracted dimension and a dimension of the product (m), and
  takes the others in the order of the larger operand, which need not be that of the product. It folds transposes into
  products, so a product is looked at with those too. Where neither operand, or only one, has to be communicated, the
  product is right. Test: `test_product_with_a_weight_over_one_of_two_row_axes`.
  """
  one_moves = sum(old != new for old, new in zip(product.splits[:2], product.compatible)) < 2
  if not (one_moves and product.splits[2] == product.compatible[2]) and _permutes(product, product.splits):
    return product.compatible
  folded = _with_transposes(product, transposes)
  if folded != product.splits and not _is_local(_by_kind(product, folded)) and _permutes(product, folded):
    return product.compatible
  return None


def _permutes(product: Instance, splits: Sequence[Split]) -> bool:
  """Whether XLA may permute rows of the product of arrays with these splits. False was right in all of many thousands
  of random products, with three axes and with two."""
  left, right, out = kinds = _by_kind(product, splits)
  contracted = [key for key in left if key in right and key not in out]
  sums_left, sums_right = ([array[key] for key in contracted] for array in (left, right))
  axes_left, axes_right, axes_out = map(_axes_of, (sums_left, sums_right, out.values()))
  if any(not left[key] == right[key] == out[key] for key in left.keys() & right.keys() & out.keys()):
    return bool((axes_left | axes_right) & axes_out)
  sizes = [
    math.prod(-(-n // num_parts(axes)) for n, axes in zip(shape, split))
    for shape, split in zip(product.site.shapes, splits)
  ]
  for entry in map(frozenset, out.values()):
    if not entry or not (entry <= axes_left or entry <= axes_right):
      continue
    if sums_left != sums_right and entry <= axes_left & axes_right:
      return True
    summed = axes_left if entry <= axes_left else axes_right
    if summed - axes_out:
      continue  # A sum over more axes than those is done first.
    if sums_left == sums_right and len(summed) > 1:
      return True
    order_left, order_right, order_out = (_order(array.values(), entry, product.site.mesh) for array in kinds)
    larger_left, larger_right = (
      (True, True) if sums_left != sums_right else (sizes[0] >= sizes[1], sizes[1] >= sizes[0])
    )
    if (larger_left and order_left != order_out) or (larger_right and order_right != order_out):
      return True
  return False


def _keep(instances: Iterable[Instance]) -> None:
  """States how arrays are split of operations that are right as they are, but might not be if XLA split them in another
  way: results of products, and ids of lookups. Test: `test_lookup_with_ids_that_are_split_twice`."""
  for instance in instances:
    site, splits = instance.site, instance.splits
    if site.op.name == _PRODUCT:
      left, right, out = _by_kind(instance, splits)
      contracted = [key for key in left if key in right and key not in out]
      summed = _axes_of(left[key] for key in contracted) & _axes_of(right[key] for key in contracted)
      orders = [_order(array.values(), summed, site.mesh) for array in (left, right, out)]
      if summed and orders != orders[:1] * 3:
        site.keep(2, splits[2])
    elif site.op.name == _GATHER and _axes_of(splits[0]) and _axes_of(splits[_IDS]):
      site.keep(_IDS, splits[_IDS])


def _by_kind(product: Instance, splits: Sequence[Split]) -> tuple[_Entries, _Entries, _Entries]:
  """The entries of left, right and out: dimensions with the same name are multiplied, summed or written together."""
  numbers = stablehlo.DotDimensionNumbers(product.site.op.attributes['dot_dimension_numbers'])
  names = [[f'{side}{i}' for i in range(len(split))] for side, split in zip(('left ', 'right '), splits)]
  for kind in ('batching', 'contracting'):
    pairs = zip(*(getattr(numbers, f'{side}_{kind}_dimensions') for side in ('lhs', 'rhs')))
    for n, dims in enumerate(pairs):
      for side, dim in enumerate(dims):
        names[side][dim] = f'{kind} {n}'
  batch = sorted(name for name in names[0] if name.startswith('batching'))
  free = [name for side in names for name in side if name.startswith(('left', 'right'))]
  left, right, out = (dict(zip(keys, split)) for keys, split in zip((*names, [*batch, *free]), splits))
  return left, right, out


def _is_local(kinds: tuple[_Entries, _Entries, _Entries]) -> bool:
  """Whether each device computes its part of a product from its parts of the operands, but for sums."""
  every: _Entries = {}
  for array in kinds:
    every |= array
  used = [axis for axes in every.values() for axis in axes]
  return len(used) == len(set(used)) and all(array[key] == every[key] for array in kinds for key in array)


def _with_transposes(product: Instance, transposes: Mapping[ir.Operation, Instance]) -> tuple[Split, ...]:
  """The splits of a product's arrays before operands are transposed, and after the result is."""
  splits = [*product.splits]
  for i, value in enumerate(product.site.op.operands):
    before = None if isinstance(value.owner, ir.Block) else transposes.get(value.owner.operation)
    if before is not None:
      splits[i] = tuple(before.splits[0][dim] for dim in _permutation(before))
  users = [transposes.get(use.owner.operation) for use in product.site.op.results[0].uses]
  if len(users) == 1 and users[0] is not None:
    order = _permutation(users[0])
    splits[2] = tuple(users[0].splits[1][order.index(dim)] for dim in range(len(order)))
  return tuple(splits)


def _permutation(transpose: Instance) -> list[int]:
  return [*ir.DenseI64ArrayAttr(transpose.site.op.attributes['permutation'])]


def _order(entries: Iterable[tuple[Axis, ...]], without: frozenset[Axis], mesh: Sequence[Axis]) -> list[Axis]:
  """The axes of an array in the order of its dimensions, then those that it is replicated over."""
  used = [axis for axes in entries for axis in axes]
  names = {axis.name for axis in used}
  return [axis for axis in (*used, *(a for a in mesh if a.name not in names)) if axis not in without]


def _axes_of(entries: Iterable[tuple[Axis, ...]]) -> frozenset[Axis]:
  return frozenset(axis for axes in entries for axis in axes)


# ---------------------------------------------------------------- images


def _convolution(convolution: Instance) -> tuple[Split, ...] | None:
  """Gathers height and width of images and filters, and splits the groups of grouped convolutions alike.

  Where a window overlaps the part of another device, XLA exchanges the borders, and is wrong for some filters; the
  gradient of the filter is summed over axes that are not used too. On a mesh a 2 x b 2: `conv(x, w)` with x over
  (None, 'a', None, None). Test: `test_convolution_of_split_images`.

  The gradient of the filter of a grouped convolution is that sum even for whole images, x over ('a', None, None, None),
  so no axis is left unused there: rows are split over 'b' too. It is also wrong where the channels of one array are
  split, and those of another are not. Test: `test_filter_gradient_of_a_grouped_convolution`.

  Where channels are split alike, some groups are still wrong (`_is_mistaken`): x and w of 1 x 1 over (None, None, None,
  'a'). Test: `test_grouped_convolution_that_is_a_product`.

  Groups of rows (the filter's gradient is such a convolution) are also wrong, or abort the process, where rows of the
  result are split: with w over (None, None, 'a', None). Test: `test_grouped_convolution_with_a_split_filter`.
  """
  op = convolution.site.op
  numbers = stablehlo.ConvDimensionNumbers(op.attributes['dimension_numbers'])
  spatial = (numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions)
  after = [_whole(split, dims) for split, dims in zip(convolution.splits, spatial)]
  of_rows, of_features = (ir.IntegerAttr(op.attributes[f'{kind}_group_count']).value for kind in ('batch', 'feature'))
  if of_rows == of_features == 1:
    return _if_changed(convolution, after)
  batch, features = numbers.input_batch_dimension, numbers.input_feature_dimension
  summed = (features if of_rows > 1 else None, numbers.kernel_input_feature_dimension)
  groups = batch if of_rows > 1 else features
  grouped = (groups, numbers.kernel_output_feature_dimension, numbers.output_feature_dimension)
  channels = next((split[dim] for split, dim in zip(reversed(after), reversed(grouped)) if split[dim]), ())
  if _is_mistaken(convolution, numbers) or max(of_rows, of_features) % num_parts(channels):
    channels = ()
  after = [_with(split, dim, channels) for split, dim in zip(after, grouped)]
  if of_rows > 1:
    after[2] = _whole(after[2], [numbers.output_batch_dimension])
  rows: tuple[Axis, ...] = ()
  if of_rows > 1 and (rows := after[0][features] or after[1][summed[1]]):
    used = {axis.name for axes in (rows, *after[0], *after[1], *after[2]) for axis in axes}
    rows = (*rows, *(axis for axis in convolution.site.mesh if axis.name not in used))
  after[:2] = [split if dim is None else _with(split, dim, rows) for split, dim in zip(after, summed)]
  return _if_changed(convolution, after)


def _is_mistaken(convolution: Instance, numbers: stablehlo.ConvDimensionNumbers) -> bool:
  """Whether XLA takes a convolution with groups of channels for a product, or mistakes the order of its dimensions."""
  if ir.IntegerAttr(convolution.site.op.attributes['feature_group_count']).value == 1:
    return False
  _, of_filter, of_result = convolution.site.shapes
  spatial = zip(numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions)
  before = (numbers.input_batch_dimension, numbers.input_feature_dimension, *numbers.input_spatial_dimensions)
  after = (numbers.output_batch_dimension, numbers.output_feature_dimension, *numbers.output_spatial_dimensions)
  is_depthwise = of_filter[numbers.kernel_input_feature_dimension] == 1
  return all(1 in (of_filter[i], of_result[j]) for i, j in spatial) or (is_depthwise and before != after)


def _with(split: Split, dim: int, axes: tuple[Axis, ...]) -> Split:
  """The split with one dimension over some axes, which, or parts of which, split no other one."""
  names = {axis.name for axis in axes}
  others = tuple(tuple(axis for axis in entry if axis.name not in names) for entry in split)
  return (*others[:dim], axes, *others[dim + 1 :])


def _overlapping_windows(pooling: Instance) -> tuple[Split, ...] | None:
  """Gathers dimensions along which the windows of max pooling overlap, before its gradient is taken.

  Where a window lies in the parts of two devices, its gradient is added on both, or on none. On a mesh a 2: the
  gradient of the maximum over windows of 2 with stride 1, x over 'a'. Test: `test_gradient_of_overlapping_max_pooling`.
  """
  window, strides = (
    [*ir.DenseI64ArrayAttr(pooling.site.op.attributes[name])] for name in ('window_dimensions', 'window_strides')
  )
  overlap = [dim for dim, (size, stride) in enumerate(zip(window, strides)) if size > stride]
  after = [_whole(split, overlap) if split else split for split in pooling.splits]
  if any(old != new for old, new in zip(pooling.splits, after)):  # Else they may still be wrong if they differ.
    after = [after[0] if split else split for split in after]
  return _if_changed(pooling, after)


def _windows(pooling: Instance) -> tuple[Split, ...] | None:
  """Gathers dimensions that windows move along, unless each device has whole windows.

  XLA exchanges the borders, and aborts the process for some paddings and sizes. On a mesh a 2: sums over windows of 1
  of an array of one row with a row of padding, over 'a'. Test: `test_sums_over_windows_with_padding`.
  """
  attributes, rank = pooling.site.op.attributes, len(pooling.site.shapes[0])

  def numbers(name: str) -> list[int]:
    return [*ir.DenseI64ArrayAttr(attributes[name])] if name in attributes else [1] * rank

  window, strides = numbers('window_dimensions'), numbers('window_strides')
  padded = np.array(ir.DenseIntElementsAttr(attributes['padding'])) if 'padding' in attributes else np.zeros((rank, 2))
  before = pooling.site.op.operands[0].owner
  if not isinstance(before, ir.Block) and before.operation.name == 'stablehlo.pad':  # XLA makes both one operation.
    edges = (
      [*ir.DenseI64ArrayAttr(before.operation.attributes[name])]
      for name in ('edge_padding_low', 'edge_padding_high', 'interior_padding')
    )
    padded = np.array([*padded.T, *edges]).T
  moved = []
  for dim, (size, stride) in enumerate(zip(window, strides)):
    still = size == stride and not np.any(padded[dim]) and numbers('base_dilations')[dim] == 1
    still = still and numbers('window_dilations')[dim] == 1
    parts = max(num_parts(split[dim]) for split in pooling.splits if split)
    if parts > 1 and not (still and (size == 1 or pooling.site.shapes[0][dim] % (parts * stride) == 0)):
      moved.append(dim)
  return _if_changed(pooling, [_whole(split, moved) if split else split for split in pooling.splits])


def _pad(pad: Instance) -> tuple[Split, ...] | None:
  """Splits what is cropped, or padded between entries, before and after alike.

  XLA gives each device too much or too little of the result. On a mesh a 2: `lax.pad(x, 0.0, [(-1, 0, 0)])` of 4
  entries, of which only the result is over 'a'. Test: `test_pads_that_crop`.
  """
  edges = (
    [*ir.DenseI64ArrayAttr(pad.site.op.attributes[name])]
    for name in ('edge_padding_low', 'edge_padding_high', 'interior_padding')
  )
  dims = [dim for dim, (low, high, interior) in enumerate(zip(*edges)) if min(low, high) < 0 or interior]
  before, zero, after = pad.splits
  dims = [dim for dim in dims if before[dim] != after[dim]]
  return _if_changed(pad, (_whole(before, dims), zero, _whole(after, dims)))


def _whole(split: Split, dims: Iterable[int]) -> Split:
  """The split without those of some dimensions."""
  dims = set(dims)
  return tuple(() if dim in dims else axes for dim, axes in enumerate(split))


def _if_changed(instance: Instance, after: Sequence[Split]) -> tuple[Split, ...] | None:
  return None if (*after,) == instance.splits else (*after,)


# ---------------------------------------------------------------- lookups


def _lookup(lookup: Instance) -> tuple[Split, ...] | None:
  """Lets no axis split both a table and the ids that are looked up, which XLA fails to compile, or gathers wrongly.

  On a mesh a 2 x b 2: `jnp.take(table, ids, axis=0)`, the table over (None, 'a'), ids over (None, 'a'). Test:
  `test_lookup_with_table_and_ids_over_the_same_axis`. An axis that splits rows of the table splits no other dimension
  of the result either: `jnp.diagonal(x)`. Test: `test_diagonal`.
  """
  table, ids, rows = lookup.splits
  numbers = stablehlo.GatherDimensionNumbers(lookup.site.op.attributes['dimension_numbers'])
  looked_up = _axes_of(table[dim] for dim in numbers.start_index_map)
  if _axes_of(table) & _axes_of(ids) or looked_up & _axes_of(rows):
    return _if_changed(lookup, lookup.compatible)
  return None


def _slice(dynamic: Instance) -> None:
  """Clamps where a slice begins along split dimensions, as the operation would; behind a barrier, or XLA undoes it.

  XLA reads or writes past the end of a device's part instead. On a mesh a 2: a slice of 2 of 3 entries over 'a' that
  begins at 3. Test: `test_dynamic_slices_that_begin_past_the_end`.
  """
  op, shapes = dynamic.site.op, dynamic.site.shapes
  reads = op.name == 'stablehlo.dynamic_slice'
  first, sizes = (1, shapes[-1]) if reads else (2, shapes[1])
  for dim, (whole, size) in enumerate(zip(shapes[0], sizes)):
    is_split = any(split[dim] for split in (dynamic.splits[0], dynamic.splits[-1]))
    if is_split and size != whole and dim not in dynamic.site.masked:
      begin = op.operands[first + dim]
      with ir.InsertionPoint(op), op.location:
        low, high = (
          stablehlo.ConstantOp(
            ir.DenseElementsAttr.get_splat(begin.type, ir.IntegerAttr.get(begin.type.element_type, n))
          )
          for n in (0, whole - size)
        )
        clamped = stablehlo.ClampOp(low.result, begin, high.result).result
        op.operands[first + dim] = stablehlo.OptimizationBarrierOp([clamped]).results[0]
      dynamic.site.masked.add(dim)


def _scatter(scatter: Instance) -> tuple[Split, ...] | None:
  """Keeps what XLA pads out of the result where updates are not split evenly.

  Where a dimension of the ids is split unevenly, XLA pads it, and its partitioned scatter (the gradient of a lookup)
  writes the padding's update, which may be anything, to row 0. On a mesh a 2 x b 2: the gradient of
  `jnp.take(table, ids, axis=0)` with 3 ids over 'a'. Updates that are added are masked, which costs nothing; others are
  gathered. Test: `test_gradient_of_a_lookup_of_uneven_ids`.

  It is also wrong where the table is split in another way than the result, and where one row is written into a table
  with rows that are split unevenly, which are gathered: `table.at[ids].add(x)` of 4 rows over an axis of 3, the result
  replicated, or not. Test: `test_scatter_of_one_row_into_an_uneven_table`.

  Dimensions along which slices are written that are neither one entry nor all are gathered too. On a mesh a 2:
  `jax.vmap(lax.dynamic_update_slice)(x, u, i)`, the result [1, 3] over (None, 'a'). Test: `test_slices_are_scattered`.

  Unsigned ids that are split unevenly, as in the gradient of `jnp.sort`, abort the process. Test:
  `test_gradient_of_a_sort`.
  """
  _sign_ids(scatter)
  if scatter.splits[0] != scatter.splits[-1] and len(scatter.site.op.operands) == 3:
    return (scatter.splits[-1], *scatter.splits[1:])
  if (by_slices := _written_slices(scatter)) is not None:
    return by_slices
  uneven = _uneven_updates(scatter)
  if not uneven:
    return None
  if _adds(scatter.site.op):
    _mask_updates(scatter, uneven)
    return None
  after = [*scatter.splits]
  after[_UPDATES], after[_IDS] = _whole(after[_UPDATES], uneven), _whole(after[_IDS], uneven.values())
  return (*after,)


_IDS, _UPDATES = 1, 2  # Operands of a scatter; those with several arrays, which JAX does not make, are left alone.


def _written_slices(scatter: Instance) -> tuple[Split, ...] | None:
  """Splits in which no part of a dimension that is written by slices is split."""
  if len(scatter.site.op.operands) != 3:
    return None
  numbers = stablehlo.ScatterDimensionNumbers(scatter.site.op.attributes['scatter_dimension_numbers'])
  skipped = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
  table, updates = scatter.site.shapes[0], scatter.site.shapes[_UPDATES]
  window = dict(zip([dim for dim in range(len(table)) if dim not in skipped], numbers.update_window_dims))
  parts = [dim for dim, of_updates in window.items() if updates[of_updates] != table[dim]]
  if math.prod(n for dim, n in enumerate(updates) if dim not in {*numbers.update_window_dims}) == 1:
    indexed = numbers.scattered_dims_to_operand_dims
    parts += [dim for dim in indexed if dim not in parts and table[dim] % num_parts(scatter.splits[0][dim])]
  after = [*scatter.splits]
  after[0], after[-1] = _whole(after[0], parts), _whole(after[-1], parts)
  after[_UPDATES] = _whole(after[_UPDATES], [window[dim] for dim in parts if dim in window])
  return _if_changed(scatter, after)


def _uneven_updates(scatter: Instance) -> dict[int, int]:
  """The dimensions of updates, and of ids, that do not divide by the axes that split either."""
  if len(scatter.site.op.operands) != 3:
    return {}
  numbers = stablehlo.ScatterDimensionNumbers(scatter.site.op.attributes['scatter_dimension_numbers'])
  ids, updates = scatter.splits[_IDS], scatter.splits[_UPDATES]
  of_updates = [dim for dim in range(len(updates)) if dim not in {*numbers.update_window_dims}]
  of_ids = [dim for dim in range(len(ids)) if dim != numbers.index_vector_dim]
  parts = {(i, j): (num_parts(updates[i]), num_parts(ids[j])) for i, j in zip(of_updates, of_ids)}
  return {i: j for (i, j), counts in parts.items() if any(scatter.site.shapes[_UPDATES][i] % n for n in counts)}


def _sign_ids(lookup: Instance) -> None:
  """Makes unsigned ids signed where an array is split unevenly: XLA pads ids with -1, and aborts if it cannot."""
  op = lookup.site.op
  ids = op.operands[_IDS].type
  uneven = any(
    size % num_parts(axes)
    for shape, split in zip(lookup.site.shapes, lookup.splits)
    for size, axes in zip(shape, split)
  )
  if uneven and ir.IntegerType(ids.element_type).is_unsigned:
    signed = ir.IntegerType.get_signless(ir.IntegerType(ids.element_type).width)
    with ir.InsertionPoint(op), op.location:
      op.operands[_IDS] = stablehlo.ConvertOp(ir.RankedTensorType.get(ids.shape, signed), op.operands[_IDS]).result


def _adds(scatter: ir.Operation) -> bool:
  return [op.operation.name for op in scatter.regions[0].blocks[0].operations] == ['stablehlo.add', 'stablehlo.return']


def _mask_updates(scatter: Instance, dims: Iterable[int]) -> None:
  """Zeroes the updates past the end of some dimensions.

  The mask is true of all entries that exist; the barrier keeps XLA from finding that out before it partitions.
  """
  op = scatter.site.op
  updates = op.operands[_UPDATES]
  shape, int32 = scatter.site.shapes[_UPDATES], ir.IntegerType.get_signless(32)
  with ir.InsertionPoint(op), op.location:
    zero = ir.DenseElementsAttr.get_splat(updates.type, _zero(updates.type.element_type))
    for dim in {*dims} - scatter.site.masked:
      of_ints = ir.RankedTensorType.get(shape, int32)
      position = stablehlo.IotaOp(of_ints, dim).result
      size = stablehlo.ConstantOp(ir.DenseElementsAttr.get(np.array(shape[dim], np.int32))).result  # type: ignore[call-overload]
      end = stablehlo.BroadcastInDimOp(of_ints, stablehlo.OptimizationBarrierOp([size]).results[0], []).result
      exists = stablehlo.CompareOp(position, end, stablehlo.ComparisonDirectionAttr.get('LT')).result
      updates = stablehlo.SelectOp(exists, updates, stablehlo.ConstantOp(zero).result).result
  op.operands[_UPDATES] = updates
  scatter.site.masked.update(dims)


def _zero(dtype: ir.Type) -> ir.Attribute:
  return ir.FloatAttr.get(dtype, 0.0) if isinstance(dtype, ir.FloatType) else ir.IntegerAttr.get(dtype, 0)


# ---------------------------------------------------------------- branches


def _refuse_lapack_in_branches(module: ir.Operation) -> None:
  """Refuses programs in which the CPU would wait forever.

  XLA's CPU runtime does so where several calls of LAPACK, such as `jnp.linalg.eigh`, stand in one branch, as in an
  optimizer such as Shampoo under "skip steps that are not finite". Test: `test_several_eigh_in_a_branch`.
  """
  functions = {ir.StringAttr(op.attributes['sym_name']).value: op for op in operations(module, {'func.func'})}

  def calls(root: ir.Operation) -> int:
    custom = [
      ir.StringAttr(op.attributes['call_target_name']).value for op in operations(root, {'stablehlo.custom_call'})
    ]
    inside = [ir.FlatSymbolRefAttr(op.attributes['callee']).value for op in operations(root, {'func.call'})]
    return sum(name.startswith('lapack_') for name in custom) + sum(calls(functions[name]) for name in inside)

  for branch in operations(module, {'stablehlo.case'}):
    if (number := calls(branch)) > 1:
      raise ConfigError(
        f'{number} calls of LAPACK, such as eigh, stand in one branch, and the CPU would wait forever. If an optimizer '
        "makes them, set task.train.learner.on_nonfinite to 'ignore'; in a layer, use jnp.where in place of lax.cond"
      )


_GUARDS: dict[str, Callable[[Instance], tuple[Split, ...] | None]] = {
  'stablehlo.convolution': _convolution,
  'stablehlo.reduce_window': _windows,
  'stablehlo.pad': _pad,
  'stablehlo.select_and_scatter': _overlapping_windows,
  'stablehlo.dynamic_slice': _slice,
  'stablehlo.dynamic_update_slice': _slice,
  _GATHER: _lookup,
  _SCATTER: _scatter,
}
