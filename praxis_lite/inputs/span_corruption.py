"""Span corruption: text with missing spans as sources, and the spans as targets (T5, Raffel et al., 2020).

    text      a b c d e f g h i j
    source    a b <0> e f g <1> i j $     sentinels <0>, <1>, ... replace the missing spans; $ ends both
    target    <0> c d <1> h $

A row has L tokens of text, its source S tokens, and its target T tokens:

    noise = round(L noise_density)          spans = round(noise / mean_span_length)
    S     = L - noise + spans + 1           T     = noise + spans + 1
"""

from __future__ import annotations

import zlib

import numpy as np

from praxis_lite.common.errors import ConfigError, check_choice, check_range
from praxis_lite.inputs.random_access import uniform
from praxis_lite.inputs.rows import Rows, Struct, blank_rows
from praxis_lite.inputs.source_target import source_target_struct, write_pair
from praxis_lite.inputs.text import TextInput

_STREAM = zlib.crc32(b'spans')


class SpanCorruptionInput(TextInput):
  """Text files as pairs: a text with missing spans, and the spans. Batches look like those of `SourceTargetInput`.

  Each epoch draws other spans for a row. With 15 % noise in spans of 3 tokens on average, 568 tokens of text become a
  source of 512 tokens and a target of 114 tokens, the sizes with which T5 was trained.

  Attributes: those of `TextInput`, where `packing` must be 'concat' or 'windows', and
    seq_len: L, tokens of text in a row, from which `source_len` and `target_len` follow.
    noise_density: the share of the tokens that are missing from the source.
    mean_span_length: the mean number of tokens of a missing span.
    first_sentinel: the id of the first sentinel; the next ones count down from it, as in T5's vocabulary. None puts
      them after the ids of the tokenizer, which makes `vocab_size` larger than the tokenizer's.
    start_id: see `SourceTargetInput`.
  """

  noise_density: float = 0.15
  mean_span_length: float = 3.0
  first_sentinel: int | None = None
  start_id: int | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    check_choice(f'{self.label}.packing', self.packing, ('concat', 'windows'))
    self.check_at_least(seq_len=2)
    check_range(f'{self.label}.noise_density', self.noise_density, above=0, below=1)
    check_range(f'{self.label}.mean_span_length', self.mean_span_length, least=1)
    if self.first_sentinel is not None and self.first_sentinel < self._counts(self.seq_len)[1]:
      raise ConfigError(
        f'{self.label}.first_sentinel: rows have {self._counts(self.seq_len)[1]} spans, and their sentinels count down '
        f'from {self.first_sentinel}'
      )

  def _counts(self, length: int) -> tuple[int, int]:
    """Returns the numbers of missing tokens and of spans for a text of `length` tokens."""
    noise = min(max(round(length * self.noise_density), 1), max(length - 1, 1))
    return noise, min(max(round(noise / self.mean_span_length), 1), noise, max(length - noise, 1))

  @property
  def source_len(self) -> int:
    """S, tokens of a row of sources."""
    noise, spans = self._counts(self.seq_len)
    return self.seq_len - noise + spans + 1

  @property
  def target_len(self) -> int:
    """T, tokens of a row of targets."""
    return sum(self._counts(self.seq_len)) + 1

  @property
  def sentinel(self) -> int:
    """The id of the first sentinel."""
    if self.first_sentinel is not None:
      return self.first_sentinel
    return self.tokenizer.vocab_size + self._counts(self.seq_len)[1] - 1

  @property
  def vocab_size(self) -> int:
    return max(self.tokenizer.vocab_size, self.sentinel + 1)

  @property
  def first_id(self) -> int:
    """The token that the decoder reads first."""
    return self.tokenizer.special_ids[2] if self.start_id is None else self.start_id

  @property
  def source_end_id(self) -> int:
    """The token that ends each source."""
    return self.tokenizer.special_ids[1]

  def example_struct(self) -> Struct:
    return source_target_struct(self.source_len, self.target_len)

  def longest_segments(self) -> dict[str, int]:
    noise, spans = self._counts(self._longest_segment)
    return {'source_segment_pos': self._longest_segment - noise + spans + 1, 'segment_pos': noise + spans + 1}

  def rows_at(self, epoch: int, places: np.ndarray) -> Rows:
    texts = super().rows_at(epoch, places)
    _, eos, pad = self.tokenizer.special_ids
    batch = blank_rows(len(places), self.example_struct(), pad)
    first = (epoch * self.num_examples + places) * 2 * self.seq_len
    for row, at in enumerate(first.astype(np.int64)):
      tokens = texts['labels'][row, texts['weights'][row] > 0]
      random = uniform((self.seed, _STREAM), at + np.arange(2 * self.seq_len)).reshape(2, -1)
      source, target = self._corrupt(tokens, random)
      write_pair(batch, row, (0, 0), 1, [*source, eos], [self.first_id, *target, eos])
    return batch

  def _corrupt(self, tokens: np.ndarray, random: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source and the target of a text, both without end tokens.

    The random numbers `random`, [2, L], decide where the spans are.
    """
    noise, spans = self._counts(len(tokens))
    kept = partition(len(tokens) - noise, spans, random[0])
    lost = partition(noise, spans, random[1])
    source: list[np.ndarray] = []
    target: list[np.ndarray] = []
    at = 0
    for number, (before, missing) in enumerate(zip(kept, lost)):
      sentinel = np.array([self.sentinel - number])
      source += [tokens[at : at + before], sentinel]
      target += [sentinel, tokens[at + before : at + before + missing]]
      at += before + missing
    return np.concatenate(source), np.concatenate(target)


def partition(total: int, parts: int, random: np.ndarray) -> np.ndarray:
  """Returns the sizes, [parts], of a random split of `total` into parts of at least 1; all splits are equally probable.

  If `total` is 0, there is one part, of size 0. `random` has at least `total` - 1 independent numbers.
  """
  cuts = np.sort(np.argsort(random[: max(total - 1, 0)], kind='stable')[: parts - 1]) + 1
  return np.diff(np.concatenate([[0], cuts, [total]]))
