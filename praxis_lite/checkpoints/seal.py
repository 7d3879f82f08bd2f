"""The seal of a checkpoint: shows that its parts come from one save, and that its folder's name is the saved step.

Each save draws a seal, such as '20:9f3c2a7be1d04c55': its step and a random number. The seal is in both records,
`about` and `inputs`, and in an array in the database of the state. So if the parts of two checkpoints were mixed, or a
folder was renamed, the seals differ even if each part is intact. Checkpoints of earlier versions have no seal.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.checkpoints.contents import read_checkpoint_record
from praxis_lite.checkpoints.failures import unreadable
from praxis_lite.checkpoints.orbax.on_disk import STATE
from praxis_lite.checkpoints.streamed import stored_arrays, whole_box
from praxis_lite.common.errors import CheckpointError

# The name of the seal in the records and among the arrays.
SEAL = 'seal'
_RECORDS = ('about', 'inputs')


def new_seal(step: int) -> str:
  """Returns the seal of a save of `step`."""
  return f'{step}:{secrets.token_hex(8)}'


def seal_array(seal: str) -> np.ndarray:
  """Returns a seal as an array to save, uint8."""
  return np.frombuffer(seal.encode(), np.uint8)


def check_records(folder: Path, step: int) -> None:
  """Checks that the records of the checkpoint in `folder` belong together and to `step`; reads no array.

  Raises:
    DamagedError: the records do not belong together, or one of them is damaged.
    CheckpointError: a record cannot be read.
  """
  _check(folder, step, _seals_of_records(folder))


def check_seal(folder: Path, step: int, where: object = None) -> None:
  """Checks that all parts of the checkpoint in `folder` belong together and to `step`; raises like `check_records`.

  The arrays must be readable: this does not look for damage in them. `where` is the name of the checkpoint in errors;
  the default is the folder.
  """
  _check(where or folder, step, {**_seals_of_records(folder), STATE: _seal_of_state(folder)})


def check_seal_of(where: object, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
  """Checks parsed records, given by name, like `check_records`; raises DamagedError."""
  _check(where, step, {name: _text(record.get(SEAL)) for name, record in records.items()})


def _seals_of_records(folder: Path) -> dict[str, str | None]:
  return {name: _text(read_checkpoint_record(folder, name).get(SEAL)) for name in _RECORDS}


def _seal_of_state(folder: Path) -> str | None:
  """Returns the seal that is stored among the arrays of the checkpoint in `folder`; None if there is no such array."""
  try:
    array = stored_arrays(str(folder / STATE), {SEAL: None})[SEAL]
    return array.read(whole_box(array.shape)).tobytes().decode(errors='replace')
  except CheckpointError as error:
    cause = error.__cause__
    if 'NOT_FOUND' in str(cause):  # TensorStore's error for an array that the database does not have.
      return None
    raise unreadable(folder, cause if isinstance(cause, Exception) else error) from error


def _text(seal: object) -> str | None:
  return seal if isinstance(seal, str) else None


def _check(where: object, step: int, seals: Mapping[str, str | None]) -> None:
  if len(set(seals.values())) > 1:
    parts = ', '.join(f'{name} of {_describe(seal)}' for name, seal in seals.items())
    raise unreadable(where, ValueError(f'its parts come from different saves: {parts}'))
  (seal,) = set(seals.values())
  if seal is not None and _step(seal) != str(step):
    raise unreadable(where, ValueError(f'it is a checkpoint of step {_step(seal)}, and its folder was renamed'))


def _step(seal: str) -> str:
  return seal.partition(':')[0]


def _describe(seal: str | None) -> str:
  return 'one without a seal' if seal is None else f'step {_step(seal)}, number {seal.partition(":")[2]}'
