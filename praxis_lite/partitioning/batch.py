"""Global batches: padding them to what the mesh divides, and putting them on it.

Every leaf of a batch has the batch as dimension 0. Added examples are zeros, and weigh zero: the leaf `weights` says
so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.errors import DataError

WEIGHTS = 'weights'


def batch_size(batch: Any) -> int:
  """Size of dimension 0, which all leaves share.

  Raises:
    DataError: a leaf is a scalar or differs from the others, or there are no leaves.
  """
  sizes = {jax.tree_util.keystr(path, simple=True, separator='.'): x.shape for path, x in _leaves(batch)}
  if not sizes:
    raise DataError('the batch has no arrays')
  for name, shape in sizes.items():
    if not shape:
      raise DataError(f'batch leaf {name!r} is a scalar; every leaf of a batch has the batch as dimension 0')
  (first, first_shape), *others = sizes.items()
  for name, shape in others:
    if shape[0] != first_shape[0]:
      raise DataError(f'batch leaf {name!r} has {shape[0]} examples, and {first!r} has {first_shape[0]}')
  return int(first_shape[0])


def pad_batch(batch: Mapping[str, Any], multiple: int) -> dict[str, Any]:
  """Appends zero examples until the batch size is a multiple of `multiple`.

  Args:
    batch: NumPy arrays, possibly nested, of shape [B, ...].
    multiple: usually the number of devices.

  Returns:
    A new dict; `weights`, ones of shape [B] before padding, is added where there is none.
  """
  size = batch_size(batch)
  padded_size = _round_up(size, multiple)

  def pad(x: Any) -> np.ndarray:
    return np.pad(x, [(0, padded_size - size)] + [(0, 0)] * (x.ndim - 1)) if padded_size > size else x

  weighted = dict(batch) if WEIGHTS in batch else {**batch, WEIGHTS: np.ones(size, np.float32)}
  return jax.tree.map(pad, weighted)


def padded_batch_shape(batch_struct: Mapping[str, Any], multiple: int) -> dict[str, Any]:
  """Shapes and dtypes of what `pad_batch` makes of a batch of shapes and dtypes."""
  size = batch_size(batch_struct)

  def pad(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((_round_up(size, multiple), *x.shape[1:]), x.dtype)

  weights = {} if WEIGHTS in batch_struct else {WEIGHTS: jax.ShapeDtypeStruct((size,), np.float32)}
  return jax.tree.map(pad, {**batch_struct, **weights})


def check_batch(batch: Any, expected: Any) -> None:
  """Raises a DataError where a batch is not as `expected`: leaves, sizes but for the share of each process, dtypes."""
  want, have = (
    {jax.tree_util.keystr(p, simple=True, separator='.'): x for p, x in _leaves(t)} for t in (expected, batch)
  )
  if set(want) != set(have):
    raise DataError(f'the batch has the leaves {sorted(have)}; the step was built for {sorted(want)}')
  for name, x in want.items():
    if tuple(have[name].shape[1:]) != tuple(x.shape[1:]) or have[name].shape[0] * jax.process_count() != x.shape[0]:
      raise DataError(
        f'batch leaf {name!r} has shape {tuple(have[name].shape)}; the step was built for {tuple(x.shape)}'
      )
    # On a device, int64 is int32 and float64 float32.
    if jax.dtypes.canonicalize_dtype(have[name].dtype) != jax.dtypes.canonicalize_dtype(x.dtype):
      raise DataError(f'batch leaf {name!r} is {have[name].dtype}; the step was built for {x.dtype}')


def is_on_device(batch: Any, expected: Any) -> bool:
  """Whether a batch is of JAX's arrays already, padded to the shapes of `expected`."""
  have, want = _leaves(batch), _leaves(expected)
  return [path for path, _ in have] == [path for path, _ in want] and all(
    isinstance(x, jax.Array) and x.shape == e.shape for (_, x), (_, e) in zip(have, want)
  )


def put_on_mesh(batch: Any, mesh: Mesh | None, specs: Any) -> Any:
  """Puts a batch on the devices, asynchronously.

  Args:
    batch: NumPy arrays: the whole global batch, or with several processes this process's share of it.
    mesh: the mesh; None puts the batch on the default device.
    specs: a spec for each leaf, of which `specs` may be a prefix.
  """
  if mesh is None:
    return jax.device_put(batch)
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
  if jax.process_count() == 1:
    return jax.device_put(batch, shardings)

  def assemble(sharding: NamedSharding, subtree: Any) -> Any:
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), subtree)

  return jax.tree.map(assemble, shardings, batch)


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(tree)[0]


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
