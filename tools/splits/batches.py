"""Runs many cases in one program; each case splits the arrays of one operation in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.jax_internals.mlir import ir, run_passes, stablehlo
from praxis_lite.sharding.guards import guard
from praxis_lite.sharding.guards.arrays import make_constant
from praxis_lite.sharding.propagation import Propagation, Site, inline_calls
from tools.splits.assign import Dims, Splits

ArrayFunction = Callable[..., jax.Array]

# Replaces the operation's name, for a function of several operations. Its arguments and result are split as stated.
SEVERAL = 'stablehlo.optimization_barrier'
# The value of padding in operands. XLA pads with 0, which would hide that an operation reads padding. So this number is
# subtracted before operands are split, and added again afterwards.
_PADDING = 3


@dataclasses.dataclass(frozen=True)
class Program:
  """A function that makes one operation of a kind, or several operations.

  Attributes:
    name: such as 'bv,vc->bc b=4 v=8 c=12'.
    op: the name of its only operation, such as 'stablehlo.dot_general'; or `SEVERAL`.
    fn: the function; it returns an array.
    args: its arguments, whose sums and products are exact.
    expected: the result.
    dims: names of the dimensions of the operands, then of the results; with `SEVERAL`, of arguments and result.
  """

  name: str
  op: str
  fn: ArrayFunction
  args: tuple[np.ndarray, ...]
  expected: np.ndarray
  dims: Dims


class CaseResult(NamedTuple):
  """The result of a case.

  Attributes:
    outcome: 'right', 'wrong', 'refused', 'failed' or 'aborted'.
    guarded: whether the guards changed how its arrays are split.
    is_reached: whether the arrays are split as stated. Shardy splits the results of some products differently.
  """

  outcome: str
  guarded: bool = False
  is_reached: bool = True


def run_cases(
  program: Program, mesh_shape: Sequence[int], cases: Sequence[Splits], guarded: bool = True
) -> list[CaseResult]:
  """Runs all cases of a program as one program, and compares each result on each device."""
  names = 'abcdef'[: len(mesh_shape)]
  devices = jax.devices()[: int(np.prod(mesh_shape))]
  mesh = jax.make_mesh(tuple(mesh_shape), (*names,), devices=devices, axis_types=(AxisType.Auto,) * len(names))

  def every(*args: jax.Array) -> jax.Array:
    results = []
    for number in range(len(cases)):
      with jax.named_scope(f'case_{number}'):
        result = _between_barriers(program.fn, *args) if program.op == SEVERAL else program.fn(*args)
      results.append(jnp.ravel(result))
    return jnp.concatenate(results)

  whole = NamedSharding(mesh, PartitionSpec())
  lowered = jax.jit(every, in_shardings=whole, out_shardings=whole).lower(*program.args)
  seen = _state(lowered, program, cases)
  changes = guard(lowered) if guarded else []
  changed = {_number(change.where) for change in changes if 'case_' in change.where}
  found = lowered.compile()(*program.args)
  right = np.ones(len(cases), bool)
  for shard in found.addressable_shards:
    values = np.asarray(shard.data).reshape(len(cases), -1)
    right &= (values == program.expected.reshape(1, -1)).all(1)
  return [CaseResult('right' if ok else 'wrong', i in changed, seen[i] == cases[i]) for i, ok in enumerate(right)]


def _between_barriers(fn: ArrayFunction, *args: jax.Array) -> jax.Array:
  return jax.lax.optimization_barrier(fn(*jax.lax.optimization_barrier(args)))


def _number(where: str) -> int:
  return int(where.partition('case_')[2].partition('/')[0])


def _state(lowered: jax.stages.Lowered, program: Program, cases: Sequence[Splits]) -> list[Splits]:
  """States how the arrays of each operation are split, and returns how they are then split."""
  module: Any = lowered.compiler_ir('stablehlo')
  with module.context:
    inline_calls(module.operation)
    run_passes('builtin.module(symbol-dce)', module.operation)  # Removes the functions that were inlined.
    propagation = Propagation(module, {program.op})
    sites = propagation.sites = [site for site in propagation.sites if 'case_' in site.where]
    if program.op == SEVERAL:
      for first, last, splits in zip(sites[::2], sites[1::2], cases, strict=True):
        _state_ends(first, last, splits)
      return [*cases]
    if len(sites) != len(cases):
      raise ValueError(f'{program.name} makes {len(sites) / len(cases):g} operations {program.op}, not one')
    for site, splits in zip(sites, cases):
      _state_one(site, splits)
    return [instance.splits for instance in propagation.instances()]


def _state_ends(first: Site, last: Site, splits: Splits) -> None:
  """States splits around two barriers: of the arguments at the first one, and of the result at the second."""
  for i, (result, split) in enumerate(zip([*first.op.results], splits)):
    with ir.InsertionPoint(first.op), first.op.location:
      first.op.operands[i] = first.insert_constraint(_add_number(first.op.operands[i], -_PADDING), split).result
    with ir.InsertionPoint.after(first.op), first.op.location:
      before = first.insert_constraint(result, split)
      after = first.insert_constraint(_add_number(before.result, _PADDING), split)
    result.replace_all_uses_except(after.result, [before.operation])
  (result,), split = last.op.results, splits[-1]
  with ir.InsertionPoint(last.op), last.op.location:
    last.op.operands[0] = last.insert_constraint(last.op.operands[0], split).result
  with ir.InsertionPoint.after(last.op), last.op.location:
    whole = last.insert_constraint(result, ((),) * len(split))
  result.replace_all_uses_except(whole.result, [whole.operation])


def _state_one(site: Site, splits: Splits) -> None:
  """States the splits of one operation. Barriers separate them from later ones; results are replicated afterwards."""
  op = site.op
  with ir.InsertionPoint(op), op.location:
    before = [site.insert_constraint(_add_number(x, -_PADDING), split).result for x, split in zip(op.operands, splits)]
    for i, (x, split) in enumerate(zip(stablehlo.OptimizationBarrierOp(before).results, splits)):
      op.operands[i] = site.insert_constraint(_add_number(x, _PADDING), split).result
  for result, split in zip([*op.results], splits[len(op.operands) :]):
    with ir.InsertionPoint.after(op), op.location:
      first = site.insert_constraint(result, split)
      after = stablehlo.OptimizationBarrierOp([first.result]).results[0]
      whole = site.insert_constraint(after, ((),) * len(split)).result
    result.replace_all_uses_except(whole, [first.operation])


def _add_number(x: ir.Value, number: int) -> ir.Value:
  """Adds a number to an array of integers or floats."""
  is_real = isinstance(x.type.element_type, ir.FloatType | ir.IntegerType)
  return stablehlo.AddOp(x, make_constant(x.type, number)).result if is_real and x.type.rank else x
