"""Global batches: pads them to a multiple of the number of devices, and puts them on the mesh.

Every leaf of a batch has the batch as dimension 0. Examples added as padding are zeros, and have weight zero in the
leaf `weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.common.errors import DataError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict, leaves_by_path, path_name

WEIGHTS = 'weights'
BatchT = TypeVar('BatchT')
_Leaf = np.ndarray | jax.Array | jax.ShapeDtypeStruct


def batch_size(batch: object) -> int:
  """Returns the size of dimension 0, which all leaves share.

  Raises:
    DataError: a leaf is a scalar, leaves differ in this size, or there are no leaves.
  """
  shapes = {name: x.shape for name, x in _arrays_by_name(batch).items()}
  if not shapes:
    raise DataError('the batch has no arrays')
  for name, shape in shapes.items():
    if not shape:
      raise DataError(f'batch leaf {name!r} is a scalar; every leaf of a batch has the batch as dimension 0')
  (first, (size, *_)), *others = shapes.items()
  for name, shape in others:
    if shape[0] != size:
      raise DataError(f'batch leaf {name!r} has {number_of(shape[0], "example")}, and {first!r} has {size}')
  return int(size)


def pad_batch(batch: Mapping[str, object], multiple: int) -> NestedDict:
  """Appends examples of zeros until the batch size is a multiple of `multiple`.

  Args:
    batch: NumPy arrays, possibly nested, of shape [B, ...]. `weights` are added if there are none: ones of shape [B].
    multiple: usually the number of devices.
  """
  size = batch_size(batch)
  added = -size % multiple

  def pad(x: np.ndarray) -> np.ndarray:
    return np.pad(x, [(0, added)] + [(0, 0)] * (x.ndim - 1)) if added else x

  return jax.tree.map(pad, {WEIGHTS: np.ones(size, np.float32), **batch})


def padded_rows(rows: int, multiple: int) -> int:
  """Returns `rows` rounded up to a multiple of `multiple`."""
  return rows + -rows % multiple


def padded_batch_shape(batch_struct: Mapping[str, object], multiple: int) -> NestedDict:
  """Returns the shapes and dtypes that `pad_batch` returns for a batch of these shapes and dtypes."""
  size = batch_size(batch_struct)
  batch = {WEIGHTS: jax.ShapeDtypeStruct((size,), np.float32), **batch_struct}
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct((padded_rows(size, multiple), *x.shape[1:]), x.dtype), batch)


def check_batch(batch: object, expected: object) -> None:
  """Raises a DataError unless a process's share of a batch has the leaves, shapes and dtypes of the global batch."""
  want, have = _arrays_by_name(expected), _arrays_by_name(batch)
  if set(want) != set(have):
    raise DataError(f'the batch has the leaves {sorted(have)}; the step was built for {sorted(want)}')
  for name, x in want.items():
    if tuple(have[name].shape[1:]) != tuple(x.shape[1:]) or have[name].shape[0] * jax.process_count() != x.shape[0]:
      raise DataError(
        f'batch leaf {name!r} has shape {tuple(have[name].shape)}; the step was built for {tuple(x.shape)}'
      )
    # On a device, int64 becomes int32, and float64 float32.
    if jax.dtypes.canonicalize_dtype(have[name].dtype) != jax.dtypes.canonicalize_dtype(x.dtype):
      raise DataError(f'batch leaf {name!r} is {have[name].dtype}; the step was built for {x.dtype}')


def is_on_device(batch: object, expected: object) -> bool:
  """Whether a batch has the leaves and shapes of `expected`, the padded global batch, and all are JAX arrays."""
  have, want = _arrays_by_name(batch), _arrays_by_name(expected)
  return list(have) == list(want) and all(
    isinstance(x, jax.Array) and x.shape == want[name].shape for name, x in have.items()
  )


def put_on_mesh(batch: BatchT, mesh: Mesh | None, specs: object) -> BatchT:
  """Puts a batch on the devices, asynchronously.

  Args:
    batch: NumPy arrays: the whole global batch, or with several processes this process's share of it.
    mesh: the mesh; None means the default device.
    specs: a spec for each leaf, or a prefix of the tree.
  """
  if mesh is None:
    return jax.device_put(batch)
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
  return jax.make_array_from_process_local_data(shardings, batch)


def _arrays_by_name(tree: object) -> dict[str, _Leaf]:
  return {path_name(path): x for path, x in leaves_by_path(tree).items()}
