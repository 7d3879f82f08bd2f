"""Helpers for the tests of your own project: a check that a step still matches its plan.

    from praxis_lite.instruments.testing import assert_plan_matches

    def test_the_step_is_as_planned():
      assert_plan_matches(MyExperiment, 'cpu:8', 'tests/plans/my_experiment.txt')

UPDATE_GOLDEN=1 rewrites the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from praxis_lite.instruments.explain.report import Explained
from praxis_lite.instruments.plan.planning import plan
from praxis_lite.instruments.plan.snapshot import Limits, differences, keep, read, snapshot_of
from praxis_lite.instruments.plan.topology import Topology


def assert_plan_matches(
  task: Explained,
  topology: str | Topology,
  path: str | Path,
  *,
  inputs: Mapping[str, object] | None = None,
  compile: bool = True,
  limits: Limits | None = None,
  cache: Path | None = None,
) -> None:
  """Fails if a train step has become worse than a snapshot of its plan, for example by a new gather or more memory.

  Args:
    task, topology, inputs, compile, cache: see `plan`. 'cpu:8' needs 8 simulated devices but no other compiler.
    path: path of the snapshot; UPDATE_GOLDEN=1 writes it.
    limits: limits to use in place of those in the file.

  Raises:
    AssertionError: the step is worse by more than the limits, and the message names layers and fields; or the
      snapshot is missing.
  """
  path, updates = Path(path), os.environ.get('UPDATE_GOLDEN') == '1'
  if not updates and not path.exists():
    raise AssertionError(f'{path} is missing; UPDATE_GOLDEN=1 writes it')
  new = snapshot_of(plan(task, inputs, topology, compile=compile, cache=cache))
  if updates:
    keep(new, path)
  worse = differences(read(path), new, limits)
  if worse:
    raise AssertionError('\n'.join([f'{path}:', *worse, 'if that is meant, UPDATE_GOLDEN=1 records it']))
