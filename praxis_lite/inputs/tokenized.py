"""TokenizedInput: rows of tokens that `praxis-lite tokenize` has written to ArrayRecord files.

A record is a `tf.train.Example` of integers. Its row has T ids, in S segments of consecutive tokens of the text:

    tokens      [sum of lengths + S]   the ids of each segment, and the label of its last id
    lengths     [S]                    the number of ids of each segment
    num_bytes   like tokens            the bytes of text of each token; not for a byte-level tokenizer
    row         [2]                    T, and the id of padding
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from praxis_lite.common.config import REQUIRED, Config, build_at
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.files import user_path
from praxis_lite.inputs.grain_input import ArrayRecordInput
from praxis_lite.inputs.packing import PACKINGS, PackedRows
from praxis_lite.inputs.rows import Rows
from praxis_lite.inputs.shard_folders import ShardFolder, read_shard_folder
from praxis_lite.inputs.tf_example import features_of_example, serialized_example
from praxis_lite.inputs.tokenizers import BaseTokenizer, Tokens

FORMAT = 'array_record'
_SAMPLE = (
  'The quick brown fox, 1234567890.\n\tif x[0] != "a": return {}\nÄrger, naïve, Ελλάδα, Москва, 東京, नमस्ते, 🙂\n'
)


def token_records(documents: Sequence[Tokens], tokenizer: BaseTokenizer, seq_len: int, packing: str) -> Iterator[bytes]:
  """Yields the records of rows of T = `seq_len` tokens, packed from the tokens of documents; see `TextInput.packing`.

  Documents without tokens are left out.
  """
  if not (kept := [document for document in documents if len(document.ids)]):
    return
  packed = PACKINGS[packing](kept, tokenizer, seq_len)
  for row in range(len(packed)):
    yield serialized_example(_stored_row(packed, row))


def _stored_row(packed: PackedRows, row: int) -> dict[str, np.ndarray]:
  segments = slice(*packed.row_splits[row : row + 2])
  starts, lengths = packed.starts[segments], packed.lengths[segments]
  places = np.concatenate([np.arange(start, start + length + 1) for start, length in zip(starts, lengths)])
  stored = {'tokens': packed.tokens[places], 'lengths': lengths, 'row': np.array([packed.seq_len, packed.pad_id])}
  return stored if packed.num_bytes is None else {**stored, 'num_bytes': packed.num_bytes[places]}


def read_token_row(record: bytes) -> Rows:
  """Returns the row that a record holds: the arrays of a row of `TextInput`, each [T].

  Raises DataError if `praxis-lite tokenize` did not write the record.
  """
  stored = features_of_example(record, 'tokens')
  try:
    tokens, lengths, (T, pad) = (stored[name].astype(np.int64) for name in ('tokens', 'lengths', 'row'))
    ends = np.cumsum(lengths + 1)
    used = int(lengths.sum())
    if not len(lengths) or lengths.min() < 1 or used > T or len(tokens) != ends[-1]:
      raise ValueError(f'{len(tokens)} tokens in segments of {lengths.tolist()} do not make a row of {T}')
    offsets, splits = np.cumsum(lengths) - lengths, np.array([0, len(lengths)])
    num_bytes = stored.get('num_bytes')
    packed = PackedRows(tokens, num_bytes, ends - lengths - 1, lengths, offsets, splits, int(T), int(pad))
    return {name: x[0] for name, x in packed.rows(np.array([0])).items()}
  except (KeyError, ValueError, IndexError, TypeError) as error:
    raise DataError(f'the record is no row that `praxis-lite tokenize` wrote: {error}') from None


def tokenizer_settings(tokenizer: BaseTokenizer) -> dict[str, Any]:
  """Returns what tells a tokenizer from others, as JSON values: its class, its ids, and a hash of how it reads a text.

  The hash is of the ids of a sample text, so it differs between tokenizers with different tables. If the tokenizer
  cannot read the sample, the hash is of its whole table.
  """
  try:
    (sample,) = tokenizer.encode_documents([_SAMPLE.encode()])
    known = np.asarray(sample.ids, '<i8').tobytes()
  except DataError:  # Some characters are not in the vocabulary.
    known = json.dumps([tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]).encode()
  return {
    'tokenizer': type(tokenizer).__name__,
    'vocab_size': tokenizer.vocab_size,
    'special_ids': list(tokenizer.special_ids),
    'sample': hashlib.sha256(known).hexdigest()[:16],
  }


class TokenizedInput(ArrayRecordInput):
  """Rows of tokens in a folder that `praxis-lite tokenize` has written, for a language model.

  The batches have the arrays of a `TextInput`. Training shuffles over all rows; each host reads only its own.

  Attributes:
    path: the folder, in which no shard may be missing.
    tokenizer_tpl: config of the tokenizer that made the tokens, to decode them and for prompts; None if the run shall
      have none.

  Raises (when the data is first needed):
    ConfigError: Grain is not installed.
    DataError: a shard is missing or damaged, the folder is not one of `tokenize`, or `tokenizer_tpl` is another
      tokenizer than the one that made the tokens.
  """

  path: str = REQUIRED
  tokenizer_tpl: Config | None = None

  def __post_init__(self) -> None:
    if self.features is not None or self.parse_fn is not None:
      raise ConfigError(f'{self.label}: leave out features and parse_fn; the records of `tokenize` have their own')
    self.parse_fn = read_token_row
    super().__post_init__()
    self.tokenizer: BaseTokenizer | None = None
    if self.tokenizer_tpl is not None:
      self.tokenizer = build_at(f'{self.label}.tokenizer_tpl', self.tokenizer_tpl)

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    return int(self._folder.settings['vocab_size'])

  @functools.cached_property
  def files(self) -> list[str]:
    return [str(part) for part in self._folder.parts]

  def longest_segments(self) -> dict[str, int]:
    return {'segment_pos': int(self._folder.settings['seq_len'])}

  @functools.cached_property
  def _folder(self) -> ShardFolder:
    where = f'{self.label}.path: '
    folder = read_shard_folder(user_path(self.path), 'tokenize', FORMAT, where)
    own = {} if self.tokenizer is None else tokenizer_settings(self.tokenizer)
    for name, value in own.items():
      if (made := folder.settings.get(name)) != value:
        raise DataError(
          f'{self.label}.tokenizer_tpl: the tokens in {self.path} were made with another tokenizer: its {name} is '
          f'{made!r}, and here it is {value!r}; set the tokenizer with which `praxis-lite tokenize` ran'
        )
    return folder
