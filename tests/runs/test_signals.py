"""SIGTERM and SIGINT in a real process."""

from __future__ import annotations

import os
import pty
import signal
import threading

import jax
import pytest
from jax.experimental import multihost_utils

from praxis_lite.runs.stop_signals import StopSignals

LOOP = """
import sys, time
from praxis_lite.runs.stop_signals import StopSignals
with StopSignals() as stop:
  print('running', flush=True)
  while not stop.requested_now():
    time.sleep(0.01)
  print('received', stop.received, flush=True)
  if sys.argv[1:] == ['hang']:
    for _ in range(60_000):  # Python handles no signal that comes just before a long sleep until it ends.
      time.sleep(0.01)
print('saved', flush=True)
"""


def started(run_python, *args):
  process = run_python(LOOP, *args)
  assert process.stdout.readline() == 'running\n', process.stderr.read()
  return process


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_a_signal_ends_the_loop_between_steps_and_the_process_well(run_python, name):
  process = started(run_python)
  process.send_signal(signal.Signals[name])
  out, err = process.communicate(timeout=3000)
  assert out == f'received {name}\nsaved\n'
  assert process.returncode == 0
  assert name in err and 'a second signal ends the run immediately' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_a_second_signal_ends_the_process_at_once(run_python, name):
  process = started(run_python, 'hang')
  process.send_signal(signal.SIGTERM)
  assert process.stdout.readline() == 'received SIGTERM\n'
  process.send_signal(signal.Signals[name])
  out, _ = process.communicate(timeout=300)
  assert process.returncode == -signal.Signals[name] and out == ''


def test_ended_at_once_on_a_terminal_the_cursor_that_the_progress_bar_hides_is_shown_again(run_python):
  ours, terminal = pty.openpty()
  process = run_python(LOOP, 'hang', stdout=terminal, stderr=terminal)
  os.close(terminal)
  screen = b''
  for wanted in (b'running', b'received SIGINT'):
    while wanted not in screen:
      screen += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
  assert process.wait(timeout=300) == -signal.SIGINT
  screen += os.read(ours, 1000)
  assert screen.endswith(b'\x1b[?25h')
  os.close(ours)


def test_with_several_processes_one_alone_does_not_decide_to_stop(monkeypatch):
  sync_points = []
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(multihost_utils, 'reached_preemption_sync_point', lambda call: call in sync_points)
  stop = StopSignals()
  stop.received = 'SIGINT'
  assert not stop.requested_now() and not stop.requested
  sync_points.append(3)
  assert not stop.requested_now() and not stop.requested
  # Steps and batches of evaluations are counted alike: all processes stop after the same of either.
  assert stop.requested_now() and stop.requested
  assert stop.requested_now()


def test_handlers_are_put_back():
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with StopSignals():
    assert signal.getsignal(signal.SIGTERM) != before[0]
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_it_catches_nothing():
  results = []

  def run():
    with StopSignals() as stop:
      results.append(stop.requested_now())

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert results == [False]
