"""`praxis-lite plan`: memory, time and communication of an experiment's train step on chips that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment, experiment_flags
from praxis_lite.errors import UserError


def _run(values: flags.FlagValues) -> int:
  if values.calibrate:
    return _calibrate()
  if values.html == '':
    raise UserError('--html is empty: name a file, as in --html=plan.html')
  if values.html and os.path.isdir(values.html):
    file = os.path.join(values.html, 'plan.html')
    raise UserError(f'--html={values.html} is a directory: name a file, as in --html={file}')
  if not values.topology:
    raise UserError('--topology is missing: name the chips, as in --topology=v5p:4x4x4 or --topology=h100:8x8')

  from praxis_lite.plan import calibrated, calibration_file, format_plan, parse_topology, plan
  from praxis_lite.runtime.distributed import leave_accelerators_alone, simulate_cpu_devices

  topology = calibrated(parse_topology(values.topology), calibration_file())
  if topology.target.kind == 'cpu':
    simulate_cpu_devices(topology.num_devices)
  else:
    leave_accelerators_alone()
    _start_quietly()
  config = configured_experiment(values)
  cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'praxis_lite' / 'plans'
  with _live_line(topology.name) as report:
    found = plan(config, None, topology, compile=values.compile, cache=cache if values.cache else None, report=report)
  print(format_plan(found))
  if values.html:
    from praxis_lite.plan.page import write_plan_page

    print(f'\nwrote {write_plan_page(values.html, found, values.exp or values.job_log_dir)}')
  return 0 if found.fits else 1


def _calibrate() -> int:
  """Measures the devices of this machine, for the plans that follow."""
  from praxis_lite.plan.calibration import calibrate, calibration_file

  file = calibration_file()
  with _live_line('calibrating') as report:
    target = calibrate(file, report=report)
  for name, value in dataclasses.asdict(target.efficiency).items():
    print(f'{name:<22} {value if isinstance(value, str) else f"{value:.3g}"}')
  print(f'plans for {target.name} take these from {file}')
  return 0


def _start_quietly() -> None:
  """Starts JAX. Its plugins look for drivers, and say on stderr, below Python, that there are none."""
  import jax

  sys.stderr.flush()
  kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    jax.devices()
  finally:
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nowhere)


@contextlib.contextmanager
def _live_line(name: str) -> Iterator[Callable[[str], None]]:
  """Shows on stderr, where it is a terminal, what is being done, and for how long."""
  if not sys.stderr.isatty():
    yield lambda stage: None
    return
  stage, start, done = ['configuring'], time.monotonic(), threading.Event()

  def show() -> None:
    while not done.wait(0.5):
      print(f'\r{name}: {stage[0]}, {time.monotonic() - start:.0f} s ', end='', file=sys.stderr, flush=True)

  thread = threading.Thread(target=show, daemon=True)
  thread.start()
  try:
    yield lambda text: stage.__setitem__(0, text)
  finally:
    done.set()
    thread.join()
    print('\r\033[K', end='', file=sys.stderr, flush=True)


def _flags() -> flags.FlagValues:
  values = experiment_flags()
  del values.devices
  chips = 'Chips to plan for: v5p:8x16x16 (torus), v5e:16x16:2 (slices), h100:512x8 (hosts x GPUs), cpu:64.'
  flags.DEFINE_string('topology', None, f'{chips} Example: --topology=h100:8x8', flag_values=values)
  analytic = 'Ask the compiler of the chips; without, formulas are used. Example: --nocompile'
  flags.DEFINE_boolean('compile', True, analytic, flag_values=values)
  measure = 'Measure what programs reach on the devices of this machine, for all later plans. Example: --calibrate'
  flags.DEFINE_boolean('calibrate', False, measure, flag_values=values)
  page = 'Also write a page to look at in a browser: memory, the step in time, the roofline and collectives.'
  flags.DEFINE_string('html', None, f'{page} Example: --html=plan.html', flag_values=values)
  cache = 'Keep compiled programs in ~/.cache/praxis_lite/plans. Example: --nocache'
  flags.DEFINE_boolean('cache', True, cache, flag_values=values)
  return values


COMMAND = Command(
  'plan',
  'say what a train step needs and takes on chips that are not there',
  "compile an experiment's train step with the compiler of other chips, none of which is needed, and print whether it "
  'fits their memory, how long a step takes, what it communicates and in which layer, and what limits it. Exits with 1 '
  'if it does not fit.',
  "praxis-lite plan --exp=lm_sizes.Llama8B --topology=h100:8x8 --set 'task.ici_mesh_shape=(1,16,4)'",
  _flags(),
  _run,
)
