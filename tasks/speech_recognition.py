"""Speech recognition: write down what is said."""

from __future__ import annotations

from praxis_lite.common.config import template
from praxis_lite.models import BaseModel, CtcModel
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training.task import SingleTask, TrainParams


class SpeechRecognitionTask(SingleTask):
  """A model of speech trained with AdamW."""

  name: str = 'speech'
  model: BaseModel = template(CtcModel)
  train: TrainParams = template(TrainParams, learner=adamw_learner())
