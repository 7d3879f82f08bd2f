"""Texts with a class: their rows, pairs, and lines that are no examples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, LabelledTextInput
from praxis_lite.inputs.labelled_text import cut_longest

BOS, EOS, PAD = 256, 257, 258
TOKENIZER = Config(ByteTokenizer, bos_id=BOS, eos_id=EOS, pad_id=PAD)


def labelled(**fields):
  config = Config(LabelledTextInput, name='texts', tokenizer_tpl=TOKENIZER, seq_len=9, batch_size=3)
  return config.set(**fields).instantiate()


def ids(*parts):
  return [token for part in parts for token in (part.encode() if isinstance(part, str) else [part])]


def test_a_text_is_between_begin_and_end():
  batch = labelled(examples=[('ab', 1), ('c', '0')]).get_next()
  assert batch['ids'][0].tolist() == [*ids(BOS, 'ab', EOS), *[PAD] * 5]
  assert batch['segment_ids'].sum(1).tolist() == [4, 3, 0]
  assert not batch['token_type_ids'].any()
  assert batch['label'].tolist() == [1, 0, 0] and batch['weights'].tolist() == [1, 1, 0]
  assert not batch['ids'][2].any()  # A row of padding.


@pytest.mark.parametrize(
  'style, expected, types',
  [
    ('bert', ids(BOS, 'ab', EOS, 'cd', EOS), [0, 0, 0, 0, 1, 1, 1, 0, 0]),
    ('roberta', ids(BOS, 'ab', EOS, EOS, 'cd', EOS), [0] * 9),
  ],
)
def test_pairs(style, expected, types):
  fields = {'fields': ('one', 'other', 'same'), 'pair_style': style}
  batch = labelled(examples=[('ab', 'cd', 2)], **fields).get_next()
  assert batch['ids'][0, : len(expected)].tolist() == expected
  assert batch['token_type_ids'][0].tolist() == types
  assert batch['label'][0] == 2


def test_the_longer_text_is_cut():
  batch = labelled(examples=[('abcdefgh', 'xy', 0)], fields=('a', 'b', 'c'), truncate=True).get_next()
  assert batch['ids'][0].tolist() == ids(BOS, 'abcd', EOS, 'xy', EOS)
  assert cut_longest(['abc', 'de', ''], 3) == ['a', 'de', ''] or cut_longest(['abc', 'de', ''], 3) == ['ab', 'd', '']
  assert cut_longest(['abc'], 5) == ['abc']


def test_files_of_both_kinds_have_the_same_examples(tmp_path):
  lines = [('good film', 'good'), ('nô', 'bad'), ('x', 'good')]
  (tmp_path / 'a.tsv').write_text(''.join(f'{text}\t{label}\n' for text, label in lines) + '\n')
  (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'label': b, 'text': a}) + '\n' for a, b in lines))
  found = [
    labelled(path=str(tmp_path / f'a.{end}'), classes=('bad', 'good'), seq_len=12).get_next()
    for end in ('tsv', 'jsonl')
  ]
  for name in found[0]:
    np.testing.assert_array_equal(found[0][name], found[1][name])
  assert found[0]['label'].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
  'line, says',
  [
    ('a', 'line 2 of .*a.tsv: has 1 column; expected text, label, separated by tabs'),
    ('a\tb\tgood', 'line 2 of .*: has 3 columns'),
    ('\tgood', 'its text has no tokens'),
    ('a\tgoof', r"its class 'goof' is not one of 'bad', 'good'\. Did you mean 'good'\?"),
    ('abcdefgh\tgood', 'the text has 8 tokens, and seq_len = 9 has room for 7; set a larger one, or truncate=True'),
    (b'\xff\tgood', "line 2 of .*: 'utf-8' codec can't decode"),
  ],
)
def test_a_line_that_is_no_example_is_named_or_left_out(line, says, tmp_path):
  line = line if isinstance(line, bytes) else line.encode()
  (tmp_path / 'a.tsv').write_bytes(b'ok\tgood\n' + line + b'\n')
  fields = {'path': str(tmp_path / 'a.tsv'), 'classes': ('bad', 'good')}
  with pytest.raises(DataError, match=says):
    labelled(**fields).get_next()
  source = labelled(on_bad_record='skip', **fields)
  assert source.get_next()['weights'].tolist() == [1, 0, 0] and len(source.bad_records) == 1


@pytest.mark.parametrize('label', [-1, 'x', None, 1.5, True])
def test_a_class_without_a_name_is_a_number(label):
  with pytest.raises(DataError, match='expected a number of at least 0, or set classes to the names of all'):
    labelled(examples=[('a', label)]).get_next()


def test_mistakes_are_named(tmp_path):
  for fields, says in (
    ({}, r'texts\.path: expected either path, files with examples, or examples'),
    ({'path': 'x', 'examples': [('a', 1)]}, r'texts\.path: expected either'),
    ({'examples': [('a', 1)], 'fields': ('text',)}, r'texts\.fields: expected the names of a text and its class'),
    ({'examples': [('a', 1)], 'seq_len': 2}, r'texts\.seq_len: expected an integer of at least 3'),
    ({'examples': [('a', 1)], 'classes': ('x', 'y', 'x')}, r'texts\.classes: expected the name of each class once'),
    ({'examples': [('a', 1)], 'pair_style': 'gpt'}, r"texts\.pair_style: expected 'bert' or 'roberta'"),
  ):
    with pytest.raises(ConfigError, match=says):
      labelled(**fields)
  for examples, says in (
    ([], 'there are no texts'),
    ([('a',)], r"example 0 is \('a',\)"),
    ([(1, 1)], 'expected a text'),
  ):
    with pytest.raises(DataError, match=says):
      labelled(examples=examples).get_next()
  with pytest.raises(ConfigError, match=r'texts\.examples: expected tuples'):
    labelled(examples='abc').get_next()
  (tmp_path / 'a.csv').write_text('a,1')
  with pytest.raises(DataError, match='is neither'):
    labelled(path=str(tmp_path / 'a.csv')).get_next()


@pytest.mark.parametrize(
  'file, content, fields',
  [
    ('a.txt', 'ab\n\nc\n', ('text', 'label')),
    ('a.tsv', 'ab\nc\tgood\n', ('text', 'label')),
    ('a.jsonl', '{"text": "ab"}\n{"text": "c", "label": "unknown"}\n', ('text', 'label')),
    ('b.tsv', 'ab\tx\nc\tx\t3\n', ('one', 'other', 'label')),
    ('b.jsonl', '{"one": "ab", "other": "x"}\n{"one": "c", "other": "x"}\n', ('one', 'other', 'label')),
  ],
)
def test_texts_to_classify_need_no_class(tmp_path, file, content, fields):
  (tmp_path / file).write_text(content)
  batch = labelled(path=str(tmp_path / file), fields=fields, classes=('bad', 'good'), unlabelled=True).get_next()
  other = ids('x', EOS) if len(fields) == 3 else []
  assert [row[row != PAD].tolist() for row in batch['ids'][:2]] == [ids(BOS, t, EOS) + other for t in ('ab', 'c')]
  assert not batch['label'].any() and batch['weights'].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
  'file, says',
  [
    ('a.txt', r'line 1 of .*a\.txt: is one text; expected one and other, in a \.tsv or \.jsonl file'),
    ('a.tsv', r'line 1 of .*a\.tsv: has 1 column; expected one, other, separated by tabs'),
    ('a.md', r'a\.md is neither \*\.tsv nor \*\.jsonl nor \*\.txt'),
  ],
)
def test_a_line_that_is_no_pair_to_classify_is_named(tmp_path, file, says):
  (tmp_path / file).write_text('ab\n')
  with pytest.raises(DataError, match=says):
    labelled(path=str(tmp_path / file), fields=('one', 'other', 'label'), unlabelled=True).get_next()


def test_a_line_with_too_many_columns_for_one_text_is_named(tmp_path):
  (tmp_path / 'a.tsv').write_text('ab\tx\ty\n')
  with pytest.raises(DataError, match=r'has 3 columns; expected text$'):
    labelled(path=str(tmp_path / 'a.tsv'), unlabelled=True).get_next()
