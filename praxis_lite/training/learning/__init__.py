"""Learning: how a gradient changes the variables, with any optax optimizer."""

from praxis_lite.training.learning.learner import Learner, LearnerUpdate
from praxis_lite.training.learning.schedules import (
  BaseSchedule,
  Constant,
  Cosine,
  Exponential,
  Linear,
  LinearWarmupCosine,
  LinearWarmupExponentialDecay,
  LinearWarmupSqrtDecay,
  PiecewiseConstant,
  Transformer,
)

__all__ = [
  'BaseSchedule',
  'Constant',
  'Cosine',
  'Exponential',
  'Learner',
  'LearnerUpdate',
  'Linear',
  'LinearWarmupCosine',
  'LinearWarmupExponentialDecay',
  'LinearWarmupSqrtDecay',
  'PiecewiseConstant',
  'Transformer',
]
