"""Tokenizers: there and back, special ids, and bytes per token that add up."""

import builtins
import io

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, CharTokenizer, SentencePieceTokenizer

TEXT = 'def f(x):\n  return "é 漢字 ﬁn"\n\n\n  # the end   of it\n'


@given(st.text(st.characters(blacklist_characters='\0', blacklist_categories=['Cs'])))
def test_bytes_decode_to_the_text_they_came_from(text):
  tokenizer = ByteTokenizer()
  ids = tokenizer.encode(text)
  assert ids == list(text.encode())
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text


def test_byte_vocabulary_grows_with_the_special_ids():
  assert ByteTokenizer().vocab_size == 256
  assert ByteTokenizer(bos_id=256, eos_id=257, pad_id=258).vocab_size == 259
  assert ByteTokenizer(min_vocab_size=1001).vocab_size == 1001
  with pytest.raises(ConfigError, match='eos_id'):
    ByteTokenizer(eos_id=-1)


def test_bytes_that_are_no_text_decode_to_replacement_characters():
  tokenizer = ByteTokenizer(min_vocab_size=300)
  assert tokenizer.decode([ord('a'), 0xFF, ord('b')]) == 'a\ufffdb'
  assert tokenizer.decode([ord('a'), 299, ord('b')]) == 'a\ufffdb'


@given(st.text(st.characters(blacklist_categories=['Cs']), min_size=1))
def test_characters_decode_to_the_text_they_came_from(text):
  tokenizer = CharTokenizer(vocabulary=''.join(sorted(set(text))))
  [tokens] = tokenizer.encode_documents([text.encode()])
  assert tokenizer.decode([tokenizer.special_ids[0], *tokens.ids, *tokenizer.special_ids]) == text
  assert ''.join(tokenizer.characters[i] for i in tokens.ids) == text
  assert tokens.num_bytes.tolist() == [len(c.encode()) for c in text]


def test_the_vocabulary_is_the_sorted_characters_of_the_text(tmp_path):
  (tmp_path / 'a.txt').write_text('hello\n')
  (tmp_path / 'b.txt').write_text('漢h')
  tokenizer = CharTokenizer(path=str(tmp_path))
  assert tokenizer.characters == '\nehlo漢'
  assert (tokenizer.vocab_size, tokenizer.special_ids) == (7, (6, 6, 6))
  assert tokenizer.encode('hello') == [2, 1, 3, 3, 4]
  assert tokenizer.decode([2, 6, 99]) == 'h\ufffd'


def test_characters_that_are_not_in_the_vocabulary_are_named(tmp_path):
  with pytest.raises(DataError, match=r"'é' \(U\+00E9\) is not among the 3 characters of the vocabulary, 'abc'"):
    CharTokenizer(vocabulary='abc').encode('abé')
  with pytest.raises(DataError, match=r"'a' \(U\+0061\) is not among the 1 characters"):
    CharTokenizer(vocabulary='漢').encode('a')
  (tmp_path / 'empty').write_text('')
  for fields, message in (
    ({}, r'CharTokenizer\.path: expected the text whose characters'),
    ({'vocabulary': 'aba'}, "CharTokenizer.vocabulary: it contains 'a' more than once"),
    ({'path': str(tmp_path / 'absent')}, r'CharTokenizer\.path: there is no file or directory .*absent'),
    ({'path': str(tmp_path / 'empty')}, r'CharTokenizer\.path: there is no text in'),
  ):
    with pytest.raises((ConfigError, DataError), match=message):
      CharTokenizer(**fields).encode('a')


@pytest.fixture(scope='module')
def model_path(tmp_path_factory):
  sentencepiece = pytest.importorskip('sentencepiece')
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([TEXT, 'the cat sat on the mat'] * 20),
    model_writer=model,
    vocab_size=300,
    model_type='bpe',
    byte_fallback=True,
    minloglevel=2,
  )
  path = tmp_path_factory.mktemp('spm') / 'tiny.model'
  path.write_bytes(model.getvalue())
  return str(path)


def test_sentencepiece_encodes_decodes_and_knows_its_special_ids(model_path):
  tokenizer = Config(SentencePieceTokenizer, model_path=model_path).instantiate()
  assert tokenizer.vocab_size == 300
  assert tokenizer.special_ids == (1, 2, 0)  # sentencepiece's defaults: unk 0, bos 1, eos 2, no pad
  ids = tokenizer.encode('the cat sat')
  assert tokenizer.decode([1, *ids, 2]) == 'the cat sat'


@settings(max_examples=30, deadline=None)
@given(documents=st.lists(st.text(st.characters(blacklist_categories=['Cs']), min_size=1), min_size=1, max_size=4))
def test_sentencepiece_bytes_of_tokens_add_up_to_the_document(model_path, documents):
  tokenizer = SentencePieceTokenizer(model_path=model_path)
  documents = [d.encode() for d in [TEXT, *documents]]
  for document, tokens in zip(documents, tokenizer.encode_documents(documents)):
    assert tokens.ids.tolist() == tokenizer.encode(document.decode())
    assert len(tokens.ids) == len(tokens.num_bytes)
    if len(tokens.ids):  # none for white space
      assert (tokens.num_bytes >= 0).all()
      assert tokens.num_bytes.sum() == len(document)


def test_sentencepiece_knows_where_words_begin_and_what_is_no_text(model_path):
  tokenizer = SentencePieceTokenizer(model_path=model_path)
  ids = tokenizer.encode('import  words')
  pieces = [tokenizer._model.id_to_piece(i) for i in ids]
  assert [piece[0] == '\u2581' for piece in pieces] == tokenizer.word_starts()[ids].tolist()
  assert tokenizer.word_starts()[ids].sum() >= 2 and tokenizer.word_starts().shape == (tokenizer.vocab_size,)
  assert {*tokenizer.special_ids} - {0} <= tokenizer.control_ids and not tokenizer.control_ids & {*ids}
  assert tokenizer.mask_id is None


def test_a_piece_of_text_has_bytes_even_if_its_id_stands_for_padding_or_a_mask(tmp_path):
  """With no padding of its own, id 0 is the padding; here it is an ordinary piece of text, and so is a mask."""
  sentencepiece = pytest.importorskip('sentencepiece')
  model = io.BytesIO()
  special = {'unk_id': 3, 'bos_id': 1, 'eos_id': 2, 'pad_id': -1, 'user_defined_symbols': ['cat', '[MASK]']}
  sentences = iter(['the cat sat on the mat'] * 20)
  train = sentencepiece.SentencePieceTrainer.train
  train(sentence_iterator=sentences, model_writer=model, vocab_size=24, model_type='bpe', minloglevel=2, **special)
  path = tmp_path / 'tiny.model'
  path.write_bytes(model.getvalue())
  tokenizer = SentencePieceTokenizer(model_path=str(path))
  assert tokenizer.special_ids == (1, 2, 0) and tokenizer.mask_id == 4
  assert tokenizer._piece_bytes[:5].tolist() == [len('cat'), 0, 0, 1, len('[MASK]')]


def test_sentencepiece_bytes_of_plain_words_are_those_of_the_pieces(model_path):
  tokenizer = SentencePieceTokenizer(model_path=model_path)
  [tokens] = tokenizer.encode_documents([b' the cat'])  # the model puts a space in front; here is one
  pieces = [tokenizer._model.id_to_piece(int(i)).replace('\u2581', ' ') for i in tokens.ids]
  assert ''.join(pieces).strip() == 'the cat'
  np.testing.assert_array_equal(tokens.num_bytes, [len(p) for p in pieces])


def test_sentencepiece_errors_name_the_file_and_the_remedy(tmp_path, monkeypatch):
  with pytest.raises(DataError, match=r'no file .*absent\.model'):
    SentencePieceTokenizer(model_path=str(tmp_path / 'absent.model')).encode('x')
  (tmp_path / 'bad.model').write_bytes(b'not a model')
  with pytest.raises(DataError, match=r'bad\.model is not a SentencePiece model'):
    SentencePieceTokenizer(model_path=str(tmp_path / 'bad.model')).encode('x')

  def without(name, *args, **kwargs):
    if name == 'sentencepiece':
      raise ImportError(name)
    return real_import(name, *args, **kwargs)

  real_import = builtins.__import__
  monkeypatch.setattr(builtins, '__import__', without)
  with pytest.raises(ConfigError, match=r'pip install praxis_lite\[text\]'):
    SentencePieceTokenizer(model_path='x').encode('x')
