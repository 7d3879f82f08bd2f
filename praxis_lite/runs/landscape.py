"""Slices of the loss landscape: the loss of a loaded model along directions in the space of its weights.

A random direction d is scaled, unit by unit, to the norms of the weights (filter normalization; Li et al., 2018), so a
distance of 1 changes each unit by its own norm:

    d = d |w| / |d|        for each output of a matrix; 0 for vectors, such as biases and scales of norms

The loss is evaluated at w + t d, or on a plane at w + t d + s e. A direction may also be the difference to another
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from praxis_lite.common.errors import UserError, did_you_mean
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path, node_at, path_name
from praxis_lite.runs.evaluated_dataset import find_dataset
from praxis_lite.runs.programs import EvalProgram
from praxis_lite.training.learning.clipping import unit_norms

if TYPE_CHECKING:
  from praxis_lite.common.config import Config
  from praxis_lite.inputs import BaseInput
  from praxis_lite.runs.trained import TrainedModel


def loss_slice(
  model: TrainedModel,
  dataset: str | int | Config | BaseInput,
  *distances: Sequence[float],
  seed: int = 0,
  toward: TrainedModel | None = None,
  metric: str = 'loss',
) -> np.ndarray:
  """Returns a metric of a dataset at n distances along a direction, float64 [n], or at n x m points of a plane, [n, m].

  Args:
    model: a loaded model; distance 0 is this model.
    dataset: see `model.evaluate`; `task.evaluate.max_batches` limits it.
    *distances: the distances along the first direction, and for a plane the distances along the second one.
    seed: the seed of the random directions.
    toward: a model with variables of the same shapes, at distance 1 along the first direction; None takes a random
      direction.
    metric: the name of the metric.

  Raises:
    UserError: there is no such dataset or metric, a distance is not a finite number, or the variables of the models
      differ in name or shape.
  """
  if not 1 <= len(distances) <= 2:
    raise UserError(f'loss_slice: expected distances along one or two directions, got {len(distances)}')
  along = [_distances(each) for each in distances]
  rng = np.random.default_rng(seed)
  directions = [random_direction(model, rng) for _ in distances]
  if toward is not None:
    directions[0] = _direction_to(model, toward)
  program = EvalProgram(model.tasks, find_dataset(model.config.datasets, dataset), model.key)

  def evaluate(place: tuple[float, ...]) -> float:
    def move(path: Path, x: np.ndarray) -> np.ndarray:
      moves = [t * np.float64(node_at(d, path)) for t, d in zip(place, directions) if t and path in known]
      return (np.float64(x) + sum(moves)).astype(x.dtype) if moves else x

    stored = model.tasks.layout.mdl_vars.to_mesh(map_with_path(move, model.variables))
    result = program.run(stored, model.global_step)
    if result is None or metric not in result.metrics:
      names = result.metrics if result is not None else {}
      raise UserError(f'loss_slice: there is no metric {metric!r}.{did_you_mean(metric, names)}')
    return float(result.metrics[metric])

  known = leaves(directions[0]).keys()
  places = np.meshgrid(*along, indexing='ij')
  points = [evaluate(tuple(map(float, place))) for place in zip(*map(np.ravel, places))]
  return np.reshape(points, places[0].shape)


def random_direction(model: TrainedModel, rng: np.random.Generator) -> NestedDict:
  """Returns a random direction for the trained variables, as NumPy arrays.

  Each unit of the direction has the norm of the same unit of the variable; vectors and scalars are 0.
  """
  learner, declared = model.tasks.jax_task.bind_learner(), leaves(model.layer.abstract_init())

  def direction(path: Path, x: np.ndarray) -> np.ndarray:
    weight, x = declared[path], np.asarray(x, np.float64)
    drawn = rng.standard_normal(x.shape)
    return drawn * unit_norms(x, weight) / unit_norms(drawn, weight) if len(weight.shape) > 1 else np.zeros_like(x)

  return map_with_path(direction, learner.select_trained(model.variables))


def _distances(given: Sequence[float]) -> np.ndarray:
  try:
    distances = np.asarray(given, np.float64)
  except (TypeError, ValueError):
    distances = np.zeros(())
  if distances.ndim != 1 or not distances.size or not np.isfinite(distances).all():
    raise UserError(
      f'loss_slice: expected distances as a list of finite numbers, such as (-0.5, 0.0, 0.5), got {given!r}'
    )
  return distances


def _direction_to(model: TrainedModel, other: TrainedModel) -> NestedDict:
  mine, theirs = leaves(model.variables), leaves(other.variables)
  for path, x in mine.items():
    if path not in theirs or np.shape(theirs[path]) != np.shape(x):
      raise UserError(f'loss_slice(toward=...): the other model has no {path_name(path)} of shape {np.shape(x)}')
  trained = model.tasks.jax_task.bind_learner().select_trained(model.variables)
  return map_with_path(lambda path, x: np.float64(theirs[path]) - np.float64(x), trained)
