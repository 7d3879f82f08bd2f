"""Base: a checkpoint of another run, with the variables that a checkpoint leaves out because they are unchanged.

    runs/base/checkpoints/100      mdl_vars.lm.w, mdl_vars.lm.emb, ...
    runs/tuned/checkpoints/20      mdl_vars.lm.w.lora.a, opt_states...; `about` names the base and the arrays left out

The seal of the base, a random number drawn when it was saved, shows whether another checkpoint has replaced it. An
array that is left out has the same shape, without padding, in the records of both checkpoints. The dtypes in the two
records may differ if both are floating; the values of the base are then cast.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.checkpoints.contents import ArrayRecord, castable, read_checkpoint_record
from praxis_lite.checkpoints.failures import unreadable
from praxis_lite.checkpoints.orbax.on_disk import STATE
from praxis_lite.checkpoints.seal import SEAL, check_seal
from praxis_lite.checkpoints.streamed import CastArray, StreamedArray, stored_arrays
from praxis_lite.common.errors import CheckpointError
from praxis_lite.common.files import plain_dtype

BASE = 'base'


class Base(NamedTuple):
  """The checkpoint of another run."""

  folder: Path  # `job_log_dir/checkpoints/<step>`.
  seal: str | None  # None for checkpoints of earlier versions.
  names: Mapping[str, str]  # From the names of arrays that are left out to their names in the base.

  @property
  def step(self) -> int:
    return int(self.folder.name)

  @property
  def job_log_dir(self) -> Path:
    return self.folder.parent.parent

  def to_record(self, folder: str) -> dict[str, Any]:
    """Returns what the record of the checkpoint in `folder` says about its base, for JSON."""
    relative = os.path.relpath(self.folder, folder)
    return {'folder': str(self.folder), 'relative': relative, SEAL: self.seal, 'names': dict(self.names)}


def base_of(folder: Path, about: Mapping[str, Any]) -> Base | None:
  """Returns the base of the checkpoint in `folder`, from its record `about`; None if it has no base. Reads no file."""
  record = about.get(BASE)
  if record is None:
    return None
  try:
    there, relative = Path(record['folder']), Path(os.path.normpath(folder / record['relative']))
    # If both runs were moved together, only the relative path is still right.
    return Base(there if there.exists() else relative, record[SEAL], dict(record['names']))
  except (KeyError, TypeError, ValueError) as error:
    raise unreadable(folder, ValueError(f'its entry for {BASE} is not valid')) from error


def check_base(base: Base, folder: Path, variables: Mapping[str, ArrayRecord]) -> None:
  """Raises CheckpointError unless a checkpoint's base is the one with which it was saved, and has the arrays left out.

  `variables` is the record of all arrays of the checkpoint in `folder`, including those in the base.
  """
  needed = f'{folder} has only what training has changed, and needs {base.folder}'
  if not base.folder.exists():
    raise CheckpointError(f'{needed}, which does not exist (any more); put that checkpoint back, or a copy of it')
  about = read_checkpoint_record(base.folder, 'about')
  if about.get(SEAL) != base.seal:
    raise CheckpointError(f'{needed}, which is another checkpoint now; put the one back that it was trained from')
  check_seal(base.folder, base.step)
  for name, there in base.names.items():
    own, its = variables.get(name), about['variables'].get(there)
    if own is None or its is None or own['shape'] != its['shape'] or not castable(own['dtype'], its['dtype']):
      ours, theirs = (f'{x["dtype"]}{x["shape"]}' if x else 'missing' for x in (own, its))
      raise CheckpointError(
        f'{needed}: {name} is {ours} in its record, and {there} is {theirs} there, so its values are lost; use another '
        'checkpoint of this run'
      )


def arrays_in(
  folder: Path, about: Mapping[str, Any], shapes: Mapping[str, Sequence[int] | None]
) -> dict[str, StreamedArray]:
  """Returns arrays of the checkpoint in `folder` by name, like `stored_arrays`. `about` is its record file.

  Arrays that the checkpoint leaves out are read from its base, and cast to the dtypes in `about`.
  """
  base = base_of(folder, about)
  theirs = {} if base is None else {name: shape for name, shape in shapes.items() if name in base.names}
  found = stored_arrays(str(folder / STATE), {name: shape for name, shape in shapes.items() if name not in theirs})
  if base is not None and theirs:
    variables = about['variables']
    check_base(base, folder, variables)
    wanted = {base.names[name]: shape for name, shape in theirs.items()}
    there = arrays_in(base.folder, read_checkpoint_record(base.folder, 'about'), wanted)
    found |= {name: _cast(there[base.names[name]], variables[name]['dtype']) for name in theirs}
  return found


def _cast(array: StreamedArray, dtype: str) -> StreamedArray:
  """Casts an array to the dtype in its record; PRNG keys, stored as integers, are not cast."""
  is_wanted = dtype.startswith('key<') or array.dtype == plain_dtype(dtype)
  return array if is_wanted else CastArray(array, plain_dtype(dtype))
