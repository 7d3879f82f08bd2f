"""Predicts and explains the memory, time and communication of a train step on chips that this machine lacks."""

from praxis_lite.instruments.plan.calibration import apply_calibration, calibrate, calibration_file
from praxis_lite.instruments.plan.cost import Cause, Communication, Cost, Operation, Reason
from praxis_lite.instruments.plan.memory import Memory
from praxis_lite.instruments.plan.planning import Plan, plan
from praxis_lite.instruments.plan.report import format_plan, format_why
from praxis_lite.instruments.plan.searching import Ranked, format_search, search
from praxis_lite.instruments.plan.snapshot import Snapshot, regressions, snapshot_of
from praxis_lite.instruments.plan.targets import TARGETS, Efficiency, Target
from praxis_lite.instruments.plan.topology import Topology, parse_topology

__all__ = [
  'TARGETS',
  'Cause',
  'Communication',
  'Cost',
  'Efficiency',
  'Memory',
  'Operation',
  'Plan',
  'Ranked',
  'Reason',
  'Snapshot',
  'Target',
  'Topology',
  'apply_calibration',
  'calibrate',
  'calibration_file',
  'format_plan',
  'format_search',
  'format_why',
  'parse_topology',
  'plan',
  'regressions',
  'search',
  'snapshot_of',
]
