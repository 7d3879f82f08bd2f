"""ServedText: the text of a continuation, which, as in OpenAI's API, lacks its stop text and its end token."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from praxis_lite.inputs import BaseTokenizer
from praxis_lite.runs.continuations import GrowingText, end_of_stop


class ServedText:
  """The text of a continuation.

  Args:
    tokenizer: decodes the tokens; None returns '' for any tokens.
    prompt: the tokens before the continuation.
    stop_ids: tokens that end the continuation, and are not part of the text.
  """

  def __init__(
    self, tokenizer: BaseTokenizer | None, prompt: Sequence[int], stops: Sequence[str], stop_ids: Collection[int]
  ):
    self._growing = None if tokenizer is None else GrowingText(tokenizer, prompt, stops)
    self._stops, self._stop_ids = stops, stop_ids
    self._num_sent = 0

  def add(self, ids: Sequence[int], *, is_all: bool) -> str:
    """Returns the new text. Characters that may be the beginning of a stop text are held back until that is known.

    Args:
      ids: all tokens of the continuation so far.
      is_all: whether no tokens follow.
    """
    if self._growing is None:
      return ''
    self._growing.add(ids[:-1] if ids and ids[-1] in self._stop_ids else ids, is_all=is_all)
    text = self._growing.text
    end = end_of_stop(text, self._stops)
    if end is not None:
      text = text[: end - max(len(stop) for stop in self._stops if text[:end].endswith(stop))]
    elif not is_all:
      text = text[: len(text) - max((_common(text, stop) for stop in self._stops), default=0)]
    new, self._num_sent = text[self._num_sent :], max(self._num_sent, len(text))
    return new


def _common(text: str, stop: str) -> int:
  """Returns the length of the longest end of a text that is a proper prefix of a stop text."""
  return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
