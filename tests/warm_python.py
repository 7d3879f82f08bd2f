"""Python processes that have imported JAX, Orbax and praxis_lite already, for tests of what real processes do.

The imports take 1.5 s of CPU in each process. `WarmPopen` is a `subprocess.Popen` whose processes are forked from one
that has made them and touched no device. They have the arguments, environment, directory and streams that were asked
for, and are children of the test, which kills them and waits for them as for any other:

    the tests --- ask over a socket ---> one that imports, once
        |                                        | fork
        |                                one that ends at once, so that its child becomes the tests'
        |                                        | fork
        +--------------------------------> runs the code

What is imported, and when, is for a process of its own (`subprocess.Popen`) to test.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from typing import Any

MODULES = (
  *('jax', 'jax.experimental.multihost_utils', 'optax', 'orbax.checkpoint', 'tensorboardX', 'multiprocessing.queues'),
  *('praxis_lite.cli.main', 'praxis_lite.runs.executor', 'praxis_lite.checkpoints.orbax.handlers'),
  *('praxis_lite.cli.train', 'praxis_lite.instruments.explain', 'praxis_lite.experiments.lm'),
)
SERVE = 'import warm_python; warm_python.serve()'
SET_CHILD_SUBREAPER = 36  # of prctl(2): orphans among the descendants of the process become its children
_one_at_a_time = threading.Lock()
_Popen = subprocess.Popen  # Tests may put WarmPopen there.


class WarmPopen(subprocess.Popen):
  """Forks for [sys.executable, '-c', code, ...] and [sys.executable, '-m', module, ...]; starts all else as it is."""

  def _execute_child(self, args: Any, *rest: Any) -> None:
    """What Popen calls once it has pipes; `rest` is in the order of CPython's, which is that of 3.7 to 3.14."""
    cwd, env, pipes, new_session = rest[4], rest[5], rest[9:15], rest[20]
    if sys.platform != 'linux' or args[0] != sys.executable or args[1] not in ('-c', '-m'):
      return super()._execute_child(args, *rest)  # type: ignore[misc]
    streams = [own if own != -1 else inherited for own, inherited in zip((pipes[0], pipes[3], pipes[5]), range(3))]
    wanted = {'args': [*map(str, args[1:])], 'env': dict(os.environ if env is None else env)}
    wanted |= {'cwd': os.path.abspath(cwd or '.'), 'new_session': new_session}
    self.pid = forked(wanted, streams)
    self._child_created = True
    self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def started(*arguments: object, **fields: Any) -> WarmPopen:
  """A running `praxis-lite`; what it writes is read as text."""
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  return WarmPopen([sys.executable, '-m', 'praxis_lite', *map(str, arguments)], **pipes | fields)


def finished(code: str, *arguments: object, **fields: Any) -> subprocess.CompletedProcess[str]:
  """Runs code as `python -c` does; returns its exit code, and what it wrote as text. What hangs is killed, an error."""
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  with WarmPopen([sys.executable, '-c', code, *map(str, arguments)], **pipes | fields) as process:
    try:
      out, err = process.communicate(timeout=900)
    finally:
      process.kill()
  return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def forked(wanted: dict[str, Any], streams: list[int]) -> int:
  """The pid of a new child of this process, which does what is wanted with these as its standard streams."""
  message, prctl = json.dumps(wanted).encode(), ctypes.CDLL(None).prctl
  with _one_at_a_time:
    asked = importing_process()
    prctl(SET_CHILD_SUBREAPER, 1)
    try:
      socket.send_fds(asked, [len(message).to_bytes(8, 'big')], streams)
      asked.sendall(message)
      return int.from_bytes(asked.recv(8), 'big')
    finally:
      prctl(SET_CHILD_SUBREAPER, 0)


@functools.cache
def importing_process() -> socket.socket:
  """Starts the process that imports; it ends with this one. Returns the socket that it listens to."""
  ours, theirs = socket.socketpair()
  env = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
  env['PYTHONPATH'] = os.pathsep.join([os.path.dirname(__file__), *filter(None, [env.get('PYTHONPATH')])])
  _Popen([sys.executable, '-c', SERVE], env=env, stdin=theirs)
  theirs.close()
  return ours


# ---- in the process that imports, and in what is forked from it


def serve() -> None:
  """Imports, and forks for each message; in what is forked, it returns when the code has run."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all; the tests end this process.
  asked = socket.socket(fileno=os.dup(0))
  own_path = {'', *os.environ['PYTHONPATH'].split(os.pathsep)}
  path = [folder for folder in sys.path if folder not in own_path]
  for module in MODULES:
    importlib.import_module(module)
  from praxis_lite.runs.cluster.warm_start import fork_orphan  # Not before the path is known.

  gc.freeze()
  while True:
    length, streams, *_ = socket.recv_fds(asked, 8, 3)
    if not length:
      os._exit(0)
    wanted = json.loads(asked.recv(int.from_bytes(length, 'big'), socket.MSG_WAITALL))
    pid = fork_orphan()
    if not pid:
      asked.close()
      become(wanted, streams, path)
      return run(*wanted['args'])
    asked.sendall(pid.to_bytes(8, 'big'))
    for fd in streams:
      os.close(fd)


def become(wanted: dict[str, Any], streams: list[int], path: list[str]) -> None:
  """Takes over the streams, environment and directory, and what Python and JAX take from them when they start."""
  import jax
  import numpy as np

  for standard, fd in enumerate(streams):
    os.dup2(fd, standard)
    os.close(fd)
  if wanted['new_session']:
    os.setsid()
  before = dict(os.environ)
  os.environ.clear()
  os.environ.update(wanted['env'])
  os.chdir(wanted['cwd'])
  sys.path[:] = ['', *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep)), *path]
  importlib.invalidate_caches()
  at_once = 'PYTHONUNBUFFERED' in os.environ
  sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
  raw = open(1, 'wb', 0 if at_once else -1, closefd=False)  # noqa: SIM115
  sys.stdout = sys.__stdout__ = io.TextIOWrapper(raw, line_buffering=os.isatty(1), write_through=at_once)
  sys.stderr = sys.__stderr__ = open(2, 'w', buffering=1, errors='backslashreplace', closefd=False)  # noqa: SIM115
  signal.signal(signal.SIGINT, signal.default_int_handler)
  np.random.seed()
  for name, value in os.environ.items():
    with contextlib.suppress(AttributeError):  # It is no setting of JAX's config.
      if name.startswith('JAX_') and before.get(name) != value:
        kind = type(getattr(jax.config, name.lower()))
        jax.config.update(name.lower(), kind(value) if kind in (int, float) else value)


def run(how: str, what: str, *args: str) -> None:
  """As `python -c code args` or `python -m module args`."""
  sys.argv = [how, *args]
  if how == '-m':
    sys.path[0] = os.getcwd()
    runpy.run_module(what, run_name='__main__', alter_sys=True)
  else:
    sys.modules['__main__'] = types.ModuleType('__main__')
    exec(compile(what, '<string>', 'exec'), sys.modules['__main__'].__dict__)
