"""Where a process of a run is seated, which stays the same after a restart, unlike its index."""

from __future__ import annotations

from typing import NamedTuple

# `praxis-lite launch` sets this variable, in the processes that it starts, to the number of the place of the process.
PLACE = 'PRAXIS_LITE_PLACE'


class Seat(NamedTuple):
  """Where a process runs, independent of its index.

  Attributes:
    host: the name of its host.
    slot: the number of the place that `launch` gave it; of others, the number, from 0, among the processes of the host.
  """

  host: str
  slot: int
