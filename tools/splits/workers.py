"""Runs cases in another process, which XLA may end."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from praxis_lite.common.errors import UserError
from praxis_lite.common.jax_internals.flags import add_flags
from tools.splits.assign import Splits
from tools.splits.batches import CaseResult, run_cases
from tools.splits.kinds import KINDS

# They make compiling fast. The timeout allows for a busy machine.
_FLAGS = {
  'xla_backend_optimization_level': '0',
  'xla_cpu_use_fusion_emitters': 'false',
  'xla_cpu_parallel_codegen_split_count': '1',
  'xla_cpu_collective_call_terminate_timeout_seconds': '900',
}
# Each worker is forked from a process that has imported this file, because the imports take longer than most cases.
_PROCESSES = multiprocessing.get_context('forkserver')
_PROCESSES.set_forkserver_preload([__name__])


class Worker:
  """A process with simulated devices for a mesh.

  Args:
    mesh_shape: the shape of the mesh.
  """

  def __init__(self, mesh_shape: Sequence[int]):
    self._mesh_shape = tuple(mesh_shape)
    self._connection: Connection | None = None

  def run(self, kind: str, number: int, cases: Sequence[Splits], guarded: bool = True) -> list[CaseResult]:
    """Runs the cases of a kind's program together. If that fails, it runs each half separately."""
    found = self._ask(kind, number, cases, guarded)
    if isinstance(found, list):
      return found
    if isinstance(found, Exception):  # An error of this tool, not of XLA or the guards.
      raise found
    if len(cases) == 1:
      return [CaseResult(found)]
    middle = len(cases) // 2
    return [case for half in (cases[:middle], cases[middle:]) for case in self.run(kind, number, half, guarded)]

  def close(self) -> None:
    if self._connection is not None:
      self._connection.close()
      self._process.join()
      self._connection = None

  def _ask(self, kind: str, number: int, cases: Sequence[Splits], guarded: bool) -> list[CaseResult] | str | Exception:
    if self._connection is None:
      self._start()
    assert self._connection is not None
    try:
      self._connection.send((kind, number, self._mesh_shape, cases, guarded))
      return self._connection.recv()
    except (EOFError, ConnectionError):
      self.close()
      return 'aborted'

  def _start(self) -> None:
    wanted = {'xla_force_host_platform_device_count': str(math.prod(self._mesh_shape)), **_FLAGS}
    before = {name: os.environ.get(name) for name in ('XLA_FLAGS', 'JAX_PLATFORMS', 'TF_CPP_MIN_LOG_LEVEL')}
    flags = add_flags('', wanted)
    os.environ |= {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    self._connection, theirs = _PROCESSES.Pipe()
    self._process = _PROCESSES.Process(target=_serve, args=(theirs, flags), daemon=True)
    self._process.start()
    theirs.close()
    for name, value in before.items():
      if value is None:
        os.environ.pop(name)
      else:
        os.environ[name] = value


def _serve(connection: Connection, flags: str) -> None:
  import jax

  os.environ['XLA_FLAGS'] = flags  # The parent process has the flags of its first worker.
  programs = functools.cache(lambda kind: [*KINDS[kind]()])
  for kind, number, mesh_shape, cases, guarded in _requests(connection):
    try:
      found: list[CaseResult] | str | Exception = run_cases(programs(kind)[number], mesh_shape, cases, guarded)
    except UserError:
      found = 'refused'
    except jax.errors.JaxRuntimeError as error:
      if len(cases) == 1:
        print(str(error)[:200], file=sys.stderr)
      found = 'failed'
    except Exception as error:
      found = RuntimeError(f'{type(error).__name__}: {error}')  # Some errors of MLIR cannot be sent to another process.
    connection.send(found)
    jax.clear_caches()


def _requests(connection: Connection) -> Iterator[tuple]:
  while True:
    try:
      yield connection.recv()
    except EOFError:
      return
