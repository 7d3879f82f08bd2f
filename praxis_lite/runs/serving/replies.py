"""Replies: formats a continuation as JSON of OpenAI's API, whole or in pieces."""

from __future__ import annotations

import functools
import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.runs.serving.engine import NewTokensEvent

DONE = b'data: [DONE]\n\n'
_INCOMPLETE = '\ufffd'  # What a tokenizer returns for a part of a character.
_MOST_PARTS = 8  # The most tokens of a character.
_LEAST = -9999.0  # Stands for minus infinity, which JSON lacks.


class Usage(NamedTuple):
  prompt: int
  continuation: int

  def to_json(self) -> dict[str, int]:
    return {
      'prompt_tokens': self.prompt,
      'completion_tokens': self.continuation,
      'total_tokens': self.prompt + self.continuation,
    }


class Replies:
  """The replies to one request.

  Args:
    tokenizer: gives the names of tokens; None names them by their ids.
    has_usage: see `Asked`; if True, all pieces but the last have null as `usage`.
  """

  def __init__(
    self,
    model: str,
    tokenizer: BaseTokenizer | None,
    is_chat: bool,
    num_top: int | None,
    has_usage: bool = False,
  ):
    self._tokenizer, self._is_chat, self._num_top = tokenizer, is_chat, num_top
    self._more: dict[str, Any] = {'usage': None} if has_usage else {}
    self._bytes: Sequence[bytes] = () if tokenizer is None or num_top is None else _bytes_of_tokens(tokenizer)
    kind = 'chatcmpl' if is_chat else 'cmpl'
    self._about = {'id': f'{kind}-{secrets.token_hex(12)}', 'created': int(time.time()), 'model': model}
    self._num_characters, self._incomplete = 0, list[int]()

  def whole(self, text: str, piece: NewTokensEvent, reason: str, usage: Usage) -> dict[str, Any]:
    said = {'message': {'role': 'assistant', 'content': text}} if self._is_chat else {'text': text}
    choice = {'index': 0, **said, 'logprobs': self._log_probs(piece), 'finish_reason': reason}
    kind = 'chat.completion' if self._is_chat else 'text_completion'
    return {**self._about, 'object': kind, 'choices': [choice], 'usage': usage.to_json()}

  def start(self) -> bytes:
    """Returns the event before the first piece; b'' if there is none."""
    return self._event([self._choice({'role': 'assistant', 'content': ''}, None, None)]) if self._is_chat else b''

  def piece(self, text: str, piece: NewTokensEvent) -> bytes:
    """Returns the event of a piece; b'' for an empty piece."""
    log_probs = self._log_probs(piece)
    if not text and not (log_probs and piece.ids):
      return b''
    return self._event([self._choice({'content': text} if self._is_chat else text, log_probs, None)])

  def end(self, reason: str, usage: Usage | None) -> bytes:
    """Returns the events after the last piece."""
    last = self._event([self._choice({} if self._is_chat else '', None, reason)])
    return last + (b'' if usage is None else self._event([], usage=usage.to_json())) + DONE

  def _event(self, choices: Sequence[dict[str, Any]], **more: Any) -> bytes:
    kind = 'chat.completion.chunk' if self._is_chat else 'text_completion'
    return to_event({**self._about, 'object': kind, 'choices': choices, **self._more, **more})

  def _choice(self, said: Any, log_probs: Any, reason: str | None) -> dict[str, Any]:
    name = 'delta' if self._is_chat else 'text'
    return {'index': 0, name: said, 'logprobs': log_probs, 'finish_reason': reason}

  def _log_probs(self, piece: NewTokensEvent) -> dict[str, Any] | None:
    if self._num_top is None:
      return None
    tops = [top[: self._num_top] for top in piece.top]
    if self._is_chat:
      rows = zip(piece.ids, piece.log_probs, tops)
      return {'content': [{**self._token(i, p), 'top_logprobs': [self._token(*t) for t in top]} for i, p, top in rows]}
    tokens = [self._name(i) for i in piece.ids]
    offsets = [self._offset(i) for i in piece.ids]
    return {
      'tokens': tokens,
      'token_logprobs': [_finite(p) for p in piece.log_probs],
      'top_logprobs': [{self._name(i): _finite(p) for i, p in top} for top in tops],
      'text_offset': offsets,
    }

  def _token(self, token: int, log_prob: float) -> dict[str, Any]:
    name = self._name(token)
    own = None if name.startswith('token_id:') else list(self._find_bytes(token) or name.encode())
    return {'token': name, 'logprob': _finite(log_prob), 'bytes': own}

  def _find_bytes(self, token: int) -> bytes:
    return self._bytes[token] if 0 <= token < len(self._bytes) else b''

  def _name(self, token: int) -> str:
    """Returns the text of a token; its bytes if it is a part of a character; its id if neither is known."""
    name = '' if self._tokenizer is None else self._tokenizer.decode([token])
    if name and _INCOMPLETE not in name:
      return name
    if not self._find_bytes(token):
      return f'token_id:{token}'
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in self._find_bytes(token))

  def _offset(self, token: int) -> int:
    """Returns the number of characters before the text of `token`, the next token of the reply.

    If several tokens are parts of one character, the number is the same for all of them.
    """
    offset = self._num_characters
    if self._tokenizer is not None:
      text = self._tokenizer.decode(ids := [*self._incomplete, token])
      is_part = text.endswith(_INCOMPLETE) and len(ids) < _MOST_PARTS
      self._incomplete = ids if is_part else []
      self._num_characters += 0 if is_part else len(text)
    return offset


@functools.lru_cache(1)
def _bytes_of_tokens(tokenizer: BaseTokenizer) -> Sequence[bytes]:
  """Returns the bytes of each token; () if the tokenizer does not know them."""
  try:
    return tokenizer.token_bytes()
  except ConfigError:
    return ()


def _finite(log_prob: float) -> float:
  return log_prob if math.isfinite(log_prob) else _LEAST


def to_event(value: dict[str, Any]) -> bytes:
  return b'data: ' + encode_json(value) + b'\n\n'


def encode_json(value: object) -> bytes:
  """Returns JSON in ASCII, with escapes for all other characters."""
  return json.dumps(value).encode()
