"""Sequence to sequence: predict a target from a source."""

from __future__ import annotations

from praxis_lite.common.config import template
from praxis_lite.models import BaseModel, EncoderDecoderModel
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training.task import SingleTask, TrainParams


class SequenceToSequenceTask(SingleTask):
  """An encoder-decoder trained with AdamW."""

  name: str = 'seq2seq'
  model: BaseModel = template(EncoderDecoderModel)
  train: TrainParams = template(TrainParams, learner=adamw_learner())
