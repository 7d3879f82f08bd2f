"""Helpers of the guards: they read attributes of operations, make constants, and change splits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.propagation import ArraySplit, Axis, Instance

PRODUCT, TRANSPOSE = 'stablehlo.dot_general', 'stablehlo.transpose'
GATHER, SCATTER = 'stablehlo.gather', 'stablehlo.scatter'
# Among the arrays of a gather, or of a scatter of one array: the index of the ids, and that of the rows that it reads
# or writes.
IDS, ROWS = 1, 2


def integers(op: ir.Operation, name: str, default: list[int] | None = None) -> list[int]:
  """Returns an attribute that is an array of integers; if the operation does not have it, returns `default`."""
  if default is not None and name not in op.attributes:
    return default
  return [*ir.DenseI64ArrayAttr(op.attributes[name])]


def integer(op: ir.Operation, name: str) -> int:
  """Returns an attribute that is one integer."""
  return ir.IntegerAttr(op.attributes[name]).value


def padding(pad: ir.Operation) -> tuple[list[int], list[int], list[int]]:
  """Returns how many entries a pad adds to each dimension: before its entries, after them, and between two of them."""
  return integers(pad, 'edge_padding_low'), integers(pad, 'edge_padding_high'), integers(pad, 'interior_padding')


def make_constant(of_type: ir.RankedTensorType, value: float) -> ir.Value:
  """Inserts an array filled with one number as a constant, and returns it."""
  dtype = of_type.element_type
  entry = ir.FloatAttr.get(dtype, value) if isinstance(dtype, ir.FloatType) else ir.IntegerAttr.get(dtype, int(value))
  return stablehlo.ConstantOp(ir.DenseElementsAttr.get_splat(of_type, entry)).result


def zeros(of_type: ir.RankedTensorType) -> ir.Value:
  """Inserts an array of zeros of any type as a constant, and returns it."""
  dtype = of_type.element_type
  if not isinstance(dtype, ir.ComplexType):
    return make_constant(of_type, 0)
  return stablehlo.ConvertOp(
    of_type, make_constant(ir.RankedTensorType.get(of_type.shape, ir.ComplexType(dtype).element_type), 0)
  ).result


def axes_of(entries: Iterable[tuple[Axis, ...]]) -> frozenset[Axis]:
  """Returns the axes that split any of these dimensions."""
  return frozenset(axis for axes in entries for axis in axes)


def whole(split: ArraySplit, dims: Iterable[int]) -> ArraySplit:
  """Returns a split in which the dimensions `dims` are not split."""
  dims = set(dims)
  return tuple(() if dim in dims else axes for dim, axes in enumerate(split))


def unused_axes(mesh: Iterable[Axis], axes: Iterable[Axis]) -> tuple[Axis, ...]:
  """Returns the axes of a mesh that `axes` does not use, and the unused parts of axes that it uses in part."""
  found = []
  for axis in mesh:
    end = 1
    for part in sorted((part for part in axes if part.name == axis.name), key=lambda part: part.before):
      if part.before > end:
        found.append(Axis(axis.name, part.before // end, end))
      end = part.before * part.size
    if axis.size > end:
      found.append(Axis(axis.name, axis.size // end, end))
  return tuple(found)


def join_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
  """Returns the axes that split a dimension, with consecutive parts of an axis joined."""
  found: list[Axis] = []
  for axis in axes:
    last = found[-1] if found else None
    if last is not None and last.name == axis.name and last.before * last.size == axis.before:
      found[-1] = Axis(axis.name, last.size * axis.size, last.before)
    else:
      found.append(axis)
  return tuple(found)


def if_changed(instance: Instance, after: Sequence[ArraySplit]) -> tuple[ArraySplit, ...] | None:
  """Returns `after`, or None if the arrays already have these splits."""
  return None if (*after,) == instance.splits else (*after,)
