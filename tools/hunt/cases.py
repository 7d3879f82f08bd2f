"""Cases and their results, and the reduction of wrong cases."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np

# How each dimension of an array is split: the mesh axes, major first.
Entries = tuple[tuple[str, ...], ...]
MeshSizes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of a case.

  Attributes:
    kind: 'right', 'refused', 'wrong' or 'skipped'.
    why: the message of a refusal, without parts that vary between cases; for a wrong case, what differs.
    guarded: how many operations the guards changed.
  """

  kind: str
  why: str = ''
  guarded: int = 0

  def fails_like(self, other: Outcome) -> bool:
    """Returns whether both are wrong with the same exception, or both with wrong numbers."""
    causes = [x.why.split(':')[0] if 'Error:' in x.why else '' for x in (self, other)]
    return self.kind == other.kind == 'wrong' and causes[0] == causes[1]


class FuzzCase(Protocol):
  """A program with its shardings and its mesh, as plain values."""

  @property
  def family(self) -> str: ...
  def run(self) -> Outcome: ...
  def smaller(self) -> Iterator[FuzzCase]: ...
  def script(self) -> str: ...


CaseT = TypeVar('CaseT', bound=FuzzCase)


def shrink(case: CaseT, is_wrong: Callable[[CaseT], bool], max_runs: int = 200) -> CaseT:
  """Returns the smallest case that is still wrong and is reached by single steps of `case.smaller()`.

  Args:
    case: a wrong case.
    is_wrong: whether a smaller one is wrong as well.
    max_runs: how often `is_wrong` may be called.
  """
  runs = 0
  progress = True
  while progress:
    progress = False
    for candidate in case.smaller():
      if runs == max_runs:
        return case
      runs += 1
      if is_wrong(candidate):  # type: ignore[arg-type]
        case, progress = candidate, True  # type: ignore[assignment]
        break
  return case


def random_mesh(rng: np.random.Generator, max_devices: int = 8) -> MeshSizes:
  """Draws one to four axes 'a', 'b', ... over 2 to 8 devices, mostly 8, and rarely with an axis of size 1."""
  devices = int(rng.choice([2, 3, 4, 4, 6, 8, 8, 8, 8]))
  devices = min(devices, max_devices)
  sizes = []
  while devices > 1:
    factor = int(rng.choice([d for d in range(2, devices + 1) if devices % d == 0]))
    sizes.append(factor)
    devices //= factor
  if len(sizes) < 4 and rng.random() < 0.1:
    sizes.append(1)
  return tuple(zip('abcd', (sizes[i] for i in rng.permutation(len(sizes)))))


def random_entries(rng: np.random.Generator, rank: int, mesh: MeshSizes, share: float = 0.75) -> Entries:
  """Puts each mesh axis on a random dimension, or on none, in any order."""
  entries: list[list[str]] = [[] for _ in range(rank)]
  names = [name for name, _ in mesh]
  for i in rng.permutation(len(names)) if rng.random() < 0.5 else range(len(names)):
    if rank and rng.random() < share:
      entries[rng.integers(rank)].append(names[i])
  return tuple(map(tuple, entries))


def smaller_entries(entries: Entries) -> Iterator[Entries]:
  """Yields the entries with one axis removed."""
  for dim, axes in enumerate(entries):
    for axis in axes:
      yield (*entries[:dim], tuple(a for a in axes if a != axis), *entries[dim + 1 :])


def remove_axis(entries: Entries, axis: str) -> Entries:
  return tuple(tuple(a for a in axes if a != axis) for axes in entries)


def smaller_meshes(mesh: MeshSizes) -> Iterator[tuple[MeshSizes, str | None]]:
  """Yields meshes with an axis removed, and its name, or with a smaller axis, and None."""
  for i, (name, size) in enumerate(mesh):
    if len(mesh) > 1:
      yield (*mesh[:i], *mesh[i + 1 :]), name
    if size > 2:
      yield (*mesh[:i], (name, 2), *mesh[i + 1 :]), None


def smaller_numbers(n: int) -> Iterator[int]:
  """Yields smaller sizes, the smallest first."""
  yield from sorted({m for m in (1, 2, 3, 4, n // 2, n - 1) if 0 < m < n})


def num_devices(mesh: MeshSizes) -> int:
  return math.prod(size for _, size in mesh)


def spec_text(entries: Entries) -> str:
  """Returns the entries as `P(...)`."""
  parts = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries]
  while parts and parts[-1] is None:
    parts.pop()
  return f'P({", ".join(map(repr, parts))})'
