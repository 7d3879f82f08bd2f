"""Single operations in plain JAX with random shardings, through the guards, compared with one device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np

from praxis_lite.common.errors import UserError
from praxis_lite.sharding import guards
from tools.hunt.cases import (
  Entries,
  MeshSizes,
  Outcome,
  num_devices,
  random_entries,
  random_mesh,
  remove_axis,
  smaller_entries,
  smaller_meshes,
  smaller_numbers,
  spec_text,
)
from tools.hunt.families import FAMILIES, Expression

# These numbers choose a variant and are not sizes, so they are not reduced.
_FORMS = ('equation', 'seed', 'chain', 'form', 'kind', 'axis', 'transposed', 'padding', 'rank')
_MAX_ENTRIES = 1 << 17

_HEADER = """\
import os
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
"""
_BODY = """\
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

rng = np.random.default_rng({seed})
arrays = [{arrays}]

def program(mesh):
  def at(x, spec):
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  def operation({names}):
    {placed}
    return at({text}, {out})

  {returned}
"""
_GRADIENT = """\
def gradients({names}):
    y, back = jax.vjp(lambda {floats}: operation({names}), {floats})
    return back(np.random.default_rng(1).integers(-3, 4, y.shape).astype(y.dtype))

  return gradients
"""
_FOOTER = """
mesh = jax.make_mesh({shape}, {axes}, axis_types=(jax.sharding.AxisType.Auto,) * {number})
right = jax.jit(program(None))(*arrays)
lowered = jax.jit(program(mesh)).lower(*arrays)
# from praxis_lite.sharding.guards import guard; print(guard(lowered))
found = lowered.compile()(*arrays)
for one, other in zip(jax.tree.leaves(right), jax.tree.leaves(found)):
  one, other = np.asarray(one), np.asarray(other)
  print('right' if np.allclose(one, other) else 'WRONG', one.shape, abs(one - other).max())
"""


@dataclasses.dataclass(frozen=True)
class OperationCase:
  """A single operation with its sizes and shardings.

  Attributes:
    splits: splits of each array, then of the result. Each has at least as many entries as the array has dimensions.
    gradient: whether to compare the gradients of all float arrays, instead of the values.
    loop: whether it runs in the body of a scan.
    seed: seed of the arrays' values.
  """

  family: str
  sizes: tuple[tuple[str, int], ...]
  mesh: MeshSizes
  splits: tuple[Entries, ...]
  gradient: bool
  loop: bool = False
  seed: int = 0

  @property
  def expression(self) -> Expression:
    return FAMILIES[self.family].build(dict(self.sizes))

  def body(self) -> str:
    """Returns the source of the program and of its arrays."""
    expression = self.expression
    names = [f'x{i}' for i in range(len(expression.arrays))]
    floats = [name for name, array in zip(names, expression.arrays) if 'ids' not in array.values]
    text = expression.text
    if self.loop:
      scaled = re.sub(r'\bx0\b', '(x0 * s)', text)
      text = f'lax.scan(lambda c, s: (c, {scaled}), 0, jnp.array([1.0, 2.0], x0.dtype))[1].sum(0)'
    splits = [spec_text(entries) for entries in self.splits]
    placed = '; '.join(f'{name} = at({name}, {spec})' for name, spec in zip(names, splits))
    named = ', '.join(names)
    of_gradient = _GRADIENT.format(names=named, floats=', '.join(floats))
    return _BODY.format(
      seed=self.seed,
      arrays=', '.join(_array_text(array.shape, array.values) for array in expression.arrays),
      names=named,
      placed=placed,
      text=text,
      out=splits[-1],
      returned=of_gradient if self.gradient else 'return operation\n',
    )

  def script(self) -> str:
    """Returns a standalone program that shows whether plain JAX is wrong. Uncomment a line to try the guards."""
    axes, shape = tuple(name for name, _ in self.mesh), tuple(size for _, size in self.mesh)
    footer = _FOOTER.format(shape=shape, axes=axes, number=len(shape))
    return f'# {self}\n{_HEADER}{self.body()}{footer}'

  def run(self, guarded: bool = True) -> Outcome:
    """Compares the program on the mesh with one device, with or without the guards.

    Raises:
      Exception: the program does not run on one device either.
    """
    scope: dict[str, object] = {}
    exec(self.body(), scope)
    program: Callable[..., Callable[..., object]] = scope['program']  # type: ignore[assignment]
    arrays: list[np.ndarray] = scope['arrays']  # type: ignore[assignment]
    right = jax.tree.leaves(jax.jit(program(None))(*arrays))
    if not all(np.isfinite(x).all() for x in map(np.asarray, right)):
      raise ValueError('not finite on one device')
    changed: list[guards.Guarded] = []
    try:
      lowered = jax.jit(program(self.create_mesh())).lower(*arrays)
      if guarded:
        changed = guards.guard(lowered)
      found = jax.tree.leaves(lowered.compile()(*arrays))
    except UserError as error:
      return Outcome('refused', re.sub(r'[\d(].*', '', str(error)))
    except Exception as error:
      return Outcome('wrong', f'{type(error).__name__}: {str(error)[:300]}', len(changed))
    for i, (one, other) in enumerate(zip(right, found)):
      one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
      if not np.allclose(one, other, rtol=1e-5, atol=1e-5 * (1 + np.abs(one).max(initial=0))):
        return Outcome('wrong', f'result {i} of shape {one.shape} differs by {np.abs(one - other).max()}', len(changed))
    return Outcome('right', guarded=len(changed))

  def create_mesh(self) -> jax.sharding.Mesh:
    sizes, devices = tuple(size for _, size in self.mesh), jax.devices()[: num_devices(self.mesh)]
    names = tuple(name for name, _ in self.mesh)
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes), devices=devices)

  def smaller(self) -> Iterator[OperationCase]:
    """Yields operations with one thing less: the loop, an axis, an entry of a split, or part of a size."""
    if self.loop:
      yield dataclasses.replace(self, loop=False)
    for mesh, removed in smaller_meshes(self.mesh):
      splits = self.splits if removed is None else tuple(remove_axis(s, removed) for s in self.splits)
      yield dataclasses.replace(self, mesh=mesh, splits=splits)
    for i, entries in enumerate(self.splits):
      for fewer in smaller_entries(entries):
        yield dataclasses.replace(self, splits=(*self.splits[:i], fewer, *self.splits[i + 1 :]))
    for i, (name, size) in enumerate(self.sizes):
      for n in smaller_numbers(size) if name not in _FORMS else ():
        case = dataclasses.replace(self, sizes=(*self.sizes[:i], (name, n), *self.sizes[i + 1 :]))
        try:
          if case.expression != self.expression:
            yield case
        except (ValueError, IndexError):
          continue


def _array_text(shape: tuple[int, ...], values: str) -> str:
  if values == 'small':
    return f'rng.integers(-3, 4, {shape}).astype(np.float32)'
  if values == 'distinct':
    return f'(rng.permutation({int(np.prod(shape))}).reshape({shape}) - 7).astype(np.float32)'
  number = int(values.split()[-1])
  if values.startswith('unique'):
    return f'rng.permutation({number})[:{shape[0]}].astype(np.int32)'
  return f'rng.integers(0, {number}, {shape}).astype(np.int32)'


def draw_operation(rng: np.random.Generator, family: str = '') -> OperationCase:
  """Returns a random operation that runs on one device."""
  while True:
    weights = {'product': 6, 'chain': 4, 'convolution': 4, 'pooling': 2, 'lookup': 5, 'along': 5}
    names = [family] if family else [name for name, weight in weights.items() for _ in range(weight)]
    name = names[rng.integers(len(names))]
    sizes, mesh = FAMILIES[name].draw(rng), random_mesh(rng)
    try:
      expression = FAMILIES[name].build(sizes)
    except ValueError:
      continue
    if max(int(np.prod(array.shape)) for array in expression.arrays) > _MAX_ENTRIES:
      continue
    case = OperationCase(
      name,
      tuple(sizes.items()),
      mesh,
      ((),) * (len(expression.arrays) + 1),
      gradient=expression.has_gradient and bool(rng.random() < 0.5),
      loop=bool(rng.random() < 0.1),
      seed=int(rng.integers(1 << 30)),
    )
    try:
      rank = _rank_of_result(case)
    except (ValueError, TypeError, IndexError, ZeroDivisionError):
      continue
    ranks = [*(len(array.shape) for array in expression.arrays), rank]
    share = float(rng.choice([0.4, 0.75, 0.75, 1.0]))
    return dataclasses.replace(case, splits=tuple(random_entries(rng, n, mesh, share) for n in ranks))


def _rank_of_result(case: OperationCase) -> int:
  scope: dict[str, object] = {}
  exec(dataclasses.replace(case, gradient=False).body(), scope)
  program: Callable[..., Callable[..., jax.Array]] = scope['program']  # type: ignore[assignment]
  out = jax.eval_shape(program(None), *scope['arrays'])  # type: ignore[misc]
  if 0 in out.shape:
    raise ValueError('an empty result')
  return len(out.shape)
