"""BaseInput: a deterministic, resumable stream of batches. Each host reads its slice of the global batch.

A batch is a dict (possibly nested) of numpy arrays whose dimension 0 is the batch. It always contains `weights`.

A stream consists of `num_epochs` epochs. An epoch is a sequence of examples, in an order that depends only on the seed
and the number of the epoch. It is cut into global batches of `batch_size`; a short last batch is padded with rows of
zero weight. So the position in a stream is two numbers: the epoch, and how many of its examples have been read.

    global batch   | host 0 | host 1 | host 2 | host 3 |   rows [h L, (h + 1) L) on host h, L = batch_size / num_hosts,
                                                           rounded up

The position and the number of batches are the same on every host, even on a last host that gets only padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from praxis_lite.common.config import REQUIRED, Config, Configurable
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.manifest import DataManifest, changes, manifest_of
from praxis_lite.inputs.rows import Rows, Struct, add_weights, concatenate_rows, pad_rows, to_batch_struct
from praxis_lite.sharding.batch import batch_size as size_of

_REMEDY = (
  'Use the data and settings with which it was saved, or start the data from its beginning: train --norestore_input, '
  'or run_train(..., restore_input=False)'
)


class BaseInput(Configurable, Iterator[Rows]):
  """A stream of batches. Subclasses define `example_struct` and `read`.

  Attributes:
    name: name of the input in logs and errors; None uses the class name.
    batch_size: examples in a global batch, over all hosts.
    seed: seed of the order of the examples and of random values in them; not negative.
    is_training: decides the defaults of `num_epochs` and `shuffle`.
    num_epochs: number of passes over the examples; None means unlimited in training, and one otherwise.
    shuffle: use a new order in each epoch; None shuffles only in training.
    drop_remainder: drop the short batch at the end of an epoch instead of padding it with rows of zero weight.
    num_hosts, host_index: the slice of each global batch that this input yields. The executor sets them.

  Raises:
    ConfigError: a required field is not set, or a value is out of range.
  """

  name: str | None = None
  batch_size: int = REQUIRED
  seed: int = 0
  is_training: bool = False
  num_epochs: int | None = None
  shuffle: bool | None = None
  drop_remainder: bool = False
  num_hosts: int = 1
  host_index: int = 0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if getattr(self, field.name) is REQUIRED:
        raise ConfigError(f'{self.label}.{field.name}: a value is required')
    self.check_at_least(batch_size=1, num_hosts=1, seed=0, host_index=0)
    if self.num_epochs is not None:
      self.check_at_least(num_epochs=1)
    if self.host_index >= self.num_hosts:
      raise ConfigError(f'{self.label}.host_index: expected less than num_hosts = {self.num_hosts}')
    if self.num_epochs is None and not self.is_training:
      self.num_epochs = 1
    if self.shuffle is None:
      self.shuffle = self.is_training
    self._epoch = self._position = 0
    self._sources: list[BaseInput] = []  # The inputs from which this one reads.

  def check_at_least(self, **least: int) -> None:
    """Raises ConfigError unless each of these fields is an integer of at least the given value."""
    for name, smallest in least.items():
      value = getattr(self, name)
      if not isinstance(value, int) or value < smallest:
        raise ConfigError(f'{self.label}.{name}: expected an integer of at least {smallest}, got {value!r}')

  def fields_of_sources(self) -> dict[str, Any]:
    """Returns the fields that this input passes on to its sources, the inputs from which it reads; None is left out.

    This is called before this input fills in its defaults.
    """
    fields = {name: getattr(self, name) for name in ('is_training', 'num_epochs', 'shuffle')}
    return {name: value for name, value in fields.items() if value is not None}

  def build_source(self, field: str, config: object, inherited: Mapping[str, Any]) -> BaseInput:
    """Builds a source of this input; raises ConfigError if the field has no config of an input."""
    # This input cuts batches for hosts, so its source yields examples for all hosts.
    own = {'batch_size': self.batch_size, 'num_hosts': 1, 'host_index': 0, **inherited}
    if isinstance(config, Config):
      source = config.instantiate(**own)
      if isinstance(source, BaseInput):
        return source
      got = f'one of {type(source).__name__}'
    else:
      got = repr(config)
    raise ConfigError(f'{self.label}.{field}: expected the config of an input, got {got}')

  def example_struct(self) -> Struct:
    """Returns shape and dtype of each array of one example, without the batch dimension. `weights` may be missing."""
    raise NotImplementedError

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    """Reads rows [start, stop) of a group: the `count` examples from `position` on in an epoch.

    The same arguments give the same rows, whatever was read before.

    Returns:
      (rows, number of examples in the group). The rows have the form of `canonical_rows`, without padding; None means
      that there are none. The number is below `count` only at the end of the epoch.
    """
    raise NotImplementedError

  def rows_in_memory(self) -> Rows | None:
    """Returns the rows of all examples if they are in memory, so that checking them is cheap; otherwise None."""
    return None

  def longest_segments(self) -> dict[str, int]:
    """Returns, for the name of each array of positions, such as `segment_pos`, the length of the longest segment.

    An array is left out if the lengths of its segments cannot be known without reading all data.
    """
    found: dict[str, int] = {}
    for name, length in (item for source in self._sources for item in source.longest_segments().items()):
      found[name] = max(length, found.get(name, 0))
    return found

  def check_beside(self, other: BaseInput) -> None:
    """Raises ConfigError if this training input conflicts with another input of the experiment."""

  def data_files(self) -> Sequence[str]:
    """Returns the files that the examples are read from; () if they come from no files."""
    return ()

  def manifest(self) -> DataManifest | None:
    """Returns the record of `data_files` in a checkpoint, for JSON; None without files. See `manifest.py`."""
    files = self.data_files()
    return manifest_of(files) if files else None

  def changes_since(self, saved: object, now: DataManifest | None) -> str:
    """Returns how the files have changed, given the saved manifest and the current one; '' if unchanged or unknown."""
    found = changes(saved, now) if now is not None else ''
    return f'{self.label}: {found}' if found else ''

  @property
  def bad_records(self) -> Sequence[object]:
    """The unreadable records that this input has left out so far; see `bad_records.py`."""
    return [bad for source in self._sources for bad in source.bad_records]

  def examples_at(self, state: dict[str, Any]) -> list[str]:
    """Returns a text such as 'record 7 of a.x' for each example of the batch that follows `state`; [] if unknown."""
    return []

  @property
  def label(self) -> str:
    """Name of this input in logs and errors."""
    return self.name or type(self).__name__

  @property
  def host_batch_size(self) -> int:
    """Rows of a batch on this host, `batch_size / num_hosts` rounded up; so the last hosts may get rows of padding."""
    return -(-self.batch_size // self.num_hosts)

  @property
  def host_rows(self) -> tuple[int, int]:
    """First row of this host in a global batch, and the row after the last row of this host."""
    first, rows = self.host_index * self.host_batch_size, self.host_batch_size
    return min(first, self.batch_size), min(first + rows, self.batch_size)

  def batch_sizes(self) -> tuple[int, ...]:
    """Returns the numbers of rows that global batches have, in ascending order."""
    return (self._rows_of_batch,)

  def rows_after(self, state: dict[str, Any]) -> int:
    """Returns the number of rows of the global batch that follows `state`."""
    return self._rows_of_batch

  @functools.cached_property
  def _rows_of_batch(self) -> int:
    return size_of(self.batch_struct())

  def batches_per_epoch(self) -> int | None:
    """Returns the number of batches in an epoch; None if it is unknown before the epoch is read."""
    return None

  def batch_struct(self) -> Struct:
    """Returns a tree of `jax.ShapeDtypeStruct` for a global batch, without reading one."""
    return to_batch_struct(self._struct_with_weights, self.batch_size)

  @functools.cached_property
  def _struct_with_weights(self) -> Struct:
    return add_weights(self.example_struct())

  def get_next(self) -> Rows:
    """Returns this host's rows of the next global batch: arrays of shape [host_batch_size, ...].

    Raises:
      StopIteration: there are no more epochs.
      DataError: an epoch has no batch, or the data cannot be read.
    """
    struct = self._struct_with_weights
    while not self._is_over():
      rows, count = self.read(self._epoch, self._position, self.batch_size, *self.host_rows)
      if count == self.batch_size or (count and not self.drop_remainder):
        self._position += count
        return pad_rows(rows, self.host_batch_size, struct)
      self._next_epoch(count)
    raise StopIteration

  def take(self, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    """Consumes up to `count` examples, across epochs and regardless of batches and `num_hosts`; for mixtures.

    Returns:
      (rows [start, stop) of these examples, or None if there are none; number of consumed examples). The number is
      below `count` only at the end of the stream.
    """
    parts: list[Rows] = []
    taken = 0
    while taken < count and not self._is_over():
      rows, n = self.read(self._epoch, self._position, count - taken, max(start - taken, 0), max(stop - taken, 0))
      self._position += n
      taken += n
      if rows is not None:
        parts.append(rows)
      if taken < count:
        self._next_epoch(n)
    return concatenate_rows(parts), taken

  def __next__(self) -> Rows:
    return self.get_next()

  def reset(self) -> Self:
    """Goes back to the start of the stream."""
    self._epoch = self._position = 0
    for source in self._sources:
      source.reset()
    return self

  def close(self) -> None:
    """Ends threads and processes that read ahead, and closes files. A later read opens them again."""
    for source in self._sources:
      source.close()

  def get_state(self) -> dict[str, Any]:
    """Returns the position in the stream as a dict for JSON. It is the same on every host."""
    return {'epoch': self._epoch, 'position': self._position, **self.identity()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Moves to a position that `get_state` returned; raises CheckpointError if the state belongs to another input."""
    self.check_state(state, ('epoch', 'position'))
    self._epoch, self._position = int(state['epoch']), int(state['position'])

  def identity(self) -> dict[str, Any]:
    """Returns the settings on which the meaning of a saved position depends."""
    return {'shuffle': self.shuffle, 'seed': self.seed if self.shuffle else None}

  def check_state(self, state: dict[str, Any], required: tuple[str, ...]) -> None:
    """Raises `CheckpointError` unless `state` has the `required` keys and matches `identity()`."""
    expected = self.identity()
    missing = [k for k in (*required, *expected) if not isinstance(state, dict) or k not in state]
    if missing:
      raise CheckpointError(
        f"{self.label}: the saved input state has no '{missing[0]}'; it was saved by another kind of input. {_REMEDY}"
      )
    for key in ('epoch', 'position'):
      if key in required and (type(state[key]) is not int or not 0 <= state[key] < 2**63):
        raise CheckpointError(f'{self.label}: the saved input state has {key} = {state[key]!r}; expected a count')
    for key, value in expected.items():
      if state[key] != value:
        raise CheckpointError(
          f'{self.label}: the saved input state has {key} = {state[key]!r}, but this input has {value!r}, so it '
          f'cannot resume exactly. {_REMEDY}'
        )

  def _is_over(self) -> bool:
    return self.num_epochs is not None and self._epoch >= self.num_epochs

  def _next_epoch(self, leftover: int) -> None:
    if self._position == 0:
      # Without this error, empty epochs would follow each other forever.
      few = f'{number_of(leftover, "example")}, less than a batch of {self.batch_size}, and drop_remainder is set'
      raise DataError(f'{self.label}: {few if leftover else "there are no examples"}')
    self._epoch += 1
    self._position = 0


class CountedInput(BaseInput):
  """Base of the inputs that know the number of their examples without reading them all."""

  @property
  def num_examples(self) -> int:
    """Examples in an epoch, over all hosts."""
    raise NotImplementedError

  def batches_per_epoch(self) -> int:
    whole, rest = divmod(self.num_examples, self.batch_size)
    return whole + bool(rest and not self.drop_remainder)

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'num_examples': self.num_examples}
