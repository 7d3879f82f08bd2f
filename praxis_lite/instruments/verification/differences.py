"""Finds which results of two runs of a step differ by more than rounding explains.

The effect of rounding is measured by further runs, from variables with noise; see `verify.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from praxis_lite.instruments.verification.steps import Name, StepResults

# The allowed error is a share of the largest entry, plus a multiple of the change that rounding causes on one device.
_TOLERANCE = 1e-4
_TIMES_NOISE = 30.0
# If rounding changes a result on one device by more than this share of its largest entry, `verify` uses float64.
_UNSTEADY = 0.03


def find_differences(found: StepResults, expected: StepResults, noise: Iterable[StepResults]) -> dict[Name, float]:
  """Returns the error of each result that differs by more than rounding explains: the loss, then the largest first."""
  scales = {name: _largest(x) for name, x in expected.items() if np.issubdtype(x.dtype, np.floating)}
  largest: dict[str, float] = {}
  for name, scale in scales.items():
    largest[name.what] = max(largest.get(name.what, 0.0), scale)
  different = {}
  for name, x in expected.items():
    if not np.issubdtype(x.dtype, np.number) and x.dtype != np.bool_:
      continue
    error, unsure = _error(found[name], x), max(_error(y[name], x) for y in noise)
    scale = scales.get(name, 1.0)  # Integers are exact.
    if name in scales:
      limit = _TOLERANCE * scale + _TIMES_NOISE * unsure + 1e-7 * largest[name.what]
    else:
      limit = math.inf if unsure else _TOLERANCE
    if error > limit:
      different[name] = error / max(scale, 1e-30)
  return dict(sorted(different.items(), key=lambda item: (item[0].what != 'loss', -item[1])))


def is_unsteady(expected: StepResults, noise: Iterable[StepResults]) -> bool:
  """Whether rounding noise changes a result on one device so much that the result is not a reliable reference."""
  floats = {name: x for name, x in expected.items() if np.issubdtype(x.dtype, np.floating) and x.size}
  largest = max(map(_largest, floats.values()), default=0.0)
  steady = {name: max(_UNSTEADY * _largest(x), 1e-4 * largest) for name, x in floats.items()}
  return any(_error(results[name], x) > steady[name] for results in noise for name, x in floats.items())


def _largest(x: np.ndarray) -> float:
  return float(np.nanmax(np.abs(x), initial=0.0))


def _error(found: np.ndarray, expected: np.ndarray) -> float:
  """Returns the largest difference of entries; infinity if shapes differ or an entry is finite in only one array."""
  if found.shape != expected.shape or (np.isfinite(found) != np.isfinite(expected)).any():
    return math.inf
  finite = np.isfinite(expected)
  return float(np.max(np.abs(found[finite].astype(np.float64) - expected[finite].astype(np.float64)), initial=0.0))
