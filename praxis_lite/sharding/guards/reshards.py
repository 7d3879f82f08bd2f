"""The guard of reshards. A reshard changes the split of an operand that was computed in another split than needed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from praxis_lite.common.jax_internals.mlir import ir
from praxis_lite.sharding.propagation import ArraySplit, Propagation, Site, is_closed, mesh_axes, operations, split_of

# On meshes with fewer axes, and for reshards that change fewer dimensions, XLA was right in all cases that were tried.
_NUM_AXES = 3
_NUM_DIMS = 3
_MAX_ROUNDS = 6
_CONSTRAINT = 'sdy.sharding_constraint'
# Operations that have no arrays themselves.
_OUTER = {'builtin.module', 'func.func', 'sdy.mesh', 'func.return', 'stablehlo.return', 'sdy.return'}


def reshard_in_two_steps(module: ir.Module) -> dict[Site, tuple[ArraySplit, ...]]:
  """Makes reshards over many axes in two steps: gather along the axes that move, then split again.

  Returns a dict: its keys are the operations whose operands it reshards, its values the splits of their arrays.

  XLA aborts the process for some reshards that change four dimensions. Examples: x [16, 4, 2, 4] from ('d', ('a', 'b'))
  to (None, 'b', ('c', 'd'), 'a') on a mesh a 2 x b 2 x c 2 x d 2; x [4, 4, 2, 24] from (None, 'b', None, 'c') to
  ('c', None, 'a', 'b') on a mesh a 2 x b 2 x c 6. It also aborts for a few reshards that change three dimensions over
  three axes: x [12, 4, 6, 4] from 'bcda' to ('b', 'a', 'c') on a mesh a 2 x b 2 x c 3 x d 2. Tests:
  `test_reshards_of_four_dimensions`, `test_reshards_of_four_dimensions_that_shardy_inserts_for_an_operation`,
  `test_reshards_that_follow_from_the_constraints_of_others`.
  """
  if len(mesh_axes(module)) < _NUM_AXES:
    return {}
  mended: dict[Site, tuple[ArraySplit, ...]] = {}
  for _ in range(_MAX_ROUNDS):
    # A constraint can change the splits of other arrays, so the program is read again until nothing changes.
    found = _reshard_in_two_steps(module)
    mended |= found
    if not found:
      break
  return mended


def _reshard_in_two_steps(module: ir.Module) -> dict[Site, tuple[ArraySplit, ...]]:
  sizes = mesh_axes(module)
  names = {op.name for op in operations(module.operation)} - _OUTER
  propagation = Propagation(module, names, _NUM_DIMS, with_sources=True)
  constraints = [site for site in propagation.sites if site.op.name == _CONSTRAINT]
  # Propagation removes constraints, so `propagation.instances` yields none of them.
  known = {site.op.results[0]: split_of(site.op.results[0], sizes) for site in constraints}
  stated = {site.op.results[0]: known[site.op.results[0]] if is_closed(site.op) else None for site in constraints}
  found: dict[Site, tuple[ArraySplit, ...]] = {}
  reshards: dict[tuple[Site, int], list[tuple[ArraySplit, ArraySplit]]] = {}
  for site, splits, compatible, sources in propagation.instances():
    found.setdefault(site, splits)
    known.update(zip(site.op.results, splits[len(sources) :]))
    for number, source in enumerate(sources):
      operand = site.op.operands[number]
      # Shardy turns a constraint into a reshard too. The source of this reshard has the split before the constraint.
      before = stated[operand] or splits[number] if operand in stated else source
      # An operand with the result's shape, as in an addition, is needed in the result's split.
      after = splits[-1] if site.shapes[number] == site.shapes[-1] else compatible[number]
      reshards.setdefault((site, number), []).append((before, after))
  for site in constraints:
    before, after = known.get(site.op.operands[0], ()), known[site.op.results[0]]
    found[site] = before, after
    reshards[site, 0] = [(before, after)]
  for (site, number), splits_of_calls in reshards.items():
    _go_through_common_axes(site, number, splits_of_calls)
  return {site: splits for site, splits in found.items() if site.mended}


def _go_through_common_axes(site: Site, number: int, reshards: Sequence[tuple[ArraySplit, ArraySplit]]) -> None:
  """If one reshard of an operand may abort XLA, makes all reshards of this operand in two steps, first a gather.

  An operation in a function that is called several times has several reshards of an operand. `reshards` has a pair for
  each call: the split before the reshard, and the split after it.
  """
  if not any(map(_may_abort, reshards)):
    return
  (before, *others), afters = zip(*reshards)
  common = functools.reduce(_common_split, (*others, *afters), before)
  site.mend(f'operand {number} in two steps')
  # If calls split the operand in different ways, no constraint fits all calls.
  site.restrict(number, common if any(other != before for other in others) else before, common)


def _may_abort(reshard: tuple[ArraySplit, ArraySplit]) -> bool:
  before, after = reshard
  if _common_split(before, after) in reshard:
    return False  # The reshard only gathers, or only splits further.
  changed = [(old, new) for old, new in zip(before, after) if old != new]
  axes = {axis.name for dim in changed for axis in itertools.chain(*dim)}
  return len(changed) > _NUM_DIMS or (len(changed) == _NUM_DIMS and len(axes) >= _NUM_AXES)


def _common_split(one: ArraySplit, other: ArraySplit) -> ArraySplit:
  """Returns, for each dimension, the longest common beginning of the axes that split it, major first."""
  pairs = (itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new)) for old, new in zip(one, other))
  return tuple(tuple(axis for axis, _ in common) for common in pairs)
