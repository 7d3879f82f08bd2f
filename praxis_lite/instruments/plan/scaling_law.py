"""The scaling law of Hoffmann et al. (2022), fitted to runs: how the loss falls with parameters and tokens.

    L(N, D) = E + A / N^alpha + B / D^beta    N parameters, D tokens; E is the loss that no size goes below

As in that paper, the fit minimizes the Huber loss of log L. It starts at the best exponents of a grid: if alpha and
beta are given, A, B and E follow from a non-negative least squares problem. Ranges come from fits to resampled
residuals (bootstrap).

Training takes C = 6 N D operations. For a given C, the loss is least at (section 3.3 of that paper)

    N = G (C / 6)^(beta / (alpha + beta))     D = (C / 6)^(alpha / (alpha + beta)) / G
    G = (alpha A / (beta B))^(1 / (alpha + beta))
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls

from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import short_number

_LEAST_RUNS = 6  # The law has five constants.
# Limits for the numbers of parameters and those of tokens: how many must differ, and the quotient largest / smallest.
_LEAST_SIZES, _LEAST_SPREAD = 3, 3.0
_SAME_SIZE = 1.05
_MOST_CORRELATED = 0.98  # Limit for the correlation of log N and log D.
_OUTLIER = 0.01  # A larger error of log L counts linearly.
_EXPONENTS = (0.02, 3.0)
_SAMPLES = 200
_RANGE = (0.05, 0.95)
_OPERATIONS = 6.0  # Per parameter and token: two forward, four backward.


class FinishedRun(NamedTuple):
  """A run: the parameters that one token uses, the number of tokens in training, the final loss, and a name."""

  parameters: float
  tokens: float
  loss: float
  name: str = ''

  @property
  def flops(self) -> float:
    """The operations of the run, 6 N D."""
    return _OPERATIONS * self.parameters * self.tokens


class ScalingLaw(NamedTuple):
  """The constants of L(N, D) = irreducible + a / N^alpha + b / D^beta."""

  irreducible: float
  a: float
  alpha: float
  b: float
  beta: float

  def loss(self, parameters: float, tokens: float) -> float:
    """Returns the loss of a model of this many parameters after this many tokens."""
    return self.limit(parameters) + self.b / tokens**self.beta

  def limit(self, parameters: float) -> float:
    """Returns the lowest loss of a model of this many parameters, with an unlimited number of tokens."""
    return self.irreducible + self.a / parameters**self.alpha

  def tokens_for(self, loss: float, parameters: float) -> float:
    """Returns the tokens after which a model has this loss; infinity if it never has."""
    left = loss - self.limit(parameters)
    return (self.b / left) ** (1 / self.beta) if left > 0 else math.inf

  def parameters_for(self, loss: float) -> float:
    """Returns the number of parameters of a model whose `limit` is this loss; infinity if no model has this limit."""
    left = loss - self.irreducible
    return (self.a / left) ** (1 / self.alpha) if left > 0 else math.inf

  @property
  def growth_of_parameters(self) -> float:
    """The exponent a: for compute C, the best number of parameters grows as C^a, and that of tokens as C^(1 - a)."""
    return self.beta / (self.alpha + self.beta)

  def best_size(self, flops: float) -> tuple[float, float, float]:
    """Returns the numbers of parameters and tokens that give the least loss for an amount of compute, and that loss."""
    ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
    parameters = ratio * (flops / _OPERATIONS) ** self.growth_of_parameters
    tokens = flops / _OPERATIONS / parameters
    return parameters, tokens, self.loss(parameters, tokens)


class BestSize(NamedTuple):
  """The model size with the least loss for an amount of compute, with ranges.

  Attributes:
    flops: operations of the whole training.
    parameters, tokens, loss: the size, and its loss by the law.
    of_parameters, of_tokens, of_loss: the ranges of these three that contain 90 % of the fits to resampled losses.
  """

  flops: float
  parameters: float
  tokens: float
  loss: float
  of_parameters: tuple[float, float]
  of_tokens: tuple[float, float]
  of_loss: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class FittedLaw:
  """A law and what it was fitted to.

  Attributes:
    law: the law that fits best.
    runs: the runs that it was fitted to.
    error: root mean square of the law's relative errors for the losses of these runs.
    samples: laws that were fitted to resampled losses of the runs.
  """

  law: ScalingLaw
  runs: tuple[FinishedRun, ...]
  error: float
  samples: tuple[ScalingLaw, ...] = dataclasses.field(repr=False)

  def interval(self, value: Callable[[ScalingLaw], float]) -> tuple[float, float]:
    """Returns the range that contains `value(law)` for 90 % of the samples; its upper end may be infinite."""
    values = sorted(map(value, self.samples))
    low, high = (values[round(share * (len(values) - 1))] for share in _RANGE)
    return low, high

  def best_size(self, flops: float) -> BestSize:
    """Returns the size with the least loss for an amount of compute."""
    best = self.law.best_size(flops)
    ranges = [self.interval(lambda law, i=i: law.best_size(flops)[i]) for i in range(3)]  # type: ignore[misc]
    return BestSize(flops, *best, *((min(low, x), max(high, x)) for x, (low, high) in zip(best, ranges)))


def fit_scaling_law(runs: Sequence[FinishedRun], *, samples: int = _SAMPLES, seed: int = 0) -> FittedLaw:
  """Returns the law that fits the losses of some runs, which were trained on the same data.

  Args:
    runs: at least 6 runs with 3 different numbers of parameters and of tokens.
    samples: number of fits to resampled losses, for ranges.
    seed: seed of the resampling.

  Raises:
    UserError: the runs do not determine the constants of the law.
  """
  check_runs(runs)
  sizes = np.log([[run.parameters, run.tokens] for run in runs])
  losses = np.log([run.loss for run in runs])
  problem = _Problem(sizes - sizes.mean(0))
  best = problem.solve(losses, problem.starts(losses))
  fitted = problem.log_loss(best)
  residuals = losses - fitted
  law = _to_law(best, sizes.mean(0))
  error = float(np.sqrt(np.mean(residuals**2)))
  _check_losses_fall(law, runs, error)
  # Residuals are smaller than the noise, because the 5 constants of the law adapt to it.
  noise = (residuals - residuals.mean()) * math.sqrt(len(runs) / (len(runs) - len(best)))
  random = np.random.default_rng(seed)
  drawn = [problem.solve(fitted + random.choice(noise, len(runs)), [best]) for _ in range(samples)]
  return FittedLaw(law, tuple(runs), error, tuple(_to_law(x, sizes.mean(0)) for x in drawn))


def check_runs(runs: Sequence[FinishedRun]) -> None:
  """Raises UserError if no law can be fitted to these runs."""
  if len(runs) < _LEAST_RUNS:
    raise UserError(f'a law of scaling is fitted to {_LEAST_RUNS} finished runs or more; there are {len(runs)}')
  for run in runs:
    if not all(0 < value < math.inf for value in run[:3]):
      what = f'{run.parameters:g} parameters, {run.tokens:g} tokens and a loss of {run.loss:g}'
      raise UserError(f'a law of scaling needs positive numbers; {run.name or "a run"} has {what}')
  for what in ('parameters', 'tokens'):
    sizes = _distinct_sizes([getattr(run, what) for run in runs])
    if len(sizes) < _LEAST_SIZES or sizes[-1] < _LEAST_SPREAD * sizes[0]:
      raise UserError(
        f'the runs do not tell how the loss falls with {what}: they have {", ".join(map(short_number, sizes))}; train '
        f'with {_LEAST_SIZES} different numbers of {what} or more, the largest {_LEAST_SPREAD:g} times the smallest'
      )
  logs = np.log([run[:2] for run in runs])
  if np.corrcoef(logs.T)[0, 1] > _MOST_CORRELATED:
    raise UserError(
      'the runs do not tell parameters from tokens, because the larger models were trained on proportionally more '
      'tokens; also train some models on fewer or more tokens'
    )


def _distinct_sizes(values: Sequence[float]) -> list[float]:
  """Returns the values in ascending order; of nearly equal ones, only the smallest."""
  found: list[float] = []
  for value in sorted(values):
    if not found or value > _SAME_SIZE * found[-1]:
      found.append(value)
  return found


def _check_losses_fall(law: ScalingLaw, runs: Sequence[FinishedRun], error: float) -> None:
  """Raises UserError if one of the sizes lowers the fitted loss by no more than the scatter of the losses."""
  scatter = 2 * error * min(run.loss for run in runs)
  for what, factor, exponent in (('parameters', law.a, law.alpha), ('tokens', law.b, law.beta)):
    sizes = [getattr(run, what) for run in runs]
    fall = factor / min(sizes) ** exponent - factor / max(sizes) ** exponent
    if fall <= scatter:
      raise UserError(
        f'the losses of the runs do not fall with {what}: from the least to the most {what}, by {fall:.3g}, and they '
        f'scatter by {scatter:.3g}; are all of them trained to the end, on the same data?'
      )


class _Problem:
  """The fitting problem for R runs: `sizes_R2` holds log N and log D of each run, minus their means over the runs.

  A solution is (log A', alpha, log B', beta, log E). A' and B' are A / N^alpha and B / D^beta at the mean sizes.
  """

  def __init__(self, sizes_R2: np.ndarray):
    self._sizes_R2 = sizes_R2

  def starts(self, losses_R: np.ndarray, most: int = 4) -> list[np.ndarray]:
    """Returns the `most` best solutions with exponents on a grid."""
    found = []
    for alpha, beta in itertools.product(np.geomspace(0.05, 1.5, 8), repeat=2):
      terms_R3 = np.exp(np.stack([-alpha * self._sizes_R2[:, 0], -beta * self._sizes_R2[:, 1], 0 * losses_R], 1))
      factors_3, error = nnls(terms_R3 / np.exp(losses_R)[:, None], np.ones_like(losses_R))
      a, b, e = np.log(np.maximum(factors_3, 1e-4 * np.exp(losses_R.min())))
      found.append((error, np.array([a, alpha, b, beta, e])))
    return [start for _, start in sorted(found, key=lambda pair: pair[0])[:most]]

  def solve(self, losses_R: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """Fits the constants once from each of `starts`, and returns those with the least error of log losses."""
    least = losses_R.min() - 14  # The logarithm of a millionth of the smallest loss.
    low = np.array([least, _EXPONENTS[0], least, _EXPONENTS[0], least])
    high = np.array([losses_R.max() + 2, _EXPONENTS[1], losses_R.max() + 2, _EXPONENTS[1], losses_R.max()])
    found = [
      least_squares(
        lambda x: self.log_loss(x) - losses_R,
        np.clip(start, low + 1e-6, high - 1e-6),
        self._jacobian,
        (low, high),
        **{'loss': 'huber', 'f_scale': _OUTLIER, 'x_scale': 'jac', 'xtol': 1e-10, 'ftol': 1e-12, 'gtol': 1e-12},
      )
      for start in starts
    ]
    best: np.ndarray = min(found, key=lambda result: float(result.cost)).x
    return best

  def log_loss(self, x: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the loss of each run, [R]."""
    return np.asarray(np.logaddexp.reduce(self._log_terms(x), axis=1))

  def _log_terms(self, x: np.ndarray) -> np.ndarray:
    a, alpha, b, beta, e = x
    n_R, d_R = self._sizes_R2.T
    return np.stack([a - alpha * n_R, b - beta * d_R, np.full_like(n_R, e)], 1)

  def _jacobian(self, x: np.ndarray) -> np.ndarray:
    """Returns the derivatives of `log_loss`, [R, 5]: a term's share of the loss times the derivative of its log."""
    shares_R3 = np.exp(self._log_terms(x) - self.log_loss(x)[:, None])
    of_n, of_d, of_e = shares_R3.T
    n_R, d_R = self._sizes_R2.T
    return np.stack([of_n, -n_R * of_n, of_d, -d_R * of_d, of_e], 1)


def _to_law(x: np.ndarray, means_2: np.ndarray) -> ScalingLaw:
  """Returns the law of a solution; `means_2` are the means of log N and log D, which `_Problem` does not know."""
  a, alpha, b, beta, e = map(float, x)
  n, d = map(float, means_2)
  return ScalingLaw(math.exp(e), math.exp(a + alpha * n), alpha, math.exp(b + beta * d), beta)
