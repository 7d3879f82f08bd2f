"""Copies of runs in an object store: kept while a run trains, fetched where it goes on, and never read by halves."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
from types import SimpleNamespace

import fsspec
import pytest
from tiny_runs import tiny_run

from praxis_lite.checkpoints import saved_steps
from praxis_lite.checkpoints.contents import add_checksum
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.runs import Hook, run_train
from praxis_lite.runs.cluster.mirror import Mirror
from praxis_lite.runs.cluster.object_store import ObjectStore, StoreError
from praxis_lite.runs.cluster.remote import RemoteRun
from praxis_lite.runs.trouble import Trouble

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
from tools.faults.comparison import differences, results_of

pytestmark = pytest.mark.usefixtures('shared_programs')


@pytest.fixture
def url(request):
  """A folder in a store of objects in memory, which all tests of a process share: one of this test's own."""
  yield f'memory://{request.function.__name__}/runs/1'
  fsspec.filesystem('memory').store.clear()


def mirrored(url, **train):
  config = tiny_run(
    **{'num_train_steps': 8, 'save_interval_steps': 2, 'eval_interval_steps': 4, 'max_to_keep': 2} | train
  )
  config.task.train.mirror = url
  return config


def objects(url):
  """The names of all objects of a run, and their bytes."""
  fs, root = fsspec.core.url_to_fs(url)
  return (
    {name.removeprefix(f'{root}/'): data for name, data in fs.cat(fs.find(root)).items()} if fs.exists(root) else {}
  )


def steps(url):
  return [c.step for c in RemoteRun(ObjectStore(url)).checkpoints()]


def wait_for(is_so):
  """Waits until something is so, and a little longer, for who is told of it."""
  deadline = time.monotonic() + 60
  while not is_so() and time.monotonic() < deadline:
    time.sleep(0.01)
  time.sleep(0.2)


class KilledError(BaseException):
  """What nothing handles."""


class KillOnceCopied(Hook):
  """Ends a run when there is a copy of its checkpoint of `step`."""

  def __init__(self, step, url):
    self._step, self._url = step, url

  def on_step(self, run, metrics):
    if run.step == self._step + 1:
      wait_for(lambda: self._step in saved_steps(run.directory))

  def on_checkpoint(self, run, step, path):
    if step >= self._step:
      wait_for(lambda: step in steps(self._url))
      raise KilledError


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  directory = tmp_path_factory.mktemp('undisturbed')
  run_train(mirrored(None), directory, seed=7)
  return directory


def killed(url, directory, step, **train):
  with pytest.raises(KilledError):
    run_train(mirrored(url, **train), directory, seed=7, hooks=[KillOnceCopied(step, url)])


@pytest.mark.slow
def test_a_run_goes_on_from_its_copy_as_if_nothing_had_happened(url, tmp_path, undisturbed, capsys):
  killed(url, tmp_path / 'lost', 4)
  run_train(mirrored(url), tmp_path / 'new')  # The seed is that of the copy.
  assert f'fetched {url}/checkpoints/' in capsys.readouterr().out
  assert differences(results_of(tmp_path / 'new'), results_of(undisturbed)) == []
  assert steps(url) == [6, 8]
  copied = objects(url)
  names = {f.relative_to(tmp_path / 'new').as_posix() for f in (tmp_path / 'new').rglob('*') if f.is_file()}
  assert names <= copied.keys() and copied.keys() - names == {'checkpoints/6.complete', 'checkpoints/8.complete'}
  assert copied['metrics.jsonl'] == (tmp_path / 'new' / 'metrics.jsonl').read_bytes()
  # An older directory goes on from the copy too; that of another run is refused.
  run_train(mirrored(url), tmp_path / 'lost')
  assert results_of(tmp_path / 'lost') == results_of(tmp_path / 'new')
  shutil.copytree(undisturbed, tmp_path / 'other')
  with pytest.raises(ConfigError, match=rf"task.train.mirror = '{url}' has the copy of another run than the one in "):
    run_train(mirrored(url), tmp_path / 'other')


@pytest.mark.slow
def test_a_store_that_fails_costs_no_training(url, tmp_path, undisturbed, capsys, monkeypatch):
  put, failing, failed = ObjectStore.put, [], []

  def fails(store, path, name):
    if failing:
      failed.append(name)
      raise StoreError('no room')
    put(store, path, name)

  class FailFrom(Hook):
    def on_step(self, run, metrics):
      failing.extend([True] * (run.step == 3))
      if run.step == 5:
        wait_for(lambda: 4 in saved_steps(run.directory))
      if run.step == 7:
        wait_for(lambda: failed)

  monkeypatch.setattr(ObjectStore, 'put', fails)
  with pytest.raises(
    UserError, match=rf'copying the run failed: no room; the run is saved in {tmp_path}, and the same '
  ):
    run_train(mirrored(url), tmp_path, seed=7, hooks=[FailFrom()])
  out = capsys.readouterr().out
  assert 'step 8 of 8: saved' in out and 'copying the run failed: no room; training goes on, and ' in out
  assert differences(results_of(tmp_path), results_of(undisturbed)) == []
  assert not {6, 8} & set(steps(url))
  failing.clear()
  run_train(mirrored(url), tmp_path)
  assert steps(url) == [6, 8]


@pytest.mark.slow
def test_a_copy_of_before_the_run_went_back_is_not_gone_on_from(url, tmp_path, undisturbed):
  run_train(mirrored(url), tmp_path, seed=7)
  for step in (6, 8):  # As `go_back` does.
    shutil.rmtree(tmp_path / 'checkpoints' / str(step))
  shutil.copytree(undisturbed / 'checkpoints' / '6', tmp_path / 'checkpoints' / '6')
  trouble = Trouble(7, 7, 'a loss', 'rollback', [], 6)
  (tmp_path / 'trouble.jsonl').write_text(json.dumps(trouble._asdict()) + '\n')
  mirror = Mirror(url, tmp_path, max_to_keep=2)
  mirror.fetch()
  assert saved_steps(tmp_path) == [6]
  mirror.on_end(SimpleNamespace(step=6, line=print))
  assert steps(url) == [6]
  assert objects(url)['checkpoints/6/about/metadata'] == (undisturbed / 'checkpoints/6/about/metadata').read_bytes()


@pytest.fixture
def stored(url, undisturbed):
  run = RemoteRun(ObjectStore(url))
  for step in saved_steps(undisturbed):
    run.upload(undisturbed / 'checkpoints' / str(step), 0)
  run.upload_files(undisturbed)
  return url


def change(url, name, to=None):
  """Changes an object, or removes it."""
  fs, root = fsspec.core.url_to_fs(url)
  data = bytearray(fs.cat_file(f'{root}/{name}'))
  data[len(data) // 2] ^= 1
  if to is None:
    fs.rm(f'{root}/{name}')
  else:
    fs.pipe_file(f'{root}/{name}', to(bytes(data)))


def test_the_commands_read_what_is_complete(stored, undisturbed, tmp_path, capsys):
  def run(*arguments):
    code = main(['checkpoints', *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err

  code, out = run('list', stored)
  assert code == 0 and [line.split()[0] for line in out.splitlines()] == ['step', '6', '8'] and 'data 1' in out
  code, out = run('show', stored)
  assert code == 0 and f'{stored}/checkpoints/8: ' in out and 'mdl_vars.w' in out
  assert run('verify', stored) == (0, f'{stored}/checkpoints/6: whole\n{stored}/checkpoints/8: whole\n')
  code, out = run('copy', stored, tmp_path / 'copy', '--step=6')
  assert code == 0 and saved_steps(tmp_path / 'copy') == [6]
  assert (tmp_path / 'copy/metrics.jsonl').read_bytes() == (undisturbed / 'metrics.jsonl').read_bytes()
  assert run('verify', tmp_path / 'copy')[0] == 0
  assert 'there is a checkpoint of step 6 in' in run('copy', stored, tmp_path / 'copy', '--step=6')[1]
  assert 'there is no complete checkpoint of step 7' in run('copy', stored, tmp_path / 'copy', '--step=7')[1]
  assert 'object stores have copies of them' in run('diff', stored, stored)[1]

  change(stored, 'checkpoints/6/state/manifest.ocdbt', bytes)
  change(stored, 'checkpoints/8.complete', lambda data: data[:100])
  code, out = run('verify', stored)
  assert code == 1 and out == f'{stored}/checkpoints/6: damaged\n  state/manifest.ocdbt: has changed\n'
  change(stored, 'checkpoints/6/state/manifest.ocdbt')
  assert '  state/manifest.ocdbt: is missing' in run('verify', stored)[1]
  code, out = run('copy', stored, tmp_path / 'damaged')
  assert code == 2 and not list((tmp_path / 'damaged' / 'checkpoints').iterdir())


def test_a_damaged_copy_is_left_for_the_one_before(stored, tmp_path, capsys):
  change(stored, 'checkpoints/8/about/metadata', bytes)
  with pytest.raises(DamagedError, match=rf'{stored}/checkpoints/8 is damaged \(about/metadata has changed\)'):
    Mirror(stored, tmp_path / 'strict').fetch('fail')
  Mirror(stored, tmp_path / 'new').fetch()
  assert saved_steps(tmp_path / 'new') == [6] and 'using the previous checkpoint' in capsys.readouterr().out
  change(stored, 'checkpoints/6/about/metadata', bytes)
  with pytest.raises(DamagedError, match='there is no other one in'):
    Mirror(stored, tmp_path / 'none').fetch()


def test_the_best_checkpoint_comes_too(url, undisturbed, tmp_path):
  shutil.copytree(undisturbed, tmp_path / 'run')
  best = {'step': 6, 'metric': 'eval/valid/loss', 'mode': 'min', 'value': 0.25}
  (tmp_path / 'run' / 'best.json').write_text(json.dumps(best))
  run_train(mirrored(url, max_to_keep=1), tmp_path / 'run')
  assert steps(url) == [6, 8]
  Mirror(url, tmp_path / 'new').fetch()
  assert saved_steps(tmp_path / 'new') == [6, 8]


def test_what_is_removed_meanwhile_does_not_matter(url, tmp_path, monkeypatch):
  for name in ('run.json', 'summaries/train/events', 'checkpoints/3/about/metadata'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  (tmp_path / 'link').symlink_to(tmp_path / 'run.json')
  scandir = os.scandir

  def removed(path='.'):
    if 'checkpoints' in os.fspath(path):
      raise FileNotFoundError(path)
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', removed)
  RemoteRun(ObjectStore(url)).upload_files(tmp_path)
  assert objects(url) == {'run.json': b'run.json', 'summaries/train/events': b'summaries/train/events'}


def test_names_lead_to_no_other_directory(stored, tmp_path):
  fs, root = fsspec.core.url_to_fs(stored)
  files = {'../../outside': {'size': 1, 'sha256': hashlib.sha256(b'a').hexdigest()}}
  record = add_checksum({'step': 9, 'rollbacks': 0, 'files': files})
  fs.pipe_file(f'{root}/checkpoints/9.complete', json.dumps(record).encode())
  fs.pipe_file(f'{root}/a\\b', b'a')
  assert steps(stored) == [6, 8]
  Mirror(stored, tmp_path / 'run').fetch()
  assert not list(tmp_path.rglob('outside')) and not list(tmp_path.rglob('a?b'))


@pytest.mark.parametrize(
  'value, why',
  [
    (
      'runs/1',
      "task.train.mirror = 'runs/1': expected the URL of a folder in an object store, such as s3://bucket/runs/1",
    ),
    ('s3://', "task.train.mirror = 's3://': expected the URL of a folder"),
    ('nothing://bucket/1', "task.train.mirror = 'nothing://bucket/1': Protocol not known: nothing; there are s3://"),
    (
      'oss://bucket/1',
      "task.train.mirror = 'oss://bucket/1': Install ossfs to access Alibaba Object Storage System: pip install ossfs",
    ),
    ('file:///proc/nowhere/1', 'task.train.mirror: file:///proc/nowhere/1: writing .test-'),
  ],
)
def test_a_url_that_cannot_be_used_is_refused_first(value, why, tmp_path):
  with pytest.raises(ConfigError) as caught:
    run_train(mirrored(value), tmp_path / 'run')
  assert str(caught.value).startswith(why) and not (tmp_path / 'run').exists()
  if '://' not in value:
    with pytest.raises(ConfigError, match='expected the URL of a folder'):
      mirrored(value).task.instantiate()
