"""ChatInput: chats, or prompts and answers, as rows for a language model that learns only the answers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from praxis_lite.inputs.answers import AnswersInput, encode_answer, fill_segment, fit_answer, messages_of, said_of
from praxis_lite.inputs.packing import best_fit_rows, check_row_length
from praxis_lite.inputs.rows import Rows, Struct, token_struct
from praxis_lite.inputs.tokenizers import ChatTokens


class ChatInput(AnswersInput):
  """Chats, or prompts and answers, to fine-tune a language model on the answers: the weights of other labels are 0.

  A line has one of these forms; a TSV file has the columns prompt and completion.

      {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
      {"prompt": ..., "completion": ...}    both texts, or both messages

  Attributes: the same as for `AnswersInput`.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, or there are no examples. Unless `on_bad_record` is 'skip', also
      if a line has none of these forms, has no answer, or is too long.
  """

  @property
  def num_examples(self) -> int:
    return len(self._rows)

  def example_struct(self) -> Struct:
    return token_struct(self.seq_len)

  def longest_segments(self) -> dict[str, int]:
    return {'segment_pos': max(len(tokens.ids) for tokens in self._chats)}

  def rows(self, indices: np.ndarray) -> Rows:
    batch = self.blank_rows(len(indices))
    for row, index in enumerate(indices):
      end = 0
      for segment, number in enumerate(self._rows[index], 1):
        end = fill_segment(batch, row, end, self._chats[number], segment)
    return batch

  @functools.cached_property
  def _rows(self) -> list[list[int]]:
    """For each row, the indices of its chats."""
    if not self.packed:
      return [[number] for number in range(len(self._chats))]
    rows: dict[int, list[int]] = {}
    for number, row in enumerate(best_fit_rows(np.array([len(c.ids) for c in self._chats]), self.seq_len).tolist()):
      rows.setdefault(row, []).append(number)
    return list(rows.values())

  @functools.cached_property
  def _chats(self) -> list[ChatTokens]:
    chats: list[ChatTokens] = self._encode_objects(('prompt', 'completion'), self._encode)
    if self.is_training:
      check_row_length(f'{self.label}.seq_len', self.seq_len, sum(len(chat.ids) for chat in chats))
    return chats

  def _encode(self, values: dict[str, Any]) -> ChatTokens:
    if 'messages' in values:
      tokens = encode_answer(self.tokenizer, [], messages_of(values['messages'], 'messages'))
    elif 'prompt' not in values:
      fields = ', '.join(map(str, values)) or 'none'
      raise ValueError(f"has neither 'messages' nor 'prompt' and 'completion'; its fields: {fields}")
    else:
      tokens = encode_answer(self.tokenizer, *said_of(values, 'prompt', 'completion'))
    return fit_answer(tokens, self.seq_len, self.truncate)
