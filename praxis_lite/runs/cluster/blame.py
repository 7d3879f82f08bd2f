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
from typing import TYPE_CHECKING, NamedTuple

from praxis_lite.runs.records.history import RunEvent

if TYPE_CHECKING:
  from praxis_lite.runs.records.faulty_devices import FaultyDevice

_ENOUGH = 2


class Evidence(NamedTuple):
  """A reason to think that a place is bad: `what` describes it, and `weight` says how much it counts."""

  place: int
  what: str
  weight: int = 1


class Blame:
  """Collects evidence over the attempts of a job."""

  def __init__(self) -> None:
    self._seen: list[Evidence] = []

  def add(self, *evidence: Evidence) -> None:
    self._seen.extend(evidence)

  def reasons(self, place: int) -> list[str]:
    """Returns the evidence for which a place is blamed, oldest first; empty if it is not blamed."""
    own = [each for each in self._seen if each.place == place]
    return [each.what for each in own] if sum(each.weight for each in own) >= _ENOUGH else []


def recorded_evidence(events: Sequence[RunEvent], places: list[int]) -> list[Evidence]:
  """Returns the evidence of slow hosts in the history of an attempt. `places[i]` is the place of process i."""
  found = []
  for event in events:
    process = event.about.get('process')
    if event.kind == 'slow_host' and type(process) is int and 0 <= process < len(places):
      found.append(Evidence(places[process], f'slow at step {event.step}'))
  return found


def last_quarantined(directory: Path | None) -> list[FaultyDevice]:
  """Returns the devices that a run quarantined at its last corruption; [] if its directory is not known."""
  if directory is None:
    return []
  from praxis_lite.runs.records.faulty_devices import read_faulty_devices  # This import loads JAX.

  known = read_faulty_devices(directory)
  last = [each for each in known if (each.event, each.step) == (known[-1].event, known[-1].step)]
  return [each for each in last if each.is_quarantined]


def corrupt_places(directory: Path | None, places: list[int]) -> list[Evidence]:
  """Returns evidence against the places whose devices a run quarantined at its last corruption.

  A device's record names the place of its process in the field `slot`.
  """
  found = {each.slot: each.device.partition(' (')[0] for each in last_quarantined(directory) if each.slot in places}
  return [Evidence(place, f'its {device} is quarantined', _ENOUGH) for place, device in found.items()]
