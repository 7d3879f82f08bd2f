"""Commands as processes of their own, without the seconds that starting one takes.

They are forked from a process that has imported what commands import, and has done nothing else: JAX has no backend
there and no thread. Each gets the exit code, the pipes, the directory and the environment that the shell would give it.
Not for tests of what is imported, or of what Python does when it starts or ends.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import jax

from praxis_lite.cli.main import run

THRESHOLDS = (200_000, 20, 100)  # As in conftest.py.

_IMPORTED = ['praxis_lite.cli.train', 'praxis_lite.explain', 'praxis_lite.runtime', 'praxis_lite.experiments.lm']

# Variables that JAX reads when it is imported.
_CACHE = {
  'JAX_COMPILATION_CACHE_DIR': str,
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': float,
  'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': int,
}


def fork(arguments: Sequence[str], cwd: Path, env: Mapping[str, str], *to: Connection) -> BaseProcess:
  """Starts `praxis-lite` with these arguments, and what its stdout and stderr go to, which is closed here."""
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(_IMPORTED)  # The first time this is called, as the server is started then.
  process = context.Process(target=_run, args=([*arguments], str(cwd), dict(env), *to))
  process.start()
  for output in to:
    output.close()
  return process


class Command:
  """A running `praxis-lite`, as `subprocess.Popen` has it: `stdout` and `stderr` are read as text.

  With `together`, both are written to `stdout`. Of several, one thread at a time may ask whether they have ended.
  """

  def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], together: bool = False):
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    if together:
      pipes[1][1].close()
      pipes[1] = pipes[1][0], Connection(os.dup(pipes[0][1].fileno()), readable=False)
    self._process = fork(arguments, cwd, env, *(sending for _, sending in pipes))
    self.stdout, self.stderr = (os.fdopen(os.dup(receiving.fileno()), encoding='utf-8') for receiving, _ in pipes)

  @property
  def returncode(self) -> int | None:
    """The exit code, as soon as it has ended; minus the number of the signal that killed it."""
    return self._process.exitcode

  @property
  def pid(self) -> int:
    assert self._process.pid is not None
    return self._process.pid

  def poll(self) -> int | None:
    return self.returncode

  def wait(self, timeout: float | None = None) -> int:
    self._process.join(timeout)
    if self.returncode is None:
      raise subprocess.TimeoutExpired('praxis-lite', timeout or 0)
    return self.returncode

  def send_signal(self, number: int) -> None:
    os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)

  def communicate(self, timeout: float | None = None) -> tuple[str, str]:
    """Waits for its end; returns what it wrote to stdout, unless that is closed, and to stderr, and is not yet read."""
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
    reader.start()
    out = '' if self.stdout.closed else self.stdout.read()
    self.wait(timeout)
    reader.join()
    return out, errors[0]


class Point:
  """The process of a point of a sweep, as `subprocess.Popen` starts it."""

  def __init__(self, command: Sequence[str], *, stdout: IO[bytes], **_: object):
    assert command[:4] == [sys.executable, '-m', 'praxis_lite', 'train']
    outputs = (Connection(os.dup(stdout.fileno()), readable=False) for _ in range(2))
    self._process = fork(command[3:], Path.cwd(), os.environ, *outputs)

  def poll(self) -> int | None:
    return self._process.exitcode

  def send_signal(self, number: int) -> None:
    assert self._process.pid is not None
    os.kill(self._process.pid, number)


# What `praxis_lite.runtime.sweep` takes of `subprocess`.
POINTS = types.SimpleNamespace(Popen=Point, DEVNULL=subprocess.DEVNULL)


def _run(arguments: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
  """What the console script does, in a process with these pipes."""
  os.dup2(out.fileno(), 1)
  os.dup2(err.fileno(), 2)
  out.close()
  err.close()
  os.chdir(cwd)
  os.environ.clear()
  os.environ.update(env)
  sys.argv = ['praxis-lite', *arguments]
  gc.freeze()  # What is imported stays; nothing of it is garbage.
  gc.set_threshold(*THRESHOLDS)
  sys.stdout.reconfigure(line_buffering='PYTHONUNBUFFERED' in env)  # type: ignore[union-attr]
  for name, kind in _CACHE.items():
    if name in env:
      jax.config.update(name.lower(), kind(env[name]))
  try:
    run()
  finally:
    atexit._run_exitfuncs()
