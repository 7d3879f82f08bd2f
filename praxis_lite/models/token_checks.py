"""Checks of rows of tokens: ids beyond the vocabulary, and several segments that a model would not separate."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs.base import BaseInput


def check_vocabulary(data: BaseInput, ids: Iterable[np.ndarray], field: str, size: int) -> None:
  """Raises ConfigError if the ids of an input go beyond the vocabulary of a model.

  Args:
    data: the input; its `vocab_size` is compared, if it has one.
    ids: ids of the first batch, which are compared if `data` has no `vocab_size`.
    field, size: the path of the field that sets the size of the vocabulary, and this size.
  """
  needed = getattr(data, 'vocab_size', None)
  if needed is None:
    needed = 1 + max((int(np.max(x, initial=-1)) for x in ids), default=-1)
  if needed > size:
    raise ConfigError(
      f'{data.label}: its ids go up to {needed - 1}, but {field} is {size}; it must be at least {needed}'
    )


def check_packing(data: BaseInput, packed: bool, has_several: bool, what: str) -> None:
  """Raises ConfigError if rows have several segments and the model would let them attend to each other.

  Args:
    data: the input; if its `packed` is True, rows of later batches may have several segments.
    packed: whether the model separates segments.
    has_several: whether rows of the first batch have several segments.
    what: a word for the segments, for the message.
  """
  if packed or not (has_several or getattr(data, 'packed', None) is True):
    return
  here = 'packed=False here' if hasattr(data, 'packed') else f'let each row have one of the {what}'
  raise ConfigError(
    f'{data.label}: its rows have several {what}, and task.model.packed is False, so that tokens would attend to '
    f'other {what}; set task.model.packed=True, or {here}'
  )
