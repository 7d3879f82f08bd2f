"""Explains how and why arrays are split over a mesh, what the split costs, and its faults. Needs only shapes."""

from praxis_lite.instruments.explain.check import Problem, Severity, WarningLimits, check, format_problems, has_errors
from praxis_lite.instruments.explain.explanation import (
  ArrayKind,
  Dimension,
  Explanation,
  ShardingReport,
  format_parameter_table,
  format_report,
)
from praxis_lite.instruments.explain.report import explain, explain_task, parameter_table
from praxis_lite.instruments.explain.summary import summarize
from praxis_lite.instruments.explain.visualize import draw_sharding, visualize_sharding

__all__ = [
  'ArrayKind',
  'Dimension',
  'Explanation',
  'Problem',
  'Severity',
  'ShardingReport',
  'WarningLimits',
  'check',
  'draw_sharding',
  'explain',
  'explain_task',
  'format_parameter_table',
  'format_problems',
  'format_report',
  'has_errors',
  'parameter_table',
  'summarize',
  'visualize_sharding',
]
