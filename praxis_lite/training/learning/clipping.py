"""Clips gradients: by value, by the norm of each variable, by the norm of its units, and by the global norm.

    by value       each entry g to [-limit, limit]
    by variable    the norm of each variable, or of each layer of a stack, to the limit
    by unit        the norm of each unit of a weight to limit * max(norm of its weights, 1e-3) (AGC; Brock et al., 2021)
    by z-score     the global norm, if its z-score z is above the limit, to mean + limit^2 / z * standard deviation
                   (ZClip; Kumar et al., 2025)
    global         the global norm to the limit

A unit of a matrix is an output, with the entries of all inputs. A unit of an embedding table is a row. A weight without
outputs, such as a bias, is one unit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.trees import NestedDict
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.learning.base_learner import SumParts, clip_to_norm, norm_of, squares_of, squares_of_layers

ArrayT = TypeVar('ArrayT', jax.Array, np.ndarray)

_LEAST_WEIGHT_NORM = 1e-3
_DECAY, _FIRST_STEPS = 0.97, 25  # Decay of the norm statistics, and how many steps at the start are not clipped.


class NormHistory(NamedTuple):
  """The number of past steps, and the mean and variance of the steps' gradient norms after clipping; scalars."""

  num_steps: jax.Array
  mean: jax.Array
  variance: jax.Array

  @classmethod
  def start(cls) -> NormHistory:
    """Returns the history before the first step."""
    return cls(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))

  def limit(self, norm: jax.Array, limit: float) -> jax.Array:
    """Returns the norm, above zero, to which a gradient of norm `norm` is clipped."""
    deviation = jnp.sqrt(self.variance)
    z = (norm - self.mean) / jnp.maximum(deviation, 1e-12)
    lower = self.mean + limit**2 / jnp.maximum(z, limit) * deviation
    return jnp.maximum(jnp.where((z > limit) & (self.num_steps >= _FIRST_STEPS), lower, norm), 1e-30)

  def add(self, norm: jax.Array) -> NormHistory:
    """Returns the history with one more norm; statistics are plain means at first, then moving averages."""
    new = jnp.maximum(1.0 - _DECAY, 1.0 / (self.num_steps + 1.0))
    mean = self.mean + new * (norm - self.mean)
    variance = (1.0 - new) * (self.variance + new * jnp.square(norm - self.mean))
    return NormHistory(self.num_steps + 1, mean, variance)


@dataclasses.dataclass(frozen=True)
class Clipping:
  """The limits of a learner, which are applied in this order; 0 disables a limit."""

  value: float = 0.0
  single_norm: float = 0.0
  unit_ratio: float = 0.0
  z_score: float = 0.0
  norm: float = 0.0

  def clip(
    self,
    gradients: NestedDict,
    norm: jax.Array,
    variables: NestedDict,
    declared: NestedDict,
    sum_parts: SumParts,
    history: NormHistory | None,
  ) -> tuple[NestedDict, NormHistory | None]:
    """Returns (clipped gradients, new history).

    `norm` is the norm of all gradients together. `sum_parts` turns sums over shards into sums over whole variables; it
    is the identity if each device has whole variables. `z_score` needs the history of the steps before.
    """
    original = gradients
    if limit := self.value:
      gradients = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), gradients)
    if single := self.single_norm:
      of_layers = squares_of_layers(gradients, declared, sum_parts)
      gradients = jax.tree.map(lambda g, s: clip_to_norm(g, jnp.sqrt(s), single), gradients, of_layers)
    if ratio := self.unit_ratio:
      gradients = jax.tree.map(lambda g, v, w: _clip_units(g, v, w, ratio), gradients, variables, declared)
    if not (self.z_score or self.norm):
      return gradients, history
    if gradients is not original:
      norm = norm_of(squares_of(gradients, sum_parts))
    if self.z_score and history is not None:
      limited = history.limit(norm, self.z_score)
      gradients = clip_to_norm(gradients, norm, limited)
      history, norm = history.add(limited), limited
    if limit := self.norm:
      gradients = clip_to_norm(gradients, norm, limit)
    return gradients, history


def unit_axes(weight: WeightHParams) -> tuple[int, ...]:
  """Returns the dimensions of a stored variable over which one unit extends; they never include those of a stack."""
  rank, stack = len(weight.shape), len(weight.repeat_prefix)
  inputs = weight.fan_in_axes
  if inputs is None and weight.fan_out_axes is None and rank > 1:
    inputs = tuple(range(rank - 1))
  axes = [axis % rank for axis in inputs or ()] or range(rank)
  return tuple(sorted(stack + axis for axis in axes))


def unit_norms(x: ArrayT, weight: WeightHParams) -> ArrayT:
  """Returns the norm of each unit of `x`, an array of JAX or NumPy; the `unit_axes` of `weight` get size 1."""
  xp: Any = x.__array_namespace__()
  norms: ArrayT = xp.sqrt(xp.sum(xp.square(x), axis=unit_axes(weight), keepdims=True))
  return norms


def _clip_units(gradient: jax.Array, variable: jax.Array, weight: WeightHParams, ratio: float) -> jax.Array:
  norm, of_weights = (unit_norms(x.astype(jnp.float32), weight) for x in (gradient, variable))
  return clip_to_norm(gradient, norm, ratio * jnp.maximum(of_weights, _LEAST_WEIGHT_NORM))
