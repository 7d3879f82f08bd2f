"""Damaged records: an error that names file and record, or left out, in a way that restarts and hosts agree on."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import Feature, MixtureInput, TextInput
from praxis_lite.inputs.grain_input import ArrayRecordInput, write_array_records
from praxis_lite.inputs.tables import TableInput
from praxis_lite.inputs.tfdata import TFRecordInput, write_tfrecords

X = {'x': Config(Feature, dtype='int32')}


def batches(data, count=100):
  """(x, weight) of each row of the next batches."""
  rows = []
  for _, batch in zip(range(count), data):
    rows += list(zip(batch['x'].tolist(), batch['weights'].tolist()))
  return rows


def flip(file, at):
  content = bytearray(file.read_bytes())
  content[at] ^= 0xFF
  file.write_bytes(content)


def array_records(tmp_path, **kwargs):
  """Three files of 10 records; record 6 of the second is damaged, and the third is cut off."""
  for number in range(3):
    file = tmp_path / f'{number}.array_record'
    write_array_records(str(file), {'x': 1000 + np.arange(10 * number, 10 * number + 10)})
  content = (tmp_path / '1.array_record').read_bytes()
  part = b'\n\x02\xf8\x07'  # In the record of 1016: a list of two bytes.
  at = content.index(part)
  assert content.count(part, 0, 4000) == 1
  flip(tmp_path / '1.array_record', at + 1)
  content = (tmp_path / '2.array_record').read_bytes()
  (tmp_path / '2.array_record').write_bytes(content[:-100])
  return Config(ArrayRecordInput, path=str(tmp_path), features=X, batch_size=4, **kwargs).instantiate()


def test_array_records(tmp_path):
  with pytest.raises(DataError, match=r'path: .*2.array_record is not a whole ArrayRecord file'):
    array_records(tmp_path).get_next()
  os.remove(tmp_path / '2.array_record')
  data = Config(ArrayRecordInput, path=str(tmp_path), features=X, batch_size=4).instantiate()
  with pytest.raises(DataError, match=r'path: record 6 of .*1.array_record: .*mismatch'):
    batches(data)

  skipping = array_records(tmp_path, on_bad_record='skip')
  expected = [(1000 + i, 1.0) if i != 16 else (0, 0.0) for i in range(20)]
  assert batches(skipping) == expected
  assert [(os.path.basename(b.file), b.place) for b in skipping.bad_records] == [
    ('2.array_record', ''), ('1.array_record', 'record 6')
  ]  # fmt: skip
  # From any position on, and on two hosts, the others are where they were.
  for start in range(5):
    again = array_records(tmp_path, on_bad_record='skip')
    next_state = again.get_state() | {'position': 4 * start}
    again.set_state(next_state)
    assert batches(again) == expected[4 * start :]
  hosts = [array_records(tmp_path, on_bad_record='skip', num_hosts=2, host_index=h) for h in (0, 1)]
  join_by_host = [np.array(batches(h)).reshape(-1, 2, 2) for h in hosts]
  assert np.concatenate(join_by_host, 1).reshape(-1, 2).tolist() == [list(row) for row in expected]
  shuffled = array_records(tmp_path, on_bad_record='skip', shuffle=True, seed=1)
  assert sorted(batches(shuffled)) == sorted(expected)

  with pytest.raises(DataError, match=r'2 records cannot be read, and max_bad_records = 1; the last is record 6 of'):
    batches(array_records(tmp_path, on_bad_record='skip', max_bad_records=1))
  mixed = Config(
    MixtureInput,
    inputs=[Config(ArrayRecordInput, path=str(tmp_path), features=X, on_bad_record='skip')],
    batch_size=4,
  )
  mixture = mixed.instantiate()
  assert sum(w for _, w in batches(mixture)) == 19 and len(mixture.bad_records) == 2


def test_fields():
  with pytest.raises(ConfigError, match=r"on_bad_record: expected 'error' or 'skip', got 'skp'"):
    TextInput(path='x', seq_len=4, batch_size=1, on_bad_record='skp')
  with pytest.raises(ConfigError, match='max_bad_records: expected an integer of at least 0'):
    TextInput(path='x', seq_len=4, batch_size=1, max_bad_records=-1)


def tables(tmp_path, **kwargs):
  import pyarrow as pa
  import pyarrow.parquet as pq

  values = pa.array([None if i == 5 else i + 1000 for i in range(12)], pa.int64())
  pq.write_table(
    pa.table({'x': values}), tmp_path / 'a.parquet', row_group_size=4, compression='none', use_dictionary=False,
    write_page_checksum=True,
  )  # fmt: skip
  content = (tmp_path / 'a.parquet').read_bytes()
  flip(tmp_path / 'a.parquet', content.index((1010).to_bytes(8, 'little')))
  (tmp_path / 'b.parquet').write_bytes(content[:-20])
  return Config(TableInput, path=str(tmp_path), features=X, batch_size=5, **kwargs).instantiate()


def test_tables(tmp_path):
  with pytest.raises(DataError, match=r'b.parquet is not a whole Parquet or Arrow file'):
    batches(tables(tmp_path))
  data = Config(TableInput, path=str(tmp_path / 'a.parquet'), features=X, batch_size=5).instantiate()
  with pytest.raises(DataError, match=r"'x' has 1 row without a value \(row 1 of group 1 of .*a.parquet\)"):
    batches(data)
  skipping = tables(tmp_path, on_bad_record='skip')
  expected = [(0, 0.0) if i == 5 or i >= 8 else (i + 1000, 1.0) for i in range(12)] + [(0, 0.0)] * 3
  assert batches(skipping) == expected
  assert {(os.path.basename(b.file), b.place): b.records for b in skipping.bad_records} == {
    ('b.parquet', ''): 1, ('a.parquet', 'row 1 of group 1'): 1, ('a.parquet', 'group 2'): 4
  }  # fmt: skip
  missing = {'y': Config(Feature, dtype='int32')}
  data = Config(TableInput, path=str(tmp_path), features=missing, batch_size=5, on_bad_record='skip').instantiate()
  with pytest.raises(DataError, match="there is no column 'y'"):  # That is no damage.
    batches(data)


def tfrecords(tmp_path, *, compression='', **kwargs):
  """Three files of 10 records of the same size. Of the second, record 3 is damaged and 6 is no example; the third has a
  damaged length in record 4."""
  size = None
  for number in range(3):
    file = tmp_path / f'{number}.tfrecord'
    write_tfrecords(str(file), {'x': np.arange(10 * number, 10 * number + 10)}, compression)
    size = file.stat().st_size // 10
  if compression:
    flip(tmp_path / '1.tfrecord', (tmp_path / '1.tfrecord').stat().st_size - 6)  # The checksum at the end.
  else:
    flip(tmp_path / '1.tfrecord', 3 * size + 14)
    flip(tmp_path / '2.tfrecord', 4 * size + 1)
  kwargs = {'features': X, 'batch_size': 4, 'shuffle_buffer_size': 5, 'compression': compression, **kwargs}
  return Config(TFRecordInput, file_pattern=str(tmp_path), **kwargs).instantiate()


@pytest.mark.slow
def test_tfrecords(tmp_path):
  with pytest.raises(DataError, match=r'1.tfrecord is not a whole TFRecord file: record 3, at byte \d+ of .*checksum'):
    batches(tfrecords(tmp_path))
  whole = [*range(10), *(10 + i for i in range(10) if i != 3), *range(20, 24)]
  skipping = tfrecords(tmp_path, on_bad_record='skip')
  found = batches(skipping)
  assert [x for x, weight in found if weight] == whole
  assert [(os.path.basename(b.file), b.place.partition(',')[0]) for b in skipping.bad_records] == [
    ('1.tfrecord', 'record 3'), ('2.tfrecord', 'record 4')
  ]  # fmt: skip
  assert 'damaged length; nothing after it' in skipping.bad_records[1].reason
  for start in (3, 4):  # Before it is known that there is damage, and behind it.
    again = tfrecords(tmp_path, on_bad_record='skip')
    again.set_state(again.get_state() | {'position': 4 * start})
    assert batches(again) == found[4 * start :]

  shuffled = tfrecords(tmp_path, on_bad_record='skip', shuffle=True, seed=3)
  order = batches(shuffled)
  assert sorted(x for x, weight in order if weight) == whole and order != found
  anew = tfrecords(tmp_path, on_bad_record='skip', shuffle=True, seed=3)
  anew.set_state(anew.get_state() | {'position': 8})
  assert batches(anew) == order[8:]

  with pytest.raises(DataError, match='max_bad_records = 1'):
    batches(tfrecords(tmp_path, on_bad_record='skip', max_bad_records=1))


def test_compressed_tfrecords(tmp_path):
  skipping = tfrecords(tmp_path, compression='GZIP', on_bad_record='skip')
  found = [x for x, weight in batches(skipping) if weight]
  assert found[:10] == list(range(10)) and found[-10:] == list(range(20, 30))
  assert [b.place for b in skipping.bad_records] == ['record 0']  # It is inflated as a whole.


def test_texts(tmp_path):
  good, bad = tmp_path / 'good.txt', tmp_path / 'bad.txt'
  good.write_text('some words\nsome more\nsome words\n' * 4)
  bad.write_bytes(b'more words\nm\xffre\nwords\n')
  from praxis_lite.inputs.tokenizers import CharTokenizer

  tokenizer = Config(CharTokenizer, path=str(good))
  config = Config(TextInput, path=str(tmp_path), seq_len=8, batch_size=2, tokenizer_tpl=tokenizer)
  with pytest.raises(DataError, match=r'bad.txt is not UTF-8 text'):
    config.instantiate().get_next()
  whole = config.clone().set(on_bad_record='skip').instantiate()
  assert whole.num_documents == 1 and [b.place for b in whole.bad_records] == ['all']
  lines = config.clone().set(on_bad_record='skip', document_separator='\n').instantiate()
  assert lines.num_documents == 12 + 2 and [b.place for b in lines.bad_records] == ['document 1']
  os.remove(bad)
  os.symlink(tmp_path / 'gone', bad)
  gone = config.clone().set(on_bad_record='skip', path=[str(good), str(tmp_path)]).instantiate()
  assert gone.num_documents == 1


def slow_row(record):
  time.sleep(0.02)
  return {'x': np.zeros((), np.int32)}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported(tmp_path):
  psutil = pytest.importorskip('psutil')
  write_array_records(str(tmp_path / 'a.array_record'), {'x': np.arange(100)})
  data = ArrayRecordInput(
    path=str(tmp_path), parse_fn=slow_row, batch_size=2, num_workers=1, is_training=True, name='train'
  )
  before = set(psutil.Process().children())
  data.get_next(), data.get_next()
  workers = [p for p in set(psutil.Process().children()) - before if 'resource_tracker' not in ' '.join(p.cmdline())]
  assert workers
  for worker in workers:
    os.kill(worker.pid, signal.SIGKILL)
  with pytest.raises(DataError, match=r'train: a worker process that reads the data was killed: .*memory'):
    batches(data)
  data.close()
