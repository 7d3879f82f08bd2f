"""Finds out how each array of a lowered program will be split, before XLA partitions the program.

JAX lowers a step to StableHLO in which some arrays have shardings. Shardy, which comes with JAX, propagates these to
all other arrays. For an operation it can also tell how its arrays would have to be split so that it needs no
communication of its own, except for sums. `Propagation` reads both in a copy of the program; `Site.state` writes
shardings to the program itself.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from praxis_lite.common.jax_internals.mlir import ir, run_passes, sdy, stablehlo

_PROPAGATE = 'builtin.module(symbol-dce,sdy-propagation-pipeline)'
_MAKE_COMPATIBLE = 'builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))'
_COMMUNICATE = 'builtin.module(func.func(sdy-reshard-to-collectives))'
_RESHAPE = 'stablehlo.reshape'
_HIDDEN = 'stablehlo.custom_call'  # The operation that replaces a hidden reshape.
_NUMBER = 'praxis_lite.site'  # The attribute that identifies an operation in a copy.


class Axis(NamedTuple):
  """A mesh axis, or the part of one that splits a reshaped dimension."""

  name: str
  size: int
  before: int = 1  # The size of the more major parts of the axis.


# The axes that split each dimension of an array, major first; axes of size 1 are left out.
ArraySplit = tuple[tuple[Axis, ...], ...]
# The axes that a constraint gives to each dimension; None leaves a dimension to XLA.
_Constraint = tuple[tuple[Axis, ...] | None, ...]


class Site:
  """An operation of a program, and the constraints that were put on its arrays.

  Attributes:
    op: the operation. Its arrays are the operands, then the results.
    where: the name of the operation in profiles, preceded by the names of the calls that enclose it.
    shapes: the global shape of each array.
    mesh: the axes that may split the arrays, in the order of the mesh, except axes that `shard_map` maps.
    is_mapped: whether a `shard_map` is around it.
    mended: descriptions of those changes to the operands that are not constraints.
  """

  def __init__(
    self,
    op: ir.Operation,
    shapes: tuple[tuple[int, ...], ...],
    mesh: ir.Attribute,
    axes: tuple[Axis, ...],
    manual: Collection[str],
    callers: Mapping[str, ir.Operation],
  ):
    self.op, self.shapes = op, shapes
    self.mended: list[str] = []
    self._mesh, self._sizes = mesh, {axis.name: axis.size for axis in axes}
    self._stated: dict[int, ir.Operation] = {}
    self._callers = callers  # For each function, by name, the operation that calls it.
    self.mesh = tuple(axis for axis in axes if axis.name not in manual)
    self.is_mapped = bool(manual)

  @functools.cached_property
  def where(self) -> str:
    # To get an operation's name, MLIR prints its whole traceback, so the name is read only if it is reported.
    calls = [outer for outer in _enclosing(self.op, self._callers) if outer.name == 'func.call']
    return '/'.join(operation_name(one) for one in (*reversed(calls), self.op))

  def mend(self, what: str) -> bool:
    """Records `what`, a change to the operands; returns False if it has been recorded before."""
    if what in self.mended:
      return False
    self.mended.append(what)
    return True

  def state(self, old: Sequence[ArraySplit], new: Sequence[ArraySplit]) -> None:
    """Constrains all arrays to the splits `new` during the operation, and its results to the splits `old` after it.

    All arrays are constrained, even if they are split that way already, because XLA's own propagation might choose
    other splits.
    """
    for i, (before, after) in enumerate(zip(old, new)):
      if i in self._stated:
        self._stated[i].attributes['sharding'] = self._sharding(after)
      elif self.shapes[i]:
        self._constrain(i, after, before)

  def keep(self, number: int, splits: Iterable[ArraySplit]) -> None:
    """Constrains an array to its present split, so that XLA's own propagation cannot choose another.

    The array is a result in a function that may be called several times, and `splits` has its split in each call. A
    dimension whose split differs between calls is left to XLA.
    """
    if number not in self._stated:
      common = tuple(axes[0] if len({*axes}) == 1 else None for axes in zip(*splits))
      self._constrain(number, common, common)

  def restrict(self, number: int, before: ArraySplit, after: ArraySplit) -> None:
    """Constrains an operand to another split in this operation only; before it, the operand keeps its split."""
    with ir.InsertionPoint(self.op), self.op.location:
      constraint = self.insert_constraint(self.insert_constraint(self.op.operands[number], before).result, after)
    self.op.operands[number] = constraint.result

  def insert_constraint(self, value: ir.Value, split: _Constraint) -> sdy.ShardingConstraintOp:
    """Inserts a constraint on the split of an array at the current insertion point, and returns it."""
    return sdy.ShardingConstraintOp(value, self._sharding(split))

  def _constrain(self, number: int, split: _Constraint, afterwards: _Constraint) -> None:
    """Constrains an array to `split`; if the array is a result, constrains it to `afterwards` after the operation."""
    if number < len(self.op.operands):
      with ir.InsertionPoint(self.op), self.op.location:
        constraint = self.insert_constraint(self.op.operands[number], split)
      self.op.operands[number] = constraint.result
    else:
      result = self.op.results[number - len(self.op.operands)]
      with ir.InsertionPoint.after(self.op), self.op.location:
        constraint = self.insert_constraint(result, split)
        last = constraint if afterwards == split else self.insert_constraint(constraint.result, afterwards)
      result.replace_all_uses_except(last.result, [constraint.operation])
    self._stated[number] = constraint.operation

  def _sharding(self, split: _Constraint) -> sdy.TensorShardingAttr:
    def reference(axis: Axis) -> sdy.AxisRefAttr:
      if axis.size == self._sizes[axis.name]:
        return sdy.AxisRefAttr.get(axis.name)
      return sdy.AxisRefAttr.get(axis.name, sdy.SubAxisInfoAttr.get(axis.before, axis.size))

    dims = [
      sdy.DimensionShardingAttr.get([reference(a) for a in axes or ()], is_closed=axes is not None) for axes in split
    ]
    return sdy.TensorShardingAttr.get(self._mesh, dims)


class Instance(NamedTuple):
  """An operation with its splits in one call of its function; two calls of the function give two instances."""

  site: Site
  splits: tuple[ArraySplit, ...]  # The split of each array: of the operands, then of the results.
  compatible: tuple[ArraySplit, ...]  # Splits with which the operation would be local to each device, except for sums.
  sources: tuple[ArraySplit, ...]  # Splits of the operands before Shardy reshards them; () without `with_sources`.


class Propagation:
  """Finds the operations with given names, such as 'stablehlo.dot_general', in a lowered program, and their splits.

  Operations whose arrays all have a rank below `least_rank` are left out. Instances have `sources` if `with_sources`.
  """

  def __init__(self, module: ir.Module, names: Collection[str], least_rank: int = 0, *, with_sources: bool = False):
    self._module, self._names, self._with_sources = module, names, with_sources
    self.sites: list[Site] = []
    # Many arrays have the same sharding, and many operations have the same list of shardings, so both are read once.
    self._splits: dict[ir.Attribute, ArraySplit] = {}
    self._lists: dict[ir.Attribute, Sequence[ir.Attribute]] = {}
    # An argument that is on no mesh, such as a number, has an empty mesh.
    mesh = next(((symbol, axes) for symbol, axes in _meshes(module) if axes), None)
    if mesh is None:
      return
    self._sizes = {axis.name: axis.size for axis in mesh[1]}
    with module.context:
      symbol = ir.FlatSymbolRefAttr.get(mesh[0])
      found = operations(module.operation, {*names, 'func.call'})
      callers = {callee(op): op for op in found if op.name == 'func.call'}
      shape_of = functools.cache(lambda type_: tuple(getattr(type_, 'shape', ())))  # () for a type without a shape.
      manual: dict[object, set[str]] = {}  # The result of `_manual_axes`, by the enclosing operation.
      for op in found:
        if op.name not in names:
          continue
        of_op = tuple(shape_of(value.type) for value in (*op.operands, *op.results))
        if max(map(len, of_op), default=0) >= least_rank:
          parent = op.parent
          if parent not in manual:
            manual[parent] = _manual_axes(op, callers)
          self.sites.append(Site(op, of_op, symbol, mesh[1], manual[parent], callers))

  def instances(self) -> list[Instance]:
    """Propagates the shardings that the module has now, and returns all instances."""
    if not self.sites:
      return []
    for i, site in enumerate(self.sites):
      site.op.attributes[_NUMBER] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), i)
    copy = self._module.operation.clone()
    for site in self.sites:
      del site.op.attributes[_NUMBER]
    inline_calls(copy, named=False)
    _reshape_where_nothing_is_repeated(copy)
    run_passes(_PROPAGATE, copy)
    found, known = operations(copy, {*self._names, _RESHAPE}), dict[ir.Value, ArraySplit]()
    propagated = []
    for site, op in self._find_copies(found):
      sources = self._read(site, _sources(op), known) if self._with_sources else ()
      propagated.append((site, self._read(site, (*op.operands, *op.results), known), sources))
    _hide(op for op in found if op.name == _RESHAPE)
    run_passes(_MAKE_COMPATIBLE, copy)
    known.clear()
    compatible = [
      self._read(site, (*op.operands, *op.results), known)
      for site, op in self._find_copies(operations(copy, {*self._names, _HIDDEN}))
    ]
    return [
      Instance(site, splits, c, sources) for (site, splits, sources), c in zip(propagated, compatible, strict=True)
    ]

  def _find_copies(self, ops: Iterable[ir.Operation]) -> Iterator[tuple[Site, ir.Operation]]:
    """Yields each site with its copy among `ops`. Operations that guards inserted have no site, and are skipped."""
    for op in ops:
      if _NUMBER in op.attributes:
        yield self.sites[ir.IntegerAttr(op.attributes[_NUMBER]).value], op

  def _read(self, site: Site, values: Iterable[ir.Value], known: dict[ir.Value, ArraySplit]) -> tuple[ArraySplit, ...]:
    """Returns the splits of `values` in a propagated program; adds them to `known`."""
    splits = []
    for value, shape in zip(values, site.shapes):
      if value not in known:
        sharding = _sharding_of(value, self._lists)
        if sharding is not None and sharding not in self._splits:
          self._splits[sharding] = _split(sharding, len(shape), self._sizes)
        known[value] = ((),) * len(shape) if sharding is None else self._splits[sharding]
      splits.append(known[value])
    return tuple(splits)


def _sources(op: ir.Operation) -> Iterator[ir.Value]:
  """Yields the operands of an operation; in place of an operand that Shardy resharded, the array before the reshard."""
  for value in op.operands:
    owner = value.owner
    yield value if isinstance(owner, ir.Block) or owner.name != 'sdy.reshard' else owner.operands[0]


def make_collectives_explicit(module: ir.Module) -> ir.Operation:
  """Returns a copy of a lowered program in which every communication between devices is an operation.

  Calls are inlined, and shardings propagated. Arrays keep their global shapes; `split_of` says how they are split.
  """
  with module.context:
    copy = module.operation.clone()
    inline_calls(copy)
    _reshape_where_nothing_is_repeated(copy)
    run_passes(_PROPAGATE, copy)
    sizes = mesh_axes(module)
    _hide(op for op in operations(copy, {_RESHAPE}) if _has_uneven_factors(op, sizes))
    for passes in (_MAKE_COMPATIBLE, _COMMUNICATE):
      run_passes(passes, copy)
  return copy


def mesh_axes(module: ir.Module) -> dict[str, int]:
  """Returns the sizes of a module's mesh axes that are larger than 1; {} if it runs on one device."""
  return next(({axis.name: axis.size for axis in axes} for _, axes in _meshes(module) if axes), {})


def split_of(value: ir.Value, sizes: Mapping[str, int]) -> ArraySplit:
  """Returns how a value of a propagated program is split over a mesh of these sizes."""
  owner, rank = value.owner, len(value.type.shape)
  if not isinstance(owner, ir.Block) and owner.operation.name == 'sdy.manual_computation':
    results = sdy.TensorShardingPerValueAttr(owner.operation.attributes['out_shardings']).shardings
    return _split(results[ir.OpResult(value).result_number], rank, sizes)
  return _split(_sharding_of(value), rank, sizes)


def is_closed(constraint: ir.Operation) -> bool:
  """Whether a constraint determines how every dimension is split, and leaves no dimension to XLA."""
  dims = sdy.TensorShardingAttr(constraint.attributes['sharding']).dimension_shardings
  return all(sdy.DimensionShardingAttr(dim).is_closed for dim in dims)


def callee(call: ir.Operation) -> str:
  """Returns the name of the function that a call calls."""
  return ir.FlatSymbolRefAttr(call.attributes['callee']).value


def operation_name(op: ir.Operation) -> str:
  """Returns the name of an operation inside its function, not preceded by the names of calls that lead there."""
  return str(op.location).partition('"')[2].partition('"')[0]


def _enclosing(op: ir.Operation, callers: Mapping[str, ir.Operation]) -> Iterator[ir.Operation]:
  """Yields the operations around an operation, innermost first, also through the calls of functions."""
  parent = op.parent
  while parent is not None:
    outer = parent.operation
    yield outer
    call = callers.get(ir.StringAttr(outer.attributes['sym_name']).value) if outer.name == 'func.func' else None
    if call is not None:
      yield call
    parent = outer.parent if call is None else call.parent


def functions_of(module: ir.Operation) -> dict[str, ir.Operation]:
  """Returns the functions of a module, by the names that `callee` returns."""
  found = (op.operation for op in module.regions[0].blocks[0].operations if op.operation.name == 'func.func')
  return {ir.StringAttr(op.attributes['sym_name']).value: op for op in found}


def inline_calls(module: ir.Operation, named: bool = True) -> None:
  """Replaces all calls by the bodies of their functions, as XLA does before it propagates.

  If `named`, the name of an operation then begins with the names of the calls that enclosed it.
  """
  functions, done = functions_of(module), set()

  def inline(name: str) -> None:
    """Inlines the calls in a function, first those in the functions that it calls."""
    done.add(name)
    for call in operations(functions[name], {'func.call'}):
      if callee(call) not in done:
        inline(callee(call))
      function = functions[callee(call)].clone()
      body, prefix = function.regions[0].blocks[0], operation_name(call) if named else ''
      for argument, operand in zip(body.arguments, call.operands):
        argument.replace_all_uses_with(operand)
      *inside, returned = (op.operation for op in body.operations)
      for op in inside:
        if named:
          op.location = ir.Location.name(f'{prefix}/{operation_name(op)}')
        op.move_before(call)
      for old, new in zip(call.results, returned.operands):
        old.replace_all_uses_with(new)
      call.erase()
      function.erase()

  for name in functions:
    if name not in done:
      inline(name)


def _reshape_where_nothing_is_repeated(module: ir.Operation) -> None:
  """Turns broadcasts that only add dimensions of size 1 into reshapes, as XLA does; Shardy handles reshapes earlier."""
  for op in operations(module, {'stablehlo.broadcast_in_dim'}):
    (before,), (after,) = op.operands, op.results
    if math.prod(before.type.shape) == math.prod(after.type.shape):
      with ir.InsertionPoint(op), op.location:
        after.replace_all_uses_with(stablehlo.ReshapeOp(after.type, before).result)
      op.erase()


def _hide(reshapes: Iterable[ir.Operation]) -> None:
  """Replaces reshapes by operations that are opaque to Shardy.

  For some reshapes, Shardy aborts the process when it looks for splits that need no communication.
  """
  for op in reshapes:
    (before,), (after,) = op.operands, op.results
    with ir.InsertionPoint(op), op.location:
      hidden = stablehlo.CustomCallOp([after.type], [before], call_target_name='praxis_lite.reshape')
    for name in ('sdy.sharding', _NUMBER):
      if name in op.attributes:
        hidden.operation.attributes[name] = op.attributes[name]
    after.replace_all_uses_with(hidden.results[0])
    op.erase()


def _has_uneven_factors(reshape: ir.Operation, sizes: Mapping[str, int]) -> bool:
  """Whether a reshape merges several dimensions into one, or divides one, and axes do not split these factors evenly.

  An example is a reshape of float32[4, 3, 36] to [432] over ('b', 'c', 'd'), on a mesh b 3 x c 2 x d 2.
  """
  values = (*reshape.operands, *reshape.results)
  ends = {end for x in values for end in itertools.accumulate(x.type.shape[::-1], operator.mul)}
  for value in values:
    below = 1  # The product of the sizes of all dimensions minor to this one.
    for size, axes in zip(value.type.shape[::-1], split_of(value, sizes)[::-1]):
      bounds = [size * below, *sorted((n for n in ends if below < n < size * below), reverse=True), below]
      if axes and not _divide_evenly([*itertools.pairwise(bounds)], axes):
        return True
      below *= size
  return False


def _divide_evenly(bounds: Iterable[tuple[int, int]], axes: Iterable[Axis]) -> bool:
  """Whether axes split the factors of a dimension evenly, major factors first; a pair (a, b) is the factor a / b."""
  factors, left = iter(bounds), 1
  for axis in axes:
    size = axis.size
    while size > 1:
      if left == 1:
        major, minor = next(factors, (1, 1))
        left = major // minor
        if major % minor or left <= 1:
          return False
      common = min(size, left)
      if size % common or left % common:
        return False
      size, left = size // common, left // common
  return True


def _manual_axes(op: ir.Operation, callers: Mapping[str, ir.Operation]) -> set[str]:
  """Returns the mesh axes of all `shard_map`s around `op`, including those around calls of the function it is in."""
  axes: set[str] = set()
  for outer in _enclosing(op, callers):
    if outer.name == 'sdy.manual_computation':
      manual = sdy.ManualAxesAttr(outer.attributes['manual_axes'])
      axes.update(manual[i] for i in range(len(manual)))
  return axes


def _meshes(module: ir.Module) -> Iterator[tuple[str, tuple[Axis, ...]]]:
  """Yields the meshes of a module, by symbol, with their axes that are larger than 1."""
  for op in module.body.operations:
    if op.operation.name == 'sdy.mesh':
      axes = (sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(op.operation.attributes['mesh']).axes)
      sizes = tuple(Axis(axis.name, axis.size) for axis in axes if axis.size > 1)
      yield ir.StringAttr(op.operation.attributes['sym_name']).value, sizes


def operations(root: ir.Operation, names: Collection[str] | None = None) -> list[ir.Operation]:
  """Returns the operations in `root` with one of `names`, or all; nested operations precede those around them."""
  found = []

  def visit(op: ir.Operation) -> ir.WalkResult:
    if names is None or op.name in names:
      found.append(op.operation)
    return ir.WalkResult.ADVANCE

  root.walk(visit)
  return found


def _sharding_of(
  value: ir.Value, lists: dict[ir.Attribute, Sequence[ir.Attribute]] | None = None
) -> ir.Attribute | None:
  """Returns the sharding of a value in a propagated program; None if the value is replicated. `lists` is a cache."""
  lists = {} if lists is None else lists
  owner = value.owner
  if isinstance(owner, ir.Block):
    number, parent = ir.BlockArgument(value).arg_number, owner.owner.operation
    if parent.name == 'func.func':
      if 'arg_attrs' not in parent.attributes:
        return None
      attributes = ir.DictAttr(ir.ArrayAttr(parent.attributes['arg_attrs'])[number])
      return attributes['sdy.sharding'] if 'sdy.sharding' in attributes else None  # noqa: SIM401
    return _result_sharding(parent, number, lists) if parent.name == 'stablehlo.while' else None
  return _result_sharding(owner.operation, ir.OpResult(value).result_number, lists)


def _result_sharding(
  op: ir.Operation, number: int, lists: dict[ir.Attribute, Sequence[ir.Attribute]]
) -> ir.Attribute | None:
  attributes = op.attributes
  if 'sdy.sharding' in attributes:
    of_results = attributes['sdy.sharding']
    if of_results not in lists:
      lists[of_results] = [*sdy.TensorShardingPerValueAttr(of_results).shardings]
    return lists[of_results][number]
  # Constraints have 'sharding', and collectives 'out_sharding'.
  return next((attributes[name] for name in ('sharding', 'out_sharding') if name in attributes), None)


def _split(sharding: ir.Attribute | None, rank: int, sizes: Mapping[str, int]) -> ArraySplit:
  if sharding is None:
    return ((),) * rank

  def axis(reference: ir.Attribute) -> Axis:
    reference = sdy.AxisRefAttr(reference)
    part = reference.sub_axis_info
    if part is None:
      return Axis(reference.name, sizes.get(reference.name, 1))
    part = sdy.SubAxisInfoAttr(part)
    return Axis(reference.name, part.size, part.pre_size)

  dims = (sdy.DimensionShardingAttr(dim) for dim in sdy.TensorShardingAttr(sharding).dimension_shardings)
  return tuple(tuple(a for a in map(axis, dim.axes) if a.size > 1) for dim in dims)


def count_parts(axes: Sequence[Axis]) -> int:
  """Returns the number of parts into which axes split a dimension."""
  return math.prod(axis.size for axis in axes)
