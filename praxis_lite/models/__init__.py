"""Models: what a task trains."""

from praxis_lite.models.base import BaseModel, WeightedScalars, weighted_mean
from praxis_lite.models.classifier import ClassificationModel

__all__ = ['BaseModel', 'ClassificationModel', 'WeightedScalars', 'weighted_mean']
