"""Learners that the tasks share."""

from __future__ import annotations

import optax

from praxis_lite.common.config import Config
from praxis_lite.training.learning import Learner, LinearWarmupCosine


def adamw_learner(learning_rate: float = 1e-3, warmup_steps: int = 100, weight_decay: float = 0.1) -> Config:
  """Returns AdamW with clipping by global norm, linear warm-up, then cosine decay to a tenth at the end of the run."""
  return Config(
    Learner,
    optimizer=Config(optax.adamw, b1=0.9, b2=0.95, weight_decay=weight_decay),
    learning_rate=learning_rate,
    schedule=Config(LinearWarmupCosine, warmup_steps=warmup_steps),
    clip_gradient_norm_to_value=1.0,
  )
