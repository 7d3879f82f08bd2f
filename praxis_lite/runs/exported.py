"""Checks that the files of an exported model are complete and belong to one export, and loads them.

Each export has a copy of this file, load.py. It needs only the standard library and the library that runs the programs.

  python load.py    checks all files, for example before a server gets them: exit code 0, or 1 and a line that says why
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGNATURE = 'signature.json'
VARIABLES = 'variables.npz'
PROGRAM = '.stablehlo'
SAVED_MODEL = 'saved_model'
_FILES, _SEAL = 'files', 'seal'

Arrays = dict[str, Any]  # Arrays, or their shapes and dtypes, by name.


class MixedExportError(ValueError):
  """A file of an export is missing, was changed, or belongs to another export."""


def seal_signature(signature: dict[str, Any], folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns a signature with the SHA-256 of each file in `folder`, and a SHA-256 of the signature itself."""
  root = Path(folder)
  names = sorted(str(path.relative_to(root).as_posix()) for path in root.rglob('*') if path.is_file())
  full = {**signature, _FILES: {name: _digest(root / name) for name in names}}
  return {**full, _SEAL: _digest_of(full)}


def read_signature(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads signature.json of an export; raises MixedExportError if it cannot be read or was changed."""
  path = Path(folder, SIGNATURE)
  try:
    with open(path, 'rb', opener=_open_file) as file:
      signature = json.loads(file.read())
    seal = signature.pop(_SEAL, None)
  except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
    raise MixedExportError(f'{path} cannot be read: {reason}') from None
  if seal is None or not isinstance(signature.get(_FILES), dict):
    raise MixedExportError(f'{path} has no seal: it was exported by an earlier version, or changed')
  if seal != _digest_of(signature):
    raise MixedExportError(f'{path} was changed since the model was exported')
  return dict(signature)


def check_files(folder: str | os.PathLike[str], below: str = '') -> dict[str, Any]:
  """Checks the files of an export whose names begin with `below`, by default all files; returns the signature.

  Raises:
    MixedExportError: a file is missing, was changed, or belongs to another export.
  """
  signature = read_signature(folder)
  names = [name for name in signature[_FILES] if name.startswith(below)]
  if not names:
    raise MixedExportError(f'{Path(folder)} was exported without {below}')
  for name in names:
    path = Path(folder, name)
    try:
      digest = _digest(path)
    except OSError as error:
      raise MixedExportError(f'{path} cannot be read: {error.strerror or error}') from None
    if digest != signature[_FILES][name]:
      raise MixedExportError(
        f'{path} does not match {SIGNATURE}: it was changed, or belongs to another export; copy the whole folder'
      )
  return signature


def load_for_jax(folder: str | os.PathLike[str]) -> dict[str, Callable[[Arrays], Arrays]]:
  """Returns the programs by name, each a function of its inputs that returns its outputs, arrays by name.

  Raises:
    MixedExportError: see `check_files`.
  """
  import jax
  import jax.export
  import numpy as np

  signature = check_files(folder, VARIABLES)
  for name in signature['programs']:
    check_files(folder, f'{name}{PROGRAM}')
  with np.load(Path(folder, VARIABLES)) as stored:
    # NumPy does not know bfloat16 and similar types by name.
    variables = {n: stored[n].view(jax.numpy.dtype(v['dtype'])) for n, v in signature['variables'].items()}

  def program(name: str) -> Callable[[Arrays], Arrays]:
    call = jax.jit(jax.export.deserialize(bytearray(Path(folder, f'{name}{PROGRAM}').read_bytes())).call)
    return lambda inputs: call(variables, inputs)

  return {name: program(name) for name in signature['programs']}


def load_for_tensorflow(folder: str | os.PathLike[str]) -> Any:
  """Returns the SavedModel, whose `signatures` are the programs by name; raises MixedExportError, see `check_files`."""
  try:
    import tensorflow as tf
  except ImportError:
    raise ImportError('a SavedModel needs TensorFlow, which is not installed; pip install tensorflow-cpu') from None

  check_files(folder, f'{SAVED_MODEL}/')
  return tf.saved_model.load(os.path.join(folder, SAVED_MODEL))


def _digest(path: Path) -> str:
  digest = hashlib.sha256()
  with open(path, 'rb', opener=_open_file) as file:
    while part := file.read(1 << 20):
      digest.update(part)
  return digest.hexdigest()


def _open_file(path: str, flags: int) -> int:
  handle = os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))  # Otherwise opening a named pipe blocks.
  if not stat.S_ISREG(os.fstat(handle).st_mode):
    os.close(handle)
    raise OSError(errno.EINVAL, 'it is not a file', path)
  return handle


def _digest_of(signature: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(signature, sort_keys=True).encode()).hexdigest()


def _main() -> int:
  """Checks the export that contains this file; returns the exit code."""
  folder = Path(__file__).parent
  try:
    signature = check_files(folder)
  except MixedExportError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  print(f'{folder}: {len(signature[_FILES])} files, complete and of one export')
  return 0


if __name__ == '__main__':
  sys.exit(_main())
