"""Checks for positions beyond a table of learned positions, whose vectors would be NaN."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from praxis_lite.common.errors import prefix_errors
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.position_limit import PositionLimit


def check_positions(limits: Mapping[str, PositionLimit], batch: NestedDict, longest: Mapping[str, int] = {}) -> None:
  """Raises a `ConfigError` if a batch, or a later one of its input, has positions beyond the tables of a model.

  Rows may be longer than a table if each of their segments is shorter. If a batch has no array of positions, the
  network checks the length of the rows when it is traced.

  Args:
    limits: the result of `BaseModel.position_limits`.
    batch: arrays by name.
    longest: the result of `BaseInput.longest_segments`.
  """
  for name, limit in limits.items():
    positions = np.asarray(batch.get(name, ()))
    most = max(1 + int(positions.max(initial=-1)), longest.get(name, 0))
    limit.check(most, f'the number of positions in {name!r}')


def check_positions_of_input(limits: Mapping[str, PositionLimit], data: BaseInput, batch: NestedDict) -> None:
  """Calls `check_positions` for an input and its first batch; the message names the input."""
  if not limits:
    return  # Do not call `longest_segments`, which may take a pass over the data.
  with prefix_errors(data.label):
    check_positions({name: _add_root(limit) for name, limit in limits.items()}, batch, data.longest_segments())


def _add_root(limit: PositionLimit) -> PositionLimit:
  return limit._replace(field=f'task.model.{limit.field}')
