"""Span corruption: sources and targets together hold the text, in the shares that are asked for."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ByteTokenizer, SpanCorruptionInput, TextInput
from praxis_lite.inputs.span_corruption import partition

TOKENIZER = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)


def spans_input(folder, length=1000, **fields):
  (folder / 'a.txt').write_bytes(bytes(i % 250 + 1 for i in range(length)))
  config = Config(SpanCorruptionInput, name='text', path=str(folder / 'a.txt'), tokenizer_tpl=TOKENIZER)
  return config.set(**{'seq_len': 40, 'batch_size': 8, **fields}).instantiate()


def restored(source, batch, row):
  """The text of a row: each sentinel of the source stands for what follows it in the target."""
  first = source.sentinel
  spans, at = collections.defaultdict(list), None
  for token in batch['labels'][row, batch['weights'][row] > 0][:-1]:
    at = token if token > 258 or token == first else at
    if at != token:
      spans[at].append(token)
  out = []
  for token in batch['source_ids'][row, batch['source_segment_ids'][row] > 0][:-1]:
    out += spans.pop(token) if token in spans else [token]
  assert not spans
  return out


def test_targets_are_what_is_missing_from_sources(tmp_path):
  source = spans_input(tmp_path)
  texts = Config(TextInput, path=str(tmp_path / 'a.txt'), tokenizer_tpl=TOKENIZER, seq_len=40, batch_size=8)
  count = 0
  for batch, plain in zip(source, texts.instantiate()):
    for row in np.flatnonzero(batch['weights'].any(axis=1)):
      expected = plain['labels'][row, plain['weights'][row] > 0]
      assert restored(source, batch, row) == expected.tolist()
      count += len(expected)
      for name, is_token in (('labels', batch['weights'][row] > 0), ('source_ids', batch['source_segment_ids'][row])):
        ids = batch[name][row, is_token.astype(bool)]
        assert ids[-1] == 257
        used = ids[(ids > 258)]
        np.testing.assert_array_equal(used, source.sentinel - np.arange(len(used)))  # They count down.
      length = int(batch['weights'][row].sum())
      np.testing.assert_array_equal(batch['ids'][row, 1:length], batch['labels'][row, : length - 1])
      assert batch['ids'][row, 0] == source.first_id == 258
  assert count == 1001  # All tokens, and the end of the document.


def test_lengths_follow_from_the_shares_and_are_those_of_t5(tmp_path):
  source = spans_input(tmp_path, seq_len=568, first_sentinel=32_099)
  assert (source.source_len, source.target_len, source.vocab_size, source.sentinel) == (512, 114, 32_100, 32_099)
  batch = source.get_next()
  assert batch['source_segment_ids'][0].all() and batch['weights'][0].all()
  assert (batch['source_ids'][0] > 258).sum() == (batch['labels'][0] > 258).sum() == 28
  own = spans_input(tmp_path, noise_density=0.5, mean_span_length=2.0)
  assert (own.source_len, own.target_len) == (40 - 20 + 10 + 1, 20 + 10 + 1)
  assert own.vocab_size == 259 + 10 and own.sentinel == 268  # After the ids of the tokenizer.


@pytest.mark.parametrize('length', [1, 2, 3, 40, 41, 79])
@pytest.mark.parametrize('noise_density, mean', [(0.15, 3.0), (0.9, 1.0), (0.01, 20.0)])
def test_texts_of_any_length(length, noise_density, mean, tmp_path):
  source = spans_input(tmp_path, length, noise_density=noise_density, mean_span_length=mean)
  (batch,) = source
  tokens = [t for row in np.flatnonzero(batch['weights'].any(axis=1)) for t in restored(source, batch, row)]
  assert tokens == [*(i % 250 + 1 for i in range(length)), 257]


def test_spans_differ_between_rows_and_epochs_and_repeat_with_the_position(tmp_path):
  source = spans_input(tmp_path, length=319, is_training=True, shuffle=False)  # One batch of full rows in an epoch.
  first, second = source.get_next(), source.get_next()
  where = first['source_ids'] > 258
  assert not (where[0] == where[1]).all()
  assert not np.array_equal(where, second['source_ids'] > 258)
  again = spans_input(tmp_path, length=319, is_training=True, shuffle=False)
  np.testing.assert_array_equal(again.get_next()['source_ids'], first['source_ids'])
  other = spans_input(tmp_path, length=319, is_training=True, shuffle=False, seed=1)
  assert not np.array_equal(other.get_next()['source_ids'], first['source_ids'])


def test_windows_come_from_any_place(tmp_path):
  source = spans_input(tmp_path, is_training=True, packing='windows')
  batch = source.get_next()
  assert len({restored(source, batch, row)[0] for row in range(8)}) > 4


def test_all_cuts_are_equally_probable():
  rng = np.random.default_rng(0)
  found = collections.Counter(tuple(partition(5, 3, rng.random(9)).tolist()) for _ in range(3000))
  assert set(found) == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}
  assert min(found.values()) > 400
  assert partition(4, 1, rng.random(4)).tolist() == [4]
  assert partition(0, 1, rng.random(4)).tolist() == [0]
  assert partition(3, 3, rng.random(4)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'packing': 'packed'}, r"text\.packing: expected 'concat' or 'windows', got 'packed'"),
    ({'noise_density': 0.0}, r'text\.noise_density: expected more than 0 and less than 1, got 0\.0'),
    ({'noise_density': 1.0}, r'text\.noise_density'),
    ({'mean_span_length': 0.5}, r'text\.mean_span_length: expected at least 1, got 0\.5'),
    ({'seq_len': 1}, r'text\.seq_len: expected an integer of at least 2'),
    ({'first_sentinel': 1}, r'text\.first_sentinel: rows have 2 spans, and their sentinels count down from 1'),
  ],
)
def test_mistakes_are_named(fields, says, tmp_path):
  with pytest.raises(ConfigError, match=says):
    spans_input(tmp_path, **fields)
