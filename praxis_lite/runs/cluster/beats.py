"""How the processes of a run tell each other that they are alive, through the key-value store of JAX's service.

Up to 32 processes all read each other's beats. More processes are divided into groups of at most 32, so the number of
beats that a process reads does not grow with the number of processes. Successive processes, which may be lost together,
are in different groups. A process reads:

    own group        all beats, so a lost process is noticed by the others in its group
    next group       the beat of the process at the same place, so the loss of a whole group is noticed
    anyone           the beat of a random process, for `idle_anywhere`
    verdict          the reason of the first process that noticed a loss; each process that reads it ends

The time between beats grows with the number of processes, so the rate of requests to the service is bounded.
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
# With more processes than this, the time between beats grows in proportion to their number.
_MOST_PER_SECOND = 1000


def beat_interval(processes: int, timeout_s: float) -> float:
  """Returns the seconds between the beats of a process; a process that is silent for `timeout_s` counts as lost."""
  return min(max(0.2, min(1.0, timeout_s / 10)) * max(1.0, processes / _MOST_PER_SECOND), timeout_s / 5)


def _num_groups(processes: int) -> int:
  return -(-processes // GROUP)


def watched_by(index: int, processes: int) -> list[int]:
  """Returns the indices of the processes that process `index` watches, itself included, in order."""
  groups = _num_groups(processes)
  return sorted({*range(index % groups, processes, groups), _counterpart(index, processes)})


def _counterpart(index: int, processes: int) -> int:
  """Returns the process at the same place in the next group, or the last one there if that group is shorter."""
  groups = _num_groups(processes)
  other = index // groups * groups + (index + 1) % groups
  return other if other < processes else other - groups


class Beats:
  """Writes this process's beats every `interval` seconds, and reads those of others, among them the `watched` ones."""

  def __init__(self, client: Client, index: int, processes: int, interval: float = 1.0):
    self._client, self._index, self._processes, self._interval = client, index, processes, interval
    self._groups = _num_groups(processes)
    self._group, self._is_all = index % self._groups, self._groups == 1
    self._next, self.watched = _counterpart(index, processes), watched_by(index, processes)
    self._random = random.Random(index)
    # The last time, by this process's clock, at which some process is known to have made progress.
    self._progress = time.monotonic()

  def exchange(self, beat: Mapping[str, Any], idle: float) -> dict[int, dict[str, Any]]:
    """Writes a beat, and returns the beats of watched processes by index; raises the errors of the service.

    `idle` are the seconds since the main thread of this process last made progress.
    """
    self._note(idle)
    said = json.dumps({**beat, 'anywhere': round(self.idle_anywhere, 1)})
    self._client.key_value_set(f'{_KEY}/{self._group}/{self._index}', said, allow_overwrite=True)
    found = self._client.key_value_dir_get(f'{_KEY}/{self._group}')
    heard = {int(key.rsplit('/', 1)[1]): json.loads(value) for key, value in found}
    if not self._is_all:
      other = self._random.randrange(self._processes)
      for index in (self._next, other):
        heard |= self.beat_of(index)
      for each in heard.values():
        # A beat is up to one interval old, so one interval is added: ages that processes pass on are never too small.
        self._note(each['anywhere'] + self._interval)
      if other not in self.watched:
        heard.pop(other, None)
    return heard

  def beat_of(self, index: int) -> dict[int, dict[str, Any]]:
    """Returns the beat of any process, by its index; empty if there is none yet, or the service does not answer."""
    with contextlib.suppress(Exception):
      return {index: json.loads(self._client.key_value_try_get(f'{_KEY}/{index % self._groups}/{index}'))}
    return {}

  @property
  def idle_anywhere(self) -> float:
    """Seconds since any process made progress, as far as this one knows.

    With several groups, the value may be a few beat intervals too large, because news of progress spreads slowly.
    """
    return time.monotonic() - self._progress

  def verdict(self) -> str:
    """Returns why a process has given up; '' if none has, there is only one group, or the service does not answer."""
    with contextlib.suppress(Exception):
      return '' if self._is_all else self._client.key_value_try_get(_VERDICT)
    return ''

  def tell(self, verdict: str) -> None:
    """Writes why this process gives up, so the processes of all groups end; does nothing if there is one group.

    If several processes give up, the first verdict is kept.
    """
    if not self._is_all:
      with contextlib.suppress(Exception):
        self._client.key_value_set(_VERDICT, verdict)

  def _note(self, idle: float) -> None:
    self._progress = max(self._progress, time.monotonic() - idle)
