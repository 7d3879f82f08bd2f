"""The configs of one run, composed in Python."""

from __future__ import annotations

import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, UnknownFieldError
from praxis_lite.models import BaseModel
from praxis_lite.training.experiment import BaseExperiment, ExperimentConfig, configure
from praxis_lite.training.task import SingleTask


def a_config() -> ExperimentConfig:
  return ExperimentConfig(Config(dict), [Config(dict), Config(dict)])


def test_configs_can_be_set_one_by_one():
  config, other = a_config(), Config(dict)
  config.datasets = (other, config.datasets[1])
  config.task = other
  assert config.datasets[0] is config.task is config.roots()['task'] is other
  assert config.decode_datasets == [] and list(config.roots()) == ['task', 'datasets', 'decode_datasets']


def test_a_list_that_was_set_stays_its_owners():
  mine = [Config(dict)]
  config = a_config()
  config.datasets = mine
  config.datasets.append(Config(dict))
  assert len(mine) == 1 and len(config.datasets) == 2


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    ('task', 3, r'^task is int; it must be a Config of a task$'),
    ('datasets', Config(dict), r'^datasets is Config; it must be a list of Configs of inputs$'),
    ('decode_datasets', [None], r'^decode_datasets\[0\] is NoneType; it must be the Config of an input$'),
  ],
)
def test_what_is_no_config_is_told(name, value, message):
  with pytest.raises(ConfigError, match=message):
    setattr(a_config(), name, value)


def test_a_misspelt_name_is_told():
  with pytest.raises(UnknownFieldError, match=r"no 'dataset'\. Did you mean 'datasets'\?"):
    a_config().dataset = []


def test_a_mesh_without_names_is_told_with_an_example_unless_it_has_one_axis():
  task = Config(SingleTask, model=Config(BaseModel), ici_mesh_shape=(2, 2))
  with pytest.raises(ConfigError, match=r'needs a name, as in --set "task\.mesh_axis_names=\(\'data\', \'mdl\'\)"$'):
    task.instantiate()
  for shape in ((8,), [8], 'auto', (-1,)):
    task.ici_mesh_shape = shape
    assert task.instantiate().mesh_sizes(8) == {'data': 8}


def experiment_with(**attributes) -> type[BaseExperiment]:
  methods = {
    'task': lambda self: Config(SingleTask, model=Config(BaseModel)),
    'datasets': lambda self: [],
  }
  return type('Mine', (BaseExperiment,), methods | attributes)


@pytest.mark.parametrize(
  ('name', 'value', 'meant'),
  [
    ('mesh_axis_name', ('data',), 'mesh_axis_names'),
    ('ici_mesh_shapes', (8,), 'ici_mesh_shape'),
    ('ICI_MESH_SHAPE', [8], 'ici_mesh_shape'),
    ('dcn_mesh_shap', None, 'dcn_mesh_shape'),
  ],
)
def test_a_misspelt_attribute_of_an_experiment_is_told(name, value, meant):
  message = rf"^Mine\.{name}: an experiment has no such attribute\. Did you mean '{meant}'\?$"
  with pytest.raises(ConfigError, match=message):
    configure(type('Derived', (experiment_with(**{name: value}),), {}))


def test_attributes_of_an_experiment_that_are_no_mistakes_are_accepted():
  configure(experiment_with(mesh_shape=(8,), devices=8, path='a.txt', mesh_axis_name=lambda self: 'data'))
  used = {'ici_mesh_shapes': [(8,), (4,)], 'ici_mesh_shape': (8,), 'mesh_axis_names': ('data',)}
  assert configure(experiment_with(**used)).task.ici_mesh_shape == (8,)


def test_a_wrong_field_of_the_learner_is_told_by_its_whole_path():
  task = Config(SingleTask, model=Config(BaseModel))
  task.train.learner.learning_rate = 'fast'
  with pytest.raises(
    ConfigError, match=r"^task\.train\.learner\.learning_rate: expected .*, got 'fast' \(str\) \(.*\.py:\d+\)$"
  ):
    task.instantiate()
