"""Prompts with answers, and pairs of answers: what a batch holds, all forms of a line, and mistakes in them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, ChatInput, HfTokenizer, PreferenceInput

TOKENIZER = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
PAIRS = [
  {'prompt': 'ab', 'chosen': 'xyz', 'rejected': 'v'},
  {'prompt': 'c', 'chosen': 'w', 'rejected': 'uu'},
  {'prompt': 'de', 'chosen': 'tt', 'rejected': 's'},
]
USER, BOT, OTHER = (
  {'role': role, 'content': text} for role, text in (('user', 'q'), ('assistant', 'yes'), ('assistant', 'no'))
)
LATER = {'role': 'user', 'content': 'so'}
MARKED = (
  "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
  "</s>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
  '{% if add_generation_prompt %}<assistant>{% endif %}'
)
PLAIN = MARKED.replace('{% generation %}', '').replace('{% endgeneration %}', '')


def text(ids):
  return ''.join({256: '^', 257: '$', 258: '.'}.get(i, chr(i) if i < 256 else '?') for i in ids)


def answers(side, row):
  """The labels that count."""
  return text(side['labels'][row][side['weights'][row] > 0])


def pairs_input(**fields):
  given = {'name': 'pairs', 'examples': PAIRS, 'seq_len': 8, 'batch_size': 3, 'tokenizer_tpl': TOKENIZER, **fields}
  return Config(PreferenceInput).set(**given).instantiate()


def chats_input(**fields):
  given = {'name': 'chats', 'seq_len': 8, 'batch_size': 2, 'tokenizer_tpl': TOKENIZER, **fields}
  return Config(ChatInput).set(**given).instantiate()


@pytest.fixture(scope='module', params=[MARKED, PLAIN], ids=['marked', 'plain'])
def chat_tokenizer(request, tmp_path_factory):
  """A tokenizer of characters with a chat template that marks answers, or does not."""
  library = pytest.importorskip('tokenizers', reason='needs the package tokenizers: pip install praxis_lite[hf]')
  folder = tmp_path_factory.mktemp('tokenizer')
  words = ['<user>', '<assistant>', '</s>', *'abcdefghijklmnopqrstuvwxyz']
  made = library.Tokenizer(library.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='a'))
  made.pre_tokenizer = library.pre_tokenizers.Split('', 'isolated')
  made.add_special_tokens(words[:3])
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '</s>', 'chat_template': request.param}))
  return Config(HfTokenizer, path=str(folder))


def words_of(config, ids):
  tokenizer = config.instantiate()
  return ''.join(tokenizer._model.id_to_token(int(i)) for i in ids)


def test_a_row_holds_a_prompt_and_each_answer():
  batch = pairs_input().get_next()
  assert [text(row) for row in batch['chosen']['ids']] == ['abxyz$..', 'cw$.....', 'dett$...']
  assert [text(row) for row in batch['rejected']['ids']] == ['abv$....', 'cuu$....', 'des$....']
  assert [text(row) for row in batch['chosen']['labels']] == ['bxyz$...', 'w$......', 'ett$....']
  assert [answers(batch['chosen'], i) for i in range(3)] == ['xyz$', 'w$', 'tt$']
  assert [answers(batch['rejected'], i) for i in range(3)] == ['v$', 'uu$', 's$']
  assert batch['weights'].tolist() == [1, 1, 1] and 'mismatched' not in batch
  np.testing.assert_array_equal(batch['chosen']['segment_ids'], batch['chosen']['ids'] != 258)
  assert batch['chosen']['segment_pos'][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_packed_rows_hold_the_same_pairs_in_both_parts():
  source = pairs_input(packed=True, max_pairs=2, seq_len=9)
  batch = source.get_next()
  assert (source.num_pairs, source.num_examples) == (3, 2)
  assert text(batch['chosen']['ids'][0]) == 'abxyz$cw$' and text(batch['rejected']['ids'][0]) == 'abv$cuu$.'
  assert batch['chosen']['segment_ids'][0].tolist() == [1] * 6 + [2] * 3
  assert batch['rejected']['segment_ids'][0].tolist() == [1] * 4 + [2] * 4 + [0]
  assert answers(batch['rejected'], 0) == 'v$uu$'
  assert batch['weights'].tolist() == [[1, 1], [1, 0], [0, 0]]
  assert pairs_input(packed=True, max_pairs=1, seq_len=9).num_examples == 3
  assert source.longest_segments() == {'segment_pos': 6}


def test_each_prompt_with_an_answer_of_the_next_one():
  batch = pairs_input(mismatched=True).get_next()
  assert [text(row) for row in batch['mismatched']['ids']] == ['abw$....', 'cs$.....', 'dexyz$..']
  assert [answers(batch['mismatched'], i) for i in range(3)] == ['w$', 's$', 'xyz$']
  for examples in (PAIRS[:1], [PAIRS[0], PAIRS[0] | {'chosen': 'u'}]):
    with pytest.raises(DataError, match='answers to other prompts need at least 2 examples with other prompts'):
      pairs_input(mismatched=True, examples=examples).get_next()


@pytest.mark.parametrize('prompts', ['ab', 'aab', 'abb', 'aba', 'aabbcca', 'abcabc', 'aaabaa'])
def test_a_mismatched_answer_is_that_of_the_next_example_with_another_prompt(prompts):
  examples = [{'prompt': p, 'completion': chr(ord('A') + i), 'label': True} for i, p in enumerate(prompts)]
  batch = pairs_input(examples=examples, mismatched=True, batch_size=len(prompts)).get_next()
  around = 2 * [(e['prompt'], e['completion']) for e in examples]
  for i, prompt in enumerate(prompts):
    answer = next(answer for p, answer in around[i + 1 :] if p != prompt)
    assert text(batch['mismatched']['ids'][i]) == f'{prompt}{answer}$.....'


def test_single_answers():
  singles = [{'prompt': 'ab', 'completion': 'c', 'label': True}, {'prompt': 'd', 'completion': 'e', 'label': False}]
  source = pairs_input(examples=singles, mismatched=True)
  batch = source.get_next()
  assert source.has_single and not pairs_input().has_single
  assert [text(row) for row in batch['chosen']['ids']] == ['abc$....', '........', ''.rjust(8, '\0')]
  assert text(batch['rejected']['ids'][1]) == 'de$.....' and not batch['rejected']['weights'][0].any()
  assert answers(batch['mismatched'], 0) == 'e$' and answers(batch['mismatched'], 1) == 'c$'


@pytest.mark.parametrize('end', ['\n', '\r\n', ''])
def test_files_give_the_same_pairs(end, tmp_path):
  (tmp_path / 'a.tsv').write_text('ab\txyz\tv\nc\tw\tuu\n\nde\ttt\ts' + end)
  named = [{'q': p['prompt'], 'good': p['chosen'], 'bad': p['rejected'], 'more': 1} for p in PAIRS]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, named)) + end)
  expected = pairs_input().get_next()
  of_tsv = pairs_input(examples=None, path=str(tmp_path / 'a.tsv')).get_next()
  of_json = pairs_input(examples=None, path=str(tmp_path / 'a.jsonl'), fields=('q', 'good', 'bad')).get_next()
  for side in ('chosen', 'rejected'):
    for name, x in expected[side].items():
      np.testing.assert_array_equal(of_tsv[side][name], x)
      np.testing.assert_array_equal(of_json[side][name], x)


def test_chats_train_on_all_their_answers(chat_tokenizer):
  chat = {'messages': [USER, BOT, LATER, OTHER]}
  fields = {'examples': [chat], 'seq_len': 20, 'tokenizer_tpl': chat_tokenizer, 'batch_size': 1}
  batch = chats_input(**fields).get_next()
  whole = '<user>q<assistant>yes</s><user>so<assistant>no</s>'
  assert words_of(chat_tokenizer, batch['ids'][0][batch['segment_ids'][0] > 0]) == whole
  assert words_of(chat_tokenizer, batch['labels'][0][batch['weights'][0] > 0]) == 'yes</s>no</s>'
  last = {'prompt': [USER, BOT, LATER], 'completion': [OTHER]}
  batch = chats_input(**fields | {'examples': [last]}).get_next()
  assert words_of(chat_tokenizer, batch['ids'][0][batch['segment_ids'][0] > 0]) == whole
  assert words_of(chat_tokenizer, batch['labels'][0][batch['weights'][0] > 0]) == 'no</s>'


@pytest.mark.parametrize(
  'pair',
  [
    {'prompt': [USER, BOT, LATER], 'chosen': [BOT], 'rejected': [OTHER]},
    {'prompt': [USER, BOT, LATER], 'chosen': 'yes', 'rejected': 'no'},
    {'chosen': [USER, BOT, LATER, BOT], 'rejected': [USER, BOT, LATER, OTHER]},
    {'prompt': 'q', 'chosen': [USER, BOT, LATER, BOT], 'rejected': [USER, BOT, LATER, OTHER]},
  ],
  ids=['messages', 'texts', 'whole', 'whole with a text'],
)
def test_pairs_of_chats_compare_what_follows_their_common_messages(chat_tokenizer, pair):
  fields = {'examples': [pair], 'seq_len': 20, 'tokenizer_tpl': chat_tokenizer, 'batch_size': 1}
  batch = pairs_input(**fields).get_next()
  for side, said in (('chosen', 'yes'), ('rejected', 'no')):
    rows = batch[side]
    ids = rows['ids'][0][rows['segment_ids'][0] > 0]
    assert words_of(chat_tokenizer, ids) == f'<user>q<assistant>yes</s><user>so<assistant>{said}</s>'
    assert words_of(chat_tokenizer, rows['labels'][0][rows['weights'][0] > 0]) == f'{said}</s>'


@pytest.mark.parametrize('more', [[], [LATER | {'role': 'tool'}]], ids=['answers', 'calls of tools'])
def test_a_text_is_the_prompt_of_answers_that_are_messages(chat_tokenizer, more):
  pair = {'prompt': 'q', 'chosen': [BOT, *more], 'rejected': [BOT, *more, OTHER]}
  as_messages = pair | {'prompt': [USER]}
  fields = {'seq_len': 20, 'tokenizer_tpl': chat_tokenizer, 'batch_size': 1}
  found, expected = (pairs_input(examples=[x], **fields).get_next() for x in (pair, as_messages))
  for side in ('chosen', 'rejected'):
    for name, x in expected[side].items():
      np.testing.assert_array_equal(found[side][name], x)


def test_chats_of_texts_padded_and_packed():
  examples = [
    {'prompt': 'a', 'completion': 'bc'},
    {'prompt': 'd', 'completion': 'e'},
    {'prompt': 'fg', 'completion': 'h'},
  ]
  padded = chats_input(examples=examples).get_next()
  assert [text(row) for row in padded['ids']] == ['abc$....', 'de$.....'] and answers(padded, 0) == 'bc$'
  packed = chats_input(examples=examples, packed=True)
  assert packed.num_examples == 2
  rows = packed.get_next()
  assert sorted(text(row).replace('.', '') for row in rows['ids']) == ['abc$fgh$', 'de$']
  np.testing.assert_array_equal(rows['segment_ids'].max(1), [2, 1])


def test_what_is_too_long_is_an_error_or_is_cut():
  with pytest.raises(DataError, match=r'example 0 of examples: it has 6 tokens, and seq_len = 5; set a larger one, or'):
    pairs_input(seq_len=5).get_next()
  assert text(pairs_input(seq_len=5, truncate=True).get_next()['chosen']['ids'][0]) == 'abxyz'
  with pytest.raises(DataError, match='no token of the answer is among its first 2'):
    pairs_input(seq_len=2, truncate=True).get_next()
  kept = pairs_input(seq_len=4, on_bad_record='skip')
  assert kept.num_pairs == 1 and [bad.place for bad in kept.bad_records] == ['example 0', 'example 2']


@pytest.mark.parametrize(
  'example, message',
  [
    ({'prompt': 'a', 'chosen': 'b'}, r"has neither a text nor messages 'rejected'; its fields: prompt, chosen"),
    ({'prompt': 'a', 'chosen': '', 'rejected': 'b'}, 'the answer has no tokens'),
    ({'prompt': 'a', 'chosen': [BOT], 'rejected': 'b'}, "its 'prompt' is a text and its 'chosen' are messages"),
    ({'chosen': [BOT], 'rejected': 'no'}, "has neither a text nor messages 'prompt'"),
    ({'prompt': [USER], 'chosen': [BOT], 'rejected': ['no']}, "message 1 of its 'rejected' needs the texts 'role'"),
    ({'chosen': [USER, BOT], 'rejected': [USER, BOT]}, "its 'chosen' and 'rejected' are equal, so neither is better"),
    (
      {'prompt': 'q', 'chosen': [BOT], 'rejected': [USER, OTHER]},
      "one of its 'chosen' and 'rejected' has only answers",
    ),
    ({'prompt': 'a', 'completion': 'b', 'label': 1}, "its 'label' is 1; expected true or false"),
    ({}, "has neither a text nor messages 'prompt'; its fields: none"),
  ],
)
def test_bad_pairs(example, message):
  with pytest.raises(DataError, match=rf'pairs.examples: example 0 of examples: {message}'):
    pairs_input(examples=[example]).get_next()


def test_mistakes_are_named(tmp_path):
  with pytest.raises(ConfigError, match=r'ByteTokenizer has no chat template, which the messages of chats need; set'):
    chats_input(examples=[{'messages': [USER, BOT]}]).get_next()
  with pytest.raises(ConfigError, match=r'chats.path: expected either path, files with examples, or examples'):
    chats_input()
  with pytest.raises(DataError, match='there are no examples'):
    pairs_input(examples=[]).get_next()
  for fields in (('prompt', 'chosen'), 'abc', ()):
    with pytest.raises(ConfigError, match=r'PreferenceInput.fields: expected tuple\[str, str, str\]'):
      pairs_input(fields=fields)
  with pytest.raises(DataError, match="example 0 is 'a'; expected a dict"):
    pairs_input(examples=['a']).get_next()
  (tmp_path / 'a.tsv').write_text('a\tb\n')
  with pytest.raises(
    DataError, match=r'line 1 of .*a.tsv: has 2 columns; expected prompt, chosen, rejected, separated'
  ):
    pairs_input(examples=None, path=str(tmp_path / 'a.tsv')).get_next()


def test_chats_of_other_forms_are_named():
  for example, message in (
    ({'conversations': [USER, BOT]}, "has neither 'messages' nor 'prompt' and 'completion'; its fields: conversations"),
    ({'messages': 'hi'}, 'its \'messages\' is no list of {"role": ..., "content": ...}'),
    ({'messages': [USER, {'from': 'gpt', 'value': 'a'}]}, "message 2 of its 'messages' .*; it has from, value"),
    ({'messages': [USER, {'role': 'assistant', 'content': None}]}, "message 2 .* needs the texts 'role' and 'content'"),
  ):
    with pytest.raises(DataError, match=f'example 0 of examples: {message}'):
      chats_input(examples=[example]).get_next()


def test_a_chat_without_an_answer_is_bad(chat_tokenizer):
  with pytest.raises(DataError, match="no message with the role 'assistant' has a token"):
    chats_input(examples=[{'messages': [USER]}], tokenizer_tpl=chat_tokenizer).get_next()


def test_chats_far_shorter_than_a_row_are_refused_only_in_training():
  fields = {'examples': [{'prompt': 'ab', 'completion': 'xyz'}], 'batch_size': 1, 'seq_len': 131_072}
  assert next(chats_input(**fields))['ids'].shape == (1, 131_072)
  with pytest.raises(DataError, match=r'^chats\.seq_len = 131072: all of the data has \d tokens'):
    next(chats_input(is_training=True, **fields))
