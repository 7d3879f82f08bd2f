"""Reads the records of a TFRecord file one by one, and continues after damaged ones where it can.

    record    length, 8 bytes | CRC of the length, 4 | data | CRC of the data, 4        CRCs are masked CRC-32C

If only the data of a record is damaged, the position of the next record is still known. After a damaged length, or any
damage in a compressed file, no further record can be found.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from praxis_lite.common.errors import DataError
from praxis_lite.inputs.bad_records import BadRecord
from praxis_lite.inputs.tensorflow import tf

_AT_ONCE = 256
# Bytes to read at the end of a file to find the last record, and bytes to read at once from a compressed file.
_END, _BLOCK = 1 << 16, 1 << 20
CANNOT_PARSE = 'cannot be parsed'


def read_records(file: str, compression: str) -> Iterator[bytes | BadRecord]:
  """Yields each record of a file, or a `BadRecord` in its place; raises DataError if the file cannot be opened."""
  if compression:
    yield from _compressed_records(file, compression)
    return
  from tensorflow.python.lib.io.tf_record import tf_record_random_reader

  try:
    size, reader, headers = os.path.getsize(file), tf_record_random_reader(file), open(file, 'rb')  # noqa: SIM115
  except (OSError, tf.errors.OpError) as e:
    raise DataError(f'cannot read {file}: {e}') from None
  number, at = 0, 0
  with headers:
    while at < size:
      try:
        record, at = reader.read(at)
        yield record
      except (tf.errors.DataLossError, tf.errors.OutOfRangeError, IndexError):
        headers.seek(at)
        after = _end_of_record(headers.read(12), at)
        if after is None or after > size:
          reason = 'is cut off' if after is not None or size - at < 12 else 'has a damaged length'
          yield BadRecord(file, f'record {number}, at byte {at}', f'{reason}; nothing after it is read')
          return
        yield BadRecord(file, f'record {number}, at byte {at}', 'its checksum does not match its data')
        at = after
      number += 1


def _compressed_records(file: str, compression: str) -> Iterator[bytes | BadRecord]:
  number = 0
  options = tf.data.Options()
  options.autotune.enabled = False  # See `BaseTFInput._groups`.
  try:
    for record in tf.data.TFRecordDataset(file, compression_type=compression).with_options(options):
      yield record.numpy()
      number += 1
    is_whole = ends_with_a_record(file, compression)
  except tf.errors.OpError:
    is_whole = False
  if not is_whole:
    yield BadRecord(file, f'record {number}', 'is damaged or cut off; nothing after it is read')


def bad_records_of(
  file: str,
  records: Iterable[bytes | BadRecord],
  parse: Callable[[list[bytes]], object],
  errors: tuple[type[Exception], ...],
) -> dict[int, BadRecord]:
  """Returns, by index in the file, the records that are damaged or for which `parse` raises one of `errors`."""
  bad: dict[int, BadRecord] = {}
  pending: dict[int, bytes] = {}

  def try_pending() -> None:
    try:
      if pending:
        parse(list(pending.values()))
    except errors:
      for number, record in pending.items():
        try:
          parse([record])
        except errors as e:
          bad[number] = BadRecord(file, f'record {number}', f'{CANNOT_PARSE}: {tensorflow_reason(e)}')
    pending.clear()

  for number, record in enumerate(records):
    if isinstance(record, BadRecord):
      bad[number] = record
    else:
      pending[number] = record
    if len(pending) == _AT_ONCE:
      try_pending()
  try_pending()
  return dict(sorted(bad.items()))


def whole_records(read: Callable[[], Iterable[bytes | BadRecord]], bad: Collection[int] | None) -> tf.data.Dataset:
  """Returns a dataset of the records that `read` yields, except damaged ones and those whose indices are in `bad`.

  If `bad` is None, the bad records are not known yet, and the first damaged record raises DataError.
  """

  def whole() -> Iterator[bytes]:
    for number, record in enumerate(read()):
      if bad is None and isinstance(record, BadRecord):
        raise DataError(str(record))
      if number not in (bad or ()) and not isinstance(record, BadRecord):
        yield record

  return tf.data.Dataset.from_generator(whole, output_signature=tf.TensorSpec([], tf.string))


def ends_with_a_record(file: str, compression: str) -> bool:
  """Whether a file ends exactly after a record. TensorFlow ignores an incomplete next record of 1 to 11 bytes.

  An uncompressed file is read backward from its end to its last record; a compressed file is read completely.
  """
  return _stream_ends(file, compression) if compression else _last_record_ends(file)


def _last_record_ends(file: str) -> bool:
  size = os.path.getsize(file)
  with open(file, 'rb') as opened:
    window = 0
    while window < size:
      window = min(size, 8 * window or _END)
      opened.seek(size - window)
      data = opened.read(window)
      if any(_end_of_record(data[at : at + 12], at) == window for at in _places_of_lengths(data)):
        return True
  return not size


def _places_of_lengths(data: bytes) -> Iterator[int]:
  """Yields each position in `data` whose 8 bytes are the length of a record that ends where `data` ends."""
  for first in range(min(8, len(data))):
    lengths = np.frombuffer(data, '<u8', (len(data) - first) // 8, first)
    places = first + 8 * np.arange(len(lengths))
    yield from places[lengths == (len(data) - 16 - places).astype(np.uint64)].tolist()


def _stream_ends(file: str, compression: str) -> bool:
  """Whether a compressed file is complete, and its decompressed content ends after a record."""
  header, left = b'', 0  # The bytes read of a 12-byte header; the number of bytes of the record still to read.
  try:
    for block in _decompress(file, compression):
      rest = memoryview(block)
      while rest:
        if left:
          left, rest = max(left - len(rest), 0), rest[left:]
          continue
        header, rest = header + rest[: 12 - len(header)], rest[12 - len(header) :]
        if len(header) == 12:
          end = _end_of_record(header, 0)
          if end is None:
            return False
          header, left = b'', end - 12
  except (zlib.error, EOFError):
    return False
  return not header and not left


def _decompress(file: str, compression: str) -> Iterator[bytes]:
  """Yields the decompressed content of a file in blocks; raises zlib.error or EOFError for a damaged file."""
  wbits = zlib.MAX_WBITS | (16 if compression == 'GZIP' else 0)
  with open(file, 'rb') as opened:
    stream = zlib.decompressobj(wbits)
    while data := stream.unconsumed_tail or stream.unused_data or opened.read(_BLOCK):
      if stream.eof:  # The file has another stream.
        stream = zlib.decompressobj(wbits)
      yield stream.decompress(data, _BLOCK)
    yield stream.flush()
    if not stream.eof and opened.tell():
      raise EOFError


def _end_of_record(header: bytes, at: int) -> int | None:
  """Returns where the record at byte `at` ends, or None if its length is damaged."""
  if len(header) < 12:
    return None
  length, crc = struct.unpack('<QI', header)
  return at + 16 + int(length) if crc == _masked_crc32c(header[:8]) else None


def _masked_crc32c(data: bytes) -> int:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _table()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _table() -> list[int]:
  """Returns the checksum of each byte. Without this table, checking compressed files takes three times as long."""
  table = []
  for byte in range(256):
    for _ in range(8):
      byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    table.append(byte)
  return table


def tensorflow_reason(error: Exception) -> str:
  """Returns the first line of a TensorFlow error, without the names of graph nodes."""
  # A message begins with the graph node, in double braces, and may end with the operation.
  line = re.sub(r'^(\{\{.*?\}\} ?)+', '', str(getattr(error, 'message', error))).split('\n')[0]
  return re.sub(r' *\[Op:\w+\] name: *$', '', line)
