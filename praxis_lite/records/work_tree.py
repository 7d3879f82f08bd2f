"""What git says of a directory, without running anything that the repository there has configured.

A repository may come from anyone, and its configuration names programs: monitors of the file system, hooks, filters of
files, pagers, transports that fetch what is missing. `git status` runs some of them. All are turned off here, filters
by their names; submodules, which have configurations of their own, are not looked into.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

_SECONDS = 5.0
_HARMLESS = (
  *('-c', 'core.fsmonitor=false', '-c', 'core.hooksPath=/dev/null', '-c', 'core.pager=cat'),
  *('-c', 'submodule.recurse=false', '-c', 'diff.external=', '-c', 'core.sshCommand=false', '-c', 'core.askPass='),
)
# No transport, and so no program of one, is allowed to fetch an object that a partial clone does not have.
_NO_TRANSPORT = {'GIT_ALLOW_PROTOCOL': 'none', 'GIT_NO_LAZY_FETCH': '1', 'GIT_TERMINAL_PROMPT': '0'}
_PROGRAMS_OF_FILTERS = ('clean', 'smudge', 'process')


def read_work_tree(folder: str) -> dict[str, Any] | None:
  """Returns the work tree of a folder: `path`, `commit` and `clean` (None: not known); None if it is in none."""
  top = _git(folder, 'rev-parse', '--show-toplevel')
  commit = _git(folder, 'rev-parse', 'HEAD') if top else None
  if not commit:
    return None
  return {'path': top, 'commit': commit, 'clean': _is_clean(folder)}


def _is_clean(folder: str) -> bool | None:
  """Whether the files are as in the commit; one with a filter, such as those of LFS, is not if it was touched."""
  configured = _git(folder, 'config', '--list', '--name-only', '-z')
  if configured is None:
    return None
  without_filters: list[str] = []
  for name in sorted(
    {name.rpartition('.')[0] for name in configured.split('\0') if name.lower().startswith('filter.')}
  ):
    if '=' in name:  # `-c` could not say which filter it means.
      return None
    without_filters += [argument for program in _PROGRAMS_OF_FILTERS for argument in ('-c', f'{name}.{program}=')]
    without_filters += ['-c', f'{name}.required=false']
  changed = _git(folder, *without_filters, 'status', '--porcelain', '--untracked-files=no', '--ignore-submodules=all')
  return None if changed is None else not changed


def _git(folder: str, *arguments: str) -> str | None:
  """Returns what git prints; None if there is no git, or it fails, as outside a work tree, or takes too long."""
  command = ['git', '--no-optional-locks', '--no-pager', '-C', folder, *_HARMLESS, *arguments]
  environment: Mapping[str, str] = {**os.environ, **_NO_TRANSPORT}
  try:
    done = subprocess.run(
      command,
      capture_output=True,
      text=True,
      errors='replace',
      timeout=_SECONDS,
      check=False,
      env=environment,
      stdin=subprocess.DEVNULL,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip() if done.returncode == 0 else None
