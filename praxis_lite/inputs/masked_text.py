"""Masked text: some tokens of each row are hidden, and the model predicts them (BERT, Devlin et al., 2019).

    labels    ^ a b c d e f g h $      ^ begins and $ ends a row
    ids       ^ a b ? d e f x h $      most chosen tokens become the mask ?, some another token, some stay
    weights   0 0 0 1 0 1 0 1 0 0      1 at chosen positions

Of n text tokens in a row, max(1, round(n mask_rate)) are chosen. Padding and control tokens, such as ends of documents,
are never chosen. A row has T tokens of a vocabulary of V.
"""

from __future__ import annotations

import functools
import zlib

import numpy as np

from praxis_lite.common.errors import ConfigError, check_range
from praxis_lite.inputs.random_access import uniform
from praxis_lite.inputs.rows import Rows, Struct, blank_rows, token_struct
from praxis_lite.inputs.text import TextInput

_STREAM = zlib.crc32(b'masks')


class MaskedTextInput(TextInput):
  """Text files as rows for a `MaskedLanguageModel`; each epoch chooses other positions of a row.

  A batch has `ids`, `labels`, `segment_ids`, `segment_pos`, int32, and `weights`, float32, all [B, `row_len`].

  Attributes: those of `TextInput`, and
    seq_len: text tokens in a row, to which a row adds a begin and an end token. With `packing='packed'`, it is the
      number of all tokens in a row, and each document begins with the begin token.
    mask_rate: the share of the tokens that are chosen.
    mask_share, random_share: the shares of the chosen tokens that become the mask, and that become a random token; the
      others stay.
    whole_words: choose whole words. A word with more tokens than are still to be chosen is left out, unless no word
      fits.
    mask_id: the id of the mask; None uses the tokenizer's mask. If the tokenizer has none, the mask gets the id after
      the tokenizer's ids, so `vocab_size` is larger by 1.
  """

  mask_rate: float = 0.15
  mask_share: float = 0.8
  random_share: float = 0.1
  whole_words: bool = False
  mask_id: int | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    check_range(f'{self.label}.mask_rate', self.mask_rate, above=0, below=1)
    shares = self.mask_share, self.random_share
    if min(shares) < 0 or sum(shares) > 1 + 1e-9:
      raise ConfigError(
        f'{self.label}.mask_share: expected shares of at least 0 that together are at most 1, got {self.mask_share}, '
        f'and random_share = {self.random_share}'
      )
    if self.mask_id is not None:
      self.check_at_least(mask_id=0)

  @property
  def row_len(self) -> int:
    """T, tokens of a row."""
    return self.seq_len if self.packing == 'packed' else self.seq_len + 2

  @property
  def mask(self) -> int:
    """The id of the mask token: `mask_id`, or the tokenizer's, or the first id after its vocabulary."""
    if self.mask_id is not None:
      return self.mask_id
    own = self.tokenizer.mask_id
    return self.tokenizer.vocab_size if own is None else own

  @property
  def vocab_size(self) -> int:
    return max(self.tokenizer.vocab_size, self.mask + 1)

  def example_struct(self) -> Struct:
    return token_struct(self.row_len)

  def rows_at(self, epoch: int, places: np.ndarray) -> Rows:
    batch = self._whole_rows(super().rows_at(epoch, places))
    first = (epoch * self.num_examples + places).astype(np.int64) * 3 * self.row_len
    for row, at in enumerate(first):
      random = uniform((self.seed, _STREAM), at + np.arange(3 * self.row_len)).reshape(3, -1)
      labels, is_token = batch['labels'][row], batch['segment_ids'][row] > 0
      may = is_token & ~self._is_control[labels]
      starts = self._starts_word[labels] | (batch['segment_pos'][row] == 0) if self.whole_words else may
      chosen = self._choose(may, starts, random[0])
      batch['weights'][row] = chosen
      # The second row of random numbers decides between mask, random token and label; the third draws random tokens.
      tokens = self._text_ids[np.floor(random[2] * len(self._text_ids)).astype(np.int64)]
      others = np.where(random[1] < self.mask_share + self.random_share, tokens, labels)
      batch['ids'][row] = np.where(chosen, np.where(random[1] < self.mask_share, self.mask, others), labels)
    return batch

  @property
  def _longest_segment(self) -> int:
    return super()._longest_segment + self.row_len - self.seq_len

  def _whole_rows(self, texts: Rows) -> Rows:
    """Returns rows without masks, given rows of a `TextInput`."""
    if self.packing == 'packed':
      names = ('ids', 'segment_ids', 'segment_pos', 'weights')
      return {name: texts[name] for name in names} | {'labels': texts['ids'].copy()}
    bos, eos, pad = self.tokenizer.special_ids
    batch = blank_rows(len(texts['ids']), self.example_struct(), pad)
    for row, is_text in enumerate(texts['weights'] > 0):
      tokens = texts['labels'][row, is_text]
      batch['labels'][row, : len(tokens) + 2] = [bos, *tokens, eos]
      batch['segment_ids'][row, : len(tokens) + 2] = 1
      batch['segment_pos'][row, : len(tokens) + 2] = np.arange(len(tokens) + 2)
    batch['ids'][:] = batch['labels']
    return batch

  @functools.cached_property
  def _is_control(self) -> np.ndarray:
    """Whether each id is a control token, not text, [V] bool."""
    out = np.zeros(self.vocab_size, bool)
    out[[*self.tokenizer.control_ids, self.mask]] = True
    return out

  @functools.cached_property
  def _text_ids(self) -> np.ndarray:
    """The ids of tokens of text, from which random tokens are drawn."""
    return np.flatnonzero(~self._is_control[: self.tokenizer.vocab_size])

  @functools.cached_property
  def _starts_word(self) -> np.ndarray:
    return np.pad(self.tokenizer.word_starts(), (0, self.vocab_size - self.tokenizer.vocab_size), constant_values=True)

  def _choose(self, may: np.ndarray, starts: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Returns which positions of a row are chosen, [T] bool.

    Args:
      may: [T] bool, whether a position may be chosen.
      starts: [T] bool, whether the token at a position begins a word.
      random: [T] random numbers; positions with the smallest numbers are chosen.
    """
    chosen, places = np.zeros(len(may), bool), np.flatnonzero(may)
    count = left = max(round(len(places) * self.mask_rate), 1)
    if not self.whole_words:
      chosen[places[np.argsort(random[places], kind='stable')[:count]]] = True
      return chosen
    starts = starts | np.concatenate([[True], ~may[:-1]])  # A token that may not be chosen ends a word.
    words = [word for word in np.split(places, np.flatnonzero(starts[places])) if len(word)]
    words.sort(key=lambda word: random[word[0]])
    for word in words:
      if len(word) <= left:
        chosen[word] = True
        left -= len(word)
    if words and left == count:
      chosen[words[0]] = True
    return chosen
