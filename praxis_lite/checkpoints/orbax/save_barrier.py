"""Makes the processes of a run wait for each other while a checkpoint is written in the background.

Orbax makes them meet after each part of a save:

    meeting 1, 2    the save begins
            3       all have written
            4       the folder has its final name
            5, 6    the save has succeeded or failed

A process in which a save fails goes directly to the last meetings. With Orbax's own barrier, the others would then wait
at 3 or 4 for many minutes. Here the failing process first publishes its error, and also attends the meeting that it
would skip. So every process attends all meetings. After each meeting, each process checks if another one has failed,
and if so fails too.
"""

from __future__ import annotations

import itertools
import sys
import threading

import jax

from praxis_lite.common.errors import CheckpointError, error_summary
from praxis_lite.common.jax_internals import unless_unknown
from praxis_lite.common.jax_internals.processes import Client, service_client

_KEY = 'praxis_lite/saves'
_numbers = itertools.count(1)  # Counts saves. All processes save together, so all of them count the same.


class SaveBarrier:
  """Orbax's `barrier_sync_fn`; call `begin` before each save, in all processes. `client` is JAX's service client."""

  def __init__(self, client: Client):
    self._client = client
    self._save, self._meetings, self._has_failed = 0, 0, False

  def begin(self) -> None:
    """Marks the start of the next save. The previous save must be over in this process."""
    self._save, self._meetings, self._has_failed = next(_numbers), 0, False

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have reached the next meeting of this save.

    `key`, Orbax's name of the meeting, is ignored: the numbers of the save and of the meeting identify it. Raises
    CheckpointError if another process has failed; the message says where and why.
    """
    error = sys.exc_info()[1]  # Not None if Orbax calls this while it handles an error.
    in_background = threading.current_thread() is not threading.main_thread()
    if in_background and isinstance(error, Exception) and not self._has_failed:
      self._has_failed = True
      # Waits in the meeting that this process would skip. Its error is published under the name of that meeting.
      self._client.key_value_set(f'{self._next()}/failed/{jax.process_index()}', error_summary(error))
      self._meet(timeout_ms)
    failed = self._meet(timeout_ms)
    if failed and not self._has_failed:
      self._has_failed = True
      raise CheckpointError(failed)

  def _next(self) -> str:
    return f'{_KEY}/{self._save}/{self._meetings + 1}'

  def _meet(self, timeout_ms: int) -> str:
    """Waits for the other processes; returns which of them failed before this meeting, and why; '' if none did."""
    meeting = self._next()
    self._meetings += 1
    self._client.wait_at_barrier(meeting, timeout_ms)
    failed = self._client.key_value_dir_get(f'{meeting}/failed')
    return '; '.join(f'host {name.rpartition("/")[2]}: {why}' for name, why in sorted(failed))


def make_save_barrier() -> SaveBarrier | None:
  """Returns the barrier of this run's processes; None if there is only this one."""
  if jax.process_count() == 1:
    return None
  client = unless_unknown('a save that fails on one host is not noticed by others', service_client, None)
  return None if client is None else SaveBarrier(client)
