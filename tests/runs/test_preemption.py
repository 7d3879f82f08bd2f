"""Notices of preemption: a file, an address; the time that is left to save; a launcher that is gone."""

from __future__ import annotations

import http.server
import threading
import time

import numpy as np
import pytest
from tiny_runs import tiny_run

from praxis_lite.common.errors import ConfigError
from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.cluster.clusters import LAUNCHER
from praxis_lite.runs.cluster.preemption import _has_notice

pytestmark = pytest.mark.usefixtures('shared_programs')


class Slow(Hook):
  """Calls something after step 2, and gives the thread that looks for notices time to look."""

  def __init__(self, call):
    self.call = call

  def on_step(self, run, metrics):
    if run.step == 2:
      self.call()
    if run.step >= 2:
      time.sleep(0.1)


@pytest.fixture(scope='module')
def whole(shared_programs, tmp_path_factory):
  return run_train(tiny_run(save_interval_steps=100), tmp_path_factory.mktemp('whole'))


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', ['a file', 'no launcher'])
def test_a_notice_saves_and_the_run_goes_on_when_it_is_started_again(kind, whole, tmp_path, monkeypatch):
  notice = tmp_path / 'notice'
  call = notice.touch if kind == 'a file' else (lambda: None)
  if kind == 'no launcher':
    monkeypatch.setenv(LAUNCHER, '1000000000')
  result = run_train(tiny_run(), tmp_path / 'run', preemption_notice=str(notice), grace_s=60, hooks=[Slow(call)])
  assert result.ended_by == 'SIGTERM' and result.step < 20
  monkeypatch.delenv(LAUNCHER, raising=False)
  again = run_train(tiny_run(save_interval_steps=100), tmp_path / 'run')
  assert again.ended_by == 'done'
  for a, b in zip(again.state.mdl_vars.values(), whole.state.mdl_vars.values()):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_an_address_is_a_notice_when_its_answer_is_one():
  answers = [(200, 'FALSE'), (200, 'TRUE'), (404, 'nothing'), (200, '{"action": "terminate"}'), (200, '')]

  class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      if self.path == '/garbage':
        self.wfile.write(b'garbage\r\n\r\n')
        return
      code, text = answers[int(self.path.strip('/'))]
      self.send_response(code if self.headers['Metadata-Flavor'] == 'Google' else 403)
      self.end_headers()
      self.wfile.write(text.encode())

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(('localhost', 0), Metadata) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f'http://localhost:{server.server_port}'
    assert [_has_notice(f'{address}/{i}') for i in range(5)] == [False, True, False, True, False]
    assert not _has_notice(f'{address}/garbage')
    server.shutdown()
  assert not _has_notice(address) and not _has_notice(None) and not _has_notice('http://local host')


def test_a_grace_period_must_be_one(tmp_path):
  with pytest.raises(ConfigError, match=r'grace_s = 0: expected more than 0 seconds'):
    run_train(tiny_run(), tmp_path, grace_s=0)


@pytest.mark.slow
def test_where_there_is_no_time_to_save_the_process_says_what_it_was_doing_and_ends(tmp_path, run_python):
  code = """
import os, signal, sys, time
from tiny_runs import tiny_run
from praxis_lite.runs import Hook, run_train
class Stuck(Hook):
  def on_step(self, run, metrics):
    if run.step == 5:
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(1000)
run_train(tiny_run(), sys.argv[1], grace_s=1, hooks=[Stuck()])
"""
  process = run_python(code, str(tmp_path / 'run'))
  _, err = process.communicate(timeout=300)
  assert process.returncode == 75
  assert 'not saved within grace_s = 1 s of the notice' in err and 'exit code 75' in err
  stacks = (tmp_path / 'run' / 'stacks' / 'host_0.txt').read_text()
  assert 'in on_step' in stacks
  assert (tmp_path / 'run' / 'checkpoints' / '3').is_dir()
