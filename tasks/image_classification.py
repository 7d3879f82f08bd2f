"""Image classification."""

from __future__ import annotations

from typing import Any

import optax

from praxis_lite.config import Config, template
from praxis_lite.learning import Learner, LinearWarmupCosine
from praxis_lite.models import ClassificationModel
from praxis_lite.task import SingleTask, TrainParams


def adamw_learner(learning_rate: float = 1e-3, warmup_steps: int = 50, weight_decay: float = 1e-2) -> Config:
  """AdamW with a linear warm-up and half a cosine down to a tenth at the end of the run."""
  return Config(
    Learner,
    optimizer=Config(optax.adamw, weight_decay=weight_decay),
    learning_rate=learning_rate,
    schedule=Config(LinearWarmupCosine, warmup_steps=warmup_steps),
  )


class ImageClassificationTask(SingleTask):
  """A classifier of images trained with AdamW."""

  name: str = 'classifier'
  model: Any = template(ClassificationModel)
  train: Any = template(TrainParams, learner=adamw_learner())
