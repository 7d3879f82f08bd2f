"""TableInput: rows of Parquet and Arrow files, through Grain and PyArrow.

A file consists of groups of rows: row groups in Parquet, record batches in Arrow. A group is always read as a whole.
With `shuffle`, each epoch has a new order of the groups, and the rows of `mixed_groups` groups, a chunk, are shuffled
together. The chunk of a position is known, so a restore reads nothing before that chunk:

    groups   3 0 | 4 1 | 2                                       mixed_groups = 2
    rows     all of 3 and 0, shuffled | all of 4 and 1 | ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from praxis_lite.common.errors import ConfigError, DataError, did_you_mean, first_line
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import parse_json, read_plain, unless_empty
from praxis_lite.inputs.bad_records import BadRecord, BadRecordError, is_damage, rows_of_each
from praxis_lite.inputs.files import find_files
from praxis_lite.inputs.grain_input import GrainInput, ParseEach
from praxis_lite.inputs.random_access import permutation
from praxis_lite.inputs.rows import Feature, Rows, Struct, canonical_rows, concatenate_rows, fit_dtype, pad_rows
from praxis_lite.inputs.streamed import RowGroups

if TYPE_CHECKING:
  import pyarrow as pa

_Group = tuple[str, int]  # A file, and the number of a group in it.
# What to do with files of other kinds, by the endings of their names.
_OTHER_KINDS = {
  **dict.fromkeys(('.csv', '.tsv', '.json', '.jsonl'), 'convert it, as by pandas and to_parquet'),
  **dict.fromkeys(('.npz', '.npy'), 'ArrayInput takes arrays'),
  '.txt': 'TextInput reads text',
  '.tfrecord': 'TFRecordInput reads these',
  '.array_record': 'ArrayRecordInput reads these',
}


@functools.cache
def import_pyarrow() -> ModuleType:
  """Imports PyArrow; raises ConfigError if it is not installed."""
  try:
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet
  except ImportError:
    raise ConfigError('PyArrow is not installed; pip install praxis_lite[grain]') from None
  return pyarrow


class Column(Feature):
  """A column that becomes an array of an example. Its entries are numbers, or lists that fill the shape.

  Attributes:
    column: name of the column; None uses the name of the array.
  """

  column: str | None = None


_ENDINGS = ('.parquet', '.arrow', '.feather')


class TableInput(GrainInput):
  """Rows of Parquet files, and of Arrow files in the file format (Feather) or the stream format.

  The path may be a folder that `save_to_disk` of the package `datasets` wrote for one split. Each host reads all
  groups, and keeps only its own rows. Of Parquet files, only the needed columns are read.

  Attributes: those of `GrainInput`, and
    features: arrays of an example by name, as configs of `Feature` or `Column`.
    parse_fn: takes a row as a dict from column name to Python value.
    columns: the columns that `parse_fn` gets; None means all.
    mixed_groups: how many groups are shuffled together.

  Raises (when the data is first needed):
    ConfigError: Grain or PyArrow is not installed.
    DataError: no file is found, a file has none of these formats, or a column is missing or does not fit its feature.
  """

  columns: tuple[str, ...] | None = None
  mixed_groups: int = 4

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(mixed_groups=1)
    if self.columns is not None and self.features is not None:
      raise ConfigError(f'{self.label}.columns: leave it out; features determine which columns are read')

  @functools.cached_property
  def files(self) -> list[str]:
    where = f'{self.label}.path'
    return find_files(self.path, where, functools.partial(_saved_files, where=where))

  @functools.cached_property
  def _groups(self) -> tuple[list[_Group], np.ndarray]:
    """All groups of the files, in order, and the number of rows of each group."""
    groups, sizes = [], []
    for file in self.files:
      try:
        of_file = _group_sizes(file, f'{self.label}.path')
      except BadRecordError as e:
        self.leave_out_file(file, e.bad.reason, _ENDINGS)
        continue
      for number, size in enumerate(of_file):
        if size:
          groups.append((file, number))
          sizes.append(size)
    return groups, np.array(sizes, np.int64)

  @property
  def num_examples(self) -> int:
    return int(self._groups[1].sum())

  def first_example(self) -> Rows:
    groups, _ = self._groups
    if not groups:
      raise DataError(f'{self.label}.path: there are no rows in {self.path!r}')
    for group in groups:
      try:
        table = _read_group(group, self._columns, self._convert.where)
      except BadRecordError as e:
        self.leave_out(e.bad)
        continue
      for row in range(table.num_rows):
        try:
          return self._convert.row(table, row, group)
        except BadRecordError as e:
          self.leave_out(e.bad)
    raise DataError(f'{self.label}.path: no row can be read')

  def pipeline(self, epoch: int, position: int, count: int, start: int, stop: int) -> RowGroups:
    groups, sizes = self._groups
    if not groups:
      return
    epochs = range(epoch, self.last_epoch(epoch))
    seed = self.seed if self.shuffle else None
    struct = self._struct_with_weights if self.skips else None
    chunks = _Chunks(groups, sizes, epochs, seed, self.mixed_groups, self._columns, self._convert, struct)
    ends = np.cumsum([sizes[chunk].sum() for chunk in chunks.chunk_groups(epoch)])
    # A position at the end of an epoch belongs to the last chunk, after its rows.
    first = min(int(np.searchsorted(ends, position, side='right')), len(ends) - 1)
    at = position - (int(ends[first - 1]) if first else 0)
    left, taken = int(ends[-1]) - position, 0
    parts: list[Rows] = []
    with contextlib.closing(self.parts(dataclasses.replace(chunks, first=first))) as all_parts:
      for chunk, bad in all_parts:
        for record in bad:
          self.leave_out(record)
        size = len(chunk['weights'])
        while at < size:
          n = min(size - at, count - taken)
          low, high = max(start - taken, 0), min(stop - taken, n)
          if low < high:
            own = slice(at + low, at + high)
            parts.append(jax.tree.map(lambda x, own=own: x[own], chunk))
          at, taken, left = at + n, taken + n, left - n
          if taken == count:
            yield count, concatenate_rows(parts)
            taken, parts = 0, []
        at = 0
        if not left:
          yield taken, concatenate_rows(parts)
          left, taken, parts = int(ends[-1]), 0, []

  @functools.cached_property
  def _convert(self) -> _Converter:
    if self.parse_fn is not None:
      return _Converter(None, ParseEach(self.parse_fn, f'{self.label}.parse_fn'), f'{self.label}.columns')
    return _Converter(self._features, None, f'{self.label}.features')

  @property
  def _columns(self) -> tuple[str, ...] | None:
    if self.features is None:
      return self.columns
    return tuple(dict.fromkeys(_column_of(name, f) for name, f in self._features.items()))


def _column_of(name: str, feature: Feature) -> str:
  return getattr(feature, 'column', None) or name


@dataclasses.dataclass(frozen=True)
class _Chunks:
  """A Grain source of the chunks of all epochs, from chunk `first` of the first epoch on.

  An item consists of the rows of a chunk, in the order of the epoch, and the list of unreadable rows. Unreadable rows
  become zeros if `struct`, the struct of a row, is given; otherwise they raise an error.
  """

  groups: list[_Group]
  sizes: np.ndarray
  epochs: range
  seed: int | None
  groups_of_chunk: int
  columns: tuple[str, ...] | None
  convert: _Converter
  struct: Struct | None
  first: int = 0

  @property
  def _per_epoch(self) -> int:
    return math.ceil(len(self.groups) / self.groups_of_chunk)

  def __len__(self) -> int:
    return len(self.epochs) * self._per_epoch - self.first

  def chunk_groups(self, epoch: int) -> list[np.ndarray]:
    """Returns the indices of the groups in each chunk of an epoch."""
    order = np.arange(len(self.groups)) if self.seed is None else permutation(len(self.groups), self.seed, epoch)
    return [order[i : i + self.groups_of_chunk] for i in range(0, len(order), self.groups_of_chunk)]

  def __getitem__(self, number: int) -> tuple[Rows, list[BadRecord]]:
    later, number = divmod(self.first + number, self._per_epoch)
    epoch = self.epochs[later]
    parts = [self._rows(i) for i in self.chunk_groups(epoch)[number]]
    rows, bad = concatenate_rows([rows for rows, _ in parts]), [record for _, records in parts for record in records]
    assert rows is not None
    if self.seed is None:
      return rows, bad
    order = permutation(len(rows['weights']), self.seed, epoch, number)
    return jax.tree.map(lambda x: x[order], rows), bad

  def _rows(self, i: int) -> tuple[Rows, list[BadRecord]]:
    """Returns the rows of a group, zeros for unreadable rows, and the list of unreadable rows."""
    group, size = self.groups[i], int(self.sizes[i])
    try:
      table = _read_group(group, self.columns, self.convert.where)
      try:
        return self.convert(table), []
      except DataError as e:
        if self.struct is None:
          raise DataError(f'{e}{self._first_bad(table, group)}') from e
        return rows_of_each(lambda row: self.convert.row(table, row, group), size, self.struct)
    except BadRecordError as e:
      if self.struct is None:
        raise
      return pad_rows(None, size, self.struct), [e.bad._replace(records=size)]

  def _first_bad(self, table: pa.Table, group: _Group) -> str:
    """Returns the end of an error message: the place of the first row that cannot be converted, or of the group."""
    try:
      for row in range(table.num_rows):
        self.convert.row(table, row, group)
    except BadRecordError as e:
      return f' ({e.bad.place} of {e.bad.file})'
    return f' (group {group[1]} of {group[0]})'


@dataclasses.dataclass(frozen=True)
class _Converter:
  """Makes rows from a table, by features or by a function of a row. `where` is the config field to name in errors."""

  features: dict[str, Feature] | None
  parse: ParseEach | None
  where: str

  def __call__(self, table: pa.Table) -> Rows:
    if self.features is None:
      assert self.parse is not None
      return self.parse(table.to_pylist())
    arrays = {name: self._array(table, name, feature) for name, feature in self.features.items()}
    return canonical_rows(arrays, self.where)

  def row(self, table: pa.Table, number: int, group: _Group) -> Rows:
    """Returns one row of the table of a group; raises BadRecordError if it cannot be converted."""
    try:
      return self(table.slice(number, 1))
    except DataError as e:
      file, of = group
      raise BadRecordError(self.where, BadRecord(file, f'row {number} of group {of}', first_line(e))) from e

  def _array(self, table: pa.Table, name: str, feature: Feature) -> np.ndarray:
    where, column = f'{self.where}[{name!r}]', _column_of(name, feature)
    pa = import_pyarrow()
    array, count = table.column(column).combine_chunks(), table.num_rows
    if isinstance(array, pa.ChunkedArray):  # Some versions return this if there is no chunk, or a chunk is too large.
      array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    size, expected = 1, int(np.prod(feature.shape))
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
      if array.null_count:
        raise DataError(f'{where}: column {column!r} has {number_of(array.null_count, "row")} without a value')
      lengths = pa.compute.list_value_length(array).unique().to_pylist()
      if len(lengths) > 1:
        few, many = min(lengths), max(lengths)
        raise DataError(f'{where}: column {column!r} has lists of {few} to {many} values; expected {expected} in each')
      size *= lengths[0] if lengths else 1
      array = array.flatten()
    stored = str(array.type)
    is_float, wants_float = pa.types.is_floating(array.type), np.dtype(feature.dtype).kind not in 'biu'
    if not (is_float or pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
      raise DataError(f'{where}: column {column!r} is {stored}, not numbers; convert it to numbers in a parse_fn')
    if is_float and not wants_float:
      raise DataError(f'{where}: column {column!r} is {stored}; expected {feature.dtype}')
    if size != expected:
      raise DataError(
        f'{where}: column {column!r} has {number_of(size, "value")} a row; the shape {feature.shape} has {expected}'
      )
    if array.null_count:
      raise DataError(f'{where}: column {column!r} has {number_of(array.null_count, "row")} without a value')
    values = array.to_numpy(zero_copy_only=False)
    return fit_dtype(values, feature.dtype, where).reshape(count, *feature.shape)


# -------------------------------------------------------------------- files


def _saved_files(directory: str, where: str) -> list[str] | None:
  """Returns the files with the rows of a dataset that `save_to_disk` of `datasets` wrote; None for other directories.

  The directory also has descriptions in JSON, and maybe results of `map` that are not part of the dataset. Raises
  DataError if the dataset has several splits.
  """
  splits = _list_in(os.path.join(directory, 'dataset_dict.json'), 'splits')
  if splits is not None:
    folders = ', '.join(os.path.join(directory, str(name)) for name in splits)
    raise DataError(f'{where}: {directory} has a folder for each split; name one of them: {folders}')
  files = _list_in(os.path.join(directory, 'state.json'), '_data_files') or []
  names = [os.path.basename(str(file.get('filename'))) for file in files if isinstance(file, dict)]
  return [os.path.join(directory, name) for name in names] or None


def _list_in(file: str, field: str) -> list[Any] | None:
  """Returns a list in a JSON file; None if there is no such file, or no such list in it."""
  try:
    found = parse_json(read_plain(file))[field]
  except (OSError, ValueError, KeyError, TypeError):
    return None
  return found if isinstance(found, list) else None


def _read_group(group: _Group, columns: tuple[str, ...] | None, where: str) -> pa.Table:
  """Returns a group of a file; raises DataError if the group cannot be read, or a column is missing."""
  pa, (file, number) = import_pyarrow(), group
  try:
    if _is_parquet(file):
      with pa.parquet.ParquetFile(file, memory_map=True, page_checksum_verification=True) as opened:
        check_columns(columns, opened.schema_arrow.names, file, where)
        return opened.read_row_group(number, columns=None if columns is None else list(columns), use_threads=False)
    table = pa.Table.from_batches([_batches(file)[number]])
    check_columns(columns, table.column_names, file, where)
    return table if columns is None else table.select(list(columns))
  except (pa.ArrowException, OSError) as e:
    if not is_damage(e):
      raise DataError(f'{where}: group {number} of {file} cannot be read: {first_line(e)}') from e
    raise BadRecordError(where, BadRecord(file, f'group {number}', f'cannot be read: {first_line(e)}')) from None


def check_columns(columns: Sequence[str] | None, known: list[str], file: str, where: str) -> None:
  """Raises DataError, which begins with `where`, if a file lacks a column."""
  for column in columns or ():
    if column not in known:
      close = did_you_mean(column, known)
      raise DataError(f'{where}: there is no column {column!r} in {file}.{close} It has {", ".join(known)}')


def _group_sizes(file: str, where: str) -> list[int]:
  """Returns the number of rows in each group of a file; raises DataError if its format is not supported."""
  pa = import_pyarrow()
  try:
    if _is_parquet(file):
      metadata = pa.parquet.read_metadata(file)
      return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return [batch.num_rows for batch in _batches(file)]
  except (pa.ArrowException, OSError) as e:
    kind = os.path.splitext(file)[1].lower()
    reason = f'is not a whole Parquet or Arrow file: {first_line(e)}'
    if kind in _OTHER_KINDS:
      reason = f'is a file of another kind, {kind}; TableInput reads Parquet and Arrow: {_OTHER_KINDS[kind]}'
    reason = unless_empty(file, reason)
    raise BadRecordError(where, BadRecord(file, '', reason)) from None


def _batches(file: str) -> list[pa.RecordBatch]:
  """Returns the record batches of an Arrow file; the data of a batch is read only when it is used."""
  about = os.stat(file)
  return _batches_of(file, about.st_ino, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _batches_of(file: str, *of_its_content: int) -> list[pa.RecordBatch]:
  pa = import_pyarrow()
  source = pa.memory_map(file)
  if source.read(6) == b'ARROW1':
    reader = pa.ipc.open_file(source)
    return [reader.get_batch(i) for i in range(reader.num_record_batches)]
  source.seek(0)
  return list(pa.ipc.open_stream(source))


def _is_parquet(file: str) -> bool:
  with open(file, 'rb') as f:
    return f.read(4) == b'PAR1'
