"""`praxis-lite serve` over HTTP: what clients of OpenAI's API expect, and what clients that behave badly cannot do."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import pathlib
import signal
import socket
import sys
import threading
import time

import pytest
from batched_lm import V, made

from praxis_lite.common.errors import UserError
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.runs.serving.engine import EndedError, Engine
from praxis_lite.runs.serving.requests import Asked

pytest.importorskip('starlette', reason="needs starlette: pip install 'praxis_lite[serve]'")
pytest.importorskip('uvicorn', reason="needs uvicorn: pip install 'praxis_lite[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / 'tools'))
import load_serving

from praxis_lite.runs.serving import server as server_module
from praxis_lite.runs.serving.app import Served, make_app
from praxis_lite.runs.serving.server import is_loopback, serve

pytestmark = pytest.mark.usefixtures('shared_programs')
WAIT_S = 120
CHAT = (
  '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}'
)


class Running:
  """A server in a thread of this process."""

  def __init__(self, tokenizer, *, most_waiting=80, drain_s=5.0, limits=(), **fields):
    sizes = {'rows': 3, 'max_length': 60, 'tokens_per_step': 2, 'chunk': 4, 'top_log_probs': 3}
    self.engine = Engine(made().batcher(**{**sizes, **fields}), tokenizer, most_waiting)
    self.engine.warm_up()
    ready = threading.Event()
    served = Served('tiny', tokenizer, 3, **dict(limits))
    self.told = []

    def say(url, is_local):
      self.port = int(url.rpartition(':')[2])
      self.is_local = is_local
      ready.set()

    def run():
      try:
        places = 3 + most_waiting
        serve(self.engine, served, '127.0.0.1', 0, most_open=places, drain_s=drain_s, on_ready=say)
      except BaseException as error:
        self.told.append(error)

    self.thread = threading.Thread(target=run)
    self.thread.start()
    assert ready.wait(WAIT_S)

  def end(self):
    """Ends it as a signal does."""
    self.engine.on_failure()
    self.thread.join(WAIT_S)
    assert not self.thread.is_alive()

  def slow_down(self, *, stop=False):
    """Makes steps take a while, or do nothing."""
    step = type(self.engine.batcher).step
    own = self.engine.batcher
    own.step = lambda: time.sleep(0.02 if stop else 0.3) or ([] if stop else step(own))

  def post(self, body, path='/v1/completions', **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=WAIT_S)
    connection.request('POST', path, data, {'content-type': 'application/json', **headers})
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()

  def get(self, path, **headers):
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=WAIT_S)
    connection.request('GET', path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()

  def whole(self, body, path='/v1/completions'):
    status, _, answer = self.post(body, path)
    assert status == 200, answer
    return json.loads(answer)


@pytest.fixture(scope='module')
def server():
  running = Running(ByteTokenizer())
  yield running
  running.end()
  assert not running.told


ASKED = {'prompt': 'abcd', 'max_tokens': 9, 'temperature': 0.7, 'seed': 5}


def alone(**more):
  return made().decode(['abcd'], max_tokens=9, temperature=0.7, seed=5, **more)[0]


def test_a_completion_whole_and_in_pieces(server):
  whole = server.whole({**ASKED, 'logprobs': 2})
  (choice,) = whole['choices']
  assert choice['text'] == alone() and whole['object'] == 'text_completion' and whole['model'] == 'tiny'
  count = whole['usage']['completion_tokens']
  assert whole['usage'] == {'prompt_tokens': 4, 'completion_tokens': count, 'total_tokens': 4 + count}
  assert choice['finish_reason'] == ('length' if count == 9 else 'stop')
  log_probs = choice['logprobs']
  assert len(log_probs['tokens']) == len(log_probs['token_logprobs']) == len(log_probs['text_offset']) == count
  assert ''.join(log_probs['tokens']) == choice['text'] and all(len(top) == 2 for top in log_probs['top_logprobs'])
  streamed = {**ASKED, 'logprobs': 2, 'stream': True, 'stream_options': {'include_usage': True}}
  status, headers, body = server.post(streamed)
  assert status == 200 and headers['content-type'].startswith('text/event-stream')
  *events, usage = load_serving.events_of(body)
  assert usage['choices'] == [] and usage['usage'] == whole['usage']
  assert ''.join(event['choices'][0]['text'] for event in events) == choice['text'] and len(events) > 3
  assert [event['choices'][0]['finish_reason'] for event in events][-2:] == [None, choice['finish_reason']]
  pieces = [event['choices'][0]['logprobs'] for event in events if event['choices'][0]['logprobs']]
  assert [p for piece in pieces for p in piece['token_logprobs']] == log_probs['token_logprobs']
  assert [o for piece in pieces for o in piece['text_offset']] == log_probs['text_offset']


def test_stops_top_p_and_tokens(server):
  text = alone()
  stopped = server.whole({**ASKED, 'stop': [text[3:5]]})['choices'][0]
  assert stopped['text'] == text[: text.index(text[3:5])] and stopped['finish_reason'] == 'stop'
  assert stopped['logprobs'] is None
  assert server.whole({**ASKED, 'top_p': 0.5})['choices'][0]['text'] == alone(top_p=0.5)
  assert server.whole({**ASKED, 'prompt': list(b'abcd')})['choices'][0]['text'] == text
  assert server.whole({'prompt': 'a'})['usage']['completion_tokens'] <= 12  # Of the config.


def test_a_chat_is_put_into_the_template_of_the_run(tmp_path):
  library = pytest.importorskip('tokenizers', reason='needs the package tokenizers: pip install praxis_lite[hf]')
  from praxis_lite.inputs import HfTokenizer

  words = ['<user>', '<assistant>', '<system>', *(chr(i) for i in range(3, V))]
  own = library.Tokenizer(library.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='a'))
  own.pre_tokenizer, own.decoder = library.pre_tokenizers.Split('', 'isolated'), library.decoders.Fuse()
  own.add_special_tokens(words[:3])
  own.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': 'a', 'chat_template': CHAT}))
  tokenizer = HfTokenizer(path=str(tmp_path))
  server = Running(tokenizer)
  try:
    messages = [{'role': 'system', 'content': 'be'}, {'role': 'user', 'content': 'hi'}]
    asked = {'messages': messages, 'max_tokens': 8, 'temperature': 0.7, 'seed': 3, 'logprobs': True, 'top_logprobs': 1}
    whole = server.whole(asked, '/v1/chat/completions')
    prompt = [2, *b'be', 0, *b'hi', 1]
    (ids,) = made().decode([prompt], max_tokens=8, temperature=0.7, seed=3)
    shown = ids[:-1] if ids[-1] == 7 else ids
    (choice,) = whole['choices']
    assert choice['message'] == {'role': 'assistant', 'content': tokenizer.decode(shown)}
    assert whole['usage']['prompt_tokens'] == len(prompt) and len(choice['logprobs']['content']) == len(ids)
    assert all(len(token['top_logprobs']) == 1 for token in choice['logprobs']['content'])
    _, _, body = server.post({**asked, 'stream': True}, '/v1/chat/completions')
    deltas = [event['choices'][0]['delta'] for event in load_serving.events_of(body)]
    assert deltas[0] == {'role': 'assistant', 'content': ''} and deltas[-1] == {}
    assert ''.join(delta.get('content', '') for delta in deltas) == choice['message']['content']
    status, _, body = server.post({'messages': [{'role': 'user', 'content': 'x' * 80}]}, '/v1/chat/completions')
    assert status == 400 and json.loads(body)['error']['code'] == 'context_length_exceeded'
  finally:
    server.end()


@pytest.mark.parametrize(
  'body, headers, status, told',
  [
    (b'{', {}, 400, 'the body is not JSON'),
    ({'prompt': 'ab', 'max_tokens': 60}, {}, 400, 'at most 61 tokens; the prompt has 2, and max_tokens = 60'),
    ({'prompt': [V]}, {}, 400, 'is not in the vocabulary'),
    ({'prompt': 'a', 'stream': True, 'max_tokens': 100}, {}, 400, 'sees at most 61 tokens'),
    ({'prompt': '\ud800 \ud800'}, {}, 400, 'prompt is "\\ud800 \\ud800"; expected text that UTF-8 can hold'),
    ({'prompt': 'a', 'stop': '\ud800'}, {}, 400, 'stop is "\\ud800"; expected text that UTF-8 can hold'),
    ({'prompt': 'a', 'logprobs': 10**1000}, {}, 400, '00...; this server reports up to 3'),
    ({'prompt': 'a', 'model': 'other'}, {}, 404, 'there is no model "other"'),
    ({'prompt': 'a'}, {'content-type': 'text/plain'}, 415, "content-type is 'text/plain'; expected application/json"),
    ({'prompt': 'a' * 2**20}, {}, 413, 'the body has more than 1,048,576 bytes'),
  ],
)
def test_a_request_that_is_not_valid_gets_an_error_of_openai(server, body, headers, status, told):
  found, _, answer = server.post(body, **headers)
  error = json.loads(answer)['error']
  assert found == status and told in error['message'] and error['type'] == 'invalid_request_error'


def test_other_routes(server):
  status, body = server.get('/v1/models')
  assert status == 200 and [model['id'] for model in json.loads(body)['data']] == ['tiny']
  assert server.get('/health') == (200, b'{"status": "ok"}')
  assert b'praxis_lite_requests_open 0\n' in server.get('/metrics')[1]
  for path, expected in (('/v1/nothing', 404), ('/v1/completions', 405)):
    status, body = server.get(path)
    message = json.loads(body)['error']['message']
    assert status == expected and path in message and 'the routes are POST /v1/completions, ' in message
  # A page of another site, whose name leads to this machine.
  status, body = server.get('/health', host='other.example')
  said = json.loads(body)['error']['message']
  assert status == 400 and said == "the host 'other.example' is not one of this server: localhost, 127.0.0.1"
  assert server.is_local and is_loopback('127.0.0.5') and is_loopback('::1') and is_loopback('localhost')
  assert not is_loopback('0.0.0.0') and not is_loopback('example.com')


def wait_until(condition):
  until = time.monotonic() + WAIT_S
  while not condition() and time.monotonic() < until:
    time.sleep(0.02)


def test_clients_that_leave_free_their_places():
  server = Running(ByteTokenizer(), max_length=4000, rows=1, most_waiting=1)
  server.slow_down()
  try:
    long = json.dumps({'prompt': 'a', 'max_tokens': 4000, 'temperature': 0, 'stop': ['never']}).encode()
    for is_stream in (True, False):
      before = server.engine.num_cancelled
      body = long if not is_stream else long[:-1] + b', "stream": true}'
      # A connection that is closed earlier may never become a request.
      wait = functools.partial(wait_until, lambda: server.engine.num_open)
      load_serving.leave_early(server.port, body, is_stream=is_stream, wait=wait)
      wait_until(lambda before=before: server.engine.num_cancelled > before)
      assert server.engine.num_cancelled == before + 1 and not server.engine.num_open
    server.slow_down(stop=True)
    held = [http.client.HTTPConnection('127.0.0.1', server.port, timeout=WAIT_S) for _ in range(2)]
    for connection in held:
      connection.request('POST', '/v1/completions', long, {'content-type': 'application/json'})
    wait_until(lambda: server.engine.num_open == 2)
    status, headers, body = server.post(ASKED)
    assert status == 429 and headers['retry-after'] == '1' and 'all 2 places' in json.loads(body)['error']['message']
    assert json.loads(body)['error']['type'] == 'rate_limit_error'
    for connection in held:
      connection.close()
  finally:
    server.end()


def test_a_request_that_takes_too_long_is_ended():
  server = Running(ByteTokenizer(), max_length=4000, limits={'timeout_s': 0.3})
  server.slow_down(stop=True)
  try:
    long = {'prompt': 'a', 'max_tokens': 4000, 'temperature': 0, 'stop': ['never']}
    status, _, body = server.post(long)
    assert status == 504 and 'took too long' in json.loads(body)['error']['message']
    status, _, body = server.post({**long, 'stream': True})
    assert status == 200 and 'took too long' in body.decode().rpartition('data: ')[2]
    assert load_serving.wait_until_idle(server.port)['requests_cancelled_total'] == 2
  finally:
    server.end()


def test_many_clients_get_what_single_requests_get(server):
  expected = [server.whole(case)['choices'][0]['text'] for case in load_serving.CASES]
  load = load_serving.Load(server.port, expected)
  load.run(64, 2.0)
  assert not load.wrong and all(load.counts[kind] for kind in ('whole', 'stream', 'left', 'malformed', 'garbage'))
  counts = load_serving.wait_until_idle(server.port)
  assert not counts['requests_open'] and not counts['requests_running'] and not counts['requests_waiting']
  assert not server.engine._by_request


def test_a_failing_engine_is_told_and_ends_the_server():
  server = Running(ByteTokenizer())

  def fail():
    raise MemoryError('no memory')

  server.engine.batcher.step = fail
  status, _, body = server.post(ASKED)
  assert status == 503 and 'the engine failed: MemoryError' in json.loads(body)['error']['message']
  server.thread.join(WAIT_S)
  assert isinstance(server.told[0], RuntimeError) and isinstance(server.told[0].__cause__, MemoryError)


def test_idle_connections_keep_nobody_out_and_are_closed(monkeypatch):
  monkeypatch.setattr(server_module, '_OTHER_CONNECTIONS', 4)
  monkeypatch.setattr(server_module, '_HEADERS_S', 1.0)
  running = Running(ByteTokenizer(), rows=1, most_waiting=1)
  try:
    idle = [socket.create_connection(('127.0.0.1', running.port), timeout=WAIT_S) for _ in range(20)]
    idle[-1].sendall(b'GET /health HTTP/1.1\r\nhost: ')
    assert running.get('/health')[0] == 200 and running.whole(ASKED)
    for connection in idle:  # Those that made room, and those whose time is over.
      assert connection.recv(1) == b''
      connection.close()
    status, headers, _ = running.post(b'x' * (2**20 + 1))
    assert status == 413 and headers['connection'] == 'close'
  finally:
    running.end()


def test_more_requests_than_fit_get_an_error_of_openai():
  running = Running(ByteTokenizer(), limits={'most_requests': 0})
  running.end()
  with pytest.raises(EndedError, match='the server has ended'):
    running.engine.submit(Asked('a'), print)
  sent = []

  async def send(message):
    sent.append(message)

  scope = {'type': 'http', 'method': 'GET', 'path': '/health', 'headers': [(b'host', b'a')], 'query_string': b''}
  asyncio.run(make_app(running.engine, Served('x', most_requests=0))(scope, None, send))
  assert sent[0]['status'] == 503 and (b'connection', b'close') in sent[0]['headers']
  assert 'the server is overloaded' in json.loads(sent[1]['body'])['error']['message']


@pytest.mark.parametrize('host', ['a..b', 'x' * 80])
def test_a_host_that_is_no_name_is_told(host):
  with pytest.raises(UserError, match=f'--host={host} --port=0 cannot be used: it is no name of a host'):
    serve(None, Served('x'), host, 0, most_open=1, drain_s=1, on_ready=print)


def test_a_port_in_use_is_named():
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f'--port={port} cannot be used: .*; --port=0 takes a free port'):
      serve(None, Served('x'), '127.0.0.1', port, most_open=1, drain_s=1, on_ready=print)


@pytest.mark.slow
def test_the_command_drains_and_ends_with_code_0(tmp_path):
  run = tmp_path / 'tiny run'
  load_serving.train_small(str(run))
  with load_serving.started(str(run), '--max_length=500', '--rows=2', '--drain=300') as (process, port):
    whole = json.dumps({'prompt': 'def', 'max_tokens': 400, 'temperature': 1, 'seed': 1}).encode()
    answers = []
    client = threading.Thread(target=lambda: answers.append(load_serving.ask(port, whole)))
    client.start()
    while not load_serving.metrics_of(port)['requests_running']:
      time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    client.join(WAIT_S)
    (status, body) = answers[0]
    assert status == 200 and json.loads(body)['model'] == 'tiny run'
    assert process.wait(WAIT_S) == 0
  with load_serving.started(str(run), '--drain=1', '--max_length=20000', '--rows=1') as (process, port):
    load = {'prompt': 'def', 'max_tokens': 19000, 'temperature': 1, 'stream': True}
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=WAIT_S)
    connection.request('POST', '/v1/completions', json.dumps(load).encode(), {'content-type': 'application/json'})
    response = connection.getresponse()
    response.read(10)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert b'the server has ended' in response.read().splitlines()[-2]
    assert process.wait(WAIT_S) == 0 and time.monotonic() - start < 60
    connection.close()
