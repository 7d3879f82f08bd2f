"""Specs of an optimizer's state, derived from the parameters' specs, for any optax transformation.

Each array of the state belongs to the parameter whose path is the end of the array's own path. Its dimensions are
traced back to the parameter's:

    parameter  decoder.w          (512, 2048)  ('data', 'mdl')
    slot       0.mu.decoder.w     (512, 2048)  ('data', 'mdl')     the parameter's shape: the parameter's spec
    slot       0.v_row.decoder.w  (512,)       ('data',)           a dimension was reduced, so its entry is dropped
    slot       0.v_col.decoder.w  (2048,)      ('mdl',)
    slot       0.v.decoder.w      (1,)         (None,)             a placeholder: replicated
    slot       0.count            ()           ()                  belongs to no parameter: replicated

The shape of a factored slot of a (512, 512) parameter does not show which dimension it has lost. A learner finds it by
trying its optimizer's update on small variables. If only `init` is given, it is run on shapes whose dimensions all
differ. For that, the later one of two equal dimensions is made larger. If neither is given, the names `v_row` and
`v_col` of optax's factored RMS are recognized, and otherwise the leftmost match is taken. A wrong guess would cost
communication, but never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from praxis_lite.common.trees import Path, leaves_by_path, map_with_path
from praxis_lite.sharding.specs import complete_spec

State = TypeVar('State')
SlotDims = tuple[int | None, ...]  # For each dimension of a slot, the parameter dimension that it comes from, or None.


def opt_state_specs(
  params_struct: object,
  params_specs: object,
  opt_state_struct: State,
  init_fn: Callable[..., object] | None = None,
  axes_fn: Callable[[], Mapping[Path, SlotDims]] | None = None,
) -> State:
  """Returns the tree of `opt_state_struct`, with a spec of full rank for each array.

  Args:
    params_struct: tree of objects with a shape and dtype, like the tree that initialized the transformation.
    params_specs: the same tree, with a PartitionSpec or None for each.
    opt_state_struct: the state, arrays or shapes: `jax.eval_shape(tx.init, params_struct)`.
    init_fn: `tx.init`; tells apart dimensions of equal size in factored slots.
    axes_fn: returns a list of indices for each slot, by path: for each dimension of the slot, the dimension of the
      parameter from which it comes. `learner.bind(weights).slot_axes` is such a function. It is called if the shape
      of a slot differs from that of its parameter.
  """
  specs = leaves_by_path(params_specs, is_leaf=lambda x: x is None)
  origins = slot_origins(params_struct, opt_state_struct, init_fn, axes_fn)

  def spec_of(path: Path, slot: jax.ShapeDtypeStruct) -> PartitionSpec:
    origin = origins.get(path)
    if origin is None:
      return complete_spec(None, len(slot.shape))
    spec = complete_spec(specs[origin.owner], origin.rank)
    return PartitionSpec(*(None if dim is None else spec[dim] for dim in origin.dims))

  return map_with_path(spec_of, opt_state_struct)


class SlotOrigin(NamedTuple):
  """The parameter that an array of an optimizer's state belongs to.

  Attributes:
    owner, rank: the path and the rank of the parameter.
    dims: for each dimension of the array, the dimension of the parameter that it comes from, or None.
  """

  owner: Path
  rank: int
  dims: SlotDims

  @property
  def whole(self) -> bool:
    """Whether the slot has the dimensions of its parameter."""
    return self.dims == tuple(range(self.rank))


def slot_origins(
  params_struct: object,
  opt_state_struct: object,
  init_fn: Callable[..., object] | None = None,
  axes_fn: Callable[[], Mapping[Path, SlotDims]] | None = None,
) -> dict[Path, SlotOrigin]:
  """Returns the origin of each slot that belongs to a parameter and is not a scalar; see `opt_state_specs`."""
  params = {path: tuple(x.shape) for path, x in leaves_by_path(params_struct).items()}
  slots = {path: tuple(x.shape) for path, x in leaves_by_path(opt_state_struct).items()}
  owners = {path: owner for path, shape in slots.items() if shape and (owner := owner_of(path, params)) is not None}
  reduced = {path for path, owner in owners.items() if slots[path] != params[owner]}
  known = axes_fn() if axes_fn is not None and reduced else {}
  traced = _traced_axes(init_fn, params_struct) if init_fn is not None and reduced - known.keys() else {}
  origins: dict[Path, SlotOrigin] = {}
  for path, owner in owners.items():
    shape = params[owner]
    dims: SlotDims = tuple(range(len(shape)))
    if path in reduced:
      found = [each[path] for each in (known, traced) if path in each and _are_valid(each[path], slots[path], shape)]
      dims = found[0] if found else dims_by_size(path, slots[path], shape)
    origins[path] = SlotOrigin(owner, len(shape), dims)
  return origins


def owner_of(path: Path, params: Mapping[Path, object]) -> Path | None:
  """Returns the longest parameter path in which `path` ends, ignoring final indices (`w` for `mu.w.0`); or None."""
  for end in range(len(path), -1, -1):
    for start in range(end + 1):
      if path[start:end] in params:
        return path[start:end]
    if end and not path[end - 1].isdigit():
      return None
  return None


def dims_by_size(path: Path, slot_shape: Sequence[int], shape: Sequence[int]) -> SlotDims:
  """Returns, for each dimension of a slot, a parameter dimension of its size; None if there is none, or for size 1."""
  slot_shape, shape = tuple(slot_shape), tuple(shape)
  if len(slot_shape) == len(shape):
    return tuple(i if s == d and s > 1 else None for i, (s, d) in enumerate(zip(slot_shape, shape)))
  factored = _factored_dims(path, shape)
  if factored and tuple(shape[i] for i in factored) == slot_shape:
    return factored
  leftmost = _leftmost_subsequence(slot_shape, shape)
  return tuple(None if slot_shape[i] == 1 else d for i, d in enumerate(leftmost)) or (None,) * len(slot_shape)


def _factored_dims(path: Path, shape: tuple[int, ...]) -> tuple[int, ...] | None:
  """Returns the parameter's dimensions that a slot of optax's factored RMS keeps; None if `path` is no such slot.

  `v_row` lacks the largest dimension, `v_col` the second largest.
  """
  if len(shape) < 2 or not {'v_row', 'v_col'} & set(path):
    return None
  order = np.argsort(shape)
  lost = int(order[-1]) if 'v_row' in path else int(order[-2])
  return tuple(i for i in range(len(shape)) if i != lost)


def _leftmost_subsequence(slot_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns indices into `shape` at which the sizes in `slot_shape` occur in order; () if they do not."""
  found: list[int] = []
  for size in slot_shape:
    if size not in shape[(start := found[-1] + 1 if found else 0) :]:
      return ()
    found.append(shape.index(size, start))
  return tuple(found)


def _traced_axes(init_fn: Callable[..., object], params_struct: object) -> dict[Path, SlotDims]:
  """Returns, for each dimension of each slot, the parameter's dimension from which it comes.

  `init_fn` is traced for parameters whose dimensions all have different sizes. Returns {} if it fails for such sizes.
  """
  # Dimension i of size d becomes d * k + i, where k is larger than any rank. This keeps the order of sizes, on which
  # factoring may depend. Of two dimensions of equal size, the later one becomes the larger one. If two parameters have
  # equal sizes of dimension 0, these stay equal, because `init_fn` may be mapped over dimension 0.
  k = 1 + max((len(p.shape) for p in jax.tree.leaves(params_struct)), default=0)

  def distinct(p: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(d if d <= 1 else d * k + i for i, d in enumerate(p.shape)), p.dtype)

  probes = jax.tree.map(distinct, params_struct)
  try:
    state = jax.eval_shape(init_fn, probes)
  except Exception:  # `init_fn` may need the true sizes, and raise anything.
    return {}
  shapes = {path: tuple(p.shape) for path, p in leaves_by_path(probes).items()}
  axes: dict[Path, SlotDims] = {}
  for path, slot in leaves_by_path(state).items():
    owner = owner_of(path, shapes)
    if owner is not None:
      sizes = shapes[owner]
      axes[path] = tuple(sizes.index(s) if s > 1 and s in sizes else None for s in slot.shape)
  return axes


def _are_valid(dims: SlotDims, slot_shape: Sequence[int], shape: tuple[int, ...]) -> bool:
  """Whether `dims` agree with the true shape of a slot.

  They may disagree, because they were found with other sizes, which an optimizer may treat differently.
  """
  used = [dim for dim in dims if dim is not None]
  sizes_agree = all(dim is None or shape[dim] == size for dim, size in zip(dims, slot_shape))
  return len(dims) == len(slot_shape) and bool(used) and len({*used}) == len(used) and sizes_agree
