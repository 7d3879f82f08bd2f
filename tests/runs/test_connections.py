"""The connections of the rendezvous: what their end means, and what it does not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from praxis_lite.runs.cluster import watchdog
from praxis_lite.runs.cluster.connections import Connections
from praxis_lite.runs.cluster.watchdog import Watchdog


@pytest.fixture
def pair():
  """Host 0's connections to 1 and 2, and those of these two."""
  sockets = [socket.socketpair() for _ in range(2)]
  first = Connections({1: sockets[0][0], 2: sockets[1][0]})
  yield first, [Connections({0: theirs}) for _, theirs in sockets]
  for ours, theirs in sockets:
    ours.close()
    theirs.close()


def listen_until(is_there, *connections):
  end = time.monotonic() + 5
  while not is_there() and time.monotonic() < end:
    for each in connections:
      each.listen(0.01)
  assert is_there()


def test_an_end_without_a_word_is_noted_and_an_end_with_one_is_not(pair):
  first, (second, third) = pair
  second.leave()
  second._open[0].close()
  third._open[0].close()
  listen_until(lambda: len(first) == 0, first)
  assert list(first.closed) == [2] and first.verdict == ''
  assert not first.tell('nobody hears it')
  first.listen(0.0)  # Without connections it only waits.


def test_a_verdict_arrives_and_the_first_one_stays(pair):
  first, (second, third) = pair
  assert second.tell('host 7 is lost\x1b[2J') and third.tell('another')
  listen_until(lambda: first.verdict, first)
  first.listen(0.01)
  assert first.verdict in (r'host 7 is lost\x1b[2J', 'another')
  assert first.tell('host 7 is lost')
  listen_until(lambda: second.verdict and third.verdict, second, third)
  assert second.verdict == third.verdict == 'host 7 is lost'


@pytest.mark.parametrize(
  'said', [b'SSH-2.0\n', b'[1]\n', b'{"left": 0}\n', b'\xff\n\n', b'x' * 70000, b'{"verdict": "cut']
)
def test_strangers_say_nothing(said):
  ours, theirs = socket.socketpair()
  first = Connections({1: ours})
  threading.Thread(target=theirs.sendall, args=(said,), daemon=True).start()
  for _ in range(5):
    first.listen(0.01)
  assert first.verdict == ''
  theirs.close()
  listen_until(lambda: list(first.closed) == [1], first)
  ours.close()


def test_a_forked_child_does_not_keep_a_connection_open(pair):
  first, (second, _) = pair
  read, write = os.pipe()
  child = os.fork()
  if child == 0:
    os.read(read, 1)
    os._exit(0)
  second._open[0].close()
  listen_until(lambda: list(first.closed) == [1], first)
  os.write(write, b'x')
  os.waitpid(child, 0)


class Store:
  """JAX's key-value store, without JAX."""

  def __init__(self):
    self.texts = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    self.texts[key] = value

  def key_value_dir_get(self, key):
    return [each for each in self.texts.items() if each[0].startswith(f'{key}/')]

  def key_value_try_get(self, key):
    return self.texts[key]


@contextlib.contextmanager
def watching(monkeypatch, sockets, lost):
  """The watchdogs of hosts 0 and 1 in one process; `lost` gets the reason for which either gives up."""
  monkeypatch.setattr(watchdog.atexit, 'register', lambda leave: None)
  monkeypatch.setattr(Watchdog, '_end_well_when_jax_aborts', lambda self: None)
  monkeypatch.setattr(Watchdog, 'give_up', lambda self, reason, needs_stacks=True: lost.append(reason))
  store, names = Store(), ['a', 'b']
  dogs = [Watchdog(store, names, Connections({1 - i: sockets[i]}), i, 2.0) for i in range(2)]
  try:
    yield dogs
  finally:
    for dog in dogs:
      dog._is_over.set()
    for thread in (thread for dog in dogs for thread in dog._threads):
      thread.join()


def test_a_host_whose_connection_alone_was_lost_is_not_taken_for_lost(monkeypatch):
  """A firewall may end connections that have been idle. Then a host has as long as any other to send a beat."""
  sockets, lost = socket.socketpair(), []
  with watching(monkeypatch, sockets, lost) as (first, second):
    time.sleep(0.5)
    sockets[0].shutdown(socket.SHUT_RDWR)
    end = time.monotonic() + 5
    while not (first._hosts[1].beat >= 8 and second._hosts[0].beat >= 8) and time.monotonic() < end:
      time.sleep(0.05)
    assert not lost and not first._connections.closed
    # What is silent for a while after that is no loss either.
    second._beats.exchange = lambda beat, idle: {}
    second._contact = time.monotonic() + 100
    time.sleep(0.8)
    assert not lost


def test_a_host_that_is_silent_after_its_connection_was_closed_is_lost(monkeypatch):
  sockets, lost = socket.socketpair(), []
  with watching(monkeypatch, sockets, lost) as (_, second):
    time.sleep(0.5)
    second._beats.exchange = lambda beat, idle: {}  # As if it were killed.
    began = time.monotonic()
    sockets[1].shutdown(socket.SHUT_RDWR)
    while not any('host 1 (b)' in why for why in lost) and time.monotonic() < began + 5:
      time.sleep(0.02)
    assert 0.4 <= time.monotonic() - began < 1.5  # The timeout is 2 s.
    assert all('its connection is closed' in why for why in lost)


def test_a_connection_that_is_closed_during_a_beat_does_not_cut_the_beat_short(monkeypatch):
  """Host 0 reads the beats of hosts in other groups, too, while their connections are closed."""
  sockets, lost, read = socket.socketpair(), [], []
  monkeypatch.setattr(Watchdog, '_lost_connection', lambda self, now: '')
  with watching(monkeypatch, sockets, lost) as (first, _):
    closed = first._connections.closed

    def beat_of(index):
      read.append(index)
      closed[index + 1] = 0.0
      return {}

    first._beats.beat_of, first._watched = beat_of, {0: first._hosts[0]}
    closed[7] = 0.0
    first._client.key_value_set(watchdog.PREEMPTION_KEY, 'host 1')
    end = time.monotonic() + 5
    while not (read and first.preempted_since) and time.monotonic() < end:
      time.sleep(0.01)
    assert read and first.preempted_since is not None
