"""Learning: how a gradient changes the variables, with any optax optimizer."""

from praxis_lite.training.learning.base_learner import BaseLearner as BaseLearner, LearnerUpdate as LearnerUpdate
from praxis_lite.training.learning.cautious_optimizer import cautious as cautious
from praxis_lite.training.learning.composed_schedules import (
  CycleSchedule as CycleSchedule,
  PiecewiseSchedule as PiecewiseSchedule,
)
from praxis_lite.training.learning.layer_decay import LayerDecay as LayerDecay
from praxis_lite.training.learning.learner import Learner as Learner
from praxis_lite.training.learning.learner_rule import LearnerRule as LearnerRule
from praxis_lite.training.learning.mars_optimizer import mars as mars
from praxis_lite.training.learning.multi_learner import MultiLearner as MultiLearner
from praxis_lite.training.learning.muon_optimizer import muon as muon
from praxis_lite.training.learning.praxis_adafactor import adafactor as adafactor
from praxis_lite.training.learning.schedules import (
  BaseSchedule as BaseSchedule,
  Constant as Constant,
  ContinuousSchedule as ContinuousSchedule,
  Cosine as Cosine,
  DelayedCosine as DelayedCosine,
  Exponential as Exponential,
  LinearRamp as LinearRamp,
  LinearWarmupCosine as LinearWarmupCosine,
  LinearWarmupExponentialDecay as LinearWarmupExponentialDecay,
  LinearWarmupPiecewiseConstant as LinearWarmupPiecewiseConstant,
  LinearWarmupPolynomialDecay as LinearWarmupPolynomialDecay,
  LinearWarmupSqrtDecay as LinearWarmupSqrtDecay,
  PiecewiseConstant as PiecewiseConstant,
  Polynomial as Polynomial,
  SqrtDecay as SqrtDecay,
  Transformer as Transformer,
)
from praxis_lite.training.learning.shampoo_optimizer import shampoo as shampoo
from praxis_lite.training.learning.soap_optimizer import soap as soap
