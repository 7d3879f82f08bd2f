"""Continuing prompts with a checkpoint of a model that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from praxis_lite.errors import ConfigError
from praxis_lite.inputs import ArrayInput
from praxis_lite.runtime.inference import restore_for_inference
from praxis_lite.runtime.run_config import RunConfig

# Prompts are padded to a multiple of this, so that prompts of similar lengths share a compiled program.
_LENGTH_MULTIPLE = 16


def decode_prompts(
  config: RunConfig,
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
    job_log_dir: directory of the run.
    prompts: token ids, at least one each.
    devices: the devices to build the mesh from; all by default.
    step: which checkpoint; None is the newest.
    seed: of what is drawn.

  Raises:
    ConfigError: a prompt is empty.
    UserError: the config or the checkpoint will not do, or there is none.
  """
  batch = _batch(prompts)
  source = ArrayInput(name='prompts', arrays=batch, batch_size=len(prompts))
  model = restore_for_inference(config, job_log_dir, devices, step, seed, [source], 'decode')
  decode_step = model.tasks.taking(source).decode_step
  decoded = jax.device_get(decode_step(model.variables, model.key, model.step, source.get_next()).decoded)
  return [ids[:length].tolist() for ids, length in zip(decoded['ids'], decoded['lengths'])]


def _batch(prompts: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if not lengths.all():
    raise ConfigError('a prompt is empty; it needs one token at least')
  width = -(-int(lengths.max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
  ids = np.zeros((len(prompts), width), np.int32)
  for row, prompt in zip(ids, prompts):
    row[: len(prompt)] = prompt
  return {'ids': ids, 'prompt_lengths': lengths}
