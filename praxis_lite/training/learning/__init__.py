"""Learning: how a gradient changes the variables, with any optax optimizer."""

from praxis_lite.training.learning.base_learner import BaseLearner, LearnerUpdate
from praxis_lite.training.learning.cautious_optimizer import cautious
from praxis_lite.training.learning.composed_schedules import CycleSchedule, PiecewiseSchedule
from praxis_lite.training.learning.layer_decay import LayerDecay
from praxis_lite.training.learning.learner import Learner
from praxis_lite.training.learning.learner_rule import LearnerRule
from praxis_lite.training.learning.mars_optimizer import mars
from praxis_lite.training.learning.multi_learner import MultiLearner
from praxis_lite.training.learning.muon_optimizer import muon
from praxis_lite.training.learning.praxis_adafactor import adafactor
from praxis_lite.training.learning.schedules import (
  BaseSchedule,
  Constant,
  ContinuousSchedule,
  Cosine,
  DelayedCosine,
  Exponential,
  LinearRamp,
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
from praxis_lite.training.learning.shampoo_optimizer import shampoo
from praxis_lite.training.learning.soap_optimizer import soap
from praxis_lite.training.learning.sophia_optimizer import sophia

__all__ = [
  'BaseLearner',
  'BaseSchedule',
  'Constant',
  'ContinuousSchedule',
  'Cosine',
  'CycleSchedule',
  'DelayedCosine',
  'Exponential',
  'LayerDecay',
  'Learner',
  'LearnerRule',
  'LearnerUpdate',
  'LinearRamp',
  'LinearWarmupCosine',
  'LinearWarmupExponentialDecay',
  'LinearWarmupPiecewiseConstant',
  'LinearWarmupPolynomialDecay',
  'LinearWarmupSqrtDecay',
  'MultiLearner',
  'PiecewiseConstant',
  'PiecewiseSchedule',
  'Polynomial',
  'SqrtDecay',
  'Transformer',
  'adafactor',
  'cautious',
  'mars',
  'muon',
  'shampoo',
  'soap',
  'sophia',
]
