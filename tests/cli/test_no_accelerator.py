"""JAX_PLATFORMS that this machine cannot serve: one line with what was asked, what is there, and what to install."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from praxis_lite.common import devices
from praxis_lite.common.devices import start_devices
from praxis_lite.common.errors import UserError
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.runs.records.record import write_record
from praxis_lite.training.experiment import configure

MISSING = "is not in the list of known backends: ['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose)"
NO_LIBTPU = "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so: libtpu.so: cannot open"
# What JAX_PLATFORMS is, what JAX then raises, whether the machine shows an NVIDIA GPU, and the line.
CASES = {
  'misspelled': (
    'gpuu',
    RuntimeError(f"Unable to initialize backend 'gpuu': Backend 'gpuu' {MISSING}"),
    False,
    "JAX_PLATFORMS=gpuu: JAX has no platform 'gpuu'. Did you mean 'gpu'? It knows cpu, cuda, gpu, rocm, tpu",
  ),
  'one of two misspelled': (
    'cpu,cudaa',
    RuntimeError(f"Unable to initialize backend 'cudaa': Backend 'cudaa' {MISSING}"),
    False,
    "JAX_PLATFORMS=cpu,cudaa: JAX has no platform 'cudaa'. Did you mean 'cuda'? It knows cpu, cuda, gpu, rocm, tpu",
  ),
  'a comma too many': (
    'cpu,',
    RuntimeError(f"Unable to initialize backend '': Backend '' {MISSING}"),
    False,
    'JAX_PLATFORMS=cpu,: it has a comma without a name; set JAX_PLATFORMS=cpu',
  ),
  'no GPU': (
    'cuda',
    AssertionError(),
    False,
    'JAX_PLATFORMS=cuda: this machine has no NVIDIA GPU, only a CPU: leave out JAX_PLATFORMS, or set '
    "JAX_PLATFORMS=cpu; a GPU needs its driver, and pip install 'jax[cuda12]'",
  ),
  'no GPU of any maker': (
    'gpu',
    RuntimeError(f"Unable to initialize backend 'rocm': Backend 'rocm' {MISSING}"),
    False,
    'JAX_PLATFORMS=gpu: this machine has no GPU that JAX can use, only a CPU: leave out JAX_PLATFORMS, or set '
    "JAX_PLATFORMS=cpu; a GPU needs its driver, and pip install 'jax[cuda12]'",
  ),
  'a GPU without its package': (
    'cuda',
    RuntimeError(f"Unable to initialize backend 'cuda': Backend 'cuda' {MISSING}"),
    True,
    "JAX_PLATFORMS=cuda: JAX's package for the GPU of this machine is not installed: pip install 'jax[cuda12]'",
  ),
  'the GPU of one maker': (
    'gpu',
    RuntimeError(f"Unable to initialize backend 'rocm': Backend 'rocm' {MISSING.replace('tpu', 'cuda')}"),
    True,
    'JAX_PLATFORMS=gpu: JAX then wants GPUs of all makers: set JAX_PLATFORMS=cuda for the NVIDIA GPU of this machine',
  ),
  'no TPU': (
    'tpu',
    RuntimeError(NO_LIBTPU),
    False,
    'JAX_PLATFORMS=tpu: libtpu, which JAX needs for TPUs, is not installed: on a machine with a TPU, pip install '
    "'jax[tpu]'; for the CPU, leave out JAX_PLATFORMS, or set JAX_PLATFORMS=cpu",
  ),
  'another plugin': (
    'rocm',
    RuntimeError(f"Unable to initialize backend 'rocm': Backend 'rocm' {MISSING}"),
    False,
    "JAX_PLATFORMS=rocm: JAX's package for rocm is not installed; without it, leave out JAX_PLATFORMS, or set "
    'JAX_PLATFORMS=cpu',
  ),
  'a driver that fails': (
    '',
    RuntimeError("Unable to initialize backend 'cuda': CUDA_ERROR_NO_DEVICE"),
    True,
    "JAX cannot start: Unable to initialize backend 'cuda': CUDA_ERROR_NO_DEVICE; for the CPU, set JAX_PLATFORMS=cpu",
  ),
}


def without_devices(monkeypatch, given, error, sees_nvidia):
  def fail():
    raise error

  monkeypatch.setattr(jax, 'devices', fail)
  monkeypatch.setattr(type(jax.config), 'jax_platforms', given, raising=False)
  monkeypatch.setattr(devices, '_NVIDIA_FILES', ('/',) if sees_nvidia else ())


@pytest.mark.parametrize(('given', 'error', 'sees_nvidia', 'line'), CASES.values(), ids=CASES)
def test_the_line_says_what_is_there_and_what_to_install(monkeypatch, given, error, sees_nvidia, line):
  without_devices(monkeypatch, given, error, sees_nvidia)
  with pytest.raises(UserError) as caught:
    start_devices()
  assert str(caught.value) == line


# Runs commands and calls one after the other: JAX never starts, so each of them meets the same environment.
ALL = """
import sys
from praxis_lite.bridges.hf import import_run
from praxis_lite.cli.main import main
from praxis_lite.common.errors import UserError
from praxis_lite.runs import open_run, run_eval, run_train
from praxis_lite.sharding.mesh import create_device_mesh

RUN, EXP = '--job_log_dir=run', '--exp=lm.SyntheticLmTiny'
for command in (
  ['train', EXP, '--job_log_dir=new'],
  ['eval', RUN],
  ['decode', RUN, '--prompt_ids=1,2'],
  ['replay', RUN, '--step=2'],
  ['export', RUN, '--out=exported'],
  ['export-hf', RUN, '--out=exported'],
  ['plan', '--calibrate'],
  ['sweep', EXP, '--job_log_dir=sweep', '--set=task.train.num_train_steps=1,2'],
):
  print('code', main(command), command[0], file=sys.stderr)
config = open_run('run').config
for call in (
  lambda: run_train(config, 'new'),
  lambda: run_eval(config, 'run'),
  lambda: open_run('run').load(),
  lambda: create_device_mesh((1,), None, ('data',)),
  lambda: import_run('none', 'new'),
):
  try:
    call()
  except UserError as error:
    print(error, file=sys.stderr)
# These use no accelerator, so they work; from here on JAX is told to use the CPU.
for command in (['list'], ['show', RUN], ['check', RUN], ['runs', '.']):
  assert main(command) == 0
assert main(['import-hf', 'none', '--job_log_dir=new']) == 2  # Because of the folder, not of JAX.
"""


@pytest.mark.slow
def test_every_command_and_the_python_api_say_it_in_one_line_and_write_nothing(tmp_path):
  (tmp_path / 'run').mkdir()
  write_record(tmp_path / 'run', configure(SyntheticLmTiny))
  env = os.environ | {'JAX_PLATFORMS': 'gpuu', 'XDG_CACHE_HOME': str(tmp_path / 'cache')}
  done = subprocess.run([sys.executable, '-c', ALL], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr + done.stdout
  line = CASES['misspelled'][3]
  commands = [row.split()[2] for row in done.stderr.splitlines() if row.startswith('code')]
  told = [f'praxis-lite {name}: error: {line}\ncode 2 {name}\n' for name in commands]
  assert len(commands) == 8
  folder = next(row for row in done.stderr.splitlines() if row.startswith('praxis-lite import-hf: error: none is not'))
  assert done.stderr == ''.join(told) + f'{line}\n' * 5 + f'{folder}\n'
  assert done.returncode == 0
  assert sorted(path.name for path in tmp_path.iterdir()) in (['cache', 'run'], ['run'])
