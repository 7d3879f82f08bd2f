"""Masked text: how many places are chosen, what becomes of them, and what is never chosen."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ByteTokenizer, CharTokenizer, MaskedTextInput

TOKENIZER = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
BOS, EOS, PAD, MASK = 256, 257, 258, 259


def masked(folder, text=None, **fields):
  text = bytes(i % 250 + 1 for i in range(1000)) if text is None else text
  (folder / 'a.txt').write_bytes(text)
  config = Config(MaskedTextInput, name='text', path=str(folder / 'a.txt'), tokenizer_tpl=TOKENIZER)
  return config.set(**{'seq_len': 40, 'batch_size': 8, **fields}).instantiate()


def real_rows(batch):
  return [row for row in range(len(batch['ids'])) if batch['segment_ids'][row].any()]


def test_labels_are_the_text_and_ids_differ_from_them_only_at_chosen_places(tmp_path):
  source, text = masked(tmp_path), []
  assert (source.row_len, source.mask, source.vocab_size) == (42, MASK, 260)
  for batch in source:
    for row in real_rows(batch):
      is_token, chosen = batch['segment_ids'][row] > 0, batch['weights'][row] > 0
      labels = batch['labels'][row, is_token]
      assert labels[0] == BOS and labels[-1] == EOS
      text += labels[1:-1].tolist()
      np.testing.assert_array_equal(batch['ids'][row, ~chosen], batch['labels'][row, ~chosen])
      assert (batch['labels'][row, ~is_token] == PAD).all() and not chosen[~is_token].any()
      np.testing.assert_array_equal(batch['segment_pos'][row, is_token], np.arange(is_token.sum()))
  assert text == [*(i % 250 + 1 for i in range(1000)), EOS]


@pytest.mark.parametrize('length', [1, 2, 39, 40, 41, 43, 90])
@pytest.mark.parametrize('rate', [0.01, 0.15, 0.9])
def test_the_number_of_chosen_places_is_exact(length, rate, tmp_path):
  source = masked(tmp_path, bytes(range(1, length + 1)), mask_rate=rate)
  left = length
  for row in real_rows(batch := source.get_next()):
    here = min(left, 40)
    left -= here
    expected = max(round(here * rate), 1) if here else 0  # A row may hold only the end of the document.
    assert batch['weights'][row].sum() == expected
    assert set(batch['weights'][row]) <= {0.0, 1.0}
  assert left == 0


def test_shares_of_masks_random_and_kept_tokens(tmp_path):
  source = masked(tmp_path, seq_len=500, batch_size=2, is_training=True)
  counts, places, drawn, total = collections.Counter(), np.zeros(502), collections.Counter(), 0
  for _ in range(200):
    batch = source.get_next()
    chosen = batch['weights'] > 0
    ids, labels = batch['ids'][chosen], batch['labels'][chosen]
    counts['mask'] += (ids == MASK).sum()
    counts['kept'] += (ids == labels).sum()
    drawn.update(ids[(ids != MASK) & (ids != labels)].tolist())
    places += chosen.sum(0)
    total += chosen.sum()
  # Random tokens are those of the text's vocabulary; one of 256 is the token itself.
  expected = {'mask': 0.8, 'kept': 0.1 + 0.1 / 256}
  for kind, share in expected.items():
    assert abs(counts[kind] / total - share) < 4 * np.sqrt(share * (1 - share) / total), (kind, counts[kind] / total)
  share = sum(drawn.values()) / total
  assert abs(share - 0.1 * 255 / 256) < 4 * np.sqrt(0.09 / total)
  assert set(drawn) == set(range(256))  # All bytes, and no token of control.
  assert max(drawn.values()) < 3 * sum(drawn.values()) / 256
  inside = places[1:400]  # All alike: a chi-squared test.
  assert not places[0] and 0.6 < ((inside - inside.mean()) ** 2 / inside.mean()).mean() < 1.1


@pytest.mark.parametrize('shares, kinds', [((1.0, 0.0), {'mask'}), ((0.0, 0.0), {'kept'}), ((0.5, 0.5), {'mask', ''})])
def test_shares_may_be_none_and_all(shares, kinds, tmp_path):
  batch = masked(tmp_path, mask_rate=0.5, mask_share=shares[0], random_share=shares[1]).get_next()
  chosen = batch['weights'] > 0
  ids, labels = batch['ids'][chosen], batch['labels'][chosen]
  found = {'mask' if i == MASK else 'kept' if i == label else '' for i, label in zip(ids, labels)}
  assert found - ({'kept'} if '' in kinds else set()) == kinds


def test_choices_repeat_with_the_seed_and_the_place_and_differ_otherwise(tmp_path):
  fields = {'is_training': True, 'shuffle': False, 'text': bytes(i % 250 + 1 for i in range(319))}  # A batch an epoch.
  source = masked(tmp_path, **fields)
  first, second = source.get_next(), source.get_next()
  other, again = masked(tmp_path, seed=1, **fields), masked(tmp_path, **fields).get_next()
  for name in first:
    np.testing.assert_array_equal(again[name], first[name])
  assert not np.array_equal(first['weights'], second['weights'])
  assert not np.array_equal(first['weights'], other.get_next()['weights'])
  assert not np.array_equal(first['weights'][0], first['weights'][1])
  half = masked(tmp_path, num_hosts=2, host_index=1, **fields).get_next()
  np.testing.assert_array_equal(half['ids'], first['ids'][4:])


WORDS = b'the quick_brown fox2, jumps: over a lazy dog and then sleeps for a very long while in the sun. '


def words_of(text):
  """The first and the last place of each word: white space or punctuation, with letters and digits after it."""
  starts = [i for i, c in enumerate(text) if i == 0 or not (chr(c).isalnum() or c == ord('_'))]
  return list(zip(starts, [*starts[1:], len(text)]))


def test_whole_words_are_chosen_as_a_whole(tmp_path):
  source = masked(tmp_path, WORDS * 9, whole_words=True, seq_len=len(WORDS), is_training=True, shuffle=False)
  seen, counts = collections.Counter(), []
  for _ in range(40):
    batch = source.get_next()
    for row in real_rows(batch):
      text = bytes(batch['labels'][row, 1 : batch['segment_ids'][row].sum() - 1].clip(max=255).astype(np.uint8))
      if len(text) != len(WORDS):
        continue
      chosen = batch['weights'][row, 1 : len(text) + 1] > 0
      for start, end in words_of(text):
        assert chosen[start:end].all() or not chosen[start:end].any(), text[start:end]
        seen[text[start:end]] += chosen[start]
      counts.append(chosen.sum())
  most = round(len(WORDS) * 0.15)
  assert max(counts) == most and min(counts) > most - 5
  assert min(seen.values()) > 0


def test_a_word_longer_than_the_number_of_tokens_is_chosen_if_no_other_fits(tmp_path):
  batch = masked(tmp_path, b'abcdefghij', whole_words=True, seq_len=10, batch_size=1).get_next()
  assert batch['weights'][0].tolist() == [0, *[1] * 10, 0]


@pytest.mark.parametrize('whole_words', [False, True])
def test_control_tokens_are_never_chosen(whole_words, tmp_path):
  text = b'ab cd ef\nxy\nz'
  for packing in ('concat', 'packed', 'windows'):
    source = masked(
      tmp_path,
      text * 20,
      packing=packing,
      document_separator='\n',
      seq_len=16,
      mask_rate=0.5,
      whole_words=whole_words,
      is_training=True,
    )
    for _ in range(5):
      batch = source.get_next()
      assert batch['ids'].shape == (8, source.row_len)
      chosen = batch['weights'] > 0
      assert chosen.any() and batch['labels'][chosen].max() < 256
      assert (batch['segment_ids'][chosen] > 0).all()
      if packing == 'packed':
        assert batch['segment_ids'].max() > 1
        first = batch['segment_pos'] == 0
        assert (batch['labels'][first & (batch['segment_ids'] > 0)] == BOS).all()


def test_other_tokenizers_know_where_words_begin(tmp_path):
  chars = CharTokenizer(vocabulary=' ,ab1é')
  assert chars.word_starts().tolist() == [True, True, False, False, False, False, True]
  assert ByteTokenizer().word_starts()[[32, 44, 97, 49, 0xC3]].tolist() == [True, True, False, False, False]
  assert chars.mask_id is None and chars.control_ids == {6}


def test_word_pieces_and_special_tokens_of_bert(tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  from praxis_lite.inputs import HfTokenizer

  names = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'play', '##ing', 'cat', 's', '##s']
  vocabulary = {name: i for i, name in enumerate(names)}
  model = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token='[UNK]'))
  model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  model.add_special_tokens(names[:5])
  model.save(str(tmp_path / 'tokenizer.json'))
  settings = '"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"'
  (tmp_path / 'tokenizer_config.json').write_text(f'{{{settings}}}')
  tokenizer = HfTokenizer(path=str(tmp_path))
  assert tokenizer.special_ids == (2, 3, 0) and tokenizer.mask_id == 4
  assert tokenizer.control_ids == {0, 1, 2, 3, 4}
  assert tokenizer.word_starts().tolist() == [True] * 6 + [False, True, True, False]
  text = tmp_path / 'b.txt'
  text.write_text('playing cats playing ' * 5)
  config = Config(MaskedTextInput, path=str(text), tokenizer_tpl=Config(HfTokenizer, path=str(tmp_path)))
  source = config.set(seq_len=8, batch_size=2, whole_words=True, mask_rate=0.3).instantiate()
  assert (source.vocab_size, source.mask) == (10, 4)
  batch = source.get_next()
  assert batch['labels'][0].tolist() == [2, 5, 6, 7, 9, 5, 6, 5, 6, 3]
  chosen = batch['weights'][0, 1:9].reshape(4, 2)
  assert (chosen[:, 0] == chosen[:, 1]).all() and chosen.sum() == 2


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'mask_rate': 0.0}, r'text\.mask_rate: expected more than 0 and less than 1, got 0\.0'),
    ({'mask_rate': 1.0}, r'text\.mask_rate'),
    ({'mask_share': 0.95}, r'text\.mask_share: expected shares .* got 0\.95, and random_share = 0\.1'),
    ({'random_share': -0.1}, r'text\.mask_share: expected shares'),
    ({'mask_id': -1}, r'text\.mask_id: expected an integer of at least 0, got -1'),
  ],
)
def test_mistakes_are_named(fields, says, tmp_path):
  with pytest.raises(ConfigError, match=says):
    masked(tmp_path, **fields)
