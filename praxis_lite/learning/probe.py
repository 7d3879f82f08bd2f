"""What an optax transformation does to stacks and to parts of variables, read from its program without running it.

Three questions about a transformation, whoever wrote it:

    is_stackable      does it do to a stack of layers what it does to each layer of it?
    is_elementwise    does it do to a part of a variable what it does to that part of the whole?
    looks_at_all      does what it does to one variable depend on sums over several?

The programs (jaxprs) of its `init` and `update` are traced on shapes alone and compared: with stacks and with lists of
their layers, or with variables of two sizes. Nothing is compiled. Each array in a program is described by

    form      the formula of one entry, in terms of the same entry of the gradient, the parameter and the slots, of
              scalars, and of sums over variables, where a sum over a stack is written as sums over its layers
    labels    for each dimension, the axes of the variable that it runs along
    marks     the variables whose other entries it depends on, and whether it draws random numbers

If two programs have the same forms, they do the same at every step, by induction: slots that are equal before an update
are equal after it. An operation that is not understood gets a form that contains all shapes and so differs between the
two. `is_stackable` and `is_elementwise` are therefore true only where that is proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.typing import ArrayLike

from praxis_lite.partitioning.slots import owner_of
from praxis_lite.trees import NestedDict, Path, leaves_by_path, map_with_path
from praxis_lite.weights import WeightHParams

# Builds the transformation for a learning rate.
Build = Callable[[jax.Array], optax.GradientTransformationExtraArgs]
Shape = tuple[int, ...]

# Primitives of JAX that treat each entry by itself.
_ELEMENTWISE = """
  abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
  convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac
  imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma
  population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
  shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""
# Reductions that may be taken in parts, and the primitives that combine the results.
_EXTREMES = {'reduce_max': 'max', 'reduce_min': 'min', 'reduce_and': 'and', 'reduce_or': 'or'}
_CALLS = ('jit', 'pjit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call', 'remat', 'checkpoint')
_MAX_SCAN = 64
_FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


def is_stackable(build: Build, weights: NestedDict) -> bool:
  """Whether a transformation does to each stack of layers what it does to its layers one by one.

  Args:
    build: makes the transformation.
    weights: declarations of the variables it updates.
  """
  reader = _Reader()
  two = reader.program(build, map_with_path(_two_layers, weights))
  return _alike(two, reader.program(build, map_with_path(_list_of_two, weights))) and _alike(
    two, reader.program(build, map_with_path(_stack, weights))
  )


def is_elementwise(build: Build, weights: NestedDict) -> bool:
  """Whether a transformation does to parts of variables what it does to the whole; false if it draws random numbers."""
  reader = _Reader()
  whole, part = (
    reader.program(build, map_with_path(_variable, weights)),
    reader.program(build, map_with_path(_resized, weights)),
  )
  return _alike(whole, part) and all(isinstance(m, _Slot) for values in whole.values() for v in values for m in v.marks)


def looks_at_all(build: Build, weights: NestedDict) -> bool:
  """Whether what a transformation does to a variable, or to a layer, depends on sums over several of them."""
  program = _Reader().program(build, map_with_path(_list_of_two, weights))
  return any(sum(isinstance(m, _Entries) for m in v.marks) > 1 for values in program.values() for v in values)


def slot_axes(build: Build, weights: NestedDict) -> dict[Path, tuple[int | None, ...]]:
  """For each slot that runs along its variable, by path: which axis of it each dimension runs along; None for none."""
  steps = _Reader().steps(build, map_with_path(_variable, weights))
  axes: dict[Path, tuple[int | None, ...]] = {}
  if steps is None:
    return axes
  for path, (_, slot, _) in steps.slots.items():
    if slot.owner is not None and slot.owner.path == owner_of(path, steps.arrays):
      axes[path] = tuple(label[0] if label and len(label) == 1 else None for label in slot.labels)
  return axes


# ---------------------------------------------------------------- variables


class _Variable(NamedTuple):
  """An array that a transformation updates: a variable, or one layer of it.

  Attributes:
    path: path of the declaration.
    layers: indices of the layers it contains.
    shape, dtype: of the array.
    depth: number of leading dimensions that index layers.
  """

  path: Path
  layers: tuple[int, ...]
  shape: Shape
  dtype: np.dtype
  depth: int = 0

  @property
  def labels(self) -> tuple[tuple[int, ...], ...]:
    """Labels of an array that runs along it: axes of a layer are numbered from 0, those of the stack below 0."""
    return tuple((i - self.depth,) if size > 1 else () for i, size in enumerate(self.shape))

  @property
  def struct(self) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(self.shape, self.dtype)


def _variable(path: Path, weight: WeightHParams) -> _Variable:
  return _Variable(path, (0,), weight.full_shape, weight.as_struct().dtype)


def _resized(path: Path, weight: WeightHParams) -> _Variable:
  """The variable with other sizes, smaller where they are large. A dimension of size 1 is never split."""
  sizes = tuple(size // 2 if size > 3 else size * 2 if size > 1 else 1 for size in weight.full_shape)
  return _variable(path, weight)._replace(shape=sizes)


def _stack(path: Path, weight: WeightHParams) -> _Variable:
  """The variable as a stack of layers, with the same layer indices as in `_two_layers`, however many there are."""
  depth = len(weight.repeat_prefix)
  return _Variable(path, tuple(range(2**depth)), weight.full_shape, weight.as_struct().dtype, depth)


def _two_layers(path: Path, weight: WeightHParams) -> _Variable:
  """The variable with two layers along each dimension of the stack."""
  return _stack(path, weight)._replace(shape=(2,) * len(weight.repeat_prefix) + weight.shape)


def _list_of_two(path: Path, weight: WeightHParams) -> _Variable | list[_Variable]:
  """A list of these layers."""
  stack = _stack(path, weight)
  layers = [stack._replace(layers=(i,), shape=weight.shape, depth=0) for i in stack.layers]
  return layers if stack.depth else layers[0]


# ---------------------------------------------------------------- what is known of an array

Atom = int  # Stands for a formula, the same one for the same formula.
Terms = tuple[tuple[Atom, float], ...]  # A sum of atoms, each with its coefficient.
Label = tuple[int, ...] | None  # The axes of its variable that a dimension runs along; None: others, or unknown ones.

_ONE: Atom = 0
_NOISE, _UNKNOWN = 'noise', 'unknown'


class _Entries(NamedTuple):
  """A mark: it depends on other entries of a layer of a variable."""

  path: Path
  layer: int


class _Slot(NamedTuple):
  """A mark: it depends on a slot."""

  name: Path


Mark = _Entries | _Slot | str  # Or _NOISE, or _UNKNOWN.


class _Value(NamedTuple):
  """What is known of an array; see above. `owner` is the variable that its labels speak of."""

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


Program = dict[Path, list[_Value]]  # The values of each output, one, or one for each layer.


def _alike(a: Program, b: Program) -> bool:
  """Whether there are outputs, and those with the same name have the same formula and axes."""

  def same(x: _Value, y: _Value) -> bool:
    return x.form == y.form and ((x.is_uniform and y.is_uniform) or x.labels_in_layer == y.labels_in_layer)

  return bool(a) and a.keys() == b.keys() and all(same(x, y) for name in a for x in a[name] for y in b[name])


def _joined(values: Sequence[_Value], rank: int) -> tuple[tuple[Label, ...], _Variable | None] | None:
  """Labels and owner of what is made of arrays entry by entry; None if these run along different axes."""
  owners = {value.owner for value in values if value.owner is not None}
  labels = [{value.labels[i] for value in values if value.shape} - {()} for i in range(rank)]
  if len(owners) > 1 or any(len(different) > 1 for different in labels):
    return None
  return tuple(next(iter(one), ()) for one in labels), next(iter(owners), None)


def _marks(values: Sequence[_Value]) -> frozenset[Mark]:
  return frozenset().union(*(value.marks for value in values))


class _Steps(NamedTuple):
  """What `init` and `update` return: the updates, and each slot by path: at first, before any step, and after it."""

  arrays: dict[Path, _Variable]
  updates: list[_Value]
  slots: dict[Path, tuple[_Value, _Value, _Value]]


# ---------------------------------------------------------------- reading a program


class _Reader:
  """Reads programs; the forms that one reader makes may be compared.

  The method `_on_<primitive>` describes what a primitive of JAX returns; it returns None where it cannot.
  """

  def __init__(self) -> None:
    self._atoms: dict[Hashable, Atom] = {_ONE: _ONE}
    self._members: dict[tuple[str, Terms], frozenset[Terms]] = {}  # What a maximum, minimum, ... is taken over.
    self._entries: dict[Terms, list[_Value]] = {}  # The entries of a vector made of scalars.

  def program(self, build: Build, variables: NestedDict) -> Program:
    """Returns the updates and the slots they may depend on, before and after a step; empty if the transformation cannot
    be traced on its own."""
    steps, program = self.steps(build, variables), Program()
    if steps is None:
      return program
    for variable, value in zip(steps.arrays.values(), steps.updates):
      program.setdefault(('update', *variable.path), []).append(self._of(variable, value, is_update=True))
    used = _marks([value for values in program.values() for value in values])
    for path, values in steps.slots.items():
      owner = steps.arrays.get(owner_of(path, steps.arrays) or ())
      name = _slot_name(path, steps.arrays)
      if _Slot(name) in used:
        for kind, value in zip(('first slot', 'slot', 'new slot'), values):
          program.setdefault((kind, *name), []).append(self._of(owner, value))
    return program

  def steps(self, build: Build, variables: NestedDict) -> _Steps | None:
    """Reads `init` and `update`; None if the transformation cannot be traced on its own."""
    arrays = leaves_by_path(variables, is_leaf=_is_variable)
    tree = jax.tree.map(lambda v: v.struct, variables, is_leaf=_is_variable)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
      init, state = jax.make_jaxpr(lambda rate, p: build(rate).init(p), return_shape=True)(scalar, tree)
      update = jax.make_jaxpr(lambda rate, loss, g, s, p: build(rate).update(g, s, p, value=loss))(
        scalar, scalar, tree, state, tree
      )
    except Exception:  # A user's code may raise anything if it needs other variables or further arguments.
      return None
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

  def _of(self, owner: _Variable | None, value: _Value, is_update: bool = False) -> _Value:
    """An output of `owner`; a value that runs along another variable gets a form that no other value has."""
    if value.owner not in (None, owner):
      return value._replace(form=self._atom('of', value.owner, value.form), marks=value.marks | {_UNKNOWN})
    if is_update and owner is not None and not value.is_uniform and value.labels != owner.labels:
      return value._replace(marks=value.marks | {_UNKNOWN})
    return value

  def _either(self, slot: _Value, new: _Value) -> _Value:
    """A slot that may also hold `new`."""
    joined = _joined([slot, new], len(slot.shape))
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
    program = eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))
    result: _Value | list[_Value] | None = None
    if rule is not None:
      result = rule(eqn, *values)
    elif name in _CALLS and program is not None:
      result = self._run(program if isinstance(program, ClosedJaxpr) else ClosedJaxpr(program, ()), values)
    elif name in _ELEMENTWISE.split():
      result = self._entrywise(name, str(eqn.params), values, shape, _avals(eqn)[0].dtype)
    elif name in _EXTREMES or name == 'reduce_sum':
      result = self._reduced(name, values[0], eqn.params['axes'])
    elif name.startswith(('random_', 'threefry')):
      noise, marks = self._atom(_NOISE), _marks(values) | {_NOISE}
      result = [_Value(noise, shape, _uniform(shape), None, marks) for shape in _shapes(eqn)]
    if result is None:
      result = self._unknown(eqn, values)
    return result if isinstance(result, list) else [result]

  def _unknown(self, eqn: JaxprEqn, values: list[_Value]) -> list[_Value]:
    """Results of an operation that is not understood: equal only to those of the same one on the same whole arrays."""
    noise, operands = self._atom(_NOISE), tuple((v.form, v.shape, v.labels, v.owner) for v in values)
    is_noise = bool(values) and all(value.form == noise for value in values)
    marks = _marks(values) | ({_UNKNOWN} if any(v.owner is not None for v in values) else set())
    forms = [self._atom(eqn.primitive.name, str(eqn.params), operands, i) for i in range(len(eqn.outvars))]
    return [
      _Value(noise if is_noise else form, shape, (None,) * len(shape), None, marks)
      for form, shape in zip(forms, _shapes(eqn))
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
    self, name: str, params: str, values: Sequence[_Value], shape: Shape, dtype: np.dtype = _FLOAT
  ) -> _Value | None:
    joined = _joined(values, len(shape))
    if joined is None and not any(v.axes for v in values):  # Scalar variables: each is the sum over itself.
      values = [v if v.owner is None else self._over('reduce_sum', v) for v in values]
      joined = _joined(values, len(shape))
    if joined is None:
      return None
    form = None
    if all(value.is_uniform for value in values):
      form = self._combined(name, [value.form for value in values], jnp.issubdtype(dtype, jnp.inexact))
    elif name in ('copy', 'stop_gradient'):
      form = values[0].form
    form = self._atom(name, params, *(value.form for value in values)) if form is None else form
    return _Value(form, shape, *joined, _marks(values))

  def _combined(self, name: str, forms: Sequence[Terms], is_inexact: bool) -> Terms | None:
    """A form that does not depend on the order in which sums, maxima, ... over variables are combined."""
    if name in _EXTREMES.values():
      members = frozenset().union(*(self._members.get((name, form), frozenset([form])) for form in forms))
      form = self._atom(name, members)
      self._members[name, form] = members
      return form
    if not is_inexact:
      return None
    if name in ('copy', 'stop_gradient', 'convert_element_type'):
      return forms[0]
    if name in ('add', 'sub', 'neg'):
      sign = {'add': 1.0}.get(name, -1.0)
      return _sum([*([] if name == 'neg' else forms[0]), *((atom, sign * c) for atom, c in forms[-1])])
    if name in ('mul', 'div'):
      for form, factor in (forms, forms[::-1]) if name == 'mul' else (forms,):
        if len(factor) == 1 and factor[0][0] == _ONE:
          scale = factor[0][1] if name == 'mul' else 1 / factor[0][1]
          return _sum([(atom, c * scale) for atom, c in form])
    return None

  def _on_bitcast_convert_type(self, eqn: JaxprEqn, value: _Value) -> _Value | None:
    name, shape = f'bits of {eqn.params["new_dtype"]}', _shape(eqn)
    return self._entrywise(name, '', [value], shape, _INT) if shape == value.shape else None

  def _on_cond(self, eqn: JaxprEqn, index: _Value, *values: _Value) -> list[_Value] | None:
    branches = [self._run(branch, values) for branch in eqn.params['branches']]
    made = [self._entrywise('cond', '', [index, *results], results[0].shape, _INT) for results in zip(*branches)]
    return None if None in made else [value for value in made if value is not None]

  def _on_scan(self, eqn: JaxprEqn, *values: _Value) -> list[_Value] | None:
    params = eqn.params
    if params['length'] > _MAX_SCAN:
      return None
    constants, carry = values[: params['num_consts']], list(values[params['num_consts'] :][: params['num_carry']])
    rows = values[params['num_consts'] + params['num_carry'] :]
    if any(row.labels[0] for row in rows):
      return None
    results = []
    for i in range(params['length'])[:: -1 if params['reverse'] else 1]:
      at = [
        row._replace(
          form=row.form if row.labels[0] == () else self._atom('row', row.form, i),
          shape=row.shape[1:],
          labels=row.labels[1:],
        )
        for row in rows
      ]
      outputs = self._run(params['jaxpr'], [*constants, *carry, *at])
      carry = outputs[: len(carry)]
      results.append(outputs[len(carry) :])
    stacks = []
    for made in zip(*results):
      joined = _joined(made, len(made[0].shape))
      if joined is None:
        return None
      labels, owner = joined
      form = self._atom('rows', *(value.form for value in made))
      stacks.append(_Value(form, (len(made), *made[0].shape), (None, *labels), owner, _marks(made)))
    return [*carry, *stacks]

  # ---------------------------------------------------------------- sums

  def _reduced(self, name: str, value: _Value, axes: Sequence[int]) -> _Value | None:
    kept = [i for i in range(len(value.shape)) if i not in axes]
    reduced = [value.labels[i] for i in axes]
    result = value._replace(shape=tuple(value.shape[i] for i in kept), labels=tuple(value.labels[i] for i in kept))
    times = math.prod(value.shape[i] for i in axes if value.labels[i] == ()) if name == 'reduce_sum' else 1
    if value.form in self._entries:
      entries = self._entries[value.form]
      total = entries[0]
      for entry in entries[1:]:
        total = self._entrywise(_EXTREMES.get(name, 'add'), '', [total, entry], ()) or total._replace(shape=(-1,))
      return total if total.shape == () else None
    along = sorted(axis for label in reduced for axis in label or ())
    if value.owner is not None and along == sorted(axis for label in value.owner.labels for axis in label):
      if not result.axes:
        return self._over(name, result, times)
    elif value.owner is not None and along and min(along) >= 0 and None not in reduced:  # Within each layer.
      marks = value.marks | {_Entries(value.owner.path, layer) for layer in value.owner.layers}
      return result._replace(form=self._atom(name, 'along', tuple(along), times, value.form), marks=marks)
    if along or None in reduced:
      return None
    if times == 1 or not value.is_uniform:
      return result if times == 1 else result._replace(form=self._atom('times', times, value.form))
    return result._replace(form=_sum([(atom, c * times) for atom, c in value.form]))

  def _over(self, name: str, value: _Value, times: int = 1) -> _Value:
    """The reduction of `value` over all entries of its owner, each counted `times` times, by layers."""
    owner = value.owner
    assert owner is not None
    over = [self._atom(name, 'over', owner.path, layer, value.form) for layer in owner.layers]
    form = _sum([(atom, times * c) for terms in over for atom, c in terms])
    if name in _EXTREMES:
      form = self._combined(_EXTREMES[name], over, False) or form
    marks = value.marks | {_Entries(owner.path, layer) for layer in owner.layers}
    return value._replace(form=form, owner=None, marks=marks)

  def _on_dot_general(self, eqn: JaxprEqn, left: _Value, right: _Value) -> _Value | None:
    (left_dims, right_dims), _ = eqn.params['dimension_numbers']
    every = tuple(range(len(left.shape)))
    if not left_dims == right_dims == every or left.shape != right.shape:
      return None
    product = self._entrywise('mul', '', [left, right], left.shape, _FLOAT)
    return None if product is None else self._reduced('reduce_sum', product, every)

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
    factors: list[tuple[int, Label]] = []
    for size, label in zip(value.shape, value.labels):
      if label and owner is not None:
        factors += [(owner.shape[axis + owner.depth], (axis,)) for axis in label]
      elif size > 1:
        factors.append((size, label))
    labels: list[Label] = []
    for size in shape:
      made: list[Label] = []
      while size > 1:
        have, label = factors.pop(0)
        if label == () and have % size == 0 and have > size:
          factors.insert(0, (have // size, ()))
          have = size
        if size % have:
          return None
        size //= have
        made.append(label)
      if (None in made and made != [None]) or (() in made and any(made)):
        return None
      labels.append(None if made == [None] else tuple(axis for label in made for axis in label or ()))
    return value._replace(shape=shape, labels=tuple(labels))

  _on_squeeze = _on_expand_dims = _on_reshape

  def _on_broadcast_in_dim(self, eqn: JaxprEqn, value: _Value, *sizes: _Value) -> _Value:
    shape, labels = _shape(eqn), [*_uniform(_shape(eqn))]
    for i, at in enumerate(eqn.params['broadcast_dimensions']):
      labels[at] = value.labels[i] if value.shape[i] == shape[at] else ()
    return value._replace(shape=shape, labels=tuple(labels))

  def _on_dynamic_slice(self, eqn: JaxprEqn, value: _Value, *starts: _Value) -> _Value | None:
    shape = _shape(eqn)
    cut = [i for i, size in enumerate(value.shape) if size != shape[i]]
    if any(start.owner is not None for start in starts) or any(value.labels[i] for i in cut):
      return None
    form = self._atom('dynamic_slice', tuple((shape[i], starts[i].form) for i in cut), value.form)
    return value._replace(form=form, shape=shape, marks=_marks([value, *starts]))

  def _on_scatter(self, eqn: JaxprEqn, value: _Value, index: _Value, new: _Value) -> _Value | None:
    numbers = eqn.params['dimension_numbers']
    at = numbers.inserted_window_dims
    rest = [i for i in range(len(value.shape)) if i not in at]
    is_row = numbers.scatter_dims_to_operand_dims == at and new.shape == tuple(value.shape[i] for i in rest)
    if not is_row or index.owner is not None or any(value.labels[i] for i in at):
      return None
    kept = value._replace(shape=new.shape, labels=tuple(value.labels[i] for i in rest))
    made = self._entrywise('scatter', f'{at} {eqn.params["mode"]}', [kept, new], new.shape, _INT)
    if made is None:
      return None
    labels: list[Label] = [None] * len(value.shape)
    for i, label in zip(rest, made.labels):
      labels[i] = label
    form = self._atom('scatter', at, value.form, index.form, new.form)
    return _Value(form, value.shape, tuple(labels), made.owner, _marks([value, index, new]))


def _sum(terms: Sequence[tuple[Atom, float]]) -> Terms:
  total: dict[Atom, float] = {}
  for atom, coefficient in terms:
    total[atom] = total.get(atom, 0.0) + coefficient
  return tuple(sorted((atom, c) for atom, c in total.items() if c))


def _avals(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
  return [x.aval for x in eqn.outvars]  # type: ignore[misc]


def _shapes(eqn: JaxprEqn) -> list[Shape]:
  return [getattr(aval, 'shape', ()) for aval in _avals(eqn)]


def _shape(eqn: JaxprEqn) -> Shape:
  return next(iter(_shapes(eqn)), ())


def _uniform(shape: Shape) -> tuple[Label, ...]:
  return ((),) * len(shape)


def _is_variable(x: object) -> bool:
  return isinstance(x, _Variable)


def _slot_name(path: Path, arrays: Mapping[Path, _Variable]) -> Path:
  """The path of a slot, with the path of the declaration in place of that of a layer."""
  owner = owner_of(path, arrays)
  if owner is None:
    return path
  start = next(i for i in range(len(path)) if path[i : i + len(owner)] == owner)
  return (*path[:start], *arrays[owner].path, *path[start + len(owner) :])
