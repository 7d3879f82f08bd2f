"""How far the time of a step may be from its plan, by the errors of earlier plans; see `docs/planning-figures.md`."""

from __future__ import annotations

from typing import NamedTuple

from praxis_lite.instruments.plan.topology import Topology


class TimeFactors(NamedTuple):
  """The least and the largest known quotient of the time of a step and its plan."""

  least: float
  largest: float


# Steps with published times, divided by plans of their compiled programs.
_ONE_HOST_OF_GPUS = TimeFactors(0.98, 1.35)
_HOSTS_OF_GPUS = TimeFactors(0.98, 1.57)
_TPU = TimeFactors(0.98, 1.27)
# Plans of compiled programs, divided by plans of the same steps by formulas.
_FORMULAS = TimeFactors(0.88, 1.67)


def time_factors(topology: Topology, is_compiled: bool) -> TimeFactors | None:
  """Returns the known errors of such plans; None for simulated devices, and for chips that were measured.

  For chips on which several runs were measured, these are the errors.
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
