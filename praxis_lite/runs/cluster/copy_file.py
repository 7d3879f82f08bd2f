"""The file of an emergency copy: what one process holds of the state of a run at a step.

    {"step": 12, ..., "shards": [[name, bounds, dtype, checksum], ...], "checksum": ...}      a line of JSON
    the bytes of each shard

Nothing is flushed to the disk, so a file may be lost or damaged if the machine fails. The checksums detect the damage.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from praxis_lite.checkpoints.contents import add_checksum, remove_checksum, stored_shape, to_leaf, to_stored
from praxis_lite.common.errors import CheckpointError, first_line
from praxis_lite.common.files import open_plain, parse_json, plain_dtype
from praxis_lite.common.trees import leaves_by_path, map_with_path, path_name
from praxis_lite.training.state import TrainState

IndexRanges = tuple[tuple[int, int], ...]  # (start, stop) in each dimension of a global array.
Shards = Sequence[tuple[str, IndexRanges, np.ndarray]]

# The errors that reading a damaged or forged file may raise.
NO_COPY = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)


class _Shard(NamedTuple):
  """A part of an array in the file of a copy; `at` is its offset in the file."""

  name: str
  bounds: IndexRanges
  dtype: np.dtype
  at: int
  checksum: int

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in self.bounds)

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def read(self, file: io.BufferedReader) -> np.ndarray:
    """Returns the values; raises ValueError if they have changed since they were written."""
    if not 0 <= self.nbytes <= os.fstat(file.fileno()).st_size - self.at:
      raise ValueError(f'{self.name} is incomplete')
    data = np.empty(self.nbytes, np.uint8)
    file.seek(self.at)
    if file.readinto(data.data) != self.nbytes or zlib.crc32(data.data) != self.checksum:
      raise ValueError(f'{self.name} has changed')
    return data.view(self.dtype).reshape(self.shape)


class EmergencyCopy:
  """This process's part of a copy, in a file; verified.

  Attributes:
    step: the step of the state.
    input_state: the state of the training input after the batch of this step.
    progress: as in `Checkpointer.save`.
    metrics: lines of metrics up to this step that could not be written to the disk.
    record: the first line of the file, as JSON; it also has 'mesh', 'processes', 'variables' and 'checkpoint'.
    save: a digest that is the same for all parts of one copy, in all processes, and different for each start of the
      run.

  Raises:
    OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError: the file has changed since it was written.
  """

  def __init__(self, file: Path):
    self._file = file
    self._shards: dict[tuple[str, IndexRanges], _Shard] = {}
    with open_plain(file) as opened:
      self.record = remove_checksum(parse_json(opened.readline()), 'its record')
      self.step: int = self.record['step']
      self.input_state: dict[str, Any] | None = self.record['input_state']
      self.progress: dict[str, Any] | None = self.record.get('progress')
      self.metrics: list[dict[str, Any]] = list(self.record['metrics'])
      self.save = save_of(self.record)
      at = opened.tell()
      for name, bounds, dtype, checksum in self.record['shards']:
        shard = _Shard(name, tuple((start, stop) for start, stop in bounds), plain_dtype(dtype), at, checksum)
        self._shards[shard.name, shard.bounds] = shard
        shard.read(opened)
        at += shard.nbytes

  def has(self, name: str, index: IndexRanges) -> bool:
    """Whether the file contains the part of the array `name` at `index`."""
    return (name, index) in self._shards

  def restore(self, shapes: TrainState) -> TrainState:
    """Returns the state; `shapes`, padded and with shardings, must equal those of the copied state.

    Raises:
      CheckpointError: the file has changed since it was verified.
    """

    def restore_array(path: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
      data, name = stored_shape(shape), path_name(path)
      part = lambda index: self._shards[name, _bounds(index, data.shape)].read(opened)  # noqa: E731
      return to_leaf(shape, jax.make_array_from_callback(data.shape, data.sharding, part))

    try:
      with open_plain(self._file) as opened:
        return map_with_path(restore_array, shapes)
    except (OSError, ValueError) as error:
      raise CheckpointError(f'{self._file}: {first_line(error)}') from error


@contextlib.contextmanager
def new_copy(file: Path) -> Iterator[IO[bytes]]:
  """Opens a file to write, which appears as `file` once it is complete; raises OSError if it cannot be written."""
  incomplete = file.with_name(f'{file.name}.{secrets.token_hex(4)}.incomplete')
  try:
    with open(incomplete, 'wb') as opened:
      yield opened
    incomplete.rename(file)
  finally:
    with contextlib.suppress(OSError):
      incomplete.unlink()


def encode_copy(record: dict[str, Any], shards: Shards) -> list[bytes | memoryview]:
  """Returns the content of a file in parts: a line with its record and checksums, and each shard."""
  data = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for _, _, x in shards]
  described = [[name, index, str(x.dtype), zlib.crc32(part)] for (name, index, x), part in zip(shards, data)]
  return [json.dumps(add_checksum({**record, 'shards': described})).encode() + b'\n', *data]


def save_of(record: dict[str, Any]) -> str:
  """Returns the digest of a save, which tells apart copies of one step that different starts of a run wrote."""
  content = [record['step'], record['input_state'], record.get('start', '')]
  return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()


def save_in(file: Path) -> str:
  """Returns the digest of the save from the first line of a copy's file; reads no more than this line."""
  with open_plain(file) as opened:
    return save_of(remove_checksum(parse_json(opened.readline()), 'its record'))


def files_in(folder: Path) -> Iterator[tuple[int, Path]]:
  """Yields (step, file) of all copies in a folder, including incomplete ones."""
  for file in folder.glob('*.*'):
    if (step := file.name.partition('.')[0]).isdecimal():
      yield int(step), file


def local_parts(shapes: TrainState) -> Iterator[tuple[str, IndexRanges]]:
  """Yields (name, index) of each part of the state that this process holds; replicas are yielded once."""
  for path, shape in leaves_by_path(shapes).items():
    data = stored_shape(shape)
    indices = data.sharding.addressable_devices_indices_map(data.shape).values()
    yield from dict.fromkeys((path_name(path), _bounds(index, data.shape)) for index in indices)


def num_bytes(shapes: TrainState) -> int:
  """Returns the bytes of the parts of the state that this process holds."""
  sizes = {path_name(path): stored_shape(shape).dtype.itemsize for path, shape in leaves_by_path(shapes).items()}
  return sum(sizes[name] * math.prod(stop - start for start, stop in index) for name, index in local_parts(shapes))


def shards_of(state: TrainState) -> Shards:
  """Returns copies of the parts of the arrays that this process holds; replicas are copied once."""
  shards: dict[tuple[str, IndexRanges], jax.Array] = {}
  for path, leaf in leaves_by_path(state).items():
    array = to_stored(leaf)
    for shard in array.addressable_shards:
      shards.setdefault((path_name(path), _bounds(shard.index, array.shape)), shard.data)
  for data in shards.values():
    data.copy_to_host_async()
  return [(name, index, np.array(np.asarray(data), copy=True)) for (name, index), data in shards.items()]


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> IndexRanges:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape))
