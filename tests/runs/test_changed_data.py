"""Files of training data that have changed when a run goes on are named, and accepted only if that is asked."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tiny_runs import INPUTS, Config, examples, tiny_run

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.errors import CheckpointError
from praxis_lite.inputs import (
  ArrayRecordInput,
  Feature,
  MixtureInput,
  TableInput,
  TextInput,
  TFRecordInput,
  manifest as manifests,
  write_array_records,
  write_tfrecords,
)
from praxis_lite.inputs.manifest import changes, manifest_of
from praxis_lite.runs import run_train

pytestmark = pytest.mark.usefixtures('shared_programs')

FEATURES = {'x': Config(Feature, shape=(INPUTS,)), 'y': Config(Feature)}


def run_on(folder, steps, **train):
  config = tiny_run(1, num_train_steps=steps, save_interval_steps=2, **train)
  config.datasets[0] = Config(
    TFRecordInput, name='train', file_pattern=str(folder), features=FEATURES, batch_size=6, is_training=True
  )
  return config


@pytest.fixture
def half(tmp_path):
  """A run of 4 steps on two files, and the folder of these."""
  for name in 'ab':
    (tmp_path / 'data').mkdir(exist_ok=True)
    write_tfrecords(str(tmp_path / 'data' / name), examples(30, ord(name)))
  run_train(run_on(tmp_path / 'data', 4), tmp_path / 'run')
  return tmp_path / 'run', tmp_path / 'data'


def shorten(data):
  write_tfrecords(str(data / 'a'), examples(6, 0))


def other_content(data):
  write_tfrecords(str(data / 'a'), examples(30, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (shorten, 'train: a has 504 bytes, and had 2,520'),
    (other_content, 'train: a has different content'),
    (lambda data: (data / 'b').unlink(), 'train: b is missing'),
    (lambda data: shutil.copy(data / 'b', data / 'c'), 'train: c is new'),
    (lambda data: (data / 'b').rename(data / 'c'), 'train: b is missing; c is new'),
  ],
)
def test_changed_files_are_refused_with_their_names_and_accepted_where_that_is_asked(half, change, message, capsys):
  run, data = half
  change(data)
  with pytest.raises(CheckpointError, match=message) as error:
    run_train(run_on(data, 6), run)
  said = str(error.value)
  assert '--accept_changed_data' in said and '--norestore_input' in said and '\n' not in said
  capsys.readouterr()
  assert run_train(run_on(data, 6), run, accept_changed_data=True).step == 6
  assert 'the training data has changed since the checkpoint; reading goes on at the saved' in capsys.readouterr().out
  assert run_train(run_on(data, 8), run).step == 8  # What was accepted is what is saved next.
  shutil.copy(data / 'a', data / 'z')
  assert run_train(run_on(data, 10), run, restore_input=False).step == 10


@pytest.mark.slow
def test_files_that_were_moved_or_only_touched_are_the_same(half, tmp_path):
  run, data = half
  shutil.copytree(data, tmp_path / 'elsewhere' / 'deep')
  assert run_train(run_on(tmp_path / 'elsewhere' / 'deep', 6), run).step == 6
  assert run_train(run_on(data, 8), run).step == 8


def test_checkpoints_of_earlier_versions_have_no_manifest(half, monkeypatch):
  run, data = half
  monkeypatch.setattr(Checkpointer, 'progress', lambda self, step=None: None)
  shorten(data)
  assert run_train(run_on(data, 6), run).step == 6


@pytest.mark.slow
def test_an_emergency_copy_has_a_manifest_too(tmp_path, half):
  _, data = half
  run = tmp_path / 'copied'

  def config(steps):
    config = run_on(data, steps)
    config.task.train.emergency_copies.set(every_n_steps=1, directories=(str(tmp_path),))
    config.task.train.save_interval_steps = 100
    return config

  class KilledError(BaseException):
    pass

  from praxis_lite.runs import Hook

  class Kill(Hook):
    def on_step(self, run, metrics):
      if run.step == 5:
        raise KilledError

  with pytest.raises(KilledError):
    run_train(config(8), run, hooks=[Kill()])
  shorten(data)
  with pytest.raises(CheckpointError, match='train: a has'):
    run_train(config(8), run)


def test_every_input_of_files_has_a_manifest(tmp_path):
  import pyarrow as pa
  from pyarrow import parquet

  rows = {'x': np.zeros((4, INPUTS), np.float32), 'y': np.zeros(4, np.float32)}
  write_tfrecords(str(tmp_path / 'a.tfrecord'), rows)
  write_array_records(str(tmp_path / 'a.array_record'), rows)
  parquet.write_table(pa.table({'x': rows['x'].tolist(), 'y': rows['y']}), tmp_path / 'a.parquet')
  (tmp_path / 'a.txt').write_text('some text, and more of it\n' * 9)
  configs = [
    Config(TFRecordInput, name='t', file_pattern=str(tmp_path / '*.tfrecord'), features=FEATURES),
    Config(ArrayRecordInput, name='r', path=str(tmp_path / '*.array_record'), features=FEATURES),
    Config(TableInput, name='p', path=str(tmp_path / '*.parquet'), features=FEATURES),
    Config(TextInput, name='w', path=str(tmp_path / '*.txt'), seq_len=4),
  ]
  mixture = Config(MixtureInput, inputs=configs[:3])
  before = [c.clone(batch_size=2).instantiate().manifest() for c in (*configs, mixture)]
  for config, saved in zip((*configs, mixture), before):
    data = config.clone(batch_size=2).instantiate()
    assert data.changes_since(saved, data.manifest()) == ''
  for file in tmp_path.iterdir():
    file.write_bytes(file.read_bytes() + b' ')
  for config, saved, labels in zip((*configs, mixture), before, ('t', 'r', 'p', 'w', 'trp')):
    data = config.clone(batch_size=2).instantiate()
    changed = data.changes_since(saved, data.manifest())
    assert [part.partition(':')[0] for part in changed.split('; ')] == list(labels)
    assert all(' bytes, and had ' in part for part in changed.split('; '))


def test_of_very_many_files_the_manifest_is_small(tmp_path, monkeypatch):
  monkeypatch.setattr(manifests, '_MOST_LISTED', 50)
  files = [tmp_path / f'{i:03}' for i in range(60)]
  for i, file in enumerate(files):
    file.write_bytes(bytes([i]) * 5000)
  saved = manifest_of(list(map(str, files)))
  assert len(saved['files']) == 32 and changes(saved, manifest_of(list(map(str, files)))) == ''
  files[3].write_bytes(b'x' * 5001)
  assert 'there are 60 files of 300,001 bytes; before, there were 60 of 300,000' in changes(
    saved, manifest_of(list(map(str, files)))
  )
  files[3].write_bytes(bytes([3]) * 5000)
  assert changes(saved, manifest_of(list(map(str, files[:40])))).count('is missing') >= 1
  (tmp_path / '000').write_bytes(b'')
  assert changes(saved, manifest_of(list(map(str, files))))


@pytest.mark.parametrize('saved', [None, 3, {}, {'files': 3}, {'files': [[1]]}, {'files': [], 'digest': 'x'}, []])
def test_a_manifest_that_is_not_what_was_written_says_nothing(tmp_path, saved):
  (tmp_path / 'a').write_text('a')
  assert changes(saved, manifest_of([str(tmp_path / 'a')])) == ''
