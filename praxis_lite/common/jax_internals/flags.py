"""Finds out which flags XLA knows. An unknown one in XLA_FLAGS ends the process, and releases add and remove flags.

For supported releases there is a table, which tests compare with jaxlib. For other releases, a separate process reads
the flags (0.1 to 0.4 s, once for each set of names).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeVar

_FlagT = TypeVar('_FlagT', str, int)

# First and last releases in the table.
_FIRST, _LAST = (0, 10), (0, 12)
# The flags that this package sets, each with the first release that no longer knows it.
_UNTIL: Mapping[str, tuple[int, int] | None] = {
  'xla_backend_optimization_level': None,
  'xla_cpu_collective_call_terminate_timeout_seconds': None,
  'xla_cpu_collective_call_warn_stuck_timeout_seconds': None,
  'xla_cpu_enable_concurrency_optimized_scheduler': None,
  'xla_cpu_multi_thread_eigen': None,
  'xla_cpu_parallel_codegen_split_count': None,
  'xla_cpu_use_fusion_emitters': (0, 11),
  'xla_enable_hlo_sharding_v3': None,
  'xla_force_host_platform_device_count': None,
}
# Flags without which some releases of jaxlib end the process on programs that other releases compile. For each flag:
# its value, and the first and the last release that needs it. See section 20 of docs/xla-partitioner-faults.md.
_NEEDED: Mapping[str, tuple[str, tuple[int, int], tuple[int, int]]] = {
  'xla_enable_hlo_sharding_v3': ('false', (0, 11), (0, 12)),
}
_QUICK: Mapping[str, int] = {'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False}
# Makes XLA read its flags, without a device.
_READ_FLAGS = 'from jaxlib import _jax; _jax.CompileOptions()'
_PATIENCE_S = 60.0


def add_flags(given: str, wanted: Mapping[str, object]) -> str:
  """Returns a value for XLA_FLAGS: the given flags, and the wanted ones that are not given and that XLA knows.

  `given` has flags, or is the name of a file with flags; `wanted` are values by name, without the leading dashes.
  """
  flags = split_flags(given)
  names = flag_names(' '.join(flags))
  known = known_flags({name: str(value) for name, value in wanted.items() if name not in names})
  return ' '.join([*flags, *(f'--{name}={value}' for name, value in known.items())])


def add_needed_flags() -> None:
  """Adds to XLA_FLAGS the flags without which this release may end the process. The user's own values win.

  To have an effect, it must be called before JAX starts its backends. XLA does not accept these flags as options of a
  single program.
  """
  release = _release()
  needed = {name: value for name, (value, first, last) in _NEEDED.items() if first <= release <= last}
  if needed:
    os.environ['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), needed)


def split_flags(given: str) -> list[str]:
  """Returns the flags in a value of XLA_FLAGS, which may be the name of a file with flags."""
  return _read_flags(given.strip()) if given.strip() and not given.strip().startswith('-') else given.split()


def flag_names(flags: str) -> set[str]:
  """Returns the names in a value of XLA_FLAGS, without the leading dashes."""
  return set(re.findall(r'(?<!\S)--(\w+)', flags))


def known_flags(wanted: Mapping[str, _FlagT]) -> dict[str, _FlagT]:
  """Returns the wanted flags that this XLA knows, with their values."""
  release = _release()
  in_table = {name for name in wanted if name in _UNTIL and _FIRST <= release <= _LAST}
  unknown = {name for name in in_table if (until := _UNTIL[name]) is not None and release >= until}
  unknown |= _refused_flags(tuple((name, str(value)) for name, value in wanted.items() if name not in in_table))
  return {name: value for name, value in wanted.items() if name not in unknown}


def quick_options(platform: str) -> dict[str, int] | None:
  """Returns compiler options for a program that runs once. On CPUs it compiles in a tenth of the time, and runs slower.

  For the platforms 'gpu' and 'tpu' there are no such options, so the result is None.
  """
  return known_flags(_QUICK) if platform == 'cpu' else None


@functools.cache
def _refused_flags(flags: tuple[tuple[str, str], ...]) -> frozenset[str]:
  """Returns the names of the flags that would end a process; all names if they cannot be tried."""
  if not flags:
    return frozenset()
  environment = os.environ | {'XLA_FLAGS': ' '.join(f'--{name}={value}' for name, value in flags)}
  command = [sys.executable, '-c', _READ_FLAGS]
  try:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
  except (OSError, subprocess.SubprocessError):
    return frozenset(name for name, _ in flags)
  if done.returncode == 0:
    return frozenset()
  listed = re.search(r'Unknown flags? in XLA_FLAGS:(.*)', done.stderr)
  return frozenset(flag_names(listed[1]) if listed else (name for name, _ in flags))


@functools.cache
def jaxlib_release() -> tuple[int, ...]:
  """Returns the release of jaxlib, such as (0, 10, 2)."""
  return tuple(int(digits) for digits in re.findall(r'\d+', metadata.version('jaxlib'))[:3])


def _release() -> tuple[int, int]:
  major, minor, *_ = jaxlib_release()
  return major, minor


def _read_flags(name: str) -> list[str]:
  try:
    return Path(name).read_text().split()
  except OSError:
    return [name]  # XLA will say what is wrong with it.
