"""Detects how an optax transformation treats stacks and parts of variables, by exact computation on small variables.

    is_stackable      does it treat a stack of layers like each layer separately?
    is_elementwise    does it treat a part of a variable in the same way if the rest is missing?
    looks_at_all      does its update of one variable depend on several variables?
    slot_axes         which axis of its variable does each dimension of a slot run along?

The programs (jaxprs) of `init` and `update` are traced for small variables with the same ranks and order of sizes. Then
a few steps are computed on random numbers modulo a prime, and compared: a stack with its layers, a variable with its
part. Additions and multiplications are exact, in any order. Every other operation returns a random number that depends
on all its operands, even for a maximum or a `select`, whose value depends on one operand. So equal formulas give equal
results, and different formulas give different results, except with a probability of 10^-9. The result of an unknown
operation also depends on the shapes of its operands. So in doubt, the answer is no, as for L-BFGS, which writes to rows
of its slots in a loop.

An optimizer that treats small variables differently from large ones, such as Adafactor, has other operations in its
programs for small ones. Results for small variables then prove nothing: `is_stackable` and `is_elementwise` return
False, and `slot_axes` returns no axes. The result of `looks_at_all` counts nevertheless.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from praxis_lite.common.jax_internals import UnknownJax
from praxis_lite.common.jax_internals.programs import (
  ELEMENTWISE,
  called_program,
  inner_programs,
  run_program,
  scan_sizes,
  strip_constants,
)
from praxis_lite.common.trees import NestedDict, Path, leaves, leaves_by_path, map_with_path
from praxis_lite.sharding.slots import owner_of
from praxis_lite.sharding.weights import WeightHParams

# (learning rate) -> the transformation
_Build = Callable[[jax.Array], optax.GradientTransformationExtraArgs]
# A function of a variable's path, declaration and array. It returns what a tree has for the variable: the array itself,
# a part of it, or a list of its layers.
_View = Callable[[Path, WeightHParams, np.ndarray], Any]

_PRIME = 2**31 - 1  # The product of two numbers fits in 64 bits.
_SMALLEST = 3  # A part of a dimension of this size still has several entries.
_MAX_LOOP = 64
_EXTREMES = {'reduce_max': 'max', 'reduce_min': 'min', 'reduce_and': 'and', 'reduce_or': 'or'}
_CALLS = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call', 'remat', 'checkpoint')
_DRAWS = ('random_', 'threefry')


def is_stackable(build: _Build, weights: NestedDict) -> bool:
  """Whether the transformation that `build` makes treats a stack of layers like the separate layers."""
  small = _shrink(weights)
  stacks, layers = _train(build, small, _whole), _train(build, small, _deal)
  return (
    _acts_alike(build, weights, small)
    and _is_same_view(small, _deal, stacks, layers)
    and _are_stacks(small, stacks, layers)
  )


def is_elementwise(build: _Build, weights: NestedDict) -> bool:
  """Whether a part of a variable gets the same update if the rest of the variable is missing.

  False if the transformation draws random numbers.
  """
  small = _shrink(weights)
  whole, part = _train(build, small, _whole), _train(build, small, _part)
  if whole is None or whole.programs.draws:
    return False
  return _acts_alike(build, weights, small) and _is_same_view(small, _part, whole, part)


def looks_at_all(build: _Build, weights: NestedDict) -> bool:
  """Whether the update of a variable, or of a layer in a stack, depends on other variables or layers.

  The answer is found with small variables, even if the optimizer runs another program for large ones; it is False if
  the optimizer cannot be traced. A wrong answer is harmless, because no layout depends on it: the answer only serves to
  refuse an optimizer whose statistics of all variables would become statistics of each layer. A global norm before an
  Adafactor is found. An optimizer is missed only if it mixes large variables but not small ones.
  """
  small = _shrink(weights)
  runs = [_train(build, small, _deal, changed) for changed in (None, 0, 1)]
  if None in runs:
    return False
  before, *after = [[jax.tree.leaves(tree) for tree in run.updates] for run in runs if run is not None]
  changes = [{i for a, b in zip(before, trees) for i in range(len(a)) if (a[i] != b[i]).any()} for trees in after]
  return bool(set.intersection(*changes))


def slot_axes(build: _Build, weights: NestedDict) -> dict[Path, tuple[int | None, ...]]:
  """Returns a tuple for each slot, by its path: for each dimension of the slot, the matching axis of its variable.

  An axis matches a dimension of the slot if the slot varies along the dimension after a step with variables that vary
  only along the axis. The entry is None for a dimension that matches no axis, or several. Slots without any matching
  axis are left out.
  """
  small, found = _shrink(weights), dict[Path, list[list[int]]]()
  if not _acts_alike(build, weights, small):
    return {}
  for axis in range(max((len(weight.full_shape) for weight in leaves(weights).values()), default=0)):
    run = _train(build, small, functools.partial(_along, axis), num_steps=1)
    if run is None:
      return {}
    for path, slot in leaves_by_path(run.state).items():
      for dim, axes in enumerate(found.setdefault(path, [[] for _ in slot.shape])):
        if np.diff(slot, axis=dim).any():
          axes.append(axis)
  return {
    path: tuple(axes[0] if len(axes) == 1 else None for axes in dims)
    for path, dims in found.items()
    if any(len(axes) == 1 for axes in dims) and owner_of(path, leaves(weights)) is not None
  }


# ---------------------------------------------------------------- small variables


def _shrink(weights: NestedDict) -> NestedDict:
  """Returns the declarations with small sizes. The order of sizes stays the same, and 0 and 1 do not change."""
  sizes = sorted({size for weight in leaves(weights).values() for size in weight.full_shape if size > 1})
  small = {0: 0, 1: 1} | {size: _SMALLEST + i for i, size in enumerate(sizes)}

  def shrink(weight: WeightHParams) -> WeightHParams:
    shape, prefix = (tuple(small[size] for size in sizes) for sizes in (weight.shape, weight.repeat_prefix))
    return dataclasses.replace(weight, shape=shape, repeat_prefix=prefix)

  return jax.tree.map(shrink, weights)


def _whole(path: Path, weight: WeightHParams, x: np.ndarray) -> np.ndarray:
  return x


def _part(path: Path, weight: WeightHParams, x: np.ndarray) -> np.ndarray:
  """Returns a part of a variable, like a shard: leaves out one index of each dimension that has more than one."""
  for dim, size in enumerate(x.shape):
    x = np.delete(x, _secret(path, dim) % size, dim) if size > 1 else x
  return x


def _deal(path: Path, weight: WeightHParams, x: np.ndarray) -> np.ndarray | list[np.ndarray]:
  """Returns the layers of a stack, with permuted entries; returns other variables unchanged.

  The entries of vectors are permuted across all layers; in arrays of higher rank, each axis is permuted. So results
  differ if they depend on the positions of entries, or on a whole vector.
  """
  if not weight.repeat_prefix:
    return x
  order = np.random.default_rng(0)
  if len(weight.shape) < 2:
    return list(order.permutation(x.reshape(-1)).reshape(-1, *weight.shape))
  return [layer[np.ix_(*map(order.permutation, layer.shape))] for layer in x.reshape(-1, *weight.shape)]


def _along(axis: int, path: Path, weight: WeightHParams, x: np.ndarray) -> np.ndarray:
  """Returns an array whose entries differ only along one axis."""
  return np.broadcast_to(x[tuple(slice(None if i == axis else 1) for i in range(x.ndim))], x.shape)


class _Programs(NamedTuple):
  """The programs of a transformation for variables of some shapes, and the tree of its state."""

  init: ClosedJaxpr
  update: ClosedJaxpr
  state: Any

  @property
  def operations(self) -> list[tuple[str, object]]:
    return [*_operations(self.init), *_operations(self.update)]

  @property
  def draws(self) -> bool:
    """Whether the programs draw random numbers."""
    return any(name.startswith(_DRAWS) for name, _ in self.operations)


@functools.lru_cache(maxsize=8)  # Several of the functions above need the same programs.
def _trace(
  build: _Build, shapes: tuple[jax.ShapeDtypeStruct, ...], structure: jax.tree_util.PyTreeDef
) -> _Programs | None:
  """Returns the programs of a transformation for variables with these shapes; None if it cannot be traced for them."""
  tree, scalar = jax.tree.unflatten(structure, shapes), jax.ShapeDtypeStruct((), jnp.float32)
  try:
    init, state = jax.make_jaxpr(lambda rate, p: build(rate).init(p), return_shape=True)(scalar, tree)
    update = jax.make_jaxpr(lambda rate, loss, g, s, p: build(rate).update(g, s, p, value=loss))(
      scalar, scalar, tree, state, tree
    )
  except Exception:  # User code may raise anything if it needs other variables or more arguments.
    return None
  return _Programs(init, update, state)


def _operations(program: Jaxpr | ClosedJaxpr) -> Iterator[tuple[str, object]]:
  """Yields the name and the reduced axes, if any, of each operation in a program and its inner programs."""
  for eqn in strip_constants(program).eqns:
    yield eqn.primitive.name, eqn.params.get('axes')
    for inner in inner_programs(eqn):
      yield from _operations(inner)


def _acts_alike(build: _Build, weights: NestedDict, small: NestedDict) -> bool:
  """Whether a transformation consists of the same operations for small variables as for the declared ones.

  Slots that belong to no variable must also have the same shapes.
  """
  found = set[Any]()
  for tree in (weights, small):
    programs = _trace(build, *_flatten(jax.tree.map(lambda weight: weight.as_struct(), tree)))
    if programs is None:
      return False
    slots = leaves_by_path(programs.state).items()
    others = tuple((path, slot.shape) for path, slot in slots if owner_of(path, leaves(weights)) is None)
    found.add((tuple(programs.operations), others))
  return len(found) == 1


def _flatten(tree: Any) -> tuple[tuple[Any, ...], jax.tree_util.PyTreeDef]:
  found, structure = jax.tree.flatten(tree)
  return tuple(found), structure


# ---------------------------------------------------------------- training


class _Run(NamedTuple):
  """The results of several steps of a transformation: its programs, the updates of each step, and the last state."""

  programs: _Programs
  updates: list[Any]
  state: Any


def _train(
  build: _Build, small: NestedDict, view: _View, changed: int | None = None, num_steps: int = 3
) -> _Run | None:
  """Takes a few steps on random numbers; None if the transformation cannot be traced.

  Args:
    build, small: the transformation, and the declarations of small variables.
    view: converts each variable to what the transformation gets.
    changed: 0 gives other numbers to the arrays 0, 2, 4, ..., and 1 to the arrays 1, 3, 5, ...; None changes no array.
    num_steps: number of steps. The factor of a slot that starts at zero has an effect only from the second step on.
  """

  def struct(path: Path, weight: WeightHParams) -> Any:
    seen = view(path, weight, np.zeros(weight.full_shape, bool))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, weight.as_struct().dtype), seen)

  structs, structure = _flatten(map_with_path(struct, small))
  programs = _trace(build, structs, structure)
  if programs is None:
    return None

  def numbers(name: str) -> list[np.ndarray]:
    drawn = jax.tree.leaves(map_with_path(lambda path, w: view(path, w, _draw(w.full_shape, name, path)), small))
    return [_mix('changed', x) if i % 2 == changed else x for i, x in enumerate(drawn)]

  params, rate, loss, updates = numbers('params'), _draw((), 'rate'), _draw((), 'loss'), []
  state = _compute(programs.init, [rate, *params])
  for step in range(num_steps):
    outputs = _compute(programs.update, [rate, loss, *numbers(f'gradients of step {step}'), *state, *params])
    changes, state = outputs[: len(params)], outputs[len(params) :]
    params = [(param + change) % _PRIME for param, change in zip(params, changes)]
    updates.append(jax.tree.unflatten(structure, changes))
  return _Run(programs, updates, jax.tree.unflatten(jax.tree.structure(programs.state), state))


def _is_same_view(small: NestedDict, view: _View, whole: _Run | None, seen: _Run | None) -> bool:
  """Whether two runs agree: `seen`, with views of the variables, and `whole`, with the variables themselves.

  They agree if the updates in `seen` equal the same views of the updates in `whole`. False if a run is None.
  """
  if whole is None or seen is None:
    return False
  expected = [map_with_path(view, small, tree) for tree in whole.updates]
  return jax.tree.all(jax.tree.map(np.array_equal, expected, seen.updates))


def _are_stacks(small: NestedDict, stacks: _Run | None, layers: _Run | None) -> bool:
  """Whether the slots of a stack have the shapes of stacks: those of the slots of its layers, stacked.

  `stacks` is a run with stacks, and `layers` one with their layers; False if a run is None. Scalars, and slots that
  belong to no stack, are ignored.
  """
  if stacks is None or layers is None:
    return False
  declared = leaves(small)
  stack_of = {
    (*path, str(i)): path for path, w in declared.items() if w.repeat_prefix for i in range(math.prod(w.repeat_prefix))
  }
  shapes = {path: slot.shape for path, slot in leaves_by_path(stacks.state).items()}
  for path, slot in leaves_by_path(layers.state).items():
    owner = owner_of(path, stack_of)
    if slot.shape and owner is not None:
      start = next(i for i in range(len(path)) if path[i : i + len(owner)] == owner)
      stack = (*path[:start], *stack_of[owner], *path[start + len(owner) :])
      if shapes.get(stack) != (*declared[stack_of[owner]].repeat_prefix, *slot.shape):
        return False
  return True


# ---------------------------------------------------------------- computing modulo a prime


def _compute(program: Jaxpr | ClosedJaxpr, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
  """Returns the results of a program, as numbers modulo the prime."""
  return run_program(program, arguments, _results, _constant)


def _results(eqn: JaxprEqn, operands: list[np.ndarray]) -> list[np.ndarray]:
  name, params, called = eqn.primitive.name, eqn.params, called_program(eqn)
  shapes = [getattr(x.aval, 'shape', ()) for x in eqn.outvars]
  if name in _CALLS and called is not None:
    return _compute(called, operands)
  if name == 'split':
    return np.split(operands[0], np.cumsum(params['sizes'])[:-1], params['axis'])
  if name == 'cond':
    branches = [_compute(branch, operands[1:]) for branch in params['branches']]
    return [_mix('choice', operands[0], *results) for results in zip(*branches)]
  if name == 'scan' and _is_loop(eqn):
    fixed = scan_sizes(eqn).consts
    for _ in range(params['length']):
      operands[fixed:] = _compute(params['jaxpr'], operands)
    return operands[fixed:]
  if name.startswith(_DRAWS) or (operands and all((x == _NOISE).all() for x in operands)):
    return [np.full(shape, _NOISE) for shape in shapes]
  result = _result(eqn, name, operands, shapes[0] if shapes else ())
  if result is not None:
    return [result]
  seen = name, str(params), *((x.shape, x.tobytes()) for x in operands)
  return [_draw(shape, *seen, i) for i, shape in enumerate(shapes)]


def _is_loop(eqn: JaxprEqn) -> bool:
  """Whether a scan is short and has no per-iteration inputs or outputs, like a scan that `fori_loop` makes."""
  try:
    sizes = scan_sizes(eqn)
  except UnknownJax:
    return False
  return eqn.params['length'] <= _MAX_LOOP and not sizes.slices and len(eqn.outvars) == sizes.carry


def _result(eqn: JaxprEqn, name: str, operands: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
  """Returns the result of an operation with one result; None if the operation is not known."""
  params = eqn.params
  if name in ELEMENTWISE:
    return _entrywise(eqn, name, operands)
  if name == 'concatenate':
    return np.concatenate(operands, params['dimension'])
  x = operands[0] if operands else np.zeros(())
  if name in ('reshape', 'squeeze', 'expand_dims'):
    return x.reshape(shape)
  if name == 'broadcast_in_dim':
    sizes = dict(zip(params['broadcast_dimensions'], x.shape))
    return np.broadcast_to(x.reshape([sizes.get(dim, 1) for dim in range(len(shape))]), shape)
  if name == 'reduce_sum':
    return x.sum(tuple(params['axes'])) % _PRIME
  if name in _EXTREMES:
    rest = np.moveaxis(x, params['axes'], range(len(params['axes']))).reshape(-1, *shape)
    while half := len(rest) // 2:
      rest = np.concatenate([_extreme(_EXTREMES[name], rest[:half], rest[half : 2 * half]), rest[2 * half :]])
    return rest[0]
  if name == 'dot_general' and params['dimension_numbers'][0] == ((*range(x.ndim),),) * 2:
    return (x * operands[1] % _PRIME).sum() % _PRIME
  return None


def _entrywise(eqn: JaxprEqn, name: str, operands: list[np.ndarray]) -> np.ndarray:
  is_inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)  # type: ignore[attr-defined]
  x, y = operands[0], operands[-1]
  if name in ('copy', 'copy_p', 'stop_gradient') or (name == 'convert_element_type' and is_inexact):
    return x
  if name in ('add', 'add_any'):
    return (x + y) % _PRIME
  if name == 'sub':
    return (x + _PRIME - y) % _PRIME
  if name == 'neg':
    return (_PRIME - x) % _PRIME
  if name == 'mul':
    return x * y % _PRIME
  if name == 'div' and is_inexact:
    return x * _power(y, _PRIME - 2) % _PRIME
  if name in _EXTREMES.values():
    return _extreme(name, x, y)
  return _mix(f'{name} {eqn.params}', *operands)


def _power(x: np.ndarray, exponent: int) -> np.ndarray:
  """Returns x^exponent modulo the prime; with the exponent _PRIME - 2, this is the inverse of x."""
  power = x
  for bit in f'{exponent:b}'[1:]:
    power = power * power % _PRIME
    if bit == '1':
      power = power * x % _PRIME
  return power


def _extreme(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns numbers that stand for the maximum or minimum of x and y.

  If it is applied to several operands in turn, the result does not depend on their order.
  """
  offset = _secret(name)
  return ((x + offset) % _PRIME * ((y + offset) % _PRIME) + (_PRIME - offset)) % _PRIME


def _mix(name: str, *operands: np.ndarray) -> np.ndarray:
  """Returns numbers that stand for an elementwise function of the operands."""
  total = sum((_secret(name, i) * x % _PRIME for i, x in enumerate(operands)), start=np.uint64(_secret(name)))
  return _power(np.asarray(total % _PRIME), 5)


def _draw(shape: tuple[int, ...], *key: object) -> np.ndarray:
  """Returns random numbers of a shape that depend only on `key` and the shape."""
  return np.asarray(np.random.default_rng(_secret(*key)).integers(1, _PRIME, shape, np.uint64))


@functools.lru_cache(maxsize=1024)
def _secret(*key: object) -> int:
  """Returns a random number that depends only on `key`."""
  return 1 + int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) % (_PRIME - 1)


_NOISE = np.uint64(_secret('noise'))


def _constant(constant: Any) -> np.ndarray:
  if jnp.issubdtype(getattr(constant, 'dtype', np.float32), jax.dtypes.extended):
    return np.full(jnp.shape(constant), _NOISE)
  return np.array([_number(value) for value in np.ravel(constant).tolist()], np.uint64).reshape(np.shape(constant))


@functools.lru_cache(maxsize=1024)
def _number(value: float) -> int:
  """Returns a constant modulo the prime; a fraction becomes the quotient of two integers."""
  if not math.isfinite(value):
    return _secret('constant', value)
  numerator, denominator = value.as_integer_ratio()
  return numerator * pow(denominator, -1, _PRIME) % _PRIME
