"""TokenizingJob: tokenizes the shards of a ledger, and writes rows of tokens to ArrayRecord files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.common.errors import DataError, first_line
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.inputs.grain_input import import_grain, write_array_record_file
from praxis_lite.inputs.text import check_text
from praxis_lite.inputs.tokenized import token_records
from praxis_lite.inputs.tokenizers import Tokens
from praxis_lite.runs.bulk.input_files import Row, read_part
from praxis_lite.runs.bulk.ledger import Ledger

_DOCUMENTS = 256  # How many documents are encoded at a time.


class TokenizingJob:
  """Tokenizes shards: `field` of an input row is a document; an output file has the rows of tokens of one shard."""

  def __init__(self, ledger: Ledger, tokenizer: BaseTokenizer, *, field: str, seq_len: int, packing: str):
    import_grain()  # Raises ConfigError if a package is missing.
    self._ledger, self._tokenizer = ledger, tokenizer
    self._field, self._seq_len, self._packing = field, seq_len, packing

  def run(self, shards: Iterable[int], check: Callable[[], object] = lambda: None) -> None:
    """Tokenizes shards, and writes each when it is finished. Calls `check` every few documents and before each write.

    Raises:
      DataError: a file has changed, or the tokenizer cannot read the document in a row.
    """
    for number in shards:
      documents, rows = list[Tokens](), list(read_part(self._ledger.plan.shards[number]))
      for start in range(0, len(rows), _DOCUMENTS):
        check()
        documents += self._encode(rows[start : start + _DOCUMENTS])
      data = _to_bytes(token_records(documents, self._tokenizer, self._seq_len, self._packing))
      check()
      self._ledger.write(number, data)

  def _encode(self, rows: Sequence[Row]) -> list[Tokens]:
    texts = [self._text_of(row) for row in rows]
    try:
      return self._tokenizer.encode_documents(texts)
    except DataError:  # Finds the row, which the message does not name.
      for row, text in zip(rows, texts):
        try:
          self._tokenizer.encode_documents([text])
        except DataError as error:
          raise DataError(f'{row.where}: {error}') from None
      raise

  def _text_of(self, row: Row) -> bytes:
    if row.values is None:
      raise DataError(f'{row.where}: {row.error}')
    text: Any = row.values.get(self._field)
    if not isinstance(text, str):
      has = ', '.join(sorted(row.values)) or 'no values'
      what = f'is {type(text).__name__}' if self._field in row.values else f'is missing: it has {has}'
      raise DataError(f'{row.where}: expected a text in {self._field!r}, which {what}; --field names another')
    try:
      data = text.encode()
    except UnicodeEncodeError as error:
      raise DataError(f'{row.where}: {self._field!r} has half a character at {error.start}') from None
    check_text(data, self._tokenizer, row.where, '--input')
    return data


class TokenCounts(NamedTuple):
  """What a finished folder has: documents of the input, and rows of tokens."""

  documents: int
  rows: int


def check_token_files(ledger: Ledger) -> TokenCounts:
  """Opens all files of a ledger, and counts their rows.

  Raises:
    DataError: a file is missing, or is no whole ArrayRecord file.
  """
  from array_record.python import array_record_module

  ledger.check_all_there()
  rows = 0
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / 'part'
    for number in range(len(ledger.plan.shards)):
      file.write_bytes(ledger.read(number))
      try:
        reader = array_record_module.ArrayRecordReader(os.fspath(file))
        rows += reader.num_records()
        reader.close()
      except (RuntimeError, ValueError, OSError) as error:
        raise DataError(
          f'{ledger.path_of(number)} is damaged: {first_line(error)}; remove the file, and start again'
        ) from None
  return TokenCounts(ledger.plan.num_rows, rows)


def _to_bytes(records: Iterable[bytes]) -> bytes:
  """Returns the content of an ArrayRecord file; the package writes only to paths."""
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / 'part'
    write_array_record_file(os.fspath(file), records)
    return file.read_bytes()
