"""The source of the Python standard library, as the running interpreter ships it: real text that is always there.

It is split by file. The split depends on the relative path alone, so it is the same on every machine with the same
Python.
"""

from __future__ import annotations

import os
import sysconfig

from praxis_lite.errors import DataError
from praxis_lite.inputs.text_files import check_split, split_of_name, stable_hash

HELDOUT_FRACTION = 0.05
# Installed packages, tests and their data, and what is made when Python is built, which differs between machines.
_LEFT_OUT_DIRECTORIES = frozenset({'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'})
_LEFT_OUT_PREFIXES = ('_sysconfigdata', 'config-')


def stdlib_files(split: str = 'train', max_bytes: int | None = None) -> list[str]:
  """Returns the paths of the standard library's Python files in a split, sorted.

  Args:
    split: 'train' (about nine tenths of the files), 'validation' or 'test'.
    max_bytes: return only so many files, chosen by hash, that they have no more bytes than this.

  Raises:
    ConfigError: there is no such split.
    DataError: the interpreter has no library sources on disk, or no file is as small as `max_bytes`.
  """
  where = 'stdlib_files'
  check_split(split, f'{where}.split')
  root = sysconfig.get_paths()['stdlib']
  names = [n for n in _python_files(root) if split_of_name(n, HELDOUT_FRACTION) == split]
  if not names:
    raise DataError(
      f'{where}: there are no Python sources of the standard library in {root}; give TextInput a path of your own text'
    )
  if max_bytes is not None:
    names = _at_most(root, names, max_bytes)
    if not names:
      raise DataError(f'{where}.max_bytes: no file of the split is as small as {max_bytes} bytes')
  return [os.path.join(root, n) for n in names]


def _python_files(root: str) -> list[str]:
  """Returns the relative paths of the sources below `root`, sorted; none if it is no directory."""
  names = []
  for directory, subdirectories, files in os.walk(root):
    subdirectories[:] = [
      d for d in subdirectories if d not in _LEFT_OUT_DIRECTORIES and not d.startswith(_LEFT_OUT_PREFIXES)
    ]
    names += [
      os.path.relpath(os.path.join(directory, f), root)
      for f in files
      if f.endswith('.py') and not f.startswith(_LEFT_OUT_PREFIXES)
    ]
  return sorted(names)


def _at_most(root: str, names: list[str], max_bytes: int) -> list[str]:
  chosen = []
  for name in sorted(names, key=stable_hash):
    size = os.path.getsize(os.path.join(root, name))
    if size <= max_bytes:
      chosen.append(name)
      max_bytes -= size
  return sorted(chosen)
