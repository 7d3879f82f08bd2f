"""Whole runs, as a user starts them: training, sampling, an experiment of their own, SIGKILL, other meshes.

What a process is the point of is one; of the rest, a run's commands are given in this one, which has eight devices.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pathlib
import random
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from quick_xla import xla_flags
from warm_python import started

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.cli.main import main
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.partitioned_task import PartitionedTask

ROOT = pathlib.Path(__file__).parent.parent
ON_8_DEVICES = ('--devices=8', '--set=task.ici_mesh_shape=(2, 2, 2)')


@pytest.fixture(scope='module')
def start(shared_programs):
  """Starts `praxis-lite` with these arguments; all share a cache of compiled programs."""

  def start(*arguments, cwd=None):
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    env |= {'JAX_COMPILATION_CACHE_DIR': jax.config.jax_compilation_cache_dir, 'PYTHONUNBUFFERED': '1'}
    env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags()}
    return started(*arguments, cwd=cwd, env=env)

  return start


@pytest.fixture(scope='module')
def run(start):
  """Runs `praxis-lite` with these arguments as a process, to its end, and returns what it prints."""

  def run(*arguments, cwd=None):
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out

  return run


@pytest.fixture(scope='module')
def run_here(shared_programs):
  """The same in this process."""

  def run_here(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      assert main([*map(str, arguments)]) == 0
    return out.getvalue()

  return run_here


def records(directory):
  """The lines of metrics.jsonl: (split, step) -> metrics."""
  lines = map(json.loads, (directory / 'metrics.jsonl').read_text().splitlines())
  return {(line['split'], line['step']): line['metrics'] for line in lines}


# ---------------------------------------------------------------- one device: train, eval, decode


@pytest.fixture(scope='module')
def trained(run, tmp_path_factory):
  """The directory of a run of the tiny model on the standard library, and what was printed."""
  directory = tmp_path_factory.mktemp('stdlib') / 'runs' / '1'
  return directory, run('train', '--exp=lm.StdlibLmTiny', f'--job_log_dir={directory}')


def test_the_tiny_model_learns_and_says_where_the_time_went(trained):
  directory, printed = trained
  first, second, *_ = printed.splitlines()  # No line about attention, whose sequences are short.
  assert first == 'lm: 13,392 parameters on 1 device (cpu)' and second.startswith('first step after ')
  assert 'first step after ' in printed and 'compile ' in printed and 'step 20/20 loss ' in printed
  found = records(directory)
  # Sure of nothing, it begins at ln 256 nats for each byte.
  assert found['train', 1]['loss'] == pytest.approx(np.log(256), abs=0.2)
  assert found['train', 20]['loss'] < found['train', 1]['loss'] - 0.3
  assert found['eval/validation', 20]['nats_per_byte'] == found['eval/validation', 20]['loss']
  assert (directory / 'checkpoints' / '20').is_dir()


LOG = re.compile(r'^```\n(lm: .*?)^```', re.DOTALL | re.MULTILINE)


def test_the_pages_show_what_is_printed(trained):
  """README and the tutorial all lines, the front page some; losses, and phases of the start, are those of today."""
  pages = [(ROOT / page).read_text() for page in ('README.md', 'docs/tutorial.md', 'docs/index.md')]
  readme, tutorial, front = (LOG.search(page)[1].splitlines() for page in pages)
  assert readme == tutorial and {*front} - {'...'} < {*readme}

  def losses(lines):
    found = (re.match(r'(step .*?loss) (\S+)', line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}

  def phases(line):
    parts = (part.rpartition(' ') for part in line.partition(': ')[2].split(', '))
    return {name: float(seconds) for name, _, seconds in parts}

  printed = trained[1].splitlines()
  assert len(readme) == len(printed) and readme[0] == printed[0]
  assert losses(readme) == pytest.approx(losses(printed), rel=0.01) and len(losses(readme)) == 6
  assert 'import' in phases(readme[1])  # The process of this test has made its imports before.
  assert {name for name, seconds in phases(printed[1]).items() if seconds > 0.5} <= phases(readme[1]).keys()
  assert not any(' are few' in line or 'goodput' in line for line in readme)


def test_evaluating_its_checkpoint_gives_what_training_gave(run_here, trained):
  directory, _ = trained
  printed = run_here('eval', '--exp=lm.StdlibLmTiny', f'--job_log_dir={directory}')
  expected = records(directory)['eval/validation', 20]
  assert f'step 20 eval/validation loss {expected["loss"]:#.4g} ' in printed
  assert 'step 10 ' in run_here('eval', '--exp=lm.StdlibLmTiny', f'--job_log_dir={directory}', '--step=10')


@pytest.mark.slow
def test_prompts_are_continued_greedily_the_same_and_sampled_by_seed(run, run_here, trained):
  directory, _ = trained
  decode = ('decode', '--exp=lm.StdlibLmTiny', f'--job_log_dir={directory}', '--max_tokens=12')
  greedy = run(*decode, '--prompt=def ', '--prompt=import os', '--temperature=0')
  assert greedy.startswith('----- sample 1 of 2\ndef ')
  assert '----- sample 2 of 2\nimport os' in greedy
  assert run_here(*decode, '--prompt=def ', '--prompt=import os', '--temperature=0') == greedy
  sampled = run_here(*decode, '--prompt=def ', '--num_samples=3', '--temperature=1', '--seed=1')
  texts = sampled.split('----- sample ')[1:]
  assert len(texts) == 3 and len({text.partition('\n')[2] for text in texts}) == 3
  assert run_here(*decode, '--prompt=def ', '--num_samples=3', '--temperature=1', '--seed=1') == sampled


# ---------------------------------------------------------------- an experiment outside the project

MINE = '''
"""An experiment with a layer and a model of its own."""

import jax.numpy as jnp
import numpy as np

from praxis_lite import registry
from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.inputs import ArrayInput
from praxis_lite.models import BaseModel
from praxis_lite.training.task import SingleTask
from praxis_lite.sharding.weights import WeightHParams
{helper}

class Line(BaseModel):
  dims: int = REQUIRED

  def setup(self):
    self.create_variable('w', WeightHParams((self.dims,), tensor_split_dims_mapping=('data',)))

  def compute_predictions(self, batch):
    return batch['x'] @ self.theta.w

  def compute_loss(self, predictions, batch):
    errors, weights = (predictions - batch['y']) ** 2, batch['weights']
    total = weights.sum()
    return {{'loss': ((errors * weights).sum() / jnp.maximum(total, 1), total)}}, {{'errors': errors}}


@registry.register
class MyExperiment(BaseExperiment):
  'A line.'

  mesh_axis_names = ('data',)
  ici_mesh_shape = (3,)

  def task(self):
    task = Config(SingleTask, model=Config(Line, dims=5))
    task.train.set(num_train_steps=4, log_interval_steps=1)
    return task

  def datasets(self):
    x = np.random.default_rng(0).standard_normal((20, 5)).astype(np.float32)
    return [Config(ArrayInput, name='train', arrays={{'x': x, 'y': x.sum(1)}}, batch_size=4, is_training=True)]
'''


def test_an_experiment_in_a_file_of_ones_own(run, tmp_path):
  (tmp_path / 'mine.py').write_text(MINE.format(helper='from beside import SEED'))
  (tmp_path / 'beside.py').write_text('SEED = 1\n')
  printed = run('train', '--exp=mine.py:MyExperiment', '--job_log_dir=runs/1', '--devices=3', cwd=tmp_path)
  assert 'mesh data 3' in printed and 'step 4/4 loss ' in printed
  assert (tmp_path / 'runs' / '1' / 'checkpoints' / '4').is_dir()


def test_an_experiment_in_a_package_of_ones_own(run, run_here, tmp_path, monkeypatch):
  package = tmp_path / 'my_package'
  package.mkdir()
  (package / '__init__.py').write_text('')
  (package / 'my_module.py').write_text(MINE.format(helper='from my_package.beside import SEED'))
  (package / 'beside.py').write_text('SEED = 1\n')
  exp = '--exp=my_package.my_module.MyExperiment'
  assert 'step 4/4 loss ' in run('train', exp, '--job_log_dir=runs/1', '--devices=3', cwd=tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  shown = run_here('show', exp, '--noconfig')
  assert 'w         5      float32  data   2            +1' in shown


# ---------------------------------------------------------------- SIGKILL, and other meshes


@pytest.fixture(scope='module')
def whole_run(run_here, tmp_path_factory):
  """The directory of a run of the uneven model on 8 devices that nothing interrupts."""
  directory = tmp_path_factory.mktemp('whole')
  run_here(*synthetic(directory, *ON_8_DEVICES))
  return directory


def synthetic(directory, *arguments, steps=20, exp='lm.SyntheticLmTiny'):
  """A run that saves every 5 steps and logs all of them."""
  train = {'num_train_steps': steps, 'log_interval_steps': 1, 'save_interval_steps': 5}
  # The schedule is that of 20 steps also where a run is to stop earlier.
  sets = [f'--set=task.train.{k}={v}' for k, v in train.items()] + [
    '--set=task.train.learner.schedule.total_steps=20',
    '--set=task.train.max_to_keep=10',
    '--set=datasets[1]=None',  # Nothing here is about evaluation.
  ]
  return 'train', f'--exp={exp}', f'--job_log_dir={directory}', *sets, *arguments


@functools.cache
def on_one_device():
  config = configure(registry.get('lm.SyntheticLmTiny'))
  apply_overrides(config.roots(), ['task.ici_mesh_shape=(1, 1, 1)'])
  return PartitionedTask(config.task.instantiate(), config.datasets[0].instantiate().batch_struct())


@functools.cache
def state_arrays(directory, step=20):
  """The train state in a checkpoint, without padding, by path."""
  partitioned = on_one_device()
  reader = Checkpointer(directory, read_only=True)
  state = reader.restore(partitioned.state_shapes, partitioned.unpadded_state_shapes, step=step)
  reader.close()
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


# The experiment whose data stops after 16 batches, so that however late it is killed it has not come to its end.
STUCK = """
import time
from praxis_lite import registry
from praxis_lite.common.config import Config, config_values
from praxis_lite.inputs import SyntheticLMInput

class StuckInput(SyntheticLMInput):
  def read(self, epoch, position, *args):
    while epoch * self.batches_per_epoch() + position // self.batch_size >= 16: time.sleep(1)
    return super().read(epoch, position, *args)

class Stuck(registry.get('lm.SyntheticLmTiny')):
  def datasets(self):
    train, validation = super().datasets()
    return [Config(StuckInput, **config_values(train)), validation]
"""


@pytest.mark.slow
@pytest.mark.parametrize('times', [1, 2])
def test_killed_at_a_random_step_it_resumes_and_ends_with_the_same_bits(times, start, run_here, whole_run, tmp_path):
  (tmp_path / 'stuck.py').write_text(STUCK)
  for kill_at in sorted(random.sample(range(2, 14), times)):
    process = start(*synthetic(tmp_path, *ON_8_DEVICES, exp=f'{tmp_path}/stuck.py:Stuck'))
    for line in process.stdout:
      if line.startswith(f'step {kill_at}/') or line.startswith('step 14/'):
        break
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  printed = run_here(*synthetic(tmp_path, *ON_8_DEVICES))
  assert 'step 20/20 loss ' in printed
  ours, expected = state_arrays(tmp_path), state_arrays(whole_run)
  assert ours.keys() == expected.keys() and len(ours) > 30
  for path, value in expected.items():
    np.testing.assert_array_equal(ours[path], value, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('first', 'then'),
  [((2, 2, 2), (1, 1, 1)), ((1, 1, 1), (2, 2, 2)), ((2, 2, 2), (1, 3, 1))],
  ids=['8to1', '1to8', '8to3'],
)
def test_it_goes_on_on_another_mesh(run_here, whole_run, tmp_path, first, then):
  if first == (2, 2, 2):
    shutil.copytree(whole_run / 'checkpoints' / '10', tmp_path / 'checkpoints' / '10')
  else:
    run_here(*synthetic(tmp_path, steps=10))
  printed = run_here(*synthetic(tmp_path, '--devices=8', f'--set=task.ici_mesh_shape={then}'))
  assert 'restored step 10 of 20' in printed
  losses = [m['loss'] for (split, step), m in sorted(records(tmp_path).items()) if split == 'train' and step > 10]
  expected = [m['loss'] for (split, step), m in sorted(records(whole_run).items()) if split == 'train' and step > 10]
  assert len(losses) == 10
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  ours, theirs = state_arrays(tmp_path), state_arrays(whole_run)
  for path in theirs:
    # Sums over other devices, or on a busy machine, end in other bits: after 10 steps of Adam a few 1e-5 of the scale.
    scale = np.abs(theirs[path]).max()
    np.testing.assert_allclose(ours[path], theirs[path], rtol=0, atol=1e-4 * scale, err_msg=path)
