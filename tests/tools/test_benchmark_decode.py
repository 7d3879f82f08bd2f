"""The benchmark of decoding: its table, and an environment without torch."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / 'tools' / 'benchmark_decode.py'))


def test_ratios_are_of_the_same_prompts_in_the_same_round():
  asked = []

  def side(seconds, token):
    def decode(prompts, tokens):
      asked.append((len(prompts), tokens))
      return TOOL['Call'](
        seconds * tokens, 0.5, [[token] * (tokens // 2) + [7] * (tokens - tokens // 2)] * len(prompts)
      )

    return decode

  args = argparse.Namespace(prompt=5, tokens=10, rounds=3, warm_up=1)
  rows = TOOL['measure_batch']({'ours': side(0.01, 7), 'theirs': side(0.04, 8)}, 2, args, 64)
  assert rows == [
    ['2', 'ours', '10.0', '200', '1.00', '0.50', '1.00', '100%'],
    ['2', 'theirs', '40.0', '50', '4.00', '0.50', '1.00', '50%'],
  ]
  assert set(asked) == {(2, 1), (2, 10)} and len(asked) == 2 * 2 * (3 + 1)


@pytest.mark.skipif(importlib.util.find_spec('torch') is not None, reason='there is torch in this environment')
def test_an_environment_without_torch_says_so(tmp_path):
  with TOOL['start_theirs'](sys.executable, tmp_path / 'checkpoint', []) as (about, decode):
    assert decode is None and 'torch' in about


def test_beams_are_compared_with_as_many_samples_of_the_same_prompts(monkeypatch):
  asked = []

  class Model:
    def load(self):
      return self

    def decode(self, prompts, max_tokens, **settings):
      asked.append((len(prompts), len({tuple(prompt) for prompt in prompts}), max_tokens, *settings.items()))
      return prompts

  monkeypatch.setattr('praxis_lite.open_run', lambda run: Model())
  args = argparse.Namespace(prompt=5, tokens=10, rounds=2, warm_up=0, beams=4, batches='1,3')
  rows = TOOL['measure_beams'](Path('run'), args, 64)
  assert [row[0] for row in rows] == ['1', '3'] and all(len(row) == 5 for row in rows)
  assert set(asked) == {(4 * n, n, 10, ('temperature', 1.0)) for n in (1, 3)} | {
    (n, n, 10, ('beam_size', 4)) for n in (1, 3)
  }
