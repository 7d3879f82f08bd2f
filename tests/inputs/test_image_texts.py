"""Images with a text from TFRecord files: tokens, padding, and records that cannot be used."""

from __future__ import annotations

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, ImageTextRecordInput, write_tfrecords

tf = pytest.importorskip('tensorflow')

TOKENIZER = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)


def data(folder, texts, **fields):
  pixels = np.random.default_rng(0).integers(0, 256, (len(texts), 6, 8, 3), np.uint8)
  path = str(folder / 'a.tfrecord')
  write_tfrecords(path, {'image': [tf.io.encode_png(x).numpy() for x in pixels], 'text': texts})
  fields = {'batch_size': len(texts), 'text_len': 5, 'tokenizer_tpl': TOKENIZER, **fields}
  return Config(ImageTextRecordInput, name='pairs', file_pattern=path, image_size=(4, 4), **fields).instantiate()


def test_texts_begin_and_end_are_cut_and_padded(tmp_path):
  batch = data(tmp_path, [b'ab', b'', b'long text']).get_next()
  assert batch['image'].shape == (3, 4, 4, 3) and batch['image'].dtype == np.float32
  expected = [[256, 97, 98, 257, 258], [256, 257, 258, 258, 258], [256, *b'lon', 257]]
  np.testing.assert_array_equal(batch['ids'], expected)
  np.testing.assert_array_equal(batch['segment_ids'], np.array(expected) != 258)
  batch = data(tmp_path, [b'ab', b'long text'], has_begin=False, hides_padding=False).get_next()
  np.testing.assert_array_equal(batch['ids'], [[97, 98, 257, 258, 258], [*b'long', 257]])
  assert 'segment_ids' not in batch


def test_a_record_with_a_text_that_is_not_utf_8_is_told_or_left_out(tmp_path):
  texts = [b'ab', b'\xff', b'c']
  with pytest.raises(DataError, match='its text is not UTF-8'):
    data(tmp_path, texts).get_next()
  kept = data(tmp_path, texts, on_bad_record='skip', batch_size=2)
  np.testing.assert_array_equal(kept.get_next()['ids'][:, 1], [97, 99])
  assert len(kept.bad_records) == 1
  with pytest.raises(DataError, match=r'cannot be parsed: .*label'):
    data(tmp_path, texts[:1], text_feature='label').get_next()


def test_impossible_fields_are_refused(tmp_path):
  with pytest.raises(ConfigError, match=r'text_len: expected .*at least 2'):
    data(tmp_path, [b'a'], text_len=1)
  with pytest.raises(ConfigError, match='label_feature: expected None'):
    data(tmp_path, [b'a'], label_feature='label')
