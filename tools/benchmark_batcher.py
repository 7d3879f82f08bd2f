# ruff: noqa: E402
"""Compares the throughput of a batcher with that of padded batches, on requests of mixed lengths.

  python tools/benchmark_batcher.py
  python tools/benchmark_batcher.py --size=1b --dtype=bfloat16 --device=cuda --rows=32 --requests=256     on a GPU
  python tools/benchmark_batcher.py --system=64     prompts that begin with the same 64 tokens
  python tools/benchmark_batcher.py --system=128 --systems=6 --rows=2 --kept=6     or with 6 beginnings, in turn

A model of random weights continues the same requests greedily, in their order: in batches of `--rows` prompts,
where a batch ends with its longest continuation, and in a batcher with `--rows` rows, with and without shared prefixes.
The contestants take turns. Tokens count only if a request asked for them. A ratio is the median over rounds of the
ratio of two times of the same round.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools')]

import numpy as np
from benchmark_decode import SIZES, to_markdown, write_random_checkpoint
from timing import measure_in_turn, median_ratio


class Asked(NamedTuple):
  """A request: a prompt, and the number of tokens to add to it."""

  prompt: list[int]
  max_tokens: int


class Served(NamedTuple):
  """The seconds that all requests took, in wall-clock and CPU time, and their tokens."""

  seconds: float
  cpu: float
  ids: list[list[int]]


def draw_requests(count: int, prompt: int, tokens: int, system: int, vocab_size: int, systems: int = 1) -> list[Asked]:
  """Returns requests with at most `prompt` and `tokens` tokens; short ones are more frequent than long ones.

  Before that, each prompt has one of `systems` prefixes of `system` tokens, in turn.
  """
  rng = np.random.default_rng(0)
  shared = rng.integers(1, vocab_size, (systems, system)).tolist()

  def length(most: int) -> int:
    return int(np.clip(rng.exponential(most / 3), 1, most))

  def draw(number: int) -> Asked:
    own = rng.integers(1, vocab_size, length(prompt)).tolist()
    return Asked(shared[number % systems] + own, length(tokens))

  return [draw(number) for number in range(count)]


def time_serving(serve: Callable[[], list[list[int]]]) -> Served:
  cpu, start = time.process_time(), time.perf_counter()
  ids = serve()
  return Served(time.perf_counter() - start, time.process_time() - cpu, ids)


def serve_in_batches(model: Any, requests: list[Asked], rows: int) -> list[list[int]]:
  """Continues requests in padded batches."""
  found: list[list[int]] = []
  for first in range(0, len(requests), rows):
    group = requests[first : first + rows]
    most = max(asked.max_tokens for asked in group)
    ids = model.decode([asked.prompt for asked in group], max_tokens=most, temperature=0)
    found += [row[: asked.max_tokens] for row, asked in zip(ids, group, strict=True)]
  return found


def serve_in_rows(batcher: Any, requests: list[Asked]) -> list[list[int]]:
  """Continues requests in a batcher."""
  submitted = [batcher.submit(asked.prompt, max_tokens=asked.max_tokens, temperature=0) for asked in requests]
  batcher.run()
  return [request.ids for request in submitted]


def measure(model: Any, requests: list[Asked], args: argparse.Namespace) -> list[list[str]]:
  """Returns the rows of the table, one for each contestant."""
  most = max(len(asked.prompt) + asked.max_tokens - 1 for asked in requests)
  settings = {'rows': args.rows, 'max_length': most, 'tokens_per_step': args.tokens_per_step}
  batchers = {
    'batcher': model.batcher(**settings, reuse_prefixes=False),
    'batcher, shared prefixes': model.batcher(**settings),
  }
  if args.kept:
    batchers['batcher, kept prefixes'] = model.batcher(**settings, kept_prefixes=args.kept)
  sides = {'padded batches': functools.partial(time_serving, lambda: serve_in_batches(model, requests, args.rows))}
  for name, batcher in batchers.items():
    sides[name] = functools.partial(time_serving, functools.partial(serve_in_rows, batcher, requests))
  found = measure_in_turn(list(sides.values()), args.rounds, warm_up=args.warm_up)
  tokens, rows = sum(asked.max_tokens for asked in requests), []
  for name, served in zip(sides, found, strict=True):
    seconds = statistics.median(x.seconds for x in served)
    ratio = median_ratio([x.seconds for x in found[0]], [x.seconds for x in served])
    of_cpu = median_ratio([x.cpu for x in found[0]], [x.cpu for x in served])
    pairs = [(a, b) for row, other in zip(served[0].ids, found[0][0].ids, strict=True) for a, b in zip(row, other)]
    same = sum(a == b for a, b in pairs) / tokens
    rows.append([name, f'{seconds:.2f}', f'{tokens / seconds:,.0f}', f'{ratio:.2f}', f'{of_cpu:.2f}', f'{same:.0%}'])
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--size', default='demo', choices=list(SIZES))
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--device', default='cpu', choices=['cpu', 'cuda'])
  parser.add_argument('--rows', type=int, default=8, help='requests that are continued at the same time')
  parser.add_argument('--requests', type=int, default=48)
  parser.add_argument('--prompt', type=int, default=64, help='the longest prompt, without what all begin with')
  parser.add_argument('--tokens', type=int, default=160, help='the longest continuation')
  parser.add_argument('--system', type=int, default=0, help='how many tokens all prompts begin with')
  parser.add_argument('--systems', type=int, default=1, help='how many such beginnings there are')
  parser.add_argument('--kept', type=int, default=0, help='`kept_prefixes` of another batcher; 0 for none')
  parser.add_argument('--tokens_per_step', type=int, default=8)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--warm_up', type=int, default=1, help='rounds before that are not counted')
  args = parser.parse_args()
  os.environ['JAX_PLATFORMS'] = args.device
  with tempfile.TemporaryDirectory() as directory:
    import jax

    from praxis_lite import open_run
    from praxis_lite.bridges.hf import import_run

    folder, run = Path(directory) / 'checkpoint', Path(directory) / 'run'
    parameters = write_random_checkpoint(folder, args.size, args.dtype)
    import_run(folder, run, overrides=[f"task.model.fprop_dtype='{args.dtype}'", 'task.model.decoder_tpl.stop_ids=()'])
    vocab_size = SIZES[args.size]['vocab_size']
    requests = draw_requests(args.requests, args.prompt, args.tokens, args.system, vocab_size, args.systems)
    tokens = sum(asked.max_tokens for asked in requests)
    print(f'{args.size}: {parameters:,} parameters, {args.dtype}, on {jax.devices()[0].device_kind}')
    print(
      f'{args.requests} requests of {tokens:,} tokens in {args.rows} rows; medians of {args.rounds} rounds', flush=True
    )
    head = ['side', 'seconds', 'tokens/s', 'speed / padded', 'CPU, speed / padded', 'same tokens']
    print(to_markdown(head, measure(open_run(run).load(), requests, args)))


if __name__ == '__main__':
  main()
