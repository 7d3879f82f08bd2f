"""`praxis-lite plan --inference`: predicts memory and time of decoding instead of a train step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from absl import flags

from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.instruments.plan import Topology
  from praxis_lite.instruments.plan.inference import InferencePlan
  from praxis_lite.training.experiment import ExperimentConfig

_DEFAULTS = {'rows': 8, 'prompt_length': 1024, 'max_tokens': 128}
# Flags that are about train steps.
_OF_TRAINING = (
  'search',
  'what_if',
  'compare',
  'tokens',
  'why',
  'snapshot',
  'check',
  'write_experiment',
  'figures',
)


def add_inference_flags(values: CommandFlags) -> None:
  values.add_switch('inference', 'Plan decoding instead of a train step: prompts are read, then tokens are drawn.')
  for name, does in (
    ('rows', 'how many prompts are decoded together'),
    ('prompt_length', 'tokens of each prompt'),
    ('max_tokens', 'tokens after each prompt'),
  ):
    values.add_integer(name, f'With --inference: {does}; {_DEFAULTS[name]} by default.', 4 * _DEFAULTS[name], least=1)


def check_inference_flags(values: flags.FlagValues) -> None:
  """Raises UserError if flags of training and of inference are mixed."""
  for name in _OF_TRAINING if values.inference else _DEFAULTS:
    if values[name].value:
      what = 'is about train steps; leave it out, or --inference' if values.inference else 'needs --inference'
      raise UserError(f'--{name} {what}')


def inference_arguments(values: flags.FlagValues) -> list[str]:
  """Returns the flags that describe the requests, for another process; [] if decoding is not planned."""
  given = [f'--{name}={values[name].value}' for name in _DEFAULTS if values[name].value]
  return ['--inference', *given] if values.inference else []


def plan_decoding(values: flags.FlagValues, config: ExperimentConfig, topology: Topology, **how: Any) -> InferencePlan:
  """Returns the plan of decoding the requests of the flags; `how` are keyword arguments of `plan_inference`."""
  from praxis_lite.instruments.plan.inference import Requests, plan_inference

  requests = Requests(**{name: values[name].value or default for name, default in _DEFAULTS.items()})
  return plan_inference(config.task, topology, requests, **how)
