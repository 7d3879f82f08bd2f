"""Draws a graph: each operation reads existing values or new arrays, and adds a value."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tools.graphs.meshes import MOST_DEVICES, draw_mesh
from tools.graphs.programs import GraphCase, Line, modules
from tools.hunt.cases import MeshSizes, random_entries

# Larger arrays make programs slow; of sizes, odd and uneven ones.
_MOST_ENTRIES = 3000
_SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 10, 12, 12, 15, 16)
_MOST_BOUND = 60.0  # Larger integers are reduced.


class DrawnOperation(NamedTuple):
  """An expression that may be added to a graph.

  Attributes:
    text: the expression, with values such as v3.
    bound: the largest possible absolute value of an entry, given the bounds of the values it reads.
    simpler, size: see `Line`.
  """

  text: str
  bound: float
  simpler: tuple[str, ...] = ()
  size: int = 1


class NotDrawn(Exception):
  """The operation does not fit the values of the graph."""


class Graph:
  """A program that is being drawn.

  Attributes:
    rng: the generator of all choices.
    lines: the lines drawn so far.
    is_exact: whether all numbers are integers.
    gradient: whether all operations must be differentiable.
  """

  def __init__(self, rng: np.random.Generator, is_exact: bool, gradient: bool):
    self.rng = rng
    self.is_exact = is_exact
    self.gradient = gradient
    self.lines: list[Line] = []
    self.bounds: dict[str, float] = {}
    self._by_name: dict[str, Line] = {}
    self._number = 0

  # -------------------------------------------------------------- choices

  def one(self, *choices):  # type: ignore[no-untyped-def]
    """Returns one of the choices."""
    return choices[self.rng.integers(len(choices))]

  def chance(self, share: float) -> bool:
    return bool(self.rng.random() < share)

  def size(self) -> int:
    return int(self.rng.choice(_SIZES))

  def axis(self, line: Line) -> int:
    """Returns a random dimension of a value."""
    if not line.shape:
      raise NotDrawn
    return int(self.rng.integers(len(line.shape)))

  def pick(self, least: int = 0, most: int = 5, dtype: str = 'float32', shape: Sequence[int] | None = None) -> Line:
    """Returns a value of a rank in a range, or of this shape: mostly a recent one, sometimes an older or a new one."""
    fitting = [
      line
      for line in self.lines
      if line.dtype == dtype
      and (least <= len(line.shape) <= most if shape is None else line.shape == tuple(shape))
      and 0 not in line.shape
    ]
    if fitting and self.chance(0.85):
      return fitting[max(self.rng.integers(len(fitting)), self.rng.integers(len(fitting)))]
    if dtype != 'float32':
      raise NotDrawn
    if shape is None:
      rank = int(self.rng.integers(max(least, 1), max(min(most, 4), least, 1) + 1))
      shape = [self.size() for _ in range(rank)]
    return self.array(shape)

  def array(self, shape: Sequence[int], kind: str = '') -> Line:
    """Adds an input: integers or reals, or another `kind` such as 'ids((3,), 4)'."""
    shape = tuple(map(int, shape))
    if math.prod(shape) > _MOST_ENTRIES:
      raise NotDrawn
    floats = f'ints({shape})' if self.is_exact else f'reals({shape})'
    dtype = 'int32' if kind.startswith(('ids', 'unique')) else 'float32'
    line = Line(self._name(), kind or floats, shape, dtype, is_input=True)
    self._keep(line, 3.0 if not kind.startswith('distinct') else 60.0)
    return line

  def ids(self, shape: Sequence[int], n: int) -> Line:
    """Adds an input of integers below n."""
    return self.array(shape, f'ids({tuple(map(int, shape))}, {int(n)})')

  def bound(self, *lines: Line) -> float:
    return max(self.bounds[line.name] for line in lines)

  # -------------------------------------------------------------- growth

  def add(self, family: str, operation: DrawnOperation) -> Line:
    """Adds an operation.

    Raises:
      NotDrawn: it is not a valid expression, or its result is too large or empty.
    """
    text, bound = operation.text, operation.bound
    line = self._line(family, text, operation)
    if line.dtype == 'float32' and (bound > _MOST_BOUND or not np.isfinite(bound)):
      simpler = tuple(f'small({x})' for x in operation.simpler)
      line = line._replace(text=f'small({text})', simpler=simpler)
      bound = 4.0 if self.is_exact else 1.0
    self._keep(line, bound)
    return line

  def shape_of(self, text: str) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an expression.

    Raises:
      NotDrawn: it is not valid.
    """
    names = dict.fromkeys(re.findall(r'\bv\d+\b', text))
    structs = {n: jax.ShapeDtypeStruct(self._by_name[n].shape, self._by_name[n].dtype) for n in names}

    def value(values: dict[str, jax.Array]) -> jax.Array:
      return eval(text, {**modules(), **values})

    try:
      out = jax.eval_shape(value, structs)
      floats = [name for name, x in structs.items() if x.dtype == np.float32]
      if self.gradient and floats and out.dtype == np.float32:
        rest = {name: x for name, x in structs.items() if name not in floats}
        jax.eval_shape(
          jax.grad(lambda some, others: value({**some, **others}).sum()), {n: structs[n] for n in floats}, rest
        )
    except Exception as error:  # Any error of JAX means that the operation does not fit.
      raise NotDrawn(f'{text}: {error}') from error
    if not isinstance(out, jax.ShapeDtypeStruct):
      raise NotDrawn(f'{text}: not one array')
    return out

  def _line(self, family: str, text: str, operation: DrawnOperation) -> Line:
    out = self.shape_of(text)
    if math.prod(out.shape) > _MOST_ENTRIES or 0 in out.shape or len(out.shape) > 6:
      raise NotDrawn
    return Line(
      self._name(),
      text,
      tuple(out.shape),
      str(out.dtype),
      simpler=operation.simpler,
      size=operation.size,
      family=family,
    )

  def _name(self) -> str:
    self._number += 1
    return f'v{self._number}'

  def _keep(self, line: Line, bound: float) -> None:
    self.lines.append(line)
    self._by_name[line.name] = line
    self.bounds[line.name] = bound

  # -------------------------------------------------------------- the program

  def program(self, mesh: MeshSizes, share: float) -> GraphCase:
    """Returns the drawn program, with a random split for this share of the values."""
    lines = []
    for line in self.lines:
      entries = None
      if line.shape and self.chance(share):
        entries = random_entries(self.rng, len(line.shape), mesh, float(self.rng.choice([0.5, 0.8, 1.0])))
      lines.append(line._replace(entries=entries))
    read = {name for line in lines for name in line.uses}
    outputs = tuple(line.name for line in lines if line.name not in read and not line.is_input)
    program = GraphCase(tuple(lines), mesh, outputs, self.is_exact, self.gradient, seed=int(self.rng.integers(1 << 30)))
    return program.needed_part(outputs)


def draw_program(
  rng: np.random.Generator,
  families: dict[str, tuple[float, Callable[[Graph], DrawnOperation]]],
  *,
  operations: int = 30,
  family: str | None = None,
  most_devices: int = MOST_DEVICES,
) -> GraphCase:
  """Returns a random program.

  Args:
    rng: where all choices come from.
    families: the operations to draw from, with weights.
    operations: about how many of them to draw, not counting gradients.
    family: if given, every third operation is from this family.
    most_devices: the largest size of the mesh.
  """
  graph = Graph(rng, is_exact=bool(rng.random() < 0.6), gradient=bool(rng.random() < 0.6))
  names = [*families]
  weights = np.array([families[name][0] for name in names])
  while len(graph.lines) < 2:
    with contextlib.suppress(NotDrawn):  # The array was too large, so another one is drawn.
      graph.array([graph.size() for _ in range(int(rng.integers(1, 4)))])
  done = tries = 0
  while done < operations and tries < 20 * operations:
    tries += 1
    name = family if family is not None and tries % 3 == 1 else names[rng.choice(len(names), p=weights / weights.sum())]
    before = len(graph.lines), dict(graph.bounds)
    try:
      line = graph.add(name, families[name][1](graph))
    except (NotDrawn, ValueError, IndexError, ZeroDivisionError):
      graph.lines, graph.bounds = graph.lines[: before[0]], before[1]
      continue
    done += line.size
  mesh = draw_mesh(rng, most_devices)
  return graph.program(mesh, float(rng.choice([0.25, 0.5, 0.8])))
