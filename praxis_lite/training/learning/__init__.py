"""Learning: how a gradient changes the variables, with any optax optimizer."""

from praxis_lite.training.learning.composed_schedules import CycleSchedule, PiecewiseSchedule
from praxis_lite.training.learning.learner import Learner, LearnerUpdate
from praxis_lite.training.learning.schedules import (
  BaseSchedule,
  Constant,
  ContinuousSchedule,
  Cosine,
  DelayedCosine,
  Exponential,
  Linear,
  LinearWarmupCosine,
  LinearWarmupExponentialDecay,
  LinearWarmupPiecewiseConstant,
  LinearWarmupPolynomialDecay,
  LinearWarmupSqrtDecay,
  PiecewiseConstant,
  Polynomial,
  SqrtDecay,
  Transformer,
)

__all__ = [
  'BaseSchedule',
  'Constant',
  'ContinuousSchedule',
  'Cosine',
  'CycleSchedule',
  'DelayedCosine',
  'Exponential',
  'Learner',
  'LearnerUpdate',
  'Linear',
  'LinearWarmupCosine',
  'LinearWarmupExponentialDecay',
  'LinearWarmupPiecewiseConstant',
  'LinearWarmupPolynomialDecay',
  'LinearWarmupSqrtDecay',
  'PiecewiseConstant',
  'PiecewiseSchedule',
  'Polynomial',
  'SqrtDecay',
  'Transformer',
]
