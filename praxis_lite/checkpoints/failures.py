"""Decides from an error of Orbax, TensorStore or the disk whether a checkpoint is damaged, or only unreadable now."""

from __future__ import annotations

import jax

from praxis_lite.common.errors import CheckpointError, error_summary

# TensorStore errors that begin with one of these words do not mean that data is damaged.
_NOT_REACHED = ('PERMISSION_DENIED', 'UNAUTHENTICATED', 'RESOURCE_EXHAUSTED', 'UNAVAILABLE', 'DEADLINE_EXCEEDED')


class DamagedError(CheckpointError):
  """A part of a checkpoint is missing or has changed since it was written."""


class PartedError(CheckpointError):
  """A save failed in this process while others wait for it.

  Other failed saves do not end a run; after this one, all processes must stop.
  """


def unreadable(folder: object, error: Exception) -> CheckpointError:
  """Returns the error that says that the checkpoint in `folder` cannot be read; a DamagedError if it is damaged."""
  message = f'{folder} cannot be read ({error_summary(error)})'
  is_for_now = isinstance(error, PermissionError | MemoryError | jax.errors.JaxRuntimeError)
  if is_for_now or str(error).startswith(_NOT_REACHED):
    return CheckpointError(message)
  return DamagedError(f'{message}; remove this folder to use the checkpoint before it, if there is one')
