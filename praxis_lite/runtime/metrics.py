"""Averaging metrics over batches on the host, exactly by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

HostMetrics = dict[str, np.ndarray]


class MetricsAverage:
  """Running weighted means of named metrics, in float64.

  A batch contributes `value * weight` to the sum of values and `weight` to the sum of weights, so unequal batches, the
  short last one and the padded rows of each, average as one big batch would. Where the weight is zero the value does
  not count, whatever it is.
  """

  def __init__(self) -> None:
    self._sums: dict[str, np.ndarray] = {}
    self._weights: dict[str, np.ndarray] = {}

  def add(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
    """Adds one batch's (mean, weight) pairs; arrays that layers have stacked are averaged by element."""
    for name, (value, weight) in jax.device_get(dict(metrics)).items():
      values = np.asarray(value, np.float64)
      weights = np.broadcast_to(np.asarray(weight, np.float64), values.shape)
      self._sums[name] = self._sums.get(name, 0.0) + np.where(weights == 0, 0.0, values * weights)
      self._weights[name] = self._weights.get(name, 0.0) + weights

  def means(self) -> HostMetrics:
    """Returns the mean of each metric; NaN where nothing with a weight was added."""
    with np.errstate(invalid='ignore', divide='ignore'):
      return {name: self._sums[name] / self._weights[name] for name in self._sums}

  def weights(self) -> HostMetrics:
    """Returns the total weight of each metric."""
    return dict(self._weights)


def mean_values(metrics: Mapping[str, tuple[Any, Any]]) -> HostMetrics:
  """Returns the values of one step's (mean, weight) pairs, as float64 on the host."""
  return {name: np.asarray(value, np.float64) for name, (value, _) in jax.device_get(dict(metrics)).items()}
