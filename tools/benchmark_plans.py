"""Compares plans with measurements: writes the plans of many steps to a file, and later measures the same steps.

  python tools/benchmark_plans.py --seal=plans.json --chip=h100     anywhere; needs the compiler, praxis_lite[plan]
  python tools/benchmark_plans.py --measure=plans.json              on a machine with one such chip
  python tools/benchmark_plans.py --measure=plans.json --cases='124M|decoding'

--seal writes the predicted memory and time of each step, and prints the hash of the file. If the hash is published, it
proves later that the predictions were not changed after the measurement. --measure writes its measurements to a second
file, and prints a table. It compiles all steps first, several at a time, and then runs them one by one. The steps are
in `tools/gpu/plan_cases.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.accelerators import accelerator_of
from praxis_lite.common.errors import first_line
from praxis_lite.training import PartitionedTask
from praxis_lite.training.partitioned_step import PartitionedStep
from tools.gpu.jax_side import set_up, step_bytes
from tools.gpu.plan_cases import DECODING, TRAINING, DecodeCase, TrainCase

_GIB = 2**30
_WARM_UP, _STEPS, _GROUPS = 3, 4, 3


# ---------------------------------------------------------------- before


class Sealed(NamedTuple):
  """The predictions of a plan.

  Attributes:
    bytes: memory on the device.
    seconds: time of a train step, or of a call that decodes.
    first_seconds: for decoding, time to the first token; otherwise 0.
    least_seconds: for decoding, time of a token if only the chip's bandwidth limits it; otherwise 0.
    model_flops: for training, operations that the model requires, by 6 N + 12 L D T.
    causal_flops: like `model_flops`, by 6 N + 6 L D T.
    refused: why the compiler refused the step; '' if it did not.
  """

  bytes: int
  seconds: float
  first_seconds: float = 0.0
  least_seconds: float = 0.0
  model_flops: float = 0.0
  causal_flops: float = 0.0
  refused: str = ''


def seal(file: Path, chip: str, cases: Mapping[str, TrainCase | DecodeCase]) -> None:
  """Writes the plans of the cases to a file."""
  found = {}
  for name, case in cases.items():
    found[name] = predict_step(case, chip)
    print(f'{name:<40} {found[name].bytes / _GIB:7.2f} GiB {1e3 * found[name].seconds:9.1f} ms', flush=True)
    if found[name].refused:
      print(f'  by formulas: {found[name].refused}')
    content = {'chip': chip, 'jax': jax.__version__, 'plans': {name: plan._asdict() for name, plan in found.items()}}
    file.write_text(json.dumps(content, indent=1) + '\n')
  print(f'{file}: sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}')


def predict_step(case: TrainCase | DecodeCase, chip: str) -> Sealed:
  from praxis_lite.instruments.plan import plan
  from praxis_lite.instruments.plan.inference import plan_inference

  if isinstance(case, DecodeCase):
    decoding = plan_inference(case.task(), f'{chip}:1', case.requests)
    first, least = decoding.first_token_seconds, decoding.least_token_seconds
    return Sealed(decoding.memory.peak, decoding.cost.seconds, first, least, refused=decoding.failure)
  step = plan(case.task(), case.inputs(), f'{chip}:1')
  return Sealed(
    step.memory.peak,
    step.step_seconds,
    model_flops=step.work.flops,
    causal_flops=step.work.causal_flops,
    refused=step.failure,
  )


# ---------------------------------------------------------------- on the chip


class MeasuredStep(NamedTuple):
  """The measurements of a step.

  Attributes:
    bytes: memory of the compiled step, by the compiler on the machine with the chip.
    most_bytes: the largest memory that the process has used so far.
    step_s: seconds of a step or a call, for each group of steps.
    first_s: for decoding, seconds of calls that draw one token.
    compile_s: seconds of tracing and compiling, while other steps compile too.
    error: why the step could not be measured; '' if it could.
  """

  bytes: int = 0
  most_bytes: int = 0
  step_s: list[float] = []
  first_s: list[float] = []
  compile_s: float = 0.0
  error: str = ''


@dataclasses.dataclass
class Prepared:
  """A step that is compiled and has no arrays yet."""

  task: PartitionedTask
  step: PartitionedStep
  compile_s: float


def measure_steps(file: Path, results: Path, cases: Mapping[str, TrainCase | DecodeCase], threads: int) -> None:
  """Measures the cases in the order of their predicted memory, and writes all results so far after each."""
  sealed = json.loads(file.read_text())
  here = jax.devices()[0].device_kind
  known = accelerator_of(here)
  if known is None or known.name != sealed['chip']:
    raise SystemExit(f'{file} has plans for {sealed["chip"]}, and this machine has {here}')
  if jax.__version__ != sealed['jax']:
    print(f'the plans were made with JAX {sealed["jax"]}, and this is {jax.__version__}')
  plans = {name: Sealed(**plan) for name, plan in sealed['plans'].items()}
  ordered = sorted((name for name in cases if name in plans), key=lambda name: plans[name].bytes)
  found: dict[str, MeasuredStep] = {}
  with ThreadPoolExecutor(threads) as pool:
    futures = {}
    for name in ordered:
      case = cases[name]
      futures[name] = pool.submit(prepare_step, case)
      if isinstance(case, DecodeCase):
        futures[_first(name)] = pool.submit(prepare_step, case._replace(requests=case.requests._replace(max_tokens=1)))
  for name in ordered:
    try:
      found[name] = _measure_one(cases[name], *[futures.pop(key).result() for key in _keys(name, cases[name])])
    except Exception as error:  # The other steps can still be measured.
      found[name] = MeasuredStep(error=f'{type(error).__name__}: {first_line(error)[:300]}')
    row = found[name]
    times = f'{1e3 * statistics.median(row.step_s):9.1f} ms' if row.step_s else row.error
    print(f'{name:<40} {row.bytes / _GIB:7.2f} GiB {times}', flush=True)
    content = {
      'device': jax.devices()[0].device_kind,
      'jax': jax.__version__,
      'sealed': hashlib.sha256(file.read_bytes()).hexdigest(),
      'measured': {name: row._asdict() for name, row in found.items()},
    }
    results.write_text(json.dumps(content, indent=1) + '\n')
  print('\n'.join(table(plans, found)))


def _first(name: str) -> str:
  return f'{name}, one token'


def _keys(name: str, case: TrainCase | DecodeCase) -> list[str]:
  return [name, _first(name)] if isinstance(case, DecodeCase) else [name]


def prepare_step(case: TrainCase | DecodeCase) -> Prepared:
  start = time.perf_counter()
  task = PartitionedTask(case.task().instantiate(), case.inputs())
  step: Any = task.decode_step if isinstance(case, DecodeCase) else task.train_step
  assert step.compiled is not None  # Compiles.
  return Prepared(task, step, time.perf_counter() - start)


def _measure_one(case: TrainCase | DecodeCase, prepared: Prepared, one_token: Prepared | None = None) -> MeasuredStep:
  call = _decoding(case, prepared) if isinstance(case, DecodeCase) else _training(case, prepared)
  seconds = list(_times(call))
  first = list(_times(_decoding(case, one_token))) if one_token and isinstance(case, DecodeCase) else []
  stats = jax.devices()[0].memory_stats() or {}
  most = int(stats.get('peak_bytes_in_use', 0))
  return MeasuredStep(step_bytes(prepared.step.compiled), most, seconds, first, prepared.compile_s)


def _times(call: Callable[[], Any]) -> Iterator[float]:
  for _ in range(_WARM_UP):
    out = call()
  jax.block_until_ready(out)
  for _ in range(_GROUPS):
    start = time.perf_counter()
    for _ in range(_STEPS):
      out = call()
    jax.block_until_ready(out)
    yield (time.perf_counter() - start) / _STEPS


def _training(case: TrainCase, prepared: Prepared) -> Callable[[], Any]:
  rng = np.random.default_rng(0)
  ids = rng.integers(0, case.model.vocab, (case.rows, case.model.length + 1), dtype=np.int32)
  weights = np.ones((case.rows, case.model.length), np.float32)
  batch = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}
  state, key = prepared.task.init_state(jax.random.key(0)), jax.random.key(1)

  def call() -> Any:
    nonlocal state
    out = prepared.step(state, key, batch)
    state = out.state
    return out.weighted_loss

  return call


def _decoding(case: DecodeCase, prepared: Prepared) -> Callable[[], Any]:
  variables = prepared.task.init_state(jax.random.key(0)).mdl_vars
  rows, length, _ = case.requests
  ids = np.random.default_rng(0).integers(1, 1000, (rows, length), dtype=np.int32)
  inputs = {'ids': ids, 'prompt_lengths': np.full((rows,), length, np.int32)}
  return lambda: prepared.step(variables, jax.random.key(0), jnp.int32(0), inputs).decoded


# ---------------------------------------------------------------- the table


def table(plans: Mapping[str, Sealed], found: Mapping[str, MeasuredStep]) -> Iterator[str]:
  """Yields the lines of a table in Markdown: predicted and measured memory and time, and the errors of the plans."""
  yield '| step | predicted GiB | measured GiB | error | predicted ms | measured ms | error |'
  yield '|---|---:|---:|---:|---:|---:|---:|'
  for name, row in found.items():
    plan = plans[name]
    if row.error:
      yield f'| {name} | {plan.bytes / _GIB:.2f} | | | {1e3 * plan.seconds:.1f} | {row.error} | |'
      continue
    yield _line(name, plan.bytes, row.bytes, plan.seconds, statistics.median(row.step_s))
    if row.first_s:
      first = statistics.median(row.first_s)
      yield _line(f'{name}, first token', 0, 0, plan.first_seconds, first)


def _line(name: str, bytes_planned: int, bytes_found: int, planned_s: float, found_s: float) -> str:
  memory = '| |'
  if bytes_found:
    memory = f'{bytes_planned / _GIB:.2f} | {bytes_found / _GIB:.2f} | {bytes_planned / bytes_found - 1:+.1%}'
  return f'| {name} | {memory} | {1e3 * planned_s:.1f} | {1e3 * found_s:.1f} | {planned_s / found_s - 1:+.1%} |'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--seal', type=Path, help='file for the plans')
  parser.add_argument('--chip', default='h100', help='the chip that is planned for')
  parser.add_argument('--measure', type=Path, help='file with the plans of the steps to measure')
  parser.add_argument('--results', type=Path, default=Path('measured.json'), help='file for what is measured')
  parser.add_argument('--cases', default='', help='regular expression: only the steps with a match in their names')
  parser.add_argument('--threads', type=int, default=8, help='steps that are compiled at a time')
  args = parser.parse_args()
  if (args.seal is None) == (args.measure is None):
    parser.error('give --seal or --measure')
  cases = {name: case for name, case in (TRAINING | DECODING).items() if re.search(args.cases, name)}
  if not cases:
    parser.error(f'--cases: no step matches {args.cases!r}; steps are {", ".join(TRAINING | DECODING)}')
  set_up()
  if args.seal is not None:
    seal(args.seal, args.chip, cases)
  else:
    measure_steps(args.measure, args.results, cases, args.threads)


if __name__ == '__main__':
  main()
