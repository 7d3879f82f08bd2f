"""Measures the phases of the start-up, then steps, examples and tokens per second, and the share of peak FLOP/s."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from praxis_lite.common.accelerators import bf16_peak_of
from praxis_lite.common.trees import leaves_by_path


class StartupTimes:
  """Divides the time from the start to the first step into named phases.

      startup = StartupTimes()
      ...
      startup.mark('data')    # the time since the start, or the last mark, belongs to 'data'
      startup.report()        # 'first step after 7.9 s: data 0.4, compile 2.9, ...'

  `clock` returns seconds, and can be replaced in tests. `began` is the clock's value at the start; None means that the
  start is now.
  """

  def __init__(self, began: float | None = None, clock: Callable[[], float] = time.perf_counter):
    self._clock = clock
    self.began = self._last = clock() if began is None else began
    self._seconds: dict[str, float] = {}

  def mark(self, name: str) -> None:
    """Assigns the time since the last mark to phase `name`."""
    self.mark_parts({name: self._clock() - self._last})

  def mark_parts(self, seconds: Mapping[str, float]) -> None:
    """Assigns the time since the last mark to several phases, given their seconds, which were measured elsewhere."""
    for name, value in seconds.items():
      self._seconds[name] = self._seconds.get(name, 0.0) + value
    self._last = self._clock()

  def report(self) -> str:
    """Returns the phases as one line; phases of less than 0.05 s are left out."""
    shown = ', '.join(f'{name} {seconds:.1f}' for name, seconds in self._seconds.items() if seconds >= 0.05)
    return f'first step after {sum(self._seconds.values()):.1f} s: {shown}'


def peak_flops(device: jax.Device) -> float | None:
  """Returns the dense bfloat16 peak of one device in FLOP/s; None if unknown, as for a CPU."""
  return None if device.platform == 'cpu' else bf16_peak_of(device.device_kind)


class Rates(NamedTuple):
  """Speeds since the last call. Tokens per second are None without tokens; MFU is None if the peak is unknown."""

  steps_per_second: float
  examples_per_second: float
  tokens_per_second: float | None
  mfu: float | None

  def to_metrics(self) -> dict[str, float]:
    return {f'speed/{name}': value for name, value in self._asdict().items() if value is not None}


class Throughput:
  """Measures speed between calls of `rates`.

  Args:
    batch_struct: the shapes of one global batch. Tokens are counted if the batch, or a dict in it, has `ids` [B, T].
    flops_per_step: the model's floating-point operations in one step over all devices; None if unknown.
  """

  def __init__(
    self,
    batch_struct: Mapping[str, Any],
    *,
    flops_per_step: float | None = None,
    devices: Iterable[jax.Device] = (),
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._examples = int(jax.tree.leaves(dict(batch_struct))[0].shape[0])
    ids = [x.shape for path, x in leaves_by_path(dict(batch_struct)).items() if path[-1] == 'ids' and len(x.shape) == 2]
    self._tokens = sum(map(math.prod, ids)) if ids else None
    self._flops = flops_per_step
    peaks = [peak_flops(device) for device in devices]
    self._peak = math.fsum(p for p in peaks if p) if peaks and all(peaks) else None
    self._clock = clock
    self._mark: tuple[int, float] | None = None
    self._rows: list[int] = []

  def restart(self, step: int) -> None:
    """Begins a new measurement after `step`.

    The time since the last call, such as that of an evaluation, does not count.
    """
    self._mark, self._rows = (step, self._clock()), []

  def add_rows(self, rows: int) -> None:
    """Records the number of rows in a step, if it may differ from `batch_struct`."""
    self._rows.append(rows)

  def rates(self, step: int) -> Rates | None:
    """Returns the speeds of the steps up to `step` since the last call or restart.

    Returns None if no step was taken since then, and at the first call if there was no restart before it.
    """
    now = self._clock()
    before, self._mark = self._mark, (step, now)
    rows, self._rows = self._rows, []
    if before is None or step <= before[0] or now <= before[1]:
      return None
    steps = (step - before[0]) / (now - before[1])
    share = sum(rows) / len(rows) / self._examples if rows else 1.0
    tokens = None if self._tokens is None else steps * self._tokens * share
    mfu = None if self._flops is None or self._peak is None else steps * self._flops * share / self._peak
    return Rates(steps, steps * self._examples * share, tokens, mfu)
