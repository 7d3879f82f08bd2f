"""Launches of a run: how each process that trained it, or wrote its record, was started."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from praxis_lite.common.foreign_text import printable, remove_secrets_of_argument
from praxis_lite.common.versions import version_of
from praxis_lite.runs.records.work_tree import read_work_tree

_PACKAGES = ('praxis_lite', 'jax', 'jaxlib', 'numpy', 'optax', 'orbax-checkpoint')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One process that trained the run, or wrote its record.

  Attributes:
    started: seconds since 1970.
    seed, step: the seed of the run, and the number of steps taken before this launch.
    mesh: the size of each mesh axis; None if it is unknown.
    devices: the number and kind of the devices, such as '8 cpu'.
    versions: the versions of Python and of the relevant packages, by name.
    sources: the known source trees: `path`, and for a git work tree `commit` and `clean`.
    changes: how the config differed from that of the previous launch, one field per line.
  """

  started: float = 0.0
  command: str = ''
  seed: int = 0
  step: int = 0
  mesh: Mapping[str, int] | None = None
  devices: str = ''
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  sources: tuple[Mapping[str, Any], ...] = ()
  changes: tuple[str, ...] = ()


def this_launch(
  *, seed: int, command: str | None, mesh: Mapping[str, int] | None, step: int, changes: tuple[str, ...]
) -> Launch:
  """Returns the launch of this process; for the arguments see `Launch`. `command=None` uses this process's own."""
  return Launch(
    started=round(time.time(), 3),
    command=_command_line() if command is None else command,
    seed=seed,
    step=step,
    mesh=None if mesh is None else dict(mesh),
    devices=f'{jax.device_count()} {jax.devices()[0].device_kind}',
    versions={'python': platform.python_version(), **{p: found for p in _PACKAGES if (found := version_of(p))}},
    sources=tuple(source_trees()),
    changes=changes,
  )


def read_launch(encoded: Mapping[str, Any]) -> Launch:
  """Returns a recorded launch from an untrusted record."""
  known = {f.name for f in dataclasses.fields(Launch)}
  launch = Launch(**{k: v for k, v in encoded.items() if k in known})
  return dataclasses.replace(
    launch,
    started=float(launch.started),
    command=printable(str(launch.command)),
    seed=int(launch.seed),
    step=int(launch.step),
    sources=tuple(launch.sources),
    changes=tuple(printable(str(line)) for line in launch.changes),
  )


def _command_line() -> str:
  program = Path(sys.argv[0] or 'python')
  started = ['python', '-m', program.parent.name] if program.name == '__main__.py' else [program.name]
  return shlex.join([*started, *map(remove_secrets_of_argument, sys.argv[1:])])


def source_trees() -> Iterator[dict[str, Any]]:
  """Yields the known source trees: that of the working directory, and that of praxis_lite if it is another one."""
  seen = set()
  for folder in (os.getcwd(), str(Path(__file__).parents[2])):
    if (tree := read_work_tree(folder)) is not None and tree['path'] not in seen:
      seen.add(tree['path'])
      yield tree
