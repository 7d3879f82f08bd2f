"""Compares the hosts of a run, to find one that has slow devices or waits for its data.

In each step, all processes of a run wait for the slowest one, so the time of a step does not show which one is slow.
So each process also measures itself: before each save, when the devices are idle, it times a small matrix product on
each of its own devices. It also measures how long it waits for input.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.common.figures import duration
from praxis_lite.runs.records.status import ratio_to_others

# The test: the side of its square matrices by platform (`_SIDE` for others), its number of products, and how often it
# is timed.
_SIDES = {'cpu': 128}
_SIDE, _PRODUCTS, _TIMES = 2048, 8, 3
# A host is slow if its test takes this many times as long as the median of the others, this often in a row.
SLOW, _IN_A_ROW = 1.5, 3


class HostSpeed(NamedTuple):
  """What a process measures about itself.

  Attributes:
    product: seconds that the test product takes on its slowest device.
    waited: the share of the time of steps in which the process waited for input.
  """

  product: float
  waited: float


class DeviceProbe:
  """Times a small product on each device of this process."""

  def __init__(self, devices: Sequence[jax.Device] | None = None):
    self._devices = list(jax.local_devices() if devices is None else devices)
    side = _SIDES.get(self._devices[0].platform, _SIDE)
    dtype = jnp.float32 if self._devices[0].platform == 'cpu' else jnp.bfloat16
    self._matrices = [jax.device_put(np.eye(side, dtype=dtype), device) for device in self._devices]

    def multiply(matrix: jax.Array) -> jax.Array:
      return jax.lax.fori_loop(0, _PRODUCTS, lambda _, product: product @ matrix, matrix)

    self._multiply = jax.jit(multiply)
    for matrix in self._matrices:
      self._multiply(matrix).block_until_ready()

  def seconds(self) -> float:
    """Returns the seconds that the test takes on the slowest device; each device's best of three tries counts."""
    return max(min(self._time(matrix) for _ in range(_TIMES)) for matrix in self._matrices)

  def _time(self, matrix: jax.Array) -> float:
    began = time.perf_counter()
    self._multiply(matrix).block_until_ready()
    return time.perf_counter() - began


class HostSpeeds:
  """Compares the hosts before saves; all processes call each method.

  Attributes:
    own: the last measurement of this process.
    slowest: the index of the slowest process, and the ratio of its time for the test to the median of the others.
  """

  def __init__(self) -> None:
    self._probe = DeviceProbe()
    self._in_a_row = (-1, 0)
    self.own = HostSpeed(0.0, 0.0)
    self.slowest = (0, 1.0)

  def compare(self, waited: float) -> str:
    """Measures and compares; returns a line about a host that is slow for the third time in a row; '' if there is none.

    Args:
      waited: the share of the time of steps in which this process waited for input.
    """
    self.own = HostSpeed(self._probe.seconds(), waited)
    table = np.asarray(multihost_utils.process_allgather(np.asarray(self.own, np.float32)))
    self.slowest, line = self._judge([HostSpeed(*map(float, row)) for row in table])
    return line

  def _judge(self, speeds: Sequence[HostSpeed]) -> tuple[tuple[int, float], str]:
    products = [speed.product for speed in speeds]
    slowest = max(range(len(products)), key=lambda i: products[i])
    ratio = ratio_to_others(products, slowest)
    count = self._in_a_row[1] + 1 if self._in_a_row[0] == slowest else 1
    self._in_a_row = (slowest, count if ratio > SLOW else 0)
    line = ''
    if self._in_a_row[1] == _IN_A_ROW:
      line = (
        f'process {slowest} is slow: before each of the last {_IN_A_ROW} saves, one of its devices took long for '
        f'a test product, now {duration_of(speeds[slowest].product)}, {ratio:.1f} x the median of the others'
      )
    return (slowest, ratio), line


def duration_of(seconds: float) -> str:
  """Returns a short time as text: '0.31 ms', '12.0 ms', '1.3 s'."""
  return duration(seconds) if seconds >= 1 else f'{1e3 * seconds:.3g} ms'
