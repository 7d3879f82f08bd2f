"""Image classification."""

from __future__ import annotations

from praxis_lite.common.config import template
from praxis_lite.models import BaseModel, ClassificationModel
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training.task import SingleTask, TrainParams


class ImageClassificationTask(SingleTask):
  """A classifier of images trained with AdamW."""

  name: str = 'classifier'
  model: BaseModel = template(ClassificationModel)
  train: TrainParams = template(TrainParams, learner=adamw_learner(warmup_steps=50, weight_decay=1e-2))
