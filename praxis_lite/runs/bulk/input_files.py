"""Files of rows, on disk or at a URL that fsspec can open.

*.jsonl      an object in each line
*.txt        a text in each line, as {"text": ...}
*.parquet    the values of each row, by the names of the columns

Blank lines are skipped. A shard knows its range of bytes, or of Parquet rows, and reads only this part of a file.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple, cast

from praxis_lite.common.errors import DataError, first_line
from praxis_lite.common.file_systems import open_file_system, store_errors
from praxis_lite.common.files import is_url, open_plain, parse_json_line
from praxis_lite.common.foreign_text import remove_secrets
from praxis_lite.inputs.files import find_files
from praxis_lite.inputs.tables import import_pyarrow

_LINES, _TABLE = ('.jsonl', '.txt'), '.parquet'


class Row(NamedTuple):
  """A row of a file.

  Attributes:
    number: its number among all rows of the input, from 0.
    where: the file and the place in it, for messages.
    values: its values by name; None if they cannot be read.
    error: why it cannot be read; '' if it can.
  """

  number: int
  where: str
  values: dict[str, Any] | None
  error: str = ''


class Part(NamedTuple):
  """Consecutive rows of a file.

  Attributes:
    start, stop: the range of bytes in a file of lines, or of rows in a table.
    place: the number of the first line, from 1, or of the first row, from 0.
    first: the number of the first row among all rows of the input.
    sha256: the hash of the bytes for a file of lines; '' for a table.
  """

  file: str
  start: int
  stop: int
  place: int
  first: int
  num_rows: int
  sha256: str


class InputFile(NamedTuple):
  """Identifies the content of a file: path, a stamp that changes when it is written, bytes, hash and number of rows."""

  file: str
  stamp: str
  size: int
  sha256: str
  rows: int


def list_inputs(paths: Sequence[str]) -> list[str]:
  """Returns the files that paths, patterns and URLs name, in this order; the files of one pattern are sorted by name.

  Raises:
    DataError: there is no such file, a file is named twice, or its name has an unknown ending.
    ConfigError: a URL is not valid, or fsspec is not installed.
  """
  found: list[str] = []
  for path in paths:
    if is_url(path):
      fs, root = open_file_system(path)
      with _one_line_errors(path):
        names = fs.glob(root) if glob.has_magic(root) else [root]
        names = [each for name in names for each in (fs.ls(name, detail=False) if fs.isdir(name) else [name])]
      found += [fs.unstrip_protocol(name) for name in sorted(names)]
    else:
      found += [os.path.abspath(file) for file in find_files(path, '--input')]
  if not found:
    raise DataError(f'--input={paths[0]}: there are no such files')
  seen = set[str]()
  if twice := next((file for file in found if file in seen or seen.add(file)), None):  # type: ignore[func-returns-value]
    raise DataError(f'--input: {twice} is named twice')
  if other := next((file for file in found if not file.endswith((*_LINES, _TABLE))), None):
    raise DataError(f'--input: {other} is no file of rows: *.jsonl, *.txt or *.parquet')
  return found


def cut_file(file: str, first: int, most: int) -> tuple[InputFile, list[Part]]:
  """Returns a pair: what identifies a file, and the file's parts of at most `most` rows.

  `first` is the number of the file's first row among all rows of the input.
  """
  before = stamp_of(file)
  cut = _cut_table if file.endswith(_TABLE) else _cut_lines
  with open_input(file) as opened, _one_line_errors(file):
    sum_, parts = cut(file, opened, first, most)
  if stamp_of(file) != before:
    raise DataError(f'{file}: it changed while it was read')
  stamp, size = before
  return InputFile(file, stamp, size, sum_, sum(part.num_rows for part in parts)), parts


def read_part(part: Part) -> Iterator[Row]:
  """Yields the rows of a part; raises DataError if the bytes of a file of lines have changed since the file was cut."""
  if part.file.endswith(_TABLE):
    yield from _rows_of_table(part)
    return
  with open_input(part.file) as opened, _one_line_errors(part.file):
    opened.seek(part.start)
    data = opened.read(part.stop - part.start)
  if hashlib.sha256(data).hexdigest() != part.sha256:
    raise DataError(f'{part.file}: it has changed since the plan was made')
  number = part.first
  for line, content in enumerate(data.split(b'\n'), part.place):
    if content.strip():
      yield _row_of_line(number, f'{part.file}: line {line}', content, part.file.endswith('.txt'))
      number += 1


def stamp_of(file: str) -> tuple[str, int]:
  """Returns a stamp that changes whenever a file is written, and the file's size in bytes."""
  if not is_url(file):
    about = os.stat(file)
    return str(about.st_mtime_ns), about.st_size
  fs, path = open_file_system(file)
  with _one_line_errors(file):
    fs.invalidate_cache()
    return str(fs.ukey(path)), int(fs.info(path)['size'])


def sum_of_input(file: str) -> str:
  """Reads a file, and returns its SHA-256."""
  with open_input(file) as opened, _one_line_errors(file):
    return _sum(opened)


def open_input(file: str) -> IO[bytes]:
  if not is_url(file):
    return open_plain(file)
  fs, path = open_file_system(file)
  with _one_line_errors(file):
    return cast(IO[bytes], fs.open(path, 'rb'))


# -------------------------------------------------------------------- lines


def _cut_lines(file: str, opened: IO[bytes], first: int, most: int) -> tuple[str, list[Part]]:
  whole, own, parts = hashlib.sha256(), hashlib.sha256(), list[Part]()
  start = stop = count = 0
  place = 1
  line = 0
  for line, content in enumerate(opened, 1):
    whole.update(content)
    own.update(content)
    stop += len(content)
    count += bool(content.strip())
    if count == most:
      parts.append(Part(file, start, stop, place, first, count, own.hexdigest()))
      start, place, first, count, own = stop, line + 1, first + count, 0, hashlib.sha256()
  if count:
    parts.append(Part(file, start, stop, place, first, count, own.hexdigest()))
  return whole.hexdigest(), parts


def _row_of_line(number: int, where: str, line: bytes, is_text: bool) -> Row:
  try:
    if is_text:
      return Row(number, where, {'text': line.removesuffix(b'\r').decode()})
    values = parse_json_line(line)
  except ValueError as error:  # A ValueError is raised for bytes that are not UTF-8, too.
    return Row(number, where, None, f'is not {"UTF-8 text" if is_text else "JSON"}: {error}')
  if not isinstance(values, dict):
    return Row(number, where, None, f'expected an object, got {type(values).__name__}')
  return Row(number, where, values)


# -------------------------------------------------------------------- tables


def _cut_table(file: str, opened: IO[bytes], first: int, most: int) -> tuple[str, list[Part]]:
  pa = import_pyarrow()
  digest = _sum(opened)
  opened.seek(0)
  try:
    count = pa.parquet.ParquetFile(opened).metadata.num_rows
  except (pa.ArrowException, OSError) as error:
    raise DataError(f'{file}: is not a Parquet file: {first_line(error)}') from None
  starts = range(0, count, most)
  parts = [Part(file, n, min(n + most, count), n, first + n, min(n + most, count) - n, '') for n in starts]
  return digest, parts


def _sum(opened: IO[bytes]) -> str:
  digest = hashlib.sha256()
  while block := opened.read(1 << 20):  # `hashlib.file_digest` refuses files of some stores, such as HDFS.
    digest.update(block)
  return digest.hexdigest()


def _rows_of_table(part: Part) -> Iterator[Row]:
  pa = import_pyarrow()
  with open_input(part.file) as opened, _one_line_errors(part.file):
    with _table_errors(part.file):
      table = pa.parquet.ParquetFile(opened)
    begin, number, stamp = 0, part.first, stamp_of(part.file)
    for group in range(table.num_row_groups):
      end = begin + table.metadata.row_group(group).num_rows
      inside = max(begin, part.start), min(end, part.stop)
      if inside[0] < inside[1]:
        rows = _read_group(part.file, stamp, group, table).slice(inside[0] - begin, inside[1] - inside[0])
        for row, values in enumerate(rows.to_pylist(), inside[0]):
          yield Row(number, f'{part.file}: row {row}', {n: x for n, x in values.items() if x is not None})
          number += 1
      begin = end
  if number != part.first + part.num_rows:
    raise DataError(f'{part.file}: it has changed since the plan was made')


_last_group: dict[tuple[str, tuple[str, int], int], Any] = {}


def _read_group(file: str, stamp: tuple[str, int], group: int, table: Any) -> Any:
  """Returns the rows of a row group. The last group read is cached, because successive shards may read it again."""
  key = file, stamp, group
  if key not in _last_group:
    _last_group.clear()
    with _table_errors(f'{file}: row group {group}'):
      _last_group[key] = table.read_row_group(group)
  return _last_group[key]


@contextlib.contextmanager
def _table_errors(where: str) -> Iterator[None]:
  """Turns Arrow's errors about a damaged file, which do not name the file, into a DataError that names it."""
  try:
    yield
  except (import_pyarrow().ArrowException, OSError) as error:
    raise DataError(f'{where}: cannot be read as Parquet: {first_line(error)}') from None


# -------------------------------------------------------------------- URLs


def _one_line_errors(file: str) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which an error of an object store's package becomes a DataError of one line."""
  return store_errors(remove_secrets(file)) if is_url(file) else contextlib.nullcontext()
