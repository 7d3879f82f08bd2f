"""Corrects the times of plans for a kind of chip by the measured times of runs on it.

    praxis-lite plan --job_log_dir=runs/1 --measured

compares a run with its plan, and stores the quotients of measured and planned time and memory. `train` does the same
when it ends, for plans by formulas. Later plans for the chip multiply all times by the geometric mean of the quotients.
Quotients of compiled plans and of plans by formulas are kept apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from praxis_lite.common.figures import format_bytes, format_seconds, number_of
from praxis_lite.common.files import cache_folder
from praxis_lite.instruments.plan.calibration import check_positive, read_measurements, write_measurements
from praxis_lite.instruments.plan.planning import Plan
from praxis_lite.instruments.plan.report import format_table
from praxis_lite.instruments.plan.topology import Experience, Topology


class Measurement(NamedTuple):
  """What a run measured."""

  run: str  # The directory of the run.
  step_seconds: float  # The typical time of a step, without waits for inputs.
  num_steps: int  # The number of measured steps.
  device_peak: float | None  # Peak memory of a device in bytes; None if the platform does not report it.
  input_wait: float  # The share of the time that the run waited for inputs.


class Learned(NamedTuple):
  """What later plans use of one run: its measured figures divided by the planned ones, and its number of chips."""

  time: float
  memory: float | None = None  # None if it was not reported.
  chips: int | None = None  # None if the file is from a version that did not store it.


def experience_file() -> Path:
  """Returns the path of the file in which `praxis-lite plan --measured` stores quotients."""
  return cache_folder() / 'measured_runs.json'


def remember(file: Path, plan: Plan, measured: Measurement) -> None:
  """Stores the quotients of measured and planned time and memory; a second measurement of a run replaces the first.

  The plan must be one without earlier corrections.
  """
  kept = _read(file)
  memory = None if measured.device_peak is None else measured.device_peak / plan.memory.peak
  learned = Learned(measured.step_seconds / plan.step_seconds, memory, plan.topology.num_chips)
  kept.setdefault(_kind(plan.topology, plan.mode), {})[measured.run] = learned
  write_measurements(file, {kind: {run: one._asdict() for run, one in runs.items()} for kind, runs in kept.items()})


def is_typical(plan: Plan, measured: Measurement) -> bool:
  """Whether later plans may learn from a run: it has enough steps, not too short and not far from the plan."""
  if not plan.is_time_known or measured.num_steps < _FEWEST_STEPS or plan.step_seconds < _SHORTEST_STEP:
    return False
  return 1 / _FARTHEST < measured.step_seconds / plan.step_seconds < _FARTHEST


_FEWEST_STEPS, _SHORTEST_STEP, _FARTHEST = 50, 0.005, 4.0


def format_experience(file: Path) -> str:
  """Returns a table of the stored quotients (measured / planned) by chip and mode, or says why there are none."""
  rows = [('chip', 'plans', 'runs', 'chips of each', 'step / planned', 'range', 'spread', 'memory / planned')]
  for kind, runs in sorted(_read(file).items()):
    chip, _, mode = kind.partition(' ')
    times = [one.time for one in runs.values()]
    memories = [one.memory for one in runs.values() if one.memory]
    chips = sorted({one.chips for one in runs.values() if one.chips})
    spread = math.exp(math.sqrt(sum(math.log(t / _typical(times)) ** 2 for t in times) / max(len(times) - 1, 1)))
    several = len(times) > 1
    rows.append(
      (
        *(chip, 'by formulas' if mode == 'analytic' else mode, str(len(times)), ', '.join(map(str, chips)) or '-'),
        *(f'{_typical(times):.2f}', f'{min(times):.2f} to {max(times):.2f}' if several else '-'),
        *(f'x {spread:.2f}' if several else '-', f'{_typical(memories):.2f}' if memories else '-'),
      )
    )
  if len(rows) == 1:
    return f'plans have learned from no run yet; `plan --job_log_dir=runs/1 --measured` compares one: {file}'
  return f'{format_table(rows, right=(2, 4, 7))}\nlater plans are corrected by these: {file}'


def _typical(quotients: Sequence[float]) -> float:
  return math.exp(sum(map(math.log, quotients)) / len(quotients))


def apply_experience(topology: Topology, file: Path, mode: str) -> Topology:
  """Returns the topology with all times corrected by the runs on its kind of chip; unchanged if there are none.

  `mode` says how the plans are made, 'compiled' or 'analytic'.

  Raises:
    UserError: `file` does not have the format that `remember` writes.
  """
  quotients = [one.time for one in _read(file).get(_kind(topology, mode), {}).values()]
  if not quotients:
    return topology
  typical = _typical(quotients)
  found = Experience(len(quotients), typical, min(quotients), max(quotients))
  old = topology.target.efficiency
  slower = dataclasses.replace(
    old,
    **{name: getattr(old, name) / typical for name in ('compute', 'attention', 'memory', 'links', 'network')},
    **{name: getattr(old, name) * typical for name in ('seconds_per_operation', 'seconds_per_hop')},
  )
  target = dataclasses.replace(topology.target, efficiency=slower)
  return dataclasses.replace(topology, target=target, experience=found)


def format_measured(plan: Plan, measured: Measurement) -> str:
  """Returns the planned and the measured figures of a run side by side."""
  rows = [('', 'planned', 'measured', 'measured / planned')]

  def add(name: str, planned: float, seen: float | None, form: Callable[[float], str]) -> None:
    texts = ('not reported', '') if seen is None else (form(seen), f'{seen / planned:.2f}')
    rows.append((name, form(planned), *texts))

  seconds = plan.step_seconds
  add('step', seconds, measured.step_seconds, format_seconds)
  if plan.tokens_per_second is not None and plan.work.tokens is not None:
    add('tokens/s', plan.tokens_per_second, plan.work.tokens / measured.step_seconds, '{:,.0f}'.format)
  add('memory', plan.memory.peak, measured.device_peak, format_bytes)
  rows.append(('waits for communication', f'{plan.cost.exposed_seconds / seconds:.1%}', 'needs a profile', ''))
  rows.append(('waits for inputs', '-', f'{measured.input_wait:.1%}', ''))
  about = f'{measured.run}: the times of {number_of(measured.num_steps, "step")}, without waits for inputs'
  return f'{about}\n{format_table(rows, right=(1, 2, 3))}'


def _kind(topology: Topology, mode: str) -> str:
  return f'{topology.target.name} {mode}'


def _read(file: Path) -> dict[str, dict[str, Learned]]:
  return read_measurements(file, lambda runs: {run: _parse(one) for run, one in runs.items()}, '--measured')


def _parse(one: object) -> Learned:
  """Returns the stored quotients of a run. Files of earlier versions have only one number: the quotient of times."""
  learned = Learned(**one) if isinstance(one, dict) else Learned(one)  # type: ignore[arg-type]
  check_positive([learned.time, *(x for x in (learned.memory, learned.chips) if x is not None)])
  return learned
