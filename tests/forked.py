"""Commands as processes of their own, without the seconds that starting one takes.

They are forked from a process that has imported what commands import, and has done nothing else: JAX has no backend
there and no thread. Each gets the exit code, the pipes, the directory and the environment that the shell would give it.
Not for tests of what is imported, or of what Python does when it starts or ends.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax

from praxis_lite.cli.main import run

_IMPORTED = ['praxis_lite.cli.train', 'praxis_lite.explain', 'praxis_lite.runtime', 'praxis_lite.experiments.lm']


class Command:
  """A running `praxis-lite`, as `subprocess.Popen` has it: `stdout` and `stderr` are read as text."""

  def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]):
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(_IMPORTED)  # The first time this is called, as the server is started then.
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    inner = [sending for _, sending in pipes]
    self._process: BaseProcess = context.Process(target=_run, args=([*arguments], str(cwd), dict(env), *inner))
    self._process.start()
    for sending in inner:
      sending.close()
    self.stdout, self.stderr = (os.fdopen(os.dup(receiving.fileno()), encoding='utf-8') for receiving, _ in pipes)

  @property
  def returncode(self) -> int | None:
    """The exit code, as soon as it has ended; minus the number of the signal that killed it."""
    return self._process.exitcode

  def poll(self) -> int | None:
    return self.returncode

  def send_signal(self, number: int) -> None:
    assert self._process.pid is not None
    os.kill(self._process.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)

  def communicate(self, timeout: float | None = None) -> tuple[str, str]:
    """Waits for its end; returns what it wrote to stdout, unless that is closed, and to stderr, and is not yet read."""
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
    reader.start()
    out = '' if self.stdout.closed else self.stdout.read()
    self._process.join(timeout)
    assert self.returncode is not None, 'it has not ended in time'
    reader.join()
    return out, errors[0]


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
  sys.stdout.reconfigure(line_buffering='PYTHONUNBUFFERED' in env)  # type: ignore[union-attr]
  if directory := env.get('JAX_COMPILATION_CACHE_DIR'):  # JAX reads it when it is imported.
    jax.config.update('jax_compilation_cache_dir', directory)
  try:
    run()
  finally:
    atexit._run_exitfuncs()
