"""Files of JSON lines in a run's directory. Damaged lines are skipped, and long files lose old lines."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from praxis_lite.common.files import open_plain, open_plain_to_write, parse_json, read_plain, replace_file

T = TypeVar('T')


def read_json_lines(path: Path, parse: Callable[[Any], T]) -> list[T]:
  """Returns what `parse` makes of the JSON in each line of a file; [] if the file cannot be read.

  The file is untrusted: a line for which `parse` raises ValueError, TypeError, KeyError or AttributeError is left out.
  """
  found = []
  with contextlib.suppress(OSError):
    for line in read_plain(path).decode(errors='replace').splitlines():
      with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        found.append(parse(parse_json(line)))
  return found


def write_lines(path: Path, values: Iterable[Any]) -> None:
  """Writes a file of these lines atomically; raises OSError if it cannot be written."""
  replace_file(path, ''.join(f'{json.dumps(value)}\n' for value in values))


def append_line(path: Path, value: Any, most_bytes: int) -> None:
  """Adds a line; if the file exceeds `most_bytes`, first drops its older half. Raises OSError if this fails."""
  line = f'{json.dumps(value)}\n'.encode()
  with contextlib.suppress(FileNotFoundError):
    line = _before_next(path, most_bytes) + line
  with open_plain_to_write(path, append=True) as file:
    file.write(line)


def _before_next(path: Path, most_bytes: int) -> bytes:
  """Returns the bytes to write before a new line: a newline if the last line is incomplete, otherwise b''.

  Drops the older half of a file of more than `most_bytes`.
  """
  with open_plain(path) as file:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    is_torn = file.read(1) not in (b'', b'\n')
    if size <= most_bytes:
      return b'\n' if is_torn else b''
    file.seek(size // 2)
    kept = file.read().partition(b'\n')[2]
  replace_file(path, kept.decode(errors='replace') + ('\n' if is_torn else ''))
  return b''
