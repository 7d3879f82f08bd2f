"""Reads variables from a Hugging Face checkpoint in parts, into a checkpoint of a run or onto a mesh.

The host holds only a few parts of a variable at a time. Each device of a mesh gets its own part of a variable, which is
assembled on the device if it is large.

    mapped files -> a part, in the dimensions of the variable -> the run's checkpoint, or the array on the device
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.bridges.hf.compressed_tensors import is_compressed, join_packed
from praxis_lite.bridges.hf.families import family_of
from praxis_lite.bridges.hf.family import Family
from praxis_lite.bridges.hf.files import Tensor, read_folder
from praxis_lite.bridges.hf.fp8_blocks import block_of, join_block_scales
from praxis_lite.bridges.hf.hf_config import HfConfig, read_config
from praxis_lite.bridges.hf.mxfp4 import join_scales
from praxis_lite.bridges.hf.tensors import Piece, check_tensors, pieces
from praxis_lite.bridges.hf.text_part import text_part, text_tensors
from praxis_lite.checkpoints.streamed import PART_BYTES, Box, StreamedArray, boxes
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.trees import NestedDict, Path, nest, node_at
from praxis_lite.sharding.layout import StateLayout

# Bytes of a variable that are in transit to a device at the same time.
BLOCK_BYTES = 4 << 20
_OTHER_HEADS = ('score', 'classifier', 'qa_outputs', 'v_head', 'multiple_choice_head')


class HfCheckpoint(NamedTuple):
  """A checkpoint on disk."""

  folder: str  # The path of its folder.
  config: HfConfig  # The content of its config.json.
  family: Family  # The family of its model.
  # The tensors of its files by name. Left out are copies of other tensors, and values that config.json implies.
  tensors: dict[str, Tensor]
  # Lines about tensors that were left out, and about fields of config.json that the tensors contradict.
  notes: tuple[str, ...] = ()


def open_checkpoint(folder: str | os.PathLike[str]) -> HfCheckpoint:
  """Reads config.json and the headers of the files in a folder, and the tensors that may be copies of others.

  Raises:
    ConfigError: config.json does not exist, or its model is not supported.
    CheckpointError: the files are missing, truncated or not safetensors.
  """
  folder = os.fspath(folder)
  whole = read_config(folder)
  config = text_part(whole)
  family = family_of(config)
  tensors = read_folder(folder)
  left_out: tuple[str, ...] = ()
  if config is not whole:
    tensors, left_out = text_tensors(tensors, folder)
  others = {*_OTHER_HEADS} - family.own_heads
  head = next((name for name in tensors if name.split('.')[0] in others), None)
  if head is not None:
    raise CheckpointError(
      f'{tensors[head].file}: {head} belongs to a head that does not predict the next token, such as a classification '
      'head; only language models are supported'
    )
  prefix = family.prefix_in(config)
  if not prefix:  # The model has no head, but some of its checkpoints use the names of a model with a head.
    tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
  elif not any(name.startswith(prefix) for name in tensors):  # The checkpoint was saved without a head.
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
  tensors = {family.current_name(name): tensor for name, tensor in tensors.items()}
  config = family.to_stored(config, tensors)
  hf = config.replace_defaults(family.defaults)
  stored = {name: tensor for name, tensor in tensors.items() if not family.is_buffer(name, tensor, hf)}
  quantization = hf.values.get('quantization_config')
  readable = dict[str, Tensor](stored)
  if quantization:
    block = block_of(quantization)
    if block is not None:
      readable = join_block_scales(stored, block)
    else:
      readable = join_packed(stored) if is_compressed(quantization) else join_scales(stored)
  unused = dict.fromkeys(name for name in readable if family.is_unused(name, hf))
  readable = {name: tensor for name, tensor in readable.items() if name not in unused}
  notes = left_out
  if unused:
    what = 'which the architecture of config.json does not have'
    notes = (*notes, f'{folder}: left out {", ".join(unused)}, {what}')
  if hf['tie_word_embeddings'] and family.head in readable:
    embedding = next(pair.theirs for pair in family.table(tied=True) if pair.ours == family.table_path)
    if embedding in readable and _are_equal(readable[family.head], readable[embedding]):
      del readable[family.head]
    else:
      config = HfConfig({**config.values, 'tie_word_embeddings': False}, config.where)
      differ = f'{family.head} differs from {embedding}, so they are not tied'
      notes = (*notes, f'{config.where}: tie_word_embeddings is true, but {differ}')
  for copy, original in family.copies_in(config.replace_defaults(family.defaults)).items():
    if copy in readable and original in readable and _are_equal(readable[copy], readable[original]):
      del readable[copy]
  return HfCheckpoint(folder, config, family, readable, notes)


def _are_equal(one: Tensor, other: Tensor) -> bool:
  """Whether two tensors, which are not scalars, have the same shape and values; reads a block of rows at a time."""
  if one.shape != other.shape or not one.shape:
    return False
  rows = max(1, BLOCK_BYTES // max(1, one.dtype.itemsize * math.prod(one.shape[1:])))
  blocks = [(slice(i, i + rows),) for i in range(0, one.shape[0], rows)]
  return all(np.array_equal(one.read(block), other.read(block)) for block in blocks)


def checked_pieces(checkpoint: HfCheckpoint, weights: NestedDict) -> dict[Path, list[Piece]]:
  """Returns the pieces of all variables of the network, which `weights` declares.

  Raises:
    CheckpointError: a tensor is missing, left over or of another shape.
  """
  found = pieces(checkpoint.family.table_of(weights), weights)
  every = [piece for of_variable in found.values() for piece in of_variable]
  check_tensors(checkpoint.tensors, every, checkpoint.folder)
  return found


def stored_dtypes(checkpoint: HfCheckpoint, found: Mapping[Path, Sequence[Piece]]) -> NestedDict:
  """Returns the dtype of each variable in the files; float32 if its tensors have different dtypes."""

  def dtype(of_variable: Sequence[Piece]) -> np.dtype:
    each = {checkpoint.tensors[piece.name].dtype for piece in of_variable}
    return each.pop() if len(each) == 1 else np.dtype(np.float32)

  return nest({path: dtype(of_variable) for path, of_variable in found.items()})


def streamed_variables(
  checkpoint: HfCheckpoint, found: Mapping[Path, Sequence[Piece]], shapes: NestedDict
) -> NestedDict:
  """Returns the variables as arrays whose parts are read when they are needed; `shapes` has the dtypes to convert to.

  `found` is the result of `checked_pieces`.
  """

  def stream(path: Path, of_variable: Sequence[Piece]) -> _Variable:
    shape: jax.ShapeDtypeStruct = node_at(shapes, path)
    by_index = {piece.at: piece for piece in of_variable}
    return _Variable(checkpoint.tensors, by_index, shape.shape, np.dtype(shape.dtype))

  return nest({path: stream(path, of_variable) for path, of_variable in found.items()})


def read_variables(
  checkpoint: HfCheckpoint, found: Mapping[Path, Sequence[Piece]], layout: StateLayout, block_bytes: int = BLOCK_BYTES
) -> NestedDict:
  """Returns the variables as `layout` stores them on its mesh; holds about `block_bytes` at a time in host memory."""
  variables = streamed_variables(checkpoint, found, layout.unpadded_shapes)
  return jax.tree.map(lambda v, padded: _put_on_mesh(v, padded, block_bytes), variables, layout.padded_shapes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Variable(StreamedArray):
  """A variable in the files of a checkpoint.

  Attributes:
    tensors: the tensors of the checkpoint by name.
    pieces: the pieces of the variable, by their indices along its first dimensions.
  """

  tensors: Mapping[str, Tensor]
  pieces: Mapping[tuple[int, ...], Piece]
  shape: tuple[int, ...]
  dtype: np.dtype

  def read(self, box: Box) -> np.ndarray:
    """Returns a copy of a part; raises CheckpointError if it has NaN or infinities."""
    part, stacked = np.empty([b.stop - b.start for b in box], self.dtype), len(self._first.at)
    for i in np.ndindex(*part.shape[:stacked]):
      piece = self.pieces[tuple(b.start + n for b, n in zip(box, i))]
      part[i] = piece.view.read(self.tensors[piece.name], box[stacked:])
      if not np.isfinite(part[i]).all():
        tensor, what = self.tensors[piece.name], 'NaN' if np.isnan(part[i]).any() else 'infinite values'
        raise CheckpointError(f'{tensor.file}: {tensor.name} has {what}; its training diverged, or the file is damaged')
    return part

  def part_shape(self, sizes: Sequence[int], part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    """Returns a shape for parts that are contiguous in the files: they are cut along a tensor's outermost dimension."""
    stacked = len(self._first.at)
    if len(sizes) == stacked:  # A scalar variable, or one scalar for each layer.
      return super().part_shape(sizes, part_bytes)
    axis = stacked + self._first.view.outermost
    order = [*range(stacked), axis, *(i for i in range(stacked, len(sizes)) if i != axis)]
    shape = super().part_shape([sizes[i] for i in order], part_bytes)
    return tuple(shape[order.index(i)] for i in range(len(sizes)))

  @property
  def _first(self) -> Piece:
    return next(iter(self.pieces.values()))


def _put_on_mesh(variable: StreamedArray, padded: jax.ShapeDtypeStruct, block_bytes: int) -> jax.Array:
  """Returns a variable in a padded shape, split over devices, with zeros as padding."""
  sharding = padded.sharding
  assert sharding is not None
  local_shape = sharding.shard_shape(padded.shape)
  parts: dict[tuple[int, ...], jax.Array] = {}  # By start index: several devices may hold the same part.
  arrays = []
  for device, index in sharding.addressable_devices_indices_map(padded.shape).items():
    starts = tuple(i.indices(size)[0] for i, size in zip(index or (), padded.shape))
    if starts not in parts:
      parts[starts] = _put_on_device(variable, device, starts, local_shape, block_bytes)
    arrays.append(jax.device_put(parts[starts], device))
  return jax.make_array_from_single_device_arrays(padded.shape, sharding, arrays)


def _put_on_device(
  variable: StreamedArray, device: jax.Device, starts: tuple[int, ...], shape: tuple[int, ...], block_bytes: int
) -> jax.Array:
  """Returns the part of a variable that begins at `starts` and has this shape, on a device."""
  box = tuple(slice(s, max(s, min(s + n, size))) for s, n, size in zip(starts, shape, variable.shape))
  blocks = list(boxes(box, variable.part_shape([b.stop - b.start for b in box], block_bytes)))
  if math.prod(shape) * variable.dtype.itemsize <= block_bytes:
    whole = np.zeros(shape, variable.dtype)
    for at in blocks:
      whole[tuple(slice(b.start - s, b.stop - s) for b, s in zip(at, starts))] = variable.read(at)
    return jax.device_put(whole, device)
  with jax.default_device(device):
    array = jnp.zeros(shape, variable.dtype)
    for at in blocks:
      corner = [np.int32(b.start - s) for b, s in zip(at, starts)]
      # Wait for each block, so that blocks do not queue up in host memory.
      array = jax.block_until_ready(_with_block(array, jax.device_put(variable.read(at), device), corner))
  return array


_with_block = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)
