"""A value that is set in the template of a child is not replaced by its parent without a word."""

from __future__ import annotations

import pytest

from praxis_lite.common.config import Config, template
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import ConfigError
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.layers import FeedForward
from praxis_lite.layers.base import Layer
from praxis_lite.training.experiment import configure


class Pair(Layer):
  """Fills in sizes of both templates; `num` is for messages."""

  dims: int = 4
  hidden_dims: int = 8
  first_tpl: Config = template(FeedForward, hidden_dims=3)
  second_tpl: Config = template(FeedForward)

  def setup(self) -> None:
    self.create_child('first', self.first_tpl.clone(input_dims=self.dims, hidden_dims=self.hidden_dims))
    second = self.second_tpl.clone(input_dims=self.dims, hidden_dims=2 * self.hidden_dims)
    self.create_child('second', second.clone(hidden_dims=self.hidden_dims))  # What it set itself, it may change.


def test_what_is_set_by_path_is_named() -> None:
  config = configure(StdlibLmTiny)
  apply_overrides(config.roots(), ['task.model.lm.transformer.num_layers=5'])
  with pytest.raises(ConfigError) as error:
    config.task.instantiate()
  assert str(error.value) == (
    'task.model.lm.transformer_tpl.num_layers = 5 has no effect: TransformerLm sets it to 2; set lm.num_layers instead'
  )


def test_what_code_sets_is_named_with_its_line() -> None:
  config = Config(Pair)
  config.second_tpl.hidden_dims = 9
  with pytest.raises(ConfigError, match=r'second_tpl\.hidden_dims = 9 \(.*_of_templates\.py:\d+\) has no effect: Pair'):
    config.instantiate()


def test_equal_values_defaults_of_classes_and_what_a_parent_leaves_are_accepted() -> None:
  config = Config(Pair)  # `first_tpl` has another default, of the class.
  config.second_tpl.input_dims = 4
  config.second_tpl.use_bias = False
  layer = config.instantiate()
  assert (layer.first.hidden_dims, layer.second.hidden_dims, layer.second.use_bias) == (8, 8, False)
