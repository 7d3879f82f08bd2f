"""The shapes of an experiment's training batches, without reading its data."""

from __future__ import annotations

from typing import Any

from praxis_lite.config import REQUIRED, Config, config_values
from praxis_lite.errors import UserError
from praxis_lite.experiment import ExperimentConfig


def inputs_struct(experiment: ExperimentConfig) -> Any | None:
  """Returns the tree of shapes and dtypes of a global training batch; None where the data has to be there to know.

  What has to be set only to read the data, such as the path of a text, may be missing.
  """
  training = [c for c in experiment.datasets if getattr(c, 'is_training', False)] or experiment.datasets
  for config in training:
    try:
      return _filled(config).instantiate().batch_struct()
    except (UserError, OSError):
      continue
  return None


def _filled(config: Config) -> Config:
  """A copy in which text stands for the required values that are missing below `config`."""
  config = config.clone()
  for name, value in config_values(config).items():
    if not isinstance(name, str) or name == 'batch_size':
      continue
    if value is REQUIRED:
      setattr(config, name, 'not-set')
    elif isinstance(value, Config):
      setattr(config, name, _filled(value))
  return config
