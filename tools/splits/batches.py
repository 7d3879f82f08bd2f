"""Runs many cases in one program: each splits the arrays of one operation in its way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.jax_internals.mlir import ir, run_passes, stablehlo
from praxis_lite.partitioning.guards import guard
from praxis_lite.partitioning.propagation import Propagation, Site, inline_calls
from tools.splits.assign import Dims, Splits


@dataclasses.dataclass(frozen=True)
class Program:
  """A function that makes one operation of a kind.

  Attributes:
    name: what it is, such as 'bv,vc->bc b=4 v=8 c=12'.
    op: the name of its operation, such as 'stablehlo.dot_general'; it makes one of these.
    fn: the function; it returns an array.
    args: its arguments, whose sums and products are exact.
    expected: the result.
    dims: of the operation's operands, then of its results.
  """

  name: str
  op: str
  fn: Callable[..., jax.Array]
  args: tuple[np.ndarray, ...]
  expected: np.ndarray
  dims: Dims


class Found(NamedTuple):
  """What became of a case.

  Attributes:
    outcome: 'right', 'wrong', 'refused', 'failed' or 'aborted'.
    guarded: whether the guards changed how its arrays are split.
    is_reached: whether the arrays are split as stated; Shardy splits the results of some products otherwise.
  """

  outcome: str
  guarded: bool = False
  is_reached: bool = True


def run(program: Program, mesh_shape: Sequence[int], cases: Sequence[Splits], guarded: bool = True) -> list[Found]:
  """Runs a program once for each case, all in one, and compares each result on each device."""
  names = 'abcdef'[: len(mesh_shape)]
  devices = jax.devices()[: int(np.prod(mesh_shape))]
  mesh = jax.make_mesh(tuple(mesh_shape), (*names,), devices=devices, axis_types=(AxisType.Auto,) * len(names))

  def every(*args: jax.Array) -> jax.Array:
    results = []
    for number in range(len(cases)):
      with jax.named_scope(f'case_{number}'):
        result = program.fn(*args)
      results.append(jnp.ravel(result))
    return jnp.concatenate(results)

  whole = NamedSharding(mesh, PartitionSpec())
  lowered = jax.jit(every, in_shardings=whole, out_shardings=whole).lower(*program.args)
  seen = _state(lowered, program, cases)
  changed = {_number(change.where) for change in guard(lowered)} if guarded else set()
  found = lowered.compile()(*program.args)
  right = np.ones(len(cases), bool)
  for shard in found.addressable_shards:
    values = np.asarray(shard.data).reshape(len(cases), -1)
    right &= (values == program.expected.reshape(1, -1)).all(1)
  return [Found('right' if ok else 'wrong', i in changed, seen[i] == cases[i]) for i, ok in enumerate(right)]


def _number(where: str) -> int:
  return int(where.partition('case_')[2].partition('/')[0])


def _state(lowered: jax.stages.Lowered, program: Program, cases: Sequence[Splits]) -> list[Splits]:
  """States how the arrays of each operation are split, and returns how they are."""
  module: Any = lowered.compiler_ir('stablehlo')
  with module.context:
    inline_calls(module.operation)
    run_passes('builtin.module(symbol-dce)', module.operation)  # The functions that were called.
    propagation = Propagation(module, {program.op})
    propagation.sites = [site for site in propagation.sites if 'case_' in site.where]
    if len(propagation.sites) != len(cases):
      raise ValueError(f'{program.name} makes {len(propagation.sites) / len(cases):g} operations {program.op}, not one')
    for site, splits in zip(propagation.sites, cases):
      _state_one(site, splits)
    return [instance.splits for instance in propagation.instances()]


def _state_one(site: Site, splits: Splits) -> None:
  """Barriers keep what is stated of an operation apart from what is stated of it later, and its results whole after."""
  op = site.op
  with ir.InsertionPoint(op), op.location:
    before = [site.constraint(x, split).result for x, split in zip(op.operands, splits)]
    for i, (x, split) in enumerate(zip(stablehlo.OptimizationBarrierOp(before).results, splits)):
      op.operands[i] = site.constraint(x, split).result
  for result, split in zip([*op.results], splits[len(op.operands) :]):
    with ir.InsertionPoint.after(op), op.location:
      first = site.constraint(result, split)
      after = stablehlo.OptimizationBarrierOp([first.result]).results[0]
      whole = site.constraint(after, ((),) * len(split)).result
    result.replace_all_uses_except(whole, [first.operation])
