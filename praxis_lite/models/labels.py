"""Checks for labels that are not a class of the model; JAX would silently compute with another class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import NestedDict, leaves, path_name
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import Layer
from praxis_lite.layers.softmax import FullSoftmax


class IdLimit(NamedTuple):
  """Which integers are valid in an array of a batch that indexes a table of the model."""

  size: int  # The number of entries of the table; valid integers are 0 to size - 1.
  what: str  # A description of the table for messages, such as 'the model has classes 0 to 9'.
  counted_by: str = 'weights'  # Name of an array of the batch. Where it is 0, integers are not checked.
  # Name of an array, [B], which says how many integers at the beginning of each row are checked. It is used if the
  # batch has no array `counted_by`.
  lengths: str | None = None

  def missing_ids(self, name: str, rows: NestedDict) -> np.ndarray:
    """Returns the integers of the batch's array `name` that are checked, but not in the table; [] without the array."""
    x = np.asarray(rows.get(name, ()))
    counts = _weights_of(x, rows, self.counted_by) != 0
    if x.ndim > 1 and rows.get(self.counted_by) is None and self.lengths is not None and self.lengths in rows:
      counts = np.arange(x.shape[1]) < np.asarray(rows[self.lengths])[:, None]
    missing: np.ndarray = x[((x < 0) | (x >= self.size)) & counts]
    return missing


def check_ids_in_tables(limits: Mapping[str, IdLimit], rows: NestedDict) -> None:
  """Raises DataError if a batch has an integer that a table of the model lacks; the integer's vector would be NaN.

  `limits` is the result of `BaseModel.id_limits`. Arrays that the batch lacks are not checked.
  """
  for name, limit in limits.items():
    if len(missing := limit.missing_ids(name, rows)):
      raise DataError(f'{name} {missing[0]}: {limit.what}')


def check_labels(
  data: BaseInput, labels: Mapping[str, np.ndarray], rows: NestedDict, classes: str, size: int, remedy: str = ''
) -> None:
  """Raises ConfigError if a label with nonzero weight is not in [0, `size`).

  `labels` are integer arrays, [B, ...], by name, and `rows` is the batch that contains their `weights`. `classes` is
  the path of the field that sets the number of classes, and `remedy` is the end of the message.
  """
  for name, x in labels.items():
    bad = ((x < 0) | (x >= size)) & (_weights_of(x, rows) != 0)
    if bad.any():
      raise ConfigError(
        f'{data.label}: found {x[bad][0]} in {name!r}, but {classes} is {size}; all must be from 0 to {size - 1}, or '
        f'have weight 0{remedy}'
      )


def labels_in(rows: NestedDict) -> dict[str, np.ndarray]:
  """Returns the nonempty integer arrays named `y`, or with 'label' or 'target' in their names."""
  arrays = {path_name(path): np.asarray(x) for path, x in leaves(rows).items()}
  return {
    name: x
    for name, x in arrays.items()
    if x.dtype.kind in 'iu' and x.size and (name == 'y' or 'label' in name or 'target' in name)
  }


def number_of_classes(model: Layer) -> tuple[str, int] | None:
  """Returns the path of the field that sets the number of classes, and the number; None if it is unknown.

  The field is `num_classes` of the model, or else of its softmax layer with the most classes: a label that is too large
  for this layer is too large for all.
  """
  own = getattr(model, 'num_classes', None)
  if isinstance(own, int):
    return 'task.model.num_classes', own
  softmaxes = [layer for layer in model.descendants() if isinstance(layer, FullSoftmax)]
  largest = max(softmaxes, key=lambda layer: layer.num_classes, default=None)
  return None if largest is None else (f'{largest.path_name}.num_classes', largest.num_classes)


def _weights_of(labels: np.ndarray, rows: NestedDict, name: str = 'weights') -> np.ndarray:
  """Returns the array `name` of a batch, reshaped to broadcast with `labels`; 1 if it is missing or does not fit."""
  weights = np.asarray(rows.get(name, 1.0))
  if weights.shape != labels.shape[: weights.ndim]:
    return np.ones(())
  return weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim))


def check_images(data: BaseInput, batch: NestedDict, name: str, expected: tuple[int, ...]) -> None:
  """Raises a `ConfigError` if a batch has no images in its array `name`, or if they are not [B, *expected]."""
  shape = np.shape(batch.get(name, 0))
  if shape[1:] != expected:
    raise ConfigError(
      f'{data.label}: expected images [B, {", ".join(map(str, expected))}] in {name!r}, which task.model.input_name '
      f'names, got {list(shape) if name in batch else f"only {list(batch)}"}'
    )
