"""Reads the git state of a directory without running any program that the repository configures.

A repository is untrusted, and its configuration may name programs: file system monitors, hooks, file filters, pagers,
and transports that fetch missing objects. `git status` runs some of them. All of them are disabled here; filters are
disabled by name. Submodules have their own configurations, so they are not inspected.
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
# Forbids all transports, which would run programs to fetch objects that a partial clone lacks.
_NO_TRANSPORT = {'GIT_ALLOW_PROTOCOL': 'none', 'GIT_NO_LAZY_FETCH': '1', 'GIT_TERMINAL_PROMPT': '0'}
_PROGRAMS_OF_FILTERS = ('clean', 'smudge', 'process')


def read_work_tree(folder: str) -> dict[str, Any] | None:
  """Returns `path`, `commit` and `clean` (None if unknown) of a folder's work tree; None outside of work trees."""
  top, _, commit = (_git(folder, 'rev-parse', '--show-toplevel', 'HEAD') or '').rpartition('\n')
  return {'path': top, 'commit': commit, 'clean': _is_clean(folder)} if top else None


def _is_clean(folder: str) -> bool | None:
  """Whether the files equal the commit; None if unknown.

  Filters (such as LFS) are not run, so a file with a filter counts as changed once it has been written again.
  """
  configured = _git(folder, 'config', '--list', '--name-only', '-z')
  if configured is None:
    return None
  without_filters: list[str] = []
  for name in sorted(
    {name.rpartition('.')[0] for name in configured.split('\0') if name.lower().startswith('filter.')}
  ):
    if '=' in name:  # `git -c` cannot disable a filter of this name.
      return None
    without_filters += [argument for program in _PROGRAMS_OF_FILTERS for argument in ('-c', f'{name}.{program}=')]
    without_filters += ['-c', f'{name}.required=false']
  changed = _git(folder, *without_filters, 'status', '--porcelain', '--untracked-files=no', '--ignore-submodules=all')
  return None if changed is None else not changed


def _git(folder: str, *arguments: str) -> str | None:
  """Returns git's output; None if git is not installed, fails (as outside a work tree), or takes too long."""
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
