"""How a task declares the use of each mesh axis, and which declaration contradicts the others.

Every dimension of a weight or activation has a role: the rows of a batch, the positions of its sequences, or features
of some size. Declarations should split dimensions of one role over the same axes. For each axis and role, every
declaration votes on whether the role is split over the axis; the minority are the suspects. There is no vote from

    features of an array that splits another dimension over the axis
    weights, about the axes of the batch, because fully sharded training gathers weights where they are used
    dimensions that are left to the compiler
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from praxis_lite.common.trees import nearness
from praxis_lite.instruments.explain.explanation import ArrayKind, Explanation, ShardingReport

Role = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Declaration:
  """The declared split of a weight or an activation. Dimensions that stack layers are left out."""

  path: str
  layer: str  # The path of its layer.
  shape: tuple[int, ...]
  axes: tuple[tuple[str, ...], ...]  # For each dimension, the mesh axes larger than 1 that split it.
  sources: tuple[str, ...]  # For each dimension, the config field that declares its split.
  roles: tuple[Role | None, ...]  # None if the compiler decides the split of the dimension.
  is_weight: bool
  stack: int = 1  # The number of layers that are stacked.

  @property
  def field(self) -> str:
    """The config field that declares the split of the array's last dimension, even if that field is not set."""
    return self.sources[-1].removesuffix(' is not set') if self.sources else self.path

  @property
  def all_axes(self) -> set[str]:
    return {axis for axes in self.axes for axis in axes}

  def fields_of(self, axes: Collection[str]) -> list[str]:
    """Returns the fields that split the array over any of `axes`."""
    return [source for own, source in zip(self.axes, self.sources) if set(own) & set(axes)]

  def roles_over(self, axes: Collection[str]) -> list[Role]:
    """Returns the roles of the dimensions that are split over any of `axes`."""
    return [role for own, role in zip(self.axes, self.roles) if role and set(own) & set(axes)]

  def votes(self, axis: str, batch_axes: Collection[str]) -> list[tuple[Role, bool]]:
    """Returns (role, whether this array splits it over `axis`) for each role that the array votes on."""
    if self.is_weight and axis in batch_axes:
      return []
    split = [axis in axes for axes in self.axes]
    return [
      (role, is_split)
      for role, is_split in zip(self.roles, split)
      if role and (is_split or not any(split) or (role[0] != 'features' and axis in batch_axes))
    ]


class Declarations:
  """All declarations of a task on a mesh, by the report of `explain`.

  `stacks` has, for the path of each variable, the number of its leading dimensions that stack layers. If `manual`, the
  whole step runs inside `shard_map`, where each device has its own rows.
  """

  def __init__(self, report: ShardingReport, stacks: Mapping[str, int], manual: bool = False):
    self.sizes = report.mesh_sizes
    rows = {axis for e in report.inputs for dim in e.dims for axis in dim.axes}
    used = set(self.sizes) if manual else rows
    self.batch_axes = {axis for axis in used if self.sizes[axis] > 1}
    self._tokens = [{e.shape[i] for e in report.inputs if len(e.shape) > i} for i in (0, 1)]
    self._padded = [{e.padded_shape[i] for e in report.inputs if len(e.shape) > i} for i in (0, 1)]
    self.weights = [self._declaration(e, stacks.get(e.path, 0)) for e in report.variables]
    self.activations = [self._declaration(e, 0) for e in report.activations if not (e.per_device or e.of_weight)]

  def _declaration(self, e: Explanation, stack: int) -> Declaration:
    dims, is_weight = e.dims[stack:], e.kind is ArrayKind.VARIABLE
    axes = tuple(tuple(axis for axis in dim.axes if self.sizes[axis] > 1) for dim in dims)
    roles = tuple(None if dim.free else self._role(i, dim.size, len(dims), is_weight) for i, dim in enumerate(dims))
    layers = math.prod(e.shape[:stack])
    return Declaration(e.path, e.layer, e.shape[stack:], axes, e.sources[stack:], roles, is_weight, layers)

  def _role(self, dim: int, size: int, rank: int, is_weight: bool) -> Role:
    if not is_weight and dim < min(2, rank - 1) and size in self._tokens[dim] | self._padded[dim]:
      return ('rows', 0) if dim == 0 else ('positions', 0)
    return ('features', size)

  # ---------------------------------------------------------------- what is declared

  def declarations_of(self, paths: Iterable[str]) -> list[Declaration]:
    wanted = set(paths)
    return [w for w in self.weights if w.path in wanted]

  def weights_near(self, layers: Collection[str]) -> list[Declaration]:
    """Returns the weights of some layers and their children; if these have none, those of the layers around them."""
    found = [w for w in self.weights if any(is_below(w.layer, layer) for layer in layers)]
    return found or [w for w in self.weights if any(is_below(layer, w.layer) for layer in layers if w.layer)]

  def fields_of(self, declarations: Iterable[Declaration], axes: Collection[str]) -> tuple[str, ...]:
    """Returns the fields with which declarations split arrays over any of `axes`, without duplicates."""
    return tuple(dict.fromkeys(field for d in declarations for field in d.fields_of(axes)))

  def row_axes(self, activations: Iterable[Declaration]) -> set[str]:
    """Returns the axes that split the rows of any of these activations."""
    return {axis for a in activations for axes, role in zip(a.axes, a.roles) if role == ('rows', 0) for axis in axes}

  def fitting(self, dims: Sequence[int], declarations: Iterable[Declaration]) -> list[Declaration]:
    """Returns the declarations of arrays whose part on one device may have these `dims`, in any order.

    Pipelines use weights as [stages, rounds, layers in a group, ...].
    """

    mesh = tuple(n for n in self.sizes.values() if n > 1)

    def fits(d: Declaration) -> bool:
      in_stages = len(dims) == len(d.shape) + 3 and d.stack % math.prod(dims[:3]) == 0
      local = sorted(size for size in dims[3 if in_stages else 0 :] if size != 1)
      return may_be_parts(tuple(local), tuple(size for size in d.shape if size != 1), mesh)

    return [d for d in declarations if fits(d)]

  # ---------------------------------------------------------------- what disagrees

  def suspects(self, axes: Collection[str], layers: Collection[str]) -> tuple[Declaration | None, list[Declaration]]:
    """Returns the suspect, a declaration that is probably wrong about `axes`, and the declarations that it contradicts.

    The suspect is the outvoted declaration that is nearest to `layers`; if several are equally near, it is the one that
    is outvoted for the most pairs of a role and an axis. The list begins with the declarations nearest to the suspect.
    If all declarations agree, returns None and an empty list.
    """
    voters: dict[tuple[Role, str], tuple[list[Declaration], list[Declaration]]] = {}
    for declaration in (*self.weights, *self.activations):
      for axis in axes:
        for role, is_split in declaration.votes(axis, self.batch_axes):
          voters.setdefault((role, axis), ([], []))[is_split].append(declaration)
    accused: dict[str, tuple[Declaration, list[Declaration]]] = {}
    counts: collections.Counter[str] = collections.Counter()
    for against, in_favour in voters.values():
      few, many = (in_favour, against) if len(in_favour) <= len(against) else (against, in_favour)
      for declaration in few:
        accused.setdefault(declaration.path, (declaration, []))[1].extend(many)
        counts[declaration.path] += 1
    if not accused:
      return None, []

    suspect, others = max(accused.values(), key=lambda pair: (nearness(pair[0].layer, layers), counts[pair[0].path]))
    # The nearest come first. Of equally near ones, those whose field is set come first, then arrays of the suspect's
    # kind.
    near = sorted(
      dict.fromkeys(others),
      key=lambda d: (-nearness(d.layer, [suspect.layer]), d.field != d.sources[-1], d.is_weight != suspect.is_weight),
    )
    return suspect, near


@functools.cache
def may_be_parts(local: tuple[int, ...], shape: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
  """Whether an array of `shape` may have parts of the shape `local` on a mesh of these sizes, in any order of dims."""
  orders = set(itertools.permutations(shape)) if len(local) == len(shape) else set()
  return any(all(part in parts_of(size, mesh) for part, size in zip(local, order)) for order in orders)


@functools.cache
def parts_of(size: int, mesh: tuple[int, ...]) -> frozenset[int]:
  """Returns all sizes that a device's part of a dimension can have, split over any mesh axes, padded or not."""
  products = {1}
  for n in mesh:
    products |= {p * n for p in products}
  padded = {-(-size // p) * p for p in products} | {size}
  return frozenset(whole // p for whole in padded for p in products if whole % p == 0)


def is_below(path: str, layer: str) -> bool:
  """Whether a path names `layer` or something below it."""
  return path == layer or path.startswith(f'{layer}.')
