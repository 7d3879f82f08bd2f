"""Measures training of one model on one GPU: the framework by default and tuned, JAX by hand, and PyTorch.

  python tools/benchmark_gpu.py --torch_python=../torch/bin/python                     all sizes and lengths: hours
  python tools/benchmark_gpu.py --torch_python=... --sizes=1.3B --lengths=2048         one case: some ten minutes
  python tools/benchmark_gpu.py --torch_python=... --dry_run                           a tiny model, on the CPU

PyTorch needs a separate environment: `python -m venv ../torch && ../torch/bin/pip install torch numpy`.

All implementations start from the same weights and see the same tokens. For each, the best batch size and settings are
found first. Then they take turns, in reverse order every other round; each turn is a new process. The implementations
are in `tools/gpu/`. Measurements go to a file, and tables to docs/benchmarks.md. --dry_run writes nothing: it checks
that each implementation works, and that their losses agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.gpu.case import SIZES, TINY, ModelCase, case_of
from tools.gpu.report import Row, results_table, section, write_section
from tools.gpu.turn import Measured, Options, TurnRequest
from tools.timing import measure_in_turn

ROOT = Path(__file__).parent.parent
_LENGTHS = (1024, 2048, 4096, 8192)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_LEAST_TOKENS, _MOST_TOKENS = 8192, 2**18  # In a batch that the search tries.
_STACK = 'model.lm_tpl.transformer_tpl'
_LOSS_RTOL = {'float32': 2e-5, 'bfloat16': 2e-2}


class Implementation(NamedTuple):
  """An implementation to measure.

  Attributes:
    name: its name in the table.
    script: its file in tools/gpu.
    options: settings to try, the most promising first. If none of them fits into memory, `smaller` is tried.
    smaller: settings that need less memory.
    dry: the settings for --dry_run.
  """

  name: str
  script: str
  options: tuple[Options, ...]
  smaller: tuple[Options, ...]
  dry: Options = {}


_FULL: Options = {f'{_STACK}.remat': 'full'}
IMPLEMENTATIONS = (
  Implementation('ours', 'ours.py', ({},), (_FULL,)),
  Implementation(
    'ours, tuned',
    'ours.py',
    (
      {},
      {'model.lm_tpl.softmax_tpl.chunk_size': None},
      {f'{_STACK}.unroll': 1},
      {f'{_STACK}.remat': 'none'},
    ),
    (_FULL,),
  ),
  Implementation(
    'JAX by hand',
    'by_hand.py',
    ({'remat': True, 'unroll': True}, {'remat': True, 'unroll': True, 'loss_parts': 8}, {'remat': True}, {}),
    ({'remat': True, 'loss_parts': 8},),
  ),
  Implementation(
    'PyTorch',
    'torch_side.py',
    (
      {'attention': 'cudnn'},
      {'attention': 'flash'},
      {'attention': 'cudnn', 'compile': 'max-autotune-no-cudagraphs'},
    ),
    ({'attention': 'cudnn', 'remat': True},),
    {'compile': 'aot_eager'},
  ),
)


def main() -> int:
  args = _arguments()
  pythons = {c.name: args.torch_python if c.name == 'PyTorch' else sys.executable for c in args.implementations}
  bench = Benchmark(pythons, Path(args.cache).resolve(), dry=args.dry_run)
  if args.dry_run:
    return dry_run(bench, args.implementations)
  started = datetime.datetime.now(datetime.UTC)
  sampled: list[list[str]] = []
  ceiling = bench.ceiling((4096, 8192, 16384), 'bfloat16')
  peak = _peak(str(ceiling['kind']))
  rows: list[Row] = []
  failed: list[str] = []
  versions: dict[str, str] = {}
  for size in args.sizes:
    for length in args.lengths:
      with sampling(sampled):
        found = bench.case(case_of(size, length), args.implementations, args.rounds, args.groups, args.steps)
      rows += found.rows
      failed += found.failed
      versions |= found.versions
      _save(Path(args.results), rows, failed)
  facts = {
    'measured on': f'{started:%Y-%m-%d %H:%M} UTC, {ceiling["kind"]}',
    'versions': ', '.join(f'{name} {version}' for name, version in sorted(versions.items())),
    'peak of the data sheet': f'{peak / 1e12:.0f} TFLOP/s, dense bfloat16' if peak else 'not known',
    'ceiling': f'{float(str(ceiling["flops_per_s"])) / 1e12:.0f} TFLOP/s, the best of square products in this run',
    **_summarize_samples(sampled),
  }
  text = section(results_table(rows, peak, float(str(ceiling['flops_per_s']))), facts, rows, failed)
  print(text)
  write_section(ROOT / 'docs' / 'benchmarks.md', text)
  return 1 if failed else 0


# ---------------------------------------------------------------- turns


class CaseResults(NamedTuple):
  """The results of a case: a row for each measured implementation, and the errors of the others."""

  rows: list[Row]
  failed: list[str]
  versions: dict[str, str]


class Benchmark:
  """Starts the processes that measure.

  Args:
    pythons: the interpreter of each implementation.
    cache: a directory for compiled programs.
    dry: whether to run on the CPU.
  """

  def __init__(self, pythons: dict[str, str], cache: Path, *, dry: bool):
    self._pythons, self._dry = pythons, dry
    self._environment = os.environ | {
      'PYTHONPATH': str(ROOT),
      'JAX_COMPILATION_CACHE_DIR': str(cache / 'jax'),
      'TORCHINDUCTOR_CACHE_DIR': str(cache / 'torch'),
      'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.94',
      **({'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''} if dry else {}),
    }

  def case(
    self, case: ModelCase, implementations: Sequence[Implementation], rounds: int, groups: int, steps: int
  ) -> CaseResults:
    """Finds the best setting of each implementation; then measures them, taking turns."""
    best: dict[str, Measured] = {}
    failed: list[str] = []
    for implementation in implementations:
      found = self.search(implementation, case)
      if isinstance(found, str):
        failed.append(f'{case.name}, T = {case.length:,}, {implementation.name}: {found}')
      else:
        best[implementation.name] = found
    chosen = [c for c in implementations if c.name in best]
    settings = [best[c.name] for c in chosen]
    trials = [{'batch': setting.batch, 'options': setting.options} for setting in settings]
    requests = [TurnRequest([*case], [trial], groups, steps) for trial in trials]
    turns = measure_in_turn([partial(self._one, c, r) for c, r in zip(chosen, requests)], rounds, warm_up=0)
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for implementation, setting, measured in zip(chosen, settings, turns):
      good = [m for m in measured if not m.error]
      failed += [f'{case.name}, T = {case.length:,}, {implementation.name}: {m.error}' for m in measured if m.error]
      if good:
        seconds = [s for m in good for s in m.step_s]
        first = [m.first_step_s for m in good]
        peak_bytes = max(m.peak_bytes for m in good)
        text = ', '.join(f'{name.rpartition(".")[2]} = {value}' for name, value in setting.options.items())
        rows.append(Row(case, implementation.name, setting.batch, seconds, peak_bytes, first, text))
        versions |= good[0].versions
    return CaseResults(rows, failed, versions)

  def search(self, implementation: Implementation, case: ModelCase) -> Measured | str:
    """Returns the measurements of an implementation's fastest setting, or an error if no setting works."""
    best: Measured | None = None
    error = 'nothing was tried'
    for several in (implementation.options, implementation.smaller):
      for options in several:
        # Only the first options are tried with all batches; later ones with the best batch and the next larger one.
        batches = [b for b in _BATCHES if _LEAST_TOKENS <= b * case.length <= _MOST_TOKENS]
        if best is not None:
          batches = [b for b in batches if best.batch <= b <= 2 * best.batch]
        trials = [{'batch': b, 'options': options} for b in batches]
        for found in self.turn(implementation, TurnRequest([*case], trials, 2, 5, searching=True)):
          error = found.error or error
          if not found.error and (best is None or _speed(found) > _speed(best)):
            best = found
          speed = found.error or f'{_speed(found) * case.length:,.0f} tokens/s'
          print(f'  {implementation.name}, batch {found.batch}, {options}: {speed}', flush=True)
      if best is not None:
        return best
    return error

  def _one(self, implementation: Implementation, request: TurnRequest) -> Measured:
    return self.turn(implementation, request)[0]

  def turn(self, implementation: Implementation, request: TurnRequest) -> list[Measured]:
    """Runs one process of an implementation and returns its measurements. If it fails, the last one has the error."""
    request = request._replace(started_at=time.time())
    command = [self._pythons[implementation.name], str(ROOT / 'tools' / 'gpu' / implementation.script)]
    done = self._run([*command, json.dumps(request._asdict())])
    found = [Measured(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{')]
    if done.returncode:
      last = (done.stderr.strip().splitlines() or [f'it ended with {done.returncode}'])[-1]
      trial = request.trials[min(len(found), len(request.trials) - 1)]
      found.append(Measured(**trial, error=last[:300]))
    return found

  def ceiling(self, sizes: Sequence[int], dtype: str) -> dict[str, object]:
    """Returns what `ceiling.py` prints."""
    done = self._run([sys.executable, str(ROOT / 'tools' / 'gpu' / 'ceiling.py'), json.dumps([sizes, dtype])])
    if done.returncode:
      raise SystemExit(f'the products of the ceiling failed: {done.stderr.strip().splitlines()[-1]}')
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found

  def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=self._environment, check=False, capture_output=True, text=True)


def _speed(found: Measured) -> float:
  return found.batch / statistics.median(found.step_s)


# ---------------------------------------------------------------- the CPU


def dry_run(bench: Benchmark, implementations: Sequence[Implementation]) -> int:
  """Runs each implementation with a tiny model, in float32 and bfloat16. Returns 1 if one fails or losses differ."""
  ceiling = float(str(bench.ceiling((256,), 'float32')['flops_per_s']))
  faults, rows = [], []
  for case in (TINY, TINY._replace(name='tiny, bfloat16', compute='bfloat16', state='bfloat16')):
    first: dict[str, list[float]] = {}
    for implementation in implementations:
      request = TurnRequest([*case], [{'batch': 4, 'options': implementation.dry}], 2, 2)
      found = bench.turn(implementation, request)[0]
      if found.error:
        faults.append(f'{case.name}, {implementation.name}: {found.error}')
        continue
      first[implementation.name] = found.losses
      peak_bytes, start = found.peak_bytes, [found.first_step_s]
      rows.append(Row(case, implementation.name, found.batch, found.step_s, peak_bytes, start))
      print(f'{case.name:>14}  {implementation.name:<12} losses {", ".join(f"{x:.6f}" for x in found.losses)}')
    faults += disagreements(first, _LOSS_RTOL[case.compute], case.name)
  print(f'\n{results_table(rows, None, ceiling)}\n')
  print('\n'.join(faults) or 'every side works, and their losses agree')
  return 1 if faults else 0


def disagreements(losses: dict[str, list[float]], rtol: float, name: str) -> list[str]:
  """Returns a line for each implementation whose losses differ from those of the first one."""
  if not losses:
    return []
  (first, expected), *others = losses.items()
  return [
    f'{name}: the losses of {side}, {found}, are not those of {first}, {expected}'
    for side, found in others
    if any(abs(a - b) > rtol * abs(b) for a, b in zip(found, expected, strict=True))
  ]


# ---------------------------------------------------------------- the device

_QUERY = 'driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu'


@contextmanager
def sampling(samples: list[list[str]], interval_s: float = 2.0) -> Iterator[None]:
  """Adds nvidia-smi's figures for the first GPU to `samples` every few seconds, in the order of `_QUERY`."""
  ended = threading.Event()

  def sample() -> None:
    command = ['nvidia-smi', f'--query-gpu={_QUERY}', '--format=csv,noheader,nounits', '--id=0']
    while not ended.wait(interval_s):
      try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
      except (OSError, subprocess.CalledProcessError):
        return
      samples.append([value.strip() for value in done.stdout.split(',')])

  thread = threading.Thread(target=sample, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def _summarize_samples(samples: Sequence[Sequence[str]]) -> dict[str, str]:
  """Returns facts for the report: the driver, and clocks, power and temperature while the steps ran."""
  if not samples:
    return {'clocks and power': 'not known: nvidia-smi did not answer'}
  columns = dict(zip(_QUERY.split(','), zip(*samples, strict=True)))

  def median(name: str) -> float:
    return statistics.median(float(x) for x in columns[name] if x.replace('.', '', 1).isdigit())

  return {
    'driver': columns['driver_version'][0],
    'clocks': f'{median("clocks.sm"):.0f} MHz in the median, of {median("clocks.max.sm"):.0f}; '
    f'memory {median("clocks.mem"):.0f} MHz',
    'power': f'{median("power.draw"):.0f} W in the median, of {median("power.limit"):.0f}; '
    f'{median("temperature.gpu"):.0f} °C',
  }


def _peak(kind: str) -> float | None:
  from praxis_lite.common.accelerators import bf16_peak_of

  return bf16_peak_of(kind)


def _save(path: Path, rows: Sequence[Row], failed: Sequence[str]) -> None:
  """Writes all measurements so far to a file."""
  found = [row._asdict() | {'case': row.case._asdict()} for row in rows]
  path.write_text(json.dumps({'rows': found, 'failed': list(failed)}, indent=1))


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--torch_python', help='interpreter of the environment with PyTorch; without it, it is left out')
  parser.add_argument('--sizes', default=','.join(SIZES), help=f'of {", ".join(SIZES)}')
  parser.add_argument('--lengths', default=','.join(map(str, _LENGTHS)))
  parser.add_argument('--sides', default=','.join(c.script for c in IMPLEMENTATIONS), help='scripts in tools/gpu')
  parser.add_argument('--rounds', type=int, default=3, help='turns of each side')
  parser.add_argument('--groups', type=int, default=5, help='groups of steps that are timed in a turn')
  parser.add_argument('--steps', type=int, default=10, help='steps of a group')
  parser.add_argument('--cache', default='gpu_benchmark_cache', help='directory of compiled programs')
  parser.add_argument('--results', default='gpu_benchmark.json', help='file of all times')
  parser.add_argument('--dry_run', action='store_true', help='a tiny model on the CPU, to see that all sides work')
  args = parser.parse_args()
  args.sizes = args.sizes.split(',')
  if unknown := [size for size in args.sizes if size not in SIZES]:
    parser.error(f'--sizes: there is no {unknown[0]!r}; there are {", ".join(SIZES)}')
  try:
    args.lengths = [int(length) for length in args.lengths.split(',')]
  except ValueError:
    parser.error(f'--lengths: expected numbers, as in 1024,2048, got {args.lengths!r}')
  scripts = {c.script for c in IMPLEMENTATIONS}
  if unknown := [script for script in args.sides.split(',') if script not in scripts]:
    parser.error(f'--sides: there is no {unknown[0]!r}; there are {", ".join(sorted(scripts))}')
  with_torch = args.torch_python is not None
  if not with_torch:
    print('PyTorch is left out: --torch_python names the interpreter of an environment that has it')
  args.implementations = [
    c for c in IMPLEMENTATIONS if c.script in args.sides.split(',') and (with_torch or c.name != 'PyTorch')
  ]
  return args


if __name__ == '__main__':
  sys.exit(main())
