"""Config: templates, copies, equality and complaints."""

from __future__ import annotations

import importlib
import typing

import numpy as np
import optax
import pytest

from praxis_lite.common.config import (
  REQUIRED,
  Config,
  Configurable,
  config_values,
  field_type_hints,
  instantiate,
  target,
  template,
)
from praxis_lite.common.errors import ConfigError, UnknownFieldError
from praxis_lite.common.importing import short_path
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.training.experiment import configure

if typing.TYPE_CHECKING:
  from nowhere import Unresolvable


class Norm(Configurable):
  epsilon: float = 1e-6


class Layer(Configurable):
  dims: int = REQUIRED
  norm_tpl: Config = template(Norm, epsilon=1e-5)
  sizes: tuple[int, ...] = ()
  odd: Unresolvable | None = None


def join(first: str, second: str = 'b', /, third: str = 'c', **others: str) -> str:
  return first + second + third + ''.join(others.values())


def test_templates_are_there_to_edit_and_belong_to_one_config():
  one, two = Config(Layer), Config(Layer)
  one.norm_tpl.epsilon = 1.0
  assert two.norm_tpl.epsilon == 1e-5
  assert one.clone().norm_tpl is not one.norm_tpl


def test_clone_is_independent_down_to_lists():
  config = Config(Layer, sizes=[1, [2]])
  copy = config.clone(dims=3)
  copy.sizes[1].append(3)
  assert config.sizes == [1, [2]]
  assert config.dims is REQUIRED and copy.dims == 3


def test_misspelt_field_names_its_neighbour():
  with pytest.raises(UnknownFieldError, match=r"no field 'dim'\. Did you mean 'dims'"):
    Config(Layer, dim=3)
  with pytest.raises(UnknownFieldError, match="Did you mean 'norm_tpl'"):
    Config(Layer).norm_tp = None
  with pytest.raises(UnknownFieldError, match="Did you mean 'sizes'"):
    _ = Config(Layer).size


def test_deleting_a_field_gives_its_default_back():
  config = Config(Layer, dims=3)
  config.norm_tpl.epsilon = 3.0
  del config.norm_tpl, config.dims
  assert config == Config(Layer)


@pytest.mark.parametrize(
  'use', [bool, int, len, lambda r: r + 1, lambda r: 2 * r, lambda r: r < 1, lambda r: r[0], list]
)
def test_required_complains_when_used(use):
  with pytest.raises(ConfigError, match='before it is set'):
    use(Config(Layer).dims)


def test_instantiate_names_what_is_missing():
  with pytest.raises(ConfigError, match=r'Layer.dims: a value is required'):
    Config(Layer).instantiate()
  with pytest.raises(ConfigError, match=r'adamw.learning_rate: a value is required'):
    Config(optax.adamw).instantiate()


def test_parameter_of_a_function_that_is_not_set_is_required():
  assert Config(optax.adamw).learning_rate is REQUIRED
  assert Config(optax.adamw, learning_rate=0.1).learning_rate == 0.1


def test_configs_reach_a_configurable_unbuilt_and_a_function_built():
  layer = Config(Layer, dims=1).instantiate()
  assert isinstance(layer.norm_tpl, Config)
  built = instantiate(Config(dict, inner=[Config(Norm, epsilon=2.0)]))
  assert built['inner'][0].epsilon == 2.0


def test_values_are_in_order_with_defaults():
  assert list(config_values(Config(Layer, sizes=(1,)))) == ['dims', 'norm_tpl', 'sizes', 'odd']
  assert config_values(Config(join, 'x', fourth='y')) == {0: 'x', 1: 'b', 'third': 'c', 'fourth': 'y'}
  assert Config(join, 'x', fourth='y').instantiate() == 'xbcy'


def test_equality_counts_defaults_and_classes():
  assert Config(Layer) == Config(Layer, sizes=())
  assert Config(Layer) != Config(Layer, sizes=(1,))
  assert Config(Norm) != Config(Layer)
  assert Config(Norm) != 'Norm'
  edited = Config(Layer)
  edited.norm_tpl.epsilon = 3.0
  assert edited != Config(Layer) and edited == edited.clone()


def test_equality_of_a_deep_tree_is_one_pass():
  reads = 0

  class Counting:
    def __eq__(self, other):
      nonlocal reads
      reads += 1
      return True

    __hash__ = None

  def nested(depth):
    return Config(dict, leaf=Counting()) if depth == 0 else Config(dict, inner=nested(depth - 1))

  assert nested(20) == nested(20)
  assert reads == 1


def test_one_annotation_that_cannot_be_resolved_hides_no_other():
  hints = field_type_hints(Layer)
  assert hints['dims'] is int and hints['sizes'] == tuple[int, ...]
  assert 'odd' not in hints
  assert field_type_hints(join)['third'] is str
  assert field_type_hints(np.sin) == {}


def test_configs_in_the_fields_of_a_template_are_not_shared():
  class Outer(Configurable):
    inner_tpl: Config = template(Layer, norm_tpl=Config(Norm, epsilon=1.0))

  one, other = Config(Outer), Config(Outer)
  one.inner_tpl.norm_tpl.epsilon = 2.0
  assert other.inner_tpl.norm_tpl.epsilon == Config(Outer).inner_tpl.norm_tpl.epsilon == 1.0


# ---------------------------------------------------------------- where a name is misspelled


def misspell(edit):
  """Runs a line of a user's code; returns the message of its error, without this file's name."""
  with pytest.raises(UnknownFieldError) as caught:
    edit()
  line = f'{short_path(__file__)}:{edit.__code__.co_firstlineno + 1}'
  assert str(caught.value).endswith(f' ({line})')
  return str(caught.value).partition(' has no field')[0]


def test_a_misspelled_field_names_the_path_of_its_config_and_the_line():
  experiment = configure(SyntheticLmTiny)
  cfg, model = experiment.task, experiment.task.model

  def set_a_field():
    experiment.task.model.hiden = 3

  def read_a_config():
    cfg.modle.hidden = 3

  def set_fields():
    experiment.task.train.set(num_train_step=3)

  def set_in_an_input():
    experiment.datasets[1].batch_sze = 3

  def use_a_variable():
    model.lm_tpl.transfrmer_tpl.x = 3

  def make_a_config():
    Config(target(cfg), nmae='a')

  assert misspell(set_a_field) == 'task.model (LanguageModel)'
  assert misspell(read_a_config) == 'task (LanguageModelTask)'
  assert misspell(set_fields) == 'task.train (TrainParams)'
  assert misspell(set_in_an_input) == 'datasets[1] (SyntheticLMInput)'
  assert misspell(use_a_variable) == 'model.lm_tpl (TransformerLm)'
  assert misspell(make_a_config) == 'LanguageModelTask'


@pytest.mark.parametrize(
  'package', ['praxis_lite', 'praxis_lite.runs', 'praxis_lite.training', 'praxis_lite.partitioning']
)
def test_a_star_imports_the_public_names_of_a_package(package):
  names = {}
  exec(f'from {package} import *', names)
  module = importlib.import_module(package)
  assert set(module.__all__) <= names.keys() and set(module.__all__) <= set(dir(module))
  assert {'praxis_lite': 'Config', 'praxis_lite.runs': 'run_train'}.get(package, 'partition_spmd_model') in names
  assert not {'lazy_names', 'TYPE_CHECKING', 'annotations'} & names.keys()
