"""TextInput: text files to batches of packed tokens for a language model.

A batch holds, each [B, T]: `ids`, `labels` (the next token), `segment_ids` (0 is padding), `segment_pos` int32;
`weights` float32; and with a tokenizer that is not byte-level `bytes` float32, how many bytes of text each label
stands for, so that

    nats per byte = sum(loss * weights) / sum(bytes)

The corpus is read and tokenized when it is first needed, and stays in memory: about two bytes for each byte of text.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError, DataError
from praxis_lite.inputs.packing import PackedRows, concat_documents, pack_documents
from praxis_lite.inputs.random_access import RandomAccessInput
from praxis_lite.inputs.rows import Rows, Struct
from praxis_lite.inputs.text_files import (
  check_split,
  find_files,
  read_file,
  relative_names,
  split_of_content,
  split_of_name,
)
from praxis_lite.inputs.tokenizers import BaseTokenizer, ByteTokenizer

# From so many files on, `split_by='auto'` splits by file: hashing few names gives lopsided splits.
_MANY_FILES = 20
_PACKINGS = {'concat': concat_documents, 'packed': pack_documents}


@dataclasses.dataclass(frozen=True)
class _Corpus:
  rows: PackedRows
  num_documents: int
  num_bytes: int


class TextInput(RandomAccessInput):
  """Text files as rows of `seq_len` tokens.

  Attributes:
    path: a file, a directory, a glob pattern, a list of those, or a function (or the `Config` of one) that returns
      them.
    seq_len: T, tokens in a row.
    tokenizer_tpl: how text becomes tokens; the built one is `tokenizer`.
    packing: 'concat' cuts the stream of all documents into rows, whatever document they are from; 'packed' makes each
      document segments of its own, which do not attend to each other. See `packing`.
    document_separator: what separates documents in a file, for example '\\n' or '<|endoftext|>'; None makes a file a
      document.
    split: 'train', 'validation' or 'test' takes that part of the text; None takes all.
    split_by: 'file' assigns whole files, by a hash of their path relative to the directory they share; 'position' cuts
      each file into training, validation and test text, in that order; 'auto' is 'file' for 20 files and more.
    heldout_fraction: of the files or of each file, for validation and for test each.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, nothing matches, there is no text in it or in its split, or it
      is not UTF-8 and the tokenizer is not byte-level.
  """

  path: Any = REQUIRED
  seq_len: int = REQUIRED
  tokenizer_tpl: Config = template(ByteTokenizer)
  packing: str = 'concat'
  document_separator: str | None = None
  split: str | None = None
  split_by: str = 'auto'
  heldout_fraction: float = 0.05

  def __post_init__(self) -> None:
    super().__post_init__()
    if not isinstance(self.seq_len, int) or self.seq_len < 1:
      raise ConfigError(f'{self.label}.seq_len: expected an integer of at least 1, got {self.seq_len!r}')
    if self.packing not in _PACKINGS:
      raise ConfigError(f"{self.label}.packing: expected 'concat' or 'packed', got {self.packing!r}")
    if self.split_by not in ('auto', 'file', 'position'):
      raise ConfigError(f"{self.label}.split_by: expected 'auto', 'file' or 'position', got {self.split_by!r}")
    if not 0 < self.heldout_fraction < 0.5:
      raise ConfigError(
        f'{self.label}.heldout_fraction: expected more than 0 and less than 0.5, got {self.heldout_fraction}'
      )
    if self.document_separator == '':
      raise ConfigError(f'{self.label}.document_separator: expected some text or None, got an empty string')
    if self.split is not None:
      check_split(self.split, f'{self.label}.split')
    self.tokenizer: BaseTokenizer = self.tokenizer_tpl.instantiate()

  @property
  def num_examples(self) -> int:
    return len(self._corpus.rows)

  @property
  def vocab_size(self) -> int:
    """How many ids there may be."""
    return self.tokenizer.vocab_size

  @property
  def num_bytes(self) -> int:
    """Bytes of text in an epoch, without what separates documents."""
    return self._corpus.num_bytes

  @property
  def num_documents(self) -> int:
    """Documents in an epoch."""
    return self._corpus.num_documents

  @property
  def num_tokens(self) -> int:
    """Labels in an epoch: the tokens of the text and one end for each document."""
    return int(self._corpus.rows.lengths.sum())

  def example_struct(self) -> Struct:
    names = ['ids', 'labels', 'segment_ids', 'segment_pos']
    struct = {k: jax.ShapeDtypeStruct((self.seq_len,), np.dtype('int32')) for k in names}
    for name in ['weights'] if self.tokenizer.is_byte_level else ['weights', 'bytes']:
      struct[name] = jax.ShapeDtypeStruct((self.seq_len,), np.dtype('float32'))
    return struct

  def rows(self, indices: np.ndarray) -> Rows:
    return self._corpus.rows.rows(indices)

  @functools.cached_property
  def _corpus(self) -> _Corpus:
    documents = self._read_documents()
    tokens = self.tokenizer.encode_documents(documents)
    # SentencePiece may find nothing in white space, which is then not text to be predicted.
    kept = [(t, len(d)) for t, d in zip(tokens, documents) if len(t.ids)]
    if not kept:
      raise DataError(f'{self.label}.path: the tokenizer finds no tokens in the text of {self.path!r}')
    rows = _PACKINGS[self.packing]([t for t, _ in kept], self.tokenizer, self.seq_len)
    return _Corpus(rows, len(kept), sum(n for _, n in kept))

  def _read_documents(self) -> list[bytes]:
    where = f'{self.label}.path'
    files = find_files(self.path, where)
    by_file = self.split_by == 'file' or (self.split_by == 'auto' and len(files) >= _MANY_FILES)
    if self.split and by_file:
      names = relative_names(files)
      files = [f for f, n in zip(files, names) if split_of_name(n, self.heldout_fraction) == self.split]
      if not files:
        raise DataError(
          f"{where}: none of {len(names)} files is in split '{self.split}'; set split_by to 'position', or give a path "
          'for each split'
        )
    contents = [self._read(f, where) for f in files]
    if not any(contents):
      what = f'{files[0]} is' if len(files) == 1 else f'all {len(files)} files of {self.path!r} are'
      raise DataError(f'{where}: {what} empty')
    if self.split and not by_file:
      contents = [split_of_content(c, self.split, self.heldout_fraction) for c in contents]
    if self.document_separator is not None:
      separator = self.document_separator.encode()
      contents = [d for c in contents for d in c.split(separator)]
    documents = [d for d in contents if d]
    if not documents:
      raise DataError(f"{where}: {self.path!r} has no text in split '{self.split}'; set a larger heldout_fraction")
    return documents

  def _read(self, file: str, where: str) -> bytes:
    data = read_file(file, where)
    if not self.tokenizer.is_byte_level:
      try:
        data.decode()
      except UnicodeDecodeError as e:
        raise DataError(f'{where}: {file} is not UTF-8 text: byte {e.start} is 0x{data[e.start]:02x}') from None
    return data
