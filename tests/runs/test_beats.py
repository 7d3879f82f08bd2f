"""Who reads whose beats: what each process reads does not grow with their number, and every loss is noticed."""

from __future__ import annotations

import pytest

from praxis_lite.runs.cluster.beats import GROUP, Beats, beat_interval


class Store:
  """The key-value store of JAX's service; counts what is asked of it, and the bytes that it sends."""

  def __init__(self):
    self.values, self.folders, self.requests, self.sent = {}, {}, 0, 0

  def key_value_set(self, key, value, allow_overwrite=False):
    self.requests += 1
    if key in self.values and not allow_overwrite:
      raise RuntimeError('ALREADY_EXISTS')
    self.values[key] = self.folders.setdefault(key.rpartition('/')[0], {})[key] = value

  def key_value_dir_get(self, key):
    self.requests += 1
    found = list(self.folders.get(key, {}).items())
    self.sent += sum(len(value) for _, value in found)
    return found

  def key_value_try_get(self, key):
    self.requests += 1
    self.sent += len(self.values.get(key, ''))
    return self.values[key]


def round_of(beats, number=1, idle=lambda i: 0.0, alive=lambda i: True):
  said = lambda i: {'beat': number, 'doing': 'step 12', 'at': 'x.py:3 f', 'idle': idle(i), 'state': '', 'ending': False}  # noqa: E731
  return {i: each.exchange(said(i), idle(i)) for i, each in enumerate(beats) if alive(i)}


@pytest.mark.parametrize('processes', [2, GROUP, GROUP + 1, 100, 257])
def test_every_process_is_watched_by_others_also_if_its_whole_group_is_lost(processes):
  beats = [Beats(Store(), i, processes) for i in range(processes)]
  watchers = {i: {j for j in range(processes) if i in beats[j].watched and i != j} for i in range(processes)}
  assert all(watchers.values()) and max(len(each.watched) for each in beats) <= GROUP + 1
  groups = -(-processes // GROUP)
  for group in range(groups if groups > 1 else 0):
    members = set(range(group, processes, groups))
    assert len(members) <= GROUP
    assert set().union(*(watchers[i] for i in members)) - members
  for first in range(0, processes - 9, 8):  # Eight that are lost together are noticed by others.
    assert all(watchers[i] - set(range(first, first + 8)) for i in range(first, first + 8))


def test_all_beats_are_heard_in_one_group_and_a_bounded_number_in_many():
  store = Store()
  beats = [Beats(store, i, 8) for i in range(8)]
  round_of(beats)
  assert all(sorted(heard) == list(range(8)) for heard in round_of(beats, 2).values())
  assert beats[0].verdict() == '' and store.requests == 32
  costs = {}
  for processes in (256, 1024):
    store = Store()
    beats = [Beats(store, i, processes) for i in range(processes)]
    round_of(beats)
    store.requests = store.sent = 0
    heard = round_of(beats, 2)
    assert all(sorted(heard[i]) == beats[i].watched for i in range(processes))
    costs[processes] = store.requests / processes, store.sent / processes
  assert costs[256][0] == costs[1024][0] == 4
  assert costs[1024][1] == pytest.approx(costs[256][1], rel=0.02)


def test_a_verdict_reaches_all_groups_and_the_first_one_stays():
  store = Store()
  beats = [Beats(store, i, 100) for i in range(100)]
  beats[5].tell('host 6 is lost')
  beats[99].tell('another')
  assert {each.verdict() for each in beats} == {'host 6 is lost'}


def test_progress_of_one_process_is_known_to_all_soon_and_hangs_are_known_too(monkeypatch):
  now = [1000.0]
  monkeypatch.setattr('praxis_lite.runs.cluster.beats.time.monotonic', lambda: now[0])
  store, processes = Store(), 128
  beats = [Beats(store, i, processes) for i in range(processes)]
  busy = True
  for second in range(1, 41):
    now[0] += 1
    round_of(beats, second, lambda i, busy=busy, second=second: 0.0 if i == 100 and busy else float(second))
    busy = second < 20
    if second == 20:
      assert max(each.idle_anywhere for each in beats) <= 12
  assert min(each.idle_anywhere for each in beats) >= 18


def test_the_interval_bounds_the_requests_for_a_second():
  assert [beat_interval(n, 300) for n in (2, 1000, 10_000)] == [1.0, 1.0, 10.0]
  assert beat_interval(10_000, 30) == 6.0 and beat_interval(2, 1) == 0.2
