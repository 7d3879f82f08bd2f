"""Checkpoints of a train state: each is written completely or not at all, and any mesh can read it."""

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
