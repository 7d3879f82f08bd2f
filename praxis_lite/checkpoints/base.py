"""Base: the checkpoint of another run, with the variables that a checkpoint leaves out because they are the same there.

    runs/base/checkpoints/100      mdl_vars.lm.w, mdl_vars.lm.emb, ...
    runs/tuned/checkpoints/20      mdl_vars.lm.w.lora.a, opt_states...; in `about` the base, and the names of the rest

The seal of the base, a random number of its save, shows that it is still the same one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.checkpoints.contents import read_checkpoint_record
from praxis_lite.checkpoints.failures import unreadable
from praxis_lite.checkpoints.orbax.on_disk import STATE
from praxis_lite.checkpoints.seal import SEAL, check_seal
from praxis_lite.checkpoints.streamed import StreamedArray, stored_arrays
from praxis_lite.common.errors import CheckpointError

BASE = 'base'


class Base(NamedTuple):
  """The checkpoint of another run.

  Attributes:
    folder: its folder, `job_log_dir/checkpoints/<step>`.
    seal: its seal.
    names: the names of arrays that are left out, and their names there.
  """

  folder: Path
  seal: str | None
  names: Mapping[str, str]

  @property
  def step(self) -> int:
    return int(self.folder.name)

  @property
  def job_log_dir(self) -> Path:
    return self.folder.parent.parent

  def to_record(self, folder: str) -> dict[str, Any]:
    """Returns the record for the checkpoint in `folder`, for JSON."""
    relative = os.path.relpath(self.folder, folder)
    return {'folder': str(self.folder), 'relative': relative, SEAL: self.seal, 'names': dict(self.names)}


def base_in(folder: Path, names: Mapping[str, str]) -> Base:
  """Returns the checkpoint in `folder` as a base, with these names; raises CheckpointError if it cannot be read."""
  return Base(folder, read_checkpoint_record(folder, 'about').get(SEAL), names)


def base_of(folder: Path, about: Mapping[str, Any]) -> Base | None:
  """Returns the base of the checkpoint in `folder`, given its record `about`; None if it has none. Reads nothing."""
  record = about.get(BASE)
  if record is None:
    return None
  try:
    there, relative = Path(record['folder']), Path(os.path.normpath(folder / record['relative']))
    # Both runs may have moved together.
    return Base(there if there.exists() else relative, record[SEAL], dict(record['names']))
  except (KeyError, TypeError, ValueError) as error:
    raise unreadable(folder, ValueError(f'its entry for {BASE} is not valid')) from error


def check_base(base: Base, folder: Path) -> None:
  """Raises CheckpointError unless the base of the checkpoint in `folder` is the one that it was saved with."""
  needed = f'{folder} has only what training has changed, and needs {base.folder}'
  if not base.folder.exists():
    raise CheckpointError(f'{needed}, which does not exist (any more); put that checkpoint back, or a copy of it')
  if read_checkpoint_record(base.folder, 'about').get(SEAL) != base.seal:
    raise CheckpointError(f'{needed}, which is another checkpoint now; put the one back that it was trained from')
  check_seal(base.folder, base.step)


def arrays_in(
  folder: Path, about: Mapping[str, Any], shapes: Mapping[str, Sequence[int] | None]
) -> dict[str, StreamedArray]:
  """Returns what `stored_arrays` does for the checkpoint in `folder`, where some arrays may be in its base."""
  base = base_of(folder, about)
  theirs = {} if base is None else {name: shape for name, shape in shapes.items() if name in base.names}
  found = stored_arrays(str(folder / STATE), {name: shape for name, shape in shapes.items() if name not in theirs})
  if base is not None and theirs:
    check_base(base, folder)
    wanted = {base.names[name]: shape for name, shape in theirs.items()}
    there = arrays_in(base.folder, read_checkpoint_record(base.folder, 'about'), wanted)
    found |= {name: there[base.names[name]] for name in theirs}
  return found
