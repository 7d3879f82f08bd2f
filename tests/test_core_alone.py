"""The core stands alone: an experiment trains, evaluates, decodes and resumes without the wings around it."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
REMOVED = ('bridges', 'instruments/plan', 'instruments/verification', 'partitioning', 'runs/cluster')

CODE = """
import sys
from praxis_lite.cli.main import main

def run(*arguments):
  code = main(arguments)
  assert code == 0, (arguments, code)

steps = '--set=task.train.num_train_steps={}'.format
mesh = ("--set=task.mesh_axis_names=('data',)", '--set=task.ici_mesh_shape=(4,)')
run('train', '--exp=lm.StdlibLmTiny', '--devices=4', *mesh, steps(4), '--job_log_dir=run')
run('eval', '--job_log_dir=run')
run('decode', '--job_log_dir=run', '--prompt=def ', '--max_tokens=4')
run('train', '--job_log_dir=run', '--devices=4', steps(6))
run('show', '--job_log_dir=run')

def fails(*arguments):
  assert main(arguments) == 2, arguments

fails('train', '--job_log_dir=run', steps(8), '--set=task.train.mirror=file:///tmp/copy')
fails('train', '--job_log_dir=run', steps(8), '--grace_s=10')
fails('train', '--job_log_dir=run', steps(8), '--coordinator_address=localhost:1')
fails('launch', '--processes=2', '--', 'train', '--job_log_dir=run')
fails('plan', '--exp=lm.StdlibLmTiny', '--topology=h100:8')
print('REMOVED', [name for name in sys.modules if name.startswith({removed})])
"""


def test_an_experiment_runs_without_the_wings_around_the_core(tmp_path):
  def without_caches(folder, names):
    return [name for name in names if name == '__pycache__']

  for folder in ('praxis_lite', 'experiments', 'tasks'):
    shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=without_caches)
  for folder in REMOVED:
    shutil.rmtree(tmp_path / 'praxis_lite' / folder)
  removed = tuple(f'praxis_lite.{folder.replace("/", ".")}' for folder in REMOVED)
  env = os.environ | {'PYTHONPATH': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-c', CODE.replace('{removed}', repr(removed))]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'REMOVED []' in done.stdout
  assert 'step 6 of 6: saved in' in done.stdout
  errors = [line.partition(': error: ')[2] for line in done.stderr.splitlines() if ': error: ' in line]
  assert errors[:2] == [
    "task.train.mirror = 'file:///tmp/copy' needs praxis_lite.runs.cluster, which is not installed",
    'grace_s = 10.0 needs praxis_lite.runs.cluster, which is not installed',
  ]
  assert errors[2:] == [
    'train needs praxis_lite.runs.cluster, which is not installed',
    'launch needs praxis_lite.runs.cluster, which is not installed',
    'plan needs praxis_lite.instruments.plan, which is not installed',
  ]
