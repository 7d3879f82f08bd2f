"""TFRecord files that are cut off: what is missing is refused or counted, also where the header of a record is cut."""

from __future__ import annotations

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.inputs import Feature, TFRecordInput, write_tfrecords
from praxis_lite.inputs.tfrecord_files import ends_with_a_record

COUNT = 6


def config(path, **kwargs):
  features = {'x': Config(Feature, dtype='int32', shape=(3,))}
  return Config(TFRecordInput, file_pattern=str(path), features=features, batch_size=2, **kwargs)


def first_of_each(data):
  return [int(x[0]) for b in data for x, w in zip(b['x'], b['weights']) if w]


def written(path, compression=''):
  """Writes two files of `COUNT` records, of which the first is to be cut; returns its content."""
  for number, name in enumerate(('a', 'b')):
    x = np.arange(COUNT)[:, None] + 100 * number + np.zeros(3, int)
    write_tfrecords(str(path / name), {'x': x}, compression)
  return (path / 'a').read_bytes()


def ends(content):
  """Where each record ends."""
  at, found = 0, []
  while at < len(content):
    at += 16 + int.from_bytes(content[at : at + 8], 'little')
    found.append(at)
  return found


@pytest.mark.slow_cases
@pytest.mark.parametrize('into', [*range(1, 12), 12, 15, 20])
def test_a_file_cut_within_a_record(tmp_path, into):
  content = written(tmp_path)
  at = ends(content)[3]  # Behind four records.
  (tmp_path / 'a').write_bytes(content[: at + into])
  for shuffle in (False, True):
    with pytest.raises(
      DataError, match=rf'{tmp_path}/a is not a whole TFRecord file: record 4, at byte {at} of .*cut off'
    ):
      first_of_each(config(tmp_path, shuffle=shuffle).instantiate())
  data = config(tmp_path, on_bad_record='skip').instantiate()
  expected = [0, 1, 2, 3, *range(100, 106)]
  assert first_of_each(data) == expected
  (bad,) = data.bad_records
  assert (bad.file, bad.place) == (str(tmp_path / 'a'), f'record 4, at byte {at}') and 'is cut off' in bad.reason
  data.set_state(data.get_state() | {'epoch': 0, 'position': 6})
  assert first_of_each(data) == expected[6:]


@pytest.mark.slow
@pytest.mark.parametrize('compression', ['GZIP', 'ZLIB'])
def test_a_compressed_file_that_is_cut_anywhere(tmp_path, compression):
  content = written(tmp_path, compression)
  assert first_of_each(config(tmp_path, compression=compression).instantiate())[:COUNT] == [*range(COUNT)]
  for size in {1, 5, len(content) // 3, len(content) // 2, len(content) - 9, len(content) - 4, len(content) - 1}:
    (tmp_path / 'a').write_bytes(content[:size])
    with pytest.raises(DataError, match=f'{tmp_path}/a is not a whole TFRecord file'):
      first_of_each(config(tmp_path, compression=compression).instantiate())
    data = config(tmp_path, compression=compression, on_bad_record='skip').instantiate()
    assert first_of_each(data)[-COUNT:] == [*range(100, 106)] and len(data.bad_records) == 1


def test_a_compressed_file_of_a_part_of_a_header(tmp_path):
  import gzip
  import zlib

  plain = written(tmp_path)[: ends(written(tmp_path))[2] + 7]
  for compression, compress in (('GZIP', gzip.compress), ('ZLIB', zlib.compress)):
    (tmp_path / 'a').write_bytes(compress(plain))
    with pytest.raises(DataError, match=f'{tmp_path}/a is not a whole TFRecord file: record 3'):
      first_of_each(config(tmp_path / 'a', compression=compression).instantiate())


def test_files_that_are_whole(tmp_path):
  """Of all sizes, an empty one, with a record larger than what is read of the end, and two parts of gzip."""
  for count in (0, 1, 7):
    for size in (0, 1, 1000, 70_000):
      file = str(tmp_path / 'a')
      for compression in ('', 'GZIP', 'ZLIB'):
        write_tfrecords(file, {'x': np.zeros((count, size), np.float32)}, compression)
        assert ends_with_a_record(file, compression), (count, size, compression)
  write_tfrecords(file, {'x': np.arange(3)[:, None] + np.zeros(3, int)}, 'GZIP')
  (tmp_path / 'a').write_bytes(2 * (tmp_path / 'a').read_bytes())
  assert ends_with_a_record(file, 'GZIP')
