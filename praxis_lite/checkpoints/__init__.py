"""Checkpoints of a train state: each is written completely or not at all, and any mesh can read it."""

from praxis_lite.checkpoints.best import BestCheckpoint as BestCheckpoint
from praxis_lite.checkpoints.checkpointer import (
  Checkpointer as Checkpointer,
  OnDamage as OnDamage,
  Step as Step,
  eval_variables as eval_variables,
  restore_variables as restore_variables,
  saved_steps as saved_steps,
)
