"""Evaluating and decoding whole datasets, and continuing prompts, with a checkpoint: on any mesh.

Another process may be training in the same directory meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax

from praxis_lite.checkpoints import OnDamage, Step
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.processes import is_primary_process
from praxis_lite.runs.programs import DecodeProgram, EvalProgram, Program
from praxis_lite.runs.prompts import prompt_batch
from praxis_lite.runs.records.metrics import HostMetrics
from praxis_lite.runs.records.run_config import build_datasets, job_directory
from praxis_lite.runs.trained import TrainedModel, restore_model
from praxis_lite.runs.vocabulary import use_kept_vocabulary
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask


def run_eval(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  step: Step = None,
  seed: int = 0,
  on_damage: OnDamage = 'previous',
) -> dict[str, HostMetrics]:
  """Evaluates a checkpoint on all evaluation inputs; prints the metrics and returns them by split and name.

  Args:
    config, job_log_dir, devices: as for `run_train`.
    step: step of the checkpoint, or 'best'; None uses the newest.
    seed: for models that draw random numbers while they evaluate.
    on_damage: 'previous' takes the checkpoint before if the newest is damaged, and says so; 'fail' raises.

  Raises:
    UserError: the config, the data or the checkpoint is not usable, or there is no checkpoint.
  """
  config = use_kept_vocabulary(config, job_log_dir)
  datasets = build_datasets(config.datasets)
  inputs = datasets.evaluation
  if not inputs:
    raise ConfigError('datasets(): there is no input with is_training=False to evaluate on')
  mesh, check = functools.partial(SingleTask.create_mesh, devices=devices), functools.partial(datasets.check, inputs)
  model = restore_model(config, job_log_dir, mesh, step=step, seed=seed, on_damage=on_damage, check=check)
  return _run([EvalProgram(model.tasks, i, model.key) for i in inputs], model)


def run_decode(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  step: Step = None,
  seed: int = 0,
  on_damage: OnDamage = 'previous',
) -> dict[str, HostMetrics]:
  """Decodes all `decode_datasets` with a checkpoint, into `job_log_dir/decoded`; otherwise as `run_eval`."""
  config = use_kept_vocabulary(config, job_log_dir)
  datasets = build_datasets(config.decode_datasets, 'decode_datasets')
  inputs = datasets.inputs
  if not inputs:
    raise ConfigError(
      'decode_datasets(): there is no input to decode; to continue a text, pass --prompt, or --prompt_ids'
    )
  model = restore_model(
    config,
    job_log_dir,
    functools.partial(SingleTask.create_mesh, devices=devices),
    step=step,
    use_ema='decode',
    seed=seed,
    on_damage=on_damage,
    check=functools.partial(datasets.check, inputs),
  )
  with job_directory(job_log_dir) as directory:
    return _run([DecodeProgram(model.tasks, i, model.key, directory) for i in inputs], model)


def decode_prompts(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  prompts: Sequence[Sequence[int]],
  *,
  devices: Sequence[jax.Device] | None = None,
  step: Step = None,
  seed: int = 0,
  on_damage: OnDamage = 'previous',
) -> list[list[int]]:
  """Returns the tokens that follow each prompt.

  Args:
    config: configs of the task; its model has a `decode` that takes `ids` [B, P] and `prompt_lengths` [B].
    prompts: token ids, at least one each.
    job_log_dir, devices, step, seed, on_damage: as for `run_eval`, and so are the errors; or ConfigError if a prompt is
      empty.
  """
  prompt_batch(prompts)  # Raises before anything slow.
  model = restore_model(
    config,
    job_log_dir,
    functools.partial(SingleTask.create_mesh, devices=devices),
    step=step,
    use_ema='decode',
    seed=seed,
    on_damage=on_damage,
    meanwhile=lambda model: model.begin_to_compile_decode(prompts),
  )
  return model.decode(prompts)


def _run(programs: Sequence[Program], model: TrainedModel) -> dict[str, HostMetrics]:
  metrics: dict[str, HostMetrics] = {}
  for program in programs:
    result = program.run(model.stored_variables, model.global_step)
    assert result is not None  # Nothing interrupts it.
    metrics[program.split] = result.metrics
    if is_primary_process():
      print(printable(program.result_line(model.step, result)), flush=True)
  return metrics
