"""Pairs of answers as batches for a `PreferenceModel` or a `RewardModel`.

A batch has the parts `chosen` and `rejected`, and `weights` of pairs, [B] float32. Each part is a dict of `ids`,
`labels`, `segment_ids` and `segment_pos`, [B, T] int32, and `weights`, [B, T] float32, which are 1 for labels in
answers. With `packed`, a row holds up to S = `max_pairs` pairs, and the weights of pairs are [B, S]:

    chosen      p1 a1 | p2 a2 a2 .     segments 1 1 2 2 2 0      segment s of a row is the same pair in both parts
    rejected    p1 b1 b1 | p2 b2       segments 1 1 1 2 2 0

B batch, T length, S pairs in a row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from praxis_lite.common.errors import DataError
from praxis_lite.inputs.answers import AnswersInput, Said, encode_answer, fill_segment, fit_answer, pair_of_fields
from praxis_lite.inputs.rows import Rows, Struct, token_struct
from praxis_lite.inputs.source_target import pack_pairs
from praxis_lite.inputs.tokenizers import ChatTokens


class _Encoded(NamedTuple):
  """The tokens of a prompt with each of its two answers; None for a missing answer."""

  chosen: ChatTokens | None
  rejected: ChatTokens | None

  @property
  def any(self) -> ChatTokens:
    found = self.rejected if self.chosen is None else self.chosen
    assert found is not None
    return found

  @property
  def prompt_ids(self) -> bytes:
    """The tokens of the prompt as bytes, for comparisons."""
    return self.any.ids[: int(np.argmax(self.any.is_answer))].tobytes()


class PreferenceInput(AnswersInput):
  """Prompts with a chosen and a rejected answer.

  A line has one of these forms; a TSV file has the columns of `fields`.

      {"prompt": ..., "chosen": ..., "rejected": ...}        all texts; or a prompt of messages, with answers of either
                                                             kind; or a text prompt with two answers in messages
      {"chosen": [...], "rejected": [...]}                   whole chats; their common first messages are the prompt
      {"prompt": ..., "completion": ..., "label": true}      one answer, good or bad, for `Kto`

  Attributes: the same as for `AnswersInput`, and
    fields: the names of the prompt and of both answers.
    max_pairs: S, the largest number of pairs in a row, if `packed`.
    mismatched: whether a batch has a third part, `mismatched`, for `Kto`: each prompt with an answer from the next
      example that has a different prompt.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, or there are no examples. Unless `on_bad_record` is 'skip', also
      if a line has none of these forms, has an empty answer, or is too long.
  """

  fields: tuple[str, str, str] = ('prompt', 'chosen', 'rejected')
  max_pairs: int = 8
  mismatched: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(max_pairs=1)

  @property
  def num_examples(self) -> int:
    return len(self._rows)

  @property
  def num_pairs(self) -> int:
    """Pairs in an epoch."""
    return len(self._pairs)

  @property
  def has_single(self) -> bool:
    """Whether some example has only one answer."""
    return any(None in pair for pair in self._pairs)

  def example_struct(self) -> Struct:
    shape = (self.max_pairs,) if self.packed else ()
    sides = {side: token_struct(self.seq_len) for side in self._sides}
    return {**sides, 'weights': jax.ShapeDtypeStruct(shape, np.float32)}

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'mismatched': self.mismatched}

  def longest_segments(self) -> dict[str, int]:
    return {'segment_pos': max(size for sizes in self._sizes for size in sizes)}

  def rows(self, indices: np.ndarray) -> Rows:
    batch = self.blank_rows(len(indices))
    for row, index in enumerate(indices):
      numbers = self._rows[index]
      for place, side in enumerate(self._sides):
        end = 0
        for segment, number in enumerate(numbers, 1):
          if (tokens := self._sequences[number][place]) is not None:
            end = fill_segment(batch[side], row, end, tokens, segment)
      if self.packed:
        batch['weights'][row, : len(numbers)] = 1
      else:
        batch['weights'][row] = 1
    return batch

  @property
  def _sides(self) -> tuple[str, ...]:
    return ('chosen', 'rejected', *(('mismatched',) if self.mismatched else ()))

  @functools.cached_property
  def _rows(self) -> list[list[int]]:
    """For each row, the indices of its pairs."""
    if not self.packed:
      return [[number] for number in range(len(self._pairs))]
    return pack_pairs(self._sizes, (self.seq_len,) * len(self._sides), self.max_pairs)

  @property
  def _sizes(self) -> list[tuple[int, ...]]:
    return [tuple(0 if tokens is None else len(tokens.ids) for tokens in parts) for parts in self._sequences]

  @functools.cached_property
  def _sequences(self) -> list[tuple[ChatTokens | None, ...]]:
    """The tokens of each pair: for the chosen, the rejected and any mismatched answer; None for a missing one."""
    pairs = self._pairs
    if not self.mismatched:
      return [tuple(pair) for pair in pairs]
    following = _next_that_differ([pair.prompt_ids for pair in pairs])
    if following is None:
      raise DataError(f'{self.label}.mismatched: answers to other prompts need at least 2 examples with other prompts')
    return [
      (*pair, self._mismatch(number, pair, pairs[other])) for number, (pair, other) in enumerate(zip(pairs, following))
    ]

  def _mismatch(self, number: int, pair: _Encoded, other: _Encoded) -> ChatTokens:
    """Returns the prompt of `pair` with an answer of `other`.

    If `other` has both answers, the chosen one is taken for an even `number`, and the rejected one for an odd `number`.
    """
    prompt, answer = pair.any, (other.rejected if number % 2 else other.chosen) or other.any
    before, after = int(np.argmax(prompt.is_answer)), int(np.argmax(answer.is_answer))
    before = min(before, self.seq_len - 1)
    ids = np.concatenate([prompt.ids[:before], answer.ids[after:]])[: self.seq_len]
    is_answer = np.concatenate([np.zeros(before, bool), answer.is_answer[after:]])[: self.seq_len]
    return ChatTokens(ids, is_answer)

  @functools.cached_property
  def _pairs(self) -> list[_Encoded]:
    return self._encode_objects(self.fields, self._encode)

  def _encode(self, values: dict[str, Any]) -> _Encoded:
    prompt, *answers = pair_of_fields(values, self.fields)

    def encode(answer: Said | None) -> ChatTokens | None:
      if answer is None:
        return None
      return fit_answer(encode_answer(self.tokenizer, prompt, answer), self.seq_len, self.truncate)

    return _Encoded(*map(encode, answers))


def _next_that_differ(prompts: list[bytes]) -> list[int] | None:
  """Returns, for each prompt, the index of the next prompt that differs, cyclically; None if all prompts are equal."""
  count, other = len(prompts), None
  found: list[int | None] = [None] * count
  # Two passes from the end: for the last prompts, only the second one knows which prompt comes next.
  for i in reversed(range(2 * count)):
    after = (i + 1) % count
    if prompts[after] != prompts[i % count]:
      other = after
    found[i % count] = other
  return None if other is None else [i for i in found if i is not None]
