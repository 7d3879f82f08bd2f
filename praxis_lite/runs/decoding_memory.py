"""Refuses, before anything is allocated, to decode more tokens than fit into memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from praxis_lite.common.devices import memory_of
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import format_bytes
from praxis_lite.models.base import BaseModel, PromptLimits
from praxis_lite.models.decoding import Bucket

# Bytes of one position of a row: a prompt id, a continuation id and a log-probability.
_BYTES_PER_TOKEN = 12


def check_memory(
  limits: PromptLimits, mesh: Mesh, num_rows: int, max_tokens: int, bucket_of: Callable[[int], Bucket]
) -> None:
  """Raises ConfigError if the caches and tokens of a batch need more memory than the devices of a mesh have together.

  Args:
    bucket_of: returns the sizes of the program, given the largest number of tokens after a prompt.
  """
  there = memory_of(mesh.devices.flat)

  def num_bytes(count: int) -> int:
    bucket = bucket_of(count)
    return limits.state_bytes(num_rows, bucket.slots) + num_rows * bucket.width * _BYTES_PER_TOKEN

  fits = max_tokens
  while fits and num_bytes(fits) > there:
    fits //= 2
  if fits < max_tokens:
    remedy = f'up to {fits:,} fit' if fits else 'decode fewer or shorter prompts at a time, as with batch_size'
    raise ConfigError(
      f'max_tokens (task.model.decoder_tpl.max_decode_steps) = {max_tokens:,}: the caches and tokens of a batch of '
      f'{num_rows} need {format_bytes(num_bytes(max_tokens))}, and there are {format_bytes(there)} of memory; {remedy}'
    )


def check_memory_of_batch(model: BaseModel, mesh: Mesh, batch: Mapping[str, Any]) -> None:
  """Raises ConfigError like `check_memory`, for a batch of prompts that is decoded at its own length.

  The values of `batch` are arrays, or only their shapes.
  """
  limits, shape = model.prompt_limits(), np.shape(batch.get('ids', ()))
  if limits is not None and len(shape) == 2:
    check_memory(limits, mesh, shape[0], limits.max_tokens, functools.partial(_exact_sizes, limits, shape[1]))


def _exact_sizes(limits: PromptLimits, prompt_length: int, max_tokens: int) -> Bucket:
  slots = prompt_length + max_tokens - 1
  return Bucket(slots if limits.context is None else min(slots, limits.context), max(prompt_length, max_tokens))
