"""Inputs that Grain reads, optionally in worker processes: `ArrayRecordInput`, and `TableInput` in `tables.py`.

    source[0], source[1], ...     numbered parts of an epoch; each is read, parsed and stacked independently
    worker w of N                 parts w, w + N, ...; the input returns all parts in order

So the batches are the same for any number of workers, and moving to a position reads nothing before it.
Needs `pip install praxis_lite[grain]`; Grain is imported at the first read.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from absl import flags

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, DataError, UserError, error_summary, first_line
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import unless_empty
from praxis_lite.inputs.bad_records import BadRecord, BadRecordError, RecordsInput, is_damage, rows_of_each
from praxis_lite.inputs.base import CountedInput
from praxis_lite.inputs.files import Paths, find_files
from praxis_lite.inputs.rows import Feature, Rows, Struct, build_features, canonical_rows, fit_dtype
from praxis_lite.inputs.streamed import RowGroups, StreamedInput
from praxis_lite.inputs.tf_example import features_of_example, serialized_examples

_MANY_EPOCHS = 1_000_000  # In an endless stream, a pipeline covers this many epochs, and then a new pipeline is opened.

PartT = TypeVar('PartT', covariant=True)


class Parts(Protocol[PartT]):
  """A data source that Grain accepts. Grain pickles it for the workers."""

  def __len__(self) -> int: ...

  def __getitem__(self, number: int) -> PartT: ...


@functools.cache
def import_grain() -> ModuleType:
  """Imports Grain; raises ConfigError if it is not installed."""
  try:
    import grain
  except ImportError:
    raise ConfigError('Grain is not installed; pip install praxis_lite[grain]') from None
  if not flags.FLAGS.is_parsed():  # Grain reads absl flags, which a program may never have parsed.
    flags.FLAGS.mark_as_parsed()
  return grain


class GrainInput(RecordsInput, StreamedInput, CountedInput):
  """An input from files. `features` describes the examples, or `parse_fn` makes them.

  Attributes:
    path: a file, a directory, a glob pattern, a list of those, or a function (or `Config` of one) that returns them.
    features: arrays of an example by name, as `Feature` configs. Other stored features are ignored.
    parse_fn: replaces `features`: a function that takes a record and returns the example, a dict (possibly nested) of
      arrays, always with the same shapes and dtypes.
    num_workers: processes that read and parse; 0 uses threads of this process. Worker processes import the main script
      again, so your own script must do its work below `if __name__ == '__main__':`.
    num_threads: threads that read and parse if there are no worker processes.
  """

  path: Paths | Callable[[], Paths] | Config = REQUIRED
  features: dict[str, Config | Feature] | None = None
  parse_fn: Callable[[Any], Rows] | None = None
  num_workers: int = 0
  num_threads: int = 2

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(num_workers=0, num_threads=1)
    if (self.features is None) == (self.parse_fn is None):
      raise ConfigError(f'{self.label}: set one of features and parse_fn')
    if self.features is not None:
      self._features = build_features(self.features, f'{self.label}.features')

  @functools.cached_property
  def files(self) -> list[str]:
    """The files, sorted."""
    return find_files(self.path, f'{self.label}.path')

  def data_files(self) -> list[str]:
    return self.files

  def leave_out_file(self, file: str, reason: str, endings: tuple[str, ...]) -> None:
    """Counts an unreadable file as a bad record, see `leave_out`. Files with data usually end in one of `endings`."""
    other = next((f for f in self.files if f.endswith(endings)), None)
    if other and not file.endswith(endings):
      pattern = os.path.join(os.path.dirname(other), f'*{os.path.splitext(other)[1]}')
      reason = f'{reason}; to read only the data, name it by a pattern, as in {pattern}'
    self.leave_out(BadRecord(file, '', reason))

  def first_example(self) -> Rows:
    """Returns the first example of the files, with dimension 0 of size 1."""
    raise NotImplementedError

  def example_struct(self) -> Struct:
    if self.features is not None:
      return {k: f.struct() for k, f in self._features.items()}
    return self._parsed_struct

  @functools.cached_property
  def _parsed_struct(self) -> Struct:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.first_example())

  def last_epoch(self, epoch: int) -> int:
    """Returns the first epoch that a pipeline does not read if it begins in `epoch`."""
    return epoch + _MANY_EPOCHS if self.num_epochs is None else max(self.num_epochs, epoch + 1)

  def parts(self, source: Parts[PartT]) -> Generator[PartT, None, None]:
    """Yields the parts of a source in order. Closing the generator ends the threads or processes that read ahead."""
    grain = import_grain()
    yield source[0]  # Read without workers, because a run first checks one batch.
    if len(source) == 1:
      return
    dataset = grain.MapDataset.source(source)[1:]
    if self.num_workers:
      _start_quiet_tracker()
      workers = min(self.num_workers, len(source) - 1)
      options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
      one_thread = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
      dataset = dataset.to_iter_dataset(one_thread).mp_prefetch(options, worker_init_fn=_prepare_worker)
    else:
      ahead = grain.ReadOptions(num_threads=self.num_threads, prefetch_buffer_size=2 * self.num_threads)
      dataset = dataset.to_iter_dataset(ahead)
    parts = iter(dataset)
    try:
      for part in parts:
        # Workers pass arrays in shared memory. As the arrays are copied here, this memory can be freed even while an
        # array is still in use.
        yield jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, part) if self.num_workers else part
    except RuntimeError as e:
      if 'terminated unexpectedly' not in str(e):
        raise
      code = re.search(r'exit code (-?\d+)', str(e))
      raise DataError(f'{self.label}: a worker process that reads the data {_fate(code and int(code[1]))}') from e
    finally:
      parts.close()


_ENDINGS = ('.array_record', '.arrayrecord')


class ArrayRecordInput(GrainInput):
  """Records of ArrayRecord files. A record is read by its number, so a shuffle covers all records and costs no memory.

  Each host reads only its own records. Write files with `group_size:1` for fast reads in random order.

  Attributes: the same as for `GrainInput`. `features` describe a `tf.train.Example`, stored as in `TFRecordInput`, and
  `parse_fn` takes the bytes of a record.

  Raises (when the data is first needed):
    ConfigError: Grain is not installed.
    DataError: no file is found, a file is not an ArrayRecord file, or a record cannot be parsed.
  """

  @property
  def num_examples(self) -> int:
    return len(self._records.source)

  def first_example(self) -> Rows:
    if not self.num_examples:
      raise DataError(f'{self.label}.path: there are no records in {self.path!r}')
    for number in range(self.num_examples):
      try:
        return self._records.example(number)
      except BadRecordError as e:
        self.leave_out(e.bad)
    raise DataError(f'{self.label}.path: no record can be read')

  def pipeline(self, epoch: int, position: int, count: int, start: int, stop: int) -> RowGroups:
    if not self.num_examples:
      return
    epochs = range(epoch, self.last_epoch(epoch))
    seed = self.seed if self.shuffle else None
    struct = self._struct_with_weights if self.skips else None
    groups = _RecordGroups(self._records, epochs, seed, position, count, start, stop, struct)
    with contextlib.closing(self.parts(groups)) as parts:
      for available, rows, bad in parts:
        for record in bad:
          self.leave_out(record)
        yield available, rows

  def examples_at(self, state: dict[str, Any]) -> list[str]:
    position = int(state['position'])
    places = range(position, min(position + self.batch_size, self.num_examples))
    numbers = _shuffle(places, self.num_examples, self.seed if self.shuffle else None, int(state['epoch']))
    return [f'{place} of {file}' for file, place in map(self._records.place, numbers)]

  @functools.cached_property
  def _parse(self) -> Callable[[Sequence[bytes]], Rows]:
    if self.parse_fn is not None:
      return ParseEach(self.parse_fn, f'{self.label}.parse_fn')
    return _ParseExamples(self._features, f'{self.label}.features')

  @functools.cached_property
  def _records(self) -> _Records:
    sources = import_grain().sources
    whole, ends = [], [0]
    for file in self.files:
      try:
        ends.append(ends[-1] + len(sources.ArrayRecordDataSource([file])))
        whole.append(file)
      except (RuntimeError, ValueError, OSError) as e:
        reason = unless_empty(file, f'is not a whole ArrayRecord file: {first_line(e)}')
        self.leave_out_file(file, reason, _ENDINGS)
    if not whole:
      raise DataError(f'{self.label}.path: none of {number_of(len(self.files), "file")} is a whole ArrayRecord file')
    return _Records(sources.ArrayRecordDataSource(whole), whole, ends, self._parse, f'{self.label}.path')


@dataclasses.dataclass(frozen=True)
class _Records:
  """The records of all files, numbered consecutively. `parse` turns them into rows; `where` names the path in errors.

  `ends` has for each file the number of records before it, and at the end the number of all records.
  """

  source: Any
  files: list[str]
  ends: list[int]
  parse: Callable[[Sequence[bytes]], Rows]
  where: str

  def examples(self, numbers: list[int]) -> Rows:
    """Returns the rows of the records with these numbers; raises BadRecordError if one cannot be read."""
    try:
      return self.parse(self.source.__getitems__(numbers))
    except Exception as e:
      for number in numbers:
        self.example(number)
      raise e

  def example(self, number: int) -> Rows:
    try:
      return self.parse(self.source.__getitems__([number]))
    except ConfigError:
      raise
    except Exception as e:
      if not is_damage(e):
        raise
      raise BadRecordError(self.where, BadRecord(*self.place(number), first_line(e))) from e

  def place(self, number: int) -> tuple[str, str]:
    """Returns the file of a record, and the position of the record in the file, such as 'record 7'."""
    file = bisect.bisect_right(self.ends, number) - 1
    return self.files[file], f'record {number - self.ends[file]}'

  def whole_examples(self, numbers: list[int], struct: Struct) -> tuple[Rows, list[BadRecord]]:
    """Returns the rows of the records with these numbers, and a list of unreadable records, whose rows are zeros."""
    try:
      return self.examples(numbers), []
    except BadRecordError:
      return rows_of_each(lambda i: self.example(numbers[i]), len(numbers), struct)


@dataclasses.dataclass(frozen=True)
class _RecordGroups:
  """A Grain source of groups of `count` records, from `position` of the first epoch on.

  The last group of an epoch has fewer records, possibly none. An item consists of the number of records in a group, the
  examples [start, stop) of the group, and the list of unreadable records among them. Unreadable records become rows of
  zeros if `struct`, the struct of an example, is given; otherwise they raise an error.
  """

  records: _Records
  epochs: range
  seed: int | None
  position: int
  count: int
  start: int
  stop: int
  struct: Struct | None

  def __len__(self) -> int:
    return self._in_first_epoch + (len(self.epochs) - 1) * self._groups_of(0)

  def _groups_of(self, position: int) -> int:
    """Returns how many groups an epoch still has after its first `position` records; the incomplete last one counts."""
    return max(self.records.ends[-1] - position, 0) // self.count + 1

  @property
  def _in_first_epoch(self) -> int:
    return self._groups_of(self.position)

  def __getitem__(self, number: int) -> tuple[int, Rows | None, list[BadRecord]]:
    size = self.records.ends[-1]
    if number < self._in_first_epoch:
      epoch, first = self.epochs[0], self.position + number * self.count
    else:
      later, number = divmod(number - self._in_first_epoch, self._groups_of(0))
      epoch, first = self.epochs[1 + later], number * self.count
    available = max(min(self.count, size - first), 0)
    places = range(first + self.start, first + min(self.stop, available))
    if not places:
      return available, None, []
    indices = _shuffle(places, size, self.seed, epoch)
    if self.struct is None:
      return available, self.records.examples(indices), []
    return available, *self.records.whole_examples(indices, self.struct)


def _shuffle(places: range, size: int, seed: int | None, epoch: int) -> list[int]:
  """Returns the numbers of the records at these positions of an epoch. Without a seed, records are not shuffled."""
  if seed is None:
    return list(places)
  shuffled = import_grain().experimental.index_shuffle
  of_epoch = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
  return [shuffled(i, max_index=size - 1, seed=of_epoch, rounds=4) for i in places]


@dataclasses.dataclass(frozen=True)
class ParseEach:
  """Makes rows from records with `parse_fn`, a function of one record; `where` is its name in error messages."""

  parse_fn: Callable[[Any], Rows]
  where: str

  def __call__(self, records: Sequence[Any]) -> Rows:
    try:
      examples = [self.parse_fn(record) for record in records]
    except UserError:
      raise
    except Exception as e:
      raise DataError(f'{self.where}: it failed on a record: {error_summary(e)}') from e
    if not isinstance(examples[0], Mapping):
      raise DataError(f'{self.where}: expected it to return a dict of arrays, got {type(examples[0]).__name__}')
    try:
      return canonical_rows(jax.tree.map(lambda *xs: np.stack(xs), *examples), self.where)
    except ValueError as e:
      if isinstance(e, DataError):
        raise
      raise DataError(f'{self.where}: it returns arrays of different names or shapes: {e}') from None


@dataclasses.dataclass(frozen=True)
class _ParseExamples:
  """Makes rows from serialized `tf.train.Example`s."""

  features: dict[str, Feature]
  where: str

  def __call__(self, records: Sequence[bytes]) -> Rows:
    parsed = [features_of_example(record, self.where) for record in records]
    return canonical_rows({name: self._stack(name, parsed) for name in self.features}, self.where)

  def _stack(self, name: str, parsed: Sequence[dict[str, np.ndarray]]) -> np.ndarray:
    feature, where = self.features[name], f'{self.where}[{name!r}]'
    shape, kind = tuple(feature.shape), 'iu' if np.dtype(feature.dtype).kind in 'biu' else 'f'
    out = np.empty((len(parsed), *shape), np.int64 if kind == 'iu' else np.float32)
    for row, example in zip(out.reshape(len(parsed), -1), parsed):
      values = example.get(name)
      if values is None:
        raise DataError(f'{where}: a record has no such feature; it has {", ".join(sorted(example)) or "none"}')
      if values.dtype.kind not in kind or values.size != row.size:
        raise DataError(
          f'{where}: expected {number_of(row.size, "value")} of {feature.dtype}, and a record has {values.size} '
          f'of {values.dtype}'
        )
      row[:] = values
    return fit_dtype(out, feature.dtype, where)


def write_array_records(path: str, rows: Mapping[str, np.ndarray | Sequence[Any]]) -> None:
  """Writes `tf.train.Example`s for `ArrayRecordInput`; columns are arrays [examples, ...] or lists of bytes."""
  write_array_record_file(path, serialized_examples(rows))


def write_array_record_file(path: str, records: Iterable[bytes]) -> None:
  """Writes records as they are; raises ConfigError if Grain is not installed."""
  import_grain()
  from array_record.python import array_record_module

  writer = array_record_module.ArrayRecordWriter(path, 'group_size:1')
  try:
    for record in records:
      writer.write(record)
  finally:
    writer.close()


def _fate(code: int | None) -> str:
  """Returns the part of an error message that says how a worker ended, given its exit code."""
  if code == -signal.SIGKILL:
    return 'was killed: the machine may not have enough memory for num_workers processes'
  if code is not None and code < 0:
    return f'was ended by {signal.Signals(-code).name}; the log above says where'
  return f'ended with exit code {code}; the log above has its traceback'


def _start_quiet_tracker() -> None:
  """Starts Python's resource tracker, the process that frees leaked shared memory, with its warnings off.

  When a pipeline closes, Grain leaves parts in shared memory for this process to free.
  """
  option = 'ignore:resource_tracker:UserWarning'
  sys.warnoptions.append(option)  # The new process inherits these options.
  try:
    from multiprocessing import resource_tracker  # Here, because on Windows this import fails.

    resource_tracker.ensure_running()
  finally:
    sys.warnoptions.remove(option)


def _prepare_worker(worker: int, num_workers: int) -> None:
  """Makes a worker print where it crashes. On Linux, also makes it end when its parent dies or is killed."""
  del worker, num_workers
  faulthandler.enable()
  if sys.platform == 'linux':
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
