"""Scores: computes the log-probabilities of continuations, given contexts.

A row of a batch is a context of c tokens and its continuation of n tokens. The log-probabilities of the continuation
are the ones of the labels at positions c - 1 to c + n - 2:

    ids      a b c  d e
    labels   b c d  e f          context a b c, continuation d e f

For an encoder-decoder, the context is the source, and the row begins with the start token s:

    source   a b c
    ids      s d e
    labels   d e f
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from praxis_lite.common.errors import DataError, UserError
from praxis_lite.common.figures import number_of
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.inputs.rows import Rows
from praxis_lite.models.base import ScoreLimits
from praxis_lite.runs.prompts import check_ids, encode_prompt, numbers_of_adapters, require_tokenizer
from praxis_lite.runs.records.run_config import check_count

_LEAST_LENGTH = 32


class Score(NamedTuple):
  """The log-probabilities of a continuation.

  Attributes:
    ids: the tokens of the continuation.
    log_probs: [n] float32, the log-probability of each token, in nats, given the context and the earlier tokens.
    is_greedy: whether each token is the most probable one.
  """

  ids: list[int]
  log_probs: np.ndarray
  is_greedy: bool

  @property
  def log_prob(self) -> float:
    """The log-probability of the whole continuation, in nats; 0 if it has no tokens."""
    return float(np.sum(self.log_probs, dtype=np.float64))


class _Row(NamedTuple):
  """The tokens of a context, possibly cut at its beginning, of a continuation, and of an encoder-decoder's source."""

  context: list[int]
  continuation: list[int]
  source: list[int] | None = None

  @property
  def length(self) -> int:
    return len(self.context) + len(self.continuation) - 1


def score_rows(
  limits: ScoreLimits,
  tokenizer: Callable[[], BaseTokenizer | None],
  contexts: Sequence[str] | Sequence[Sequence[int]],
  continuations: Sequence[str] | Sequence[Sequence[int]],
  batch_size: int,
  run: Callable[[Rows], dict[str, Any]],
  adapters: str | Sequence[str | None] | None = None,
  names: Sequence[str] = (),
) -> list[Score]:
  """Returns the score of each continuation.

  Args:
    tokenizer: returns the model's tokenizer or None; called only for texts and for empty contexts.
    contexts, continuations: see `TrainedModel.score`.
  """
  for name, given in (('contexts', contexts), ('continuations', continuations)):
    if isinstance(given, str):
      raise UserError(f'score: {name} is one text; expected a list, as in [{given!r}]')
    if not hasattr(given, '__len__'):
      raise UserError(f'score: {name} is {given!r}; expected a list')
  if len(contexts) != len(continuations):
    given = f'{number_of(len(contexts), "context")} and {number_of(len(continuations), "continuation")}'
    raise UserError(f'score: {given}; expected pairs')
  check_count('score: batch_size', batch_size)
  numbers = numbers_of_adapters(adapters, names, len(contexts), 'score')
  rows = [_row(i, limits, tokenizer, *pair) for i, pair in enumerate(zip(contexts, continuations))]
  scores = [Score(row.continuation, np.zeros(0, np.float32), True) for row in rows]
  order = sorted((i for i, row in enumerate(rows) if row.continuation), key=lambda i: rows[i].length)
  for first in range(0, len(order), batch_size):
    group = order[first : first + batch_size]
    batch = _batch([rows[i] for i in group], limits)
    out = run(batch if numbers is None else {**batch, 'adapters': numbers[group]})
    for i, log_probs, is_greedy in zip(group, out['log_probs'], out['is_greedy']):
      at = slice(len(rows[i].context) - 1, rows[i].length)
      scores[i] = Score(rows[i].continuation, np.array(log_probs[at]), bool(is_greedy[at].all()))
  return scores


def _row(
  number: int,
  limits: ScoreLimits,
  tokenizer: Callable[[], BaseTokenizer | None],
  context: Any,
  continuation: Any,
) -> _Row:
  if context is None or continuation is None:
    raise DataError(f"score: pair {number} has None; expected a text, such as '', or a list of tokens")
  if isinstance(context, str) != isinstance(continuation, str):
    raise DataError(f'score: pair {number} has a text and a list of tokens; expected two texts, or two lists')
  if isinstance(context, str):
    known = require_tokenizer(tokenizer(), 'score: ', 'pass lists of tokens')
    if limits.start_id is None:
      context, continuation = _tokens_of_texts(known, context, continuation)
    else:
      context, continuation = encode_prompt(known, context, 'score: context'), known.encode(continuation)
  else:
    context, continuation = (_tokens(number, ids) for ids in (context, continuation))
  if not context:
    if (begins := tokenizer()) is None:
      raise DataError(f'score: context {number} is empty; it needs at least one token, such as a begin token')
    context = [begins.special_ids[0]]
  most, source = limits.max_positions, None
  if limits.start_id is not None:
    end = [] if limits.source_end_id is None else [limits.source_end_id]
    context, source = [limits.start_id], [*context, *end]
  if most is None:
    return _Row(context, continuation, source)
  if len(continuation) > most:
    raise DataError(
      f'score: continuation {number} has {number_of(len(continuation), "token")}, but the model sees at most '
      f'{most} at once'
    )
  return _Row(context[-(most + 1 - len(continuation)) :], continuation, source)


def _tokens(number: int, ids: Any) -> list[int]:
  array = np.asarray(ids)
  if array.shape != (0,) and (array.ndim != 1 or array.dtype.kind not in 'iu'):
    raise DataError(f'score: pair {number} has {ids!r}; expected a text, or a list of tokens')
  return [int(i) for i in array]


def _tokens_of_texts(tokenizer: BaseTokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
  """Returns the tokens of a context and of its continuation.

  If the tokens of the joined text begin with those of the context, the others are the continuation's. Otherwise, each
  text is encoded by itself.
  """
  before = encode_prompt(tokenizer, context, 'score: context')
  whole = encode_prompt(tokenizer, context + continuation, 'score: continuation')
  if whole[: len(before)] == before:
    return before, whole[len(before) :]
  return before, tokenizer.encode(continuation)


def _batch(rows: Sequence[_Row], limits: ScoreLimits) -> Rows:
  """Returns the batch of rows, padded to one of a few lengths."""
  width = padded_length((row.length for row in rows), limits.max_positions)

  def pad(values: Iterable[list[int]], dtype: type, width: int = width) -> np.ndarray:
    return np.array([[*row, *[0] * (width - len(row))] for row in values], dtype)

  whole = [[*row.context, *row.continuation] for row in rows]
  batch = {
    'ids': pad((row[:-1] for row in whole), np.int32),
    'labels': pad((row[1:] for row in whole), np.int32),
    'weights': pad(([1] * row.length for row in rows), np.float32),
  }
  check_ids({'ids': batch['labels'], 'weights': batch['weights']}, limits.vocab_size)
  if limits.takes_prefixes:
    batch['prefix_lengths'] = np.array([len(row.context) for row in rows], np.int32)
  if sources := [row.source for row in rows if row.source is not None]:
    width = padded_length(map(len, sources))
    batch['source_ids'] = pad(sources, np.int32, width)
    batch['source_segment_ids'] = pad(([1] * len(source) for source in sources), np.int32, width)
    check_ids({'ids': batch['source_ids'], 'weights': batch['source_segment_ids']}, limits.vocab_size)
  return batch


def padded_length(lengths: Iterable[int], most: int | None = None) -> int:
  """Returns the length to which to pad rows: a power of two, so that few lengths are compiled; or `most`, if less."""
  length = max(_LEAST_LENGTH, 1 << (max(lengths) - 1).bit_length())
  return length if most is None else min(length, most)
