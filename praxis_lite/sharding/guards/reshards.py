"""Reshards: an operation needs an operand split in another way than the operation before it has made it."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.common.jax_internals.mlir import ir
from praxis_lite.sharding.propagation import ArraySplit, Axis, Propagation, Site, mesh_axes, operations, split_of

# XLA was right for all reshards that were tried on meshes of up to three axes.
_NUM_AXES = 4
_NUM_DIMS = 3
_CONSTRAINT = 'sdy.sharding_constraint'
# Operations without arrays of their own.
_OUTER = {'builtin.module', 'func.func', 'sdy.mesh', 'func.return', 'stablehlo.return', 'sdy.return'}


def reshard_in_two_steps(module: ir.Module) -> None:
  """Makes reshards over many axes gather what moves first, and split it again afterwards.

  On meshes of four axes, XLA aborts the process for some reshards that change most dimensions. Example: on a mesh
  a 2 x b 2 x c 2 x d 2, x [16, 4, 2, 4] from ('d', ('a', 'b')) to (None, 'b', ('c', 'd'), 'a'). Test:
  `test_reshards_over_four_axes`.
  """
  if len(sizes := mesh_axes(module)) < _NUM_AXES:
    return
  propagation = Propagation(module, {op.name for op in operations(module.operation)} - _OUTER)
  constraints = [site for site in propagation.sites if site.op.name == _CONSTRAINT]
  # Propagation removes constraints, so these have no instances.
  known = {site.op.results[0]: split_of(site.op.results[0], sizes) for site in constraints}
  for site, splits, compatible in propagation.instances():
    operands = len(site.op.operands)
    known.update(zip(site.op.results, splits[operands:]))
    for number, before in enumerate(splits[:operands]):
      # Like the result if it has its shape, as for an addition.
      after = splits[-1] if site.shapes[number] == site.shapes[-1] else compatible[number]
      _go_through_common_axes(site, number, before, after)
  for site in constraints:
    _go_through_common_axes(site, 0, known.get(site.op.operands[0], ()), known[site.op.results[0]])


def _go_through_common_axes(site: Site, number: int, before: ArraySplit, after: ArraySplit) -> None:
  changed = sum(old != new for old, new in zip(before, after))
  if changed >= _NUM_DIMS and site.mend(f'operand {number} in two steps'):
    site.restrict(number, before, tuple(map(_common_axes, before, after)))


def _common_axes(before: Sequence[Axis], after: Sequence[Axis]) -> tuple[Axis, ...]:
  """Returns the major axes of a dimension that stay."""
  common = []
  for old, new in zip(before, after):
    if old != new:
      break
    common.append(old)
  return tuple(common)
