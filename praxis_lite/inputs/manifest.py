"""The manifest of an input's files. A resumed run compares it with the files to notice changes.

    {"files": [["a/part-0.tfrecord", 31250, "9f3c..."], ...]}     name, bytes, and a hash of samples of the content
    {"count": 20000, "bytes": 8.1e12, "digest": "...", "files": [...]}     for very many files: only a sample

Names are relative to the directory that the files share, so data may be moved. The manifest has the sizes of all files
and, for a few files, a hash of four parts of 1 KiB, which are cheap to read from any storage. It cannot show other
changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from praxis_lite.common.errors import DataError
from praxis_lite.common.figures import number_of

DataManifest = dict[str, Any]

_SAMPLED, _PARTS, _PART = 32, 4, 1024  # Sampled files, parts of each sampled file, and bytes in a part.
_MOST_LISTED = 10_000
_THREADS = 8
_SHOWN = 3


def manifest_of(files: Sequence[str]) -> DataManifest:
  """Returns the manifest of files; raises DataError if one of them cannot be read."""
  paths = [os.path.abspath(file) for file in files]
  root = os.path.commonpath([os.path.dirname(path) for path in paths])
  by_name = {os.path.relpath(path, root).replace(os.sep, '/'): path for path in paths}
  names = sorted(by_name)
  sampled = {*sorted(names, key=_hash)[:_SAMPLED]}
  with ThreadPoolExecutor(_THREADS) as pool:
    sizes = dict(zip(names, pool.map(_size, (by_name[name] for name in names))))
    samples = dict(zip(sampled, pool.map(lambda name: _sample(by_name[name], sizes[name]), sampled)))
  if len(names) <= _MOST_LISTED:
    return {'files': [[name, sizes[name], samples.get(name)] for name in names]}
  digest = _hash(repr([(name, sizes[name]) for name in names]))
  some = [[name, sizes[name], samples[name]] for name in sorted(sampled)]
  return {'count': len(names), 'bytes': sum(sizes.values()), 'digest': digest, 'files': some}


def changes(saved: object, now: DataManifest) -> str:
  """Returns how files have changed since the manifest `saved`; '' if they are unchanged, or `saved` is not readable."""
  found = list(_changes(saved, now))
  more = f'; and {len(found) - _SHOWN} more files have changed' if len(found) > _SHOWN else ''
  return '; '.join(found[:_SHOWN]) + more


def _changes(saved: object, now: DataManifest) -> Iterator[str]:
  try:
    before = {str(name): (int(size), sample) for name, size, sample in saved['files']}  # type: ignore[index]
    listed = 'digest' not in saved  # type: ignore[operator]
    total = None if listed else (int(saved['count']), int(saved['bytes']), saved['digest'])  # type: ignore[index]
  except (TypeError, ValueError, KeyError, OverflowError):  # An older format, or an edited file.
    return
  here = {name: (size, sample) for name, size, sample in now['files']}
  for name, (size, sample) in before.items():
    if name not in here:
      if 'digest' not in now:
        yield f'{name} is missing'
    elif here[name][0] != size:
      yield f'{name} has {number_of(here[name][0], "byte")}, and had {size:,} before'
    elif None not in (sample, here[name][1]) and here[name][1] != sample:
      yield f'{name} has different content'
  if listed and 'digest' not in now:
    yield from (f'{name} is new' for name in here if name not in before)
    return
  of_now = (now.get('count', len(here)), now.get('bytes', sum(size for size, _ in here.values())), now.get('digest'))
  if total is None:
    total = len(before), sum(size for size, _ in before.values()), None
  if total != of_now:
    yield f'there are {of_now[0]:,} files of {of_now[1]:,} bytes; before, there were {total[0]:,} of {total[1]:,}'


def _size(file: str) -> int:
  with _reading(file):
    return os.path.getsize(file)


def _sample(file: str, size: int) -> str:
  digest = hashlib.blake2b(digest_size=8)
  with _reading(file), open(file, 'rb') as opened:
    for part in range(_PARTS):
      opened.seek(max(size - _PART, 0) * part // (_PARTS - 1))
      digest.update(opened.read(_PART))
  return digest.hexdigest()


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise DataError(f'cannot read {file}: {error.strerror}') from None


def _hash(text: str) -> str:
  return hashlib.blake2b(text.encode('utf-8', 'surrogateescape'), digest_size=8).hexdigest()
