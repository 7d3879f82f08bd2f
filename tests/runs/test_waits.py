"""Every wait has an end: what is in the place of a file, locks that others keep, readers that give nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from small_states import layout_on, random_state
from tiny_runs import tiny_run

from praxis_lite.checkpoints import Checkpointer, retention, saved_steps
from praxis_lite.checkpoints.retention import Retention, being_read
from praxis_lite.cli.main import main
from praxis_lite.common import native_log
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, DataError, HungInputError, UserError
from praxis_lite.common.files import open_plain_to_write, read_plain
from praxis_lite.inputs import ArrayInput, PrefetchIterator, TextInput, patient_thread, prefetch
from praxis_lite.inputs.files import find_files
from praxis_lite.inputs.patient_thread import call_in_time
from praxis_lite.instruments.plan import child as child_process
from praxis_lite.instruments.plan.compilers import CompileError
from praxis_lite.runs import open_run, run_train, sweep
from praxis_lite.runs.cluster import mirror
from praxis_lite.runs.cluster.watchdog import dump_stacks
from praxis_lite.runs.loop.directory import HeldDirectory
from praxis_lite.runs.records.heartbeat import read_heartbeats
from praxis_lite.runs.records.metrics import SummaryWriter, read_results
from praxis_lite.runs.records.record import read_record
from praxis_lite.runs.records.run_config import job_directory


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


@pytest.mark.parametrize('name', ['3.orbax-checkpoint-tmp', '3.a1b2c3d4.removed'])
def test_what_is_left_to_remove_may_be_anything(name, tmp_path):
  left = put(tmp_path / 'checkpoints' / name, 'a named pipe')
  ends(lambda: Checkpointer(tmp_path).close())
  assert not any(left.parent.iterdir())


def test_a_link_to_itself_in_the_place_of_a_checkpoint_is_damage(tmp_path, capsys):
  layout = layout_on(1)
  with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
    checkpointer.save(1, random_state(layout, seed=1, step=1), layout.true_shapes, None)
  folder = tmp_path / 'checkpoints'
  (folder / '2').symlink_to(folder / '2')
  assert main(['checkpoints', 'list', str(tmp_path)]) == 0
  assert capsys.readouterr().out.splitlines()[-1].split() == ['2', '-', '-', '-', 'damaged']
  assert main(['checkpoints', 'verify', str(tmp_path)]) == 1
  told = capsys.readouterr().out
  assert f'{folder}/1: whole' in told and f'{folder}/2: damaged' in told
  assert 'folder: ' in told and 'Too many levels of symbolic links' in told
  with contextlib.closing(Checkpointer(tmp_path, on_damage='previous')) as checkpointer:
    assert int(checkpointer.restore(*layout).step) == 1


@pytest.mark.parametrize('command', ['status', 'runs', 'show', 'list', 'verify', 'train', 'eval'])
def test_a_named_pipe_in_the_place_of_a_run_is_refused(command, tmp_path, capsys):
  path = put(tmp_path / 'run', 'a named pipe')
  arguments = {'status': [path], 'runs': [path], 'list': [path], 'verify': [path]}.get(command)
  words = ['checkpoints', command] if command in ('list', 'verify') else [command]
  code = ends(lambda: main([*words, *map(str, arguments or [f'--job_log_dir={path}'])]))
  told = capsys.readouterr()
  assert code in (1, 2) and 'Traceback' not in told.err and len((told.err + told.out).splitlines()) == 1


@pytest.mark.parametrize('name', ['run.json', 'config.txt'])
def test_a_directory_in_the_place_of_a_record_is_refused_in_one_line(name, tmp_path):
  put(tmp_path / name, 'a directory')
  with pytest.raises(UserError, match=rf'^{tmp_path / name} cannot be written: Is a directory$'):
    run_train(tiny_run(1), tmp_path)


def test_errors_of_the_system_about_files_of_a_run_are_mistakes_and_others_are_not(tmp_path):
  for inside, files in ((True, (tmp_path / 'a' / 'b',)), (True, ('/tmp/x', str(tmp_path / 'b'))), (False, ('/etc/x',))):
    error = OSError(21, 'Is a directory', str(files[0]), None, *map(str, files[1:]))
    with pytest.raises(UserError if inside else OSError, match='Is a directory') as raised, HeldDirectory(tmp_path):
      raise error
    assert inside == (str(raised.value) == f'{files[-1]}: Is a directory')
  with pytest.raises(OSError, match='No space'), HeldDirectory(tmp_path):
    raise OSError(28, 'No space left on device')


@pytest.mark.slow
def test_a_named_pipe_in_the_place_of_any_file_of_a_checkpoint_is_damage(tmp_path):
  layout = layout_on(2, rows=99)  # Chunks of more than 1 kB are in files of their own.
  checkpointer = Checkpointer(tmp_path)
  for step in (1, 2):
    checkpointer.save(step, random_state(layout, seed=step, step=step), layout.true_shapes, {'position': step})
  checkpointer.close()
  newest, unread = tmp_path / 'checkpoints' / '2', []
  for path in sorted(path for path in newest.rglob('*') if path.is_file()):
    kept = path.rename(tmp_path / 'kept')
    os.mkfifo(path)
    with contextlib.closing(ends(lambda: Checkpointer(tmp_path, read_only=True, on_damage='previous'))) as reading:
      state = ends(lambda reading=reading: reading.restore(*layout))
      if int(state.step) == 2:
        unread.append(path.name)
    whole = ends(lambda: main(['checkpoints', 'verify', str(tmp_path)]))
    assert (int(state.step), whole) in ((1, 1), (2, 0)), path
    path.unlink()
    kept.rename(path)
  assert {*unread} <= {'_CHECKPOINT_METADATA', 'commit_success.txt'}


@pytest.mark.parametrize('kind', ['a named pipe', 'a file', 'a link', 'a link to itself', 'read-only'])
def test_what_no_checkpoint_can_be_saved_in_is_known_before_a_run_begins(kind, tmp_path):
  """It would train, and say at its end that nothing is saved."""
  folder = tmp_path / 'checkpoints'
  if kind == 'a file':
    folder.touch()
  elif kind.startswith('a link'):
    folder.symlink_to(folder if 'itself' in kind else tmp_path / 'elsewhere')
  elif kind == 'read-only':
    folder.mkdir(mode=0o500)
  else:
    put(folder, kind)
  if kind == 'read-only' and os.access(folder, os.W_OK):
    pytest.skip('root may write anywhere')
  with pytest.raises(UserError, match=rf'{folder}(:| is a symbolic link)') as error, job_directory(tmp_path):
    pass
  assert '\n' not in str(error.value)


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
      pytest.raises(CheckpointError, match=r'for more than 0\.3 s: end that process'),
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


# ---- readers that give nothing


class HangingInput(ArrayInput):
  """Hangs at a batch until `released` is set, as a reader of storage that is gone."""

  hangs_at: int = 0

  def read(self, epoch, position, count, start, stop):
    if position // self.batch_size >= self.hangs_at:
      reading.set()
      released.wait(60)
    return super().read(epoch, position, count, start, stop)


reading, released = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def release(monkeypatch):
  monkeypatch.setattr(prefetch, '_AT_CLOSE', 0.2)
  reading.clear()
  released.clear()
  yield
  released.set()


def hanging(at=0, **fields):
  return HangingInput(name='data', batch_size=2, arrays={'x': np.arange(20)}, hangs_at=at, **fields)


def test_a_batch_that_does_not_come_is_an_error_that_says_where_its_reader_is():
  with PrefetchIterator(hanging(2), timeout_s=0.5) as batches:
    next(batches)
    next(batches)
    start = time.monotonic()
    assert not batches.wait(0.05)
    for _ in range(2):
      with pytest.raises(HungInputError, match=r'data: no batch for 0\.5 s.*hangs at .*threading\.py:\d+ wait'):
        next(batches)
    assert time.monotonic() - start < 5 and batches.wait(0.05)
  assert batches.hangs


def test_what_comes_late_is_no_error(capfd, monkeypatch):
  monkeypatch.setattr(patient_thread, '_LONG', 0.1)
  threading.Timer(0.5, released.set).start()
  with PrefetchIterator(hanging(), timeout_s=30) as batches:
    assert next(batches)['x'].tolist() == [0, 1]
  assert not batches.hangs and 'data: waiting for a batch for 0 s; giving up in 30 s' in capfd.readouterr().err


def test_the_first_batch_is_not_waited_for_without_end():
  with pytest.raises(HungInputError, match='data: no batch'):
    call_in_time(hanging().get_next, 'data', timeout_s=0.2)
  released.set()
  assert call_in_time(hanging().get_next, 'data')['x'].tolist() == [0, 1]
  empty = ArrayInput(batch_size=2, arrays={'x': np.arange(1)}, drop_remainder=True)
  with pytest.raises((StopIteration, UserError)):
    call_in_time(empty.get_next, 'empty')


@pytest.mark.slow
def test_a_run_whose_reader_hangs_is_saved_and_ends_and_goes_on_later(tmp_path, capsys):
  config = tiny_run(1, noise=0.0)
  arrays = config.datasets[0].arrays
  config.datasets[0] = Config(HangingInput, batch_size=6, is_training=True, arrays=arrays, hangs_at=4, shuffle=False)
  with pytest.raises(HungInputError, match='HangingInput: no batch for 0.5 s'.replace('.', r'\.')):
    ends(lambda: run_train(config, tmp_path, input_timeout_s=0.5), 60)
  out = capsys.readouterr().out
  assert 'HangingInput: its reader hangs and was abandoned' in out
  assert saved_steps(tmp_path)[-1] == 4
  released.set()
  assert run_train(config, tmp_path).step == 20


ENDS = """
import sys, time
from praxis_lite.inputs import patient_thread
patient_thread._AT_EXIT = 2
thread = patient_thread.PatientThread('hung')
thread.submit(time.sleep, float(sys.argv[1]))
time.sleep(0.1)
print('over', flush=True)
"""


@pytest.mark.slow_cases
@pytest.mark.parametrize('seconds, least, most', [(60, 0, 30), (0.5, 0.5, 30)])
def test_a_process_ends_though_a_reader_hangs(seconds, least, most):
  start = time.monotonic()
  command = [sys.executable, '-c', ENDS, str(seconds)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
  assert (done.returncode, done.stdout) == (0, 'over\n'), done.stderr
  assert least < time.monotonic() - start < most


# ---- processes


STOPPED_POINT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
print('ready', flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
while True: time.sleep(0.01)
"""


@pytest.mark.parametrize('code', ['7', 'stays'])
def test_a_sweep_ends_after_sigterm_though_a_point_is_stopped(code, tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, '_STOP_SECONDS', 0.5)
  text = STOPPED_POINT
  if code == 'stays':
    text = text.replace('lambda *_: sys.exit(int(sys.argv[1]))', 'signal.SIG_IGN')
  ended = []

  def stop():
    log = tmp_path / 'a' / 'sweep.log'
    while not (log.exists() and 'ready' in log.read_text()):
      time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=stop, daemon=True).start()
  command = [sys.executable, '-S', '-c', text, '7']
  assert sweep.run_points([sweep.Point('a', ())], tmp_path, lambda p: command, ended=lambda *end: ended.append(end[1]))
  assert ended == [7 if code == '7' else -signal.SIGKILL]


@pytest.mark.slow
def test_a_log_is_collected_though_a_process_keeps_its_pipe(capfd):
  with native_log.collected_log() as log:
    child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])
    os.write(2, b'W1122 11:24:22.7 1 x.cc:1] a warning\nan error\n')
  child.kill()
  child.wait()
  assert log == ['W1122 11:24:22.7 1 x.cc:1] a warning'] and 'an error' in capfd.readouterr().err


def test_a_compiler_of_another_process_has_an_end(tmp_path, monkeypatch):
  monkeypatch.setattr(child_process, '_SECONDS', 0.5)
  with pytest.raises(CompileError, match=r'the process of the compiler was killed after 0\.5 s'):
    child_process.compile_in_child([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], tmp_path)


def test_a_copy_that_stalls_at_the_end_of_a_run_is_an_error(tmp_path, monkeypatch):
  monkeypatch.setattr(mirror, '_STALLED', 0.6)
  monkeypatch.setattr(mirror, '_AT_CLOSE', 0.1)
  config = tiny_run(1)
  config.task.train.mirror = f'memory://{tmp_path}/copy'

  def hang(*args):
    released.wait(60)

  monkeypatch.setattr(mirror.RemoteRun, 'upload_files', hang)
  with pytest.raises(UserError, match=r'no file has been copied for 0\.6 s; the thread is at .*; the run is saved in'):
    ends(lambda: run_train(config, tmp_path / 'run'), 60)
  assert saved_steps(tmp_path / 'run')[-1] == 20
