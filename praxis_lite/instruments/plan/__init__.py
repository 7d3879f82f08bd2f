"""Predicts memory, time and communication of a train step on chips that this machine lacks, and explains them."""

from praxis_lite.instruments.plan.calibration import (
  apply_calibration as apply_calibration,
  calibrate as calibrate,
  calibration_file as calibration_file,
)
from praxis_lite.instruments.plan.cause import Cause as Cause, Reason as Reason
from praxis_lite.instruments.plan.cost import Communication as Communication, Cost as Cost, Operation as Operation
from praxis_lite.instruments.plan.memory import Memory as Memory
from praxis_lite.instruments.plan.planning import Plan as Plan, plan as plan
from praxis_lite.instruments.plan.report import format_plan as format_plan
from praxis_lite.instruments.plan.searching import Ranked as Ranked, format_search as format_search, search as search
from praxis_lite.instruments.plan.snapshot import (
  Snapshot as Snapshot,
  regressions as regressions,
  snapshot_of as snapshot_of,
)
from praxis_lite.instruments.plan.targets import TARGETS as TARGETS, Efficiency as Efficiency, Target as Target
from praxis_lite.instruments.plan.topology import Topology as Topology, parse_topology as parse_topology
from praxis_lite.instruments.plan.why_text import format_why as format_why
