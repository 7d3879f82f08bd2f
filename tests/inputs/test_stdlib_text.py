"""The standard library as a corpus: split by file, without tests and installed packages."""

import os
import sysconfig

import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import TextInput, stdlib_files

ROOT = sysconfig.get_paths()['stdlib']


def _names(split, **kwargs):
  return [os.path.relpath(f, ROOT).replace(os.sep, '/') for f in stdlib_files(split, **kwargs)]


def test_splits_are_sorted_disjoint_and_mostly_training():
  train, validation, test = (_names(s) for s in ('train', 'validation', 'test'))
  assert train == sorted(train)
  assert len({*train, *validation, *test}) == len(train) + len(validation) + len(test)
  assert {'argparse.py', 'json/decoder.py', 'asyncio/tasks.py'} <= {*train, *validation, *test}
  assert len(train) > 10 * len(validation) > 0
  assert len(test) > 10


def test_tests_packages_and_generated_files_are_left_out():
  for name in (n for s in ('train', 'validation', 'test') for n in _names(s)):
    parts = name.split('/')
    assert name.endswith('.py')
    assert not {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'} & set(parts[:-1])
    assert not parts[-1].startswith('_sysconfigdata')


def test_the_split_of_a_file_depends_on_its_relative_path_alone(tmp_path, monkeypatch):
  expected = {s: set(_names(s)) for s in ('train', 'validation', 'test')}
  kept = sorted(expected['validation'])[:3] + sorted(expected['test'])[:3] + sorted(expected['train'])[:3]
  for name in kept:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('# elsewhere\n')
  monkeypatch.setattr(sysconfig, 'get_paths', lambda: {'stdlib': str(tmp_path)})
  for split, names in expected.items():
    assert {os.path.relpath(f, tmp_path) for f in stdlib_files(split)} == names & set(kept)


def test_max_bytes_bounds_the_size():
  files = stdlib_files('train', max_bytes=100_000)
  assert 50_000 < sum(map(os.path.getsize, files)) <= 100_000
  assert set(files) < set(stdlib_files('train'))
  with pytest.raises(DataError, match='max_bytes'):
    stdlib_files('train', max_bytes=-1)


def test_text_input_reads_it():
  path = Config(stdlib_files, split='validation', max_bytes=20_000)
  source = Config(TextInput, path=path, seq_len=64, batch_size=4).instantiate()
  assert source.num_bytes <= 20_000
  assert 'import' in source.tokenizer.decode(source.get_next()['labels'].ravel())


def test_missing_sources_and_splits_are_errors(tmp_path, monkeypatch):
  with pytest.raises(ConfigError, match="'valid' is not one of"):
    stdlib_files('valid')
  monkeypatch.setattr(sysconfig, 'get_paths', lambda: {'stdlib': str(tmp_path / 'python311.zip')})
  with pytest.raises(DataError, match=r'no Python sources of the standard library in .*python311\.zip'):
    stdlib_files('train')
