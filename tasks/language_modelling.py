"""Language modelling: predict the next token."""

from __future__ import annotations

from praxis_lite.common.config import template
from praxis_lite.models import BaseModel, LanguageModel
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training.task import SingleTask, TrainParams


class LanguageModelTask(SingleTask):
  """A language model trained with AdamW."""

  name: str = 'lm'
  model: BaseModel = template(LanguageModel)
  train: TrainParams = template(TrainParams, learner=adamw_learner())
