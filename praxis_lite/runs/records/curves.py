"""The metrics of a run as a table, read from its `metrics.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.foreign_text import printable
from praxis_lite.runs.records.metrics import metric_lines

if TYPE_CHECKING:
  import pandas


class Curve(NamedTuple):
  """One metric: the n steps at which it was written, [n] int64, and its values, [n] float64."""

  steps: np.ndarray
  values: np.ndarray


class MetricsTable(Mapping[str, np.ndarray]):
  """The metrics of a run: one column per metric, '<split>/<metric>', and one row for each step with any metric.

  A column, such as `table['eval/validation/loss']`, is float64, [number of rows]. It is NaN in rows without a value,
  and for values that were not finite. `table.curve(name)` leaves out the rows without a value. All columns are numbers
  that can be plotted against `table.steps`.

  Attributes:
    steps: int64, [number of rows], ascending: the number of steps taken.
  """

  def __init__(self, rows: Mapping[int, Mapping[str, float | None]]):
    """Args: rows: the values written after each step, by column; None for a value that was not finite."""
    self._rows = {step: rows[step] for step in sorted(rows)}
    self.steps = np.array(list(self._rows), np.int64)
    self._names = sorted({name for row in rows.values() for name in row})

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._names:
      raise KeyError(f'there is no metric {name!r}.{did_you_mean(name, self._names)} There are: {", ".join(self)}')
    return np.array([row.get(name) for row in self._rows.values()], np.float64)  # NumPy turns None into NaN.

  def __iter__(self) -> Iterator[str]:
    return iter(self._names)

  def __len__(self) -> int:
    return len(self._names)

  def curve(self, name: str) -> Curve:
    """Returns one metric without the rows that do not have it."""
    written = np.array([name in row for row in self._rows.values()], bool)
    return Curve(self.steps[written], self[name][written])

  def last(self) -> dict[str, float]:
    """Returns the newest value of each metric."""
    return {name: float(self.curve(name).values[-1]) for name in self}

  def to_pandas(self) -> pandas.DataFrame:
    """Returns a data frame with the steps as its index; raises ConfigError if pandas is not installed."""
    try:
      import pandas as pd
    except ImportError:
      raise ConfigError('MetricsTable.to_pandas: pandas is not installed; pip install pandas') from None
    return pd.DataFrame(dict(self), index=pd.Index(self.steps, name='step'))

  def __repr__(self) -> str:
    """Returns a heading, and one line per metric."""
    width = max(map(len, self), default=0)
    lines = [f'<metrics of {number_of(len(self.steps), "step")}>']
    for name in self:
      shown, values = printable(name, one_line=True), self.curve(name).values
      lines.append(f'{shown:<{width}}  {number_of(len(values), "value")}, last {values[-1]:.4g}')
    return '\n'.join(lines)


def read_metrics(job_log_dir: str | os.PathLike[str]) -> MetricsTable:
  """Returns the metrics that a run has written so far; an empty table if it has no metrics file.

  Raises:
    UserError: the file cannot be read.
  """
  path = Path(job_log_dir) / 'metrics.jsonl'
  rows: dict[int, dict[str, float | None]] = {}
  for _, record in metric_lines(path):
    values = {f'{record["split"]}/{name}': value for name, value in record.get('metrics', {}).items()}
    rows.setdefault(record['step'], {}).update(values)
  return MetricsTable(rows)
