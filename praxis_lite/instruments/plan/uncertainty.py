"""How far the time of a step may be off its plan, by the errors of earlier plans; see `docs/planning-figures.md`."""

from __future__ import annotations

from typing import NamedTuple

from praxis_lite.instruments.plan.topology import Topology


class TimeFactors(NamedTuple):
  """The least and the largest known quotient of real and planned time of a step."""

  least: float
  largest: float


# Published times of steps, divided by the times in plans of their compiled programs.
_ONE_HOST_OF_GPUS = TimeFactors(0.98, 1.35)
_HOSTS_OF_GPUS = TimeFactors(0.98, 1.57)
_TPU = TimeFactors(0.98, 1.27)
# For the same step, the time in the plan of the compiled program, divided by the time in the plan by formulas.
_FORMULAS = TimeFactors(0.88, 1.67)


def time_factors(topology: Topology, is_compiled: bool) -> TimeFactors | None:
  """Returns the known errors of plans for these chips.

  If several runs on this kind of chip were measured, these are the errors of their plans. Returns None if the errors
  are not known: if only one run was measured, for calibrated chips, and for simulated devices.
  """
  target, runs = topology.target, topology.experience
  if runs is not None:
    return TimeFactors(runs.least / runs.typical, runs.largest / runs.typical) if runs.runs > 1 else None
  if target.kind == 'cpu' or target.efficiency.calibrated:
    return None
  if target.kind == 'gpu':
    factors = _HOSTS_OF_GPUS if topology.shape[0] > 1 else _ONE_HOST_OF_GPUS
  else:
    factors = _TPU
  if is_compiled:
    return factors
  return TimeFactors(*(round(a * b, 2) for a, b in zip(factors, _FORMULAS)))
