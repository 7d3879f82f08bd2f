"""Evaluating, decoding and continuing prompts with a checkpoint: on any mesh, without the optimizer.

Another process may be training in the same directory meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.experiment import ExperimentConfig
from praxis_lite.inputs import ArrayInput, BaseInput
from praxis_lite.models import BaseModel, LanguageModel
from praxis_lite.runtime.checkpoints import Checkpointer, restore_variables
from praxis_lite.runtime.distributed import is_primary_process
from praxis_lite.runtime.metrics import HostMetrics
from praxis_lite.runtime.programs import DecodeProgram, EvalProgram, Program, TaskOnMesh
from praxis_lite.runtime.run_config import Datasets, build_datasets, job_directory, run_keys
from praxis_lite.runtime.vocabulary import with_vocabulary
from praxis_lite.trees import NestedDict


def run_eval(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  step: int | None = None,
  seed: int = 0,
) -> dict[str, HostMetrics]:
  """Evaluates a checkpoint on all evaluation inputs; prints the metrics and returns them by split and name.

  Args:
    config, job_log_dir, devices: as for `run_train`.
    step: step of the checkpoint; None uses the newest.
    seed: for models that draw random numbers while they evaluate.

  Raises:
    UserError: the config, the data or the checkpoint is not usable, or there is no checkpoint.
  """
  config = with_vocabulary(config, job_log_dir)
  datasets = build_datasets(config.datasets)
  inputs = datasets.evaluation
  if not inputs:
    raise ConfigError('datasets(): there is no input with is_training=False to evaluate on')
  model = _restore(config, job_log_dir, devices, step, seed, inputs, 'evaluate', datasets)
  return _run([EvalProgram(model.tasks, i, model.key) for i in inputs], model)


def run_decode(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  *,
  devices: Sequence[jax.Device] | None = None,
  step: int | None = None,
  seed: int = 0,
) -> dict[str, HostMetrics]:
  """Decodes all `decode_datasets` with a checkpoint, into `job_log_dir/decoded`; otherwise as `run_eval`."""
  config = with_vocabulary(config, job_log_dir)
  datasets = build_datasets(config.decode_datasets, 'decode_datasets')
  if not datasets.inputs:
    raise ConfigError('decode_datasets(): there is no input to decode; to continue a text, pass --prompt')
  model = _restore(config, job_log_dir, devices, step, seed, datasets.inputs, 'decode', datasets)
  with job_directory(job_log_dir) as directory:
    return _run([DecodeProgram(model.tasks, i, model.key, directory) for i in datasets.inputs], model)


# Prompts are padded to a multiple of this, so that prompts of similar lengths share a compiled program.
_LENGTH_MULTIPLE = 16


def decode_prompts(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  prompts: Sequence[Sequence[int]],
  *,
  devices: Sequence[jax.Device] | None = None,
  step: int | None = None,
  seed: int = 0,
) -> list[list[int]]:
  """Returns the tokens that follow each prompt.

  Args:
    config: configs of the task; its model has a `decode` that takes `ids` [B, P] and `prompt_lengths` [B].
    prompts: token ids, at least one each.
    job_log_dir, devices, step, seed: as for `run_eval`, and so are the errors; or ConfigError if a prompt is empty.
  """
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if not lengths.all():
    raise ConfigError('a prompt is empty; it needs at least one token')
  width = -(-int(lengths.max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
  batch = {'ids': np.stack([np.pad(p, (0, width - len(p))) for p in prompts]), 'prompt_lengths': lengths}
  source = ArrayInput(name='prompts', arrays=batch, batch_size=len(prompts))
  model = _restore(config, job_log_dir, devices, step, seed, [source], 'decode')
  _note_cropping(model.tasks.jax_task.model, int(lengths.max()))
  decode_step = model.tasks.taking(source).decode_step
  decoded = jax.device_get(decode_step(model.variables, model.key, model.step, source.get_next()).decoded)
  return [ids[:length].tolist() for ids, length in zip(decoded['ids'], decoded['lengths'])]


def _note_cropping(model: BaseModel, prompt_length: int) -> None:
  """Says on the console if a language model does not see all tokens of its longest prompt and continuation."""
  if not isinstance(model, LanguageModel) or model.context is None or not is_primary_process():
    return
  seen, most = model.context, prompt_length + model.decoder.max_decode_steps - 1
  if most > seen:
    print(f'note: the model sees {seen} tokens at once; of up to {most}, the last {seen}', file=sys.stderr)


class _RestoredModel(NamedTuple):
  """A model ready to run: its steps, its variables, the step of its checkpoint, and a PRNG key."""

  tasks: TaskOnMesh
  variables: NestedDict
  step: jax.Array
  key: jax.Array


def _restore(
  config: ExperimentConfig,
  job_log_dir: str | Path,
  devices: Sequence[jax.Device] | None,
  step: int | None,
  seed: int,
  inputs: Sequence[BaseInput],
  section: Literal['evaluate', 'decode'],
  datasets: Datasets | None = None,
) -> _RestoredModel:
  """Restores a checkpoint for the batches of `inputs`, which are checked if they belong to `datasets`."""
  checkpointer = Checkpointer(job_log_dir, read_only=True)
  checkpointer.existing_step(step)  # Raises before anything slow.
  task = config.task.instantiate()
  tasks = TaskOnMesh(task, task.create_mesh(devices))
  if datasets is not None:
    datasets.check(inputs, task.model)
  use_ema: bool = getattr(task, section).use_ema
  variables, global_step = restore_variables(checkpointer, tasks.taking(inputs[0]), use_ema=use_ema, step=step)
  checkpointer.close()
  return _RestoredModel(tasks, variables, global_step, run_keys(seed, tasks.mesh).evaluate)


def _run(programs: Sequence[Program], model: _RestoredModel) -> dict[str, HostMetrics]:
  metrics: dict[str, HostMetrics] = {}
  for program in programs:
    result = program.run(model.variables, model.step)
    assert result is not None  # Nothing interrupts it.
    metrics[program.split] = result.metrics
    if is_primary_process():
      print(program.result_line(int(model.step), result), flush=True)
  return metrics
