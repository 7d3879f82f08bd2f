"""Packs the tokens of documents into rows of equal length.

B batch, T length of a row. A row consists of segments, each a range of consecutive tokens of one document:

    tokens     ^ a b c d e $ ^ f g $           ^ begins and $ ends a document; T = 4

    packed     ids     ^ a b c | d e ^ f |         labels  a b c d | e $ f g |      tokens attend only to their document
               segment 1 1 1 1 | 1 1 2 2 |

    concat     ids     ^ a b c | d e $ f | g       labels  a b c d | e $ f g | $    one stream, each row is segment 1

    windows    ids     b c d e | d e $ f         labels  c d e $ | e $ f g          rows from any position of the stream

Except in windows, every token of every document, including its end token, is a label exactly once. Documents longer
than T are split. The tokens are stored once, in the smallest dtype; rows are built from them on request.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence

import numpy as np

from praxis_lite.common.errors import DataError
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.rows import Rows, rows_of_tokens
from praxis_lite.inputs.tokenizers import BaseTokenizer, Tokens

# A row is too long if it has more than `_LONG_ROW` tokens, and more than `_MOST_COPIES` times the tokens of the data.
_LONG_ROW = 8192
_MOST_COPIES = 16


def check_row_length(field: str, seq_len: int, num_tokens: int) -> None:
  """Raises a DataError if a row is much longer than all of the data together, so that it would be mostly padding.

  Only data for training is checked. Held-out data has rows of the same length, and may have only a few examples.
  """
  if seq_len > max(_LONG_ROW, _MOST_COPIES * num_tokens):
    raise DataError(
      f'{field} = {seq_len}: all of the data has {number_of(num_tokens, "token")}, so nearly the whole row would be '
      f'padding; set at most {num_tokens}'
    )


@dataclasses.dataclass(frozen=True)
class PackedRows:
  """Rows that consist of segments of a stream of tokens."""

  tokens: np.ndarray  # [N] The ids of a segment are tokens[s : s + n], its labels tokens[s + 1 : s + n + 1].
  num_bytes: np.ndarray | None  # [N] The bytes of text that each token represents; None if not known.
  starts: np.ndarray  # [S] s of each of the S segments.
  lengths: np.ndarray  # [S] n of each segment.
  offsets: np.ndarray  # [S] The position of each segment in its row.
  row_splits: np.ndarray  # [R + 1] Row r of the R rows has segments row_splits[r], ..., row_splits[r + 1] - 1.
  seq_len: int  # T.
  pad_id: int  # The id of padding, which fills the unused ends of rows.

  def __len__(self) -> int:
    return len(self.row_splits) - 1

  def rows(self, indices: np.ndarray) -> Rows:
    """Returns the rows with these indices, [B], as a batch for a language model, each array [B, T]; see `TextInput`."""
    first = self.row_splits[indices]
    counts = self.row_splits[indices + 1] - first
    if (counts == 1).all() and (self.lengths[first] == self.seq_len).all():
      return self.windows(self.starts[first])
    number = _ranges(counts)
    segments = np.repeat(first, counts) + number
    lengths = self.lengths[segments]
    position = _ranges(lengths)
    source = np.repeat(self.starts[segments], lengths) + position
    row_begin = np.repeat(np.arange(len(indices)) * self.seq_len, counts)
    target = np.repeat(row_begin + self.offsets[segments], lengths) + position

    def scatter(values: np.ndarray, fill: int, dtype: str) -> np.ndarray:
      out = np.full(len(indices) * self.seq_len, fill, dtype)
      out[target] = values
      return out.reshape(len(indices), self.seq_len)

    batch = {
      'ids': scatter(self.tokens[source], self.pad_id, 'int32'),
      'labels': scatter(self.tokens[source + 1], self.pad_id, 'int32'),
      'weights': scatter(np.ones(1), 0, 'float32'),
      'segment_ids': scatter(np.repeat(number + 1, lengths), 0, 'int32'),
      'segment_pos': scatter(position, 0, 'int32'),
    }
    if self.num_bytes is not None:
      batch['bytes'] = scatter(self.num_bytes[source + 1], 0, 'float32')
    return batch

  def windows(self, starts: np.ndarray) -> Rows:
    """Returns a batch like `rows` does: for each s in `starts`, [B], a row with the ids tokens[s : s + T]."""
    source = starts[:, None] + np.arange(self.seq_len + 1)
    batch = rows_of_tokens(self.tokens[source].astype(np.int32))
    if self.num_bytes is not None:
      batch['bytes'] = self.num_bytes[source[:, 1:]].astype(np.float32)
    return batch


def pack_documents(documents: Sequence[Tokens], tokenizer: BaseTokenizer, seq_len: int) -> PackedRows:
  """Packs pieces of documents into rows by best fit, longest first. Each segment is a piece of one document."""
  bos, eos, pad = tokenizer.special_ids
  tokens, num_bytes = _join(documents, [bos], [eos], [], tokenizer.vocab_size)
  sizes = np.array([len(d.ids) + 1 for d in documents], np.int64)  # labels: the document and its end token
  begins = np.cumsum(sizes + 1) - (sizes + 1)
  pieces = -(-sizes // seq_len)
  number = _ranges(pieces)
  starts = np.repeat(begins, pieces) + number * seq_len
  lengths = np.minimum(np.repeat(sizes, pieces) - number * seq_len, seq_len)

  row = best_fit_rows(lengths, seq_len)
  # Sort the rows by their first segment, so that without shuffling they follow the order of the documents.
  _, first_of_row = np.unique(row, return_index=True)
  row = np.argsort(np.argsort(first_of_row))[row]
  order = np.argsort(row, kind='stable')
  starts, lengths = starts[order], lengths[order]
  row_splits = np.concatenate([[0], np.cumsum(np.bincount(row))])
  ends = np.cumsum(lengths)
  row_begins = (ends - lengths)[row_splits[:-1]]
  offsets = ends - lengths - np.repeat(row_begins, np.diff(row_splits))
  return PackedRows(tokens, num_bytes, starts, lengths, offsets, row_splits, seq_len, pad)


def concat_documents(documents: Sequence[Tokens], tokenizer: BaseTokenizer, seq_len: int) -> PackedRows:
  """Cuts the stream of all documents, each followed by the end token, into rows of one segment."""
  bos, eos, pad = tokenizer.special_ids
  tokens, num_bytes = _join(documents, [], [eos], [bos], tokenizer.vocab_size)
  starts = np.arange(0, len(tokens) - 1, seq_len)
  lengths = np.minimum(len(tokens) - 1 - starts, seq_len)
  row_splits = np.arange(len(starts) + 1)
  return PackedRows(tokens, num_bytes, starts, lengths, np.zeros_like(starts), row_splits, seq_len, pad)


PACKINGS = {'concat': concat_documents, 'packed': pack_documents}


def pack_prompts(prompts: Sequence[Sequence[int]], row_length: int | None = None) -> tuple[Rows, np.ndarray]:
  """Packs prompts into rows, so that a language model reads them with little padding before it continues them.

      batch, place = pack_prompts(prompts)
      ids = trained.decode(batch)['ids']                    # [R, S, M]
      ids = ids.reshape(-1, ids.shape[-1])[place]           # [n, M], in the order of the prompts

  n prompts, R rows, S prompts in a row, P tokens of the longest prompt, T tokens in a row of the prefill, M new tokens.

  Args:
    prompts: the tokens of each prompt, at least one.
    row_length: T; None means P.

  Returns:
    The batch for `LanguageModel.decode`, and the index of each prompt among the R S results, [n]. The batch has `ids`,
    [R, S P]; `prompt_lengths`, [R, S], 0 where a row has fewer than S prompts; and `packing`, [R, T], the position of
    each token of the prefill in its row of `ids`, -1 for padding.

  Raises:
    DataError: there is no prompt, one is empty, or one is longer than T.
  """
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if not lengths.size:
    raise DataError('pack_prompts: there are no prompts; expected at least one')
  if not lengths.min():
    raise DataError('pack_prompts: expected prompts of at least one token each')
  longest = int(lengths.max())
  T = longest if row_length is None else row_length
  if longest > T:
    raise DataError(f'pack_prompts: a prompt has {longest} tokens, more than row_length, {T}')
  row = best_fit_rows(lengths, T)
  R, S = int(row.max()) + 1, int(np.bincount(row).max())
  ids, of_prompts = np.zeros((R, S, longest), np.int32), np.zeros((R, S), np.int32)
  packing, taken = np.full((R, T), -1, np.int32), np.zeros((R, 2), np.int32)  # taken: prompts and tokens of each row
  place = np.empty(len(lengths), np.int64)
  for i, (prompt, r) in enumerate(zip(prompts, row.tolist())):
    (s, start), length = taken[r], len(prompt)
    ids[r, s, :length], of_prompts[r, s] = _to_ids(prompt), length
    packing[r, start : start + length] = s * longest + np.arange(length)
    taken[r] += 1, length
    place[i] = r * S + s
  return {'ids': ids.reshape(R, -1), 'prompt_lengths': of_prompts, 'packing': packing}, place


def _to_ids(prompt: Sequence[int]) -> np.ndarray:
  try:
    return np.asarray(prompt, np.int32)
  except (OverflowError, TypeError, ValueError) as error:
    raise DataError(f'pack_prompts: expected prompts of ids, int32, got {reprlib.repr(prompt)}') from error


def best_fit_rows(lengths: np.ndarray, capacity: int) -> np.ndarray:
  """Returns the row of each piece, [n]. Each piece, longest first, goes to the fullest row in which it fits.

  Best-fit decreasing uses at most 11/9 of the fewest possible rows, plus one (Johnson, 1973). `lengths`, [n], are in
  1..capacity.
  """
  row = np.empty(len(lengths), np.int64)
  full = lengths == capacity
  next_row = int(full.sum())
  row[full] = np.arange(next_row)
  with_room: dict[int, list[int]] = {}  # room -> rows that have it
  rooms = 0  # Bit r is set if some row has room for exactly r tokens.
  rest = np.flatnonzero(~full)
  rest = rest[np.argsort(-lengths[rest], kind='stable')]
  for i, length in zip(rest.tolist(), lengths[rest].tolist()):
    suffices = rooms >> length
    if suffices:
      room = length + (suffices & -suffices).bit_length() - 1
      rows = with_room[room]
      chosen = rows.pop()
      if not rows:
        rooms &= ~(1 << room)
    else:
      room, chosen = capacity, next_row
      next_row += 1
    row[i] = chosen
    if left := room - length:
      with_room.setdefault(left, []).append(chosen)
      rooms |= 1 << left
  return row


def _join(
  documents: Sequence[Tokens], before: list[int], after: list[int], first: list[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray | None]:
  """Joins documents to one stream of tokens, [N]: `first`, then each document between `before` and `after`.

  Returns the stream, and the numbers of bytes of its tokens, [N], or None if the documents do not have such numbers.
  """

  def join(values: Sequence[np.ndarray], dtype: np.dtype, *special: list[int]) -> np.ndarray:
    start, head, tail = (np.array(ids, dtype) for ids in special)
    # Converts to the small dtype in one pass, so that at most two copies of a large corpus exist at a time.
    return np.concatenate([start, *(x for v in values for x in (head, v, tail))], dtype=dtype, casting='unsafe')

  for ids in (*(d.ids for d in documents), *map(np.asarray, (before, after, first))):
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
      raise DataError(f'the tokenizer gives ids from {ids.min()} to {ids.max()}, and its vocab_size is {vocab_size}')
  tokens = join([d.ids for d in documents], np.min_scalar_type(vocab_size - 1), first, before, after)
  counts = [d.num_bytes for d in documents if d.num_bytes is not None]
  no_bytes = [[0] * len(ids) for ids in (first, before, after)]
  return tokens, join(counts, np.dtype(np.int32), *no_bytes) if counts else None


def _ranges(counts: np.ndarray) -> np.ndarray:
  """Returns 0, ..., counts[0] - 1, 0, ..., counts[1] - 1, and so on, in one array."""
  ends = np.cumsum(counts)
  return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
