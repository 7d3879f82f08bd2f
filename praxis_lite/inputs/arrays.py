"""ArrayInput: batches from arrays in memory.

def digits(split):                                   # any function that returns a dict of arrays
  x, y = sklearn.datasets.load_digits(return_X_y=True)
  rows = slice(0, 1500) if split == 'train' else slice(1500, None)
  return {'image': x[rows].reshape(-1, 8, 8, 1) / 16, 'label': y[rows]}

Config(ArrayInput, arrays=Config(digits, split='train'), batch_size=64, is_training=True)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from praxis_lite.config import REQUIRED, Config
from praxis_lite.errors import DataError
from praxis_lite.inputs.random_access import RandomAccessInput
from praxis_lite.inputs.rows import Rows, Struct, canonical_rows, example_struct


class ArrayInput(RandomAccessInput):
  """Batches of rows of arrays.

  Attributes:
    arrays: a dict (possibly nested) of arrays with the examples in dim 0; or a function without arguments, or the
      `Config` of one, that returns it. A function is called when the data is first needed. 64-bit arrays become 32-bit
      ones.

  Raises (when the data is first needed):
    DataError: the arrays are empty, or `canonical_rows` refuses them.
  """

  arrays: Any = REQUIRED

  @functools.cached_property
  def _data(self) -> Rows:
    arrays = self.arrays
    if isinstance(arrays, Config):
      arrays = arrays.instantiate()
    elif callable(arrays):
      arrays = arrays()
    data = canonical_rows(arrays, f'{self.label}.arrays')
    if not len(data['weights']):
      raise DataError(f'{self.label}.arrays: there are no examples')
    return data

  @property
  def num_examples(self) -> int:
    return len(self._data['weights'])

  def example_struct(self) -> Struct:
    return example_struct(self._data)

  def rows(self, indices: np.ndarray) -> Rows:
    return jax.tree.map(lambda x: x[indices], self._data)
