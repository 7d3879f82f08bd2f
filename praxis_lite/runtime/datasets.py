"""The inputs of a run, from its configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from praxis_lite.config import Config
from praxis_lite.errors import ConfigError
from praxis_lite.inputs import BaseInput


class Datasets(NamedTuple):
  """The inputs of an experiment's `datasets()`."""

  training: list[BaseInput]
  evaluation: list[BaseInput]

  def the_training_input(self) -> BaseInput:
    """Returns the one input to train on.

    Raises:
      ConfigError: there is none, or more than one.
    """
    if len(self.training) != 1:
      total = len(self.training) + len(self.evaluation)
      raise ConfigError(
        f'datasets(): exactly one input must have is_training=True, and {len(self.training)} of {total} have it; '
        'to train on several, mix them in a MixtureInput'
      )
    return self.training[0]


def build_datasets(configs: Sequence[Config]) -> Datasets:
  """Builds the inputs of an experiment's `datasets()`."""
  inputs = build_inputs(configs, 'datasets()')
  return Datasets([i for i in inputs if i.is_training], [i for i in inputs if not i.is_training])


def build_inputs(configs: Sequence[Config], where: str) -> list[BaseInput]:
  """Builds inputs that each read this process's share of a batch.

  Raises:
    ConfigError: two inputs for the same use have one name, so that their metrics could not be told apart.
  """
  inputs = [c.instantiate(num_hosts=jax.process_count(), host_index=jax.process_index()) for c in configs]
  names = [(i.is_training, i.label) for i in inputs]
  twice = [label for use, label in names if names.count((use, label)) > 1 and not use]
  if twice:
    raise ConfigError(f'{where}: {len(twice)} inputs are called {twice[0]!r}; set the name of each')
  return inputs
