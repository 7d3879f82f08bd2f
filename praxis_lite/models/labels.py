"""Labels that a model has no class for: JAX may compute with another class in their place, without an error."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves, path_name
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import Layer
from praxis_lite.layers.softmax import FullSoftmax


def check_labels(
  data: BaseInput, labels: Mapping[str, np.ndarray], rows: NestedDict, classes: str, size: int, remedy: str = ''
) -> None:
  """Raises ConfigError if a label that weighs something is not in [0, V).

  Args:
    data: the input they are from.
    labels: integer arrays, [B, ...], by name.
    rows: what they are part of; its `weights` [B, ...] are those of the labels.
    classes, size: what says V, as a message names it; V.
    remedy: the end of the message.
  """
  for name, x in labels.items():
    bad = ((x < 0) | (x >= size)) & (_weights_of(x, rows) != 0)
    if bad.any():
      raise ConfigError(
        f'{data.label}: found {x[bad][0]} in {name!r}, but {classes} is {size}; all must be from 0 to {size - 1}, or '
        f'have weight 0{remedy}'
      )


def labels_in(rows: NestedDict) -> dict[str, np.ndarray]:
  """Returns the arrays of integers that are labels, by their names."""
  arrays = {path_name(path): np.asarray(x) for path, x in leaves(rows).items()}
  return {
    name: x
    for name, x in arrays.items()
    if x.dtype.kind in 'iu' and x.size and (name == 'y' or 'label' in name or 'target' in name)
  }


def number_of_classes(model: Layer) -> tuple[str, int] | None:
  """Returns what says how many classes the labels of a model have, and how many; None if nothing does.

  That is a field `num_classes` of the model, or that of its softmax layer with the most: what it has no class for, none
  has.
  """
  own = getattr(model, 'num_classes', None)
  if isinstance(own, int):
    return 'task.model.num_classes', own
  softmaxes = [layer for layer in model.descendants() if isinstance(layer, FullSoftmax)]
  largest = max(softmaxes, key=lambda layer: layer.num_classes, default=None)
  return None if largest is None else (f'{largest.path_name}.num_classes', largest.num_classes)


def _weights_of(labels: np.ndarray, rows: NestedDict) -> np.ndarray:
  """The weights of the rows, made to broadcast with labels; 1 where they are not those of labels."""
  weights = np.asarray(rows.get('weights', 1.0))
  if weights.shape != labels.shape[: weights.ndim]:
    return np.ones(())
  return weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim))
