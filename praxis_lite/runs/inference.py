"""Evaluates and decodes whole datasets, and continues prompts, with a checkpoint on any mesh.

Another process may train in the same directory at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from praxis_lite.common.config import target
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import significant_digits
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.processes import is_primary_process
from praxis_lite.models.base import BaseModel
from praxis_lite.models.decoding.decoder import continues_prompts
from praxis_lite.runs.draft_statistics import DraftStatistics
from praxis_lite.runs.programs import DecodeProgram, EvalProgram, InputProgram
from praxis_lite.runs.prompts import prompt_batch
from praxis_lite.runs.records.metrics import HostMetrics
from praxis_lite.runs.records.run_config import job_directory
from praxis_lite.runs.records.run_inputs import build_datasets, use_kept_vocabulary
from praxis_lite.runs.restoring import RestoreOptions, restore_model
from praxis_lite.runs.run import open_run
from praxis_lite.runs.task_files import task_file_programs
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig


def run_eval(
  config: ExperimentConfig, job_log_dir: str | Path, *, tap: Sequence[str] = (), **options: Unpack[RestoreOptions]
) -> dict[str, HostMetrics]:
  """Evaluates a checkpoint on all evaluation inputs; prints the metrics and returns them by split and name.

  Args:
    config, job_log_dir: see `run_train`.
    tap: statistics to add to the metrics, such as 'lm.transformer.*.attention:rms'; see `praxis_lite.training.taps`.
    **options: `step`, `devices`, `seed` and `on_damage`; see `RestoreOptions`.

  Raises:
    UserError: the config, the data or the checkpoint cannot be used, or there is no checkpoint.
  """
  config = use_kept_vocabulary(config, job_log_dir)
  datasets = build_datasets(config.datasets)
  inputs = datasets.evaluation
  if not inputs and not config.task.evaluate.task_files:
    raise ConfigError('datasets(): there is no input with is_training=False to evaluate on')
  model = restore_model(config, job_log_dir, check=functools.partial(datasets.check, inputs), tap=tap, **options)
  programs: list[InputProgram] = [EvalProgram(model.tasks, i, model.key) for i in inputs]
  programs += task_file_programs(model.tasks, config, Path(job_log_dir), [program.split for program in programs])
  return _run(programs, model)


def run_decode(
  config: ExperimentConfig, job_log_dir: str | Path, **options: Unpack[RestoreOptions]
) -> dict[str, HostMetrics]:
  """Decodes all `decode_datasets` with a checkpoint, into `job_log_dir/decoded`; for the arguments see `run_eval`."""
  model_class = target(config.task.model)
  if getattr(model_class, 'decode', None) is BaseModel.decode:
    raise ConfigError(
      f'task.model: {model_class.__name__} has no method decode(batch), so it cannot decode; `predict` computes '
      'results for rows of data'
    )
  config = use_kept_vocabulary(config, job_log_dir)
  datasets = build_datasets(config.decode_datasets, 'decode_datasets')
  if not (inputs := datasets.inputs):
    from_text = 'to decode from a text, pass --prompt, or --prompt_ids'
    other = from_text if continues_prompts(config.task.model) else 'add one, or use `predict`'
    raise ConfigError(f'decode_datasets(): there is no input to decode; {other}')
  check = functools.partial(datasets.check, inputs)
  model = restore_model(config, job_log_dir, use_ema='decode', check=check, **options)
  with job_directory(job_log_dir) as directory:
    return _run([DecodeProgram(model.tasks, i, model.key, directory) for i in inputs], model)


def decode_prompts(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  prompts: Sequence[Sequence[int]],
  *,
  stop: Sequence[str] = (),
  stream: Callable[[int, list[int]], object] | None = None,
  batch_size: int | None = None,
  draft: str | Path | None = None,
  statistics: DraftStatistics | None = None,
  **options: Unpack[RestoreOptions],
) -> list[list[int]]:
  """Returns the tokens that follow each prompt.

  Args:
    config: the configs; the task's model has a `decode` that takes `ids` [B, P] and `prompt_lengths` [B], for B prompts
      of up to P tokens.
    job_log_dir, **options: see `run_eval`.
    prompts: the token ids of each prompt, at least one.
    stop, stream, batch_size, statistics: see `TrainedModel.decode`.
    draft: the directory of the run of a smaller model that guesses tokens; None decodes without guesses.

  Raises:
    UserError: see `run_eval`; or a prompt is empty.
  """
  prompt_batch(prompts)  # Checks the prompts before slow work.
  begin = functools.partial(
    TrainedModel.begin_to_compile_decode,
    prompts=prompts,
    stop=stop,
    in_segments=stream is not None,
    batch_size=batch_size,
  )
  guesses = None if draft is None else open_run(draft).load()
  meanwhile = begin if guesses is None else lambda model: None  # With a draft model, another program decodes.
  model = restore_model(config, job_log_dir, use_ema='decode', meanwhile=meanwhile, **options)
  return model.decode(prompts, stop=stop, stream=stream, batch_size=batch_size, draft=guesses, statistics=statistics)


def _run(programs: Sequence[InputProgram], model: TrainedModel) -> dict[str, HostMetrics]:
  metrics: dict[str, HostMetrics] = {}
  for program in programs:
    result = program.run(model.stored_variables, model.global_step)
    assert result is not None  # The result is None only after an interruption, which cannot happen here.
    tapped = {name: np.asarray(s.value) for name, s in result.summaries.items() if s.kind == 'scalar'}
    metrics[program.split] = {**result.metrics, **tapped}
    if is_primary_process():
      texts = {name: (significant_digits(x, 4) for x in values.ravel().tolist()) for name, values in tapped.items()}
      lines = (f'  {name} {" ".join(of_layers)}' for name, of_layers in texts.items())
      for line in (program.result_line(model.step, result), *lines):
        print(printable(line), flush=True)
  return metrics
