"""Packing against documents put together again from the rows, and rows counted by hand."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from praxis_lite.inputs.packing import best_fit_rows, concat_documents, pack_documents
from praxis_lite.inputs.tokenizers import ByteTokenizer, Tokens

BOS, EOS, PAD = 256, 257, 258


def _tokens(texts):
  return [Tokens(np.frombuffer(t, np.uint8), None) for t in texts]


def _tokenizer(**fields):
  return ByteTokenizer(**{'bos_id': BOS, 'eos_id': EOS, 'pad_id': PAD, **fields})


def _all_rows(packed):
  return packed.rows(np.arange(len(packed)))


def test_concat_is_one_stream_with_next_tokens_as_labels():
  batch = _all_rows(concat_documents(_tokens([b'abc', b'de']), _tokenizer(), 4))
  a, b, c, d, e = b'abcde'
  np.testing.assert_array_equal(batch['ids'], [[BOS, a, b, c], [EOS, d, e, PAD]])
  np.testing.assert_array_equal(batch['labels'], [[a, b, c, EOS], [d, e, EOS, PAD]])
  np.testing.assert_array_equal(batch['weights'], [[1, 1, 1, 1], [1, 1, 1, 0]])
  np.testing.assert_array_equal(batch['segment_ids'], [[1, 1, 1, 1], [1, 1, 1, 0]])
  np.testing.assert_array_equal(batch['segment_pos'], [[0, 1, 2, 3], [0, 1, 2, 0]])


def test_packed_documents_are_segments_of_their_own():
  batch = _all_rows(pack_documents(_tokens([b'abcde', b'f']), _tokenizer(), 4))
  a, b, c, d, e, f = b'abcdef'
  np.testing.assert_array_equal(batch['ids'], [[BOS, a, b, c], [d, e, BOS, f]])
  np.testing.assert_array_equal(batch['labels'], [[a, b, c, d], [e, EOS, f, EOS]])
  np.testing.assert_array_equal(batch['weights'], np.ones((2, 4)))
  np.testing.assert_array_equal(batch['segment_ids'], [[1, 1, 1, 1], [1, 1, 2, 2]])
  np.testing.assert_array_equal(batch['segment_pos'], [[0, 1, 2, 3], [0, 1, 0, 1]])


@settings(max_examples=60, deadline=None)
@given(
  texts=st.lists(st.binary(min_size=1, max_size=23), min_size=1, max_size=12),
  seq_len=st.integers(1, 9),
  pack=st.sampled_from([pack_documents, concat_documents]),
)
def test_every_token_and_every_end_is_a_label_once(texts, seq_len, pack):
  batch = _all_rows(pack(_tokens(texts), _tokenizer(), seq_len))
  assert batch['ids'].shape[1] == seq_len
  labels = batch['labels'][batch['weights'] > 0]
  expected = np.concatenate([[*t, EOS] for t in texts])
  if pack is concat_documents:
    np.testing.assert_array_equal(labels, expected)
  else:
    np.testing.assert_array_equal(np.sort(labels), np.sort(expected))


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.binary(min_size=1, max_size=23), min_size=1, max_size=12), seq_len=st.integers(1, 9))
def test_packed_segments_are_stretches_of_one_document(texts, seq_len):
  batch = _all_rows(pack_documents(_tokens(texts), _tokenizer(), seq_len))
  streams = [(BOS, *t, EOS) for t in texts]
  pieces = {tuple(s[i : i + seq_len + 1]) for s in streams for i in range(0, len(s) - 1, seq_len)}
  for row in range(len(batch['ids'])):
    present = batch['segment_ids'][row]
    for segment in range(1, present.max() + 1):
      at = np.flatnonzero(present == segment)
      np.testing.assert_array_equal(np.diff(at), 1)
      np.testing.assert_array_equal(batch['segment_pos'][row, at], np.arange(len(at)))
      assert (batch['ids'][row, at[0]], *batch['labels'][row, at]) in pieces


def test_rows_can_be_asked_for_in_any_order():
  packed = pack_documents(_tokens([bytes([65 + i]) * (i + 1) for i in range(9)]), _tokenizer(), 5)
  everything = _all_rows(packed)
  order = np.array([3, 0, 3, 7])
  for key, value in packed.rows(order).items():
    np.testing.assert_array_equal(value, everything[key][order], err_msg=key)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=40))
def test_best_fit_fills_no_row_too_far_and_wastes_little(lengths):
  row = best_fit_rows(np.array(lengths), 10)
  filled = np.bincount(row, weights=lengths)
  assert (filled > 0).all()
  assert filled.max() <= 10
  # Two rows that would fit into one would have been one.
  assert np.sort(filled)[:2].sum() > 10 or len(filled) == 1


def test_best_fit_finds_the_perfect_packing():
  row = best_fit_rows(np.array([6, 2, 4, 8, 10, 7, 3]), 10)
  assert sorted(np.bincount(row, weights=[6, 2, 4, 8, 10, 7, 3])) == [10, 10, 10, 10]


@pytest.mark.parametrize('vocab, dtype', [(256, np.uint8), (300, np.uint16), (70_000, np.uint32)])
def test_tokens_are_stored_in_the_smallest_dtype(vocab, dtype):
  tokenizer = ByteTokenizer(min_vocab_size=vocab)
  assert concat_documents(_tokens([b'ab']), tokenizer, 4).tokens.dtype == dtype
