"""Every wait has an end: what is in the place of a file, locks that others keep, readers that give nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
from tiny_runs import tiny_run

from praxis_lite.checkpoints import retention
from praxis_lite.checkpoints.retention import Retention, being_read
from praxis_lite.cli.main import main
from praxis_lite.errors import CheckpointError, DataError, UserError
from praxis_lite.files import open_plain_to_write, read_plain
from praxis_lite.hosts.watchdog import dump_stacks
from praxis_lite.inputs import TextInput
from praxis_lite.inputs.files import find_files
from praxis_lite.records.heartbeat import read_heartbeats
from praxis_lite.records.metrics import SummaryWriter, read_results
from praxis_lite.records.record import read_record
from praxis_lite.runtime import open_run, run_train


def ends(call, seconds=20.0):
  """Returns what a call returns or raises; fails if it does not end."""
  outcome = []

  def run():
    try:
      outcome.append((call(), None))
    except BaseException as error:
      outcome.append((None, error))

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(seconds)
  assert outcome, f'it has not ended in {seconds} s'
  result, error = outcome[0]
  if error is not None:
    raise error
  return result


def put(path, kind):
  os.makedirs(path.parent, exist_ok=True)
  os.mkfifo(path) if kind == 'a named pipe' else path.mkdir()
  return path


# ---- something else in the place of a file

KINDS = ['a named pipe', 'a directory']


@pytest.mark.parametrize('kind', KINDS)
def test_what_is_no_file_is_refused_and_not_waited_for(kind, tmp_path):
  path = put(tmp_path / 'x', kind)
  with pytest.raises(OSError, match=f'it is {kind}, not a file'):
    ends(lambda: read_plain(path))
  with pytest.raises(OSError):
    ends(lambda: open_plain_to_write(path))
  with pytest.raises(OSError):
    ends(lambda: open_plain_to_write(path, append=True))
  with pytest.raises(OSError, match='it is a device'):
    read_plain('/dev/zero')


@pytest.mark.parametrize('kind', KINDS)
def test_metrics_that_are_no_file_are_named_by_all_who_read_or_write_them(kind, tmp_path, capsys):
  put(tmp_path / 'metrics.jsonl', kind)
  wanted = rf'metrics\.jsonl cannot be read: it is {kind}, not a file'
  for call in (
    lambda: SummaryWriter(tmp_path),
    lambda: SummaryWriter(tmp_path, resumed_step=3),
    lambda: read_results(tmp_path, 10),
    lambda: open_run(tmp_path).metrics,
    lambda: run_train(tiny_run(1), tmp_path),
  ):
    with pytest.raises(UserError, match=wanted):
      ends(call)
  assert ends(lambda: main(['runs', str(tmp_path)])) == 2
  assert f'it is {kind}, not a file' in capsys.readouterr().err


@pytest.mark.parametrize('kind', KINDS)
def test_other_files_of_a_run_may_be_anything(kind, tmp_path):
  put(tmp_path / 'run.json', kind)
  with pytest.raises(UserError, match=r'run\.json cannot be read'):
    ends(lambda: read_record(tmp_path))
  put(tmp_path / 'heartbeats' / '0.json', kind)
  assert ends(lambda: read_heartbeats(tmp_path)) == []
  put(tmp_path / 'stacks' / 'host_0.txt', kind)
  assert ends(lambda: dump_stacks(tmp_path, 0)) == ''
  put(tmp_path / 'checkpoints' / '7', kind)
  with contextlib.suppress(NotADirectoryError), ends(lambda: being_read(tmp_path / 'checkpoints' / '7')):
    pass


@pytest.mark.parametrize('pattern', ['', '*', 'b.txt'])
def test_a_named_pipe_among_files_of_data_is_named(pattern, tmp_path):
  (tmp_path / 'a.txt').write_text('some text')
  put(tmp_path / 'b.txt', 'a named pipe')
  with pytest.raises(DataError, match=r'data\.path: .*b\.txt is a named pipe, not a file'):
    ends(lambda: find_files(tmp_path / pattern, 'data.path'))
  data = TextInput(path=str(tmp_path / pattern), seq_len=4, batch_size=1, on_bad_record='skip')
  with pytest.raises(DataError, match=r'b\.txt is a named pipe'):
    ends(data.get_next)


def test_a_directory_that_matches_a_pattern_is_left_out(tmp_path):
  (tmp_path / 'a.txt').write_text('some text')
  put(tmp_path / 'b.txt', 'a directory')
  assert find_files(tmp_path / '*.txt', 'x') == [str(tmp_path / 'a.txt')]


# ---- locks

HOLD = """
import fcntl, os, sys, time
handle = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(handle, fcntl.LOCK_EX)
print('held', flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def locked_by_another(folder, seconds=60.0):
  command = [sys.executable, '-S', '-c', HOLD, str(folder), str(seconds)]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
    assert process.stdout.readline() == b'held\n'
    yield process
    process.kill()


def test_a_lock_of_another_program_is_said_and_refused_in_the_end(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(retention, '_QUIET', 0.1)
  monkeypatch.setattr(retention, '_PATIENCE', 0.3)
  with locked_by_another(tmp_path) as process:
    with (
      pytest.raises(CheckpointError, match=r'which has not released it in 0\.3 s: end that process'),
      being_read(tmp_path),
    ):
      pass
    told = capsys.readouterr().err
    assert told.count('is locked by') == 1 and 'waiting 0.3 s for it' in told
    assert f'process {process.pid} (' in told or 'another process' in told


def test_a_lock_that_is_released_is_waited_for_without_a_word(tmp_path, capsys):
  with locked_by_another(tmp_path, 0.4):
    start = time.monotonic()
    with being_read(tmp_path):
      assert time.monotonic() - start > 0.2
  assert capsys.readouterr().err == ''


def test_a_step_that_another_program_has_locked_is_removed_later(tmp_path):
  for step in (1, 2):
    (tmp_path / str(step)).mkdir()
  keeper = Retention(str(tmp_path), max_to_keep=1, keep_interval_steps=None)
  with locked_by_another(tmp_path / '1'):
    keeper.start(())
    ends(keeper.wait)
    assert (tmp_path / '1').exists()
  keeper.start(())
  keeper.wait()
  assert not (tmp_path / '1').exists()
