"""Fourier transforms."""

from __future__ import annotations

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import if_changed, integers, whole
from praxis_lite.sharding.propagation import Instance, Split

FFT = 'stablehlo.fft'


def guard_fft(transform: Instance) -> tuple[Split, ...] | None:
  """Gathers the dimensions that are transformed, and splits the others of operand and result alike.

  XLA's own transform of a split dimension has another length than the operation, or ends the process. On a mesh a 4:
  the gradient of `jnp.fft.rfft(x)`, x of [5, 7] over (None, 'a'). Test: `test_fourier_transforms`.
  """
  rank = len(transform.site.shapes[0])
  dims = range(rank - len(integers(transform.site.op, 'fft_length')), rank)
  before, after = (whole(split, dims) for split in transform.splits)
  return if_changed(transform, (after, after) if any(after) else (before, before))


def order_entries(transform: ir.Operation) -> None:
  """Has the entries of operand and result in the order of their dimensions in memory.

  The CPU's transform refuses any other order, such as that of an array that is gathered along its last dimension.
  """
  with ir.InsertionPoint(transform), transform.location:
    transform.operands[0] = _keep_layout(transform.operands[0]).results[0]
  with ir.InsertionPoint.after(transform), transform.location:
    ordered = _keep_layout(transform.results[0])
  transform.results[0].replace_all_uses_except(ordered.results[0], [ordered.operation])


def _keep_layout(value: ir.Value) -> stablehlo.CustomCallOp:
  dims = np.arange(value.type.rank)[::-1].copy()
  order = ir.DenseElementsAttr.get(dims, type=ir.IndexType.get())  # type: ignore[call-overload]
  layouts = ir.ArrayAttr.get([order])
  return stablehlo.CustomCallOp(
    [value.type], [value], 'LayoutConstraint', operand_layouts=layouts, result_layouts=layouts
  )
