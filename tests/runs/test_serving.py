"""What is behind `praxis-lite serve`: requests, texts without their stops, and the thread that drives a batcher."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading

import pytest
from batched_lm import made

from praxis_lite.cli.main import main
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.runs.serving.engine import (
  CANCELLED,
  LENGTH,
  NOTHING,
  STOPPED,
  Accepted,
  BusyError,
  EndedError,
  EndEvent,
  Engine,
  NewTokensEvent,
  Refused,
)
from praxis_lite.runs.serving.replies import Replies, Usage
from praxis_lite.runs.serving.requests import Asked, RequestError, parse_request
from praxis_lite.runs.serving.served_text import ServedText

pytestmark = pytest.mark.usefixtures('shared_programs')
WAIT_S = 120


def parse(body, *, is_chat=False):
  text = body if isinstance(body, bytes) else json.dumps(body).encode()
  return parse_request(text, is_chat=is_chat, model='tiny', most_top=3)


def test_what_a_request_asks_for():
  assert parse({'prompt': 'a'}) == Asked('a')
  assert parse({'prompt': ['a'], 'n': 1, 'echo': False, 'logit_bias': {}, 'presence_penalty': 0.0}) == Asked('a')
  assert parse(
    {'prompt': [1, 2], 'stop': 'x', 'logprobs': 0, 'temperature': 1, 'model': 'tiny', 'user': None}
  ) == Asked([1, 2], temperature=1.0, stop=('x',), num_top=0)
  hello = [{'role': 'user', 'content': 'hi'}]
  whole = {'messages': hello, 'max_completion_tokens': 5, 'stream': True, 'stream_options': {'include_usage': True}}
  asked = Asked(hello, True, max_tokens=5, is_stream=True, has_usage=True)
  assert parse(whole, is_chat=True) == asked
  parts = [{'role': 'user', 'content': [{'type': 'text', 'text': 'h'}, {'type': 'text', 'text': 'i'}]}]
  assert parse({'messages': parts, 'logprobs': True, 'top_logprobs': 2}, is_chat=True).num_top == 2
  assert parse({'messages': parts, 'logprobs': True}, is_chat=True) == Asked(hello, True, num_top=0)


@pytest.mark.parametrize(
  'body, told',
  [
    (b'{', 'the body is not JSON'),
    (b'\xff', 'the body is not JSON'),
    (b'[' * 100_000, 'the body is not JSON: nested too deeply'),
    ([1], r'the body is \[1\]; expected an object'),
    ({}, 'prompt is missing'),
    ({'prompt': None}, 'prompt is missing'),
    ({'prompt': ''}, 'prompt is ""; expected a text, or a list of tokens'),
    ({'prompt': ['a', 'b']}, 'prompt has several prompts; send one in a request'),
    ({'prompt': [True]}, r'prompt is \[true\]; expected a text'),
    ({'prompt': [1.5]}, r'prompt is \[1.5\]; expected a text'),
    ({'prompt': 'a', 'max_tokens': 0}, 'max_tokens is 0; expected an integer of at least 1'),
    ({'prompt': 'a', 'max_tokens': True}, 'max_tokens is true; expected'),
    ({'prompt': 'a', 'temperature': -1}, 'temperature is -1; expected a number of at least 0'),
    (b'{"prompt": "a", "temperature": NaN}', 'temperature is NaN; expected a number'),
    ({'prompt': 'a', 'top_p': 0}, 'top_p is 0; expected a number that is more than 0'),
    ({'prompt': 'a', 'seed': 2**70}, 'expected an integer of 64 bits'),
    ({'prompt': 'a', 'stop': ['']}, r'stop is \[""\]; expected a text'),
    ({'prompt': 'a', 'stop': ['x'] * 17}, 'stop has 17 texts; expected at most 16'),
    ({'prompt': 'a', 'n': 2}, 'n: this server has only 1'),
    ({'prompt': 'a', 'n': True}, 'n: this server has only 1'),
    ({'prompt': 'a', 'logprobs': 4}, 'logprobs is 4; this server reports up to 3'),
    ({'prompt': 'a', 'stream_options': {'x': True}}, 'stream_options is {"x": true}; expected'),
    ({'prompt': 'a', 'top_k': 4}, 'there is no field "top_k"; there are best_of, '),
    ({'prompt': 'a', 'model': 'gpt'}, 'there is no model "gpt"; this server has \'tiny\''),
  ],
)
def test_a_request_that_is_not_valid_names_its_field(body, told):
  with pytest.raises(RequestError, match=told) as raised:
    parse(body)
  error = raised.value.to_json()['error']
  assert error['type'] == 'invalid_request_error' and raised.value.status in (400, 404)
  assert error['param'] is None or error['param'] in error['message']


@pytest.mark.parametrize(
  'messages, told',
  [
    ([], r'messages is \[\]; expected a list'),
    ('hi', 'messages is "hi"; expected a list'),
    ([{'role': 'user'}], r'messages\[0\] is {"role": "user"}; expected'),
    ([{'role': 'user', 'content': 'a'}, 3], r'messages\[1\] is 3; expected'),
    ([{'role': 'user', 'content': [{'type': 'image_url'}]}], r'messages\[0\] is'),
  ],
)
def test_messages_that_are_not_valid_are_named(messages, told):
  with pytest.raises(RequestError, match=told):
    parse({'messages': messages}, is_chat=True)
  with pytest.raises(RequestError, match='top_logprobs needs "logprobs": true'):
    parse({'messages': [{'role': 'user', 'content': 'a'}], 'top_logprobs': 1}, is_chat=True)


@pytest.mark.parametrize(
  'said, stops, expected',
  [
    ('to be', [], 'to be'),
    ('to be', ['b'], 'to '),
    ('to bend', ['ben', 'bent'], 'to '),
    ('to be', ['bent'], 'to be'),  # Held back, and no stop text after all.
    ('aab', ['aab', 'ab'], ''),  # Both end here; the longer one begins earlier.
    ('naïve', ['v'], 'naï'),
    ('', ['x'], ''),
  ],
)
def test_a_stop_text_is_never_shown(said, stops, expected):
  ids = list(said.encode())
  for step in (1, 2, 5):
    text, pieces = ServedText(ByteTokenizer(), [65], stops, (7,)), []
    for end in range(step, len(ids), step):
      pieces.append(text.add(ids[:end], is_all=False))
      assert expected.startswith(''.join(pieces))
    pieces.append(text.add([*ids, 7], is_all=True))  # The end token has no text.
    assert ''.join(pieces) == expected


def test_log_probabilities_are_numbers_that_json_has():
  piece = NewTokensEvent([97], [float('-inf')], [[(97, float('-inf'))]])
  replies = Replies('tiny', ByteTokenizer(), True, 1)
  (event,) = replies.piece('a', piece).decode().splitlines()[:1]
  token = json.loads(event.removeprefix('data: '))['choices'][0]['logprobs']['content'][0]
  assert token == {
    'token': 'a',
    'logprob': -9999.0,
    'bytes': [97],
    'top_logprobs': [dict(token, top_logprobs=None)],
  } or (token['logprob'] == token['top_logprobs'][0]['logprob'] == -9999.0)


def test_parts_of_characters_are_told_apart_and_offsets_are_those_of_the_text():
  ids = [97, *'ß'.encode(), 98, *'€'.encode(), 99]
  piece = NewTokensEvent(ids, [0.0] * len(ids), [[(0xC3, -1.0), (0x9F, -2.0), (98, -3.0), (999, -4.0)]] * len(ids))
  replies = Replies('tiny', ByteTokenizer(), False, 4)
  found = replies.whole('aßb€c', piece, 'stop', Usage(1, len(ids)))['choices'][0]['logprobs']
  assert found['tokens'][:4] == ['a', 'bytes:\\xc3', 'bytes:\\x9f', 'b']
  assert found['text_offset'] == [0, 1, 1, 2, 3, 3, 3, 4]
  assert list(found['top_logprobs'][0]) == ['bytes:\\xc3', 'bytes:\\x9f', 'b', 'token_id:999']
  pieces = Replies('tiny', ByteTokenizer(), False, 4)
  parts = [json.loads(pieces.piece('', NewTokensEvent(ids[i : i + 1], [0.0], [[]]))[6:]) for i in range(len(ids))]
  assert [part['choices'][0]['logprobs']['text_offset'][0] for part in parts] == found['text_offset']
  chat = Replies('tiny', ByteTokenizer(), True, 0).whole('ß', piece, 'stop', Usage(1, 1))
  assert chat['choices'][0]['logprobs']['content'][1]['bytes'] == [0xC3]


def test_pieces_before_the_usage_have_null_as_usage():
  for has_usage in (True, False):
    replies = Replies('tiny', None, True, None, has_usage)
    sent = replies.start() + replies.piece('a', NOTHING) + replies.end('stop', Usage(1, 2) if has_usage else None)
    events = [json.loads(line[6:]) for line in sent.splitlines() if line and line != b'data: [DONE]']
    assert [event.get('usage', 'none') for event in events[:3]] == [None if has_usage else 'none'] * 3
    assert not has_usage or events[3]['usage'] == Usage(1, 2).to_json()


@pytest.mark.parametrize('draws_seeds', [True, False])
def test_equal_requests_without_a_seed_get_other_samples(draws_seeds):
  asked, seeds = Asked('abcd', temperature=1.0, max_tokens=9), []
  with running(draws_seeds=draws_seeds) as engine:
    submit = engine.batcher.submit
    engine.batcher.submit = lambda *args, seed, **named: seeds.append(seed) or submit(*args, seed=seed, **named)
    for case in (asked, asked, asked._replace(seed=5)):
      all_events(events_of(engine, case)[1])
  assert seeds[2] == 5 and (len({*seeds}) == 3 if draws_seeds else seeds[:2] == [None, None])


@contextlib.contextmanager
def running(most_waiting=4, tokenizer=True, draws_seeds=True, **fields):
  batcher = made().batcher(
    **{'rows': 2, 'max_length': 44, 'tokens_per_step': 2, 'chunk': 4, 'top_log_probs': 2, **fields}
  )
  engine = Engine(batcher, ByteTokenizer() if tokenizer else None, most_waiting, draws_seeds=draws_seeds)
  engine.warm_up()
  engine.start()
  try:
    yield engine
  finally:
    assert engine.stop(WAIT_S)


def events_of(engine, asked):
  """The ticket of a request, and a function that returns its next event."""
  events = queue.Queue()
  return engine.submit(asked, events.put), lambda: events.get(timeout=WAIT_S)


def all_events(following):
  found = [following()]
  while not isinstance(found[-1], EndEvent):
    found.append(following())
  return found


@pytest.fixture(scope='module')
def engine():
  with running() as own:
    yield own


def test_a_request_gets_the_tokens_that_it_gets_alone_and_then_an_end(engine):
  asked = Asked('abcd', temperature=0.7, seed=5, max_tokens=9)
  accepted, *pieces, ended = all_events(events_of(engine, asked)[1])
  ids = [i for piece in pieces for i in piece.ids]
  assert accepted == Accepted(list(b'abcd')) and len(pieces) > 1
  assert [ByteTokenizer().decode(ids)] == made().decode(['abcd'], temperature=0.7, seed=5, max_tokens=9)
  assert ended == EndEvent(LENGTH if len(ids) == 9 else STOPPED)
  assert all(len(piece.ids) == len(piece.log_probs) == len(piece.top) for piece in pieces)
  stopped = all_events(events_of(engine, asked._replace(stop=[ByteTokenizer().decode(ids[1:2])]))[1])
  assert stopped[-1] == EndEvent(STOPPED)


def test_without_max_tokens_a_request_has_those_of_the_config_that_fit(engine):
  for prompt, most in (('a', 12), ('a' * 40, 5)):
    pieces = all_events(events_of(engine, Asked(prompt, temperature=0.0))[1])[1:-1]
    assert 1 <= sum(len(piece.ids) for piece in pieces) <= most


@pytest.mark.parametrize(
  'asked, told, does_not_fit',
  [
    (Asked('a' * 45), 'sees at most 45 tokens; the prompt has 45, and max_tokens = 1', True),
    (Asked('a' * 40, max_tokens=6), 'the prompt has 40, and max_tokens = 6', True),
    (Asked([1, 500]), 'ids: 500, at position 1 of row 0, is not in the vocabulary', False),
    (Asked([2**40]), 'expected a list of tokens', False),
    (Asked('\ud800'), 'is not UTF-8 text', False),
    (Asked([{'role': 'user', 'content': 'a'}], True), 'a chat needs a tokenizer with a chat template', False),
  ],
)
def test_a_request_that_cannot_be_continued_is_refused(engine, asked, told, does_not_fit):
  refused, ended = all_events(events_of(engine, asked)[1])
  assert isinstance(refused, Refused) and told in refused.message and refused.does_not_fit == does_not_fit
  assert ended == EndEvent(CANCELLED) and not engine.num_open


def test_more_requests_than_there_are_places_are_refused_and_cancelled_ones_make_room():
  with running(most_waiting=1, rows=1, max_length=200) as engine:
    long = Asked('a', temperature=0.0, max_tokens=200)
    before = engine.num_cancelled
    first, waiting = events_of(engine, long), events_of(engine, long)
    with pytest.raises(BusyError, match='all 2 places are taken'):
      events_of(engine, long)
    for ticket, _ in (first, waiting):
      engine.cancel(ticket)
    for _, following in (first, waiting):
      assert all_events(following)[-1].reason in (CANCELLED, STOPPED, LENGTH)
    again = events_of(engine, Asked('b', max_tokens=2))
    assert all_events(again[1])[-1].reason in (STOPPED, LENGTH)
    engine.cancel(again[0])  # Nothing happens.
    assert (engine.num_busy, engine.num_open, engine.num_cancelled - before) == (1, 0, 2)
    assert not engine.batcher.num_running and not engine.batcher.num_waiting and not engine._by_request


def test_a_tokenizer_that_fails_ends_its_request_and_no_other():
  class Failing(ByteTokenizer):
    def prompt_ids(self, text):
      raise TypeError('no text')

  with running() as engine:
    engine._tokenizer = Failing()
    refused, _ = all_events(events_of(engine, Asked('a'))[1])
    assert refused.message == 'the prompt cannot be read: TypeError: no text'
    engine._tokenizer = None
    assert 'this model has no tokenizer' in all_events(events_of(engine, Asked('a'))[1])[0].message
    assert isinstance(all_events(events_of(engine, Asked([97], max_tokens=1))[1])[0], Accepted)


def test_an_engine_that_fails_or_stops_ends_its_requests():
  told = threading.Event()
  with running() as engine:
    engine.on_failure = told.set

    def fail():
      raise MemoryError('no memory')

    engine.batcher.step = fail
    assert all_events(events_of(engine, Asked('a'))[1])[-1] == EndEvent('the engine failed: MemoryError')
    assert told.wait(WAIT_S) and isinstance(engine.failure, MemoryError)
    with pytest.raises(EndedError, match='the engine failed: MemoryError'):
      events_of(engine, Asked('a'))
  with running() as engine:
    _, following = events_of(engine, Asked('a', max_tokens=40, temperature=0.0))
  assert all_events(following)[-1].reason in (CANCELLED, LENGTH, STOPPED) and not engine.num_open


def test_packages_that_are_not_installed_are_named(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'uvicorn', None)
  assert main(['serve', '--job_log_dir=runs/1']) == 2
  assert "serve needs praxis_lite[serve]: pip install 'praxis_lite[serve]'" in capsys.readouterr().err
