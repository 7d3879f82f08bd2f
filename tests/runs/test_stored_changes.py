"""Checkpoints that leave out what another run's checkpoint has: they are small, and read like whole ones."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from praxis_lite.bridges.hf import export_run
from praxis_lite.bridges.hf.files import read_folder
from praxis_lite.checkpoints.stored import checkpoints_at
from praxis_lite.checkpoints.streamed import stored_arrays
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import leaves, path_name
from praxis_lite.experiments.lm import SyntheticLmTiny, SyntheticLoraTiny
from praxis_lite.runs import open_run, run_train
from praxis_lite.training.experiment import configure

pytestmark = pytest.mark.usefixtures('shared_programs')


def base_config(steps=1, seed=0):
  config = configure(SyntheticLmTiny)
  config.task.train.set(num_train_steps=steps, save_interval_steps=1, eval_interval_steps=None)
  config.datasets = [data.clone(seed=seed) if data.is_training else data for data in config.datasets[:1]]
  return config


def tuned_config(base, steps, changes_only=True, mesh=(1, 1, 1)):
  config = configure(SyntheticLoraTiny)
  config.task.train.set(num_train_steps=steps, save_interval_steps=2, eval_interval_steps=None)
  config.task.train.learner.schedule.set(warmup_steps=1, total_steps=8)
  config.task.train.init_from.set(path=str(base), store_changes_only=changes_only)
  config.task.set(ici_mesh_shape=mesh)
  config.datasets = config.datasets[:1]
  return config


def variables_of(directory):
  return leaves(open_run(directory).load().variables)


def assert_equal(found, expected):
  assert found.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_array_equal(found[path], value, err_msg=path_name(path))


@pytest.mark.slow
def test_checkpoints_of_adapters_alone(tmp_path):
  run_train(base_config(), tmp_path / 'base')
  run_train(tuned_config(tmp_path / 'base', 4, changes_only=False), tmp_path / 'whole')
  run_train(tuned_config(tmp_path / 'base', 2), tmp_path / 'parts')
  (stored,) = checkpoints_at(tmp_path / 'parts')
  names = [name for name in stored.variables() if name.startswith('mdl_vars.')]
  own = [name for name in names if 'lora' in name]
  stored_arrays(str(stored.folder / 'state'), dict.fromkeys(own))
  for name in names:
    if name not in own:
      with pytest.raises(CheckpointError, match='cannot be read'):
        stored_arrays(str(stored.folder / 'state'), {name: None})

  # On another mesh, the run goes on and ends almost as the whole one; on the same mesh, with the same bits.
  shutil.copytree(tmp_path / 'parts', tmp_path / 'split')
  run_train(tuned_config(tmp_path / 'base', 4), tmp_path / 'parts')
  whole = variables_of(tmp_path / 'whole')
  assert_equal(variables_of(tmp_path / 'parts'), whole)
  run_train(tuned_config(tmp_path / 'base', 4, mesh=(1, 3, 1)), tmp_path / 'split')
  split = variables_of(tmp_path / 'split')
  assert all(np.allclose(split[path], x, atol=1e-5) for path, x in whole.items())

  # What reads checkpoints without a mesh reads them too.
  newest, full = checkpoints_at(tmp_path / 'parts')[-1], checkpoints_at(tmp_path / 'whole')[-1]
  assert not newest.damage() and newest.num_bytes < full.num_bytes
  assert all(difference.largest == 0 for difference in newest.differences(full))
  newest.copy(tmp_path / 'copy', optimizer=False)
  assert_equal(variables_of(tmp_path / 'copy'), whole)
  config = tuned_config(tmp_path / 'base', 4)
  for name in ('parts', 'whole'):
    export_run(config, tmp_path / name, tmp_path / f'exported_{name}')
  one, other = (read_folder(tmp_path / f'exported_{name}') for name in ('parts', 'whole'))
  assert all(np.array_equal(one[name].read_all(), other[name].read_all()) for name in other)

  # Both may move together; a base that is missing, or another one, is an error.
  (tmp_path / 'moved').mkdir()
  for name in ('base', 'parts'):
    (tmp_path / name).rename(tmp_path / 'moved' / name)
  assert_equal(variables_of(tmp_path / 'moved' / 'parts'), whole)
  base = tmp_path / 'moved' / 'base'
  base.rename(tmp_path / 'away')
  with pytest.raises(CheckpointError, match=r'has only what training has changed, and needs .*1, which does not exist'):
    variables_of(tmp_path / 'moved' / 'parts')
  run_train(base_config(seed=1), base)
  with pytest.raises(CheckpointError, match='which is another checkpoint now; put the one back'):
    variables_of(tmp_path / 'moved' / 'parts')
  assert checkpoints_at(tmp_path / 'moved' / 'parts')[-1].damage().keys() == {'base'}


@pytest.mark.slow
def test_a_run_that_cannot_leave_anything_out(tmp_path):
  run_train(base_config(), tmp_path / 'base')
  config = base_config(2)
  config.task.train.init_from.set(path=str(tmp_path / 'base'), store_changes_only=True)
  with pytest.raises(ConfigError, match=r'init_from.store_changes_only: the learner trains all variables'):
    run_train(config, tmp_path / 'run')
  config.task.train.init_from.path = None
  with pytest.raises(ConfigError, match=r'store_changes_only: checkpoints can leave out only .* set task.train.init'):
    run_train(config, tmp_path / 'run')
