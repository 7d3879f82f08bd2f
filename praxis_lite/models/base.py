"""BaseModel: a layer that turns a batch into a loss, and prompts into decoded outputs.

A batch is a dict of arrays with the batch as dimension 0. Its leaf `weights`, [B] or [B, T], says how much each example
or token counts; what weighs zero is padding and influences nothing, statistics included.

B batch, T length.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.call import NestedDict
from praxis_lite.errors import ConfigError, DataError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layer import Layer
from praxis_lite.partitioning.steps import WeightedScalars


class BaseModel(Layer):
  """What a task trains and evaluates: subclasses define the first two methods, and `decode` if they decode."""

  def compute_predictions(self, batch: NestedDict) -> Any:
    """Returns what the loss is computed from, such as logits: any tree of arrays."""
    raise NotImplementedError(f'{type(self).__name__}.compute_predictions')

  def compute_loss(self, predictions: Any, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns (metrics, per-example outputs).

    Args:
      predictions: what `compute_predictions` returned.
      batch: the same batch.

    Returns:
      Metrics as (mean, weight) by name; `loss`, which is trained on, is among them. Per-example outputs: a dict of
      arrays with the batch as dimension 0.
    """
    raise NotImplementedError(f'{type(self).__name__}.compute_loss')

  def __call__(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs of `compute_loss` for a batch."""
    return self.compute_loss(self.compute_predictions(batch), batch)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `UserError` if this model cannot take the batches of `data`.

    Called on the host before anything is compiled, for what cannot be seen from shapes: JAX reads what is out of
    bounds from somewhere else, and says nothing.

    Args:
      data: the input.
      batch: its first batch, NumPy arrays.
    """

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns (metrics, decoded outputs), the latter a dict of arrays with the batch as dimension 0.

    Raises:
      ConfigError: this model does not decode.
    """
    raise ConfigError(f'task.model: {type(self).__name__} has no method decode(batch), so it cannot decode')


def weighted_mean(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (sum(values * weights) / sum(weights), sum(weights)) in float32: (0, 0) where all weights are zero.

  Values of zero weight may be anything, NaN too. A weight that is NaN makes the mean NaN, so that it shows.

  Args:
    values: any shape.
    weights: the same shape, at least 0.

  Raises:
    DataError: the shapes differ.
  """
  if values.shape != weights.shape:
    raise DataError(
      f'weighted_mean: values {values.shape} have weights {weights.shape}; each value needs one of its own'
    )
  weights = weights.astype(jnp.float32)
  total = jnp.sum(weights)
  weighted = jnp.where(weights == 0, 0.0, values.astype(jnp.float32) * weights)
  return jnp.sum(weighted) / jnp.where(total == 0, 1.0, total), total
