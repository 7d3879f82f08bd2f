"""The inputs of a run, from its configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError, DataError, located
from praxis_lite.inputs import BaseInput
from praxis_lite.models.base import BaseModel


class Datasets(NamedTuple):
  """The inputs of an experiment's `datasets()` or `decode_datasets()`.

  Attributes:
    name: 'datasets' or 'decode_datasets'.
    inputs: in the order of their configs.
  """

  name: str
  inputs: list[BaseInput]

  @property
  def evaluation(self) -> list[BaseInput]:
    """The inputs to evaluate on."""
    return [i for i in self.inputs if not i.is_training]

  def the_training_input(self) -> BaseInput:
    """Returns the one input to train on.

    Raises:
      ConfigError: there is none, or more than one.
    """
    training = [i for i in self.inputs if i.is_training]
    if len(training) != 1:
      raise ConfigError(
        f'{self.name}(): exactly one input must have is_training=True, and {len(training)} of {len(self.inputs)} have '
        'it; to train on several, mix them in a MixtureInput'
      )
    return training[0]

  def check(self, inputs: Sequence[BaseInput], model: BaseModel) -> None:
    """Reads a batch of each of `inputs` and shows it to the model, before time is spent on anything else.

    Raises:
      UserError: data is missing, empty or unreadable, or not what the model takes.
    """
    for i, data in enumerate(self.inputs):
      if not any(data is wanted for wanted in inputs):
        continue
      with located(f'{self.name}[{i}]'):
        try:
          batch = data.get_next()
        except StopIteration:
          raise DataError(f'{data.label}: there is no batch in it') from None
        data.reset()
        model.check_input(data, batch)


def build_datasets(configs: Sequence[Config], name: str = 'datasets') -> Datasets:
  """Builds inputs that each read this process's share of a batch.

  Args:
    configs: of the inputs.
    name: 'datasets' or 'decode_datasets', for messages.

  Raises:
    ConfigError: two inputs for the same use have one name, so that their metrics could not be told apart.
  """
  inputs: list[BaseInput] = []
  for i, config in enumerate(configs):
    with located(f'{name}[{i}]'):
      inputs.append(config.instantiate(num_hosts=jax.process_count(), host_index=jax.process_index()))
  labels = [i.label for i in inputs if not i.is_training]
  twice = [label for label in labels if labels.count(label) > 1]
  if twice:
    raise ConfigError(f'{name}(): {len(twice)} inputs are called {twice[0]!r}; set the name of each')
  return Datasets(name, inputs)
