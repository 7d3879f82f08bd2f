"""Runs a command in several processes on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from praxis_lite.common.errors import ConfigError, UserError

_PARENT = 'PRAXIS_LITE_BULK_PARENT'
_GPUS = '/proc/driver/nvidia/gpus'  # Contains a folder for each GPU.


def run_processes(arguments: Sequence[str], indices: Sequence[int], *, uses_gpus: bool = True) -> None:
  """Runs `praxis-lite` with these arguments and `--process_index=i`, for each i at once, and waits for all.

  If JAX uses NVIDIA GPUs and `uses_gpus`, each process gets one of them, because a process reserves most of the memory
  of every GPU it sees.

  Raises:
    UserError: a process failed; the others have finished their part by then.
    ConfigError: there are fewer GPUs than processes.
  """
  gpus = visible_gpus() if uses_gpus else []
  if gpus and len(indices) > len(gpus):
    raise ConfigError(f'--processes needs a GPU for each of {len(indices)} processes, and there are {len(gpus)}')
  command, started = [sys.executable, '-m', 'praxis_lite', *arguments], []
  for place, i in enumerate(indices):
    own = {'CUDA_VISIBLE_DEVICES': gpus[place]} if gpus else {}
    environment = {**os.environ, _PARENT: str(os.getpid()), **own}
    started.append(subprocess.Popen([*command, f'--process_index={i}'], env=environment))
  try:
    codes = [process.wait() for process in started]
  finally:
    for process in started:
      if process.poll() is None:
        with contextlib.suppress(OSError):
          process.terminate()
  for index, code in zip(indices, codes):
    if code:
      how = f'was ended by {signal.Signals(-code).name}' if code < 0 else f'ended with code {code}'
      raise UserError(f'process {index} {how}; the same command continues with the unfinished shards')


def visible_gpus() -> list[str]:
  """Returns the GPUs that JAX would use, by their names in CUDA_VISIBLE_DEVICES; [] for none. Does not start JAX."""
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if platforms and not {'cuda', 'gpu'} & {*platforms.split(',')}:
    return []
  if not any(importlib.util.find_spec(f'jax_cuda{version}_plugin') for version in (12, 13)):
    return []
  if (named := os.environ.get('CUDA_VISIBLE_DEVICES')) is not None:
    names = [name.strip() for name in named.split(',')]
    return [name for name in names if name and name != '-1']
  try:
    return [str(i) for i in range(len(os.listdir(_GPUS)))]
  except OSError:
    return []


def end_without_parent() -> None:
  """Ends this process if the process that started it with `run_processes` is gone."""
  parent = os.environ.get(_PARENT)
  if parent is not None and os.getppid() != int(parent):
    os._exit(1)
