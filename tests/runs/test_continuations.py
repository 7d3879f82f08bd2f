"""Texts that grow token by token, where stop texts end them, and decoding in segments."""

from __future__ import annotations

import pytest

from praxis_lite.common.errors import UserError
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.runs.continuations import GrowingText, continue_prompts
from praxis_lite.runs.prompts import stop_ids

PIECES = ['a', 'b', ';', ';\n', 'END', 'E', 'N', 'D', ' ']


class PieceTokenizer(ByteTokenizer):
  """Its tokens are `PIECES`."""

  def decode(self, ids):
    return ''.join(PIECES[i] for i in ids)

  def encode(self, text):
    return [PIECES.index(character) for character in text]


class TidyTokenizer(PieceTokenizer):
  """It removes spaces before semicolons, as some tokenizers do."""

  def decode(self, ids):
    return super().decode(ids).replace(' ;', ';')


def pieces_of(tokenizer, ids, stops=(), prompt=()):
  text = GrowingText(tokenizer, prompt, stops)
  pieces = [text.add(ids[: n + 1], is_all=n + 1 == len(ids)) for n in range(len(ids))]
  assert ''.join(pieces) == text.text
  return pieces


def test_a_character_comes_with_its_last_token():
  text = 'né🙂€'
  pieces = pieces_of(ByteTokenizer(), list(text.encode()), prompt=list(b'x'))
  assert ''.join(pieces) == text
  assert pieces == ['n', '', 'é', '', '', '', '🙂', '', '', '€']


def test_bytes_that_are_no_character_are_told_at_the_end_or_once_others_follow():
  assert pieces_of(ByteTokenizer(), list('é'.encode()[:1])) == ['\ufffd']
  assert pieces_of(ByteTokenizer(), [*'é'.encode()[:1], ord('a'), *'🙂'.encode()[:3]]) == [
    '',
    '\ufffda',
    '',
    '',
    '\ufffd',
  ]


def test_a_tokenizer_that_changes_its_text_is_followed_at_the_end():
  a, space, semicolon, b = (PIECES.index(piece) for piece in ('a', ' ', ';', 'b'))
  text = GrowingText(TidyTokenizer(), [])
  assert [text.add([a, space], is_all=False), text.add([a, space, semicolon], is_all=False)] == ['a ', '']
  assert text.add([a, space, semicolon, b], is_all=True) == ';b' and text.text == 'a;b'


@pytest.mark.parametrize(
  'ids, stops, expected, count',
  [
    ([0, 1, 2, 0], [';'], 'ab;', 3),
    ([0, 3, 0], [';'], 'a;', 2),  # The token has more than the stop text.
    ([0, 4, 0], ['ND'], 'aEND', 2),  # The stop text is the end of a token.
    ([0, 5, 6, 7, 1], ['END'], 'aEND', 4),  # It is several tokens.
    ([1, 2, 5, 6, 7, 1], ['END', 'b;E'], 'b;E', 3),  # The first one that is complete.
    ([0, 1], ['END'], 'ab', None),
  ],
)
def test_a_stop_text_ends_the_text_wherever_its_tokens_end(ids, stops, expected, count):
  assert ''.join(pieces_of(PieceTokenizer(), ids, stops)) == expected
  assert GrowingText(PieceTokenizer(), [], stops).count_until_stop(ids, 1) == count


def test_stop_texts_are_texts():
  assert stop_ids(PieceTokenizer(), [';', 'ab']) == [2]
  for stops, message in (
    ('END', r"^stop: .* pass \['END'\]"),
    ([''], "^stop='': expected a text of"),
    ([3], '^stop=3'),
  ):
    with pytest.raises(UserError, match=message):
      stop_ids(PieceTokenizer(), stops)
  with pytest.raises(UserError, match=r"^--stop='a' needs a dataset with a tokenizer"):
    stop_ids(None, ['a'], '--stop')


@pytest.mark.parametrize('in_segments', [False, True])
def test_rows_end_with_stop_ids_stop_texts_and_all_tokens(in_segments):
  sources = [[0, 1] * 20, [0] * 9 + [2] + [1] * 30, [1] * 11 + [5, 6, 7] + [0] * 26, [0] * 3]
  calls, seen = [], []

  def decode(read, limits, count):
    calls.append((limits, count))
    new = [source[count : count + limit] for source, limit in zip(sources, limits)]
    for row, source in zip(read, sources):  # A call reads the prompts and all tokens so far.
      assert row == [8, *source[: len(row) - 1]]
    return [row[: row.index(2) + 1] if 2 in row else row for row in new]

  def on_tokens(row, ids, num_new, is_all):
    seen.append((row, is_all))
    assert num_new <= len(ids)

  texts = [GrowingText(PieceTokenizer(), [8], ['END']) for _ in sources]
  options = {'max_tokens': 30, 'stop_ids': [2], 'in_segments': in_segments, 'on_tokens': on_tokens}
  rows = continue_prompts([[8]] * 4, decode, texts, **options)
  assert rows == [sources[0][:30], sources[1][:10], sources[2][:14], sources[3]]
  assert [row for row, is_all in seen if is_all] == ([3, 1, 2, 0] if in_segments else [0, 1, 2, 3])
  expected = [([8, 8, 8, 8], 0), ([8, 8, 8, 0], 8), ([8, 0, 0, 0], 16), ([6, 0, 0, 0], 24)]
  assert calls == (expected if in_segments else [([30] * 4, 0)])


def test_segments_grow_with_what_is_read_again():
  lengths = []

  def decode(read, limits, count):
    lengths.append(limits[0])
    return [[0] * limits[0]]

  continue_prompts([[0] * 400], decode, None, max_tokens=500, stop_ids=[], in_segments=True, on_tokens=lambda *_: None)
  assert lengths[:3] == [8, 51, 57] and sum(lengths) == 500
