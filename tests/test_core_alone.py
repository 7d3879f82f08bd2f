"""The core stands alone: an experiment trains, evaluates, decodes, resumes and is exported without the wings around it,
and without TensorFlow.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
REMOVED = ('bridges', 'instruments/plan', 'instruments/verification', 'partitioning', 'runs/cluster')

CODE = """
import sys

sys.modules['tensorflow'] = None  # As if it were not installed.
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
run('checkpoints', 'list', 'run')
small = ('task.model.num_layers=1', 'datasets[*].batch_size=1', 'datasets[*].path.max_bytes=100000')
small = (*map('--set={}'.format, small), '--set=task.evaluate.max_batches=2')
run('train', '--exp=lm.StdlibLm', steps(2), *small, '--job_log_dir=demo')
run('export', '--job_log_dir=run', '--out=forward', '--format=stablehlo')
run('export', '--job_log_dir=run', '--out=decode', '--what=decode', '--format=stablehlo')

def fails(*arguments):
  assert main(arguments) == 2, arguments

fails('train', '--job_log_dir=run', steps(8), '--set=task.train.mirror=file:///tmp/copy')
fails('train', '--job_log_dir=run', steps(8), '--grace_s=10')
fails('train', '--job_log_dir=run', steps(8), '--coordinator_address=localhost:1')
fails('launch', '--processes=2', '--', 'train', '--job_log_dir=run')
fails('plan', '--exp=lm.StdlibLmTiny', '--topology=h100:8')
fails('export', '--job_log_dir=demo', '--out=both')
data = '--set=datasets[0]{}'.format
records = data('=praxis_lite.inputs.TFRecordInput'), data('.file_pattern=run/run.json')
rows = data('.parse_fn=praxis_lite.inputs.ByteTokenizer'), data('.batch_size=2'), data('.is_training=True')
fails('train', '--exp=lm.StdlibLmTiny', '--job_log_dir=records', *records, *rows)
images = data('=praxis_lite.inputs.ImageRecordInput'), *records[1:], *rows[1:], data('.image_size=(8,8)')
fails('train', '--exp=vision.DigitsVit', '--job_log_dir=images', *images)
sys.path.insert(0, 'forward')
from load import load_for_tensorflow
try:
  load_for_tensorflow('forward')
except ImportError as error:
  print('LOAD', error)
print('REMOVED', [name for name in sys.modules if name.startswith({removed})])
"""


@pytest.mark.slow
def test_an_experiment_runs_without_the_wings_around_the_core_and_tensorflow(tmp_path):
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
  absent = 'TensorFlow is not installed; pip install tensorflow-cpu, or '
  assert errors[5].startswith(f'format saved_model: {absent}export only StableHLO')
  assert all(error.endswith(f'{absent}use another input') for error in errors[6:8]) and len(errors) == 8
  assert 'LOAD a SavedModel needs TensorFlow, which is not installed; pip install tensorflow-cpu' in done.stdout
  assert not (tmp_path / 'both').exists()
  assert errors[2:5] == [
    'train needs praxis_lite.runs.cluster, which is not installed',
    'launch needs praxis_lite.runs.cluster, which is not installed',
    'plan needs praxis_lite.instruments.plan, which is not installed',
  ]
