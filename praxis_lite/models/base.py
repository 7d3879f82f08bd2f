"""BaseModel: a layer that computes a loss from a batch, and continuations from prompts.

A batch is a dict of arrays with the batch as dimension 0. Its leaf `weights`, [B] or [B, T], is the weight of each
example or token; weight zero marks padding, which influences nothing, statistics included.

B batch, T length.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from praxis_lite.errors import ConfigError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layer import Layer
from praxis_lite.trees import NestedDict
from praxis_lite.weighted import WeightedScalars

PredictionsT = TypeVar('PredictionsT')


class BaseModel(Layer, Generic[PredictionsT]):
  """What a task trains and evaluates: subclasses define the first two methods, and `decode` if they decode."""

  def compute_predictions(self, batch: NestedDict) -> PredictionsT:
    """Returns what the loss is computed from, such as logits: any tree of arrays."""
    raise NotImplementedError(f'{type(self).__name__}.compute_predictions')

  def compute_loss(self, predictions: PredictionsT, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns (metrics, per-example outputs) of what `compute_predictions` returned for the same batch.

    Metrics are (mean, weight) by name; `loss`, which is trained on, is among them. Per-example outputs are a dict of
    arrays with the batch as dimension 0.
    """
    raise NotImplementedError(f'{type(self).__name__}.compute_loss')

  def __call__(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs of `compute_loss` for a batch."""
    return self.compute_loss(self.compute_predictions(batch), batch)

  def predict(self, batch: NestedDict) -> Any:
    """Returns what a user of the trained model wants to know of a batch: a tree of arrays, the batch as dimension 0.

    By default that is the result of `compute_predictions`. Models whose predictions need the labels, or hold more than
    a user wants, define it.
    """
    return self.compute_predictions(batch)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `UserError` if this model cannot use the input `data`, whose first batch is `batch`, NumPy arrays.

    Called on the host before anything is compiled, for errors that shapes do not show, such as ids out of bounds: JAX
    reads another entry in their place, without an error.
    """

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns (metrics, decoded outputs), the latter a dict of arrays with the batch as dimension 0.

    Raises:
      ConfigError: this model does not decode.
    """
    raise ConfigError(f'task.model: {type(self).__name__} has no method decode(batch), so it cannot decode')
