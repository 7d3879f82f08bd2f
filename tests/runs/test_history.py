"""The history of a run: its attempts, what `status` says of them, and the page over its life."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
from browser import needs_chromium, use_page
from tiny_runs import tiny_run

from praxis_lite.cli.status_page import status_data, write_status_page
from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.host_speeds import DeviceProbe, HostSpeeds
from praxis_lite.runs.records.goodput import Goodput, seconds_of
from praxis_lite.runs.records.heartbeat import Heartbeat, read_heartbeats
from praxis_lite.runs.records.history import HISTORY, attempts_of, note_event, read_history, started_event
from praxis_lite.runs.records.status import status_of

HOUR = 3600.0


def beat_of(**fields):
  return Heartbeat(host='n1', pid=os.getpid(), **fields)


@pytest.fixture
def month(tmp_path, monkeypatch):
  """The history of a run with three attempts: one that a host ended, one that failed, and one that trains."""
  clock = [1.7e9]
  monkeypatch.setattr('praxis_lite.runs.records.history.time.time', lambda: clock[0])

  def note(hours, *event):
    clock[0] = 1.7e9 + hours * HOUR
    note_event(tmp_path, *event)

  note(0, 'started', 0, '', started_event(0, 4, None))
  for step in (100, 200):
    note(step / 100, 'saved', step)
  note(2.5, 'lost', None, 'host 3 (n3), has shown no sign of life for 60 s')
  spent = {'seconds': {'productive': 2.4 * HOUR, 'starting': 0.1 * HOUR}}
  first = beat_of(time=1.7e9 + 2.5 * HOUR, step=250, goodput=spent)
  note(3, 'started', 200, '', started_event(200, 4, first))
  note(3.5, 'save_failed', 260, 'saving failed: No space left on device')
  note(3.6, 'ended', 270, 'ValueError: no')
  spent = {'seconds': {'productive': 2.4 * HOUR, 'starting': 0.2 * HOUR, 'lost': 0.5 * HOUR}}
  second = beat_of(time=1.7e9 + 3.6 * HOUR, step=270, goodput=spent, ended='ValueError: no')
  note(4, 'started', 200, '', started_event(200, 3, second))
  note(4.5, 'slow_host', 250, 'process 1 is slow', {'process': 1})
  spent = {'seconds': {'productive': 2.4 * HOUR, 'starting': 0.3 * HOUR, 'lost': 1.0 * HOUR}}
  last = beat_of(time=1.7e9 + 5 * HOUR, step=300, total_steps=1000, processes=3, goodput=spent)
  return tmp_path, last


def test_attempts_know_how_they_ended_and_what_their_time_went_to(month):
  directory, last = month
  first, second, third = attempts_of(read_history(directory), last)
  assert (first.first_step, first.last_step, first.how, first.processes) == (0, 250, 'killed', 4)
  assert first.ended - first.began == 2.5 * HOUR and first.seconds['starting'] == pytest.approx(0.1 * HOUR)
  assert (second.first_step, second.last_step, second.how) == (200, 270, 'ValueError: no')
  assert second.seconds['productive'] == pytest.approx(0.5 * HOUR)  # Time that a restart then counts as lost.
  assert (third.first_step, third.last_step, third.how, third.processes) == (200, 300, '', 3)
  assert third.ended - third.began == HOUR and third.seconds['lost'] == 0
  total = sum(sum(attempt.seconds.values()) for attempt in (first, second, third))
  assert total == pytest.approx(sum(seconds_of(last.goodput).values()))


def test_a_run_whose_process_has_disappeared_does_not_go_on(month):
  directory, last = month
  for life, how in [('alive', ''), ('silent', ''), ('dead', 'killed')]:
    status = status_of([last], is_held=True, now=last.time)._replace(life=life)
    assert status_data(str(directory), [last], status)['attempts'][-1]['how'] == how
  assert attempts_of(read_history(directory), dataclasses.replace(last, ended='done'))[-1].how == 'done'


def test_a_start_that_fails_before_it_trains_does_not_change_the_attempt_before(tmp_path, monkeypatch):
  """Killed after an hour; a start that fails four hours later repeats the step of the heartbeat."""
  clock = [1e9]
  monkeypatch.setattr('praxis_lite.runs.records.history.time.time', lambda: clock[0])
  note_event(tmp_path, 'started', 0, '', started_event(0, 1, None))
  clock[0] += HOUR
  note_event(tmp_path, 'saved', 100)
  failed = beat_of(time=1e9 + 5 * HOUR, started=1e9 + 5 * HOUR - 9, step=110, ended='UserError: no data')
  attempts = attempts_of(read_history(tmp_path), failed, is_alive=False)
  clock[0] += 5 * HOUR
  note_event(tmp_path, 'started', 100, '', started_event(100, 1, failed))
  for attempt in (*attempts, attempts_of(read_history(tmp_path), None)[0]):
    assert (attempt.ended - attempt.began, attempt.last_step, attempt.how) == (HOUR, 110, 'killed')


def test_a_torn_line_does_not_swallow_the_next_and_a_long_history_loses_its_older_half(tmp_path, monkeypatch):
  note_event(tmp_path, 'saved', 1)
  with (tmp_path / HISTORY).open('a') as file:
    file.write('{"time": 17642')  # The disk was full.
  for step in (2, 3):
    note_event(tmp_path, 'saved', step)
  assert [event.step for event in read_history(tmp_path)] == [1, 2, 3]
  monkeypatch.setattr('praxis_lite.runs.records.history._MOST_BYTES', 20_000)
  for step in range(4, 1000):
    note_event(tmp_path, 'saved', step)
  steps = [event.step for event in read_history(tmp_path)]
  assert steps == list(range(steps[0], 1000)) and 90 < len(steps) < 300
  assert (tmp_path / HISTORY).stat().st_size < 20_100


def test_what_is_damaged_or_forged_is_left_out_and_nothing_is_created_elsewhere(month, tmp_path):
  directory, last = month
  whole = read_history(directory)
  lines = ['{', '[]', '{"time": 1e999, "kind": "saved", "step": 1, "text": "", "about": {}}', 'null', '\x00\xff']
  lines += ['{"time": 1, "kind": "saved", "step": "x", "text": "", "about": {}}', '{"time": 1, "kind": [], "step": 1}']
  forged = {'processes': 'x', 'before': {'time': {}, 'step': 'x', 'ended': 3, 'seconds': []}}
  lines += [json.dumps({'time': 1e9, 'kind': 'started', 'step': 0, 'text': '\x1b[2J', 'about': forged})]
  (directory / HISTORY).write_text('\n'.join(lines) + '\n' + (directory / HISTORY).read_text())
  events = read_history(directory)
  assert events[1:] == whole and '\x1b' not in events[0].text
  assert len(attempts_of(events, last)) == 4
  assert attempts_of([], None) == [] and read_history(tmp_path / 'none') == []
  note_event(tmp_path / 'none', 'saved', 1)
  assert not (tmp_path / 'none').exists()


@pytest.mark.slow
def test_a_run_writes_its_starts_saves_and_ends(tmp_path):
  with pytest.raises(RuntimeError):
    run_train(tiny_run(save_interval_steps=2), tmp_path, hooks=[Fails(5)])
  run_train(tiny_run(save_interval_steps=2, num_train_steps=8), tmp_path)
  events = read_history(tmp_path)
  assert [event.step for event in events if event.kind == 'saved'][-2:] == [6, 8]
  first, second = attempts_of(events, read_heartbeats(tmp_path)[0])
  assert (first.first_step, first.last_step, first.how) == (0, 5, 'RuntimeError: a hook')
  assert (second.first_step, second.last_step, second.how) == (5, 8, 'done')
  assert 0 < sum(second.seconds.values()) < 2 * (second.ended - first.began) + 30


class Fails(Hook):
  def __init__(self, step):
    self._step = step

  def on_step(self, run, metrics):
    if run.step == self._step:
      raise RuntimeError('a hook')


def test_hosts_are_compared_and_one_that_stays_slow_is_named():
  speeds = HostSpeeds.__new__(HostSpeeds)
  speeds._in_a_row = (-1, 0)
  rows = [[1.0, 1.1, 1.0, 1.2]] + [[1.0, 1.1, 2.2, 1.0]] * 2 + [[1.0, 2.5, 1.0, 1.0]] + [[1.0, 1.1, 2.2, 1.0]] * 4
  found = [speeds._judge([product / 1000 for product in row]) for row in rows]
  lines = [line for _, line in found]
  assert [bool(line) for line in lines] == [False] * 6 + [True, False]
  assert lines[6].startswith('process 2 is slow: ') and lines[6].endswith('now 2.2 ms, 2.2 x the median of the others')
  assert found[0][0] == (3, pytest.approx(1.2))
  speeds._in_a_row = (-1, 0)
  of_two = [speeds._judge([0.001, 0.0019]) for _ in range(3)]
  assert of_two[-1][1].startswith('process 1 is slow') and of_two[-1][0] == (1, pytest.approx(1.9))
  assert 0 < DeviceProbe().seconds() < 5


def test_status_says_how_hosts_differ_and_shows_few_lines_of_many():
  speed = lambda product, waited=0.0: {'median': 1.2, 'p90': 1.3, 'product': product, 'waited': waited}  # noqa: E731
  now = 1000.0
  beats = [
    beat_of(process=i, processes=4, time=now, speed=speed(0.001 * (1 + (i == 2)), 0.3 * (i == 1))) for i in range(4)
  ]
  lines = status_of(beats, is_held=True, now=now).lines
  (line,) = [line for line in lines if line.startswith('steps take')]
  assert line == (
    'steps take 1.2 s to 1.2 s by process (medians of recent steps); slowest devices: process 2 on n1, 2.00 x the '
    'median of the others for a test product; longest waits for input: process 1 on n1, 30% of a step'
  )
  forged = [dataclasses.replace(beat, speed={'median': 'x', 'product': -1}) for beat in beats]
  assert not [line for line in status_of(forged, is_held=True, now=now).lines if 'steps take' in line]
  assert not [line for line in lines if line.startswith('slowest link')]
  sent = [10e6, 11e6, 2e6, 12e6]
  for beat, rate in zip(beats, sent):
    beat.speed.update(sent_rate=rate, sent_to=(beat.process + 1) % 4)
  assert (
    'slowest link: process 2 on n1 sends 1.907 MiB/s to process 3 on n1, 0.18 x the median of the others'
    in status_of(beats, is_held=True, now=now).lines
  )
  forged = [dataclasses.replace(beat, speed={**beat.speed, 'sent_rate': 'x', 'sent_to': []}) for beat in beats]
  assert not [line for line in status_of(forged, is_held=True, now=now).lines if line.startswith('slowest link')]
  many = [beat_of(process=i, processes=2000, time=now) for i in range(2000)]
  many[1500] = Heartbeat(host='gone', process=1500, processes=2000, time=now - 300)
  status = status_of(many, is_held=False, now=now)
  assert not status.is_well and len(status.lines) < 25
  assert any(line.startswith('process 1500: dead') for line in status.lines[:20])
  assert 'all other processes: 1,983 alive' in status.lines


def test_earlier_heartbeats_without_speeds_are_read(tmp_path):
  (tmp_path / 'heartbeats').mkdir()
  data = dataclasses.asdict(beat_of(step=3, goodput=Goodput().record(3)))
  del data['speed']
  (tmp_path / 'heartbeats' / '0.json').write_text(json.dumps(data))
  assert read_heartbeats(tmp_path)[0].step == 3


def test_the_page_has_what_the_history_has(month, tmp_path):
  directory, last = month
  data = status_data(str(directory), [last], status_of([last], is_held=True, now=last.time))
  assert [attempt['last'] for attempt in data['attempts']] == [250, 270, 300]
  assert data['between'] == pytest.approx(0.9 * HOUR) and data['goodput'] == pytest.approx(2.4 / 3.7)
  assert {event['kind'] for event in data['events']} >= {'lost', 'save failed', 'slow host'}
  bare = status_data(str(tmp_path / 'none'), [Heartbeat()], status_of([Heartbeat()], is_held=False))
  assert bare['attempts'] == [] and bare['events'] == []


@needs_chromium
@pytest.mark.parametrize('width', [1400, 500, 400])
def test_the_page_is_drawn_and_fits(month, tmp_path, width):
  directory, last = month
  rng = np.random.default_rng(0)
  beats = [
    dataclasses.replace(last, process=i, host=f'n{i}', speed={'median': 1.2, 'p90': 1.4, 'product': p, 'waited': 0.01})
    for i, p in enumerate([0.0052, *rng.uniform(0.0011, 0.0013, 5)])
  ]
  page = write_status_page(str(tmp_path / 'p.html'), str(directory), beats, status_of(beats, is_held=True)).read_text()
  session = """
  say(document.querySelectorAll('#chart .path').length, document.querySelectorAll('#attempts .row').length);
  say(document.querySelectorAll('#hosts .row').length, document.querySelectorAll('#events .row').length);
  say(document.documentElement.scrollWidth <= innerWidth, document.querySelectorAll('#chart .mark').length);
  """
  session += """
  say([...document.querySelectorAll('#attempts .steps')].every((each) => each.getBoundingClientRect().height < 30));
  """
  assert use_page(page, session, tmp_path, width) == ['3', '3', '6', '7', 'true', '5', 'true']
