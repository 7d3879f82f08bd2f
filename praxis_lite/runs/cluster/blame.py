"""Decides from the evidence over a job's restarts which of its places is bad and should be replaced by a spare.

A place is where one process of a job runs, such as a host or some of its accelerators; it keeps its number when the
process gets another index. A place is blamed when its evidence adds up to a weight of 2:

    lost          1    its process was the first to be ended by a signal or a timeout
    slow          1    its devices were slow at a test matrix product before several saves (`host_speeds.py`)
    corrupt       2    one of its devices is quarantined because of wrong values (`corruption.py`)

So one loss, which may happen to any host, does not blame a place; a second loss does, or the loss of a slow host.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from praxis_lite.runs.records.history import RunEvent

_ENOUGH = 2


class Evidence(NamedTuple):
  """An observation that speaks against a place: `what` describes it, and `weight` says how much it counts."""

  place: int
  what: str
  weight: int = 1


class Blame:
  """Collects evidence over the attempts of a job."""

  def __init__(self) -> None:
    self._seen: list[Evidence] = []

  def add(self, *evidence: Evidence) -> None:
    """Adds the evidence of an attempt."""
    self._seen.extend(evidence)

  def reasons(self, place: int) -> list[str]:
    """Returns the evidence for which a place is blamed, oldest first; empty if it is not blamed."""
    own = [each for each in self._seen if each.place == place]
    return [each.what for each in own] if sum(each.weight for each in own) >= _ENOUGH else []


def recorded_evidence(events: Sequence[RunEvent], places: list[int]) -> list[Evidence]:
  """Returns the evidence of slow hosts in the history of a run.

  Args:
    events: the events of an attempt.
    places: the place of each process of the attempt, by its index.
  """
  found = []
  for event in events:
    process = event.about.get('process')
    if event.kind != 'slow_host' or not isinstance(process, int) or process is True:
      continue
    if 0 <= process < len(places):
      found.append(Evidence(places[process], f'slow at step {event.step}'))
  return found


def corrupt_places(directory: Path | None, places: list[int]) -> list[Evidence]:
  """Returns the evidence of the last corruption that a run has recorded: the places of devices that it quarantined.

  Args:
    directory: the run's directory; None if it is not known.
    places: as in `recorded_evidence`; `launch` gives each process its place, which is the slot of its devices.
  """
  if directory is None:
    return []
  from praxis_lite.runs.records.faulty_devices import read_faulty_devices  # This import loads JAX.

  known = read_faulty_devices(directory)
  found = {}
  for each in known:
    is_last = (each.event, each.step) == (known[-1].event, known[-1].step)
    if each.is_quarantined and is_last and each.slot in places:
      found[each.slot] = f'its {each.device.partition(" (")[0]} is quarantined'
  return [Evidence(place, what, _ENOUGH) for place, what in found.items()]
