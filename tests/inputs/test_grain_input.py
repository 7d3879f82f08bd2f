"""Inputs that Grain reads: worker processes change nothing, a killed run goes on bit for bit, errors are one line."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import (
  ArrayRecordInput,
  Column,
  Feature,
  TableInput,
  TFRecordInput,
  write_array_records,
  write_tfrecords,
)
from praxis_lite.inputs.tf_example import features_of_example, serialized_example

NUM_ROWS = 50
X = np.arange(NUM_ROWS * 6, dtype=np.float32).reshape(NUM_ROWS, 2, 3)
ROWS = {'x': X, 'label': np.arange(NUM_ROWS) - 10, 'flag': np.arange(NUM_ROWS) % 3 == 0}
FEATURES = {
  'x': Config(Feature, shape=(2, 3)),
  'label': Config(Feature, dtype='int32'),
  'flag': Config(Feature, dtype='bool'),
}


def _table():
  words = [f'word {i}' for i in range(NUM_ROWS)]
  return pa.table({'x': [row.tolist() for row in X], 'label': ROWS['label'], 'flag': ROWS['flag'], 'text': words})


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  root = tmp_path_factory.mktemp('files')
  write_array_records(str(root / 'rows.array_record'), ROWS)
  parquet.write_table(_table(), root / 'rows.parquet', row_group_size=8)
  with pa.OSFile(str(root / 'rows.arrow'), 'wb') as sink, pa.ipc.new_file(sink, _table().schema) as writer:
    writer.write_table(_table(), max_chunksize=8)
  with pa.OSFile(str(root / 'rows.stream'), 'wb') as sink, pa.ipc.new_stream(sink, _table().schema) as writer:
    writer.write_table(_table(), max_chunksize=8)
  return root


FORMATS = {
  'rows.array_record': ArrayRecordInput,
  'rows.parquet': TableInput,
  'rows.arrow': TableInput,
  'rows.stream': TableInput,
}


def _config(files, file, **fields):
  return Config(FORMATS[file], path=str(files / file), **{'batch_size': 4, 'features': FEATURES, **fields})


@pytest.mark.parametrize('name', FORMATS)
def test_all_rows_come_as_they_were_written(files, name):
  batches = list(_config(files, name).instantiate())
  for key, expected in ROWS.items():
    values = np.concatenate([b[key] for b in batches])
    np.testing.assert_array_equal(values[:NUM_ROWS], expected)
    assert values.dtype == ('float32' if key == 'x' else np.dtype(FEATURES[key].dtype))
  assert sum(b['weights'].sum() for b in batches) == NUM_ROWS


@pytest.mark.parametrize('name', ['rows.arrow', 'rows.stream'])
def test_the_same_table_is_in_the_same_order_in_any_format(files, name):
  shuffled = {'is_training': True, 'seed': 4}
  source, other = (_config(files, n, **shuffled).instantiate() for n in (name, 'rows.parquet'))
  for _ in range(30):
    np.testing.assert_array_equal(next(source)['label'], next(other)['label'])


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
  file = tmp_path / 'rows.arrow'
  for value in (1, 2):
    table = pa.table({'x': [value, value]})
    with pa.OSFile(f'{file}.new', 'wb') as sink, pa.ipc.new_file(sink, table.schema) as writer:
      writer.write_table(table)
    os.replace(f'{file}.new', file)
    data = TableInput(path=str(file), batch_size=2, features={'x': Config(Feature, dtype='int32')})
    np.testing.assert_array_equal(next(data)['x'], [value, value])


def test_shuffling_mixes_the_rows_of_several_groups(files):
  alone, mixed = (
    next(_config(files, 'rows.parquet', is_training=True, batch_size=8, mixed_groups=n).instantiate())['label'] + 10
    for n in (1, 7)
  )
  assert len(set(alone // 8)) == 1
  assert len(set(mixed // 8)) > 2


def _with_index(row):
  return {'nested': {'length': np.int32(len(row['text']))}, 'x': np.float32(row['x']).sum(0)}


@pytest.mark.parametrize('columns', [None, ('text', 'x')])
def test_a_function_makes_examples_of_rows(files, columns):
  source = _config(files, 'rows.parquet', features=None, parse_fn=_with_index, columns=columns).instantiate()
  assert source.batch_struct()['nested']['length'].shape == (4,)
  batch = next(source)
  np.testing.assert_array_equal(batch['x'], X[:4].sum(1))
  assert batch['nested']['length'].tolist() == [6] * 4


def test_a_function_makes_examples_of_records(files):
  parse = functools.partial(features_of_example, where='')
  source = _config(files, 'rows.array_record', features=None, parse_fn=parse).instantiate()
  assert next(source)['label'].shape == (4, 1)


def test_an_array_may_have_another_name_than_its_column(files):
  features = {'target': Config(Column, column='label', dtype='float32')}
  assert next(_config(files, 'rows.parquet', features=features).instantiate())['target'].tolist() == [-10, -9, -8, -7]


def test_examples_are_those_of_tensorflow(tmp_path):
  tf = pytest.importorskip('tensorflow')
  example = {k: v[3] for k, v in ROWS.items()}
  record = serialized_example(example)
  parsed = tf.train.Example.FromString(record).features.feature
  assert list(parsed['x'].float_list.value) == X[3].ravel().tolist()
  assert list(parsed['label'].int64_list.value) == [-7]
  path = str(tmp_path / 'x.tfrecord')
  write_tfrecords(path, ROWS)
  theirs = tf.data.TFRecordDataset(path).skip(3).take(1).as_numpy_iterator().next()
  for name, values in features_of_example(theirs, '').items():
    np.testing.assert_array_equal(values, np.ravel(example[name]))
  source = Config(TFRecordInput, file_pattern=path, features=FEATURES, batch_size=4).instantiate()
  np.testing.assert_array_equal(next(source)['x'], X[:4])


# -------------------------------------------------------------------- worker processes

_SCRIPT = """
import json, sys
import numpy as np
sys.path.insert(0, {tests!r})
from test_grain_input import _config
import pathlib

def main():
  name, workers, state, count = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
  shuffled = dict(is_training=True, seed=4, num_workers=workers)
  source = _config(pathlib.Path({root!r}), name, **shuffled).instantiate()
  if state:
    source.set_state(state)
  for i in range(count):
    print(json.dumps([next(source)['label'].tolist(), source.get_state()]), flush=True)
  while True:
    next(source)

if __name__ == '__main__':
  main()
"""


def _children(pid):
  out = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(pid)], capture_output=True, text=True, check=False).stdout
  return [int(p) for p in out.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='the system ends workers of a killed process on Linux only')
@pytest.mark.parametrize('name', ['rows.array_record', 'rows.parquet'])
def test_a_run_killed_with_workers_goes_on_bit_for_bit_without(files, tmp_path, name):
  script = tmp_path / 'read.py'
  tests = str(pathlib.Path(__file__).parent)
  script.write_text(_SCRIPT.format(tests=tests, root=str(files)))
  command = [sys.executable, str(script), name, '2', 'null', '20']
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(20)]  # Into the second epoch.
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
  assert len(children) >= 2
  expected = _config(files, name, is_training=True, seed=4).instantiate()
  for labels, state in lines:
    assert next(expected)['label'].tolist() == labels
    assert expected.get_state() == state
  fresh = _config(files, name, is_training=True, seed=4).instantiate()
  fresh.set_state(lines[15][1])
  for labels, _ in lines[16:]:
    assert next(fresh)['label'].tolist() == labels
  deadline = time.monotonic() + 20
  while any(_is_running(child) for child in children):
    assert time.monotonic() < deadline, 'worker processes outlive the process that started them'
    time.sleep(0.1)


def _is_running(pid):
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
  except (FileNotFoundError, ProcessLookupError):
    return False


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
  'name, fields, message',
  [
    (
      'rows.parquet',
      {'features': {'labl': Config(Feature)}},
      r"rows\.features: there is no column 'labl' in .*rows\.parquet\. Did you mean 'label'\? It has x, label, ",
    ),
    (
      'rows.parquet',
      {'features': {'text': Config(Feature)}},
      r"\['text'\]: column 'text' is string, not numbers; convert",
    ),
    (
      'rows.parquet',
      {'features': {'x': Config(Feature, shape=(5,))}},
      r"column 'x' has 6 values a row; the shape \(5,\)",
    ),
    ('rows.arrow', {'features': {'x': Config(Feature, shape=(6,), dtype='int32')}}, "'x' is double; expected int32"),
    (
      'rows.arrow',
      {'features': {'label': Config(Feature, dtype='uint8')}},
      'values from -10 to -3 do not fit in uint8',
    ),
    ('rows.array_record', {'features': {'y': Config(Feature)}}, 'a record has no such feature; it has flag, label, x'),
    (
      'rows.array_record',
      {'features': {'x': Config(Feature)}},
      'expected 1 value of float32, and a record has 6 of flo',
    ),
    (
      'rows.array_record',
      {'features': None, 'parse_fn': lambda r: {'x': r[-1:].decode() + 1}},
      r'rows\.parse_fn: it fail',
    ),
    ('rows.array_record', {'features': None, 'parse_fn': len}, 'expected it to return a dict of arrays, got int'),
  ],
)
def test_what_a_file_does_not_have_is_one_clear_line(files, name, fields, message):
  with pytest.raises(DataError, match=message) as error:
    next(_config(files, name, name='rows', **fields).instantiate())
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('cls, kind', [(TableInput, 'Parquet or Arrow'), (ArrayRecordInput, 'ArrayRecord')])
@pytest.mark.parametrize('content', [b'no such format ' * 9000, b'PAR1 cut off', b'ARROW1 cut off'])
def test_a_file_of_another_format_is_named(tmp_path, cls, kind, content):
  (tmp_path / 'data').write_bytes(content)
  source = Config(cls, name='rows', path=str(tmp_path), features=FEATURES, batch_size=2).instantiate()
  with pytest.raises(DataError, match=rf'rows\.path: .*data is not a whole {kind} file'):
    next(source)


@pytest.mark.parametrize(
  'name, remedy', [('a.csv', 'convert it'), ('a.JSONL', 'convert it'), ('a.txt', 'TextInput reads')]
)
def test_a_file_of_a_kind_that_other_inputs_read_is_told(tmp_path, name, remedy):
  (tmp_path / name).write_text('x,y\n1,2\n')
  source = Config(TableInput, name='rows', path=str(tmp_path / name), features=FEATURES, batch_size=2).instantiate()
  kind = re.escape(os.path.splitext(name)[1].lower())
  with pytest.raises(DataError, match=rf'{name} is a file of another kind, {kind}; TableInput reads Parq.*: {remedy}'):
    next(source)


def test_a_folder_of_a_saved_dataset_is_read_and_its_splits_are_told_apart(tmp_path):
  folder = tmp_path / 'tokens' / 'train'
  folder.mkdir(parents=True)
  for name in ('data-00000-of-00001.arrow', 'cache-1a2b.arrow'):  # The second is the result of a `map`.
    with pa.ipc.new_stream(folder / name, _table().schema) as writer:
      writer.write_table(_table())
  (folder / 'dataset_info.json').write_text('{}')
  (folder / 'state.json').write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}')
  (tmp_path / 'tokens' / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
  fields = {'name': 'rows', 'features': FEATURES, 'batch_size': 2}
  assert TableInput(path=str(folder), **fields).num_examples == NUM_ROWS
  with pytest.raises(
    DataError, match=r'rows\.path: .*tokens has a folder for each split; name one of them: .*/train, .*/'
  ):
    _ = TableInput(path=str(tmp_path / 'tokens'), **fields).files


@pytest.mark.parametrize('name', ['rows.parquet', 'rows.array_record'])
def test_other_files_in_a_folder_are_named_with_a_pattern_for_the_data(files, tmp_path, name):
  shutil.copy(files / name, tmp_path / name)
  (tmp_path / 'README.md').write_text('A dataset.')
  ending = name.removeprefix('rows')
  with pytest.raises(DataError, match=rf'README.md is not .*; to read only the data, .* as in {tmp_path}/\*\{ending}$'):
    next(Config(FORMATS[name], name='rows', path=str(tmp_path), features=FEATURES, batch_size=2).instantiate())


def test_a_missing_value_and_lists_of_several_lengths_are_told(tmp_path):
  parquet.write_table(pa.table({'x': [1.0, None], 'y': [[1], [1, 2]]}), tmp_path / 'a')
  for name, message in (('x', "'x' has 1 row without a value"), ('y', "'y' has lists of 1 to 2 values; expected 1")):
    with pytest.raises(DataError, match=message):
      next(TableInput(path=str(tmp_path), features={name: Config(Feature)}, batch_size=2))


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'features': None}, 'set one of features and parse_fn'),
    ({'parse_fn': len}, 'set one of features and parse_fn'),
    ({'num_workers': -1}, 'num_workers: expected an integer of at least 0'),
    ({'mixed_groups': 0}, 'mixed_groups'),
    ({'columns': ('x',)}, 'features determine which columns are read'),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    TableInput(**{'path': 'x', 'features': FEATURES, 'batch_size': 2, **fields})


@pytest.mark.parametrize('package, cls', [('grain', ArrayRecordInput), ('pyarrow', TableInput)])
def test_a_package_that_is_not_installed_is_told(files, monkeypatch, package, cls):
  from praxis_lite.inputs import grain_input, tables

  for import_it in (grain_input.import_grain, tables.import_pyarrow):
    import_it.cache_clear()
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ConfigError, match=r'is not installed; pip install praxis_lite\[grain\]'):
    next(cls(path=str(files), features=FEATURES, batch_size=2))
  for import_it in (grain_input.import_grain, tables.import_pyarrow):
    import_it.cache_clear()


def test_neither_package_is_imported_before_it_is_needed():
  code = 'import sys, praxis_lite.inputs; print([m for m in ("grain", "pyarrow", "tensorflow") if m in sys.modules])'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, env=dict(os.environ))
  assert done.stdout.strip() == '[]'
