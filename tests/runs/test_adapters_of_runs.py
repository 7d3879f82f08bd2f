"""A run that trains adapters on the weights of another run, and what is exported of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from praxis_lite.bridges.hf import export_run, read_adapter
from praxis_lite.bridges.hf.files import read_folder
from praxis_lite.bridges.hf.runs import _base_of
from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.common.trees import leaves, merge, node_at, select
from praxis_lite.experiments.lm import SyntheticLmTiny, SyntheticLoraTiny
from praxis_lite.layers import Lora
from praxis_lite.models import merge_adapters, remove_adapters
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.records.record import write_record
from praxis_lite.training import train_adapters
from praxis_lite.training.adapters import describe_untypical_training
from praxis_lite.training.experiment import configure


def config_of(experiment, steps):
  config = configure(experiment)
  config.task.train.set(num_train_steps=steps, save_interval_steps=steps, log_interval_steps=steps)
  return config


@pytest.mark.slow
def test_a_run_of_adapters_from_first_step_to_export(tmp_path):
  run_train(config_of(SyntheticLmTiny, 2), tmp_path / 'base')
  tuned = config_of(SyntheticLoraTiny, 3)
  tuned.task.train.init_from.path = str(tmp_path / 'base')
  tuned.task.set(ici_mesh_shape=(1, 3, 1))
  result = run_train(tuned, tmp_path / 'tuned')
  before = open_run(tmp_path / 'base').load().variables
  after = open_run(tmp_path / 'tuned').load().variables
  for path, value in leaves(after).items():
    if (old := node_at(before, path)) is not None:
      np.testing.assert_array_equal(value, old)
    elif path[-1] == 'b':
      assert np.any(value), path
  assert result.step == 3

  model = tuned.task.model.instantiate()
  files = export_run(tuned, tmp_path / 'tuned', tmp_path / 'merged')
  assert 'config.json' in files
  merged = merge_adapters(model, after)['lm']
  stored = read_folder(tmp_path / 'merged')
  query = merged['transformer']['layers']['attention']['query']['w']
  for i in range(2):
    theirs = stored[f'model.layers.{i}.self_attn.q_proj.weight'].read_all()
    np.testing.assert_allclose(theirs, np.asarray(query[i]).reshape(18, 18).T, atol=1e-6)

  assert export_run(tuned, tmp_path / 'tuned', tmp_path / 'adapter', adapter=True)[0] == 'adapter_config.json'
  found = read_adapter(tmp_path / 'adapter', remove_adapters(tuned.task.model))
  jax.tree.map(np.testing.assert_array_equal, found.variables, select(after, lambda path: 'lora' in path))
  assert jax.tree.structure(merge(before, found.variables)) == jax.tree.structure(after)
  with pytest.raises(UserError, match='has no adapters to write'):
    export_run(config_of(SyntheticLmTiny, 2), tmp_path / 'base', tmp_path / 'none', adapter=True)


def test_other_variables_may_be_trained_too():
  task = configure(SyntheticLmTiny).task
  task.train.learner.bprop_variable_inclusion = r'lm\.softmax\..*'
  train_adapters(task, Config(Lora, layers=r'.*\.query', rank=2))
  train_adapters(task, Config(Lora, layers=r'.*\.value', rank=3))
  built = task.instantiate()
  bound = built.learner.bind(built.model.abstract_init())
  trained = {
    path[-2 if path[-1] in 'ab' else -1 :] for path in leaves(bound.select_trained(built.model.abstract_init()))
  }
  assert trained == {('lora', 'a'), ('lora', 'b'), ('w',)}
  assert len(task.model.adapters) == 2 and len(task.train.init_from.rules) == 1


def test_an_adapter_names_the_folder_that_its_base_was_imported_from(tmp_path):
  config = configure(SyntheticLmTiny)
  assert _base_of(config, tmp_path / 'tuned') is None
  commands = {
    'base': "praxis-lite import-hf 'my llama/' --job_log_dir=runs/base",
    'tuned': 'praxis-lite train --exp=a.B',
  }
  for name, command in commands.items():
    (tmp_path / name).mkdir()
    write_record(tmp_path / name, config, command=command)
  config.task.train.init_from.path = str(tmp_path / 'base')
  assert _base_of(config, tmp_path / 'tuned') == _base_of(config, tmp_path / 'base') == 'my llama'


def test_adapters_whose_base_is_trained_too_are_warned_of():
  task = configure(SyntheticLmTiny).task
  assert not describe_untypical_training(task.instantiate())
  task.model.adapters = Config(Lora, rank=2)
  told = describe_untypical_training(task.instantiate())
  assert 'training changes all weights, not only the adapters, and begins from the seed' in told
  assert "--set 'task.train.learner.bprop_variable_inclusion=.*lora.*' --set task.train.init_from.path=RUN" in told
  task.train.init_from.path = 'runs/base'
  assert 'seed' not in describe_untypical_training(task.instantiate())
  train_adapters(task.set(model=remove_adapters(task.model)), Config(Lora))
  assert not describe_untypical_training(task.instantiate())


@pytest.mark.parametrize('adapters', [None, Config(Lora, rank=2)])
def test_weights_that_stay_random_are_warned_of(adapters):
  task = configure(SyntheticLmTiny).task
  task.model.adapters, task.train.learner.bprop_variable_inclusion = adapters, '.*lora.*' if adapters else '.*softmax.*'
  told = describe_untypical_training(task.instantiate())
  assert 'weights that are not trained keep random initial values' in told
  assert '--set task.train.init_from.path=RUN' in told and ('.rules=' in told) == (adapters is not None)
  task.train.init_from.path = 'runs/base'
  assert not describe_untypical_training(task.instantiate())
