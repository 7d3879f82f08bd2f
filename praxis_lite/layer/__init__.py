"""Layer: a tree of hyperparameters that declares variables and computes."""

from praxis_lite.layer.base import Layer
from praxis_lite.layer.splits import ActivationSplit, SplitMapping, WeightSplit
