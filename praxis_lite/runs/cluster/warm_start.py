"""Starts processes that have already made their imports: they are forked from a process that only imports.

    launch --- environment and output, over a socket ---> the importing process, which touches no device
       |                                                        | fork
       |                                                  a process that ends at once, so that launch adopts its child
       |                                                        | fork
       +--- signals, waits for -------------------------> the child, which runs the module

So a launch waits for the imports once, instead of in each process of each attempt. This needs Linux.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

# Seconds that the importing process may take to start a process, including its imports.
_PATIENCE = 120.0
_POLL = 0.02
# An option of Linux's prctl: orphans among the descendants of a process become its children.
_SET_CHILD_SUBREAPER = 36
_LENGTH = 8  # Bytes of a length or a process id in a message.
_CODE = 'from praxis_lite.runs.cluster.warm_start import fork_on_request; fork_on_request()'


class WarmProcess:
  """A child process that was forked, with the methods of `subprocess.Popen` that `Launcher` calls.

  `stdout` is a pipe with what it writes to its standard output and error.
  """

  def __init__(self, pid: int, stdout: IO[bytes]):
    self.pid, self.stdout = pid, stdout
    self.returncode: int | None = None

  def poll(self) -> int | None:
    """Returns the exit code, or minus the number of the signal that ended the process; None while it runs."""
    if self.returncode is None:
      pid, status = os.waitpid(self.pid, os.WNOHANG)
      if pid:
        self.returncode = os.waitstatus_to_exitcode(status)
    return self.returncode

  def send_signal(self, number: int) -> None:
    """Sends a signal, unless the process has ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Sends SIGKILL, unless the process has ended."""
    self.send_signal(signal.SIGKILL)

  def wait(self, timeout: float) -> int:
    """Waits for the end; returns the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
    end = time.monotonic() + timeout
    while (code := self.poll()) is None:
      if time.monotonic() > end:
        raise subprocess.TimeoutExpired(str(self.pid), timeout)
      time.sleep(_POLL)
    return code


class WarmStarter:
  """Starts processes that all run the same module with the same arguments, as `python -m` would.

  The modules `imports`, which are imported beforehand, must not start a device or a thread.
  """

  def __init__(self, module: str, arguments: Sequence[str], imports: Sequence[str]):
    self._socket, theirs = socket.socketpair()
    self._socket.settimeout(_PATIENCE)
    command = [sys.executable, '-c', _CODE, module, json.dumps(list(imports)), *arguments]
    env = {**os.environ, 'PYTHONUNBUFFERED': '1'}
    self._importing = subprocess.Popen(command, env=env, stdin=theirs.fileno(), start_new_session=True)
    theirs.close()

  def start(self, environment: Mapping[str, str]) -> WarmProcess:
    """Starts a process in a new session, with an empty standard input, and `environment` added to that of this process.

    Raises OSError if the importing process has ended or does not answer, or if the kernel has no subreapers.
    """
    message = json.dumps(dict(environment)).encode()
    prctl = ctypes.CDLL(None).prctl
    if prctl(_SET_CHILD_SUBREAPER, 1):  # The kernels of some container sandboxes lack subreapers.
      raise OSError('the kernel does not let a process adopt others')
    reader, writer = os.pipe()
    try:
      socket.send_fds(self._socket, [len(message).to_bytes(_LENGTH, 'big')], [writer])
      self._socket.sendall(message)
      answer = self._socket.recv(_LENGTH, socket.MSG_WAITALL)
      if len(answer) < _LENGTH:
        raise ConnectionResetError('the process that imports has ended')
    except OSError:
      os.close(reader)
      raise
    finally:
      os.close(writer)
      prctl(_SET_CHILD_SUBREAPER, 0)
    return WarmProcess(int.from_bytes(answer, 'big'), os.fdopen(reader, 'rb'))

  def close(self) -> None:
    """Ends the importing process."""
    self._socket.close()
    self._importing.kill()
    self._importing.wait()


# -------------------------------------------------------------------- in the importing process, and in those it forks


def fork_on_request() -> None:
  """Imports modules, then forks a process for each message, until the socket closes.

  A forked process runs the module, and returns from this function when the module ends. `sys.argv` has the arguments of
  `WarmStarter`, and the standard input is its socket.
  """
  _, module, imports, *arguments = sys.argv
  asked = socket.socket(fileno=os.dup(0))
  for name in json.loads(imports):
    importlib.import_module(name)
  gc.freeze()  # Garbage collection would copy memory pages that all processes share.
  while True:
    length, outputs, *_ = socket.recv_fds(asked, _LENGTH, 1)
    if not length:
      return
    environment = json.loads(asked.recv(int.from_bytes(length, 'big'), socket.MSG_WAITALL))
    pid = fork_orphan()
    if not pid:
      asked.close()
      _become(environment, outputs[0])
      sys.argv = [module, *arguments]
      runpy.run_module(module, run_name='__main__', alter_sys=True)
      return
    os.close(outputs[0])
    asked.sendall(pid.to_bytes(_LENGTH, 'big'))


def fork_orphan() -> int:
  """Forks a process whose parent becomes the nearest ancestor that is a subreaper.

  Returns the id of the new process; in the new process, 0.
  """
  reader, writer = os.pipe()
  between = os.fork()
  if between:
    os.close(writer)
    os.waitpid(between, 0)
    with os.fdopen(reader, 'rb') as file:
      return int.from_bytes(file.read(), 'big')
  between = os.getpid()
  if child := os.fork():
    os.write(writer, child.to_bytes(_LENGTH, 'big'))
    os._exit(0)
  os.close(reader)
  os.close(writer)
  while os.getppid() == between:  # The module may check its parent's id.
    time.sleep(0.001)
  return 0


def _become(environment: Mapping[str, str], output: int) -> None:
  """Gives this forked process its environment, its output, and the state of a new process."""
  import numpy as np

  os.setsid()
  os.environ.update(environment)
  empty = os.open(os.devnull, os.O_RDONLY)
  for fd, standard in ((empty, 0), (output, 1), (output, 2)):
    os.dup2(fd, standard)
  os.close(empty)
  os.close(output)
  np.random.seed()  # Otherwise the processes would draw the same numbers. `random` is seeded again by Python.
