"""Evaluating and decoding a checkpoint without training: on any mesh, without the optimizer; a run may be training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from praxis_lite.errors import ConfigError
from praxis_lite.inputs import BaseInput
from praxis_lite.runtime.checkpoints import Checkpointer
from praxis_lite.runtime.datasets import Datasets, build_datasets
from praxis_lite.runtime.distributed import is_primary_process
from praxis_lite.runtime.job_dir import job_directory
from praxis_lite.runtime.metrics import HostMetrics
from praxis_lite.runtime.program_schedule import Program, result_line
from praxis_lite.runtime.programs import DecodeProgram, EvalProgram, PartitionedTasks
from praxis_lite.runtime.run_config import RunConfig, run_keys
from praxis_lite.runtime.variables import restore_variables


def run_eval(
  config: RunConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  step: int | None = None,
  seed: int = 0,
) -> dict[str, HostMetrics]:
  """Evaluates a checkpoint on all evaluation inputs and prints the metrics.

  Args:
    config: configs of the task and its datasets.
    job_log_dir: directory of the run.
    devices: the devices to build the mesh from; all by default.
    step: which checkpoint; None is the newest.
    seed: for models that draw while they evaluate.

  Returns:
    The metrics by split and name.

  Raises:
    UserError: the config, the data, or the checkpoint will not do, or there is none.
  """
  datasets = build_datasets(config.datasets)
  inputs = datasets.evaluation
  if not inputs:
    raise ConfigError('datasets(): there is no input with is_training=False to evaluate on')
  model = restore_for_inference(config, job_log_dir, devices, step, seed, inputs, 'evaluate', datasets)
  settings = model.tasks.jax_task.evaluate
  return _run([EvalProgram(model.tasks.taking(i).eval_step, i, model.key, settings) for i in inputs], model)


def run_decode(
  config: RunConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  step: int | None = None,
  seed: int = 0,
) -> dict[str, HostMetrics]:
  """Decodes all `decode_datasets` with a checkpoint, into `job_log_dir/decoded`; otherwise as `run_eval`."""
  datasets = build_datasets(config.decode_datasets, 'decode_datasets')
  inputs = datasets.inputs
  if not inputs:
    raise ConfigError('decode_datasets(): there is no input to decode; to continue a text, pass --prompt')
  model = restore_for_inference(config, job_log_dir, devices, step, seed, inputs, 'decode', datasets)
  settings = model.tasks.jax_task.decode
  with job_directory(job_log_dir) as directory:
    programs = [DecodeProgram(model.tasks.taking(i).decode_step, i, model.key, settings, directory) for i in inputs]
    return _run(programs, model)


class RestoredModel(NamedTuple):
  """A model ready to run: its steps, its variables and the step of its checkpoint, and a key to draw with."""

  tasks: PartitionedTasks
  variables: Any
  step: jax.Array
  key: jax.Array


def restore_for_inference(
  config: RunConfig,
  job_log_dir: str | Path,
  devices: Sequence[jax.Device] | None,
  step: int | None,
  seed: int,
  inputs: Sequence[BaseInput],
  section: str,
  datasets: Datasets | None = None,
) -> RestoredModel:
  """Restores a checkpoint for the batches of `inputs`; `section` of the task, 'evaluate' or 'decode', says of what.

  Where `datasets` are given, which the inputs are from, they are checked before anything slow.
  """
  checkpointer = Checkpointer(job_log_dir, read_only=True)
  checkpointer.existing_step(step)  # Before anything slow.
  task = config.task.instantiate()
  tasks = PartitionedTasks(task, task.create_mesh(devices))
  if datasets is not None:
    datasets.check(inputs, task.model)
  use_ema: bool = getattr(task, section).use_ema
  variables, global_step = restore_variables(checkpointer, tasks.taking(inputs[0]), use_ema=use_ema, step=step)
  checkpointer.close()
  return RestoredModel(tasks, variables, global_step, run_keys(seed, tasks.mesh).evaluate)


def _run(programs: Sequence[Program], model: RestoredModel) -> dict[str, HostMetrics]:
  metrics: dict[str, HostMetrics] = {}
  for program in programs:
    result = program.run(model.variables, model.step)
    assert result is not None  # Nothing interrupts it.
    metrics[program.split] = result.metrics
    if is_primary_process():
      print(result_line(int(model.step), program, result), flush=True)
  return metrics
