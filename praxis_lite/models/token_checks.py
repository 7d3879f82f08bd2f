"""Checks of rows of tokens: ids beyond the vocabulary, positions beyond a table, and segments that are not separated.

The vector of a position beyond a table of learned positions would be NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.position_limit import PositionLimit


def check_vocabulary(data: BaseInput, ids: Iterable[np.ndarray], field: str, size: int) -> None:
  """Raises ConfigError if the `vocab_size` of an input, or else its first `ids`, exceed the vocabulary of a model.

  `field` is the path of the field that sets the model's size.
  """
  needed = getattr(data, 'vocab_size', None)
  if needed is None:
    needed = 1 + max((int(np.max(x, initial=-1)) for x in ids), default=-1)
  if needed > size:
    raise ConfigError(
      f'{data.label}: its ids go up to {needed - 1}, but {field} is {size}; it must be at least {needed}'
    )


def check_packing(data: BaseInput, packed: bool, has_several: bool, what: str) -> None:
  """Raises ConfigError if rows may have several segments, called `what`, that the model does not separate.

  `has_several` says whether rows of the first batch do. If the input's `packed` is True, rows of later batches may.
  """
  if packed or not (has_several or getattr(data, 'packed', None) is True):
    return
  here = 'packed=False here' if hasattr(data, 'packed') else f'let each row have one of the {what}'
  raise ConfigError(
    f'{data.label}: its rows have several {what}, and task.model.packed is False, so that tokens would attend to '
    f'other {what}; set task.model.packed=True, or {here}'
  )


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
    named = {name: limit._replace(field=f'task.model.{limit.field}') for name, limit in limits.items()}
    check_positions(named, batch, data.longest_segments())
