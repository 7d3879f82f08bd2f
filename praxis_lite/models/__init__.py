"""Models: what a task trains."""

from praxis_lite.models.base import BaseModel, WeightedScalars, weighted_mean

__all__ = ['BaseModel', 'WeightedScalars', 'weighted_mean']
