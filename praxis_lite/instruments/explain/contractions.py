"""Finds matrix products whose operands are split so that one of them has to be moved.

The specs of weights and the constraints of layers give the first splits. These are followed through the traced train
step, across operations that keep a split: casts, transposes and elementwise operations. A product of the forward pass
can be

    x [B, T, F/mdl]  w [F/mdl, D]    a sum over parts of F: one reduction, nothing moves
    x [B/data, T, D] w [D/data, F]   w is gathered: fully sharded training, as intended
    x [B, T, F/mdl]  w [F/data, D]   the operands split F differently: one operand has to be moved
    x [B, T, F/mdl]  w [F, D/mdl]    the same axis splits F of x and D of w: one operand has to be moved

Only the last two are reported. When a split becomes uncertain, it is no longer followed, so every reported move really
happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from praxis_lite.common.jax_internals.programs import ELEMENTWISE, called_program, scan_sizes, scopes, strip_constants
from praxis_lite.sharding.specs import UNCONSTRAINED, spec_axes

DimAxes = tuple[str, ...]

# Operations whose result is split like those of their operands that have the same shape as the result.
_KEEPS_SPLIT = ELEMENTWISE | {'name', 'optimization_barrier'}


@dataclasses.dataclass(frozen=True)
class Split:
  """An array with a known split: the axes that split each dimension, the array's name, and whether it is a weight."""

  axes: tuple[DimAxes, ...]
  label: str
  is_weight: bool = False

  def elsewhere(self, dim: int) -> set[str]:
    """The axes that split dimensions other than `dim`."""
    return {axis for axes in self.axes for axis in axes} - {*self.axes[dim]}


class Mismatch(NamedTuple):
  """A product for which one operand has to be moved: its operands, and the axes that split the summed dimension."""

  left: str
  right: str
  size: int  # The size of the summed dimension.
  left_axes: DimAxes
  right_axes: DimAxes
  # An axis that splits the summed dimension of one operand and another dimension of the other operand, or ''.
  shared: str


def find_mismatches(
  jaxpr: ClosedJaxpr, splits: Sequence[Split | None], mesh_sizes: Mapping[str, int]
) -> list[Mismatch]:
  """Returns the mismatches in the forward pass of a traced program, without duplicates.

  `splits` has the split of each argument of the program, or None where the split is not known.
  """
  walker = _Walker(mesh_sizes)
  walker.walk(jaxpr.jaxpr, list(splits), '')
  return list(dict.fromkeys(walker.found))


def splitting_axes(spec: PartitionSpec, mesh_sizes: Mapping[str, int]) -> tuple[DimAxes, ...]:
  """Returns the axes larger than 1 in each entry of a spec; other axes split nothing."""
  return tuple(tuple(axis for axis in spec_axes(entry) if mesh_sizes.get(axis, 1) > 1) for entry in spec)


class _Walker:
  def __init__(self, mesh_sizes: Mapping[str, int]):
    self.sizes = mesh_sizes
    self.found: list[Mismatch] = []

  def walk(self, jaxpr: Jaxpr, splits: Sequence[Split | None], scope: str) -> list[Split | None]:
    """Follows splits through a jaxpr; returns the split of each result, None if it is not known."""
    known: dict[Var, Split] = {v: s for v, s in zip(jaxpr.invars, splits) if s is not None}

    def split_of(atom: Var | Literal) -> Split | None:
      return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
      own = str(eqn.source_info.name_stack)
      if 'transpose(' not in own:  # The backward pass only repeats the mismatches of the forward pass.
        where = '/'.join(filter(None, (scope, scopes(own))))
        results = self.step(eqn, [split_of(a) for a in eqn.invars], where)
        known.update({v: s for v, s in zip(eqn.outvars, results) if s is not None})
    return [split_of(v) for v in jaxpr.outvars]

  def step(self, eqn: JaxprEqn, operands: list[Split | None], where: str) -> list[Split | None]:
    """Returns the split of each result of one equation, None if it is not known."""
    name = eqn.primitive.name
    unknown: list[Split | None] = [None] * len(eqn.outvars)
    if name == 'sharding_constraint':
      return [self.read_constraint(eqn, operands[0], where)]
    if name == 'dot_general':
      self.check_product(eqn, operands)
      return unknown
    if name == 'transpose' and (first := operands[0]):
      return [dataclasses.replace(first, axes=tuple(first.axes[i] for i in eqn.params['permutation']))]
    if name == 'slice' and not any(eqn.params['start_indices']):  # A slice from 0 on only removes padding.
      return [operands[0]]
    if name in _KEEPS_SPLIT:
      said = [s for s, v in zip(operands, eqn.invars) if s and _shape(v) == _shape(eqn.outvars[0])]
      agreed = said[0] if len({s.axes for s in said}) == 1 else None
      return [agreed] * len(eqn.outvars)
    if name == 'scan':
      return self.scan(eqn, operands, where)
    inner = called_program(eqn)
    if inner is None:
      return unknown
    inner = strip_constants(inner)
    if name == 'shard_map' or len(inner.invars) != len(operands):  # Values inside shard_map are parts of arrays.
      self.walk(inner, [None] * len(inner.invars), where)
      return unknown
    results = self.walk(inner, operands, where)
    return results if len(results) == len(eqn.outvars) else unknown

  def read_constraint(self, eqn: JaxprEqn, operand: Split | None, where: str) -> Split | None:
    spec, rank = getattr(eqn.params['sharding'], 'spec', None), len(_shape(eqn.outvars[0]))
    if spec is None or len(spec) > rank or UNCONSTRAINED in spec:
      return None
    axes = (*splitting_axes(spec, self.sizes), *((),) * (rank - len(spec)))
    if operand is not None and operand.is_weight:
      return dataclasses.replace(operand, axes=axes)
    return Split(axes, f'the activation of {where.replace("/", ".") or "the model"}')

  def scan(self, eqn: JaxprEqn, operands: list[Split | None], where: str) -> list[Split | None]:
    """Follows splits into the body of a scan, which sees slices of the scanned arrays; does not follow the carry."""
    consts, carry, _ = scan_sizes(eqn)
    slices = [dataclasses.replace(s, axes=s.axes[1:]) if s and s.axes else None for s in operands[consts + carry :]]
    self.walk(eqn.params['jaxpr'].jaxpr, [*operands[:consts], *[None] * carry, *slices], where)
    return [None] * len(eqn.outvars)

  def check_product(self, eqn: JaxprEqn, operands: list[Split | None]) -> None:
    left, right = operands
    if left is None or right is None:
      return
    (left_dims, right_dims), _ = eqn.params['dimension_numbers']
    for i, j in zip(left_dims, right_dims):
      size = _shape(eqn.invars[0])[i]
      a, b, elsewhere = left.axes[i], right.axes[j], (left.elsewhere(i), right.elsewhere(j))
      # A weight is gathered over an axis that splits the batch of the activation: fully sharded training, as intended.
      if left.is_weight and not right.is_weight:
        a = tuple(axis for axis in a if axis not in elsewhere[1])
      elif right.is_weight and not left.is_weight:
        b = tuple(axis for axis in b if axis not in elsewhere[0])
      shorter = min(len(a), len(b))
      if a[:shorter] != b[:shorter]:
        self.found.append(Mismatch(left.label, right.label, size, a, b, ''))
        continue
      # If more axes split the summed dimension of one operand, each device slices the other operand. It cannot do this
      # if one of the extra axes already splits another dimension of that other operand.
      extra, other = (a[shorter:], elsewhere[1]) if len(a) > len(b) else (b[shorter:], elsewhere[0])
      crossed = next((axis for axis in extra if axis in other), '')
      if crossed and left.is_weight != right.is_weight:
        self.found.append(Mismatch(left.label, right.label, size, a, b, crossed))


def _shape(atom: Var | Literal) -> tuple[int, ...]:
  return getattr(atom.aval, 'shape', ())
