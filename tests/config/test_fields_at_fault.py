"""Messages about a value that does not fit name the field that the user has set, and the line that has set it."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from praxis_lite import Config, Layer, WeightHParams
from praxis_lite.common.config import REQUIRED, config_values, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import Dropout, Linear
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


class Inner(Layer):
  hidden_dims: int = REQUIRED
  rate: float = 0.0

  def setup(self) -> None:
    self.create_child('up', Config(Linear, input_dims=4, output_dims=2 * self.hidden_dims))
    self.create_child('drop', Config(Dropout, rate=self.rate))


class Outer(Layer):
  dims: int = 4
  start: int = 0
  rate: float = 0.0
  inner_tpl: Config = template(Inner)

  def setup(self) -> None:
    inner = self.inner_tpl.clone(rate=self.rate)
    self.create_child('inner', inner if inner.hidden_dims is not REQUIRED else inner.clone(hidden_dims=self.dims))


def told(config: Config) -> str:
  with pytest.raises(ConfigError) as error:
    config.instantiate()
  return re.sub(r' \(\S*test_fields_at_fault\.py:(\d+)\)$', r' @\1', str(error.value))


def this_line() -> int:
  import sys

  return sys._getframe(1).f_lineno


def test_a_size_is_told_by_the_field_that_passed_it_on_and_its_line():
  config = Config(Outer)
  config.dims, line = -2, this_line()
  made = 'it makes inner.up.w of shape (4, -4)'
  assert told(config) == f'Outer.dims: expected at least 1, got -2; {made} @{line}'
  for copied in (config.clone(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
    assert told(copied).endswith(f' @{line}')
  copied = config.clone()
  copied.dims, later = 0, this_line()
  assert told(copied).endswith(f' @{later}') and told(config).endswith(f' @{line}')


def test_a_field_that_is_set_below_is_named_there_even_if_another_field_has_this_value():
  config, line = Config(Outer, dims=-3, inner_tpl=Config(Inner, hidden_dims=-3)), this_line()
  assert told(config).startswith('inner.hidden_dims: expected at least 1, got -3; ')
  assert told(config).endswith(f' @{line}')
  config = Config(Outer)
  config.inner_tpl.hidden_dims, line = 0, this_line()
  assert told(config).endswith(f'inner.up.w of shape (4, 0) @{line}')
  assert told(config).startswith('inner.hidden_dims: ')


def test_what_is_not_a_size_is_named_by_the_field_of_the_same_value():
  config = Config(Outer)
  config.rate, line = 1.5, this_line()
  assert told(config) == f'Outer.rate: expected at least 0 and less than 1, got 1.5 @{line}'


class Sized(Layer):
  shape: tuple[int, ...] = (3, 0)
  one: int = 0
  other: int = 0

  def setup(self) -> None:
    self.create_variable('w', WeightHParams(self.shape))


def test_no_field_is_named_if_it_is_not_clear_which_one():
  assert told(Config(Sized)) == 'Sized.w: shape (3, 0); every dimension must be at least 1'  # A default of the class.
  config = Config(Sized, shape=(4, 0), one=-1)  # Of these two, `shape` has the value.
  assert told(config).startswith('Sized.shape: expected at least 1 each, got (4, 0); it makes Sized.w')


def test_values_that_a_library_or_a_template_has_set_have_no_line():
  config = Config(Outer)
  config.inner_tpl = Config(Inner)
  code = compile('config.inner_tpl.hidden_dims = "x"', '<string>', 'exec')
  exec(code, {'config': config})
  assert told(config) == "inner.hidden_dims: expected int, got 'x' (str)"


_TINY = ('GriffinTiny', 'HybridTiny', 'MoeTiny', 'StdlibLmTiny', 'DatesTiny', 'StdlibBertTiny', 'DigitsConvNet')
_TINY += ('DigitsVqVae', 'DigitsDiffusion', 'DigitsTowers', 'DigitsMlp')


@pytest.mark.parametrize('name', _TINY)
def test_a_size_of_zero_is_told_by_the_name_of_the_field_that_was_set(name):
  """For each field of the model, and of its children, that is an integer."""
  registry.load_all()
  task = configure(registry.get(name)).task
  owners = {'task.model': task.model, **{k: v for k, v in config_values(task.model).items() if isinstance(v, Config)}}
  count = 0
  for path, owner in owners.items():
    for field, value in config_values(owner).items():
      if not isinstance(value, int) or isinstance(value, bool) or field in ('first_position', 'min_decode_steps'):
        continue
      was_set = field in owner.__arguments__
      setattr(owner, field, 0)
      try:
        task.instantiate()
      except ConfigError as error:
        count += 1
        child = path.removesuffix('_tpl')
        where = {'task.model': r'task\.model', 'decoder_tpl': r'(task\.model\.)?decoder(_tpl)?'}.get(
          path, rf'task\.model\.{child}'
        )
        assert re.match(rf'{where}\.{field}: ', str(error)), (path, field, str(error))
      setattr(owner, field, value) if was_set else delattr(owner, field)
  assert count
