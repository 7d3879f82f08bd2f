"""`praxis-lite coordinate-check`: finds layers whose activations grow with the width, by training several widths."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING

from absl import flags

from praxis_lite.cli.command import Command, configured_experiment
from praxis_lite.cli.command_flags import CommandFlags, experiment_flags
from praxis_lite.common.errors import UserError

if TYPE_CHECKING:
  from praxis_lite.common.trees import NestedDict
  from praxis_lite.training.experiment import ExperimentConfig

_WIDTHS = ('1', '2', '4', '8')


def _run(values: flags.FlagValues) -> int:
  from praxis_lite.instruments.coordinates import (
    add_mup,
    coordinate_check,
    draw_scalings,
    format_coordinates,
    make_ladder,
  )
  from praxis_lite.training.learning.multi_learner import nested_learners

  config = configured_experiment(values)
  task = config.task.clone()
  if values.learning_rate is not None:
    for learner in nested_learners(task.train.learner).values():
      learner.learning_rate = values.learning_rate
  ladder = make_ladder(task.model, [_to_factor(text) for text in values.widths or _WIDTHS], values.fields or ())
  if values.mup:
    ladder = add_mup(ladder)
  narrowest = (f'{path} = {width * ladder.factors[0]:g}' for path, width in ladder.fields.items())
  print(f'narrowest model: {", ".join(narrowest)}')
  seeds = range(values.seed, values.seed + values.seeds)
  found = coordinate_check(task, ladder, _read_batches(config, values.steps), seeds, print)
  print(format_coordinates(found, ladder.factors, values.tolerance))
  if values.svg:
    from praxis_lite.instruments.explain.page import write_file

    print(f'wrote {write_file(values.svg, draw_scalings(found, ladder.factors, values.tolerance))}')
  failed = [s for s in found if s.trouble(values.tolerance)]
  if failed:
    print(f'{len(failed)} of {len(found)} layers FAIL: a learning rate of a narrow model is wrong for a wide one')
    return 1
  print(f'all {len(found)} layers pass')
  return 0


def _to_factor(text: str) -> float:
  with contextlib.suppress(ValueError):
    if math.isfinite(float(text)):
      return float(text)
  raise UserError(f'--widths: {text!r} is not a number; expected factors, as in --widths=1,2,4,8')


def _read_batches(config: ExperimentConfig, steps: int) -> list[NestedDict]:
  """Returns the first `steps` batches of the training input; raises UserError if there are fewer."""
  from praxis_lite.runs.records.run_inputs import build_datasets

  batches = list(itertools.islice(build_datasets(config.datasets).the_training_input(), steps))
  if len(batches) < steps:
    raise UserError(f'--steps={steps}: the training data has only {len(batches)} batches')
  return batches


def _flags() -> CommandFlags:
  values = experiment_flags()
  values.add_list('widths', 'Widths of the models as multiples of the narrowest; by default 1,2,4,8.', '1,4')
  fields = 'Paths of the fields of the model that are widths; by default those in which mup.base differs, or else all '
  values.add_list('fields', f'{fields}integers named *_dims.', 'model_dims,hidden_dims')
  values.add_switch('mup', 'Train with muP, with the narrowest model as the base.')
  values.add_integer('steps', 'Number of training steps.', 8, 4, least=1)
  values.add_integer('seed', 'The first seed of initial values.', 1, 0, least=0, most=2**31)
  values.add_integer('seeds', 'Number of seeds; sizes are means over them.', 8, 4, least=1, most=2**16)
  values.add_number('learning_rate', 'Constant learning rate; by default that of the learner.', '0.01', least=0)
  tolerance = 'The largest exponent of the width that passes, for activations and their changes.'
  values.add_number('tolerance', tolerance, '0.2', 0.25, least=0)
  values.add_text('svg', 'Write a picture to this file: the sizes of all layers by width.', 'check.svg')
  return values


COMMAND = Command(
  'coordinate-check',
  'find layers whose activations grow with the width',
  'train models of several widths for a few steps on one device, and fit the size of what each layer computes, and of '
  'its change, to a power of the width. If an exponent is not near zero, a learning rate of a narrow model is wrong '
  'for a wide one: exits with 1. With mup, all layers should pass.',
  'praxis-lite coordinate-check lm.StdlibLmTiny --mup --widths=1,2,4,8',
  _flags(),
  _run,
  bare='exp',
)
