# ruff: noqa: E402
"""Compares time to first token and tokens per second with Hugging Face `generate`, static cache and torch.compile.

  python tools/benchmark_decode.py --hf_python=/path/of/a/venv/bin/python
  python tools/benchmark_decode.py --size=1b --dtype=bfloat16 --device=cuda --hf_python=...    on a GPU
  python tools/benchmark_decode.py --run=runs/demo ...    also from `praxis-lite decode` to the first token
  python tools/benchmark_decode.py --beams=4 --batches=1,8    also beam search, compared with 4 samples of each prompt

All implementations read one checkpoint of random weights, continue the same prompts greedily by the same number of
tokens, and take turns. The result is the median of the ratios of all rounds. A time is the duration of one call, from
lists of tokens to lists of tokens, without compiling. `--hf_python` names the interpreter of an environment with torch
and transformers; without it, only our implementation is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools')]

import numpy as np
from timing import measure_in_turn, median_ratio

SIZES: dict[str, dict[str, Any]] = {
  'tiny': {'vocab_size': 64, 'model_dims': 16, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 32},
  'small': {'vocab_size': 512, 'model_dims': 64, 'num_layers': 2, 'num_heads': 4, 'hidden_dims': 128},
  'demo': {'vocab_size': 256, 'model_dims': 128, 'num_layers': 4, 'num_heads': 4, 'hidden_dims': 384},  # lm.StdlibLm
  '124m': {'vocab_size': 32_000, 'model_dims': 768, 'num_layers': 12, 'num_heads': 12, 'hidden_dims': 2048},
  '1b': {'vocab_size': 32_000, 'model_dims': 2048, 'num_layers': 20, 'num_heads': 16, 'hidden_dims': 5632},
}
# Flags of `decode_transformers.py`: the fastest setting of `generate`, and with --eager also its default.
_COMPILED = {'transformers, compiled': ['--cache=static', '--compile']}
_EAGER = {'transformers, eager': ['--cache=dynamic']}


class Call(NamedTuple):
  """The seconds that a call took, in wall-clock and CPU time, and the tokens that it returned."""

  seconds: float
  cpu: float
  ids: list[list[int]]


TimedDecode = Callable[[list[list[int]], int], Call]  # Takes prompts, and the number of tokens to add to each.


def write_random_checkpoint(folder: Path, size: str, dtype: str, **changes: int) -> int:
  """Writes a Llama checkpoint with random weights, whose size has `changes`; returns its number of parameters."""
  import jax

  from praxis_lite.bridges.hf import write_model
  from praxis_lite.models import transformer_lm

  model = transformer_lm(**SIZES[size] | changes).instantiate()
  variables = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(0)))
  write_model(folder, model, variables)
  return sum(x.size for x in jax.tree.leaves(variables))


def start_ours(folder: Path, run: Path, dtype: str) -> TimedDecode:
  """Imports a checkpoint as a run, and returns a function that decodes with it."""
  from praxis_lite import open_run
  from praxis_lite.bridges.hf import import_run

  import_run(folder, run, overrides=[f"task.model.fprop_dtype='{dtype}'", 'task.model.decoder_tpl.stop_ids=()'])
  model = open_run(run).load()

  def decode(prompts: list[list[int]], tokens: int) -> Call:
    cpu, start = time.process_time(), time.perf_counter()
    ids = model.decode(prompts, max_tokens=tokens, temperature=0)
    return Call(time.perf_counter() - start, time.process_time() - cpu, ids)

  return decode


@contextmanager
def start_theirs(python: str, folder: Path, arguments: Sequence[str]) -> Iterator[tuple[str, TimedDecode | None]]:
  """Starts a process of `decode_transformers.py`. Yields its versions, and a function that decodes or None."""
  command = [python, str(ROOT / 'tools' / 'decode_transformers.py'), str(folder), *arguments]
  with open(folder.parent / 'transformers.log', 'a') as log:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
  assert process.stdin is not None and process.stdout is not None
  requests, replies = process.stdin, process.stdout

  def reply() -> dict[str, Any]:
    line = replies.readline()
    if not line:
      sys.exit(f'the process of transformers ended: {Path(log.name).read_text()[-2000:]}')
    answer: dict[str, Any] = json.loads(line)
    return answer

  def decode(prompts: list[list[int]], tokens: int) -> Call:
    print(json.dumps({'prompts': prompts, 'tokens': tokens}), file=requests, flush=True)
    return Call(**reply())

  try:
    about = reply()
    yield about.get('versions') or about['absent'], decode if 'versions' in about else None
  finally:
    requests.close()
    process.wait()


def measure_batch(
  sides: dict[str, TimedDecode], batch: int, args: argparse.Namespace, vocab_size: int
) -> list[list[str]]:
  """Returns the rows of the table for one batch size, one row for each implementation."""
  prompts = np.random.default_rng(0).integers(1, vocab_size, (batch, args.prompt)).tolist()

  def calls(tokens: int) -> list[list[Call]]:
    each = [functools.partial(decode, prompts, tokens) for decode in sides.values()]
    return measure_in_turn(each, args.rounds, warm_up=args.warm_up)

  # First all rounds with one length, then all with the other, because torch compiles again when the length changes.
  wholes, firsts, rows = calls(args.tokens), calls(1), []
  for name, found, first_calls in zip(sides, wholes, firsts):
    first, whole = (statistics.median(call.seconds for call in of) for of in (first_calls, found))
    cpu = statistics.median(call.cpu for call in found)
    ratio = median_ratio([call.seconds for call in found], [call.seconds for call in wholes[0]])
    of_cpu = median_ratio([call.cpu for call in found], [call.cpu for call in wholes[0]])
    pairs = list(zip(found[0].ids, wholes[0][0].ids, strict=True))
    same = sum(a == b for row, other in pairs for a, b in zip(row, other, strict=True)) / (batch * args.tokens)
    speed = f'{1e3 * first:.1f}', f'{batch * args.tokens / whole:,.0f}', f'{ratio:.2f}'
    rows.append([str(batch), name, *speed, f'{cpu:.2f}', f'{of_cpu:.2f}', f'{same:.0%}'])
  return rows


def measure_beams(run: Path, args: argparse.Namespace, vocab_size: int) -> list[list[str]]:
  """Compares the times of beam search and of `args.beams` samples of each prompt; returns a row for each batch size."""
  from praxis_lite import open_run

  model, rows = open_run(run).load(), []

  def call(prompts: list[list[int]], **settings: Any) -> Call:
    cpu, start = time.process_time(), time.perf_counter()
    ids = model.decode(prompts, max_tokens=args.tokens, **settings)
    return Call(time.perf_counter() - start, time.process_time() - cpu, ids)

  for batch in map(int, filter(None, args.batches.split(','))):
    prompts = np.random.default_rng(0).integers(1, vocab_size, (batch, args.prompt)).tolist()
    copies = [prompt for prompt in prompts for _ in range(args.beams)]
    sides = [functools.partial(call, copies, temperature=1.0), functools.partial(call, prompts, beam_size=args.beams)]
    sampled, searched = measure_in_turn(sides, args.rounds, warm_up=args.warm_up)
    medians = [f'{1e3 * statistics.median(x.seconds for x in side):.0f}' for side in (sampled, searched)]
    ratio = median_ratio([x.seconds for x in searched], [x.seconds for x in sampled])
    of_cpu = median_ratio([x.cpu for x in searched], [x.cpu for x in sampled])
    rows.append([str(batch), *medians, f'{ratio:.2f}', f'{of_cpu:.2f}'])
  return rows


def seconds_of_commands(run: str, prompt_lengths: Sequence[int]) -> list[list[str]]:
  """Times `praxis-lite decode --max_tokens=1` in new processes. Only the first one has no compiled programs."""
  rows: list[list[str]] = []
  with tempfile.TemporaryDirectory() as cache:
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_COMPILATION_CACHE_DIR': cache}
    for length in (prompt_lengths[0], *prompt_lengths):
      ids = f'--prompt_ids={",".join(["97"] * length)}'
      decode = [sys.executable, '-m', 'praxis_lite', 'decode', f'--job_log_dir={run}', ids, '--max_tokens=1']
      before, start = os.times(), time.perf_counter()
      subprocess.run(decode, env=environment, check=True, stdout=subprocess.DEVNULL)
      seconds, after = time.perf_counter() - start, os.times()
      cpu = sum(after[2:4]) - sum(before[2:4])  # User and system time of child processes that have ended.
      rows.append([str(length), 'warm' if rows else 'cold', f'{seconds:.1f}', f'{cpu:.1f}'])
  return rows


def to_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ['---'] * len(head), *rows]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--hf_python', help='interpreter of an environment with torch and transformers')
  # Threads of torch wait for each other in busy loops: with few rows, or on a busy machine, one thread is fastest.
  threads = ','.join(map(str, sorted({1, os.cpu_count() or 1})))
  parser.add_argument('--hf_threads', default=threads, help='numbers of threads of the other side on a CPU')
  parser.add_argument('--size', default='demo', choices=list(SIZES))
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--device', default='cpu', choices=['cpu', 'cuda'])
  parser.add_argument('--batches', default='1,8,64', help='rows at once; empty: none, as with --run alone')
  parser.add_argument('--prompt', type=int, default=16, help='tokens of each prompt')
  parser.add_argument('--tokens', type=int, default=200, help='tokens after each prompt')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--warm_up', type=int, default=3, help='rounds before that are not counted')
  parser.add_argument('--eager', action='store_true', help='also what `generate` does without a static cache: slow')
  parser.add_argument('--beams', type=int, help='also measures beam search with this number of beams')
  parser.add_argument('--run', help='directory of a run, such as runs/demo: times the command up to the first token')
  args = parser.parse_args()
  os.environ['JAX_PLATFORMS'] = args.device
  with tempfile.TemporaryDirectory() as directory:
    import jax

    folder = Path(directory) / 'checkpoint'
    parameters = write_random_checkpoint(folder, args.size, args.dtype)
    where = jax.devices()[0].device_kind
    print(f'{args.size}: {parameters:,} parameters, {args.dtype}, prompts of {args.prompt} tokens, {args.tokens} after')
    print(f'jax {jax.__version__} on {where}, {os.cpu_count()} CPU cores; medians of {args.rounds} rounds', flush=True)
    rows: list[list[str]] = []
    for batch in map(int, filter(None, args.batches.split(','))):
      # Each batch size gets new processes, because torch compiles differently after it has seen other sizes.
      with contestants(args, folder, Path(directory) / f'run{batch}') as sides:
        rows += measure_batch(sides, batch, args, SIZES[args.size]['vocab_size'])
    head = ['batch', 'side', 'first token, ms', 'tokens/s', 'time / ours', 'CPU s', 'CPU / ours', 'same tokens']
    if rows:
      print(to_markdown(head, rows), flush=True)
    if args.beams:
      run = Path(directory) / 'beams'
      start_ours(folder, run, args.dtype)
      print(f'\nBeam search with {args.beams} beams, and {args.beams} samples of each prompt:\n')
      head = ['prompts', 'samples, ms', 'beams, ms', 'beams / samples', 'CPU, beams / samples']
      print(to_markdown(head, measure_beams(run, args, SIZES[args.size]['vocab_size'])), flush=True)
  if args.run:
    print('\nFrom the command to the first token:\n')
    head = ['prompt, tokens', 'compile cache', 'seconds', 'CPU s']
    print(to_markdown(head, seconds_of_commands(args.run, [5, 20, 60, 120, 200])))


@contextmanager
def contestants(args: argparse.Namespace, folder: Path, run: Path) -> Iterator[dict[str, TimedDecode]]:
  """Yields the implementations that can run here, by name."""
  with ExitStack() as stack:
    sides: dict[str, TimedDecode] = {'praxis_lite': start_ours(folder, run, args.dtype)}
    others = _COMPILED
    if args.device == 'cpu':
      threads = [int(n) for n in args.hf_threads.split(',')]
      others = {f'{name}, threads: {n}': [*told, f'--threads={n}'] for name, told in others.items() for n in threads}
    for name, arguments in (others | (_EAGER if args.eager else {})).items():
      if args.hf_python is None:
        continue
      told = [*arguments, f'--device={args.device}', f'--dtype={args.dtype}']
      about, decode = stack.enter_context(start_theirs(args.hf_python, folder, told))
      print(f'{name}: {about}', file=sys.stderr, flush=True)
      if decode is not None:
        sides[name] = decode
    if len(sides) == 1:
      print(
        'only praxis_lite is measured; --hf_python names an environment with torch and transformers',
        flush=True,
      )
    yield sides


if __name__ == '__main__':
  main()
