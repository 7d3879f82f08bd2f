"""Measures the time from the SIGKILL of one process of a job to its next step, by part.

    python tools/faults/restart_time.py --processes=8

It trains `lm.SyntheticLmTiny` with `launch` in real processes with emergency copies, kills one of them (not process 0)
in the middle, and reads the times of the lines that follow. It does so twice: with the defaults of `launch`, and with
`--end_within_s=1 --backoff_s=0`, which do not wait until the other processes notice the loss.

On CPUs, only process 0 finds compiled programs in JAX's cache on disk, but on accelerators all processes do. So this
tool compiles programs without optimization.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from praxis_lite.common.jax_internals.flags import add_flags
from tools.faults.processes import host_processes

AT = 40  # The step after which a process is killed.
LIMIT = 600  # Seconds for all of it.
FAST = ('--end_within_s=1', '--backoff_s=0')


def measure(processes: int, flags: tuple[str, ...]) -> dict[str, float]:
  """Returns the seconds of each part, in order; 'in all' is their sum."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, '-m', 'praxis_lite', 'launch', f'--processes={processes}', '--devices=1', *flags, '--']
    command += ['train', '--exp=lm.SyntheticLmTiny', f'--job_log_dir={folder}/run', '--noverify', '--hang_timeout_s=30']
    command += ['--set', f'task.ici_mesh_shape=(1,{processes},1)', '--set', 'task.train.num_train_steps=100000']
    command += ['--set', 'task.train.save_interval_steps=1000', '--set', 'task.train.log_interval_steps=5']
    command += ['--set', 'task.train.emergency_copies.every_n_steps=10']
    env = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': f'{folder}/programs', 'JAX_PLATFORMS': 'cpu'}
    env['XLA_FLAGS'] = add_flags(os.environ.get('XLA_FLAGS', ''), {'xla_backend_optimization_level': 0})
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    times: dict[str, float] = {}
    phases = ''
    assert job.stdout is not None
    limit = threading.Timer(LIMIT, end, [job])  # Then the output ends.
    limit.start()
    lines: list[str] = []
    try:
      for line in job.stdout:
        now = time.monotonic()
        lines.append(line)
        step = re.search(r'step (\d+)/', line)
        if 'killed' not in times:
          if step and int(step[1]) >= AT:
            os.kill(host_processes(job.pid)[processes // 2], signal.SIGKILL)
            times['killed'] = time.monotonic()
          continue
        for name, text in (('all have ended', 'was lost'), ('joined', 'processes, found by'), ('restored', 'restored')):
          if text in line and name not in times:
            times[name] = now
        if 'first step after' in line:
          phases = line.partition(': ')[2].strip()
        if 'restored' in times and step:
          times['next step'] = now
          break
    finally:
      limit.cancel()
      end(job)
      job.wait(60)
  if 'next step' not in times:
    raise SystemExit(
      f'the job has ended, or {LIMIT} s were over, before its next step; its last lines:\n{"".join(lines[-20:])}'
    )
  names = list(times)
  parts = {f'{a} to {b}': times[b] - times[a] for a, b in itertools.pairwise(names)}
  parts['in all'] = times['next step'] - times['killed']
  print(f'{" ".join(flags) or "defaults"}: {phases}; {parts}', flush=True)
  return parts


def end(job: subprocess.Popen[str]) -> None:
  """Sends two signals: after the second one, `launch` gives its processes ten seconds."""
  job.send_signal(signal.SIGTERM)
  job.send_signal(signal.SIGTERM)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--processes', type=int, default=8)
  values = parser.parse_args()
  before, after = measure(values.processes, ()), measure(values.processes, FAST)
  print(f'| part | defaults | {" ".join(FAST)} |\n|---|---|---|')
  for name in before:
    print(f'| {name} | {before[name]:.1f} s | {after.get(name, float("nan")):.1f} s |')


if __name__ == '__main__':
  main()
