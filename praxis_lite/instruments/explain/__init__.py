"""Explains how and why arrays are split over a mesh, what that costs, and what is wrong with it. Needs only shapes."""

from praxis_lite.instruments.explain.check import (
  Problem as Problem,
  Severity as Severity,
  WarningLimits as WarningLimits,
  check as check,
  format_problems as format_problems,
  has_errors as has_errors,
)
from praxis_lite.instruments.explain.explanation import (
  ArrayKind as ArrayKind,
  Dimension as Dimension,
  Explanation as Explanation,
  ShardingReport as ShardingReport,
  format_parameter_table as format_parameter_table,
  format_report as format_report,
)
from praxis_lite.instruments.explain.report import (
  explain as explain,
  explain_task as explain_task,
  parameter_table as parameter_table,
)
from praxis_lite.instruments.explain.summary import summarize as summarize
from praxis_lite.instruments.explain.visualize import (
  draw_sharding as draw_sharding,
  visualize_sharding as visualize_sharding,
)
