"""Language modelling: predict the next token."""

from __future__ import annotations

from typing import Any

import optax

from praxis_lite.config import Config, template
from praxis_lite.learning import Learner, LinearWarmupCosine
from praxis_lite.models import LanguageModel
from praxis_lite.task import SingleTask, TrainParams


def adamw_learner(learning_rate: float = 1e-3, warmup_steps: int = 100, weight_decay: float = 0.1) -> Config:
  """AdamW with a linear warm-up, half a cosine down to a tenth at the end of the run, and clipping by global norm 1."""
  return Config(
    Learner,
    optimizer=Config(optax.adamw, b1=0.9, b2=0.95, weight_decay=weight_decay),
    learning_rate=learning_rate,
    schedule=Config(LinearWarmupCosine, warmup_steps=warmup_steps),
    clip_gradient_norm_to_value=1.0,
  )


class LanguageModelTask(SingleTask):
  """A language model trained with AdamW."""

  name: str = 'lm'
  model: Any = template(LanguageModel)
  train: Any = template(TrainParams, learner=adamw_learner())
