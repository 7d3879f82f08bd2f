"""How the processes of a run tell each other that they are alive, through the key-value store of JAX's service.

Up to 32 processes all read the beats of all. More are in groups of at most 32, and then no process reads beats whose
number grows with theirs. Successive processes, which may be lost together, are in different groups:

    own group        all beats, so that a process that is lost is noticed by the others
    next group       the beat of the process at the same place, so that a group that is lost as a whole is noticed
    anyone           the beat of a process drawn at random, for `idle_anywhere`
    verdict          what the first process that noticed a loss has written, which ends all others

The time between beats grows with the number of processes, so that the service has a bounded number of requests.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Mapping
from typing import Any

from praxis_lite.common.jax_internals.processes import Client

GROUP = 32
_KEY = 'praxis_lite/beats'
_VERDICT = 'praxis_lite/verdict'
# The number of processes from which on the time between beats grows with it.
_MOST_PER_SECOND = 1000


def beat_interval(processes: int, timeout_s: float) -> float:
  """Returns the seconds between the beats of a process; after `timeout_s` a silent one counts as lost."""
  return min(max(0.2, min(1.0, timeout_s / 10)) * max(1.0, processes / _MOST_PER_SECOND), timeout_s / 5)


def watched_by(index: int, processes: int) -> list[int]:
  """Returns the indices of the processes that process `index` watches, itself included, in order."""
  groups = -(-processes // GROUP)
  return sorted({*range(index % groups, processes, groups), _counterpart(index, processes)})


def _counterpart(index: int, processes: int) -> int:
  """Returns the process at the same place of the next group, or at its last place."""
  groups = -(-processes // GROUP)
  other = index // groups * groups + (index + 1) % groups
  return other if other < processes else other - groups


class Beats:
  """Writes the beats of this process, and reads those of others.

  Args:
    client: the client of JAX's service.
    index, processes: the index of this process, and the number of processes.
    interval: the seconds between beats.

  Attributes:
    watched: the indices of the processes that this one watches, itself included.
  """

  def __init__(self, client: Client, index: int, processes: int, interval: float = 1.0):
    self._client, self._index, self._processes = client, index, processes
    self._interval = interval
    self._groups = -(-processes // GROUP)
    self._group, self._is_all = index % self._groups, self._groups == 1
    self._next, self.watched = _counterpart(index, processes), watched_by(index, processes)
    self._random = random.Random(index)
    # When this process knows that some process has made progress, by its own clock.
    self._progress = time.monotonic()

  def exchange(self, beat: Mapping[str, Any], idle: float) -> dict[int, dict[str, Any]]:
    """Writes a beat and returns those of watched processes by their index; raises the errors of the service.

    Args:
      beat: what this process says, for JSON.
      idle: seconds since the main thread of this process last made progress.
    """
    self._note(idle)
    said = json.dumps({**beat, 'anywhere': round(self.idle_anywhere, 1)})
    self._client.key_value_set(f'{_KEY}/{self._group}/{self._index}', said, allow_overwrite=True)
    found = self._client.key_value_dir_get(f'{_KEY}/{self._group}')
    heard = {int(key.rsplit('/', 1)[1]): json.loads(value) for key, value in found}
    if not self._is_all:
      other = self._random.randrange(self._processes)
      for index in (self._next, other):
        with contextlib.suppress(Exception):  # No beat has been written so far.
          heard[index] = json.loads(self._client.key_value_try_get(f'{_KEY}/{index % self._groups}/{index}'))
      for each in heard.values():
        # A beat is at most about one interval old, so that ages which go around never become younger than they are.
        self._note(each['anywhere'] + self._interval)
      if other not in self.watched:
        heard.pop(other, None)
    return heard

  @property
  def idle_anywhere(self) -> float:
    """Seconds since any process made progress, as far as this one knows.

    With several groups, the value is up to a few intervals of beats too large, because processes hear of others late.
    """
    return time.monotonic() - self._progress

  def verdict(self) -> str:
    """Returns why another process has given up, if there are several groups; '' if none has."""
    if self._is_all:
      return ''
    try:
      return self._client.key_value_try_get(_VERDICT)
    except Exception:
      return ''

  def tell(self, verdict: str) -> None:
    """Says why this process gives up, so that all groups end; the first verdict stays."""
    if not self._is_all:
      with contextlib.suppress(Exception):
        self._client.key_value_set(_VERDICT, verdict)

  def _note(self, idle: float) -> None:
    self._progress = max(self._progress, time.monotonic() - idle)
