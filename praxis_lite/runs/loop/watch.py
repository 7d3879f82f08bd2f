"""Watch: measures a run while it trains: activities, heartbeats, history, slow steps, slow hosts, and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from praxis_lite.checkpoints.contents import OtherModelError
from praxis_lite.checkpoints.retention import CHECKPOINTS
from praxis_lite.common.errors import ConfigError, ShardingError, error_summary
from praxis_lite.common.files import KnownFolder
from praxis_lite.common.processes import is_primary_process
from praxis_lite.runs.host_speeds import HostSpeeds
from praxis_lite.runs.observer import InputState, Observer, PauseReason, Run
from praxis_lite.runs.records.goodput import Goodput, SlowSteps, goodput_line, shares
from praxis_lite.runs.records.heartbeat import Heartbeat, HeartbeatFile, read_heartbeats
from praxis_lite.runs.records.history import EventKind, note_event, started_event
from praxis_lite.runs.records.metrics import DeviceMetrics
from praxis_lite.runs.records.record import has_record
from praxis_lite.training.steps import TrainStepOutput

# Errors of a launch whose config, mesh or model does not fit the run. Such a launch must change nothing, not even
# heartbeats.
_REFUSALS = (ConfigError, ShardingError, OtherModelError)


class Watch(Observer):
  """Measures how one process spends its time, and reports it: goodput, slow steps, memory, heartbeats.

  Until the run starts, heartbeats repeat the progress of the last launch.

  Args:
    directory: the run's directory. Heartbeats are written there once it has the record of a run.
    began: when the start-up began, by `time.perf_counter`.
  """

  def __init__(self, directory: Path, began: float):
    self._goodput = Goodput(began=began)
    self._directory = directory
    self._folder = KnownFolder(directory)
    self._earlier = next(iter(read_heartbeats(directory)), None)
    self._restored: tuple[int, float] | None = None  # The step from which the run starts, and when it was saved.
    self._started = time.time()
    self._run: Run | None = None
    self._first_step = 0
    self._ended_by = ''
    self._rate = self._waited = 0.0
    self._slow = SlowSteps(None)
    self._hosts: HostSpeeds | None = None  # None if the run has only one process.
    self._speed: dict[str, float] = {}
    self._at_step: dict[str, float] = {}
    self._at_figures: dict[str, float] = {}
    self._memory: dict[str, float] = {}
    self._file = HeartbeatFile(directory, jax.process_index(), self._heartbeat)

  def __enter__(self) -> Self:
    if has_record(self._directory):
      self._file.start()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
    if self._run is None and isinstance(error, _REFUSALS):
      self._file.withdraw()
      return
    if error is not None:
      self._ended_by = textwrap.shorten(error_summary(error), 340, placeholder=' ...')
    else:
      run = self._run
      self._ended_by = (run.ended_by if run else '') or 'done'
      if run is not None and self._ended_by == 'done' and run.step < self._total_steps(run):
        self._ended_by = 'no step taken'
    self._file.stop()
    if self._run is not None:
      self._note('ended', self._run.step, self._ended_by)

  def measure(self, activity: str) -> contextlib.AbstractContextManager[Any]:
    return self._goodput.doing(activity)

  def on_start(self, run: Run) -> None:
    self._run, self._first_step = run, run.step
    self._slow = SlowSteps(run.task.train.slow_step_factor)
    with contextlib.suppress(OSError):
      self._restored = run.step, (self._directory / CHECKPOINTS / str(run.step)).stat().st_mtime
    if (earlier := self._earlier) is not None:
      self._goodput.resume(earlier.goodput, run.step)
      if earlier.saved_step == run.step and earlier.saved is not None:  # A copied checkpoint has newer files.
        self._restored = earlier.saved_step, earlier.saved
    self._file.start()
    self._note('started', run.step, about=started_event(run.step, jax.process_count(), self._earlier))
    if jax.process_count() > 1:
      self._hosts = HostSpeeds()

  def on_ready(self, run: Run) -> None:
    self._goodput.train()
    self._at_step = self._at_figures = self._goodput.seconds()

  def on_step(self, run: Run, out: TrainStepOutput, read_from: InputState) -> None:
    before, now = self._at_step, self._goodput.seconds()
    self._at_step = now
    waited = now['waiting'] - before['waiting']
    seconds = now['productive'] - before['productive'] + waited
    self._rate = 1 / max(seconds, 1e-9) if not self._rate else 1 / (0.9 / self._rate + 0.1 * seconds)
    self._waited += 0.1 * (waited / max(seconds, 1e-9) - self._waited)
    if (slow := self._slow.add(run.step, seconds, waited)) is not None:
      run.line(slow)

  def on_metrics(self, step: int, metrics: DeviceMetrics) -> None:
    self._speed = {**self._slow.quantiles(), 'waited': round(self._waited, 4)}
    if self._hosts is not None:
      self._speed['product'] = self._hosts.own
    if self._run is not None and self._run.links:
      peer, rate = min(self._run.links.items(), key=lambda link: link[1])
      self._speed |= {'sent_to': peer, 'sent_rate': rate}

  def on_nonfinite(self, step: int, what: str) -> None:
    self._note('nonfinite', step, what)

  def on_pause(self, run: Run, reason: PauseReason) -> None:
    if reason in ('save', 'copy'):
      self._goodput.mark(run.step, is_copy=reason == 'copy')
    if reason == 'save' and self._hosts is not None:
      jax.block_until_ready(run.state.step)  # The devices must be idle for the comparison.
      if line := self._hosts.compare():
        run.line(line)
        self._note('slow_host', run.step, line, {'process': self._hosts.slowest[0]})

  def on_checkpoint(self, run: Run, step: int, folder: Path) -> None:
    self._note('saved', step)

  def on_end(self, run: Run) -> None:
    """Prints the goodput and the peak memory, then the last step and where it is saved."""
    total, where = run.total_steps, self._directory / CHECKPOINTS
    if run.step > self._first_step:
      self._memory = memory_peaks()
      names = {name: name.removeprefix('speed/').removesuffix('_peak_bytes') for name in self._memory}
      peaks = [f'{names[name]} {value / 2**30:.2f} GiB' for name, value in self._memory.items()]
      line = goodput_line(self._goodput.seconds(), is_resumed=self._first_step > 0)
      run.line(line + (f'; peak memory: {", ".join(peaks)}' if peaks else ''))
    if run.step > total:
      past = f'past the {total} of task.train.num_train_steps, so no step was taken'
      run.line(f'step {run.step}, {past}: saved in {where}')
    else:
      all_taken = '; all steps are taken' if run.step == self._first_step == total else ''
      run.line(f'step {run.step} of {total}: saved in {where}{all_taken}')

  def figures(self) -> dict[str, float]:
    """Returns figures for summaries. `speed/input_wait` is the share of waits in the time since the last call."""
    now, before = self._goodput.seconds(), self._at_figures
    self._at_figures = now
    spent = {name: now[name] - before.get(name, 0.0) for name in ('productive', 'waiting')}
    wait = spent['waiting'] / total if (total := sum(spent.values())) > 0 else 0.0
    self._memory = memory_peaks()
    figures = {f'speed/goodput_{name}': share for name, share in shares(now).items()}
    if self._hosts is not None:
      slowest, ratio = self._hosts.slowest
      figures |= {'speed/slowest_process': float(slowest), 'speed/slowest_process_ratio': ratio}
    return {**figures, **self._memory, 'speed/input_wait': wait, 'speed/slow_steps': float(self._slow.count)}

  def _note(self, kind: EventKind, step: int, text: str = '', about: Mapping[str, Any] | None = None) -> None:
    if is_primary_process():
      note_event(self._folder, kind, step, text, about)

  def _total_steps(self, run: Run) -> int:
    """Returns the number of steps to report: the config's, or the recorded one if the run began after all of them."""
    recorded = self._earlier.total_steps if self._earlier is not None else 0
    return recorded if recorded and self._first_step >= run.total_steps else run.total_steps

  def _heartbeat(self) -> Heartbeat:
    doing, doing_for = self._goodput.activity
    beat, run = self._earlier or Heartbeat(), self._run
    step, total_steps, saved_step, saved = beat.step, beat.total_steps, beat.saved_step, beat.saved
    if run is not None:
      step, total_steps = run.step, self._total_steps(run)
      saved_step, saved = run.last_save or self._restored or (None, None)
    return Heartbeat(
      pid=os.getpid(),
      host=socket.gethostname(),
      process=jax.process_index(),
      processes=jax.process_count(),
      time=time.time(),
      started=self._started,
      step=step,
      total_steps=total_steps,
      rate=self._rate,
      doing=doing,
      doing_for=round(doing_for, 3),
      saved_step=saved_step,
      saved=saved,
      goodput=beat.goodput if run is None else self._goodput.record(step),
      memory=self._memory,
      speed=self._speed,
      ended=self._ended_by,
    )


def memory_peaks() -> dict[str, float]:
  """Returns the peak memory until now, in bytes, of the fullest local device and of this process.

  Numbers that the platform does not report are absent; CPU devices report none.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != 'cpu']
  peaks = [stat['peak_bytes_in_use'] for stat in stats if 'peak_bytes_in_use' in stat]
  found = {'speed/device_peak_bytes': float(max(peaks))} if peaks else {}
  try:
    import resource

    unit = 1 if sys.platform == 'darwin' else 1024
    found['speed/host_peak_bytes'] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
  except ImportError:  # Windows lacks this module.
    pass
  return found
