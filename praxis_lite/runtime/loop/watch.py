"""What a run knows of itself while it trains: activities, heartbeats, slow steps, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from praxis_lite.errors import first_line
from praxis_lite.records.goodput import Goodput, SlowSteps, goodput_line, shares
from praxis_lite.records.heartbeat import Heartbeat, HeartbeatFile, identity, read_heartbeats
from praxis_lite.records.record import has_record


class Watch:
  """Watches one process of a run; a context manager around all of it.

  Args:
    directory: the run's directory. Heartbeats are written there once it is known to be that of a run.

  Attributes:
    goodput: on what the time is spent.
    ended_by: how the run ended, set at its end.
  """

  def __init__(self, directory: Path):
    self.goodput = Goodput()
    self._line: Callable[[str], object] = lambda text: None
    self.ended_by = ''
    self._directory = directory
    self._earlier = next(iter(read_heartbeats(directory)), None)
    self._started = time.time()
    self._step = self._total = 0
    self._saved: tuple[int | None, float | None] = (None, None)
    self._rate = 0.0
    self._slow = SlowSteps(None)
    self._last: dict[str, float] = {}
    self._shown: dict[str, float] = {}
    self._memory: dict[str, float] = {}
    self._file = HeartbeatFile(directory, jax.process_index(), self._heartbeat)

  def __enter__(self) -> Self:
    if has_record(self._directory):
      self._file.start()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
    if kind is not None:
      self.ended_by = kind.__name__ + (f': {first_line(error)[:300]}' if error and str(error).strip() else '')
    self.ended_by = self.ended_by or 'done'
    self._file.stop()

  def begin(self, step: int, total_steps: int, slow_step_factor: float | None, line: Callable[[str], object]) -> None:
    """Says where the run starts. Time until then, in this process, is of the start."""
    self._step, self._total, self._line = step, total_steps, line
    self._slow = SlowSteps(slow_step_factor)
    if self._earlier is not None:
      self.goodput.resume(self._earlier.goodput, step)
      self._saved = (self._earlier.saved_step, self._earlier.saved)
    self._file.start()

  def train(self) -> None:
    """Says that training begins."""
    self.goodput.train()
    self._last = self._shown = self.goodput.seconds()

  def took(self, step: int) -> None:
    """Says that a step was dispatched, and those a few before it computed."""
    self._step, before, now = step, self._last, self.goodput.seconds()
    self._last = now
    waited = now['waiting'] - before['waiting']
    seconds = now['productive'] - before['productive'] + waited
    self._rate = 1 / max(seconds, 1e-9) if not self._rate else 1 / (0.9 / self._rate + 0.1 * seconds)
    slow = self._slow.add(step, seconds, waited)
    if slow is not None:
      self._line(slow)

  def saves(self, step: int, *, is_copy: bool) -> None:
    """Says that a save of `step`, or an emergency copy, has begun."""
    self.goodput.mark(step, is_copy=is_copy)

  def saved(self, step: int) -> None:
    """Says that the checkpoint of `step` is complete."""
    self._saved = step, time.time()

  def figures(self) -> dict[str, float]:
    """Returns figures for the summaries of a step; `speed/input_wait` is a share since the last call."""
    now, before = self.goodput.seconds(), self._shown
    self._shown = now
    spent = {name: now[name] - before.get(name, 0.0) for name in ('productive', 'waiting')}
    wait = spent['waiting'] / total if (total := sum(spent.values())) > 0 else 0.0
    self._memory = memory_peaks()
    figures = {f'speed/goodput_{name}': share for name, share in shares(now).items()}
    return {**figures, **self._memory, 'speed/input_wait': wait, 'speed/slow_steps': float(self._slow.count)}

  def summary(self) -> str:
    """Returns the line at the end of a run: goodput, and peaks of memory."""
    self._memory = memory_peaks()
    peaks = [f'{name.removeprefix("speed/").removesuffix("_peak_bytes")} {value / 2**30:.2f} GiB' for name, value in
             self._memory.items()]  # fmt: skip
    return goodput_line(self.goodput.seconds()) + (f'; peak memory: {", ".join(peaks)}' if peaks else '')

  def _heartbeat(self) -> Heartbeat:
    doing, doing_for = self.goodput.activity
    return Heartbeat(
      **identity(),
      process=jax.process_index(),
      processes=jax.process_count(),
      time=time.time(),
      started=self._started,
      step=self._step,
      total_steps=self._total,
      rate=self._rate,
      doing=doing,
      doing_for=round(doing_for, 3),
      saved_step=self._saved[0],
      saved=self._saved[1],
      goodput=self.goodput.record(self._step),
      memory=self._memory,
      ended=self.ended_by,
    )


def memory_peaks() -> dict[str, float]:
  """Returns the most memory that was used until now, in bytes: of the fullest local device, and of this process.

  What the platform does not report is absent: CPU devices have no memory of their own.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != 'cpu']
  peaks = [stat['peak_bytes_in_use'] for stat in stats if 'peak_bytes_in_use' in stat]
  found = {'speed/device_peak_bytes': float(max(peaks))} if peaks else {}
  try:
    import resource
    import sys

    unit = 1 if sys.platform == 'darwin' else 1024
    found['speed/host_peak_bytes'] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
  except ImportError:  # Windows.
    pass
  return found
