"""Growing continuations of prompts: their text, the stop texts that end them, and decoding in segments.

A program that decodes returns only when it has all tokens. To show text as it is made, or to end it at a stop text of
several tokens, the program is called for one segment after another; each call reads the prompt and the tokens so far:

    call 1    prompt                           -> 8 tokens
    call 2    prompt, 8 tokens                 -> a segment, which is longer if more tokens must be read again
    ...                                           until each row has ended

The tokens equal those of a single call, up to rounding: random numbers depend only on the row and the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from praxis_lite.common.errors import UserError
from praxis_lite.inputs import BaseTokenizer

# The number of tokens in the first segment. Later segments have at least as many, and at least 1 / _PART_OF_READ of the
# number of tokens that are read again.
_LEAST_SEGMENT, _PART_OF_READ = 8, 8
_INCOMPLETE = '\ufffd'  # What a tokenizer returns for a character whose last bytes are in a later token.

# (tokens of each row, most tokens to add to each row, number of tokens that earlier calls added) -> new tokens by row.
Decode = Callable[[list[list[int]], list[int], int], list[list[int]]]


class GrowingText:
  """The text of a continuation whose tokens arrive one after the other.

  Args:
    prompt: the tokens before the continuation.
    stops: stop texts; the text ends with the first one that occurs in it.

  Attributes:
    text: all that `add` has returned so far.
  """

  def __init__(self, tokenizer: BaseTokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
    self._tokenizer, self._prompt, self._stops = tokenizer, prompt, stops
    self.text = ''

  def add(self, ids: Sequence[int], *, is_all: bool) -> str:
    """Returns the new text. An incomplete character is held back until its last token, unless no tokens follow.

    If new tokens change text that was already returned, this returns ''; or, if no tokens follow, the text from the
    first change on.

    Args:
      ids: all tokens of the continuation so far.
      is_all: whether no tokens follow.
    """
    whole = self._whole(ids)
    end = end_of_stop(whole, self._stops)
    whole = whole[:end] if is_all or end is not None else whole.rstrip(_INCOMPLETE)
    if not whole.startswith(self.text):  # The new tokens changed the text of the earlier ones.
      if not is_all:
        return ''
      same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.text, whole))
      self.text = ''.join(character for character, _ in same)
    new, self.text = whole[len(self.text) :], whole
    return new

  def count_until_stop(self, ids: Sequence[int], start: int) -> int | None:
    """Returns the least number of tokens, from `start` on, whose text has a whole stop text; None if there is none."""
    if not self._stops or end_of_stop(self._whole(ids), self._stops) is None:
      return None
    counts = range(start, len(ids))
    return next((n for n in counts if end_of_stop(self._whole(ids[:n]), self._stops) is not None), len(ids))

  def _whole(self, ids: Sequence[int]) -> str:
    return continued_text(self._tokenizer, self._prompt, ids)


def continued_text(tokenizer: BaseTokenizer, prompt: Sequence[int], continuation: Sequence[int]) -> str:
  """Returns the text that follows a prompt.

  Decodes prompt and continuation together if possible, because some tokenizers drop a space at the beginning of a text.
  """
  before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *continuation])
  return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(continuation)


def end_of_stop(text: str, stops: Sequence[str]) -> int | None:
  """Returns the position at which the first stop text ends; None if there is none."""
  return min((at + len(stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)


def check_stops(stops: Sequence[str], name: str = 'stop') -> None:
  """Raises UserError unless the stop texts are a list of texts that are not empty."""
  if isinstance(stops, str):
    raise UserError(f'{name}: expected a list of texts, got one text; pass [{stops!r}]')
  if not hasattr(stops, '__len__'):
    raise UserError(f'{name}: expected a list of texts, got {stops!r}')
  for stop in stops:
    if not isinstance(stop, str) or not stop:
      raise UserError(f'{name}={stop!r}: expected a text of at least one character')


def continue_prompts(
  prompts: Sequence[Sequence[int]],
  decode: Decode,
  texts: Sequence[GrowingText] | None,
  *,
  max_tokens: int,
  stop_ids: Sequence[int],
  in_segments: bool,
  on_tokens: Callable[[int, list[int], int, bool], object],
) -> list[list[int]]:
  """Returns the tokens that follow each prompt.

  Args:
    decode: returns the next tokens of each row, see `Decode`.
    texts: find the stop texts in the continuation of each prompt; None ignores stop texts.
    in_segments: whether `decode` is called for one segment after another, rather than once.
    on_tokens: called after each segment of a row, with the number of the row, its tokens so far, how many of them are
      new, and whether these are all.
  """
  rows: list[list[int]] = [[] for _ in prompts]
  left = set(range(len(prompts)))
  count = 0
  while left and count < max_tokens:
    read = [[*prompt, *ids] for prompt, ids in zip(prompts, rows)]
    segment = max_tokens - count
    if in_segments:
      segment = min(segment, max(_LEAST_SEGMENT, max(len(read[i]) for i in left) // _PART_OF_READ if count else 0))
    new = decode(read, [segment if i in left else 0 for i in range(len(prompts))], count)
    count += segment
    for i in sorted(left):
      start = len(rows[i])
      rows[i] += new[i]
      until = texts[i].count_until_stop(rows[i], start + 1) if texts is not None else None
      rows[i] = rows[i][:until]
      is_all = until is not None or len(new[i]) < segment or new[i][-1] in stop_ids or count >= max_tokens
      if is_all:
        left.remove(i)
      on_tokens(i, rows[i], len(rows[i]) - start, is_all)
  return rows
