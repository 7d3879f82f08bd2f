"""Hugging Face tokenizers: there and back, bytes per token, special ids, chat templates in a sandbox."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import HfTokenizer, TableInput, TextInput
from praxis_lite.inputs.hf_tokenizer import _bytes_of

TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
  '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)
SETTINGS = {'bos_token': '<s>', 'eos_token': {'content': '</s>'}, 'chat_template': TEMPLATE}
MESSAGES = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'the cat?'}]


@pytest.fixture(scope='module')
def trained():
  """A byte-level BPE of 300 tokens that puts <s> before a text."""
  library = pytest.importorskip('tokenizers', reason='needs the package tokenizers: pip install praxis_lite[hf]')
  from tokenizers import decoders, models, pre_tokenizers, processors, trainers

  tokenizer = library.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  special = ['<s>', '</s>', '<|user|>', '<|system|>', '<|assistant|>']
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator(['the cat sat on the mat, naïve and 🙂, the cat that sat'] * 20, trainer)
  tokenizer.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 0)])
  return tokenizer


@pytest.fixture
def make(trained, tmp_path):
  def make(fields=None, **values):
    trained.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(SETTINGS | values))
    return HfTokenizer(path=str(tmp_path), **(fields or {}))

  return make


def test_text_comes_back_and_its_bytes_add_up(make):
  tokenizer = make()

  @settings(deadline=None, max_examples=50)
  @given(st.text(st.characters(blacklist_categories=['Cs'])))
  def check(text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    (tokens,) = tokenizer.encode_documents([text.encode()])
    assert tokens.num_bytes.sum() == len(text.encode()) * bool(ids) and (tokens.num_bytes >= 0).all()

  check()
  assert len(tokenizer.encode('the cat')) < len('the cat')


def test_bytes_of_tokens_make_up_the_text(make):
  tokenizer = make()
  pieces, text = tokenizer.token_bytes(), 'the cat sat, naïve 🙂\n\x00'
  assert len(pieces) == tokenizer.vocab_size
  assert b''.join(pieces[i] for i in tokenizer.encode(text)) == text.encode()
  assert all((piece == b'') == (i in tokenizer.control_ids) for i, piece in enumerate(pieces))


def test_bytes_that_no_token_covers_belong_to_the_next_one():
  assert _bytes_of('é  🙂a', [(0, 1), (3, 4), (3, 4), (4, 5)]).tolist() == [2, 6, 0, 1]
  assert _bytes_of('ab  ', [(0, 2)]).tolist() == [4]


def test_special_ids(make):
  assert make().special_ids == (0, 1, 1)
  assert make(pad_token='<|user|>').special_ids == (0, 1, 2)
  assert make({'eos_token': '<|assistant|>'}).special_ids == (0, 4, 4)
  assert make(bos_token=None).special_ids == (1, 1, 1)
  assert make(bos_token=None, eos_token=None, eos_token_id=[3, 4]).special_ids == (3, 3, 3)
  with pytest.raises(ConfigError, match='name neither a bos nor an eos token; set eos_token'):
    _ = make(bos_token=None, eos_token=None).special_ids
  with pytest.raises(ConfigError, match=r"HfTokenizer.eos_token: .* has no token '<end>'"):
    _ = make({'eos_token': '<end>'}).special_ids


def test_a_prompt_begins_as_the_tokenizer_begins_texts(make):
  tokenizer = make()
  assert tokenizer.prompt_ids('the') == [0, *tokenizer.encode('the')]
  assert tokenizer.decode([0, *tokenizer.encode('the'), 1, 999]) == 'the'


def test_chats_are_put_into_the_template(make):
  tokenizer = make()
  assert tokenizer.chat_prompt(MESSAGES) == '<s><|system|>Be brief.</s><|user|>the cat?</s><|assistant|>'
  ids = tokenizer.chat_ids(MESSAGES)
  assert ids[0] == 0 and ids[-1] == 4 and ids.count(0) == 1


def test_the_template_may_be_a_file_or_one_of_several(make, tmp_path):
  several = [{'name': 'tools', 'template': 'x'}, {'name': 'default', 'template': '{{ messages | tojson }}'}]
  assert make(chat_template=several).chat_prompt(MESSAGES[1:]) == '[{"role": "user", "content": "the cat?"}]'
  (tmp_path / 'chat_template.jinja').write_text(
    '{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}y{% endfor %}'
  )
  assert make().chat_prompt(MESSAGES) == 'y'


CHAT = [*MESSAGES, {'role': 'assistant', 'content': 'sat 🙂'}, {'role': 'user', 'content': 'on?'}]
CHAT += [{'role': 'assistant', 'content': 'the mat'}]
MARKED = (
  "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
  "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
IN_LINES = """
{%- macro said(m) -%}
  {%- generation -%}
    {{ m.content | trim }}{{ eos_token }}
  {%- endgeneration -%}
{%- endmacro -%}
{%- for m in messages %}
<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ said(m) }}{% else %}{{ m.content }}{% endif %}
{% endfor %}"""


@pytest.mark.parametrize('template', [TEMPLATE, MARKED, IN_LINES], ids=['not marked', 'marked', 'in lines'])
def test_the_answers_of_a_chat_are_told(make, template):
  tokenizer = make(chat_template=template)
  ids, is_answer = tokenizer.chat_tokens(CHAT)
  assert ids.shape == is_answer.shape and ids.dtype == 'int32' and is_answer.dtype == bool
  assert ''.join(tokenizer._model.id_to_token(i) or '' for i in ids[is_answer]).count('</s>') == 2
  assert tokenizer.decode(ids[is_answer]) == 'sat 🙂the mat'
  shown = tokenizer.chat_prompt(CHAT)
  assert '\ue000' not in shown and shown.startswith(tokenizer._model.decode(ids.tolist(), skip_special_tokens=False))
  assert not tokenizer.chat_tokens(MESSAGES).is_answer.any()


def test_answers_are_those_of_transformers(make, tmp_path):
  transformers = pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')
  tokenizer = make(chat_template=MARKED)
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / 'tokenizer.json'), eos_token='</s>')
  theirs.chat_template = MARKED
  found = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
  ids, is_answer = tokenizer.chat_tokens(CHAT)
  assert found['input_ids'] == ids.tolist() and found['assistant_masks'] == is_answer.astype(int).tolist()


def test_a_template_that_does_not_show_answers_is_refused(make):
  """It leaves out what was said before the last message."""
  tokenizer = make(chat_template="{{ messages[-1]['content'] }}")
  with pytest.raises(DataError, match=r'the chat template of .* does not mark answers by {% generation %}, and its'):
    tokenizer.chat_tokens(CHAT)


def test_a_model_may_be_trained_on_the_answers_of_chats(make, tmp_path):
  """As in docs/hugging-face.md."""
  pa = pytest.importorskip('pyarrow', reason='needs PyArrow: pip install praxis_lite[grain]')
  pytest.importorskip('grain', reason='needs Grain: pip install praxis_lite[grain]')
  from pyarrow import parquet

  tokenizer = make(chat_template=MARKED)
  parquet.write_table(pa.table({'messages': [CHAT] * 4}), tmp_path / 'chats.parquet')

  def answers(row, length=64):
    chat = tokenizer.chat_tokens(row['messages'])
    ids, is_answer = (np.resize(x, length + 1) * (np.arange(length + 1) < len(x)) for x in chat)
    return {'ids': ids[:-1], 'labels': ids[1:], 'weights': is_answer[1:].astype(np.float32)}

  batch = TableInput(path=str(tmp_path / 'chats.parquet'), parse_fn=answers, batch_size=4).get_next()
  assert tokenizer.decode(batch['labels'][0][batch['weights'][0] == 1]) == 'sat 🙂the mat'


@pytest.mark.parametrize(
  'template, message',
  [
    ("{{ raise_exception('no system role') }}", 'fails: no system role'),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails: access to attribute '__class__'"),
    ("{{ messages.append('x') }}", 'fails: '),
    ('{% for i in range(10**7) %}{% endfor %}', 'fails: its ranges have more than 1,000,000 numbers in all'),
    ('{% for i in range(10**30) %}{% endfor %}', 'fails: Python int too large'),
    (
      '{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}',
      'fails: its ranges have more than',
    ),
    ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'fails: maximum recursion depth exceeded'),
    ("{{ 'x' * 10**17 }}", 'fails: MemoryError'),
    ('{% if %}', 'fails: Expected an expression'),
    (None, 'there is no chat template in'),
  ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_refused(make, template, message):
  with pytest.raises(DataError, match=message):
    make(chat_template=template).chat_prompt(MESSAGES)


ELSE = (
  "{% for m in messages %}{% if m.role == 'user' %}U:{% elif m.role == 'critic' %}C:{% else %}A:{% endif %}"
  '{{ m.content }}{% endfor %}'
)


@pytest.mark.parametrize('template', [ELSE, TEMPLATE], ids=['else', 'writes roles'])
def test_misspelled_roles_are_refused(make, template):
  tokenizer = make(chat_template=template)
  chat = [*MESSAGES, {'role': 'asistant', 'content': 'the mat'}]
  for encode in (tokenizer.chat_prompt, tokenizer.chat_ids, tokenizer.chat_tokens):
    with pytest.raises(DataError, match=r"message 3 has the role 'asistant'; .* Did you mean 'assistant'\?"):
      encode(chat)


def test_roles_that_the_template_does_not_know_are_refused_and_its_own_are_not(make):
  def said(role, template):
    return make(chat_template=template).chat_prompt([{'role': role, 'content': 'x'}])

  assert said('critic', ELSE) == 'C:x'
  assert said('narrator', TEMPLATE).startswith('<s><|narrator|>x</s>')
  with pytest.raises(DataError, match="message 1 has the role 'narrator'; expected one of system, developer, user,"):
    said('narrator', ELSE)


def test_files_that_are_missing_or_no_tokenizer_are_named(make, tmp_path):
  make()
  with pytest.raises(DataError, match=r'HfTokenizer.path: there is no file .*nowhere'):
    _ = HfTokenizer(path=str(tmp_path / 'nowhere')).vocab_size
  (tmp_path / 'tokenizer.json').write_text('{}')
  with pytest.raises(DataError, match=r'tokenizer.json is not a tokenizer: '):
    _ = HfTokenizer(path=str(tmp_path)).vocab_size


def test_text_is_read_with_it(make, tmp_path):
  tokenizer = make()
  text = tmp_path / 'text.txt'
  text.write_text('the cat sat on the mat. ' * 50)
  data = TextInput(path=str(text), seq_len=8, batch_size=2, tokenizer_tpl=Config(HfTokenizer, path=tokenizer.path))
  batch = data.get_next()
  assert data.vocab_size == tokenizer.vocab_size
  assert batch['ids'][0, 0] == 0 and batch['bytes'].sum() > 16
