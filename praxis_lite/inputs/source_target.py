"""Pairs of a source and a target text as batches for an encoder-decoder.

A batch of `SourceTargetInput` has `source_ids`, `source_segment_ids` and `source_segment_pos`, [B, S] int32; and `ids`,
`labels`, `segment_ids` and `segment_pos`, [B, T] int32, and `weights`, [B, T] float32. Segment 0 is padding. A target
ends with the end token, and the decoder reads it after the start token:

    pair      'ab' -> 'xyz'
    source    a b                    as the tokenizer encodes a prompt, so that decoding reads what training has read
    ids       ^ x y z                ^ starts and $ ends a target
    labels    x y z $

With `packed`, a row holds as many pairs as fit on both sides, numbered by segment:

    source    a b c d e .    segments  1 1 2 2 2 0
    labels    x $ y z $ .    segments  1 1 2 2 2 0
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import DataError
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.lines import pair_parsers
from praxis_lite.inputs.rows import Rows, Struct
from praxis_lite.inputs.text_examples import TextExamplesInput

Pairs = Sequence[tuple[str, str]]
_OPEN_ROWS = 64  # The number of incomplete rows in which packing looks for room.


class _Pair(NamedTuple):
  """The tokens of a source, and the tokens of a target without start and end tokens."""

  source: np.ndarray
  target: np.ndarray


def source_target_struct(source_len: int, target_len: int) -> Struct:
  """Returns the struct of a row of pairs."""
  sides = {'source_ids': source_len, 'source_segment_ids': source_len, 'source_segment_pos': source_len}
  sides |= dict.fromkeys(('ids', 'labels', 'segment_ids', 'segment_pos'), target_len)
  struct = {name: jax.ShapeDtypeStruct((length,), np.int32) for name, length in sides.items()}
  return struct | {'weights': jax.ShapeDtypeStruct((target_len,), np.float32)}


def write_pair(
  batch: Rows, row: int, at: tuple[int, int], segment: int, source: Sequence[int], target: Sequence[int]
) -> tuple[int, int]:
  """Writes a pair into a row; returns the positions after its source and after its target.

  Args:
    batch, row: the batch, in the form above, and the number of the row.
    at: the positions in the row where source and target begin.
    segment: number of the pair in the row, from 1.
    source: the tokens of the source.
    target: a start token, the tokens of the target, and an end token.
  """
  sides = {'source_': slice(at[0], at[0] + len(source)), '': slice(at[1], at[1] + len(target) - 1)}
  for side, places in sides.items():
    batch[f'{side}segment_ids'][row, places] = segment
    batch[f'{side}segment_pos'][row, places] = np.arange(places.stop - places.start)
  batch['source_ids'][row, sides['source_']] = source
  for name, values in (('ids', target[:-1]), ('labels', target[1:]), ('weights', 1)):
    batch[name][row, sides['']] = values
  return sides['source_'].stop, sides[''].stop


class SourceTargetInput(TextExamplesInput):
  """Pairs of texts, from TSV or JSON Lines files or from a function.

  Attributes: the same as for `TextExamplesInput`, and
    pairs: instead of `path`, pairs (source, target), or a function (or the `Config` of one) that returns them.
    source_len: S, tokens of a row of sources.
    target_len: T, tokens of a row of targets; a target of n tokens needs n + 1.
    fields: the names of source and target in the objects of JSON Lines.
    start_id: the token that the decoder reads first, which must equal `EncoderDecoderModel.start_id`; None means the
      tokenizer's padding.
    end_sources: whether sources end with the end token too, as in T5. `EncoderDecoderModel.source_end_id` must then be
      this token.
    packed: whether a row may hold several pairs.
    truncate: whether to cut sources and targets that are too long, instead of treating them as bad records.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, or there are no pairs. Unless `on_bad_record` is 'skip', also if
      a line is not a pair, is not UTF-8, has an empty side, or is too long.
  """

  pairs: Pairs | Callable[[], Pairs] | Config | None = None
  source_len: int = REQUIRED
  target_len: int = REQUIRED
  fields: tuple[str, str] = ('source', 'target')
  start_id: int | None = None
  end_sources: bool = False
  packed: bool = False
  truncate: bool = False

  _given = 'pairs'

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(source_len=1, target_len=2)

  @property
  def first_id(self) -> int:
    """The token that the decoder reads first."""
    return self.tokenizer.special_ids[2] if self.start_id is None else self.start_id

  @property
  def source_end_id(self) -> int | None:
    """The token that ends each source; None if sources have no end token."""
    return self.tokenizer.special_ids[1] if self.end_sources else None

  @property
  def num_pairs(self) -> int:
    """Pairs in an epoch."""
    return len(self._pairs)

  @property
  def num_examples(self) -> int:
    return len(self._rows)

  def example_struct(self) -> Struct:
    return source_target_struct(self.source_len, self.target_len)

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'packed': self.packed}

  def longest_segments(self) -> dict[str, int]:
    sources, targets = zip(*((len(source), len(target) + 1) for source, target in self._pairs))
    return {'source_segment_pos': max(sources), 'segment_pos': max(targets)}

  def rows(self, indices: np.ndarray) -> Rows:
    batch, eos = self.blank_rows(len(indices)), self.tokenizer.special_ids[1]
    for row, index in enumerate(indices):
      at = 0, 0
      for segment, number in enumerate(self._rows[index], 1):
        source, target = self._pairs[number]
        at = write_pair(batch, row, at, segment, source, [self.first_id, *target, eos])
    return batch

  @functools.cached_property
  def _rows(self) -> list[list[int]]:
    """For each row, the indices of its pairs."""
    if not self.packed:
      return [[number] for number in range(len(self._pairs))]
    sizes = [(len(source), len(target) + 1) for source, target in self._pairs]
    return pack_pairs(sizes, (self.source_len, self.target_len))

  @functools.cached_property
  def _pairs(self) -> list[_Pair]:
    return self._encode_all(
      self.fields, pair_parsers('a source and a target'), self._encode, 'pairs of a source and a target'
    )

  def _forms(self) -> tuple[str, str]:
    return 'pairs (source, target)', 'two texts'

  def _is_example(self, values: object) -> bool:
    return isinstance(values, tuple | list) and len(values) == 2 and all(isinstance(text, str) for text in values)

  def _encode(self, texts: Sequence[str]) -> _Pair:
    """Returns the tokens of a pair; raises DataError if the pair cannot be used."""
    source, target = self.tokenizer.prompt_ids(texts[0]), self.tokenizer.encode(texts[1])
    end = [] if self.source_end_id is None else [self.source_end_id]
    limits = (('source', source, self.source_len - len(end)), ('target', target, self.target_len - 1))
    for name, ids, most in limits:
      if not ids:
        raise DataError(f'the {name} has no tokens')
      if len(ids) > most and not self.truncate:
        raise DataError(
          f'the {name} has {number_of(len(ids), "token")}, and {name}_len = {getattr(self, f"{name}_len")} '
          f'has room for {most}; set a larger one, or truncate=True'
        )
    (_, source, most), (_, target, most_of_target) = limits
    dtype = np.min_scalar_type(self.vocab_size - 1)
    return _Pair(np.asarray([*source[:most], *end], dtype), np.asarray(target[:most_of_target], dtype))


def pack_pairs(sizes: Sequence[tuple[int, ...]], room: tuple[int, ...], most: int | None = None) -> list[list[int]]:
  """Returns, for each row, the indices of its pairs; each pair is in one row.

  The pairs are taken in order. A pair goes to the fullest open row that has room for all of its sides, or else to a new
  row. At most `_OPEN_ROWS` rows are open: the rows with the least room are closed.

  Args:
    sizes: for each pair, the number of tokens of each side; none exceeds the side's `room`.
    room: the number of tokens for which each side of a row has room.
    most: the largest number of pairs in a row; None sets no limit.
  """
  rows: list[list[int]] = []
  open_rows: list[tuple[tuple[int, ...], int]] = []  # The free tokens of each side of a row, and the row's number.
  for number, sides in enumerate(sizes):
    fits = [entry for entry in open_rows if all(left >= size for left, size in zip(entry[0], sides))]
    if fits:
      chosen = min(fits, key=lambda entry: (sum(entry[0]), entry[1]))
      open_rows.remove(chosen)
    else:
      chosen = room, len(rows)
      rows.append([])
    row = rows[chosen[1]]
    row.append(number)
    rest = tuple(left - size for left, size in zip(chosen[0], sides))
    if min(rest) > 0 and (most is None or len(row) < most):
      open_rows.append((rest, chosen[1]))
    if len(open_rows) > _OPEN_ROWS:
      open_rows.remove(min(open_rows, key=lambda entry: (min(entry[0]), entry[1])))
  return rows
