"""The record of devices that gave wrong values, `faulty_devices.jsonl` in the run's directory.

    {"step": 200, "host": "n1", "place": 3, "device": "device 3 (...)", "what": "...", "is_voted": true,
     "is_quarantined": false, "event": 1, "slot": 0}

A device is identified by its host, the slot of its process there, and its index among the devices of the process. These
stay the same after a restart. A run with `--elastic` leaves quarantined devices out. Once the hardware is replaced,
remove the file, or the device's lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from praxis_lite.common.processes import broadcast_decision
from praxis_lite.runs.records.json_lines import append_line, read_json_lines
from praxis_lite.runs.records.seats import Seat

FAULTY_DEVICES = 'faulty_devices.jsonl'
_MOST_BYTES = 1 << 20


class FaultyDevice(NamedTuple):
  """A suspicion against a device.

  Attributes:
    step: the step at which wrong values were found.
    host, place: the name of its host, and its index among the devices of its process.
    is_voted: whether a majority of devices has outvoted it; otherwise another device may be at fault.
    is_quarantined: whether runs with `--elastic` leave it out from now on.
    event: the number of the finding, from 1; devices that were suspected together share it. 0 in older records.
    slot: the slot of its process, see `Seat`; -1 in older records, which match any process of the host.
  """

  step: int
  host: str
  place: int
  device: str
  what: str
  is_voted: bool = False
  is_quarantined: bool = False
  event: int = 0
  slot: int = -1

  def is_at(self, seat: Seat, place: int) -> bool:
    """Whether this is about the device with index `place` of the process at `seat`."""
    return (self.host, self.place) == (seat.host, place) and self.slot in (-1, seat.slot)


def read_faulty_devices(directory: Path) -> list[FaultyDevice]:
  """Returns the record of a run, in order; skips damaged lines."""
  known = FaultyDevice._fields
  return read_json_lines(
    directory / FAULTY_DEVICES, lambda data: FaultyDevice(**{n: data[n] for n in known if n in data})
  )


def record_faulty_devices(directory: Path, found: Sequence[FaultyDevice]) -> None:
  """Adds lines to the record; only process 0 calls this. If the file exceeds 1 MiB, its older half is dropped."""
  for device in found:
    append_line(directory / FAULTY_DEVICES, device._asdict(), _MOST_BYTES)


def place_of(device: jax.Device) -> int:
  """Returns the index of a device among the devices of its process."""
  return [other.id for other in jax.devices() if other.process_index == device.process_index].index(device.id)


def leave_out_quarantined(
  devices: Sequence[jax.Device], directory: Path, seats: Sequence[Seat]
) -> tuple[list[jax.Device], list[str]]:
  """Returns the healthy devices, and the names of the quarantined ones; all processes call this, with all seats."""
  quarantined = [known for known in read_faulty_devices(directory) if known.is_quarantined]

  def is_out(device: jax.Device) -> bool:
    return any(known.is_at(seats[device.process_index], place_of(device)) for known in quarantined)

  out = [broadcast_decision(is_out(device)) for device in devices]
  names = [f'device {d.id} of {seats[d.process_index].host}' for d in itertools.compress(devices, out)]
  return [device for device, is_left_out in zip(devices, out) if not is_left_out], names
