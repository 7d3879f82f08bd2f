"""The shapes of arrays in a run's data, and errors about batches that have other shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from praxis_lite.common.errors import DataError, ShardingError, ShardingFault, UserError
from praxis_lite.common.mistakes import ShapesError
from praxis_lite.inputs.rows import fit_dtype

_Shape = tuple[int, ...]


def shapes_in_data(batch_struct: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
  """Returns shapes and dtypes of the arrays in batches of the run's data; {} if the data is not on this machine."""
  with contextlib.suppress(UserError, OSError):
    return {name: x for name, x in batch_struct().items() if hasattr(x, 'shape')}
  return {}


def fit_rows(rows: Mapping[str, Any], structs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns rows in the dtypes of the run's data; raises DataError if they have other numbers of dimensions."""
  check_shapes(rows, structs, len)  # Sizes of dimensions, such as lengths, may differ if the model accepts them.
  return {n: fit_dtype(np.asarray(x), structs[n].dtype, f'{n!r}') if n in structs else x for n, x in rows.items()}


def check_shapes(
  rows: Mapping[str, Any], structs: Mapping[str, Any], compared: Callable[[_Shape], object] = tuple
) -> None:
  """Raises DataError if examples have other shapes than those in the run's data.

  `compared` is a function of a shape. What it returns must be the same for both shapes: `tuple` compares all sizes, and
  `len` only the number of dimensions.
  """
  for name, shape, expected in _other_shapes(rows, structs, compared):
    raise DataError(
      f'{name!r}: expected {_describe_example(expected)} in each example, as in the data of the run, got '
      f'{_describe_example(shape[1:])}'
    )


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
    told = [
      f'batch[{name!r}] has the shape {list(shape)}; the data of the run has '
      f'[{", ".join(map(str, ("rows", *expected)))}]'
      for name, shape, expected in _other_shapes(batch, shapes_in_data(batch_struct), tuple)
    ]
    if not told:
      raise
    raise ShapesError('. '.join(told)) from error


def _other_shapes(
  arrays: Mapping[str, Any], structs: Mapping[str, Any], compared: Callable[[_Shape], object]
) -> Iterator[tuple[str, _Shape, _Shape]]:
  """Finds the arrays whose examples have another shape than those in the run's data.

  Yields for each the name, the array's shape, and the shape of an example in the run's data.
  """
  for name in structs:
    if name in arrays and name != 'weights':
      shape, expected = np.shape(arrays[name]), structs[name].shape[1:]
      if compared(shape[1:]) != compared(expected):
        yield name, shape, expected


def _describe_example(shape: _Shape) -> str:
  return f'an array of shape {list(shape)}' if shape else 'a number'
