"""Reading a checkpoint onto a mesh: each device gets its part of each variable, straight from the files.

The host never holds more than one block of a variable: what is larger is assembled on the device.

    files, mapped -> a block, in the dimensions of the variable -> its place in the array on the device
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.hf.families import Family, family_of
from praxis_lite.hf.files import StoredTensor, read_folder
from praxis_lite.hf.hf_config import HfConfig, read_config
from praxis_lite.hf.tensors import Piece, check_tensors, pieces
from praxis_lite.partitioning.layout import StateLayout
from praxis_lite.trees import NestedDict, Path, inserted, lookup

# Bytes of a variable that are in host memory at once.
BLOCK_BYTES = 4 << 20
# Buffers that old checkpoints have beside the weights: they follow from config.json.
_BUFFERS = re.compile(r'.*\.rotary_emb\.inv_freq|.*\.h\.\d+\.attn\.(bias|masked_bias)')


class HfCheckpoint(NamedTuple):
  """A checkpoint on disk.

  Attributes:
    folder: where it is.
    config: its config.json.
    family: what kind of model it is.
    tensors: its tensors by name.
  """

  folder: str
  config: HfConfig
  family: Family
  tensors: dict[str, StoredTensor]


def open_checkpoint(folder: str | os.PathLike[str]) -> HfCheckpoint:
  """Reads config.json and the headers of the files in a folder, no weights.

  Raises:
    ConfigError: there is no config.json, or its model is not supported.
    CheckpointError: the files are missing, truncated or not safetensors.
  """
  folder = os.fspath(folder)
  config = read_config(folder)
  family = family_of(config)
  tensors = read_folder(folder)
  if not any(name.startswith(family.prefix) for name in tensors):  # Of the model without its head.
    tensors = {family.prefix + name: tensor for name, tensor in tensors.items()}
  return HfCheckpoint(folder, config, family, tensors)


def checked_pieces(checkpoint: HfCheckpoint, weights: NestedDict) -> dict[Path, list[Piece]]:
  """Returns the tensors of each variable; raises CheckpointError if one is missing, left over or of another shape.

  Args:
    weights: declarations of the variables of the `TransformerLm`.
  """
  tied = 'embedding' not in weights
  found = pieces(checkpoint.family.table(tied), weights)
  every = [piece for of_variable in found.values() for piece in of_variable]

  def ignored(name: str) -> bool:
    return bool(_BUFFERS.fullmatch(name)) or (tied and name == 'lm_head.weight')

  check_tensors(checkpoint.tensors, every, ignored, checkpoint.folder)
  return found


def stored_dtypes(checkpoint: HfCheckpoint, found: Mapping[Path, Sequence[Piece]]) -> NestedDict:
  """Returns the dtype of each variable in the files; the widest, if that of its layers differs."""
  dtypes: NestedDict = {}
  for path, of_variable in found.items():
    each = {checkpoint.tensors[piece.name].dtype for piece in of_variable}
    dtypes = inserted(dtypes, path, each.pop() if len(each) == 1 else np.dtype(np.float32))
  return dtypes


def read_variables(
  checkpoint: HfCheckpoint, found: Mapping[Path, Sequence[Piece]], layout: StateLayout, block_bytes: int = BLOCK_BYTES
) -> NestedDict:
  """Returns the variables on the mesh of `layout`, padded, in its dtypes.

  Args:
    checkpoint, found: the checkpoint, and what `checked_pieces` returns of it.
    layout: of the variables of the `TransformerLm`.
    block_bytes: about how many bytes are in host memory at once.
  """
  variables: NestedDict = {}
  for path, of_variable in found.items():
    padded: jax.ShapeDtypeStruct = lookup(layout.padded_shapes, path)
    true = lookup(layout.unpadded_shapes, path).shape
    source = _Source(checkpoint.tensors, of_variable, true, padded.dtype)
    variables = inserted(variables, path, source.on_mesh(padded, block_bytes))
  return variables


Box = tuple[slice, ...]  # One range with start and stop for each dimension.


class _Source(NamedTuple):
  """A variable in the files: its pieces, its true shape, and the dtype it is wanted in."""

  tensors: Mapping[str, StoredTensor]
  pieces: Sequence[Piece]
  shape: tuple[int, ...]
  dtype: np.dtype

  def on_mesh(self, padded: jax.ShapeDtypeStruct, block_bytes: int) -> jax.Array:
    """Returns the variable in a padded shape, split by its sharding."""
    sharding = padded.sharding
    assert sharding is not None
    local_shape = sharding.shard_shape(padded.shape)
    parts: dict[tuple[int, ...], jax.Array] = {}  # By where they begin, as several devices may hold the same part.
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(padded.shape).items():
      starts = tuple(i.indices(size)[0] for i, size in zip(index or (), padded.shape))
      if starts not in parts:
        parts[starts] = self._on_device(device, starts, local_shape, block_bytes)
      arrays.append(jax.device_put(parts[starts], device))
    return jax.make_array_from_single_device_arrays(padded.shape, sharding, arrays)

  def _on_device(
    self, device: jax.Device, starts: tuple[int, ...], shape: tuple[int, ...], block_bytes: int
  ) -> jax.Array:
    """Returns the part of this shape that begins at `starts`, zero beyond the end of the variable."""
    box = tuple(slice(s, max(s, min(s + n, size))) for s, n, size in zip(starts, shape, self.shape))
    if math.prod(shape) * self.dtype.itemsize <= block_bytes:
      whole = np.zeros(shape, self.dtype)
      for at in self._blocks(box, block_bytes):
        whole[_relative(at, starts)] = self._read(at)
      return jax.device_put(whole, device)
    with jax.default_device(device):
      array = jnp.zeros(shape, self.dtype)
      for at in self._blocks(box, block_bytes):
        corner = [np.int32(a.start - s) for a, s in zip(at, starts)]
        # Waiting for it, so that blocks do not queue up in host memory.
        array = jax.block_until_ready(_with_block(array, jax.device_put(self._read(at), device), corner))
    return array

  def _blocks(self, box: Box, block_bytes: int) -> Iterator[Box]:
    """Yields boxes that make up `box`, each in one tensor and of about `block_bytes` at most."""
    stacked = self.pieces[0].layer is not None
    layers = range(box[0].start, box[0].stop) if stacked else range(1)
    inner = box[1:] if stacked else box
    axis = self.pieces[0].view.outermost
    low, high = inner[axis].start, inner[axis].stop
    slab = math.prod(i.stop - i.start for n, i in enumerate(inner) if n != axis) * self.dtype.itemsize
    step = max(1, block_bytes // max(slab, 1))
    if 0 in (slab, high - low):
      return  # Nothing but padding.
    for layer in layers:
      for start in range(low, high, step):
        block = (*inner[:axis], slice(start, min(start + step, high)), *inner[axis + 1 :])
        yield (slice(layer, layer + 1), *block) if stacked else block

  def _read(self, box: Box) -> np.ndarray:
    """Returns a block, which lies in one tensor."""
    stacked = self.pieces[0].layer is not None
    piece = self.pieces[box[0].start if stacked else 0]
    block = piece.view.read(self.tensors[piece.name], box[1:] if stacked else box).astype(self.dtype, copy=False)
    return np.ascontiguousarray(block[None] if stacked else block)


def _relative(box: Box, starts: tuple[int, ...]) -> Box:
  return tuple(slice(b.start - s, b.stop - s) for b, s in zip(box, starts))


def _insert(array: jax.Array, block: jax.Array, corner: Sequence[jax.Array]) -> jax.Array:
  return jax.lax.dynamic_update_slice(array, block, corner)


_with_block = jax.jit(_insert, donate_argnums=0)
