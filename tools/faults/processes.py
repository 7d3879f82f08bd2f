"""The training processes of the campaign: starts them, reads their output, and waits for them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from praxis_lite.common.jax_internals.flags import add_flags

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / 'tests'))
from warm_python import WarmPopen  # noqa: E402

EXPERIMENT = Path(__file__).parent / 'experiment.py'
_STEP = re.compile(r'(?:host \d+: )?step (\d+)/\d+ loss ')
_RESTORED = re.compile(r'(?:host \d+: )?restored step (\d+) of ')


class HangError(Exception):
  """A process did not end or reach an expected state in time."""


def environment(cache: Path, devices: int = 2) -> dict[str, str]:
  """Returns the environment of a training process with simulated devices, and compiled programs in `cache`."""
  flags = {
    'xla_force_host_platform_device_count': devices,
    'xla_backend_optimization_level': 0,
    'xla_cpu_collective_call_terminate_timeout_seconds': 900,
  }
  return os.environ | {
    'PYTHONPATH': os.pathsep.join([str(ROOT), str(Path(__file__).parent / 'inside')]),
    'PYTHONUNBUFFERED': '1',
    'JAX_PLATFORMS': 'cpu',
    'TF_CPP_MIN_LOG_LEVEL': '2',
    'XLA_FLAGS': add_flags('', flags),
    'JAX_COMPILATION_CACHE_DIR': str(cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
  }


# `python -m praxis_lite` in a process that has already imported it. So `sitecustomize` has to be run by hand.
_WARM = """
import runpy, sys
runpy.run_path({inside!r})
sys.argv[0] = 'praxis-lite'
runpy.run_module('praxis_lite', run_name='__main__')
"""


class Training:
  """A process of `praxis-lite train` or `launch`, and what it has printed.

  It is forked from a process that has made the imports, unless the fault happens during imports.
  """

  def __init__(self, command: Sequence[str], env: Mapping[str, str]):
    is_cold = env.get('FAULTS_SIGNAL', '').startswith('import:')
    warm = _WARM.format(inside=str(Path(__file__).parent / 'inside' / 'sitecustomize.py'))
    self.process = (subprocess.Popen if is_cold else WarmPopen)(
      [sys.executable, *(('-m', 'praxis_lite') if is_cold else ('-c', warm)), *command],
      env=dict(env),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors='replace',
      cwd=ROOT,
    )
    self.lines: list[str] = []
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    assert self.process.stdout is not None
    for line in self.process.stdout:
      self.lines.append(line.rstrip())

  @property
  def text(self) -> str:
    return '\n'.join(self.lines)

  @property
  def last_step(self) -> int:
    """The last step that it has printed; 0 before the first."""
    return max((int(m[1]) for line in list(self.lines) if (m := _STEP.match(line))), default=0)

  @property
  def restored_step(self) -> int | None:
    """The step from which it continued; None if it started from the beginning, or not at all."""
    return next((int(m[1]) for line in list(self.lines) if (m := _RESTORED.match(line))), None)

  def wait_for(self, what: Callable[[], bool], seconds: float = 240.0) -> bool:
    """Waits until `what` is true. Returns False if the process ends before."""
    end = time.monotonic() + seconds
    while not what():
      if self.process.poll() is not None:
        return False
      if time.monotonic() > end:
        self.kill()
        raise HangError(f'not come there in {seconds:g} s; the last lines are {self.lines[-3:]}')
      time.sleep(0.003)
    return True

  def is_stopped(self) -> bool:
    """Whether a signal has stopped it."""
    return process_state(self.process.pid) == 'T'

  def send(self, number: int) -> None:
    if self.process.poll() is None:
      self.process.send_signal(number)

  def wait(self, seconds: float = 300.0) -> int:
    """Waits for the end of the process; returns its exit code, or minus the number of the signal that ended it."""
    try:
      code = self.process.wait(seconds)
    except subprocess.TimeoutExpired:
      self.kill()
      raise HangError(f'not ended in {seconds:g} s; the last lines are {self.lines[-3:]}') from None
    self._reader.join(timeout=10)
    return code

  def kill(self) -> None:
    for child in child_processes(self.process.pid):
      _kill(child)
    self.process.kill()
    self.process.wait()


def process_state(pid: int) -> str:
  """Returns the system's letter for the state of a process; '' if there is no such process."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2][:1]
  except OSError:
    return ''


def host_processes(pid: int) -> list[int]:
  """Returns the processes of the hosts that a process of `launch` has started, in order.

  Its first child is the process that only imports; forked hosts have the same command line.
  """
  children = child_processes(pid)
  with contextlib.suppress(OSError, IndexError):
    if b'fork_on_request' in Path(f'/proc/{children[0]}/cmdline').read_bytes():
      return children[1:]
  return children


def child_processes(pid: int) -> list[int]:
  """Returns the processes that a process has started, in order."""
  try:
    return [int(child) for child in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]
  except OSError:
    return []


def _kill(pid: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, signal.SIGKILL)
