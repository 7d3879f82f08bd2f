"""Writes variables as a checkpoint that `transformers` loads, one tensor after another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.bridges.hf.files import Declared, write_folder
from praxis_lite.bridges.hf.hf_config import CONFIG_FILE
from praxis_lite.bridges.hf.tensors import Piece
from praxis_lite.checkpoints.streamed import StreamedArray, boxes, whole_box
from praxis_lite.common.errors import ConfigError, check_range
from praxis_lite.common.trees import NestedDict, Path, node_at

MAX_FILE_BYTES = 5 * 10**9


def write_checkpoint(
  folder: str | os.PathLike[str],
  config: Mapping[str, object],
  variables: NestedDict,
  found: Mapping[Path, Sequence[Piece]],
  max_file_bytes: int = MAX_FILE_BYTES,
  dtype: str | None = None,
) -> list[str]:
  """Writes config.json and the tensors; returns the names of the files.

  Args:
    folder: an existing folder.
    config: content of config.json.
    variables: the variables of the network, possibly padded, or arrays that are read in parts.
    found: the pieces of each variable by its path, as `tensors.pieces` returns them.
    max_file_bytes: larger checkpoints are written as several files and an index.
    dtype: the dtype of all tensors; None keeps the dtype of each variable.
  """
  return write_tensors(folder, config, *tensors_to_write(variables, found, dtype), max_file_bytes)


def write_tensors(
  folder: str | os.PathLike[str],
  config: Mapping[str, object],
  declared: Mapping[str, Declared],
  tensor: Callable[[str], np.ndarray],
  max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
  """Writes config.json and the declared tensors, which `tensor` returns by name; returns the names of the files."""
  check_range('max_file_bytes', max_file_bytes, least=1)
  files = write_folder(folder, declared, tensor, max_file_bytes)
  dtypes = {str(d.dtype) for d in declared.values() if not np.issubdtype(d.dtype, np.integer)}
  content = {**config, 'torch_dtype': dtypes.pop() if len(dtypes) == 1 else 'float32'}
  with open(os.path.join(folder, CONFIG_FILE), 'w', encoding='utf-8') as f:
    json.dump(content, f, indent=2, sort_keys=True)
    f.write('\n')
  return [CONFIG_FILE, *files]


def tensors_to_write(
  variables: NestedDict, found: Mapping[Path, Sequence[Piece]], dtype: str | None = None
) -> tuple[dict[str, Declared], Callable[[str], np.ndarray]]:
  """Returns the dtypes and shapes of the tensors to write, by name, and a function that returns a tensor by its name.

  The arguments are as for `write_checkpoint`; there are no tensors for variables that are not in `found`.
  """
  if jax.process_count() > 1:
    raise ConfigError('export-hf runs in one process, which can restore the checkpoint of several on its own devices')
  parts: dict[str, list[Piece]] = {}
  for of_variable in found.values():
    for piece in of_variable:
      parts.setdefault(piece.name, []).append(piece)

  def dtype_of(name: str) -> np.dtype:
    return jnp.dtype(dtype or node_at(variables, parts[name][0].path).dtype)

  def tensor(name: str) -> np.ndarray:
    theirs = np.empty(parts[name][0].view.their_shape, dtype_of(name))
    for piece in parts[name]:
      variable = node_at(variables, piece.path)
      if isinstance(variable, StreamedArray):
        _copy(variable, piece, theirs)
        continue
      ours = variable[piece.at] if isinstance(variable, np.ndarray) else _fetch(variable, piece)
      piece.view.write(theirs, whole_box(piece.view.shape), ours)
    return theirs

  declared = {name: Declared(dtype_of(name), of_tensor[0].view.their_shape) for name, of_tensor in parts.items()}
  return declared, tensor


def _copy(variable: StreamedArray, piece: Piece, theirs: np.ndarray) -> None:
  """Reads a piece of a variable, in parts, and writes it into its tensor."""
  stacked, shape = len(piece.at), piece.view.shape
  for box in boxes(piece.box(whole_box(shape)), variable.part_shape([*[1] * stacked, *shape])):
    part = variable.read(box)
    piece.view.write(theirs, box[stacked:], part.reshape(part.shape[stacked:]))


def _is_in_host_memory(data: jax.Array) -> bool:
  """Whether NumPy can read an array without a copy."""
  return all(device.platform == 'cpu' for device in data.devices())


def _part(data: jax.Array, at: tuple[int, ...]) -> jax.Array:
  if not at:
    return data
  # The indices are arguments, so one compiled program serves all layers and experts.
  rest = data.shape[len(at) :]
  corner = [*map(np.int32, at), *(np.int32(0) for _ in rest)]
  return jax.lax.dynamic_slice(data, corner, [*(1 for _ in at), *rest]).reshape(rest)


def _fetch(variable: jax.Array, piece: Piece) -> np.ndarray:
  """Returns a piece of a variable, in its true shape, collected from the devices that hold its parts."""
  shape = piece.view.shape
  whole = np.empty(shape, variable.dtype)
  for shard in variable.addressable_shards:
    data, bounds = shard.data, [i.indices(n)[:2] for i, n in zip(shard.index, variable.shape)]
    if shard.replica_id or any(not low <= i < high for i, (low, high) in zip(piece.at, bounds)):
      continue
    at = tuple(i - low for i, (low, _) in zip(piece.at, bounds))
    data = np.asarray(data)[at] if _is_in_host_memory(data) else _part(data, at)
    inside = tuple(slice(low, max(low, min(high, n))) for (low, high), n in zip(bounds[len(piece.at) :], shape))
    whole[inside] = np.asarray(data)[tuple(slice(i.stop - i.start) for i in inside)]
  return whole
