"""`praxis-lite quantize`: makes a run with weights in few bits from another run."""

from __future__ import annotations

import re

from absl import flags

from praxis_lite.cli.command import Command, configured_run
from praxis_lite.cli.command_flags import CommandFlags, run_flags
from praxis_lite.common.errors import UserError

_OF_CALIBRATION = ('calibration_batches', 'calibration_dataset')
_OF_FORMAT = ('group_size', 'layers', 'symmetric', 'percentile', 'scale_dtype', 'kept')


def _run(values: flags.FlagValues) -> int:
  if not values.out:
    raise UserError('--out is missing: name the directory of the new run, as in --out=runs/int4')
  config, job_log_dir = configured_run(values)

  from praxis_lite.common.config import Config
  from praxis_lite.layers import QuantizedWeights
  from praxis_lite.runs.calibration import Calibration
  from praxis_lite.runs.quantized import quantize_run

  rules = []
  if values.format is not None:
    rule = Config(QuantizedWeights, layers=tuple(values.layers) or None, format=values.format)
    rule.set(group_size=values.group_size, symmetric=values.symmetric, percentile=values.percentile)
    rule.set(scale_dtype=values.scale_dtype, kept=_kept(values.kept))
    rules = [rule.set(trained=True, mask_stays=True) if values.format == 'float' else rule]
  elif unused := [f'--{name}' for name in _OF_FORMAT if values[name].present]:
    raise UserError(
      f'{", ".join(unused)}: without --format, weights are stored by the rules of the run, so this would do nothing; '
      'add --format, or leave it out'
    )
  calibration = None
  if values.method != 'nearest' or values.input_percentile is not None:
    data = values.calibration_batches, values.calibration_dataset
    calibration = Calibration(values.method, *data, values.input_percentile)
  elif unused := [f'--{name}' for name in _OF_CALIBRATION if values[name].present]:
    raise UserError(
      f'{", ".join(unused)}: rounding to nearest reads no data; add --method or --input_percentile, or leave it out'
    )
  for line in quantize_run(config, job_log_dir, values.out, *rules, step=values.step, calibration=calibration):
    print(line, flush=True)
  return 0


def _kept(text: str | None) -> tuple[int, int] | None:
  if text is None:
    return None
  match = re.fullmatch(r'(\d+):(\d+)', text)
  if match is None:
    raise UserError(f'--kept={text}: expected two numbers, as in --kept=2:4')
  return int(match[1]), int(match[2])


def _flags() -> CommandFlags:
  values = run_flags(restores=True)
  values.add_text('out', 'Directory of the new run.', 'runs/int4')
  form = 'Format of the weights; by default the one with which the run trained, if it trained with rounded weights.'
  values.add_choice('format', form, ['int8', 'int4', 'int2', 'nf4', 'mxfp8', 'nvfp4', 'float'], 'int4')
  values.add_integer(
    'group_size', 'Number of inputs that share a scale; by default all inputs of an output.', 64, least=1
  )
  values.add_texts('layers', 'Regex of paths of layers; by default all that can be quantized.', r"'.*\.ff\..*'")
  values.add_switch('symmetric', 'Store integers without zero points.', default=True)
  values.add_number('percentile', 'A scale covers this percentage of its weights.', '99.9', 100.0)
  values.add_choice('scale_dtype', 'Dtype of scales.', ['float32', 'bfloat16', 'float16'], 'bfloat16', 'float32')
  values.add_text(
    'kept', 'n:m keeps the n largest weights of each m neighbouring inputs; --format=float needs it.', '2:4'
  )
  how = 'How values are chosen: rounded to nearest, or by data: GPTQ, AWQ, or SmoothQuant for inputs in int8.'
  values.add_choice('method', how, ['nearest', 'gptq', 'awq', 'smooth'], 'gptq', 'nearest')
  fixed = 'Inputs in int8 get a fixed range, which covers this percentage of the data; by default each row has its own.'
  values.add_number('input_percentile', fixed, '99.9')
  values.add_integer('calibration_batches', 'Batches of data that are read.', 32, 16, least=1)
  values.add_text(
    'calibration_dataset', 'Dataset of the run that they read; by default the training data.', 'validation'
  )
  return values


COMMAND = Command(
  'quantize',
  'store the weights of a run in 8, 4 or 2 bits',
  'make a run from another one, whose weights of linear layers, projections and experts are stored as integers of few '
  'bits, as NF4, or as small floats, with scales. It can be evaluated, decoded, exported and fine-tuned with adapters.',
  'praxis-lite quantize --job_log_dir=runs/llama --out=runs/llama-int4 --format=int4 --group_size=64',
  _flags(),
  _run,
  stray='out',
)
