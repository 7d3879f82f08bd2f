"""The shapes of arrays in a run's data, and errors about batches that have other shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.common.errors import ShardingError, ShardingFault, UserError
from praxis_lite.common.mistakes import ShapesError


def shapes_in_data(batch_struct: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
  """Returns shapes and dtypes of the arrays in batches of the run's data; {} if the data is not on this machine."""
  with contextlib.suppress(UserError, OSError):
    return {name: x for name, x in batch_struct().items() if hasattr(x, 'shape')}
  return {}


@contextlib.contextmanager
def name_other_shapes(batch: Mapping[str, Any], batch_struct: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
  """Replaces an error about shapes in the block by a ShapesError if arrays of the batch differ from the run's data.

  Without this, the error would be about the fields of the model, which fit the data with which it was trained.
  """
  try:
    yield
  except (ShapesError, ShardingError) as error:
    if isinstance(error, ShardingError) and error.fault is not ShardingFault.WRONG_RANK:
      raise
    shapes_in = {name: x.shape[1:] for name, x in shapes_in_data(batch_struct).items() if name != 'weights'}
    others = {name: np.shape(batch[name]) for name in shapes_in if name in batch}
    told = [
      f'batch[{name!r}] has the shape {list(shape)}; the data of the run has '
      f'[{", ".join(map(str, ("rows", *shapes_in[name])))}]'
      for name, shape in others.items()
      if shape[1:] != shapes_in[name]
    ]
    if not told:
      raise
    raise ShapesError('. '.join(told)) from error
