"""Averages of variables over training whose width is a fraction of the run, and how to combine them to other widths.

The weight of step t in the average after T steps is (g + 1) t^g / T^(g + 1) (Karras et al., 2024). With these weights,
the standard deviation of t is a fixed fraction of T, the *relative width*:

    width^2 = (g + 1) / ((g + 2)^2 (g + 3))             0.05 -> g = 16.97;  0.1 -> g = 6.94
    average = average + (1 - (1 - 1/t)^(g + 1)) (variable - average)          t = 1, 2, ...

A run keeps one or two averages. After the run, an average of another width is approximated by the sum of f_i times
average i, over the averages in all checkpoints. Let q_i be the weights of average i, and p the weights of the average
of the other width, as functions of t. Then the factors f_i are those for which

    sum_i f_i = 1,  so that variables that were constant keep their values, and
    |p - sum_i f_i q_i| is as small as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict

_WIDEST = 0.28  # Just below 12^-1/2, the width of the mean of all steps (g = 0).


def check_widths(widths: Sequence[float], where: str = 'learner.power_averages') -> None:
  """Raises ConfigError unless `widths` are relative widths that all differ."""
  if not isinstance(widths, tuple | list) or any(not 0 < width <= _WIDEST for width in widths):
    expected = f'relative widths above 0 and at most {_WIDEST}, as in (0.05, 0.1)'
    raise ConfigError(f'{where}: expected {expected}, got {widths}')
  if len({*widths}) < len(widths):
    raise ConfigError(f'{where}: expected different widths, got {widths}')


def exponent_of(width: float) -> float:
  """Returns the exponent g of a relative width."""
  inverse = width**-2
  return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


def start_averages(variables: NestedDict, widths: Sequence[float]) -> dict[str, NestedDict]:
  """Returns the averages before the first step: for each width, by its index as text, the variables in float32."""
  return {str(i): jax.tree.map(lambda v: v.astype(jnp.float32), variables) for i in range(len(widths))}


def update_averages(
  averages: dict[str, NestedDict], variables: NestedDict, widths: Sequence[float], step: jax.Array
) -> dict[str, NestedDict]:
  """Returns the averages after step `step`, counted from 0; `variables` are the values after this step."""
  t = step.astype(jnp.float32) + 1.0
  updated = {}
  for i, width in enumerate(widths):
    new = -jnp.expm1((exponent_of(width) + 1.0) * jnp.log1p(-1.0 / t))  # 1 in the first step.
    updated[str(i)] = jax.tree.map(lambda a, v, new=new: a + new * (v.astype(a.dtype) - a), averages[str(i)], variables)
  return updated


def combine_averages(known: Sequence[tuple[int, float]], width: float, step: int) -> tuple[np.ndarray, float]:
  """Returns factors of known averages that approximate the average of another width, and the relative error.

  The factors are float64 [n], and sum to 1. The error is |p - sum_i f_i q_i| / |p|, see the top of this file. `known`
  has the step and the relative width of each known average; none of them is after `step`.
  """
  steps = np.array([at for at, _ in known], np.float64) / step
  exponents = np.array([exponent_of(each) for _, each in known])
  products = _inner_products(steps[:, None], exponents[:, None], steps, exponents)
  end, exponent = np.ones(()), np.asarray(exponent_of(width))
  target = _inner_products(steps, exponents, end, exponent)
  # The solution is equal factors plus changes that sum to 0.
  centered = np.eye(len(known)) - 1 / len(known)
  rest = centered @ (target - products.mean(axis=1))
  changes = centered @ np.linalg.lstsq(centered @ products @ centered, rest, rcond=1e-12)[0]
  factors: np.ndarray = 1 / len(known) + changes
  whole = float(_inner_products(end, exponent, end, exponent))
  missed = float(factors @ products @ factors - 2 * factors @ target) + whole
  return factors, math.sqrt(max(0.0, missed) / whole)


def _inner_products(t_a: np.ndarray, g_a: np.ndarray, t_b: np.ndarray, g_b: np.ndarray) -> np.ndarray:
  """Returns the integral over t of weight_a(t) weight_b(t), for averages a and b after t_a and t_b steps."""
  least, most = np.minimum(t_a, t_b), np.maximum(t_a, t_b)
  size: np.ndarray = (g_a + 1) * (g_b + 1) / (g_a + g_b + 1) / most
  return size * (least / t_a) ** g_a * (least / t_b) ** g_b
