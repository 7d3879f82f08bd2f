"""The benchmark of the batcher: both sides get the same requests, and only tokens that were asked for count."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).parents[2] / 'tools' / 'benchmark_batcher.py'))


class Model:
  """Continues each prompt by its first token, and remembers what it was asked for."""

  def __init__(self):
    self.batches, self.submitted = [], []

  def decode(self, prompts, max_tokens, temperature):
    self.batches.append((len(prompts), max_tokens))
    return [[prompt[0]] * max_tokens for prompt in prompts]

  def batcher(self, **settings):
    return self

  def submit(self, prompt, max_tokens, temperature):
    self.submitted.append((tuple(prompt), max_tokens))
    return argparse.Namespace(ids=[prompt[0]] * max_tokens)

  def run(self):
    pass


def test_both_sides_continue_the_same_requests():
  requests = TOOL['draw_requests'](7, prompt=20, tokens=30, system=5, vocab_size=64)
  assert len({asked.max_tokens for asked in requests}) > 3 and len({tuple(asked.prompt[:5]) for asked in requests}) == 1
  assert all(1 <= asked.max_tokens <= 30 and 6 <= len(asked.prompt) <= 25 for asked in requests)
  model, args = Model(), argparse.Namespace(rows=3, tokens_per_step=8, rounds=2, warm_up=0, kept=2)
  table = TOOL['measure'](model, requests, args)
  batchers = ['batcher', 'batcher, shared prefixes', 'batcher, kept prefixes']
  assert [row[0] for row in table] == ['padded batches', *batchers]
  assert table[0][3] == '1.00' and {row[-1] for row in table} == {'100%'}
  expected = [(tuple(asked.prompt), asked.max_tokens) for asked in requests]
  assert model.submitted == expected * 6
  systems = TOOL['draw_requests'](6, prompt=20, tokens=30, system=5, vocab_size=64, systems=3)
  assert [tuple(asked.prompt[:5]) for asked in systems[:3]] == [tuple(asked.prompt[:5]) for asked in systems[3:]]
  assert len({tuple(asked.prompt[:5]) for asked in systems}) == 3
  longest = [max(asked.max_tokens for asked in requests[first : first + 3]) for first in (0, 3, 6)]
  assert model.batches == [(3, longest[0]), (3, longest[1]), (1, longest[2])] * 2
