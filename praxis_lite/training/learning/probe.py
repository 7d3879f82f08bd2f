"""Finds out how an optax transformation treats stacks and parts of variables, from its program, without running it.

    is_stackable      does it treat a stack of layers like each layer separately?
    is_elementwise    does it treat a part of a variable like that part of the whole?
    looks_at_all      does its update of one variable depend on sums over several variables?

The programs (jaxprs) of `init` and `update` are traced on shapes, and compared: with stacks and with lists of their
layers, or with variables of two sizes. Each array in a program is described by

    form      the formula of one entry, in terms of the same entry of the gradient, the parameter and the slots, of
              scalars, and of sums over variables, where a sum over a stack is written as sums over its layers
    labels    for each dimension, the axes of the variable that it runs along
    marks     the variables whose other entries it depends on, and whether it draws random numbers

Programs with the same forms compute the same at every step, by induction: slots that are equal before an update are
equal after it. The form of an unknown operation contains all shapes, so it differs between the two programs. So
`is_stackable` and `is_elementwise` are true only if that is proved. L-BFGS is not understood, because it writes to rows
of its slots in a loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.typing import ArrayLike

from praxis_lite.common.jax_internals import UnknownJax
from praxis_lite.common.jax_internals.programs import called_program, scan_sizes
from praxis_lite.common.trees import NestedDict, Path, leaves_by_path, map_with_path
from praxis_lite.sharding.slots import owner_of
from praxis_lite.sharding.weights import WeightHParams

# Builds the transformation for a learning rate.
Build = Callable[[jax.Array], optax.GradientTransformationExtraArgs]
Shape = tuple[int, ...]

# JAX primitives that treat each entry separately.
_ELEMENTWISE_NAMES = """
  abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
  clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
  igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
  polygamma population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
  shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
# Reductions that may be computed in parts, and the primitives that combine the results.
_EXTREMES = {'reduce_max': 'max', 'reduce_min': 'min', 'reduce_and': 'and', 'reduce_or': 'or'}
_CALLS = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call', 'remat', 'checkpoint')
_MAX_SCAN = 64


def is_stackable(build: Build, weights: NestedDict) -> bool:
  """Whether the transformation that `build` makes treats a stack of layers like its layers one by one."""
  reader = _Reader()
  stack, layers = (reader.program(build, map_with_path(f, weights)) for f in (_stack, _list_of_two))
  return _alike(stack, layers)


def is_elementwise(build: Build, weights: NestedDict) -> bool:
  """Whether a transformation treats parts of variables like the whole; false if it draws random numbers."""
  reader = _Reader()
  whole, part = (reader.program(build, map_with_path(f, weights)) for f in (_variable, _resize))
  return _alike(whole, part) and all(isinstance(m, _Slot) for values in whole.values() for v in values for m in v.marks)


def looks_at_all(build: Build, weights: NestedDict) -> bool:
  """Whether the update of a variable, or of a layer, depends on sums over several of them."""
  program = _Reader().program(build, map_with_path(_list_of_two, weights))
  return any(sum(isinstance(m, _Entries) for m in v.marks) > 1 for values in program.values() for v in values)


def slot_axes(build: Build, weights: NestedDict) -> dict[Path, tuple[int | None, ...]]:
  """Returns, by path, for each slot that runs along its variable, the variable's axis of each dimension, or None."""
  steps = _Reader().steps(build, map_with_path(_variable, weights))
  axes: dict[Path, tuple[int | None, ...]] = {}
  for path, (_, slot, _) in steps.slots.items():
    if slot.owner is not None and slot.owner.path == owner_of(path, steps.arrays):
      axes[path] = tuple(label[0] if label and len(label) == 1 else None for label in slot.labels)
  return axes


# ---------------------------------------------------------------- variables


@dataclasses.dataclass(frozen=True)
class _Variable:
  """An array that a transformation updates: a declared variable, or some of its layers.

  The first `depth` dimensions index layers.
  """

  path: Path
  layers: tuple[int, ...]
  shape: Shape
  dtype: np.dtype
  depth: int = 0

  @property
  def labels(self) -> tuple[tuple[int, ...], ...]:
    """Labels of an array that runs along it. Axes of a layer are numbered from 0; axes of the stack are negative."""
    return tuple((i - self.depth,) if size > 1 else () for i, size in enumerate(self.shape))


def _variable(path: Path, weight: WeightHParams) -> _Variable:
  return _Variable(path, (0,), weight.full_shape, weight.as_struct().dtype)


def _resize(path: Path, weight: WeightHParams) -> _Variable:
  """Returns the variable with other sizes: large ones become smaller. A dimension of size 1 is never split."""
  sizes = tuple(size // 2 if size > 3 else size * 2 if size > 1 else 1 for size in weight.full_shape)
  return dataclasses.replace(_variable(path, weight), shape=sizes)


def _stack(path: Path, weight: WeightHParams) -> _Variable:
  """Returns the variable as a stack of layers with the layer indices of `_list_of_two`, whatever their number."""
  depth = len(weight.repeat_prefix)
  return dataclasses.replace(_variable(path, weight), layers=tuple(range(2**depth)), depth=depth)


def _list_of_two(path: Path, weight: WeightHParams) -> _Variable | list[_Variable]:
  """Returns a list of layers, two along each dimension of the stack."""
  dtype = weight.as_struct().dtype
  layers = [_Variable(path, (i,), weight.shape, dtype) for i in range(2 ** len(weight.repeat_prefix))]
  return layers if weight.repeat_prefix else layers[0]


# ---------------------------------------------------------------- descriptions of arrays

Atom = int  # The number of a formula; equal formulas have the same number.
Terms = tuple[tuple[Atom, float], ...]  # A sum of atoms, each with its coefficient.
Label = tuple[int, ...] | None  # The axes of its variable that a dimension runs along; None: unknown or mixed axes.

_ONE: Atom = 0
_NOISE, _UNKNOWN = 'noise', 'unknown'


class _Entries(NamedTuple):  # The value depends on other entries of a layer of a variable.
  path: Path
  layer: int


class _Slot(NamedTuple):  # The value depends on a slot.
  name: Path


Mark = _Entries | _Slot | str  # A string is _NOISE or _UNKNOWN.


class _Value(NamedTuple):
  """The description of an array; see above. `owner` is the variable that its labels refer to."""

  form: Terms
  shape: Shape
  labels: tuple[Label, ...]
  owner: _Variable | None = None
  marks: frozenset[Mark] = frozenset()

  @property
  def is_uniform(self) -> bool:
    return not any(label or label is None for label in self.labels)

  @property
  def axes(self) -> list[int]:
    """The axes that it runs along."""
    return [axis for label in self.labels for axis in label or ()]

  @property
  def labels_in_layer(self) -> list[Label]:
    """Its labels without the axes of a stack."""
    labels = [label and tuple(axis for axis in label if axis >= 0) for label in self.labels]
    return [new for old, new in zip(self.labels, labels) if new or old == new]


Program = dict[Path, list[_Value]]  # The values of each output: one, or one for each layer.


def _alike(a: Program, b: Program) -> bool:
  """Whether there are outputs, and outputs with the same name have the same formula and axes."""
  if not a or a.keys() != b.keys():
    return False
  pairs = [(x, y) for name in a for x in a[name] for y in b[name]]
  return all(
    x.form == y.form and (x.labels_in_layer == y.labels_in_layer or (x.is_uniform and y.is_uniform)) for x, y in pairs
  )


def _join(values: Sequence[_Value], rank: int) -> tuple[tuple[Label, ...], _Variable | None] | None:
  """Returns labels and owner of an entrywise result; None if the operands run along different axes."""
  owners = {value.owner for value in values if value.owner is not None}
  labels = [{value.labels[i] for value in values if value.shape} - {()} for i in range(rank)]
  if len(owners) > 1 or any(len(different) > 1 for different in labels):
    return None
  return tuple(next(iter(one), ()) for one in labels), next(iter(owners), None)


def _marks(values: Sequence[_Value]) -> frozenset[Mark]:
  return frozenset().union(*(value.marks for value in values))


class _Steps(NamedTuple):
  """The results of `init` and `update`: the updates, and each slot by path: initially, before a step, and after it."""

  arrays: dict[Path, _Variable]
  updates: list[_Value]
  slots: dict[Path, tuple[_Value, _Value, _Value]]


# ---------------------------------------------------------------- reading a program


class _Reader:
  """Reads programs. Forms made by the same reader may be compared.

  The method `_on_<primitive>` describes the result of a JAX primitive, or returns None if it cannot.
  """

  def __init__(self) -> None:
    self._atoms: dict[Hashable, Atom] = {_ONE: _ONE}
    self._members: dict[tuple[str, Terms], frozenset[Terms]] = {}  # The operands of a maximum, minimum, ...
    self._entries: dict[Terms, list[_Value]] = {}  # The entries of a vector made of scalars.

  def program(self, build: Build, variables: NestedDict) -> Program:
    """Returns the updates, and the slots that they may depend on, before and after a step."""
    steps, program = self.steps(build, variables), Program()
    for variable, value in zip(steps.arrays.values(), steps.updates):
      program.setdefault(('update', *variable.path), []).append(self._value_of(variable, value, is_update=True))
    used = _marks([value for values in program.values() for value in values])
    for path, values in steps.slots.items():
      owner = steps.arrays.get(owner_of(path, steps.arrays) or ())
      name = _slot_name(path, steps.arrays)
      if _Slot(name) in used:
        for kind, value in zip(('first slot', 'slot', 'new slot'), values):
          program.setdefault((kind, *name), []).append(self._value_of(owner, value))
    return program

  def steps(self, build: Build, variables: NestedDict) -> _Steps:
    """Reads `init` and `update`; the result is empty if the transformation cannot be traced separately."""
    arrays = leaves_by_path(variables)
    shapes, structure = jax.tree.flatten(jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), variables))
    traced = _trace(build, tuple(shapes), structure)
    if traced is None:
      return _Steps({}, [], {})
    init, update, state = traced
    rate, loss = (_Value(self._atom(name), (), ()) for name in ('rate', 'loss'))
    params, grads = ([_Value(self._atom(name), v.shape, v.labels, v) for v in arrays.values()] for name in ('p', 'g'))
    paths = list(leaves_by_path(state))
    names = [_slot_name(path, arrays) for path in paths]
    first = self._run(init, [rate, *params])
    slots = [v._replace(form=self._atom('slot', n), marks=v.marks | {_Slot(n)}) for v, n in zip(first, names)]
    while True:  # Until it is known what slots may hold: zeros become moments in the first step.
      outputs = self._run(update, [rate, loss, *grads, *slots, *params])
      updates, after = outputs[: len(grads)], outputs[len(grads) :]
      before, slots = slots, [self._either(*pair) for pair in zip(slots, after)]
      if before == slots:
        return _Steps(arrays, updates, dict(zip(paths, zip(first, slots, after))))

  def _value_of(self, owner: _Variable | None, value: _Value, is_update: bool = False) -> _Value:
    """Returns an output of `owner`; a value that runs along another variable gets a unique form."""
    if value.owner not in (None, owner):
      return value._replace(form=self._atom('of', value.owner, value.form), marks=value.marks | {_UNKNOWN})
    if is_update and owner is not None and not value.is_uniform and value.labels != owner.labels:
      return value._replace(marks=value.marks | {_UNKNOWN})
    return value

  def _either(self, slot: _Value, new: _Value) -> _Value:
    """Returns a slot that may also hold `new`."""
    joined = _join([slot, new], len(slot.shape))
    labels, owner = joined or ((None,) * len(slot.shape), None)
    unknown: set[Mark] = set() if joined else {_UNKNOWN}
    return slot._replace(labels=labels, owner=owner, marks=slot.marks | new.marks | unknown)

  def _atom(self, *key: Hashable) -> Terms:
    return ((self._atoms.setdefault(key, len(self._atoms)), 1.0),)

  def _run(self, program: ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
    known: dict[object, _Value] = dict(zip(program.jaxpr.constvars, map(self._constant, program.consts)))
    known |= dict(zip(program.jaxpr.invars, arguments))

    def value(x: object) -> _Value:
      return self._constant(x.val) if isinstance(x, Literal) else known[x]

    for eqn in program.jaxpr.eqns:
      known.update(zip(eqn.outvars, self._outputs(eqn, [value(x) for x in eqn.invars])))
    return [value(x) for x in program.jaxpr.outvars]

  def _outputs(self, eqn: JaxprEqn, values: list[_Value]) -> list[_Value]:
    name, shape = eqn.primitive.name, _shape(eqn)
    rule = getattr(self, f'_on_{name}', None)
    program = called_program(eqn)
    result: _Value | list[_Value] | None = None
    if rule is not None:
      result = rule(eqn, *values)
    elif name in _CALLS and program is not None:
      result = self._run(program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ()), values)
    elif name in ELEMENTWISE and all(len(v.shape) in (0, len(shape)) for v in values):
      is_inexact = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)  # type: ignore[attr-defined]
      result = self._entrywise(name, str(eqn.params), values, shape, is_inexact)
    elif name in _EXTREMES or name == 'reduce_sum':
      result = self._reduce(name, values[0], eqn.params['axes'])
    if result is None:
      result = self._unknown_values(eqn, values)
    return result if isinstance(result, list) else [result]

  def _unknown_values(self, eqn: JaxprEqn, values: list[_Value]) -> list[_Value]:
    """Describes random numbers, or an unknown operation: its results equal only its own results on equal arrays."""
    noise, name, marks = self._atom(_NOISE), eqn.primitive.name, _marks(values)
    if name.startswith(('random_', 'threefry')) or (values and all(value.form == noise for value in values)):
      return [_Value(noise, shape, _uniform(shape), None, marks | {_NOISE}) for shape in _shapes(eqn)]
    operands = tuple((v.form, v.shape, v.labels, v.owner) for v in values)
    marks |= {_UNKNOWN} if any(v.owner is not None for v in values) else set()
    return [
      _Value(self._atom(name, str(eqn.params), operands, i), shape, (None,) * len(shape), None, marks)
      for i, shape in enumerate(_shapes(eqn))
    ]

  def _constant(self, constant: ArrayLike) -> _Value:
    if jnp.issubdtype(getattr(constant, 'dtype', np.float32), jax.dtypes.extended):
      return _Value(self._atom(_NOISE), jnp.shape(constant), _uniform(jnp.shape(constant)))
    array = np.asarray(constant)
    if array.size and (array == array.flat[0]).all() and array.dtype.kind in 'biuf' and np.isfinite(array.flat[0]):
      return _Value(_sum([(_ONE, float(array.flat[0]))]), array.shape, _uniform(array.shape))
    return _Value(self._atom('constant', array.shape, array.tobytes()), array.shape, (None,) * array.ndim)

  # ---------------------------------------------------------------- entry by entry

  def _entrywise(
    self, name: str, params: str, values: Sequence[_Value], shape: Shape, is_inexact: bool = True
  ) -> _Value | None:
    joined = _join(values, len(shape))
    if joined is None and not any(v.axes for v in values):  # Scalar variables: each is the sum over itself.
      values = [v if v.owner is None else self._reduce_over_owner('reduce_sum', v) for v in values]
      joined = _join(values, len(shape))
    if joined is None:
      return None
    forms = [value.form for value in values]
    form = self._combine(name, forms, is_inexact) if all(value.is_uniform for value in values) else None
    if form is None:
      form = forms[0] if name in ('copy', 'stop_gradient') else self._atom(name, params, *forms)
    return _Value(form, shape, *joined, _marks(values))

  def _combine(self, name: str, forms: Sequence[Terms], is_inexact: bool) -> Terms | None:
    """Returns a form that does not depend on the order in which sums, maxima, ... over variables are combined."""
    if name in _EXTREMES.values():
      members = frozenset().union(*(self._members.get((name, form), frozenset([form])) for form in forms))
      form = self._atom(name, members)
      self._members[name, form] = members
      return form
    if not is_inexact:
      return None
    if name == 'convert_element_type':
      return forms[0]
    if name in ('add', 'sub', 'neg'):
      sign = {'add': 1.0}.get(name, -1.0)
      return _sum([*([] if name == 'neg' else forms[0]), *((atom, sign * c) for atom, c in forms[-1])])
    if name in ('mul', 'div'):
      form, factor = forms[::-1] if name == 'mul' and _is_number(forms[0]) else forms
      if _is_number(factor):
        scale = factor[0][1] if name == 'mul' else 1 / factor[0][1]
        return _sum([(atom, c * scale) for atom, c in form])
    return None

  def _on_cond(self, eqn: JaxprEqn, index: _Value, *values: _Value) -> list[_Value] | None:
    branches = [self._run(branch, values) for branch in eqn.params['branches']]
    made = [self._entrywise('cond', '', [index, *results], results[0].shape) for results in zip(*branches)]
    return None if None in made else [value for value in made if value is not None]

  def _on_scan(self, eqn: JaxprEqn, *values: _Value) -> list[_Value] | None:
    """Describes a loop without per-iteration inputs or outputs, such as `fori_loop` makes."""
    params = eqn.params
    try:
      consts, num_carry, num_slices = scan_sizes(eqn)
    except UnknownJax:
      return None
    constants, carry = list(values[:consts]), list(values[consts:])
    if params['length'] > _MAX_SCAN or num_slices or len(eqn.outvars) != num_carry:
      return None
    for _ in range(params['length']):
      carry = self._run(params['jaxpr'], [*constants, *carry])
    return carry

  # ---------------------------------------------------------------- sums

  def _reduce(self, name: str, value: _Value, axes: Sequence[int]) -> _Value | None:
    kept = [i for i in range(len(value.shape)) if i not in axes]
    reduced = [value.labels[i] for i in axes]
    result = value._replace(shape=tuple(value.shape[i] for i in kept), labels=tuple(value.labels[i] for i in kept))
    times = math.prod(value.shape[i] for i in axes if value.labels[i] == ()) if name == 'reduce_sum' else 1
    if value.form in self._entries:
      total, *others = self._entries[value.form]
      for entry in others:
        total = self._entrywise(_EXTREMES.get(name, 'add'), '', [total, entry], ()) or total._replace(shape=(-1,))
      return total if total.shape == () else None
    along = sorted(axis for label in reduced for axis in label or ())
    if value.owner is not None and along == sorted(axis for label in value.owner.labels for axis in label):
      if not result.axes:
        return self._reduce_over_owner(name, result, times)
    elif value.owner is not None and along and min(along) >= 0 and None not in reduced:  # Within each layer.
      marks = value.marks | {_Entries(value.owner.path, layer) for layer in value.owner.layers}
      return result._replace(form=self._atom(name, 'along', tuple(along), times, value.form), marks=marks)
    if along or None in reduced:
      return None
    if times != 1 and not value.is_uniform:
      return result._replace(form=self._atom('times', times, value.form))
    return result._replace(form=_sum([(atom, c * times) for atom, c in value.form]))

  def _reduce_over_owner(self, name: str, value: _Value, times: int = 1) -> _Value:
    """Returns the reduction of `value` over all entries of its owner, each counted `times` times, layer by layer."""
    owner = value.owner
    assert owner is not None
    over = [self._atom(name, 'over', owner.path, layer, value.form) for layer in owner.layers]
    form = self._combine(_EXTREMES.get(name, ''), over, False)
    form = _sum([(atom, times * c) for terms in over for atom, c in terms]) if form is None else form
    marks = value.marks | {_Entries(owner.path, layer) for layer in owner.layers}
    return value._replace(form=form, owner=None, marks=marks)

  def _on_dot_general(self, eqn: JaxprEqn, left: _Value, right: _Value) -> _Value | None:
    (left_dims, right_dims), _ = eqn.params['dimension_numbers']
    every = tuple(range(len(left.shape)))
    if not left_dims == right_dims == every or left.shape != right.shape:
      return None
    product = self._entrywise('mul', '', [left, right], left.shape)
    return None if product is None else self._reduce('reduce_sum', product, every)

  def _on_concatenate(self, eqn: JaxprEqn, *values: _Value) -> _Value | None:
    entries: list[_Value] = []
    for value in values:
      if value.shape == (1,) and value.is_uniform:
        entries.append(value._replace(shape=(), labels=()))
      elif value.form in self._entries:
        entries += self._entries[value.form]
      else:
        return None
    form = self._atom('vector', *(entry.form for entry in entries))
    self._entries[form] = entries
    return _Value(form, (len(entries),), (None,), None, _marks(entries))

  # ---------------------------------------------------------------- other shapes

  def _on_reshape(self, eqn: JaxprEqn, value: _Value) -> _Value | None:
    shape, owner = _shape(eqn), value.owner
    if value.is_uniform:
      return value._replace(shape=shape, labels=_uniform(shape))
    factors: list[tuple[int, Label]] = []
    for size, label in zip(value.shape, value.labels):
      if label and owner is not None:
        factors += [(owner.shape[axis + owner.depth], (axis,)) for axis in label]
      elif size > 1:
        factors.append((size, label))
    labels: list[Label] = []
    for size in shape:
      have, made = 1, list[Label]()
      while have < size:
        factor, label = factors.pop(0)
        have *= factor
        made.append(label)
      if have != max(size, 1) or (len(made) > 1 and not all(made)):
        return None
      labels.append(made[0] if len(made) == 1 else tuple(axis for label in made for axis in label or ()))
    return value._replace(shape=shape, labels=tuple(labels))

  _on_squeeze = _on_expand_dims = _on_reshape

  def _on_broadcast_in_dim(self, eqn: JaxprEqn, value: _Value, *sizes: _Value) -> _Value:
    shape, labels = _shape(eqn), [*_uniform(_shape(eqn))]
    for i, at in enumerate(eqn.params['broadcast_dimensions']):
      labels[at] = value.labels[i] if value.shape[i] == shape[at] else ()
    return value._replace(shape=shape, labels=tuple(labels))


@functools.lru_cache(maxsize=8)  # Several of the functions above ask for the same programs.
def _trace(
  build: Build, shapes: tuple[jax.ShapeDtypeStruct, ...], structure: jax.tree_util.PyTreeDef
) -> tuple[ClosedJaxpr, ClosedJaxpr, object] | None:
  """Returns the programs of `init` and `update` on a tree of shapes, and the state's shapes; None if that fails."""
  tree, scalar = jax.tree.unflatten(structure, shapes), jax.ShapeDtypeStruct((), jnp.float32)
  try:
    init, state = jax.make_jaxpr(lambda rate, p: build(rate).init(p), return_shape=True)(scalar, tree)
    update = jax.make_jaxpr(lambda rate, loss, g, s, p: build(rate).update(g, s, p, value=loss))(
      scalar, scalar, tree, state, tree
    )
  except Exception:  # User code may raise anything if it needs other variables or further arguments.
    return None
  return init, update, state


def _is_number(form: Terms) -> bool:
  return len(form) == 1 and form[0][0] == _ONE


def _sum(terms: Sequence[tuple[Atom, float]]) -> Terms:
  total: dict[Atom, float] = {}
  for atom, coefficient in terms:
    total[atom] = total.get(atom, 0.0) + coefficient
  return tuple(sorted((atom, c) for atom, c in total.items() if c))


def _shapes(eqn: JaxprEqn) -> list[Shape]:
  return [getattr(x.aval, 'shape', ()) for x in eqn.outvars]


def _shape(eqn: JaxprEqn) -> Shape:
  return next(iter(_shapes(eqn)), ())


def _uniform(shape: Shape) -> tuple[Label, ...]:
  return ((),) * len(shape)


def _slot_name(path: Path, arrays: Mapping[Path, _Variable]) -> Path:
  """Returns the path of a slot, with the path of the declaration instead of that of the layer."""
  owner = owner_of(path, arrays)
  if owner is None:
    return path
  start = next(i for i in range(len(path)) if path[i : i + len(owner)] == owner)
  return (*path[:start], *arrays[owner].path, *path[start + len(owner) :])
