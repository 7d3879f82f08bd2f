"""What a run says of itself while it trains: goodput over restarts, heartbeats and `status`, slow steps, traces."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import threading
import time

import pytest
from tiny_runs import open_gate, tiny_run

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.cli.main import main
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, ShardingError
from praxis_lite.common.figures import duration
from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.profiling import STEPS_OF_A_SIGNAL
from praxis_lite.runs.records.goodput import Goodput, SlowSteps, goodput_line, seconds_of
from praxis_lite.runs.records.heartbeat import Heartbeat, life, read_heartbeats
from praxis_lite.runs.records.status import status_of


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_all_time_belongs_to_one_activity_and_steps_taken_again_are_lost():
  clock = Clock()
  goodput = Goodput(clock)
  clock.now = 2.0  # starting
  with goodput.doing('compiling'):
    clock.now = 5.0
  goodput.train()
  clock.now = 15.0
  goodput.mark(10)
  with goodput.doing('saving'):
    clock.now = 16.0
    with goodput.doing('waiting'):
      clock.now = 16.5
  clock.now = 20.0
  record = json.loads(json.dumps(goodput.record(14)))
  seconds = goodput.seconds()
  assert sum(seconds.values()) == 20 and seconds == seconds_of(record)
  assert {n: s for n, s in seconds.items() if s} == {
    'starting': 2.0, 'compiling': 3.0, 'productive': 13.5, 'saving': 1.0, 'waiting': 0.5
  }  # fmt: skip

  again = Goodput(clock)  # From step 10: 3.5 s of steps are taken again.
  again.resume(record, 10)
  assert again.seconds() == {**seconds, 'productive': 10.0, 'lost': 3.5}
  at_end = Goodput(clock)
  at_end.resume(record, 14)
  assert at_end.seconds() == seconds
  anew = Goodput(clock)
  anew.resume(record, 0)
  assert anew.seconds()['lost'] == 13.5
  assert goodput_line(again.seconds()).startswith('20 s in all: training 50%, lost to restarts 18%, compiling 15%')
  assert goodput_line(again.seconds(), is_resumed=True).startswith('20 s in all launches: training 50%')
  for damage in ({}, {'seconds': [1]}, {'seconds': {'productive': 'x', 'lost': -1}, 'marks': {'x': 1}, 'step': None}):
    damaged = Goodput(clock)
    damaged.resume(damage, 3)
    assert not any(damaged.seconds().values())


def test_durations():
  texts = {0: '0.0 s', 3.21: '3.2 s', 119: '119 s', 120: '2 min', 9000: '2.5 h', 1e6: '11.6 d'}
  assert {seconds: duration(seconds) for seconds in texts} == texts


def test_a_slow_step_is_named_with_what_it_waited_for():
  slow = SlowSteps(5.0)
  assert [slow.add(step, 0.2, 0.0) for step in range(1, 20)] == [None] * 19
  assert slow.add(20, 2.0, 1.9) == 'step 20 took 2.0 s, 10 x the median: 1.9 s of it waiting for input'
  assert slow.add(21, 3.0, 0.0) == 'step 21 took 3.0 s, 15 x the median: computing, not waiting for input'
  assert slow.add(22, 0.9, 0.0) is None and slow.count == 2
  assert SlowSteps(None).add(1, 100.0, 0.0) is None


def test_who_lives():
  own = {'pid': os.getpid(), 'host': socket.gethostname()}
  beat = Heartbeat(**own, time=1000.0, step=3, total_steps=20)
  gone = dataclasses.replace(beat, pid=2**22 + 1)
  elsewhere = dataclasses.replace(beat, host='another')
  assert life(beat, is_held=True, now=1003) == 'alive'
  assert life(beat, is_held=True, now=900) == 'alive'  # The clock was set back.
  assert life(beat, is_held=True, now=2000) == 'silent'
  assert life(gone, is_held=False, now=1003) == 'dead'
  assert life(elsewhere, is_held=False, now=1003) == 'alive'
  assert life(elsewhere, is_held=False, now=2000) == 'dead'
  short, long = (dataclasses.replace(beat, doing='productive', doing_for=x) for x in (0.0, 5.0))
  lines = status_of([gone], is_held=False, now=1003, newest=16).lines  # Saved after the last heartbeat.
  assert lines[1:3] == ['step 16 of 20, or later', 'last save: step 16, after the last sign of life']
  told = [status_of([each], is_held=True, now=1003).lines[0] for each in (short, long)]
  assert ', training (' in told[0] and ', training for 5' in told[1]
  done = dataclasses.replace(beat, ended='done')
  assert status_of([done], is_held=False).is_well
  failed = status_of([dataclasses.replace(beat, ended='DataError: no file')], is_held=False)
  assert not failed.is_well and failed.lines[0].startswith('ended (DataError: no file)')
  two = dataclasses.replace(elsewhere, processes=2)
  half = status_of([two], is_held=False, now=1003)
  assert not half.is_well and '1 of 2 processes never gave a sign of life' in half.lines


@pytest.mark.slow
@pytest.mark.usefixtures('shared_programs')
def test_a_watched_run(tmp_path, capfd):
  gate, directory = tmp_path / 'gate', tmp_path / 'run'
  status: list[tuple[int, str]] = []

  def look_and_open():
    deadline = time.time() + 5
    while time.time() < deadline and not (beats := read_heartbeats(directory)):
      time.sleep(0.05)
    status.append((main(['status', str(directory)]), beats[0].host))
    open_gate(gate)

  class Look(Hook):
    def on_step(self, run, metrics):
      if run.step == 2:
        os.kill(os.getpid(), signal.SIGUSR1)
      if run.step == 12:
        threading.Timer(1.0, look_and_open).start()

  run_train(tiny_run(1, gate=open_gate(gate, 14)), directory, hooks=[Look()])
  out = capfd.readouterr().out
  assert status == [(0, socket.gethostname())]
  assert f'{directory}: alive: process {os.getpid()} on ' in out
  # Two batches were at hand, and then the run waited.
  assert any(' x the median: ' in line and 'of it waiting for input' in line for line in out.splitlines())
  # Step 15 waited; the line that follows is of a step before, of which the metrics are read then.
  assert 'waiting for input ' in next(line for line in out.splitlines() if line.startswith('step 13/20 '))
  assert f'profile of steps 4 to {3 + STEPS_OF_A_SIGNAL} in {directory / "profile"}' in out
  assert list((directory / 'profile').rglob('*.xplane.pb'))
  assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
  *_, time_spent, last = out.splitlines()
  assert ' in all: training ' in time_spent and '; peak memory: host ' in time_spent and 'saved in' in last

  records = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
  metrics = {r['step']: r['metrics'] for r in records if r['split'] == 'train'}
  assert metrics[13]['speed/input_wait'] > 0.5 > metrics[19]['speed/input_wait']
  assert metrics[20]['speed/host_peak_bytes'] > 1e7
  assert sum(v for n, v in metrics[20].items() if n.startswith('speed/goodput_')) == pytest.approx(1)

  assert main(['status', str(directory)]) == 0
  out = capfd.readouterr().out.splitlines()
  assert out[0].startswith(f'{directory}: ended (done), ') and out[1] == 'step 20 of 20'
  assert out[2].startswith('last save: step 20, ') and ' in all: training ' in out[3]

  # As a kill after step 20 would leave it, had only step 6 been saved: the time from there on is lost.
  file = directory / 'heartbeats/0.json'
  beat = json.loads(file.read_text())
  beat['goodput']['seconds']['productive'] += 10  # Enough for a share that is printed, also on a busy machine.
  file.write_text(json.dumps({**beat, 'ended': '', 'pid': 2**22 + 1}))
  assert main(['status', str(directory)]) == 1
  assert 'dead: process' in capfd.readouterr().out
  checkpointer = Checkpointer(directory, read_only=True)
  (first, *later) = checkpointer.steps()
  for step in later:
    os.rename(directory / f'checkpoints/{step}', directory / f'checkpoints/{step}.removed')
  seconds, marks = beat['goodput']['seconds'], beat['goodput']['marks']
  run_train(tiny_run(1), directory)
  after = json.loads(file.read_text())['goodput']['seconds']
  assert after['lost'] == pytest.approx(seconds['productive'] - marks[str(first)], abs=0.01) and after['lost'] > 0
  assert after['restoring'] > 0 and after['waiting'] >= seconds['waiting']
  assert 'lost to restarts' in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures('shared_programs')
def test_a_launch_that_is_refused_leaves_the_heartbeats_of_the_one_before(tmp_path, monkeypatch):
  file = tmp_path / 'heartbeats/0.json'
  run_train(tiny_run(1), tmp_path)
  before = file.read_bytes()
  unknown = tiny_run(1, best_metric='lose')
  with monkeypatch.context() as patch:
    patch.setattr('tiny_runs.HIDDEN', 8)
    with pytest.raises(CheckpointError, match='another model'):
      run_train(tiny_run(1), tmp_path)
  with pytest.raises(ConfigError, match='there is no such metric'):
    run_train(unknown, tmp_path)
  with pytest.raises(ShardingError, match='mesh'):
    run_train(tiny_run(10**6), tmp_path)
  assert file.read_bytes() == before
  file.unlink()  # As in a copy of the run without its heartbeats.
  with pytest.raises(ConfigError):
    run_train(unknown, tmp_path)
  assert not file.exists()

  # Data that cannot be read are no refusal: the state says so, and keeps how far the run is.
  file.write_bytes(before)

  def fail(*_):
    raise DataError('no file ' + 'abcdef ' * 60)

  with monkeypatch.context() as patch:
    patch.setattr('praxis_lite.runs.executor.find_start', fail)
    with pytest.raises(DataError):
      run_train(tiny_run(1, num_train_steps=40), tmp_path)
  (beat,) = read_heartbeats(tmp_path)
  lines = status_of([beat], is_held=False).lines
  assert lines[0].startswith('ended (DataError: no file abcdef') and ' abcdef ...), ' in lines[0]
  assert lines[1] == 'step 20 of 20' and lines[2].startswith('last save: step 20, ')
  assert json.loads(file.read_text())['goodput'] == json.loads(before)['goodput']


@pytest.mark.slow
@pytest.mark.usefixtures('shared_programs')
def test_a_run_that_saves_nothing_keeps_the_time_of_its_last_save(tmp_path):
  run_train(tiny_run(1), tmp_path)
  (first,) = read_heartbeats(tmp_path)
  run_train(tiny_run(1), tmp_path)
  (again,) = read_heartbeats(tmp_path)
  assert first.saved_step == again.saved_step == 20 and first.saved == again.saved and again.time > first.time
  (tmp_path / 'heartbeats/0.json').unlink()
  os.utime(tmp_path / 'checkpoints/20', (1000, 1000))
  run_train(tiny_run(1), tmp_path)
  (beat,) = read_heartbeats(tmp_path)
  assert (beat.saved_step, beat.saved) == (20, 1000)
  run_train(tiny_run(1, num_train_steps=10), tmp_path)  # Takes no step, and is not recorded.
  assert [(beat.step, beat.total_steps) for beat in read_heartbeats(tmp_path)] == [(20, 20)]


def test_status_of_what_is_no_run(tmp_path, capsys):
  for content in ('', '[]', '{"pid": "x"}', '{"process": true}', '[' * 10**5):
    (tmp_path / 'heartbeats').mkdir(exist_ok=True)
    (tmp_path / 'heartbeats/0.json').write_text(content)
    assert main(['status', str(tmp_path)]) == 2
    assert 'there are no heartbeats of a run in' in capsys.readouterr().err
  assert main(['status']) == 2
