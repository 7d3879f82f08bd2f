"""GrowingBatches: a schedule of batch sizes. The batches of an input have different sizes in different parts of a run.

    batch_size = 8, factors = (1, 2, 4), from_batches = (1000, 3000)

    batch    0 ... 999   1000 ... 2999   3000 ...
    rows             8              16         32

The sizes do not change the order of the examples, and each example is still read once. A run compiles a step for each
size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.manifest import DataManifest
from praxis_lite.inputs.rows import Rows, Struct, pad_rows, to_batch_struct


class GrowingBatches(BaseInput):
  """Batches of another input, in sizes that depend on the number of batches before.

  Attributes:
    input: config of the input; it gets `is_training` from this one, and `num_epochs`, `shuffle` and `seed` if they are
      set here.
    factors: for each part of the run, the rows of a global batch, as a multiple of `batch_size`.
    from_batches: for each part except the first, the number of batches before it, in increasing order.
    Others, such as `vocab_size`: read from the input.

  Raises:
    ConfigError: `factors` and `from_batches` do not fit, or this input is the source of another input.
  """

  input: Config = REQUIRED
  factors: tuple[int, ...] = REQUIRED
  from_batches: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    inherited = self.fields_of_sources() | ({'seed': self.seed} if self.seed else {})
    super().__post_init__()
    where, starts = self.label, tuple(self.from_batches)
    if not self.factors or any(not isinstance(factor, int) or factor < 1 for factor in self.factors):
      raise ConfigError(f'{where}.factors: expected integers of at least 1, got {self.factors}')
    if len(starts) != len(self.factors) - 1:
      expected = f'{len(self.factors) - 1}, one less than factors'
      raise ConfigError(f'{where}.from_batches: expected {expected}, got {starts}')
    if any(a >= b for a, b in zip((0, *starts), starts)):
      raise ConfigError(f'{where}.from_batches: expected numbers of at least 1 that increase, got {starts}')
    self.source = self.build_source('input', self.input, inherited)
    self._sources = [self.source]
    self._batches = 0

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_') or 'source' not in vars(self):  # `copy` looks up names before the copy has a source.
      raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}', name=name, obj=self)
    return getattr(self.source, name)

  def rows_after(self, state: dict[str, Any]) -> int:
    part = int(np.searchsorted(self.from_batches, state['batches'], side='right'))
    return self.batch_size * self.factors[part]

  def batch_sizes(self) -> tuple[int, ...]:
    return tuple(sorted({self.batch_size * factor for factor in self.factors}))

  def batch_struct(self) -> Struct:
    return to_batch_struct(self._struct_with_weights, self.batch_sizes()[-1])

  def example_struct(self) -> Struct:
    return self.source.example_struct()

  def get_next(self) -> Rows:
    size = self.rows_after({'batches': self._batches})
    of_host = -(-size // self.num_hosts)
    first = min(self.host_index * of_host, size)
    rows, taken = self.source.take(size, first, min(first + of_host, size))
    if not taken or (taken < size and self.drop_remainder):
      raise StopIteration
    self._batches += 1
    return pad_rows(rows, of_host, self._struct_with_weights)

  def take(self, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    raise ConfigError(
      f'{self.label}: a schedule of batch sizes must be the outermost input; put the mixture into its `input`'
    )

  def reset(self) -> Self:
    self._batches = 0
    return super().reset()

  def rows_in_memory(self) -> Rows | None:
    return self.source.rows_in_memory()

  def check_beside(self, other: BaseInput) -> None:
    self.source.check_beside(other)

  def data_files(self) -> Sequence[str]:
    return self.source.data_files()

  def manifest(self) -> DataManifest | None:
    return self.source.manifest()

  def changes_since(self, saved: object, now: DataManifest | None) -> str:
    return self.source.changes_since(saved, now)

  def examples_at(self, state: dict[str, Any]) -> list[str]:
    source = copy.copy(self.source)  # Another thread may be reading ahead from `self.source`.
    source.batch_size = self.rows_after(state)
    return source.examples_at(state['source'])

  def identity(self) -> dict[str, Any]:
    return {}

  def get_state(self) -> dict[str, Any]:
    return {'batches': self._batches, 'source': self.source.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    self.check_state(state, ('batches', 'source'))
    self.source.set_state(state['source'])
    self._batches = int(state['batches'])
