"""How initial values and updates of a weight depend on widths: the maximal update parametrisation.

A weight is compared with the same weight of a smaller model. A fan that differs is a width, which may grow without
limit; an equal fan is not a width. Let n be the ratio of the fan in to the smaller model's fan in. Then, relative to
the smaller model, initial values and updates are multiplied by

    kind     fan in   fan out   initial values   an entry of the update
    input    equal    grows     1                1
    hidden   grows    grows     n^-1/2           n^-1
    output   grows    equal     n^-1             n^-1

(Yang et al., 2022, Tensor Programs V). So activations, and their changes in a step, keep their size in all layers.
Vectors, such as biases and scales of norms, and tables of embeddings, whose fan in is the number of ids, are inputs.
In a stack with d times as many layers, residual branches are multiplied by d^-a, and updates also by d^(a-1). Here a is
`Growth.depth_exponent` (Yang et al., 2023, Tensor Programs VI; Dey et al., 2025).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from praxis_lite.sharding.weights import Growth, WeightHParams, WeightHParamsCollection, WeightInit, init_magnitude


class FanGrowth(NamedTuple):
  """How much a weight's fan in and fan out have grown: each divided by that of the same weight in the smaller model."""

  fan_in: float
  fan_out: float

  @property
  def kind(self) -> str:
    """'hidden' if both fans differ, 'output' if only fan in does, 'input' if only fan out does, otherwise 'equal'."""
    if self.fan_in != 1:
      return 'output' if self.fan_out == 1 else 'hidden'
    return 'equal' if self.fan_out == 1 else 'input'


def fan_growth(weight: WeightHParams) -> FanGrowth:
  """Returns how much a weight's fans have grown since the smaller model; 1 and 1 if there is no smaller model."""
  if weight.growth is None or weight.growth.base_shape == weight.shape:
    return FanGrowth(1.0, 1.0)
  here, there = fan_sizes(weight)
  fans = FanGrowth(here[0] / there[0], here[1] / there[1])
  if fans.kind == 'equal':  # There are more blocks or channels, each as large as before.
    return FanGrowth(1.0, math.prod(weight.shape) / math.prod(weight.growth.base_shape))
  return fans


def fan_sizes(weight: WeightHParams) -> tuple[tuple[int, int], tuple[int, int]]:
  """Returns two pairs (fan in, fan out): one of a weight, and one of the same weight in the smaller model."""
  shapes = (weight.shape, weight.shape if weight.growth is None else weight.growth.base_shape)
  axes_in, axes_out = _fan_axes(weight)
  here, there = ((math.prod(s[a] for a in axes_in), math.prod(s[a] for a in axes_out)) for s in shapes)
  return here, there


def update_ratio(weight: WeightHParams) -> float:
  """Returns the typical size of an entry of the weight's update, divided by that size in the smaller model."""
  return depth_ratio(weight) / fan_growth(weight).fan_in


def init_ratio(weight: WeightHParams) -> float:
  """Returns the standard deviation of initial values, divided by their standard deviation in the smaller model."""
  fans = fan_growth(weight)
  return {'hidden': fans.fan_in**-0.5, 'output': 1 / fans.fan_in}.get(fans.kind, 1.0)


def depth_ratio(weight: WeightHParams) -> float:
  """Returns the part of `update_ratio` that is due to more layers."""
  growth = weight.growth
  return 1.0 if growth is None else growth.depth ** (growth.depth_exponent - 1)


def grow_weight(weight: WeightHParams, base: WeightHParams, depth: float, depth_exponent: float) -> WeightHParams:
  """Returns `weight` with its growth from `base`, that of a smaller model, and initial values scaled accordingly."""
  grown = dataclasses.replace(weight, growth=Growth(base.shape, depth, depth_exponent))
  own, there = init_magnitude(weight), init_magnitude(base)
  if own and there and isinstance(weight.init, WeightInit):
    scale = weight.init.scale * (there * init_ratio(grown) / own)
    grown = dataclasses.replace(grown, init=dataclasses.replace(weight.init, scale=scale))
  return grown


def _fan_axes(weight: WeightHParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the axes of a weight's inputs and of its outputs; in a table of embeddings, ids are inputs."""
  rank = len(weight.shape)
  if weight.fan_in_axes is not None and weight.fan_out_axes is not None:
    inputs, outputs = (tuple(axis % rank for axis in axes) for axes in (weight.fan_in_axes, weight.fan_out_axes))
    return ((0,), (1,)) if (inputs, outputs) == ((1,), (0,)) else (inputs, outputs)
  if rank < 2 or WeightHParamsCollection.SKIP_REGULARIZATION in weight.collections:
    return (), tuple(range(rank))
  return tuple(range(rank - 1)), (rank - 1,)
