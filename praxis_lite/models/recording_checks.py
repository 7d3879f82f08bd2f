"""Checks that all models of recordings share."""

from __future__ import annotations

from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.log_mel import LogMel


def check_sample_rate(data: BaseInput, frontend: LogMel) -> None:
  """Raises a `ConfigError` if the data has a sample rate that differs from the one of the model's front end."""
  rate = getattr(data, 'sample_rate', None)
  if rate not in (None, frontend.sample_rate):
    raise ConfigError(
      f'{data.label}.sample_rate: {rate} samples in a second, but task.model.frontend_tpl.sample_rate is '
      f'{frontend.sample_rate}; set the same in both'
    )


def prompts_error(model: object) -> ConfigError:
  """Returns the error for a call that asks a model of recordings to continue a text."""
  return ConfigError(
    f'task.model: a {type(model).__name__} writes down recordings and continues no prompts; praxis-lite predict '
    'takes WAV files, and decode without a prompt the decode_datasets of the experiment'
  )
