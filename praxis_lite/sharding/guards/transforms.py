"""The guard of Fourier transforms."""

from __future__ import annotations

import numpy as np

from praxis_lite.common.jax_internals.mlir import ir, stablehlo
from praxis_lite.sharding.guards.arrays import if_changed, integers, whole
from praxis_lite.sharding.propagation import ArraySplit, Instance

FFT = 'stablehlo.fft'


def guard_fft(transform: Instance) -> tuple[ArraySplit, ...] | None:
  """Gathers the dimensions that are transformed, and splits the others of operand and result alike.

  XLA transforms a split dimension with a wrong length, or aborts the process. Example: on a mesh a 4, the gradient of
  `jnp.fft.rfft(x)`, x of [5, 7] over (None, 'a'). Test: `test_fourier_transforms`.
  """
  rank = len(transform.site.shapes[0])
  dims = range(rank - len(integers(transform.site.op, 'fft_length')), rank)
  before, after = (whole(split, dims) for split in transform.splits)
  return if_changed(transform, (after, after) if any(after) else (before, before))


def order_entries(transform: ir.Operation) -> None:
  """Requires row-major layouts of operand and result.

  The CPU's transform rejects other layouts, such as the layout of an array that was gathered along its last dimension.
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
