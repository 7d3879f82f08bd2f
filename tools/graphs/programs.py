"""Graphs of operations with constraints between them, through the guards, compared with one device.

A program is a list of lines, each an expression of earlier lines. Some lines are constrained to a random split. It is
compared in all values that no line reads, and in the gradients of all float inputs. In 'exact' programs, all numbers
are integers below 2 ** 24, so every entry must be equal; in 'smooth' ones, numbers are real. A difference counts only
if it also occurs in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite.common.errors import UserError
from praxis_lite.sharding import guards
from tools.hunt.cases import (
  Entries,
  MeshSizes,
  Outcome,
  num_devices,
  remove_axis,
  smaller_entries,
  smaller_meshes,
  spec_text,
)

_HEADER = """\
import os
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count={devices}'
"""
_BODY = """\
import functools
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

{small}

def arrays(dtype):
  rng = np.random.default_rng({seed})
  def ints(shape, low=-3, high=4): return rng.integers(low, high, shape).astype(dtype)
  def reals(shape): return rng.standard_normal(shape).astype(dtype)
  def ids(shape, n): return rng.integers(0, n, shape).astype(np.int32)
  def unique(n, k): return rng.permutation(n)[:k].astype(np.int32)
  def distinct(shape): return (rng.permutation(int(np.prod(shape))).reshape(shape) % 97 - 40).astype(dtype)
  found = {{}}
{arrays}
  return found

def program(mesh):
  def at(x, spec):
    return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  def values(found):
{lines}
    return [{outputs}]

{returned}
"""
_EXACT = """\
@jax.custom_vjp
def small(x): return lax.rem(x, jnp.asarray(5, x.dtype))
small.defvjp(lambda x: (small(x), None), lambda _, g: (lax.rem(g, jnp.asarray(5, g.dtype)),))
"""
_SMOOTH = 'small = jnp.tanh\n'
_FORWARD = """\
  return values
"""
_GRADIENT = """\
  def total(floats, rest):
    outputs = values({**floats, **rest})
    sums = [jnp.sum(y * (jnp.arange(y.size).reshape(y.shape) % 5 - 2).astype(y.dtype))
            for y in outputs if jnp.issubdtype(y.dtype, jnp.floating)]
    return functools.reduce(jnp.add, sums, jnp.zeros(())), outputs

  def with_gradients(found):
    floats = {k: v for k, v in found.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    rest = {k: v for k, v in found.items() if k not in floats}
    (_, outputs), gradients = jax.value_and_grad(total, has_aux=True)(floats, rest)
    return outputs, gradients

  return with_gradients
"""
_FOOTER = """
mesh = jax.make_mesh({shape}, {axes}, axis_types=(jax.sharding.AxisType.Auto,) * {number})
given = arrays(np.float32)
alone, lowered = (jax.jit(program(m)).lower(given) for m in (None, mesh))
from praxis_lite.sharding.guards import guard; guard(alone); print(len(guard(lowered)), 'operations are guarded')
right = alone.compile()(given)
found = lowered.compile()(given)
for (path, one), other in zip(jax.tree.leaves_with_path(right), jax.tree.leaves(found)):
  one, other = np.asarray(one).astype(np.float64), np.asarray(other).astype(np.float64)
  error = np.max(abs(one - other), initial=0)
  is_right = error <= 1e-3 * np.max(abs(one), initial=0.01)
  print('right' if is_right else 'WRONG', jax.tree_util.keystr(path), one.shape, error)
"""


class Line(NamedTuple):
  """A value of a program.

  Attributes:
    name: name of the value, such as 'v3'.
    text: its expression. For an input: how it is made, such as 'ints((2, 3))'.
    shape, dtype: shape and dtype of the value.
    is_input: whether it is an input of the program.
    entries: how it is split, or None.
    simpler: simpler expressions that may replace it when a program is reduced.
    size: the number of operations that it represents.
    family: the family of the operation.
  """

  name: str
  text: str
  shape: tuple[int, ...]
  dtype: str
  is_input: bool = False
  entries: Entries | None = None
  simpler: tuple[str, ...] = ()
  size: int = 1
  family: str = 'input'

  @property
  def uses(self) -> tuple[str, ...]:
    """The names of the values that it reads."""
    return () if self.is_input else tuple(dict.fromkeys(re.findall(r'\bv\d+\b', self.text)))


@dataclasses.dataclass(frozen=True)
class GraphCase:
  """A graph of operations.

  Attributes:
    lines: in an order in which they can be computed.
    mesh: names and sizes of the axes.
    outputs: the names of the output values.
    is_exact: whether all numbers are integers.
    gradient: whether gradients are compared too.
    seed: seed of the inputs.
  """

  lines: tuple[Line, ...]
  mesh: MeshSizes
  outputs: tuple[str, ...]
  is_exact: bool
  gradient: bool
  seed: int = 0

  @property
  def family(self) -> str:
    return 'exact graph' if self.is_exact else 'smooth graph'

  @property
  def size(self) -> int:
    """The number of operations, not counting gradients."""
    return sum(line.size for line in self.lines if not line.is_input)

  def body(self) -> str:
    """Returns the source of the program and of its inputs."""
    inputs = [line for line in self.lines if line.is_input]
    made = '\n'.join(f'  found[{line.name!r}] = {line.text}' for line in inputs)
    lines = '\n'.join(f'    {line.name} = {_place(line)}' for line in self.lines)
    return _BODY.format(
      small=_EXACT if self.is_exact else _SMOOTH,
      seed=self.seed,
      arrays=made,
      lines=lines,
      outputs=', '.join(self.outputs),
      returned=_GRADIENT if self.gradient else _FORWARD,
    )

  def script(self) -> str:
    """Returns a standalone program that shows the difference. Without its line about guards, it is plain JAX."""
    axes, shape = tuple(name for name, _ in self.mesh), tuple(size for _, size in self.mesh)
    devices = num_devices(self.mesh)
    footer = _FOOTER.format(shape=shape, axes=axes, number=len(shape))
    return f'{_HEADER.format(devices=devices)}{self.body()}{footer}'

  def run(self, guarded: bool = True) -> Outcome:
    """Compares the program on the mesh with one device, with or without the guards.

    Raises:
      Exception: the program does not run on one device either.
    """
    outcome = self._compare(np.float32, guarded)
    if outcome.kind != 'wrong' or 'Error' in outcome.why:
      return outcome
    with jax.enable_x64(True):  # Sums over devices round differently, and unstable operations amplify this.
      exact = self._compare(np.float64, guarded)
    return outcome if exact.kind == 'wrong' else Outcome('right', 'rounding', outcome.guarded)

  def _compare(self, dtype: type[np.floating], guarded: bool) -> Outcome:
    scope: dict[str, object] = {}
    exec(self.body(), scope)
    program: Callable[..., Callable[..., object]] = scope['program']  # type: ignore[assignment]
    given = scope['arrays'](dtype)  # type: ignore[operator]
    alone = jax.jit(program(None)).lower(given)
    guards.guard(alone)  # Needed on one device too, where XLA computes slices of slices wrongly.
    right = jax.tree.leaves_with_path(alone.compile()(given))
    expected = [np.asarray(x).astype(np.float64) for _, x in right]
    if not all(np.isfinite(x).all() for x in expected):
      raise ValueError('not finite on one device')
    changed: list[guards.Guarded] = []
    try:
      lowered = jax.jit(program(self.create_mesh())).lower(given)
      if guarded:
        changed = guards.guard(lowered)
      found = jax.tree.leaves(lowered.compile()(given))
    except UserError as error:
      return Outcome('refused', re.sub(r'[\d(].*', '', str(error)))
    except Exception as error:
      return Outcome('wrong', f'{type(error).__name__}: {str(error)[:300]}', len(changed))
    tolerance = 1e-6 if self.is_exact else (1e-3 if dtype == np.float32 else 1e-6)
    wrong = []
    for (path, _), one, other in zip(right, expected, found):
      off = np.max(np.abs(one - np.asarray(other).astype(np.float64)), initial=0)
      if not off <= tolerance * max(self.is_exact, 0.01, np.max(np.abs(one), initial=0)):
        wrong.append(
          f'{self._output_name(path)} of shape {one.shape} differs by {off:.3g} of {np.max(np.abs(one)):.3g}'
        )
    return Outcome('wrong', '; '.join(wrong[:4]), len(changed)) if wrong else Outcome('right', guarded=len(changed))

  def _output_name(self, path: Sequence[object]) -> str:
    text = jax.tree_util.keystr(tuple(path))
    numbers = re.findall(r'\d+', text)
    if 'v' in text:
      return f'gradient of v{numbers[-1]}'
    return self.outputs[int(numbers[-1])]

  def create_mesh(self) -> jax.sharding.Mesh:
    sizes, devices = tuple(size for _, size in self.mesh), jax.devices()[: num_devices(self.mesh)]
    names = tuple(name for name, _ in self.mesh)
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes), devices=devices)

  # -------------------------------------------------------------- smaller

  def smaller(self) -> Iterator[GraphCase]:
    """Yields smaller programs: fewer outputs, lines, regions, axes or constraints, or no gradients."""
    if len(self.outputs) > 1:
      half = len(self.outputs) // 2
      for kept in dict.fromkeys((self.outputs[:half], self.outputs[half:], *((name,) for name in self.outputs))):
        yield self.needed_part(kept)
    if self.gradient:
      yield dataclasses.replace(self, gradient=False)
    inner = [line for line in self.lines if not line.is_input]
    if len(inner) > 1:
      for line in [*inner[len(inner) // 2 : -1][::-1], *inner[: len(inner) // 2][::-1]]:
        yield self._replace_line(line, _to_input(line)).needed_part(self.outputs)
      for line in inner[::-1]:  # An earlier line as the only output.
        if self.outputs != (line.name,):
          yield self.needed_part((line.name,))
    for mesh, removed in smaller_meshes(self.mesh):
      lines = self.lines
      if removed is not None:
        lines = tuple(
          line if line.entries is None else line._replace(entries=remove_axis(line.entries, removed)) for line in lines
        )
      yield dataclasses.replace(self, mesh=mesh, lines=lines)
    for line in self.lines:
      for text in line.simpler:
        yield self._replace_line(line, line._replace(text=text, simpler=(), size=1)).needed_part(self.outputs)
    for line in self.lines:
      if line.entries is not None:
        yield self._replace_line(line, line._replace(entries=None))
        for fewer in smaller_entries(line.entries):
          yield self._replace_line(line, line._replace(entries=fewer))

  def needed_part(self, outputs: Sequence[str]) -> GraphCase:
    """Returns the program with these outputs, and only the lines that they need."""
    wanted = {*outputs}
    for line in reversed(self.lines):
      if line.name in wanted:
        wanted |= {*line.uses}
    lines = tuple(line for line in self.lines if line.name in wanted)
    return dataclasses.replace(self, lines=lines, outputs=tuple(outputs))

  def _replace_line(self, old: Line, new: Line) -> GraphCase:
    return dataclasses.replace(self, lines=tuple(new if line is old else line for line in self.lines))


def _place(line: Line) -> str:
  text = f'found[{line.name!r}]' if line.is_input else line.text
  return text if line.entries is None else f'at({text}, {spec_text(line.entries)})'


def _to_input(line: Line) -> Line:
  """Returns an input with a line's name, shape and split, to replace the line."""
  if line.dtype == 'float32':
    text = f'ints({line.shape})'
  elif line.dtype == 'bool':
    text = f'(ids({line.shape}, 2) > 0)'
  elif line.dtype == 'bfloat16':
    text = f'ints({line.shape}).astype(jnp.bfloat16)'
  else:
    text = f'ids({line.shape}, 2)'
  return Line(line.name, text, line.shape, line.dtype, is_input=True, entries=line.entries)


@functools.cache
def modules() -> dict[str, object]:
  """Returns the modules that expressions of lines refer to."""
  scope: dict[str, object] = {}
  exec('import functools\nimport jax, jax.numpy as jnp, numpy as np\nfrom jax import lax\nsmall = jnp.tanh\n', scope)
  return scope
