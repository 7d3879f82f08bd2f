"""The records of ArrayRecord and Parquet files as serialized `tf.train.Example`s, for inputs that read TFRecord files.

The records of an ArrayRecord file are serialized examples already. A row of a Parquet file becomes an example whose
features are the columns.
Needs `pip install praxis_lite[grain]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from praxis_lite.common.errors import ConfigError, DataError, first_line
from praxis_lite.common.files import unless_empty
from praxis_lite.inputs.bad_records import BadRecord
from praxis_lite.inputs.tables import check_columns, import_pyarrow
from praxis_lite.inputs.tf_example import serialized_example

_ARRAY_RECORD = ('.array_record', '.arrayrecord')
_PARQUET = '.parquet'
_AT_ONCE = 64


def is_tfrecord(file: str) -> bool:
  """Whether a file is read as TFRecord: its name has no ending of ArrayRecord or Parquet files."""
  return not file.endswith((*_ARRAY_RECORD, _PARQUET))


def read_examples(file: str, columns: Sequence[str], where: str) -> Iterator[bytes | BadRecord]:
  """Yields each record of an ArrayRecord or Parquet file, or a `BadRecord` in its place.

  Only `columns` are read from a Parquet file; images in them may be bytes, or in the form of the package `datasets`.

  Raises:
    ConfigError: a package is missing.
    DataError: a Parquet file lacks a column; the message begins with `where`.
  """
  return _rows(file, columns, where) if file.endswith(_PARQUET) else _array_records(file)


def _array_records(file: str) -> Iterator[bytes | BadRecord]:
  try:
    from array_record.python.array_record_module import ArrayRecordReader
  except ImportError:
    raise ConfigError('array_record is not installed; pip install praxis_lite[grain]') from None
  number, reader = 0, ArrayRecordReader(file)
  try:
    if not reader.ok():
      reader.close()  # Raises an error that says why the file cannot be read.
    for number in range(0, reader.num_records(), _AT_ONCE):
      yield from reader.read(number, min(number + _AT_ONCE, reader.num_records()))
    reader.close()
  except (RuntimeError, ValueError, OSError) as error:
    reason = unless_empty(file, f'is not a whole ArrayRecord file: {first_line(error)}')
    yield BadRecord(file, f'record {number}' if number else '', reason)


def _rows(file: str, columns: Sequence[str], where: str) -> Iterator[bytes | BadRecord]:
  pa, number = import_pyarrow(), 0
  try:
    with pa.parquet.ParquetFile(file, memory_map=True, page_checksum_verification=True) as opened:
      check_columns(columns, opened.schema_arrow.names, file, where)
      for batch in opened.iter_batches(_AT_ONCE, columns=list(columns)):
        for row in batch.to_pylist():
          try:
            yield _example(row)
          except (DataError, TypeError, ValueError) as error:
            reason = f'cannot be stored as a tf.train.Example: {first_line(error)}'
            yield BadRecord(file, f'row {number}', reason)
          number += 1
  except (pa.ArrowException, OSError) as error:
    reason = unless_empty(file, f'is not a whole Parquet file: {first_line(error)}')
    yield BadRecord(file, f'row {number}' if number else '', reason)


def _example(row: dict[str, Any]) -> bytes:
  """Returns a row as a serialized example; raises ValueError or TypeError if an example cannot store a value."""
  values: dict[str, np.ndarray | bytes] = {}
  for name, value in row.items():
    if isinstance(value, dict):
      value = value.get('bytes')
    if value is None:
      raise ValueError(f'it has nothing in its column {name!r}')
    if isinstance(value, str):
      value = value.encode()
    values[name] = value if isinstance(value, bytes) else np.asarray(value)
  return serialized_example(values)
