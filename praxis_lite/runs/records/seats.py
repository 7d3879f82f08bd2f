"""Seat: the place of a process of a run. Unlike the index of the process, it stays the same after a restart."""

from __future__ import annotations

from typing import NamedTuple

# `praxis-lite launch` sets this variable in each process that it starts to the number of the process's place.
PLACE = 'PRAXIS_LITE_PLACE'


class Seat(NamedTuple):
  """The place of a process, independent of its index.

  Attributes:
    slot: the number of the place that `launch` gave it; for other processes, its number among the processes of the
      host, from 0.
  """

  host: str
  slot: int
