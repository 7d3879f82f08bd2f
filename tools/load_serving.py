"""Puts a load on `praxis-lite serve`: many clients; some leave early or send invalid requests.

    python tools/load_serving.py --clients=64 --seconds=300

starts a server of a small model, and compares each complete answer with the answer to the same request without load. It
prints counts, and over time the server's memory, threads and open files. It fails if an answer differs, if a request
remains in the server, or if the server's memory grows.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

WAIT_S = 300.0

# Requests whose answers are known before the load begins.
CASES: tuple[dict[str, Any], ...] = (
  {'prompt': 'def main(', 'max_tokens': 24, 'temperature': 0},
  {'prompt': 'class ', 'max_tokens': 16, 'temperature': 1.0, 'seed': 5},
  {'prompt': 'class ', 'max_tokens': 30, 'temperature': 1.3, 'seed': 6, 'top_p': 0.7},
  {'prompt': 'import os' * 4, 'max_tokens': 8, 'temperature': 0.8, 'seed': 7, 'stop': ['e', 'qq']},
  {'prompt': [97, 98, 99], 'max_tokens': 12, 'temperature': 0.9, 'seed': 2, 'logprobs': 1},
)
MALFORMED: tuple[bytes, ...] = (
  b'{',
  b'[]',
  b'{"prompt": 3}',
  b'{"prompt": "a", "max_tokens": -1}',
  b'{"prompt": "a", "unknown": 1}',
  b'{"prompt": "a", "model": "other"}',
  b'{"prompt": "' + b'a' * 5000 + b'"}',
  b'\xff\xfe',
)


def ask(port: int, body: bytes, path: str = '/v1/completions', kind: str = 'application/json') -> tuple[int, bytes]:
  """Returns the status and the body of the answer to a request."""
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=WAIT_S)
  with contextlib.closing(connection):
    connection.request('POST', path, body, {'content-type': kind})
    response = connection.getresponse()
    return response.status, response.read()


def events_of(body: bytes) -> list[Any]:
  """Returns the parsed events of a stream, without the last one, which says that it has ended."""
  events = [line.removeprefix('data: ') for line in body.decode().split('\n\n') if line]
  assert events.pop() == '[DONE]', body
  return [json.loads(event) for event in events]


def text_of(answer: bytes, is_stream: bool) -> str:
  """Returns the text of an answer to a completion."""
  parts = events_of(answer) if is_stream else [json.loads(answer)]
  return ''.join(part['choices'][0]['text'] for part in parts)


def leave_early(port: int, body: bytes, *, is_stream: bool, wait: Callable[[], object] = lambda: None) -> None:
  """Sends a request and closes the connection, after the first bytes of a stream; before it closes it, calls `wait`."""
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=WAIT_S)
  with contextlib.closing(connection):
    connection.request('POST', '/v1/completions', body, {'content-type': 'application/json'})
    if is_stream:
      connection.getresponse().read(10)
    wait()


class Load:
  """Clients that send requests until a time.

  Attributes:
    counts: how many requests there were, by kind.
    wrong: what was not as expected.
  """

  def __init__(self, port: int, expected: list[str]):
    self._port, self._expected = port, expected
    self.counts, self.wrong = collections.Counter[str](), list[str]()
    self._lock = threading.Lock()

  def run(self, clients: int, seconds: float) -> None:
    """Runs this many clients at once."""
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=self._run_client, args=(number, until)) for number in range(clients)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(seconds + WAIT_S)
      if thread.is_alive():
        self.wrong.append('a client did not end')

  def _run_client(self, number: int, until: float) -> None:
    drawn = random.Random(number)
    while time.monotonic() < until:
      kind = drawn.choices(['whole', 'stream', 'left', 'malformed', 'garbage'], [4, 4, 2, 2, 1])[0]
      try:
        told = self._send(kind, drawn)
      except Exception as error:
        told = f'{kind}: {error!r}'
      with self._lock:
        self.counts[kind if told in (None, 'busy') else 'wrong'] += 1
        self.counts['busy'] += told == 'busy'
        if told not in (None, 'busy'):
          self.wrong.append(str(told))
      if told == 'busy':
        time.sleep(drawn.uniform(0.05, 0.3))

  def _send(self, kind: str, drawn: random.Random) -> str | None:
    """Sends a request; returns 'busy', or what was wrong."""
    number = drawn.randrange(len(CASES))
    is_stream = kind == 'stream' or (kind == 'left' and drawn.random() < 0.7)
    body = json.dumps({**CASES[number], 'stream': is_stream}).encode()
    if kind == 'left':
      leave_early(self._port, body, is_stream=is_stream)
      return None
    if kind == 'malformed':
      status, answer = ask(self._port, drawn.choice(MALFORMED))
      is_told = status == 429 or (400 <= status < 500 and 'message' in json.loads(answer)['error'])
      return None if is_told else f'{kind}: {status} {answer[:200]!r}'
    if kind == 'garbage':
      with socket.create_connection(('127.0.0.1', self._port), timeout=WAIT_S) as opened:
        opened.sendall(drawn.choice([b'\0\1\2\r\n\r\n', b'POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nab', b'']))
      return None
    status, answer = ask(self._port, body)
    if status == 429:
      return 'busy'
    if status != 200:
      return f'{kind}: {status} {answer[:200]!r}'
    text = text_of(answer, is_stream)
    return (
      None if text == self._expected[number] else f'{kind}: case {number}: {text!r}, not {self._expected[number]!r}'
    )


def metrics_of(port: int) -> dict[str, float]:
  """Returns the counts of a server by name."""
  connection = http.client.HTTPConnection('127.0.0.1', port, timeout=WAIT_S)
  with contextlib.closing(connection):
    connection.request('GET', '/metrics')
    lines = connection.getresponse().read().decode().splitlines()
  return {name.removeprefix('praxis_lite_'): float(count) for name, count in (line.split() for line in lines)}


def wait_until_idle(port: int) -> dict[str, float]:
  """Waits until no request is in a server; returns its counts."""
  until = time.monotonic() + WAIT_S
  while (counts := metrics_of(port))['requests_open'] and time.monotonic() < until:
    time.sleep(0.1)
  return counts


def usage_of(pid: int) -> dict[str, int]:
  """Returns the resident MiB, threads and open files of a process."""
  status = pathlib.Path(f'/proc/{pid}/status').read_text()
  found = {name: int(number) for name, number in re.findall(r'^(VmRSS|Threads):\s+(\d+)', status, re.MULTILINE)}
  return {'mib': found['VmRSS'] // 1024, 'threads': found['Threads'], 'files': len(os.listdir(f'/proc/{pid}/fd'))}


@contextlib.contextmanager
def started(run: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
  """Starts a server of a run; yields its process and its port, and ends it."""
  command = [sys.executable, '-m', 'praxis_lite', 'serve', f'--job_log_dir={run}', '--port=0', *flags]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    assert process.stdout is not None
    line = process.stdout.readline()
    port = re.search(r':(\d+)/v1', line)
    assert port, line
    yield process, int(port.group(1))
  finally:
    if process.poll() is None:
      process.kill()
    process.wait()


def train_small(run: str) -> None:
  """Trains a model of 13,000 parameters that sees texts of any length."""
  train = [sys.executable, '-m', 'praxis_lite', 'train', '--exp=lm.StdlibLmTiny', f'--job_log_dir={run}']
  changes = ('task.train.num_train_steps=1', 'task.model.decoder_tpl.max_context=None')
  flags = [argument for change in changes for argument in ('--set', change)]
  subprocess.run([*train, *flags], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--clients', type=int, default=64)
  parser.add_argument('--seconds', type=float, default=300)
  parser.add_argument('--run', default='', help='directory of a run; by default a small one is trained')
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    run = options.run or f'{folder}/run'
    if not options.run:
      train_small(run)
    with started(run, '--rows=8', '--max_waiting=40', '--max_length=128') as (process, port):
      expected = [text_of(ask(port, json.dumps(case).encode())[1], False) for case in CASES]
      load = Load(port, expected)
      load.run(options.clients, min(20.0, options.seconds / 4))
      wait_until_idle(port)
      before, start = usage_of(process.pid), time.monotonic()
      print(f'after {sum(load.counts.values())} requests: {before}', flush=True)
      load.run(options.clients, options.seconds)
      seconds = time.monotonic() - start
      counts, after = wait_until_idle(port), usage_of(process.pid)
      print(f'after {sum(load.counts.values())} requests: {after}; {seconds:.0f} s, {dict(load.counts)}')
      print({name: int(count) for name, count in counts.items()})
      process.send_signal(signal.SIGTERM)
      code = process.wait(WAIT_S)
    wrong = load.wrong + [f'a request is left: {counts}'] * bool(counts['requests_open'])
    wrong += [f'the server grew: {before} to {after}'] * (after['mib'] > before['mib'] * 1.1 + 50)
    wrong += [f'files or threads are left: {before} to {after}'] * (after['files'] > before['files'] + 5)
    wrong += [f'it ended with code {code}'] * (code != 0)
    print('\n'.join(wrong[:20]) or f'all answers equal those of single requests; ended with code {code}')
    return int(bool(wrong))


if __name__ == '__main__':
  sys.exit(main())
