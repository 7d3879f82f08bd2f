"""Reads and writes safetensors files: a header, and then the arrays, whose names and positions the header lists.

    8 bytes     n, the length of the header, little endian
    n bytes     JSON: {"wte.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}, ...}
    the rest    the arrays in C order; offsets count from here

A checkpoint is a folder with one such file, or with several files and an index, {"weight_map": {tensor: file}}.

This module does not use the package `safetensors` (release 0.8), because that package

* keeps every page that it has read in memory until the file is closed: reading 512 MiB in parts of 4 MiB made the
  process 512 MiB larger. With the functions below, the process did not grow. Opening the file again for each part took
  45 s for 4,000 tensors; the functions below take 0.9 s.
* does not say how many bytes a truncated file lacks, only "incomplete metadata, file not fully covered"; cannot open a
  file if one of its tensors has an unknown dtype; and cannot slice a tensor without elements.
* can only write tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.files import FETCH_LFS, is_lfs_pointer, parse_json, unless_empty

SINGLE_FILE, INDEX_FILE = 'model.safetensors', 'model.safetensors.index.json'
_SHARD = re.compile(r'.*-\d+-of-\d+\.safetensors')
_DTYPES: dict[str, np.dtype] = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
}
_MASKS: dict[str, np.dtype] = {'BOOL': np.dtype(np.bool_), 'U8': np.dtype(np.uint8)}
_INTEGERS: dict[str, np.dtype] = {'I8': np.dtype(np.int8), 'I32': np.dtype(np.int32), 'I64': np.dtype(np.int64)}
_EIGHT_BITS: dict[str, np.dtype] = {'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn)}
_KNOWN = _DTYPES | _MASKS | _INTEGERS | _EIGHT_BITS
_NAMES = {dtype: name for name, dtype in _KNOWN.items()}
_METADATA = '__metadata__'


class StoredTensor(NamedTuple):
  """The location of a tensor."""

  name: str  # The tensor's name in the checkpoint.
  file: str  # The path of the file.
  kind: str  # The dtype, as safetensors spells it.
  shape: tuple[int, ...]
  offset: int  # The position of the first byte in the file.

  @property
  def dtype(self) -> np.dtype:
    """The tensor's dtype; raises CheckpointError unless it is a floating-point dtype of 16 bits or more."""
    if self.kind not in _DTYPES:
      raise CheckpointError(
        f'{self.file}: {self.name} has dtype {self.kind}; a checkpoint to import has {", ".join(_DTYPES)}, '
        'so one that is quantized must be dequantized first'
      )
    return _DTYPES[self.kind]

  def read(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a copy of a part. Maps only the pages of the file that contain this part, and unmaps them at once."""
    if 0 in self.shape:
      return np.empty(self.shape, self.dtype)[index]
    return np.array(np.memmap(self.file, self.dtype, 'r', self.offset, self.shape)[index])

  def read_bytes(self, index: tuple[slice, ...]) -> np.ndarray:
    """Like `read`, for a tensor whose elements have 8 bits: returns them as bytes."""
    return np.array(np.memmap(self.file, np.uint8, 'r', self.offset, self.shape)[index])

  def read_integers(self, index: tuple[slice, ...]) -> np.ndarray:
    """Like `read`, for a tensor of signed integers; raises CheckpointError for other dtypes."""
    if self.kind not in _INTEGERS:
      raise CheckpointError(f'{self.file}: {self.name} has dtype {self.kind}; expected {" or ".join(_INTEGERS)}')
    return np.array(np.memmap(self.file, _INTEGERS[self.kind], 'r', self.offset, self.shape)[index])

  def read_all(self) -> np.ndarray:
    """Returns a copy of the whole tensor, which may also be a mask of booleans or bytes."""
    kind = _MASKS.get(self.kind) or self.dtype
    return np.fromfile(self.file, kind, math.prod(self.shape), offset=self.offset).reshape(self.shape)


class DerivedTensor(NamedTuple):
  """A tensor whose values are computed from others; its fields are used like those of a `StoredTensor`."""

  name: str
  file: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[tuple[slice, ...]], np.ndarray]


Tensor: TypeAlias = StoredTensor | DerivedTensor


def read_folder(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
  """Returns the tensors of a checkpoint by name, from the headers of its files.

  Raises:
    CheckpointError: the folder has no safetensors, or a file is missing, truncated or not of this format.
  """
  folder = os.fspath(folder)
  index = os.path.join(folder, INDEX_FILE)
  if not os.path.isfile(index):
    single = os.path.join(folder, SINGLE_FILE)
    if not os.path.isfile(single):
      shard = next((name for name in sorted(os.listdir(folder)) if _SHARD.fullmatch(name)), None)
      instead = (
        other_format(folder) if shard is None else f'; {shard} is a part of a checkpoint: download the index too'
      )
      raise CheckpointError(f'{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{instead}')
    return read_header(single)
  with open(index, 'rb') as f:
    try:
      file_of: dict[str, str] = parse_json(f.read())['weight_map']
      if not all(isinstance(file, str) for file in file_of.values()):
        raise ValueError('weight_map has a value that is not the name of a file')
      files = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise CheckpointError(f'{index} is not an index of safetensors: {error}') from None
  found: dict[str, StoredTensor] = {}
  for file in files:
    is_inside = os.path.basename(file) == file and file.isprintable()
    if not is_inside or not os.path.isfile(os.path.join(folder, file)):
      raise CheckpointError(f'{index} names the file {file}, and there is no such file beside it')
    found.update(read_header(os.path.join(folder, file)))
  missing = sorted(file_of.keys() - found.keys())
  if missing:
    raise CheckpointError(f'{index} says that {missing[0]} is in {file_of[missing[0]]}, which does not have it')
  return found


# Files of other formats by their endings, and what to do instead.
_DOWNLOAD = 'download model*.safetensors and config.json of the same model'
_OTHERS = {
  '.gguf': 'is in the format of llama.cpp; download the model from which it was made, as *.safetensors',
  'consolidated.safetensors': f'has the names of tensors of its authors; {_DOWNLOAD}',
  'consolidated.00.pth': f'is in the format of its authors; {_DOWNLOAD}',
  'adapter_model.safetensors': 'is an adapter, such as LoRA, without the model; import that, then call read_adapter',
  **dict.fromkeys(('.bin', '.pth', '.pt'), 'is in an older format: load and save it with transformers'),
}


def other_format(path: str) -> str:
  """Returns the end of an error message that names a file of another format; '' if there is no such file.

  Args:
    path: the file, or a folder to search.
  """
  names = sorted(os.listdir(path)) if os.path.isdir(path) else [os.path.basename(path)]
  return next((f'; {n} {remedy}' for ending, remedy in _OTHERS.items() for n in names if n.endswith(ending)), '')


def read_header(file: str) -> dict[str, StoredTensor]:
  """Returns the tensors of one file by name; raises CheckpointError if it is truncated or not of this format."""
  if is_lfs_pointer(file):
    raise CheckpointError(f'{file} {FETCH_LFS}')
  size = os.path.getsize(file)
  with open(file, 'rb') as f:
    length = int.from_bytes(f.read(8), 'little')
    if size < 8 or length > size - 8:
      what = f'is truncated, or not a safetensors file: its header is longer than {size} bytes'
      raise CheckpointError(f'{file} {unless_empty(file, what)}')
    try:
      header: dict[str, Any] = parse_json(f.read(length))
      entries = {name: entry for name, entry in header.items() if name != _METADATA}
      for name, entry in entries.items():
        _check_entry(name, entry)
      found = {
        name: StoredTensor(name, file, e['dtype'], tuple(e['shape']), 8 + length + e['data_offsets'][0])
        for name, e in entries.items()
      }
      end = 8 + length + max((e['data_offsets'][1] for e in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
      raise CheckpointError(f'{file} is not a safetensors file: its header cannot be read ({error})') from None
  if end > size:
    raise CheckpointError(f'{file} is truncated: its header describes {end} bytes, and there are {size}')
  for tensor in found.values():
    dtype = _KNOWN.get(tensor.kind)
    if dtype is not None and tensor.offset + math.prod(tensor.shape) * dtype.itemsize > size:
      raise CheckpointError(f'{file} is damaged: {tensor.name} of shape {list(tensor.shape)} goes beyond its end')
  return found


def _check_entry(name: str, entry: dict[str, Any]) -> None:
  """Raises ValueError if a tensor's entry in a header has wrong types."""
  numbers = [*entry['shape'], *entry['data_offsets']]
  if not isinstance(entry['dtype'], str) or len(entry['data_offsets']) != 2:
    raise ValueError(f'the entry for {name}')
  if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
    raise ValueError(f'the sizes and offsets of {name}')


class Declared(NamedTuple):
  """Dtype and shape of a tensor to write."""

  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
  folder: str | os.PathLike[str],
  tensors: Mapping[str, Declared],
  data: Callable[[str], np.ndarray],
  max_file_bytes: int,
) -> list[str]:
  """Writes tensors as one file, or as several of about `max_file_bytes` and an index; returns the names of the files.

  `data` is called for one tensor after another, in order, so only one of them needs to be in memory at a time.
  """
  groups: list[list[str]] = [[]]
  room = max_file_bytes
  for name, declared in tensors.items():
    if groups[-1] and declared.nbytes > room:
      groups.append([])
      room = max_file_bytes
    groups[-1].append(name)
    room -= declared.nbytes
  if len(groups) == 1:
    write_safetensors(os.path.join(folder, SINGLE_FILE), groups[0], tensors, data)
    return [SINGLE_FILE]
  files = [f'model-{i:05}-of-{len(groups):05}.safetensors' for i in range(1, len(groups) + 1)]
  for file, names in zip(files, groups):
    write_safetensors(os.path.join(folder, file), names, tensors, data)
  index = {
    'metadata': {'total_size': sum(t.nbytes for t in tensors.values())},
    'weight_map': {name: file for file, names in zip(files, groups) for name in names},
  }
  with open(os.path.join(folder, INDEX_FILE), 'w', encoding='utf-8') as f:
    json.dump(index, f, indent=2)
  return [*files, INDEX_FILE]


def write_safetensors(
  path: str, names: Sequence[str], tensors: Mapping[str, Declared], data: Callable[[str], np.ndarray]
) -> None:
  """Writes the tensors of these names as one file; `tensors` and `data` are as for `write_folder`."""
  header: dict[str, object] = {_METADATA: {'format': 'pt'}}
  end = 0
  for name in names:
    dtype, shape = tensors[name]
    header[name] = {'dtype': _NAMES[dtype], 'shape': shape, 'data_offsets': [end, end + tensors[name].nbytes]}
    end += tensors[name].nbytes
  encoded = json.dumps(header).encode()
  encoded += b' ' * (-len(encoded) % 8)  # Aligns the arrays to 8 bytes.
  with open(path, 'wb') as f:
    f.write(len(encoded).to_bytes(8, 'little') + encoded)
    for name in names:
      np.ascontiguousarray(data(name), tensors[name].dtype).tofile(f)
