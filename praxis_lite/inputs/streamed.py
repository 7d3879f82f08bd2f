"""StreamedInput: an input that reads through a pipeline, which begins at a position and may have its own threads.

A pipeline stays open from batch to batch. Moving to another position, for example after a restore, opens a new one.

    read(epoch, 0, B, ...)   read(epoch, B, B, ...)   read(epoch, 2 B, B, ...)     one pipeline(epoch, 0, B, ...)
"""

from __future__ import annotations

import operator
from collections.abc import Generator

import jax

from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.rows import Rows, concatenate_rows

_Request = tuple[int, int, int, int, int]  # The arguments of `BaseInput.read`.
RowGroups = Generator[tuple[int, Rows | None], None, None]


class StreamedInput(BaseInput):
  """An input that reads one group of examples after another. Subclasses define `pipeline`."""

  def __post_init__(self) -> None:
    super().__post_init__()
    self._pipeline: tuple[_Request, RowGroups] | None = None
    self._end: tuple[int, int] | None = None  # The end of the last epoch that was read completely.
    self._chunk: tuple[tuple[int, int], Rows | None, int] | None = None  # (epoch, index), rows, number of rows

  def pipeline(self, epoch: int, position: int, count: int, start: int, stop: int) -> RowGroups:
    """Yields the result of `read` for `count` examples from `position` on, then for the next `count`, and so on.

    A group of fewer than `count` examples, possibly none, ends an epoch. The pipeline may continue with the next epoch.
    Closing it ends its threads and processes.
    """
    raise NotImplementedError

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    if self.num_hosts > 1 and (count, start, stop) == (self.batch_size, *self.host_rows):
      return self._read_group(epoch, position, count, start, stop)
    # A single host reads chunks of `batch_size` examples, and takes slices of them. A mixture does the same,
    # because the number of examples that it takes of each part varies from batch to batch.
    parts: list[Rows] = []
    available = 0
    while available < count:
      number, first = divmod(position + available, self.batch_size)
      # The last chunk is kept, so reads of any size can use one pipeline.
      if self._chunk is None or self._chunk[0] != (epoch, number):
        group = self._read_group(epoch, number * self.batch_size, self.batch_size, 0, self.batch_size)
        self._chunk = ((epoch, number), *group)
      _, chunk, size = self._chunk
      n = min(size - first, count - available)
      if n <= 0:
        break
      low, high = max(start - available, 0), min(stop - available, n)
      if chunk is not None and low < high:
        parts.append(jax.tree.map(operator.itemgetter(slice(first + low, first + high)), chunk))
      available += n
    return concatenate_rows(parts), available

  def get_next(self) -> Rows:
    try:
      return super().get_next()
    except StopIteration:
      self.close()
      raise

  def close(self) -> None:
    if self._pipeline is not None:
      self._pipeline[1].close()
    self._pipeline = self._chunk = None

  def _read_group(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    """Reads a group from the open pipeline if that is at `position`, otherwise from a new pipeline."""
    if (epoch, position) == self._end:
      return None, 0
    request = (epoch, position, count, start, stop)
    at, groups = self._pipeline or (None, None)
    self._pipeline = None  # After an error, the next read opens a new pipeline.
    group = next(groups, None) if groups is not None and at == request else None
    if group is None:
      if groups is not None:
        groups.close()
      groups = self.pipeline(*request)
      group = next(groups, (0, None))
    available, rows = group
    if available < count:
      self._end = (epoch, position + available)
      epoch, position = epoch + 1, 0
    else:
      position += count
    assert groups is not None
    self._pipeline = ((epoch, position, count, start, stop), groups)
    return rows, available
