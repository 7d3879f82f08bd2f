"""The benchmark of the start of imported models."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from praxis_lite.bridges.hf import import_run

TOOLS = Path(__file__).parents[2] / 'tools'


@pytest.mark.slow
def test_training_and_decoding_of_an_import_are_timed(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'path', list(sys.path))
  tool = runpy.run_path(str(TOOLS / 'benchmark_startup.py'))
  parameters = [tool['write_random_checkpoint'](tmp_path / str(n), 'tiny', 'float32', num_layers=n) for n in (1, 3)]
  assert parameters[1] - parameters[0] == 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16)
  import_run(tmp_path / '1', tmp_path / 'run')
  times = [*tool['times_of_training'](tmp_path / 'run', 16), *tool['times_of_decoding'](tmp_path / 'run')]
  assert len(times) == 6 and all(time > 0 for time in (times[0], times[1], times[3]))
