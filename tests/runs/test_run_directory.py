"""A run whose directory or files are moved or deleted while it trains, or between two processes of it."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from test_executor import wait_for
from tiny_runs import examples, open_gate, tiny_run

from praxis_lite.checkpoints import Checkpointer, saved_steps
from praxis_lite.common.errors import CheckpointError, UserError
from praxis_lite.common.files import KnownFolder
from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.improvement import Watched, WatchedMetric
from praxis_lite.runs.loop.progress import NOTHING_KNOWN, Progress, merge_saved
from praxis_lite.runs.loop.saving import Saving
from praxis_lite.runs.nonfinite import NonFiniteError, SkippedSteps
from praxis_lite.runs.programs import DecodeProgram
from praxis_lite.runs.records import metrics
from praxis_lite.runs.records.history import read_history
from praxis_lite.runs.records.metrics import EvalResult, SummaryWriter
from praxis_lite.runs.records.runs import read_run

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
from tools.faults.comparison import differences, results_of

pytestmark = pytest.mark.usefixtures('shared_programs')

# A process of the command line's exit codes.
RUN = """
import sys
from test_run_directory import run_config
from praxis_lite.common.errors import UserError
from praxis_lite.runs import run_train
try:
  run_train(run_config(gate=sys.argv[2], interval=int(sys.argv[3])), sys.argv[1])
except UserError as error:
  sys.exit(f'error: {error}')
"""


def run_config(gate='', interval=10, **train):
  return tiny_run(
    1, gate=gate, **{'log_interval_steps': interval, 'num_train_steps': 30, 'save_interval_steps': 5} | train
  )


def lines(directory):
  """The lines of metrics, without times."""
  for line in (directory / 'metrics.jsonl').read_text().splitlines():
    record = json.loads(line)
    metrics = {name: value for name, value in record['metrics'].items() if not name.startswith('speed/')}
    yield record['step'], record['split'], metrics


def of_undisturbed_run(directory):
  """The results without lines of training between those of an undisturbed run, which each launch adds."""
  results, is_due = results_of(directory), lambda step: step == 1 or step % 10 == 0
  curves = {
    name: [point for point in points if is_due(point[0]) or not name.startswith('train:')]
    for name, points in results.curves.items()
  }
  return results._replace(lines=[x for x in results.lines if is_due(x[0]) or x[1] != 'train'], curves=curves)


def train_steps(directory):
  """The steps of training in the metrics, in order."""
  return [step for step, split, _ in lines(directory) if split == 'train']


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  directory = tmp_path_factory.mktemp('undisturbed')
  run_train(run_config(), directory)
  return directory


# -------------------------------------------------------------------- curves


@pytest.mark.slow
def test_lines_of_metrics_are_those_of_an_undisturbed_run_wherever_it_is_killed(undisturbed, tmp_path, run_python):
  """SIGKILL between steps that are logged, and between those that are saved, twice in one run."""
  for at in (12, 27):
    gate = open_gate(tmp_path / 'gate', at)
    process = run_python(RUN, str(tmp_path / 'run'), gate, '10')
    while at - at % 5 not in saved_steps(tmp_path / 'run'):
      assert process.poll() is None
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  run_train(run_config(), tmp_path / 'run')
  assert train_steps(undisturbed) == [1, 10, 20, 30]
  assert train_steps(tmp_path / 'run') == [1, 10, 11, 20, 26, 30]  # And the first step of each launch.
  assert not differences(of_undisturbed_run(tmp_path / 'run'), results_of(undisturbed))


def test_a_run_that_a_signal_ends_has_the_loss_of_its_last_step(undisturbed, tmp_path, capsys):
  result = run_train(run_config(), tmp_path, hooks=[Disturb(7, lambda _: os.kill(os.getpid(), signal.SIGINT))])
  assert (result.step, result.ended_by) == (7, 'SIGINT') and train_steps(tmp_path) == [1, 7]
  printed = f'\nstep 7/30 loss {read_run(tmp_path).last_loss:.3f} '
  assert printed in capsys.readouterr().out
  run_train(run_config(), tmp_path)
  assert train_steps(tmp_path) == [1, 7, 8, 10, 20, 30]
  assert not differences(of_undisturbed_run(tmp_path), results_of(undisturbed))


# -------------------------------------------------------------------- the directory


class Disturb(Hook):
  """Does something to the directory after a step, once the checkpoint of the last fifth step is complete."""

  def __init__(self, step, what):
    self._step, self._what = step, what

  def on_step(self, run, metrics):
    if run.step == self._step:
      while self._step - self._step % 5 not in saved_steps(run.directory):
        pass
      self._what(run.directory)


@pytest.mark.slow
def test_a_directory_that_is_moved_ends_the_run_which_goes_on_there(undisturbed, tmp_path, run_python):
  gate = open_gate(tmp_path / 'gate', 12)
  process = run_python(RUN, str(tmp_path / 'run'), gate, '10')
  wait_for('step 10/30', process.stdout)
  while 10 not in saved_steps(tmp_path / 'run'):
    assert process.poll() is None
  (tmp_path / 'moved to [x]').mkdir()
  (tmp_path / 'run').rename(tmp_path / 'moved to [x]' / 'here')
  open_gate(tmp_path / 'gate')
  _, err = process.communicate()
  moved = tmp_path / 'moved to [x]' / 'here'
  assert process.returncode == 1  # 2 from the command line, as of each error of a user.
  (error,) = [line for line in err.splitlines() if line.startswith('error: ')]
  assert error.startswith(f'error: job_log_dir {tmp_path}/run was moved to {moved} while it trained; step ')
  assert error.endswith(f'is saved in {moved}: to go on, train with --job_log_dir={moved}')
  assert not (tmp_path / 'run').exists()
  saved = saved_steps(moved)
  assert 10 < saved[-1] <= 15 and f'step {saved[-1]} of 30 is saved' in error
  run_train(run_config(), moved)
  assert train_steps(moved) == sorted({1, 10, saved[-1] + 1, 20, 30})
  assert not differences(of_undisturbed_run(moved), results_of(undisturbed))


@pytest.mark.slow_cases
@pytest.mark.parametrize('instead', [None, 'empty', 'another run'])
def test_a_directory_that_is_deleted_ends_the_run_whose_state_is_saved_beside_it(undisturbed, tmp_path, instead):
  def delete(directory):
    subprocess.run(['rm', '-rf', directory], check=True)
    if instead == 'empty':
      directory.mkdir()
    if instead == 'another run':
      shutil.copytree(undisturbed, directory)

  directory, rescued = tmp_path / 'run', tmp_path / 'run.rescued'
  because = ', and another one is in its place' if instead else ''
  message = rf'was deleted while it trained{because}; step 12 of 30 is saved in {rescued}, with its config and without'
  with pytest.raises(UserError, match=message) as error:
    run_train(run_config(), directory, hooks=[Disturb(12, delete)])
  assert '\n' not in str(error.value)
  if instead is None:
    assert not directory.exists()
  else:
    assert sorted(directory.rglob('*')) == ([] if instead == 'empty' else [
      directory / path.relative_to(undisturbed) for path in sorted(undisturbed.rglob('*'))
    ])  # fmt: skip
  result = run_train(run_config(), rescued)
  assert result.step == 30 and (rescued / 'run.json').exists()
  assert train_steps(rescued) == [13, 20, 30]
  assert of_undisturbed_run(rescued).lines == [line for line in results_of(undisturbed).lines if line[0] > 12]
  assert results_of(rescued).arrays == results_of(undisturbed).arrays


@pytest.mark.slow
def test_one_that_is_moved_while_a_checkpoint_is_written_leaves_nothing_behind(undisturbed, tmp_path):
  """Right after a save began; and by a symbolic link, which then leads elsewhere."""
  directory, moved = tmp_path / 'run', tmp_path / 'moved'
  with pytest.raises(UserError, match=rf'was moved to {moved} while it trained; step 11 of 30 is saved in {moved}'):
    run_train(run_config(save_interval_steps=10), directory, hooks=[MoveAfterSave(10, directory, moved)])
  assert not directory.exists() or not any(directory.iterdir())
  run_train(run_config(save_interval_steps=10), moved)
  assert results_of(moved).arrays == results_of(undisturbed).arrays


class MoveAfterSave(Hook):
  """Moves the directory at once after the save of a step has begun, or has been taken."""

  def __init__(self, step, directory, to):
    self._step, self._directory, self._to = step, directory, to

  def on_step(self, run, metrics):
    if run.step == self._step + 1:
      self._directory.rename(self._to)


def test_a_file_system_that_cannot_be_reached_for_a_while_does_not_end_the_run(undisturbed, tmp_path, monkeypatch):
  stat = os.stat

  def failing(path, *args, **kwargs):
    if path == tmp_path / 'run' and failing.left > 0:
      failing.left -= 1
      raise OSError(5, 'Input/output error')
    return stat(path, *args, **kwargs)

  failing.left = 0

  def lose(directory):
    failing.left = 3

  monkeypatch.setattr('praxis_lite.runs.loop.directory.os.stat', failing)
  run_train(run_config(), tmp_path / 'run', hooks=[Disturb(12, lose)])
  assert failing.left == 0 and list(lines(tmp_path / 'run')) == list(lines(undisturbed))


class MoveAt(Hook):
  """Moves the directory after a step, whatever is being written."""

  def __init__(self, step, to):
    self._step, self._to = step, to

  def on_step(self, run, metrics):
    if run.step == self._step:
      run.directory.rename(self._to)


def every_step(tmp_path, **train):
  """A run that logs, evaluates, decodes and copies after each step, or each second one."""
  config = run_config(interval=1, num_train_steps=12, eval_interval_steps=2, decode_interval_steps=4, **train)
  config.task.train.emergency_copies.set(every_n_steps=1, directories=(str(tmp_path),))
  return config


@pytest.fixture(scope='module')
def undisturbed_every_step(tmp_path_factory):
  directory = tmp_path_factory.mktemp('every_step')
  run_train(every_step(directory.parent), directory / 'run')
  return directory / 'run'


@pytest.mark.slow_cases
@pytest.mark.parametrize('step', [1, 2, 7, 12])
def test_no_line_of_a_step_before_a_move_is_lost(undisturbed_every_step, tmp_path, step, capsys):
  directory, moved = tmp_path / 'run', tmp_path / 'moved'
  with pytest.raises(UserError, match=rf'moved to {moved} while it trained; step {step} of 12 is saved in {moved}'):
    run_train(every_step(tmp_path), directory, hooks=[MoveAt(step, moved)])
  assert not directory.exists() and 'written later' not in capsys.readouterr().out
  assert train_steps(moved) == list(range(1, step + 1))
  run_train(every_step(tmp_path), moved)
  assert list(lines(moved)) == list(lines(undisturbed_every_step))
  assert not differences(results_of(moved), results_of(undisturbed_every_step))


@pytest.mark.slow_cases
@pytest.mark.parametrize('split', ['train', 'eval/valid', 'decode/prompts'])
@pytest.mark.parametrize('when', ['before its folder', 'before its file'])
def test_a_move_before_a_file_of_events_is_made_loses_none(
  undisturbed_every_step, tmp_path, monkeypatch, split, when, capsys
):
  directory, moved = tmp_path / 'run', tmp_path / 'moved'
  name, what = {'before its folder': ('_events', SummaryWriter), 'before its file': ('EventFile', metrics)}[when]
  real = getattr(what, name)

  def disturbed(*args):
    if directory.exists() and (split in args or directory / 'summaries' / split in args):
      directory.rename(moved)
    return real(*args)

  monkeypatch.setattr(what, name, disturbed)
  with pytest.raises(UserError, match=rf'was moved to {moved} while it trained; step \d+ of 12 is saved'):
    run_train(every_step(tmp_path), directory)
  assert not directory.exists() and 'written later' not in capsys.readouterr().out
  run_train(every_step(tmp_path), moved)
  assert not differences(results_of(moved), results_of(undisturbed_every_step))


def test_a_move_while_outputs_are_written_ends_the_run_as_any_other(undisturbed_every_step, tmp_path, monkeypatch):
  directory, moved = tmp_path / 'run', tmp_path / 'moved'
  finish = DecodeProgram._finish

  def disturbed(program, step):
    if directory.exists():
      directory.rename(moved)
    return finish(program, step)

  monkeypatch.setattr(DecodeProgram, '_finish', disturbed)
  with pytest.raises(UserError, match=rf'was moved to {moved} while it trained; step 4 of 12 is saved in {moved}'):
    run_train(every_step(tmp_path), directory)
  assert not directory.exists()
  run_train(every_step(tmp_path), moved)
  assert not differences(results_of(moved), results_of(undisturbed_every_step))
  assert (moved / 'decoded/prompts/step_00000004.jsonl').exists()


@pytest.mark.slow
@pytest.mark.parametrize('instead', [False, True])
def test_a_trace_does_not_make_a_directory_anew(tmp_path, instead):
  directory, moved = tmp_path / 'run', tmp_path / 'moved'

  def move(_):
    directory.rename(moved)
    if instead:
      (directory / 'profile').mkdir(parents=True)

  with pytest.raises(UserError, match=rf'step 6 of 30 is saved in {moved}'):
    run_train(run_config(), directory, hooks=[Disturb(6, move)], profile_steps=(5, 9))
  assert list(tmp_path.glob('run/**/*')) == ([directory / 'profile'] if instead else [])
  assert directory.exists() == instead


@pytest.mark.parametrize('kept', [False, True])
def test_one_that_is_deleted_before_training_ends_the_run_in_one_line(tmp_path, kept):
  directory = tmp_path / 'run'

  def lose(task, batch):
    directory.rename(tmp_path / 'moved') if kept else shutil.rmtree(directory)
    return []

  where = f'was moved to {tmp_path}/moved' if kept else 'was deleted'
  with pytest.raises(UserError, match=rf'^job_log_dir {directory} {where} while it trained$'):
    run_train(run_config(), directory, advise=lose)
  assert not directory.exists()


def test_a_step_that_is_not_finite_is_not_saved_where_the_directory_is_now(tmp_path, monkeypatch):
  add = SkippedSteps.add

  def failing(skipped, step, means):
    if step == 6:
      raise NonFiniteError('step 6: the loss is not finite')
    return add(skipped, step, means)

  monkeypatch.setattr(SkippedSteps, 'add', failing)
  with pytest.raises(UserError, match=r'was moved to .*; step 7 is not saved: step 6: the loss is not finite'):
    run_train(run_config(), tmp_path / 'run', hooks=[MoveAt(7, tmp_path / 'moved')])
  assert not (tmp_path / 'run').exists() and saved_steps(tmp_path / 'moved') in ([], [5])


@pytest.mark.slow
def test_files_that_a_failed_save_writes_late_do_not_make_the_directory_anew(tmp_path, monkeypatch):
  """As TensorStore does, which goes on writing after the first error of a save."""
  directory, real = tmp_path / 'run', Checkpointer.wait_until_complete
  late = directory / 'checkpoints/5.orbax-checkpoint-tmp/state'

  def write_late():
    late.mkdir(parents=True)
    (late / 'manifest').write_text('')

  def failing(checkpointer):
    real(checkpointer)
    if checkpointer.directory == str(directory / 'checkpoints') and not directory.exists() and not written:
      written.append(threading.Timer(0.1, write_late))
      written[0].start()
      raise CheckpointError('its folder is gone')

  written = []
  monkeypatch.setattr(Checkpointer, 'wait_until_complete', failing)
  with pytest.raises(UserError, match='step 7 of 30 is saved in'):
    run_train(run_config(), directory, hooks=[Disturb(7, lambda _: directory.rename(tmp_path / 'moved'))])
  written[0].join()
  assert not directory.exists()


def test_a_failed_save_is_not_noted_in_a_directory_that_tensorstore_has_made_anew(tmp_path):
  def failing():
    raise CheckpointError('its folder is gone')

  directory, lines = tmp_path / 'run', []
  directory.mkdir()
  kept = SimpleNamespace(directory=str(directory / 'checkpoints'), newly_complete=failing, latest_step=lambda: None)
  saving = Saving(kept, None, lines.append)
  assert saving.newly_complete() == [] and [event.kind for event in read_history(directory)] == ['save_failed']
  directory.rename(tmp_path / 'moved')
  directory.mkdir()
  saving.newly_complete()
  assert len(lines) == 2 and not any(directory.iterdir())


@pytest.mark.parametrize('fate', ['moved', 'deleted', 'replaced', 'a file'])
def test_nothing_is_written_to_a_folder_that_is_not_the_known_one(tmp_path, fate):
  path = tmp_path / 'run'
  path.mkdir()
  folder = KnownFolder(path)
  assert folder.subfolder('a/b').is_dir() and folder.subfolder('a/b') == path / 'a/b' and not folder.is_elsewhere()
  folder.replace_file('file', 'text')
  path.rename(tmp_path / 'moved') if fate != 'deleted' else shutil.rmtree(path)
  if fate == 'replaced':
    path.mkdir()
  if fate == 'a file':
    path.write_text('')
  assert folder.is_elsewhere()
  for write in (lambda: folder.subfolder('a/b'), lambda: folder.replace_file('file', 'text')):
    with pytest.raises(OSError):
      write()
  assert not list(path.rglob('*')) if fate == 'replaced' else not path.is_dir()


# -------------------------------------------------------------------- what decides a run


def overfitting(**train):
  config = run_config(interval=1, **{'num_train_steps': 60, 'eval_interval_steps': 2, 'max_to_keep': 1} | train)
  config.datasets[0].arrays = examples(12, 0)
  config.task.train.early_stopping.patience = 8
  return config


class KilledError(BaseException):
  """What nothing handles."""


def kill(directory):
  raise KilledError


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  directory = tmp_path_factory.mktemp('stopped')
  return directory, run_train(overfitting(), directory)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  ('damage', 'copies'),
  [('deleted', False), ('emptied', False), ('halved', False), ('changed', False), ('deleted', True)],
)
def test_early_stopping_does_not_depend_on_the_files_of_metrics(stopped, tmp_path, capsys, damage, copies):
  whole, undisturbed = stopped
  assert undisturbed.ended_by == 'stopped' and undisturbed.step > 14
  config = overfitting()
  if copies:
    config.task.train.emergency_copies.set(every_n_steps=1, directories=(str(tmp_path),))
  directory = tmp_path / 'run'
  at = undisturbed.step - 1
  with pytest.raises(KilledError):
    run_train(config, directory, hooks=[Disturb(at, kill)])
  file = directory / 'metrics.jsonl'
  text = file.read_text()
  if damage == 'deleted':
    file.unlink()
  elif damage == 'changed':  # A better loss, as of another run.
    file.write_text(text.replace('"step": 4, "split": "eval/valid"', '"step": 3, "split": "eval/valid"'))
  else:
    file.write_text('' if damage == 'emptied' else text[len(text) // 2 :])
  (directory / 'best.json').unlink()
  capsys.readouterr()
  result = run_train(config, directory)
  out = capsys.readouterr().out
  assert (result.step, result.ended_by) == (undisturbed.step, 'stopped')
  best = json.loads((whole / 'best.json').read_text())
  assert 'best.json' not in os.listdir(directory) or json.loads((directory / 'best.json').read_text()) == best
  assert f'{file} has lost ' in out and 'go by the evaluations in the checkpoint' in out


@pytest.mark.slow
def test_nothing_is_said_where_nothing_is_lost(tmp_path, capsys):
  with pytest.raises(KilledError):
    run_train(overfitting(), tmp_path / 'run', hooks=[Disturb(13, kill)])
  run_train(overfitting(), tmp_path / 'run')
  assert 'has lost' not in capsys.readouterr().out


@pytest.mark.slow
def test_the_losses_that_jumps_are_measured_by_and_batches_that_are_left_out_are_in_the_checkpoint(tmp_path, capsys):
  config = run_config(num_train_steps=60)
  config.task.train.loss_spike.set(factor=1.8, steps=1, window=20, action='rollback')
  config.task.train.max_rollbacks = 50
  whole = run_train(config, tmp_path / 'whole')
  recorded = (tmp_path / 'whole' / 'trouble.jsonl').read_text()
  assert recorded.count('rollback') > 0
  directory = tmp_path / 'run'
  first = json.loads(recorded.splitlines()[0])['first']
  with pytest.raises(KilledError):
    run_train(config, directory, hooks=[Disturb(first + 6, kill)])
  for name in ('losses.json', 'trouble.jsonl'):
    (directory / name).unlink()
  again = run_train(config, directory)
  assert (directory / 'trouble.jsonl').read_text() == recorded and again.step == whole.step
  assert results_of(directory).arrays == results_of(tmp_path / 'whole').arrays
  assert 'trouble.jsonl had lost 1 line;' in capsys.readouterr().out


WATCHED = Watched(WatchedMetric('eval/valid', 'loss', 'min'), None)


@pytest.mark.parametrize(
  ('saved', 'expected'),
  [
    ({}, [2.0, 1.0, 3.0]),  # Of an earlier version, or of another metric: the file decides.
    ({'eval/valid/loss': {2: 2.0, 4: 1.0}}, [2.0, 1.0, 3.0]),
    ({'eval/valid/loss': {2: 2.0, 4: 0.5}}, [2.0, 0.5, 3.0]),
    ({'eval/valid/loss': {2: 2.0, 3: 7.0, 4: 1.0, 6: 3.0}}, [2.0, 7.0, 1.0, 3.0]),
    ({'eval/valid/loss': {4: 1.0}}, [1.0, 3.0]),
    ({'eval/valid/loss': {}}, [3.0]),
    ({'eval/valid/loss': {2: 2.0, 4: float('nan')}}, [2.0, float('nan'), 3.0]),
  ],
)
def test_evaluations_before_the_checkpoint_are_those_it_knows(saved, expected):
  results = [EvalResult(s, 'eval/valid', {'loss': x, 'other': 1.0}) for s, x in ((2, 2.0), (4, 1.0), (6, 3.0))]
  results.insert(1, EvalResult(3, 'eval/other', {'loss': 9.0}))
  progress = Progress(saved, None, [], None)
  assert str(Progress.parse(json.loads(json.dumps(progress.record())))) == str(progress)
  merged, _ = merge_saved(results, progress, WATCHED, 6)
  assert str([x for _, x in WATCHED.best.values(merged)]) == str(expected)
  assert EvalResult(3, 'eval/other', {'loss': 9.0}) in merged


@pytest.mark.parametrize(
  'record', [None, 3, {}, {'evaluations': 3}, {'evaluations': {}, 'losses': [[1]], 'troubles': [], 'lines': 1}]
)
def test_progress_that_is_not_what_was_written_says_nothing(record):
  assert Progress.parse(record) == NOTHING_KNOWN
