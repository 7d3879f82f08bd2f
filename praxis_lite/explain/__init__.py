"""Why every array lies where it does on a mesh, what that costs, and what is wrong with it: from shapes alone."""

from praxis_lite.explain.check import check, has_errors
from praxis_lite.explain.explanation import Dimension, Explanation, Kind
from praxis_lite.explain.parameter_table import format_parameter_table, parameter_table
from praxis_lite.explain.problems import Limits, Problem, Severity, format_problems
from praxis_lite.explain.report import ShardingReport, explain, explain_task
from praxis_lite.explain.table import format_report
from praxis_lite.explain.visualize import draw_sharding, visualize_sharding

__all__ = [
  'Dimension',
  'Explanation',
  'Kind',
  'Limits',
  'Problem',
  'Severity',
  'ShardingReport',
  'check',
  'draw_sharding',
  'explain',
  'explain_task',
  'format_parameter_table',
  'format_problems',
  'format_report',
  'has_errors',
  'parameter_table',
  'visualize_sharding',
]
