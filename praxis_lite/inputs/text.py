"""Text files as batches of packed tokens for a language model.

A batch of `TextInput` has these arrays, all [B, T]: `ids`, `labels` (the next token), `segment_ids` (0 is padding) and
`segment_pos`, int32; `weights`, float32; and, unless the tokenizer is byte-level, `bytes`, float32, the number of bytes
of text that each label represents, so that

    nats per byte = sum(loss * weights) / sum(bytes)

The corpus is read and tokenized when it is first needed, and stays in memory: about two bytes for each byte of text.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.common.config import REQUIRED, Config, build_at, template
from praxis_lite.common.errors import ConfigError, DataError, check_choice, check_range, did_you_mean, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.bad_records import BadRecord, RecordsInput
from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.files import Paths, check_utf8, find_files, read_file, walk
from praxis_lite.inputs.packing import PACKINGS, PackedRows, check_row_length, concat_documents
from praxis_lite.inputs.random_access import RandomAccessInput, uniform
from praxis_lite.inputs.rows import Rows, Struct, token_struct
from praxis_lite.inputs.tokenizers import BaseTokenizer, ByteTokenizer

SPLITS = ('train', 'validation', 'test')
STDLIB_HELDOUT_FRACTION = 0.05
# With at least this many files, `split_by='auto'` splits by file. With fewer files, hashes of names give uneven splits.
_MANY_FILES = 20
_PACKINGS = {**PACKINGS, 'windows': concat_documents}


class _Corpus(NamedTuple):
  rows: PackedRows
  num_documents: int
  num_bytes: int


class TextInput(RecordsInput, RandomAccessInput):
  """Text files as rows of `seq_len` tokens.

  Attributes:
    path: a file, a directory, a glob pattern, a list of those, or a function (or the `Config` of one) that returns
      them.
    seq_len: T, tokens in a row.
    tokenizer_tpl: config of the tokenizer, which is built as `tokenizer`.
    packing: 'concat' cuts one stream of all documents into rows. 'packed' gives each document its own segments, which
      do not attend to each other. 'windows' begins each row at a random position of the stream. It draws rows
      without end, or if `num_epochs` is set, as many per epoch as 'concat' has. Without shuffling, it is like 'concat'.
    document_separator: text between the documents in a file, for example '\\n' or '<|endoftext|>'; None makes each file
      one document.
    split: 'train', 'validation' or 'test' uses that part of the text; None uses all text.
    split_by: 'file' assigns whole files, on every machine the same ones, by a hash of each path relative to the
      directory that the files share. 'position' cuts each file into training, validation and test text, in that order.
      'auto' means 'file' for 20 files or more, otherwise 'position'.
    heldout_fraction: fraction of the files, or of each file, for validation.
    test_fraction: the fraction for test; 0 means no test text; None uses `heldout_fraction`.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, no file matches, or the files or their split have no text. Or
      the tokenizer cannot read the text: the text has a byte 0, which a byte-level tokenizer with the special id 0 does
      not take; or the text is not UTF-8, and the tokenizer is not byte-level.
  """

  path: Paths | Callable[[], Paths] | Config = REQUIRED
  seq_len: int = REQUIRED
  tokenizer_tpl: Config = template(ByteTokenizer)
  packing: str = 'concat'
  document_separator: str | None = None
  split: str | None = None
  split_by: str = 'auto'
  heldout_fraction: float = 0.05
  test_fraction: float | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(seq_len=1)
    check_choice(f'{self.label}.packing', self.packing, tuple(_PACKINGS))
    check_choice(f'{self.label}.split_by', self.split_by, ('auto', 'file', 'position'))
    check_range(f'{self.label}.heldout_fraction', self.heldout_fraction, above=0, below=0.5)
    if self.test_fraction is not None and not 0 <= self.test_fraction < 0.5:
      raise ConfigError(
        f'{self.label}.test_fraction: expected at least 0 and less than 0.5, or None, got {self.test_fraction}'
      )
    if self.split == 'test' and self.test_fraction == 0:
      raise ConfigError(f"{self.label}.split: there is no 'test' text, since test_fraction is 0")
    if self.document_separator == '':
      raise ConfigError(f'{self.label}.document_separator: expected some text or None, got an empty string')
    if self.split is not None:
      check_split(self.split, f'{self.label}.split')
    self.tokenizer: BaseTokenizer = build_at(f'{self.label}.tokenizer_tpl', self.tokenizer_tpl)

  @property
  def num_examples(self) -> int:
    return len(self._corpus.rows)

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    return self.tokenizer.vocab_size

  @property
  def num_bytes(self) -> int:
    """Bytes of text in an epoch, without document separators."""
    return self._corpus.num_bytes

  @property
  def num_documents(self) -> int:
    """Documents in an epoch."""
    return self._corpus.num_documents

  @property
  def num_tokens(self) -> int:
    """Labels in an epoch: the tokens of the text, and one end token for each document."""
    return int(self._corpus.rows.lengths.sum())

  def example_struct(self) -> Struct:
    return token_struct(self.seq_len, *([] if self.tokenizer.is_byte_level else ['bytes']))

  def rows(self, indices: np.ndarray) -> Rows:
    return self._corpus.rows.rows(indices)

  def read(self, epoch: int, position: int, count: int, start: int, stop: int) -> tuple[Rows | None, int]:
    if not self._samples or self.num_epochs is not None:
      return super().read(epoch, position, count, start, stop)
    # Random places never run out, so no batch at the end of an epoch is short.
    places = np.arange(position + start, position + min(stop, count))
    return self.rows_at(epoch, places) if len(places) else None, count

  def rows_at(self, epoch: int, places: np.ndarray) -> Rows:
    if not self._samples:
      return super().rows_at(epoch, places)
    stream = self._corpus.rows
    u = uniform((self.seed,), epoch * self.num_examples + places)
    return stream.windows(np.floor(u * (len(stream.tokens) - self.seq_len)).astype(np.int64))

  @property
  def _samples(self) -> bool:
    """Whether each row begins at a random token of the text."""
    return self.packing == 'windows' and bool(self.shuffle)

  def data_files(self) -> list[str]:
    return find_files(self.path, f'{self.label}.path')

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'packing': self.packing}

  def longest_segments(self) -> dict[str, int]:
    return {'segment_pos': self._longest_segment}

  @property
  def _longest_segment(self) -> int:
    return self.seq_len if self._samples else int(self._corpus.rows.lengths.max())

  def check_beside(self, other: BaseInput) -> None:
    if not isinstance(other, TextInput):
      return
    mine, others = (getattr(i.tokenizer, 'characters', None) for i in (self, other))
    if mine is not None and others is not None and mine != others:
      raise ConfigError(
        f'{other.label}.tokenizer_tpl: its {len(others)} characters differ from the {len(mine)} of {self.label}; give '
        'both tokenizers the same path'
      )
    is_cut = self.split and other.split and self.split != other.split and self.path == other.path
    if is_cut and (self.split_by, *self._heldout) != (other.split_by, *other._heldout):
      raise ConfigError(
        f'{other.label}: its split_by, heldout_fraction or test_fraction differs from {self.label}, so their parts of '
        'the same text overlap; set the same values in both'
      )

  @functools.cached_property
  def _corpus(self) -> _Corpus:
    documents = self._read_documents()
    with prefix_errors(f'{self.label}.path'):
      tokens = self.tokenizer.encode_documents(documents)
    # SentencePiece may find no token in white space; such documents are left out.
    kept = [(t, len(d)) for t, d in zip(tokens, documents) if len(t.ids)]
    if not kept:
      raise DataError(f'{self.label}.path: the tokenizer finds no tokens in the text of {self.path!r}')
    if self.is_training:
      check_row_length(f'{self.label}.seq_len', self.seq_len, sum(len(t.ids) + 1 for t, _ in kept))
    rows = _PACKINGS[self.packing]([t for t, _ in kept], self.tokenizer, self.seq_len)
    if self.packing == 'windows' and len(rows.tokens) <= self.seq_len:
      raise DataError(
        f'{self.label}.seq_len: windows of {number_of(self.seq_len, "token")} need a longer text than this one '
        f'of {len(rows.tokens)}'
      )
    return _Corpus(rows, len(kept), sum(n for _, n in kept))

  def _read_documents(self) -> list[bytes]:
    where = f'{self.label}.path'
    files = find_files(self.path, where)
    by_file = self.split_by == 'file' or (self.split_by == 'auto' and len(files) >= _MANY_FILES)
    if self.split and by_file:
      root = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in files])
      names = [os.path.relpath(os.path.abspath(f), root) for f in files]
      files = [f for f, n in zip(files, names) if split_of_name(n, *self._heldout) == self.split]
      if not files:
        raise DataError(
          f"{where}: none of {number_of(len(names), 'file')} is in split '{self.split}'; set split_by to 'position', "
          'or give a path for each split'
        )
    contents = [self._read(f, where) for f in files]
    if not any(contents):
      what = f'{files[0]} is' if len(files) == 1 else f'all {len(files)} files of {self.path!r} are'
      raise DataError(f'{where}: {what} empty')
    if self.split and not by_file:
      contents = [split_of_content(c, self.split, *self._heldout) for c in contents]
    if self.document_separator is not None:
      separator = self.document_separator.encode()
      contents = [d for c in contents for d in c.split(separator)]
    documents = [d for d in contents if d]
    if not documents:
      remedy = f'add text, set a larger heldout_fraction for all datasets, or leave {self.label} out'
      raise DataError(f"{where}: {self.path!r} is too short to have text in split '{self.split}': {remedy}")
    return documents

  @property
  def _heldout(self) -> tuple[float, float]:
    """The fractions for validation and for test."""
    return self.heldout_fraction, self.heldout_fraction if self.test_fraction is None else self.test_fraction

  def _read(self, file: str, where: str) -> bytes:
    data = b''
    try:
      data = read_file(file, where)
      check_text(data, self.tokenizer, file, where)
      return data
    except DataError as error:
      if not self.skips:
        raise
      if not data or self.document_separator is None:
        self.leave_out(BadRecord(file, 'all', str(error).removeprefix(f'{where}: ')))
        return b''
    # Documents are checked one by one, so that a bad one does not remove the others in its file.
    separator, kept = self.document_separator.encode(), []
    for number, document in enumerate(data.split(separator)):
      try:
        check_text(document, self.tokenizer, file, where)
        kept.append(document)
      except DataError as error:
        self.leave_out(BadRecord(file, f'document {number}', str(error).removeprefix(f'{where}: ')))
    return separator.join(kept)


def check_text(data: bytes, tokenizer: BaseTokenizer, file: str, where: str) -> None:
  """Raises DataError, naming the path at `where`, if a tokenizer cannot read the content of a file."""
  if not tokenizer.is_byte_level:
    check_utf8(data, file, where)
  elif 0 in tokenizer.special_ids and (at := data.find(b'\0')) >= 0:
    raise DataError(
      f'{where}: {file} is not a file of text: byte {at} is 0, which ends documents; to train on any bytes, set '
      'bos_id, eos_id and pad_id of tokenizer_tpl to 256, 257 and 258'
    )


def check_split(split: str, where: str) -> None:
  """Raises `ConfigError` unless `split` is one of SPLITS."""
  if split not in SPLITS:
    raise ConfigError(f'{where}: {split!r} is not one of {", ".join(SPLITS)}.{did_you_mean(str(split), SPLITS)}')


def split_of_name(name: str, heldout_fraction: float, test_fraction: float) -> str:
  """Returns the split that a file belongs to, drawn from a hash of its relative path.

  The fractions are the shares of files in the splits 'validation' and 'test'.
  """
  u = stable_hash(name) / 2**64
  if u < test_fraction:
    return 'test'
  return 'validation' if u < test_fraction + heldout_fraction else 'train'


def stable_hash(name: str) -> int:
  """Returns a 64-bit hash of a relative path, the same on every machine."""
  digest = hashlib.sha256(name.replace(os.sep, '/').encode('utf-8', 'surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big')


def split_of_content(data: bytes, split: str, heldout_fraction: float, test_fraction: float) -> bytes:
  """Returns the part of a file that belongs to a split: training first, then validation, then test.

  Parts end at line ends; if a line is as long as a held-out part, a part ends inside it, between characters.
  """
  first = _cut(data, 1 - heldout_fraction - test_fraction, heldout_fraction)
  second = max(first, _cut(data, 1 - test_fraction, test_fraction))
  return {'train': data[:first], 'validation': data[first:second], 'test': data[second:]}[split]


def _cut(data: bytes, fraction: float, reach: float) -> int:
  """Returns the index at which to cut `data`: after the last line end in a range of `reach * len(data)` bytes.

  The range ends at `fraction * len(data)`. Without a line end in it, the cut is at the end of the range, or at the
  beginning of the UTF-8 character that this would split.
  """
  at = round(len(data) * fraction)
  newline = data.rfind(b'\n', max(0, at - round(len(data) * reach)), at)
  if newline >= 0:
    return newline + 1
  while 0 < at < len(data) and data[at] & 0xC0 == 0x80:  # This position is inside a UTF-8 character.
    at -= 1
  return at


# Parts of the standard library to leave out: installed packages, tests, and files that differ between builds.
_LEFT_OUT_DIRECTORIES = frozenset({'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'})
_LEFT_OUT_PREFIXES = ('_sysconfigdata', 'config-')


@functools.cache  # Inputs for training and for evaluation call this, and get the same result, as sources do not change.
def _stdlib_sources(root: str) -> list[tuple[str, str]]:
  """Returns (path relative to `root`, split) for each source, sorted."""
  sources = walk(root, lambda name: name in _LEFT_OUT_DIRECTORIES or name.startswith(_LEFT_OUT_PREFIXES))
  names = sorted(os.path.relpath(f, root) for f in sources if f.endswith('.py'))
  return [(n, split_of_name(n, STDLIB_HELDOUT_FRACTION, STDLIB_HELDOUT_FRACTION)) for n in names]


def stdlib_files(split: str = 'train', max_bytes: int | None = None) -> list[str]:
  """Returns the sorted paths of the Python standard library's sources in a split: real text on every machine.

  The split depends only on relative paths, so it is the same on every machine with the same Python.

  Args:
    split: 'train' (about nine tenths of the files), 'validation' or 'test'.
    max_bytes: returns a subset of the files, chosen by hash, of at most this many bytes in total; None returns all.

  Raises:
    ConfigError: `split` is unknown.
    DataError: the interpreter has no library sources on disk, or every file is larger than `max_bytes`.
  """
  where = 'stdlib_files'
  check_split(split, f'{where}.split')
  root = sysconfig.get_paths()['stdlib']
  names = [n for n, its_split in _stdlib_sources(root) if its_split == split]
  if not names:
    raise DataError(
      f'{where}: there are no Python sources of the standard library in {root}; give TextInput a path of your own text'
    )
  if max_bytes is None:
    return [os.path.join(root, n) for n in names]
  chosen, left = [], max_bytes
  for name in sorted(names, key=stable_hash):
    file = os.path.join(root, name)
    size = os.path.getsize(file)
    if size <= left:
      chosen.append(file)
      left -= size
  if not chosen:
    raise DataError(f'{where}.max_bytes: no file of the split is as small as {max_bytes} bytes')
  return sorted(chosen)
