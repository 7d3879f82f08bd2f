"""The files that Orbax writes for a step. This module does not use Orbax."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from praxis_lite.common.files import read_plain

# The item of a step that has the arrays. All other items are records.
STATE = 'state'
# A part of the names of incomplete folders. Orbax renames a folder when it is complete.
INCOMPLETE = '.orbax-checkpoint-tmp'


def record_file(folder: str | os.PathLike[str], record: str) -> Path:
  """Returns the path of a JSON record, such as 'about', in the folder of a step."""
  return Path(folder, record, 'metadata')


def array_specs(folder: str | os.PathLike[str], names: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Returns the TensorStore spec for reading each array of a folder, by its name.

  Raises OSError or ValueError if the folder does not say in which format its arrays are.
  """
  about = json.loads(read_plain(Path(folder, '_METADATA')))
  driver = 'zarr3' if about.get('use_zarr3') else 'zarr'  # Earlier versions wrote zarr 2, without checksums.
  base = {'driver': 'file', 'path': f'{os.path.realpath(folder)}/'}  # TensorStore does not accept `..`.
  return {name: {'driver': driver, 'kvstore': {'driver': 'ocdbt', 'base': base, 'path': name}} for name in names}
