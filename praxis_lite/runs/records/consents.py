"""Consents: which of a user's files may be imported, because this user trained a run whose config names them.

    $XDG_STATE_HOME/praxis_lite/consents/<SHA-256 of run.json>.json    {"files": {"/home/me/mine.py": ["<SHA-256>"]}}

The first digest of a file identifies the content with which the run was trained; further digests identify contents that
the user has trusted since.

The default of XDG_STATE_HOME is ~/.local/state. After `train --exp=mine.py:Mine`, later commands on that run need no
--trust. A consent holds for one content of `run.json`, which a process of this user has written, and for the listed
contents of each file. So it does not hold for a record that somebody else wrote, or for a changed file. A consent that
cannot be read, or that others could have written, is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from praxis_lite.common.config.trusted import is_of_others
from praxis_lite.common.files import open_plain, parse_json, read_plain


def digest(content: bytes) -> str:
  """Returns the SHA-256 that identifies a record or a file in a consent."""
  return hashlib.sha256(content).hexdigest()


def consented_files(record: str) -> dict[str, bool]:
  """Returns the user's files that the run with this digest of `run.json` names, and whether each may be imported."""
  return {file: _digest_of(file) in digests for file, digests in _read(record).items()}


def files_changed_since_training(record: str) -> list[str]:
  """Returns the files of this user that a run's config names and that have changed since the run was trained.

  It does not matter whether this user has trusted a file again since then.
  """
  return sorted(file for file, digests in _read(record).items() if [_digest_of(file)] != digests[:1])


def give_consent(record: str, files: Iterable[str]) -> None:
  """Records that this user trusts the present content of files for a run of this user; does nothing if writing fails.

  Args:
    record: the digest of the content of `run.json`, which this process has written.
  """
  before, folder = _read(record), _folder()
  now = {file: [value] for file in files if (value := _digest_of(file))}
  if not now or folder is None:
    return
  known = before | {file: list(dict.fromkeys(before.get(file, []) + value)) for file, value in now.items()}
  with contextlib.suppress(OSError):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder)  # The mode of the file gives access only to the user.
    with open(handle, 'w', encoding='utf-8') as file:
      json.dump({'files': known}, file)
    os.replace(name, folder / f'{record}.json')


def renew_consent(record: str) -> None:
  """Trusts the present content of the changed files that this process has imported, because the user named them."""
  if changed := [file for file, is_same in consented_files(record).items() if not is_same]:
    # Resolving the files of thousands of modules takes a while.
    loaded = {os.path.realpath(getattr(module, '__file__', None) or '') for module in list(sys.modules.values())}
    give_consent(record, [file for file in changed if file in loaded])


def files_of_user(record: str) -> set[str]:
  """Returns the files of the modules that the content of a `run.json` names, except files of installed packages."""
  files = set()
  for name in _modules_in(record):
    file = os.path.realpath(getattr(sys.modules.get(name), '__file__', None) or '')
    if file.endswith('.py') and not is_of_others(name) and not {'site-packages', 'dist-packages'} & {*Path(file).parts}:
      files.add(file)
  return files


def module_that_changed(record: str, config: str) -> str | None:
  """Returns a module that a config names, and whose file has changed since it was consented to; None if there is none.

  A module that this process has imported does not count: the user named it, or has imported it in a program. Without
  this check, an unchanged file could import a changed one.

  Args:
    record: the digest of `run.json`.
    config: the config in it, as JSON.
  """
  changed = {Path(file).stem for file, is_same in consented_files(record).items() if not is_same}
  names = sorted(_modules_in(config) - sys.modules.keys()) if changed else []
  return next((name for name in names if name.rpartition('.')[2] in changed), None)


def _modules_in(record: str) -> set[str]:
  """Returns the modules that JSON names, except `__main__`: an import of a script would run it."""
  return set(re.findall(r'"([\w.]+):[\w.]+"', record)) - {'__main__'}


def _folder() -> Path | None:
  """Returns the folder of the consents of this user; None if there is no user, as on Windows, or no home."""
  if not hasattr(os, 'getuid'):
    return None
  with contextlib.suppress(RuntimeError):
    state = Path(os.environ.get('XDG_STATE_HOME', ''))  # A relative path could mean any folder.
    return (state if state.is_absolute() else Path.home() / '.local' / 'state') / 'praxis_lite' / 'consents'
  return None


def _read(record: str) -> dict[str, list[str]]:
  """Returns the files of a consent with their digests; {} if there is no consent, or others could have written it."""
  folder = _folder()
  if folder is None:
    return {}
  with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError), contextlib.ExitStack() as stack:
    file = stack.enter_context(open_plain(folder / f'{record}.json'))
    if all(map(_is_own, (os.stat(folder), os.fstat(file.fileno())))):
      files = parse_json(file.read())['files'].items()
      return {path: [known] if isinstance(known, str) else [*map(str, known)] for path, known in files}
  return {}


def _is_own(about: os.stat_result) -> bool:
  return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest_of(file: str) -> str:
  """Returns the digest of a file; '' if it cannot be read."""
  try:
    return digest(read_plain(file))
  except (OSError, ValueError):
    return ''
