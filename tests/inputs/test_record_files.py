"""Images from ArrayRecord and Parquet files are those of TFRecord files, in order, shuffled, augmented, and resumed."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import DataError
from praxis_lite.inputs import ImageRecordInput, ImageTextRecordInput, write_tfrecords
from praxis_lite.inputs.tf_example import serialized_examples

tf = pytest.importorskip('tensorflow')
pa = pytest.importorskip('pyarrow', reason='needs PyArrow: pip install praxis_lite[grain]')
pq = pytest.importorskip('pyarrow.parquet')
array_record = pytest.importorskip('array_record.python.array_record_module', reason='needs praxis_lite[grain]')

COUNT = 7


def encoded(count=COUNT):
  pixels = np.random.default_rng(0).integers(0, 256, (count, 6, 8, 3), np.uint8)
  return [tf.io.encode_png(x).numpy() for x in pixels]


def write(kind: str, path: str, rows: dict) -> str:
  path = f'{path}.{kind.split()[0]}'
  if kind == 'tfrecord':
    write_tfrecords(path, rows)
  elif kind == 'array_record':
    writer = array_record.ArrayRecordWriter(path, 'group_size:1')
    for record in serialized_examples(rows):
      writer.write(record)
    writer.close()
  else:
    image = rows['image']
    if kind == 'parquet as of datasets':
      image = [{'bytes': x, 'path': None} for x in image]
    pq.write_table(pa.table({**rows, 'image': image, 'other': list(range(len(image)))}), path, row_group_size=3)
  return path


def images(path, **fields) -> ImageRecordInput:
  fields = {'image_size': (6, 8), 'resize_to': 6, 'batch_size': 3, 'num_epochs': 2, **fields}
  return Config(ImageRecordInput, name='images', file_pattern=path, **fields).instantiate()


def every_batch(data):
  batches = []
  while True:
    try:
      batches.append(data.get_next())
    except StopIteration:
      return batches


KINDS = ['array_record', 'parquet', 'parquet as of datasets']


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('fields', [{}, {'is_training': True, 'shuffle': True}], ids=['in order', 'augmented'])
def test_images_are_those_of_a_tfrecord_file(kind, fields, tmp_path):
  rows = {'image': encoded(), 'label': np.arange(COUNT)}
  parts = [{name: values[i : i + 4] for name, values in rows.items()} for i in (0, 4)]
  of_kind, expected = (
    [write(k, str(tmp_path / f'{i}'), part) for i, part in enumerate(parts)] for k in (kind, 'tfrecord')
  )
  found, wanted = every_batch(images(of_kind, **fields)), every_batch(images(expected, **fields))
  assert len(found) == len(wanted) >= 4
  for ours, theirs in zip(found, wanted):
    np.testing.assert_array_equal(ours['label'], theirs['label'])
    np.testing.assert_array_equal(ours['image'], theirs['image'])
  begun = images(of_kind, **fields)
  begun.get_next()
  resumed = images(of_kind, **fields)
  resumed.set_state(begun.get_state())
  np.testing.assert_array_equal(resumed.get_next()['image'], found[1]['image'])


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', KINDS)
def test_bad_images_and_cut_files_are_named_or_left_out(kind, tmp_path):
  good = encoded()
  path = write(kind, str(tmp_path / 'a'), {'image': [good[0], b'text', *good[2:]], 'label': np.arange(COUNT)})
  with pytest.raises(DataError, match=r'images: a record cannot be parsed: .*\(record 1 of .*a\.'):
    images(path).get_next()
  skipping = images(path, on_bad_record='skip')
  assert skipping.get_next()['label'].tolist() == [0, 2, 3] and len(skipping.bad_records) == 1

  file = Path(path)
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  with pytest.raises(DataError, match=r'images\.file_pattern: .*a\.\w+ is not a whole (ArrayRecord|Parquet) file'):
    images(path).get_next()


def test_a_column_that_is_not_there_and_a_row_without_an_image_are_named(tmp_path):
  path = str(tmp_path / 'a.parquet')
  rows = [{'bytes': encoded(1)[0], 'path': 'a.png'}, {'bytes': None, 'path': 'b.png'}]
  pq.write_table(pa.table({'picture': rows, 'label': [0, 1]}), path)
  with pytest.raises(DataError, match=r"file_pattern: there is no column 'image' in .*a\.parquet\. It has picture"):
    images(path).get_next()
  with pytest.raises(DataError, match=r"row 1 of .*a\.parquet: .*it has nothing in its column 'picture'"):
    images(path, image_feature='picture', batch_size=2).get_next()
  skipping = images(path, image_feature='picture', batch_size=1, on_bad_record='skip')
  assert skipping.get_next()['label'].tolist() == [0]


@pytest.mark.parametrize(
  'label', [datetime.date(2026, 1, 1), [1, None], np.uint64(2**63)], ids=['date', 'list', 'large']
)
def test_values_that_are_no_numbers_are_bad_rows(label, tmp_path):
  path = str(tmp_path / 'a.parquet')
  pq.write_table(pa.table({'image': encoded(1), 'label': [label]}), path)
  with pytest.raises(DataError, match=r'row 0 of .*a\.parquet: cannot be stored as a tf.train.Example: '):
    images(path, batch_size=1).get_next()


def test_a_damaged_page_is_not_read(tmp_path):
  path = tmp_path / 'a.parquet'
  rows = pa.table({'image': encoded(), 'label': list(range(COUNT))})
  pq.write_table(rows, path, write_page_checksum=True, use_dictionary=False, compression='none')
  content = bytearray(path.read_bytes())
  content[content.index(encoded()[3]) + 40] ^= 1
  path.write_bytes(content)
  with pytest.raises(DataError, match=r'images\.file_pattern: .*a\.parquet is not a whole Parquet file: .*CRC'):
    images(str(path)).get_next()


def test_texts_beside_images_may_be_strings(tmp_path):
  path = write('parquet', str(tmp_path / 'a'), {'image': encoded(2), 'text': ['é', 'b']})
  config = Config(ImageTextRecordInput, name='pairs', file_pattern=path, image_size=(4, 4), batch_size=2, text_len=4)
  ids = config.instantiate().get_next()['ids']
  assert ids[0, 1:3].tolist() == [*'é'.encode()] and ids[1, 1] == ord('b')
