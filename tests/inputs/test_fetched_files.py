"""Training data at a URL: what is copied, when it is copied again, and what happens when the store fails."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import fetched_files
from praxis_lite.inputs.fetched_files import fetch_files
from praxis_lite.inputs.files import find_files
from praxis_lite.inputs.text import TextInput

WHERE = 'datasets[0].path'


class FlakyStore(MemoryFileSystem):
  """A store in memory whose first reads of each file fail, or end early."""

  protocol, cachable = ('flaky',), False
  store, pseudo_dirs = {}, ['']
  failures: dict[str, list[str]] = {}
  reads: list[str] = []

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.replace('flaky://', 'memory://'))

  def get_file(self, rpath, lpath, **kwargs):
    name = rpath.rpartition('/')[2]
    FlakyStore.reads.append(name)
    failures = FlakyStore.failures.get(name, [])
    how = failures.pop(0) if failures else ''
    if how == 'full':
      raise OSError(errno.ENOSPC, 'No space left on device')
    if how == 'refused':
      raise OSError('429 slow down\nand more lines')
    super().get_file(rpath, lpath, **kwargs)
    if how == 'torn':
      os.truncate(lpath, 2)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
  fsspec.register_implementation('flaky', FlakyStore, clobber=True)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(fetched_files, '_FIRST_PAUSE_S', 0.001)
  FlakyStore.store.clear()
  FlakyStore.failures.clear()
  FlakyStore.reads.clear()
  files = FlakyStore()
  for name in ('a.txt', 'b.txt', 'deep/c.txt', 'other.csv', '.hidden'):
    files.pipe_file(f'/data/{name}', f'text of {name}\n'.encode())
  return files


def names(files):
  return [os.path.basename(file) for file in files]


@pytest.mark.parametrize(
  ('path', 'expected'),
  [
    ('flaky://data/a.txt', ['a.txt']),
    ('flaky://data/*.txt', ['a.txt', 'b.txt']),
    ('flaky://data/**/*.txt', ['a.txt', 'b.txt', 'c.txt']),
    ('flaky://data', ['a.txt', 'b.txt', 'c.txt', 'other.csv']),
    ('flaky://data/', ['a.txt', 'b.txt', 'c.txt', 'other.csv']),
    (['flaky://data/b.txt', 'flaky://data/a.txt', 'flaky://data/a.txt'], ['a.txt', 'b.txt']),
  ],
)
def test_a_url_names_a_file_a_folder_or_a_pattern(path, expected):
  files = find_files(path, WHERE)
  assert sorted(names(files)) == expected
  for file in files:
    with open(file) as opened:
      assert opened.read().startswith('text of ')
  assert sorted(FlakyStore.reads) == expected  # Each is read once, and never again while it does not change.
  assert find_files(path, WHERE) == files and len(FlakyStore.reads) == len(expected)


def test_urls_and_files_of_this_host_can_be_mixed(tmp_path):
  (tmp_path / 'local.txt').write_text('local\n')
  assert sorted(names(find_files([str(tmp_path / 'local.txt'), 'flaky://data/a.txt'], WHERE))) == ['a.txt', 'local.txt']


def test_a_changed_object_is_copied_again_and_a_removed_one_is_left_out(store, capsys):
  find_files('flaky://data', WHERE)
  assert 'fetching 4 files, 65 B, from flaky://data to ' in capsys.readouterr().err
  store.pipe_file('/data/a.txt', b'text of a.tx2\n')  # As long as before.
  store.rm('/data/b.txt')
  files = find_files('flaky://data', WHERE)
  assert 'fetching 1 file, 14 B, from flaky://data to ' in capsys.readouterr().err
  assert sorted(names(files)) == ['a.txt', 'c.txt', 'other.csv']
  assert next(open(file).read() for file in files if file.endswith('a.txt')) == 'text of a.tx2\n'  # noqa: SIM115
  find_files('flaky://data', WHERE)
  assert 'fetching' not in capsys.readouterr().err


@pytest.fixture
def unlike_listings(monkeypatch):
  """A question about one object has more fields than a listing, as in S3, and a listing has no sizes, as on the web."""
  info, find, listed = FlakyStore.info, FlakyStore.find, []
  without_sizes = []

  def find_(self, path, **kwargs):
    listed.append(path)
    found = find(self, path, **kwargs)
    return {name: {**each, 'size': None} for name, each in found.items()} if without_sizes else found

  def info_(self, path, **kwargs):
    return info(self, path, **kwargs) | ({} if listed and not without_sizes else {'ContentType': 'text/plain'})

  monkeypatch.setattr(FlakyStore, 'find', find_)
  monkeypatch.setattr(FlakyStore, 'info', info_)
  monkeypatch.setattr(FlakyStore, 'invalidate_cache', lambda self, path=None: listed.clear())
  return without_sizes


@pytest.mark.parametrize('has_sizes', [True, False])
def test_a_file_that_is_named_by_itself_and_in_its_folder_is_read_once(unlike_listings, has_sizes):
  unlike_listings += [] if has_sizes else ['sizes']
  for url in ('flaky://data/*.txt', 'flaky://data/a.txt', 'flaky://data', 'flaky://data/a.txt'):
    find_files(url, WHERE)
  assert FlakyStore.reads.count('a.txt') == 1


def test_each_part_of_a_large_file_counts_as_progress(monkeypatch):
  noted = []
  monkeypatch.setattr(fetched_files, 'note_progress', noted.append)
  find_files('flaky://data/a.txt', WHERE)
  assert noted[0] == 'fetching a.txt' and noted[-1] == 'fetched a.txt'


def test_a_copy_that_was_cut_or_never_finished_is_made_again():
  (file,) = find_files('flaky://data/a.txt', WHERE)
  os.truncate(file, 3)
  find_files('flaky://data/a.txt', WHERE)
  assert open(file).read() == 'text of a.txt\n'  # noqa: SIM115
  os.unlink(fetched_files._stamp_file(fetched_files.Path(file)))  # Killed between the file and its stamp.
  find_files('flaky://data/a.txt', WHERE)
  assert FlakyStore.reads == ['a.txt'] * 3


def test_refused_and_torn_reads_are_tried_again():
  FlakyStore.failures.update({'a.txt': ['refused', 'torn', 'refused', 'torn'], 'b.txt': ['torn']})
  files = find_files('flaky://data/*.txt', WHERE)
  assert [open(file).read() for file in files] == ['text of a.txt\n', 'text of b.txt\n']  # noqa: SIM115
  assert sorted(FlakyStore.reads) == ['a.txt'] * 5 + ['b.txt'] * 2


@pytest.mark.parametrize(
  ('how', 'told'), [('refused', 'OSError: 429 slow down$'), ('torn', '2 bytes arrived instead of 14$')]
)
def test_a_store_that_keeps_failing_is_an_error_with_the_file(how, told):
  FlakyStore.failures['a.txt'] = [how] * 5
  with pytest.raises(
    DataError, match=rf'^datasets\[0\]\.path: flaky:///data/a.txt cannot be read, in 5 attempts: {told}'
  ):
    find_files('flaky://data/*.txt', WHERE)
  folder = fetch_files('flaky://data/b.txt', WHERE).folder
  assert sorted(entry.name for entry in folder.iterdir() if 'a.txt' in entry.name) == []


def test_a_full_disk_is_told_at_once():
  FlakyStore.failures['a.txt'] = ['full'] * 5
  with pytest.raises(DataError, match=r'a\.txt cannot be copied to .*: No space left on device'):
    find_files('flaky://data/a.txt', WHERE)
  assert FlakyStore.reads == ['a.txt']


@pytest.mark.parametrize('path', ['flaky://data/none.txt', 'flaky://data/*.json', 'flaky://nothing'])
def test_a_url_without_files_is_an_error(path):
  with pytest.raises(DataError, match=r'datasets\[0\]\.path: there are no files at flaky://'):
    find_files(path, WHERE)


def test_no_object_is_written_outside_of_its_folder(store, tmp_path):
  outside = '/data/deep/../../outside.txt'
  FlakyStore.store[outside] = MemoryFile(store, outside, b'x')
  with pytest.raises(DataError, match=r'cannot be listed: OSError: .*outside\.txt has a name that leaves its folder'):
    find_files('flaky://data/**/*.txt', WHERE)
  assert not list(tmp_path.rglob('outside*'))


def test_an_empty_file_is_copied(store):
  store.pipe_file('/data/empty.txt', b'')
  (file,) = find_files('flaky://data/empty.txt', WHERE)
  assert os.path.getsize(file) == 0


def test_a_disk_without_room_is_named_before_anything_is_copied(monkeypatch):
  usage = shutil.disk_usage('/')
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=10))
  with pytest.raises(
    DataError, match=r'has 65 B that are not on this host, and .* has room for 10 B; .*XDG_CACHE_HOME'
  ):
    find_files('flaky://data', WHERE)
  assert FlakyStore.reads == []


@pytest.mark.parametrize(
  ('url', 'told'),
  [('nosuch://bucket/a', 'nosuch'), ('flaky://user:***@host/a.txt', 'passwords are not recorded; give the URL again')],
)
def test_a_url_that_cannot_be_opened_names_the_field(url, told):
  with pytest.raises(ConfigError, match=rf'^datasets\[0\]\.path = .*{told}'):
    find_files(url, WHERE)


def _fetch_in_process(url, cache, results):
  os.environ['XDG_CACHE_HOME'] = cache
  copies = []
  get_file, local = fsspec.get_filesystem_class('file').get_file, fsspec.get_filesystem_class('file')
  local.get_file = lambda self, source, *args, **kwargs: (
    copies.append(source),
    get_file(self, source, *args, **kwargs),
  )
  results.put((find_files(url, WHERE), len(copies)))


@pytest.mark.slow
def test_processes_of_a_host_share_one_copy(tmp_path):
  (tmp_path / 'data').mkdir()
  for i in range(3):
    (tmp_path / 'data' / f'{i}.txt').write_text(f'{i}\n' * 100_000)
  context = multiprocessing.get_context('spawn')
  results = context.Queue()
  arguments = f'file://{tmp_path}/data', str(tmp_path / 'cache'), results
  processes = [context.Process(target=_fetch_in_process, args=arguments) for _ in range(3)]
  for process in processes:
    process.start()
  got = [results.get(timeout=120) for _ in processes]
  assert sum(copies for _, copies in got) == 3 and len({tuple(files) for files, _ in got}) == 1


def test_an_input_reads_a_url_and_goes_on_there_after_a_restart():
  def build():
    return Config(TextInput, name='train', path='flaky://data/*.txt', batch_size=2, seq_len=4).instantiate()

  whole, begun = build(), build()
  batches = [whole.get_next() for _ in range(3)]
  begun.get_next()
  resumed = build()
  resumed.set_state(json.loads(json.dumps(begun.get_state())))
  for expected in batches[1:]:
    found = resumed.get_next()
    assert all((found[name] == expected[name]).all() for name in expected)
  assert whole.manifest() == functools.reduce(lambda _, each: each.manifest(), [begun, resumed], None)
  assert sorted(FlakyStore.reads) == ['a.txt', 'b.txt']
