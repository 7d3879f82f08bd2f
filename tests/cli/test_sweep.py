"""praxis-lite sweep and runs, with real processes, and their table on terminals."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import signal
import subprocess
import time

import jax
import pytest
from quick_xla import xla_flags
from warm_python import WarmPopen, started

from praxis_lite.cli import run_table
from praxis_lite.cli.main import main
from praxis_lite.runs.records.curves import read_metrics
from praxis_lite.runs.records.record import read_record

EXP = f'--exp={pathlib.Path(__file__).parent / "tiny_experiment.py"}:Tiny'
RATE = 'task.train.learner.learning_rate'


def sweep(folder, *arguments, error='$'):
  """Its exit code, and what it prints; each point is a process of its own."""
  jax.devices()  # Started here, with the devices of this process.
  with contextlib.ExitStack() as stack:
    patched = stack.enter_context(pytest.MonkeyPatch.context())
    patched.setattr(subprocess, 'Popen', WarmPopen)
    patched.chdir(folder.parent)
    for name, value in {'XLA_FLAGS': xla_flags(), 'XDG_CACHE_HOME': str(folder.parent / 'cache')}.items():
      patched.setenv(name, value)
    out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    code = main(['sweep', EXP, f'--job_log_dir={folder}', *arguments])
  assert re.match(error, err.getvalue()), err.getvalue()
  return code, out.getvalue()


@pytest.fixture(scope='module')
def swept(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sweeps') / 'rates'
  return folder, *sweep(folder, f'--set={RATE}=1e-3,1e-1', '--set=task.model.hidden=5,13', '--seed=3', '--parallel=2')


@pytest.mark.slow
def test_a_sweep_trains_each_point_reports_failures_and_names_the_best(swept):
  folder, code, printed = swept
  assert code == 1 and 'without a record' not in printed
  names = [f'learning_rate={rate},hidden={hidden}' for rate in ('1e-3', '1e-1') for hidden in (5, 13)]
  assert sorted(p.name for p in folder.iterdir()) == sorted([*names, 'sweep.json'])
  assert re.search(r'\[1/4\] learning_rate=1e-3,hidden=5: done in \d+ s', printed)
  assert re.search(r'\[2/4\] learning_rate=1e-3,hidden=13: exit code 2: .*RuntimeError: an unlucky number', printed)
  assert '2 of 4 points failed' in printed
  loss, best = re.search(r'\nbest eval/valid/loss: ([\d.]+) at step 2 of (\S+)\n', printed).groups()
  losses = {name: read_metrics(folder / name)['eval/valid/loss'][-1] for name in (names[0], names[2])}
  assert best == min(losses, key=losses.get) and float(loss) == pytest.approx(min(losses.values()), rel=1e-3)
  record = read_record(folder / names[0], trusted=[EXP.partition('=')[2].partition(':')[0]])
  assert record.seed == 3
  assert record.config.task.model.hidden == 5


@pytest.mark.slow
def test_the_same_sweep_again_starts_only_what_is_not_finished(swept):
  folder, *_ = swept
  _, again = sweep(folder, f'--set={RATE}=1e-3,1e-1', '--set=task.model.hidden=5,13', '--seed=3', '--parallel=2')
  assert '[1/4] learning_rate=1e-3,hidden=5: finished before' in again
  assert len(read_record(folder / 'learning_rate=1e-3,hidden=5').launches) == 1
  assert again.count('exit code 2') == 2


def test_runs_prints_the_table_of_a_sweep(swept, capsys):
  folder, *_ = swept
  assert main(['runs', str(folder)]) == 0
  title, header, *rows = capsys.readouterr().out.splitlines()
  assert title == 'tiny_experiment.Tiny (TinyModel), 2 runs; best: lowest eval/valid/loss'
  assert header.split() == ['run', 'step', 'age', 'loss', 'best', 'learning_rate']
  assert len(rows) == 2  # The others have written nothing.
  assert any(re.search(r'hidden=5 +2/2 +[\d.]+ s +[\d.]+ +[\d.]+ @2 +0.001', row) for row in rows), rows
  assert main(['runs', str(folder), '--metric=nothing']) == 2
  assert '--metric=nothing: no run has it' in capsys.readouterr().err


@pytest.mark.parametrize('columns', [40, 60, 120])
def test_the_table_fits_the_terminal(swept, capsys, monkeypatch, columns):
  monkeypatch.setattr(run_table.sys.stdout, 'isatty', lambda: True, raising=False)
  monkeypatch.setenv('COLUMNS', str(columns))
  assert main(['runs', str(swept[0])]) == 0
  lines = re.sub(r'\x1b\[\d*m', '', capsys.readouterr().out).splitlines()
  assert max(map(len, lines)) <= columns
  text = ''.join(lines).replace(' ', '')
  assert all(word in text for word in ('hidden=5', 'learning_rate', '0.001'))


@pytest.mark.slow
def test_a_search_trains_what_is_proposed_and_goes_on_with_more_trials(tmp_path):
  pytest.importorskip('optuna')
  folder, search = tmp_path / 'search', [f'--search={RATE}=log(1e-3,1e-1)', '--search=task.model.hidden=3,5']
  code, printed = sweep(folder, *search, '--trials=1')
  assert code == 0 and re.search(r'\[1/1\] 000,learning_rate=[\d.]+,hidden=[35]: complete in \d+ s', printed)
  code, printed = sweep(folder, *search, '--trials=2')
  assert code == 0 and '[2/2] 001,' in printed and '000,' not in printed.partition('best eval/valid/loss')[0][:20]
  assert sorted(p.name[:3] for p in folder.iterdir() if p.is_dir()) == ['000', '001']
  assert 'best eval/valid/loss' in printed
  code, printed = sweep(folder, *search, '--trials=3', '--metric=train/loss', error='.*its trials cannot be compared')
  assert code == 2 and '[3/3]' not in printed


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([f'--search={RATE}=log(1,0)'], 'the lower one first'),
    (['--search=task.model.hidden=uniform(1,9)'], 'integers are drawn by --search task.model.hidden=int(...)'),
    (['--search=task.model.hiden=int(1,9)'], "Did you mean 'hidden'"),
    (['--search=task.model.hidden=int(1,9)', '--set=task.model.hidden=1,2'], 'write several values as --search'),
    (['--search=task.model.hidden=3,5', '--metric=los'], "hidden=3: --metric=los: no run has it. Did you mean 'loss'?"),
  ],
)
def test_mistakes_in_a_search_are_told_before_anything_is_trained(arguments, message, tmp_path, capsys):
  pytest.importorskip('optuna')
  assert main(['sweep', EXP, f'--job_log_dir={tmp_path / "new"}', *arguments]) == 2
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('text', ['0/2', '3/2', '2', 'a/b'])
def test_a_part_that_is_none_is_refused(text, tmp_path, capsys):
  assert main(['sweep', EXP, f'--job_log_dir={tmp_path / "rates"}', f'--set={RATE}=1e-3,1e-2', f'--part={text}']) == 2
  assert f'--part={text}: expected the number of a part, from 1 on' in capsys.readouterr().err


def test_the_parts_of_a_sweep_train_each_point_once(tmp_path, capsys, monkeypatch):
  trained = []

  def run_points(points, folder, command, *, parallel, ended):
    for point in points:
      trained.append(point.name)
      ended(point, 0, 1.0)
    return False

  monkeypatch.setattr('praxis_lite.runs.sweep.run_points', run_points)
  arguments = ['sweep', EXP, f'--job_log_dir={tmp_path / "rates"}', f'--set={RATE}=1e-3,1e-2,1e-1']
  for part, points in ((2, ['1e-2']), (1, ['1e-3', '1e-1']), (1, [])):
    trained.clear()
    assert main([*arguments, f'--part={part}/2']) == 0
    assert trained == [f'learning_rate={rate}' for rate in points]
  assert '[3/3] learning_rate=1e-1: finished before' in capsys.readouterr().out
  assert main(arguments) == 0 and not trained  # Without --part, all are finished.


def test_runs_where_there_are_none(tmp_path, capsys):
  assert main(['runs', str(tmp_path)]) == 0
  assert capsys.readouterr().out == f'there are no runs in {tmp_path}\n'
  assert main(['runs', str(tmp_path / 'nothing')]) == 2


def test_a_sweep_in_the_directory_of_a_run_is_refused(tmp_path, capsys):
  (tmp_path / 'run.json').touch()
  assert main(['sweep', EXP, f'--job_log_dir={tmp_path}', '--set=task.model.hidden=1,2']) == 2
  assert 'is the directory of a run' in capsys.readouterr().err


def test_a_point_that_is_interrupted_before_it_trains_is_not_called_silent(tmp_path, monkeypatch, capsys):
  def interrupt(points, folder, command, *, parallel, ended):
    for code, point in zip((-signal.SIGTERM, 128 + signal.SIGTERM), points):
      (folder / point.name).mkdir()
      (folder / point.name / 'sweep.log').touch()
      ended(point, code, 1.0)
    return True

  monkeypatch.setattr('praxis_lite.runs.sweep.run_points', interrupt)
  assert main(['sweep', EXP, f'--job_log_dir={tmp_path}', '--set=task.model.hidden=3,4']) == 130
  assert capsys.readouterr().out.count('stopped: interrupted before it trained') == 2


@pytest.mark.slow
def test_an_interrupted_sweep_says_so_and_goes_on(tmp_path):
  sets = ['--set=task.train.num_train_steps=100000000', '--set=task.model.hidden=3,4']
  process = started('sweep', EXP, f'--job_log_dir={tmp_path}', *sets, cwd=tmp_path)
  metrics = tmp_path / 'hidden=3' / 'metrics.jsonl'
  while not (metrics.exists() and metrics.stat().st_size):  # It has taken steps.
    assert process.poll() is None
    time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 130
  assert re.search(r'\[1/2\] hidden=3: stopped: step \d+ of 100000000: saved in ', out)
  assert 'the same command resumes' in out and 'hidden=4' not in out
  assert (tmp_path / 'hidden=3' / 'checkpoints').exists()


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], '--exp is missing'),
    ([EXP], '--job_log_dir is missing'),
    ([EXP, '--job_log_dir=x', '--set=task.name=a'], 'nothing is varied'),
    ([EXP, '--job_log_dir=x', '--set=task.model.hiden=1,2'], "no field 'hiden'. Did you mean 'hidden'?"),
    ([EXP, '--job_log_dir=x', '--set=task.model.hidden=1,two'], "task.model.hidden: expected int, got 'two'"),
    (
      [EXP, '--job_log_dir=x', '--set=task.model.hidden=1,0'],
      'hidden=0: task.model.hidden: expected at least 1, got 0',
    ),
    (
      [EXP, '--job_log_dir=x', f'--set={RATE}=1,2', '--set=datasets[0].batch_size=4,0'],
      'learning_rate=1,batch_size=0: ',
    ),
    (
      [EXP, '--job_log_dir=x', '--devices=2', '--set=task.ici_mesh_shape=(1,),(4,)'],
      "{'data': 4} needs 4 devices, and there are 2",
    ),
    (
      [EXP, '--job_log_dir=x', '--set=task.ici_mesh_shape=(1,),(999,)'],
      "999,_-d704579a: task: ici_mesh_shape: the mesh {'data': 999} needs 999 devices",
    ),
    (
      [EXP, '--job_log_dir=x', '--set=task.train.best_metric=loss,foo'],
      "best_metric=foo: task.train.best_metric = 'foo': there is no such metric",
    ),
    ([EXP, '--job_log_dir=x', '--set=task.train.inputs_split_mapping.map_1d=None,(data,)'], "has no 'map_2d', and an"),
    (
      [EXP, '--job_log_dir=x', '--set=task.model.hidden=1,2', '--metric=los'],
      "hidden=1: --metric=los: no run has it. Did you mean 'loss'? They have eval/valid/loss",
    ),
    ([EXP, '--job_log_dir=x', '--set=task.model.hidden=1,'], 'a value between commas is empty'),
  ],
)
def test_mistakes_are_told_before_anything_is_written(tmp_path, monkeypatch, capsys, arguments, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(subprocess, 'Popen', WarmPopen)
  assert main(['sweep', *arguments]) == 2
  assert message in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_flags_of_a_search_are_refused_without_one(tmp_path):
  for flag, name in (('--trials=4', 'trials'), ('--noprune', 'prune')):
    told = f'praxis-lite sweep: error: --{name} has an effect only with --search; a sweep trains all'
    code, _ = sweep(tmp_path / 'rates', f'--set={RATE}=1e-3,1e-1', flag, error=told)
    assert code == 2 and not (tmp_path / 'rates').exists()


@pytest.mark.slow
def test_each_integer_of_a_small_range_is_checked_before_anything_is_trained(tmp_path, capsys):
  """16 dims have no 3 heads; both ends are right."""
  folder, search = f'--job_log_dir={tmp_path / "heads"}', '--search=task.model.num_heads=int(2,4)'
  code = main(['sweep', '--exp=lm.StdlibLmTiny', folder, search, '--set=task.model.num_layers=1'])
  told = capsys.readouterr().err
  assert code == 2 and not (tmp_path / 'heads').exists()
  assert '--search: fails with task.model.num_heads=3. Search what works' in told
  assert '--search task.model.num_heads=2,4. task.model.num_heads=3: ' in told
