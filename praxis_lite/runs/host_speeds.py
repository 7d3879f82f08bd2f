"""Compares the hosts of a run, to find one that has slow devices or waits for its data.

In each step, all processes of a run wait for the slowest one, so the time of a step does not show which one is slow.
So each process also measures itself: before each save, when the devices are idle, it times a small matrix product on
each of its own devices. It also measures how long it waits for input.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.common.figures import duration
from praxis_lite.runs.records.status import ratio_to_others

_PRODUCTS, _TIMES = 8, 3  # The number of products of the test, and how often it is timed.
# A host is slow if its test takes more than `SLOW` times the median of the others, `_IN_A_ROW` times in a row.
SLOW, _IN_A_ROW = 1.5, 3


class DeviceProbe:
  """Times a small product on each device of this process."""

  def __init__(self) -> None:
    devices = jax.local_devices()
    side, dtype = (128, jnp.float32) if devices[0].platform == 'cpu' else (2048, jnp.bfloat16)
    self._matrices = [jax.device_put(np.eye(side, dtype=dtype), device) for device in devices]

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
    own: the seconds that the test took on the slowest device of this process when it was measured last.
    slowest: the index of the slowest process, and the ratio of its time for the test to the median of the others.
  """

  def __init__(self) -> None:
    self._probe = DeviceProbe()
    self._in_a_row = (-1, 0)
    self.own, self.slowest = 0.0, (0, 1.0)

  def compare(self) -> str:
    """Measures the speed of this host, and compares it with the speeds of the others.

    Returns a line if a host is slow for the third time in a row, otherwise ''.
    """
    self.own = self._probe.seconds()
    products = np.asarray(multihost_utils.process_allgather(np.asarray(self.own, np.float32)))
    self.slowest, line = self._judge(products.tolist())
    return line

  def _judge(self, products: Sequence[float]) -> tuple[tuple[int, float], str]:
    slowest = max(range(len(products)), key=lambda i: products[i])
    ratio = ratio_to_others(products, slowest)
    count = self._in_a_row[1] + 1 if self._in_a_row[0] == slowest else 1
    self._in_a_row = (slowest, count if ratio > SLOW else 0)
    if self._in_a_row[1] != _IN_A_ROW:
      return (slowest, ratio), ''
    return (slowest, ratio), (
      f'process {slowest} is slow: before each of the last {_IN_A_ROW} saves, one of its devices took long for '
      f'a test product, now {duration_of(products[slowest])}, {ratio:.1f} x the median of the others'
    )


def duration_of(seconds: float) -> str:
  """Returns a short time as text: '0.31 ms', '12.0 ms', '1.3 s'."""
  return duration(seconds) if seconds >= 1 else f'{1e3 * seconds:.3g} ms'
