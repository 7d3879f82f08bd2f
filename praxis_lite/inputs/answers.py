"""Converts prompts and answers, which are texts or messages of chats, to tokens. A model learns only the answers.

prompt 'ab', answer 'xyz'     ids a b x y z $     answer 0 0 1 1 1 1     the end token is a part of the answer
                              if the tokenizer's prompts begin with a start token, it comes first
chats                         the tokenizer's chat template writes the text, and marks the answers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import DataError
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.lines import parse_object, split_tsv
from praxis_lite.inputs.rows import Rows
from praxis_lite.inputs.text_examples import TextExamplesInput
from praxis_lite.inputs.tokenizers import BaseTokenizer, ChatTokens

T = TypeVar('T')
Examples = Sequence[Mapping[str, Any]]

ChatMessages = list[dict[str, Any]]
Said = str | ChatMessages


class AnswerPair(NamedTuple):
  """A prompt with a chosen and a rejected answer; one answer is None if only the other is known."""

  prompt: Said
  chosen: Said | None
  rejected: Said | None


def encode_answer(tokenizer: BaseTokenizer, prompt: Said, answer: Said) -> ChatTokens:
  """Returns the tokens of a prompt and its answer, and which tokens belong to the answer.

  Both are texts, or both messages, for which the tokenizer needs a chat template. Earlier answers in the messages of
  the prompt count as part of it. Raises DataError if the answer has no tokens, or the template fails.
  """
  if isinstance(prompt, str) and isinstance(answer, str):
    before, after = tokenizer.prompt_ids(prompt), tokenizer.encode(answer)
    if not after:
      raise DataError('the answer has no tokens')
    ids = np.asarray([*before, *after, tokenizer.special_ids[1]], np.int32)
    return ChatTokens(ids, np.arange(len(ids)) >= len(before))
  if isinstance(prompt, str) or isinstance(answer, str):
    raise DataError('the prompt and the answer are a text and messages; both must be of one kind')
  tokens = tokenizer.chat_tokens([*prompt, *answer], len(prompt))
  if not tokens.is_answer.any():
    raise DataError("no message with the role 'assistant' has a token, so there is nothing to learn")
  return tokens


def fit_answer(tokens: ChatTokens, room: int, truncate: bool) -> ChatTokens:
  """Returns at most `room` of the tokens; with `truncate`, cuts off the end of a longer sequence.

  Raises DataError if the sequence is too long and `truncate` is False, or no token of the answer remains.
  """
  if len(tokens.ids) > room and not truncate:
    raise DataError(
      f'it has {number_of(len(tokens.ids), "token")}, and seq_len = {room}; set a larger one, or truncate=True'
    )
  cut = ChatTokens(tokens.ids[:room], tokens.is_answer[:room])
  if not cut.is_answer.any():
    raise DataError(f'no token of the answer is among its first {room}; set a larger seq_len')
  return cut


def pair_of_fields(values: Mapping[str, Any], fields: tuple[str, str, str]) -> AnswerPair:
  """Returns the pair in a JSON object, which has one of the usual forms.

      {prompt, chosen, rejected}    all texts; or a prompt of messages, with answers of either kind; or a text prompt
                                    with two answers in messages
      {chosen, rejected}            whole chats, whose common first messages are the prompt; a text `prompt` is ignored
      {prompt, completion, label}   one answer, which is good if the label is true

  `fields` are the names of prompt, chosen and rejected. Raises ValueError if the object has none of these forms.
  """
  of_prompt, of_chosen, of_rejected = fields
  prompt = values.get(of_prompt)
  if 'completion' in values and 'label' in values and of_chosen not in values:
    label = values['label']
    if not isinstance(label, bool):
      raise ValueError(f"its 'label' is {label!r}; expected true or false")
    said, answer = said_of(values, of_prompt, 'completion')
    return AnswerPair(said, answer, None) if label else AnswerPair(said, None, answer)
  chosen, rejected = values.get(of_chosen), values.get(of_rejected)
  if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
    one, other = messages_of(chosen, of_chosen), messages_of(rejected, of_rejected)
    if isinstance(prompt, str) and (are_answers := [_has_answers_only(x) for x in (one, other)]) != [False, False]:
      if not all(are_answers):
        raise ValueError(
          f'one of its {of_chosen!r} and {of_rejected!r} has only answers, and the other one is a whole chat; both '
          f'must be answers to {of_prompt!r}, or whole chats'
        )
      return AnswerPair([{'role': 'user', 'content': prompt}], one, other)
    if one == other:
      raise ValueError(f'its {of_chosen!r} and {of_rejected!r} are equal, so neither is better')
    # The common first messages are the prompt.
    common = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return AnswerPair(one[:common], one[common:], other[common:])
  said, good = said_of(values, of_prompt, of_chosen)
  _, bad = said_of(values, of_prompt, of_rejected)
  return AnswerPair(said, good, bad)


def _has_answers_only(messages: ChatMessages) -> bool:
  """Whether messages are an answer, not a whole chat: the first is the assistant's, and no role is user or system."""
  roles = [message['role'] for message in messages]
  return roles[:1] == ['assistant'] and not {'user', 'system'} & set(roles)


def messages_of(value: object, name: str) -> ChatMessages:
  """Returns `value`, the messages of a chat; raises ValueError if it is not a list of messages."""
  if not isinstance(value, list):
    raise ValueError(f'its {name!r} is no list of {{"role": ..., "content": ...}}')
  for number, message in enumerate(value, 1):
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ('role', 'content')):
      got = ', '.join(map(str, message)) or 'none' if isinstance(message, dict) else type(message).__name__
      raise ValueError(f"message {number} of its {name!r} needs the texts 'role' and 'content'; it has {got}")
  return cast(ChatMessages, value)


def said_of(values: Mapping[str, Any], of_prompt: str, of_answer: str) -> tuple[Said, Said]:
  """Returns (prompt, answer), read from the fields of an object: two texts, or two lists of messages.

  If the prompt is messages and the answer a text, the text becomes a message. Raises ValueError if a field is missing,
  or if the prompt is a text and the answer is messages.
  """
  prompt, answer = values.get(of_prompt), values.get(of_answer)
  for name, value in ((of_prompt, prompt), (of_answer, answer)):
    if not isinstance(value, str | list):
      raise ValueError(f'has neither a text nor messages {name!r}; its fields: {", ".join(map(str, values)) or "none"}')
  if isinstance(prompt, str) and isinstance(answer, str):
    return prompt, answer
  if isinstance(prompt, str):
    raise ValueError(f'its {of_prompt!r} is a text and its {of_answer!r} are messages; both must be messages')
  said = messages_of(prompt, of_prompt)
  return said, [{'role': 'assistant', 'content': answer}] if isinstance(answer, str) else messages_of(answer, of_answer)


def fill_segment(side: Rows, row: int, start: int, tokens: ChatTokens, segment: int) -> int:
  """Writes a sequence into a row of a language-model batch; returns the position after it.

  `ids` include the last token, whose label has weight 0, so that a model can read the whole answer.

  Args:
    side: the batch: `ids`, `labels`, `weights`, `segment_ids` and `segment_pos`, [B, T].
    row, start: the row, and the position in it where the sequence begins.
    tokens, segment: the sequence, of at most T - `start` tokens, and its number in the row, from 1.
  """
  at = slice(start, end := start + len(tokens.ids))
  side['ids'][row, at] = tokens.ids
  side['labels'][row, start : end - 1] = tokens.ids[1:]
  side['weights'][row, start : end - 1] = tokens.is_answer[1:]
  side['segment_ids'][row, at] = segment
  side['segment_pos'][row, at] = np.arange(len(tokens.ids))
  return end


_LINES: dict[str, Callable[[str, tuple[str, ...]], dict[str, Any]]] = {
  '.tsv': lambda line, names: dict(zip(names, split_tsv(line, names))),
  '.jsonl': lambda line, _: parse_object(line),
}


class AnswersInput(TextExamplesInput):
  """Base of the inputs of prompts and answers.

  Attributes: the same as for `TextExamplesInput`, whose tokenizer needs a chat template for messages, and
    examples: instead of `path`, a list of dicts like the objects of JSON Lines, or a function (or the `Config` of one)
      that returns it.
    seq_len: T, tokens of a row.
    packed: whether a row may hold several sequences, each as a separate segment.
    truncate: whether to cut off the end of sequences that are too long, instead of treating them as bad records.
  """

  examples: Examples | Callable[[], Examples] | Config | None = None
  seq_len: int = REQUIRED
  packed: bool = False
  truncate: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(seq_len=2)

  def identity(self) -> dict[str, Any]:
    return {**super().identity(), 'packed': self.packed}

  def _encode_objects(self, names: tuple[str, ...], encode: Callable[[dict[str, Any]], T]) -> list[T]:
    """Applies `encode` to each example, a dict; `names` are its fields, in the order of the columns of TSV files."""
    return self._encode_all(names, _LINES, encode)

  def _forms(self) -> tuple[str, str]:
    return 'a list of dicts', 'a dict'

  def _is_example(self, values: object) -> bool:
    return isinstance(values, Mapping)
