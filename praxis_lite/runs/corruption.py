"""Reacts to silent corruption: devices that compute or store wrong values without an error.

Wrong values are found in two ways. `ReplicaWatch` compares the replicas of the state, `determinism.py` compares a step
with its repetition. Then the run ends with exit code 76, or goes back to its last checkpoint and repeats the steps. A
device is quarantined when it is outvoted for the second time, or already for the first time if `on_corruption` is
'fail'. With `elastic`, the run goes on without it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from praxis_lite.common.errors import FAULTY_DEVICE_CODE, ConfigError, UserError, first_lines
from praxis_lite.common.figures import number_of
from praxis_lite.common.processes import broadcast_decision, gather_texts, is_primary_process
from praxis_lite.common.trees import path_name
from praxis_lite.runs.observer import InputState, Observer, PauseReason, Run
from praxis_lite.runs.records.faulty_devices import (
  FaultyDevice,
  place_of,
  read_faulty_devices,
  record_faulty_devices,
)
from praxis_lite.runs.records.metrics import MAX_STEPS_IN_FLIGHT
from praxis_lite.runs.records.seats import PLACE, Seat
from praxis_lite.runs.replicas import ReplicaDifference, ReplicaSums, find_suspects
from praxis_lite.runs.trouble import GoBack, Trouble
from praxis_lite.sharding.layout import StateLayout
from praxis_lite.training.steps import TrainStepOutput

OnCorruption = Literal['fail', 'repeat']
_SHOWN = 5
_VOTES_TO_QUARANTINE = 2


class CorruptionError(UserError):
  """Devices that should hold or compute the same values do not agree."""

  exit_code = FAULTY_DEVICE_CODE  # Listed in docs/durable-runs.md.


class Corruption(NamedTuple):
  """Wrong values that were found.

  Attributes:
    clean, step: the last step known to be right, and the step after which wrong values were found.
    devices: the devices that may have caused it; () if it may be any device.
    is_voted: whether a majority of devices has outvoted them.
  """

  clean: int
  step: int
  what: str
  devices: Sequence[jax.Device]
  is_voted: bool


class CorruptionPolicy:
  """Decides what a run does after a corruption, and records the devices.

  Args:
    on_corruption: 'fail' ends the run; 'repeat' goes back to the last checkpoint and repeats the steps.
    elastic: whether the run can go on without a device.
    most: how often a run may go back because of corruption.
  """

  def __init__(self, directory: Path, on_corruption: OnCorruption, *, elastic: bool, most: int):
    self._directory, self._elastic, self._most = directory, elastic, most
    self._repeats = on_corruption == 'repeat'

  def answer(self, found: Corruption) -> BaseException:
    """Returns the exception to raise: `GoBack` or CorruptionError. All processes call this, with the same argument."""
    seats = process_seats()
    known = read_faulty_devices(self._directory) if is_primary_process() else []
    records, are_known, event = [], False, 1 + max((k.event for k in known), default=0)
    for device in found.devices:
      seat, place = seats[device.process_index], place_of(device)
      votes = found.is_voted + sum(k.is_voted and k.is_at(seat, place) for k in known)
      is_out = found.is_voted and (not self._repeats or votes >= _VOTES_TO_QUARANTINE)
      are_known |= votes >= _VOTES_TO_QUARANTINE
      name = f'device {device.id} ({device.device_kind}) of {seat.host}'
      fault = FaultyDevice(found.step, seat.host, place, name, found.what, found.is_voted, is_out, event, seat.slot)
      records.append(fault)
    if not records:
      records = [FaultyDevice(found.step, '', -1, 'not known', found.what, event=event)]
    is_over = len({(k.event, k.step) for k in known}) >= self._most or (are_known and not self._elastic)
    repeats = broadcast_decision(self._repeats and not is_over)
    if is_primary_process():
      record_faulty_devices(self._directory, records)
    if repeats:
      return GoBack(Trouble(found.clean + 1, found.step, found.what, 'repeat'))
    return CorruptionError(
      f'{found.what}. Nothing is saved after step {found.clean}; start the run again without '
      f'{"this device" if found.is_voted and len(found.devices) == 1 else "the faulty device"}: it continues from its '
      'last checkpoint. `--elastic` leaves out devices that are quarantined in faulty_devices.jsonl'
    )


def process_seats() -> list[Seat]:
  """Returns where each process runs, by its index; all processes call this."""
  seats: list[Seat] = []
  for text in gather_texts(f'{os.environ.get(PLACE, "")} {socket.gethostname()}'):
    place, _, host = text.partition(' ')
    seats.append(Seat(host, int(place) if place.isdecimal() else sum(seat.host == host for seat in seats)))
  return seats


def check_has_replicas(layout: StateLayout) -> None:
  """Raises ConfigError if no array of a state has replicas on its mesh, and so there is nothing to compare."""
  if max(ReplicaSums(layout).replicated.values()) < 2:
    raise ConfigError(
      f'check_replicas: no array has replicas on the mesh {dict(layout.mesh.shape)}, so there is nothing to compare; '
      'leave it out, or use check_determinism'
    )


class ReplicaWatch(Observer):
  """Compares the replicas of the state every few steps, and before each save, so no corrupt checkpoint is written.

  Between saves, the result is read a few steps later, so that neither the host nor a device waits for it.

  Args:
    every_n_steps: the replicas are compared after each step whose number is a multiple of this.
  """

  def __init__(self, layout: StateLayout, every_n_steps: int, policy: CorruptionPolicy, first_step: int):
    self._sums = ReplicaSums(layout)
    self._devices = list(layout.mesh.devices.flat)
    self._every, self._policy = every_n_steps, policy
    self._clean = self._checked = first_step
    self._pending: tuple[int, jax.Array] | None = None

  def on_start(self, run: Run) -> None:
    """Compiles the comparison, and prints what it covers."""
    self._sums.compile()
    compared = [path for path, count in self._sums.replicated.items() if count > 1]
    share = sum(self._sums.part_bytes[path] for path in compared) / sum(self._sums.part_bytes.values())
    run.line(
      f'replicas of {len(compared)} of {number_of(len(self._sums.part_bytes), "array")} of the state, {share:.0%} of '
      f'its bytes, are compared every {number_of(self._every, "step")} and before saves'
    )

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    if self._pending is not None and run.step >= self._pending[0] + MAX_STEPS_IN_FLIGHT:
      self._finish()
    if run.step % self._every == 0:
      self._begin(run)

  def on_pause(self, run: Run, reason: PauseReason) -> None:
    """Compares the replicas before the state is saved; raises `GoBack` or CorruptionError if it must not be saved."""
    if reason in ('save', 'copy'):
      self._begin(run)
      self._finish()

  def _begin(self, run: Run) -> None:
    if run.step > self._checked:
      self._finish()
      self._pending = run.step, self._sums(run.state)
      self._checked = run.step

  def _finish(self) -> None:
    if self._pending is None:
      return
    (step, table), self._pending = self._pending, None
    if differences := self._sums.compare(np.asarray(table.addressable_data(0))):
      raise self._policy.answer(self._describe(step, differences))
    self._clean = step

  def _describe(self, step: int, differences: Sequence[ReplicaDifference]) -> Corruption:
    suspects = find_suspects(differences)
    devices = [self._devices[number] for number in suspects.devices]
    paths = list(dict.fromkeys(path_name(difference.path) for difference in differences))
    where = f'{number_of(len(paths), "array")}: {", ".join(first_lines(paths, _SHOWN))}'
    hosts = gather_texts(socket.gethostname())
    named = [
      f'device {d.id} ({d.device_kind}, host {hosts[d.process_index]}, process {d.process_index})' for d in devices
    ]
    names = ' and '.join(first_lines(named, _SHOWN))
    if suspects.is_voted:
      blamed = f'{names} {"differs" if len(devices) == 1 else "differ"} from most of the other replicas'
    else:
      blamed = f'{names} differ, and there is no majority that would say which of them is wrong'
    what = f'step {step}: replicas of the state differ in {where}; {blamed}; after step {self._clean} all were equal'
    return Corruption(self._clean, step, what, devices, suspects.is_voted)
