"""Assertions about the plan of a step and its collectives, for the tests of your own project.

    from praxis_lite.instruments.testing import assert_collectives, assert_plan_matches

    def test_the_step_is_as_planned():
      assert_plan_matches(MyExperiment, 'cpu:8', 'tests/plans/my_experiment.txt')

    def test_the_step_gathers_nothing():
      assert_collectives(step.compiled, {'all-reduce': 2, 'all-gather': 0})

UPDATE_GOLDEN=1 rewrites the snapshots of plans.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from praxis_lite.common.figures import number_of
from praxis_lite.instruments.explain.report import Explained
from praxis_lite.instruments.plan.hlo import KINDS, parse
from praxis_lite.instruments.plan.planning import plan
from praxis_lite.instruments.plan.snapshot import GrowthLimits, keep, read, regressions, snapshot_of
from praxis_lite.instruments.plan.topology import Topology


def assert_plan_matches(
  task: Explained,
  topology: str | Topology,
  path: str | Path,
  *,
  inputs: Mapping[str, object] | None = None,
  compile: bool = True,
  limits: GrowthLimits | None = None,
  cache: Path | None = None,
) -> None:
  """Raises AssertionError if a train step is worse than a snapshot of its plan, for example if it uses more memory.

  Args:
    task, topology, inputs, compile, cache: see `plan`. 'cpu:8' needs 8 simulated devices but no other compiler.
    path: path of the snapshot; UPDATE_GOLDEN=1 writes it.
    limits: replaces the limits in the snapshot.

  Raises:
    AssertionError: the snapshot is missing, or the step is worse than it by more than the limits; the message names
      layers and fields.
  """
  path, updates = Path(path), os.environ.get('UPDATE_GOLDEN') == '1'
  if not updates and not path.exists():
    raise AssertionError(f'{path} is missing; UPDATE_GOLDEN=1 writes it')
  new = snapshot_of(plan(task, inputs, topology, compile=compile, cache=cache))
  if updates:
    keep(new, path)
  worse = regressions(read(path), new, limits)
  if worse:
    raise AssertionError('\n'.join([f'{path}:', *worse, 'if that is meant, UPDATE_GOLDEN=1 records it']))


@dataclasses.dataclass(frozen=True)
class Collective:
  """How often one kind of collective runs in a step, and the bytes of its results on one device."""

  count: int
  bytes: int


def collectives(compiled: jax.stages.Compiled | str) -> dict[str, Collective]:
  """Returns the collectives of one run of a compiled program, by kind; kinds that do not occur count 0.

  Raises:
    ValueError: the program is given as HLO text without an entry computation.
  """
  found = dict.fromkeys(KINDS, Collective(0, 0))
  for instruction, times in parse(compiled).executed_instructions():
    if kind := instruction.collective:
      size = sum(array.bytes for array in instruction.collective_result)
      found[kind] = Collective(found[kind].count + times, found[kind].bytes + times * size)
  return found


def assert_collectives(compiled: jax.stages.Compiled | str, expected: Mapping[str, int]) -> None:
  """Raises an AssertionError, which lists all collectives, unless each kind in `expected` runs as often as it says.

  Raises:
    KeyError: `expected` has a kind that is not in `KINDS`.
  """
  unknown = set(expected) - set(KINDS)
  if unknown:
    raise KeyError(f'unknown collectives {sorted(unknown)}; known: {", ".join(KINDS)}')
  found = collectives(compiled)
  wrong = {kind: n for kind, n in expected.items() if found[kind].count != n}
  if wrong:
    lines = [
      f'  {kind}: {number_of(c.count, "time")}, {number_of(c.bytes, "byte")}' for kind, c in found.items() if c.count
    ]
    raise AssertionError(f'expected {dict(wrong)}; the program has\n' + ('\n'.join(lines) or '  no collectives'))
