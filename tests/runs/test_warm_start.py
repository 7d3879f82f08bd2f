"""Processes that are forked from one that has made the imports: what they are given, and how they end."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from praxis_lite.runs.cluster.launch import Launcher
from praxis_lite.runs.cluster.warm_start import WarmStarter

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='needs prctl of Linux')

MODULE = """
import atexit, json, os, random, signal, sys, time
import numpy as np
import imported

atexit.register(print, 'left')
task = os.environ['TASK']
if task == 'tell':
  own = {'main': __name__, 'argv': sys.argv[1:], 'input': sys.stdin.read(), 'folder': os.getcwd()}
  own |= {'drawn': [np.random.random(), random.random()], 'imported_by': imported.PID, 'parent': os.getppid()}
  own |= {'group': os.getpgid(0) == os.getpid(), 'interrupt': str(signal.getsignal(signal.SIGINT))[:23]}
  print(json.dumps(own))
elif task == 'fail':
  print('to the error output', file=sys.stderr)
  sys.exit(7)
elif task == 'wait':
  print('waiting', flush=True)
  time.sleep(60)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
  (tmp_path / 'told.py').write_text(MODULE)
  (tmp_path / 'imported.py').write_text('import os\nPID = os.getpid()\n')
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(tmp_path), *sys.path]))
  return 'told'


@pytest.fixture
def starter(module):
  made = WarmStarter(module, ['--a=1', 'ü b'], ['imported', 'numpy'])
  yield made
  made.close()


def read(process):
  with process.stdout:
    return process.stdout.read().decode()


def test_a_forked_process_is_as_one_of_its_own(starter):
  processes = [starter.start({'TASK': 'tell', 'EMPTY': ''}) for _ in range(2)]
  texts = [read(process) for process in processes]
  assert [process.wait(10) for process in processes] == [0, 0], texts
  first, second = (json.loads(text.splitlines()[0]) for text in texts)
  assert all(text.endswith('left\n') for text in texts)
  assert first['main'] == '__main__' and first['argv'] == ['--a=1', 'ü b'] and first['input'] == ''
  assert first['folder'] == os.getcwd() and first['parent'] == os.getpid() and first['group']
  assert first['interrupt'] == str(signal.getsignal(signal.SIGINT))[:23]  # In the background, a shell ignores it.
  assert not set(first['drawn']) & set(second['drawn'])
  assert first['imported_by'] == second['imported_by'] not in {process.pid for process in processes}


def test_the_ends_of_processes_are_those_that_popen_reports(starter):
  failed, killed, stopped = (starter.start({'TASK': task}) for task in ('fail', 'wait', 'wait'))
  assert read(failed) == 'to the error output\nleft\n' and failed.wait(10) == 7 == failed.poll()
  assert killed.stdout.readline() == stopped.stdout.readline() == b'waiting\n'
  assert killed.poll() is None
  with pytest.raises(subprocess.TimeoutExpired):
    killed.wait(0.05)
  killed.kill()
  stopped.send_signal(signal.SIGTERM)
  assert (killed.wait(10), stopped.wait(10)) == (-signal.SIGKILL, -signal.SIGTERM)
  killed.kill()  # It has ended, and its number may be another's now.
  for process in (killed, stopped):
    process.stdout.close()


def test_it_ends_with_whoever_asks(module):
  code = 'import os, sys, time\nfrom praxis_lite.runs.cluster.warm_start import WarmStarter\n'
  code += f'print(WarmStarter({module!r}, [], [])._importing.pid, flush=True)\ntime.sleep(60)'
  with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as asking:
    pid = int(asking.stdout.readline())
    asking.kill()
  deadline = time.monotonic() + 20
  while (state := pathlib.Path(f'/proc/{pid}/stat')).exists() and ') Z' not in state.read_text():
    assert time.monotonic() < deadline
    time.sleep(0.05)


@pytest.mark.parametrize('imports', [['imported'], ['no_such_module']])
def test_a_launcher_goes_on_without_it(imports, module, monkeypatch, capfd):
  monkeypatch.setenv('TASK', 'fail')
  lines = []
  launcher = Launcher([sys.executable, '-m', module], 2, imports=imports, write=lines.append)
  assert launcher.run() == 7
  assert sum(line.endswith(': to the error output\n') for line in lines) == 2
  is_without = 'launch: ' in ''.join(lines)
  assert is_without == (imports == ['no_such_module']), lines
  if is_without:
    assert 'each imports by itself' in ''.join(lines) and 'no_such_module' in capfd.readouterr().err


def test_a_kernel_without_subreapers_is_an_error_before_a_process_starts(starter, monkeypatch):
  class Kernel:
    def prctl(self, option, value):
      return -1

  monkeypatch.setattr('praxis_lite.runs.cluster.warm_start.ctypes.CDLL', lambda name: Kernel())
  with pytest.raises(OSError, match='adopt'):
    starter.start({'TASK': 'fail'})
