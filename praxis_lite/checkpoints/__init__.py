"""Checkpoints of a train state: written whole, read on any mesh."""

from praxis_lite.checkpoints.best import BestCheckpoint
from praxis_lite.checkpoints.checkpointer import (
  Checkpointer,
  OnDamage,
  Step,
  eval_variables,
  restore_variables,
  saved_steps,
)

__all__ = [
  'BestCheckpoint',
  'Checkpointer',
  'OnDamage',
  'Step',
  'eval_variables',
  'restore_variables',
  'saved_steps',
]
