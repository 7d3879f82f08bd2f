"""`praxis-lite predict`: prints the predictions of a checkpoint for files, or writes those of many rows to a folder."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, cast

from absl import flags

from praxis_lite.cli.command import Command, configured_run
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.cli.predict_many import check_single, predict_flags, predict_many
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of

_MANY_NUMBERS = 2_000  # A value with this many numbers is too long to read.


def _run(values: flags.FlagValues) -> int:
  if values.input or values.output:
    return predict_many(cast(CommandFlags, values))
  check_single(cast(CommandFlags, values))
  if not values.files:
    raise UserError('name the files to predict, as in praxis-lite predict --job_log_dir=runs/1 new.jsonl')
  if not values.job_log_dir and os.path.isdir(values.files[0]):
    raise UserError(f'{values.files[0]} is a directory; name a run by its flag, as in --job_log_dir={values.files[0]}')
  config, job_log_dir = configured_run(values)

  from praxis_lite.runs.predict_files import predict_files
  from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
  from praxis_lite.runs.restoring import restore_model

  config = use_kept_vocabulary(config, job_log_dir)
  model = restore_model(config, job_log_dir, step=values.step, seed=values.seed, on_damage=values.on_damage)
  count = 0
  for example in predict_files(model, values.files, what=values.what, batch_size=values.batch_size):
    if not count:
      _note_large_values(example)
    print(json.dumps(example))
    count += 1
  print(f'{number_of(count, "example")} after step {model.step}', file=sys.stderr)
  return 0


def _note_large_values(example: dict[str, Any]) -> None:
  """Says on stderr which values of an example are too long for a person to read."""
  import numpy as np

  for name, shape in ((name, np.shape(value)) for name, value in example.items() if name != 'tokens'):
    if (count := math.prod(shape)) >= _MANY_NUMBERS:
      instead = '; --what=evaluate prints the loss of each example' if name == 'logits' else ''
      print(f'{name!r} of each example has {list(shape)} = {count:,} numbers{instead}', file=sys.stderr)


COMMAND = Command(
  'predict',
  'print predictions for files',
  'print the predictions of a checkpoint for each example of some files, as a JSON object on a line. A .npz file has '
  'arrays by name, a .jsonl file an example on each line; other files are read like those of a dataset of the run. '
  'A masked language model fills in each [MASK] of a text. '
  'With --input and --output, write the results of many rows to a folder, and go on after any interruption.',
  'praxis-lite predict --job_log_dir=runs/1 new.jsonl > predictions.jsonl',
  predict_flags(),
  _run,
  bare_rest='files',
  usage='FILES --job_log_dir=RUN [--flags]',
)
