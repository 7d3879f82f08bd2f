"""Masked language modelling: predict hidden tokens of a text."""

from __future__ import annotations

from praxis_lite.common.config import template
from praxis_lite.models import BaseModel, MaskedLanguageModel
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training.task import SingleTask, TrainParams


class MaskedLanguageModelTask(SingleTask):
  """A masked language model trained with AdamW."""

  name: str = 'masked_lm'
  model: BaseModel = template(MaskedLanguageModel)
  train: TrainParams = template(TrainParams, learner=adamw_learner())
