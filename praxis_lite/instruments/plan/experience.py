"""Corrects the times of plans by runs that were measured: plans of a kind of chip learn from steps that ran on it.

    praxis-lite plan --job_log_dir=runs/1 --measured

compares a run with its plan and keeps the quotient of the two times. Later plans for the chip multiply all times by the
typical quotient, which is the geometric mean. Those of compiled steps and those of formulas are kept apart.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import NamedTuple

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import format_bytes, format_seconds
from praxis_lite.common.files import cache_folder, parse_json, replace_file
from praxis_lite.instruments.plan.planning import Plan
from praxis_lite.instruments.plan.report import format_table
from praxis_lite.instruments.plan.topology import Experience, Topology


class Measurement(NamedTuple):
  """What a run measured.

  Attributes:
    run: its directory.
    step_seconds: the typical time of a step, without waits for inputs.
    num_steps: the number of steps that it was measured on.
    device_peak: largest memory of a device in bytes; None if the platform does not report it.
    input_wait: the share of the time that the run waited for inputs.
  """

  run: str
  step_seconds: float
  num_steps: int
  device_peak: float | None
  input_wait: float


def experience_file() -> Path:
  """Returns the path of the file in which `praxis-lite plan --measured` keeps what it learns."""
  return cache_folder() / 'measured_runs.json'


def remember(file: Path, plan: Plan, measured: Measurement) -> None:
  """Keeps the quotient of the measured and the planned time; a second measurement of a run replaces its first.

  Args:
    file: see `experience_file`.
    plan: a plan without earlier corrections.
    measured: what the run measured.
  """
  kept = _read(file)
  kept.setdefault(_kind(plan.topology, plan.mode), {})[measured.run] = measured.step_seconds / plan.step_seconds
  file.parent.mkdir(parents=True, exist_ok=True)
  replace_file(file, json.dumps(kept, indent=2) + '\n')


def apply_experience(topology: Topology, file: Path, mode: str) -> Topology:
  """Returns the topology with all times corrected by the runs on its kind of chip; unchanged if there are none.

  Args:
    topology: the chips.
    file: see `experience_file`.
    mode: 'compiled' or 'analytic': how the plans are made.

  Raises:
    UserError: `file` does not have the format that `keep` writes.
  """
  quotients = list(_read(file).get(_kind(topology, mode), {}).values())
  if not quotients:
    return topology
  typical = math.exp(sum(map(math.log, quotients)) / len(quotients))
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

  def add(name: str, planned: float, seen: float | None, text: str, seen_text: str) -> None:
    rows.append((name, text, seen_text, '' if seen is None else f'{seen / planned:.2f}'))

  seconds = plan.step_seconds
  add('step', seconds, measured.step_seconds, format_seconds(seconds), format_seconds(measured.step_seconds))
  if plan.tokens_per_second is not None and plan.work.tokens is not None:
    seen = plan.work.tokens / measured.step_seconds
    add('tokens/s', plan.tokens_per_second, seen, f'{plan.tokens_per_second:,.0f}', f'{seen:,.0f}')
  peak = measured.device_peak
  unknown = 'not reported'
  add('memory', plan.memory.peak, peak, format_bytes(plan.memory.peak), unknown if peak is None else format_bytes(peak))
  waits = sum(c.count * c.exposed for c in plan.cost.collectives)
  rows.append(('waits for communication', f'{waits / seconds:.1%}', 'needs a profile', ''))
  rows.append(('waits for inputs', '-', f'{measured.input_wait:.1%}', ''))
  about = f'{measured.run}: the times of {measured.num_steps:,} steps, without waits for inputs'
  return f'{about}\n{format_table(rows, right=(1, 2, 3))}'


def _kind(topology: Topology, mode: str) -> str:
  return f'{topology.target.name} {mode}'


def _read(file: Path) -> dict[str, dict[str, float]]:
  if not file.is_file():
    return {}
  try:
    kept = parse_json(file.read_bytes())
    if not all(type(x) in (int, float) and 0 < x < math.inf for runs in kept.values() for x in runs.values()):
      raise ValueError('expected positive numbers')
    return kept
  except (OSError, ValueError, TypeError, AttributeError) as error:
    raise UserError(f'{file}: not what `praxis-lite plan --measured` writes ({error}); remove it') from error
