"""Parses the JSON of a request into a prompt and its settings; errors say which field is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.common.files import parse_json

MOST_STOPS = 16


class RequestError(Exception):
  """The error with which a request is answered.

  Attributes:
    field: the field that is wrong; None if the error is not about a field.
    code: OpenAI's code of the error; None without one.
  """

  def __init__(self, message: str, status: int = 400, field: str | None = None, code: str | None = None):
    super().__init__(message)
    self.message, self.status, self.field, self.code = message, status, field, code

  def to_json(self) -> dict[str, Any]:
    kind = 'invalid_request_error' if self.status < 500 and self.status != 429 else 'server_error'
    kind = 'rate_limit_error' if self.status == 429 else kind
    return {'error': {'message': self.message, 'type': kind, 'param': self.field, 'code': self.code}}


class Asked(NamedTuple):
  """A prompt and its settings; None keeps the value of the run's config.

  Attributes:
    prompt: a text or tokens; in a chat, the messages, each with `role` and `content`.
    max_tokens, temperature, top_p, seed, stop: see `Batcher.submit`.
    is_stream: whether the answer is sent in pieces.
    has_usage: whether the last piece contains the numbers of tokens.
    num_top: how many of the most probable tokens to report; None for no log-probabilities.
    adapter: the name of the adapter that the request names as its model; None for the model itself.
  """

  prompt: Any
  is_chat: bool = False
  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  seed: int | None = None
  stop: Sequence[str] = ()
  is_stream: bool = False
  has_usage: bool = False
  num_top: int | None = None
  adapter: str | None = None


def _is_int(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


# For each field, a pair: a function that says whether a value is valid, and how messages describe valid values.
_Check = tuple[Callable[[Any], bool], str]
_TOKENS: _Check = (lambda x: _is_int(x) and 1 <= x < 2**63, 'an integer of at least 1')
_COUNT: _Check = (lambda x: _is_int(x) and x >= 0, 'an integer of at least 0')
_TEXT: _Check = (lambda x: isinstance(x, str), 'a text')
_SWITCH: _Check = (lambda x: isinstance(x, bool), 'true or false')
_OF_BOTH: dict[str, _Check] = {
  'model': _TEXT,
  'max_tokens': _TOKENS,
  'temperature': (lambda x: _is_number(x) and 0 <= x <= 1e6, 'a number of at least 0'),
  'top_p': (lambda x: _is_number(x) and 0 < x <= 1, 'a number that is more than 0 and at most 1'),
  'seed': (lambda x: _is_int(x) and -(2**63) <= x < 2**63, 'an integer of 64 bits'),
  'stream': _SWITCH,
  'stream_options': (
    lambda x: isinstance(x, dict) and x.keys() <= {'include_usage'} and all(isinstance(v, bool) for v in x.values()),
    '{"include_usage": true} or false',
  ),
  'user': _TEXT,
}
_OF_COMPLETION: dict[str, _Check] = {'logprobs': _COUNT}
_OF_CHAT: dict[str, _Check] = {'max_completion_tokens': _TOKENS, 'logprobs': _SWITCH, 'top_logprobs': _COUNT}
# Fields of OpenAI's API that this server accepts only with the values that have no effect.
_FIXED: dict[str, Sequence[Any]] = {
  'n': (1,),
  'best_of': (1,),
  'echo': (False,),
  'suffix': ('',),
  'presence_penalty': (0,),
  'frequency_penalty': (0,),
  'logit_bias': ({},),
  'response_format': ({'type': 'text'},),
  'tools': ([],),
  'tool_choice': ('none', 'auto'),
  'store': (False,),
}
_MOST_SHOWN = 60  # The most characters of a value in a message.


def parse_request(body: bytes, *, is_chat: bool, model: str, most_top: int, adapters: Collection[str] = ()) -> Asked:
  """Returns the prompt and settings of a request.

  Args:
    model: the name of the model, which the request may omit.
    adapters: the names of adapters, which a request may give as its model.

  Raises:
    RequestError: the request is not valid.
  """
  try:
    given = parse_json(body)
  except ValueError as error:
    raise RequestError(f'the body is not JSON: {error}') from None
  if not isinstance(given, dict):
    raise RequestError(f'the body is {_shorten(given)}; expected an object')
  fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
  prompt_field = 'messages' if is_chat else 'prompt'
  checks = {**_OF_BOTH, **(_OF_CHAT if is_chat else _OF_COMPLETION)}
  for name, value in fields.items():
    if not _is_unicode(value):
      raise RequestError(f'{name} is {_shorten(value)}; expected text that UTF-8 can hold', field=name[:_MOST_SHOWN])
    if name in checks:
      is_right, expected = checks[name]
      if not is_right(value):
        raise RequestError(f'{name} is {_shorten(value)}; expected {expected}', field=name)
    elif name in _FIXED:
      if not any(value == right and isinstance(value, bool) == isinstance(right, bool) for right in _FIXED[name]):
        raise RequestError(f'{name}: this server has only {json.dumps(_FIXED[name][0])}', field=name)
    elif name not in (prompt_field, 'stop'):
      known = ', '.join(sorted([*checks, *_FIXED, prompt_field, 'stop']))
      raise RequestError(f'there is no field {_shorten(name)}; there are {known}', field=name[:_MOST_SHOWN])
  if (wanted := fields.get('model', model)) not in (model, *adapters):
    known = ', '.join(map(repr, (model, *adapters)))
    raise RequestError(
      f'there is no model {_shorten(wanted)}; this server has {known}', 404, 'model', 'model_not_found'
    )
  if prompt_field not in fields:
    raise RequestError(f'{prompt_field} is missing', field=prompt_field)
  num_top = _number_of_top(fields, is_chat, most_top)
  return Asked(
    (_messages if is_chat else _prompt)(fields[prompt_field]),
    is_chat,
    fields.get('max_completion_tokens', fields.get('max_tokens')),
    _float(fields.get('temperature')),
    _float(fields.get('top_p')),
    fields.get('seed'),
    _stops(fields.get('stop', [])),
    fields.get('stream', False),
    fields.get('stream_options', {}).get('include_usage', False),
    num_top,
    None if wanted == model else wanted,
  )


def _is_unicode(value: object) -> bool:
  """Whether the texts of a value contain no lone UTF-16 surrogates."""
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return False
  return True


def _float(value: float | None) -> float | None:
  return None if value is None else float(value)


def _number_of_top(fields: Mapping[str, Any], is_chat: bool, most: int) -> int | None:
  if not is_chat:
    name, number = 'logprobs', fields.get('logprobs')
  elif 'top_logprobs' in fields and not fields.get('logprobs'):
    raise RequestError('top_logprobs needs "logprobs": true', field='top_logprobs')
  else:
    name, number = 'top_logprobs', fields.get('top_logprobs', 0) if fields.get('logprobs') else None
  if number is not None and number > most:
    raise RequestError(f'{name} is {_shorten(number)}; this server reports up to {most}', field=name)
  return number


def _prompt(value: Any) -> str | list[int]:
  if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
    value = value[0]
  if isinstance(value, str) and value:
    return value
  if isinstance(value, list) and value and all(_is_int(i) for i in value):
    return value
  if isinstance(value, list) and len(value) > 1 and all(isinstance(x, str | list) for x in value):
    raise RequestError('prompt has several prompts; send one in a request', field='prompt')
  raise RequestError(f'prompt is {_shorten(value)}; expected a text, or a list of tokens', field='prompt')


def _messages(value: Any) -> list[dict[str, str]]:
  if not isinstance(value, list) or not value:
    raise RequestError(f'messages is {_shorten(value)}; expected a list of messages', field='messages')
  return [_message(f'messages[{i}]', message) for i, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, str]:
  content = message.get('content') if isinstance(message, dict) else None
  if isinstance(content, list) and all(isinstance(x, dict) and isinstance(x.get('text'), str) for x in content):
    content = ''.join(part['text'] for part in content)
  if not isinstance(content, str) or not isinstance(message.get('role'), str):
    raise RequestError(f'{where} is {_shorten(message)}; expected {{"role": ..., "content": a text}}', field='messages')
  return {'role': message['role'], 'content': content}


def _stops(value: Any) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else value
  if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
    raise RequestError(f'stop is {_shorten(value)}; expected a text, or a list of texts', field='stop')
  if len(stops) > MOST_STOPS:
    raise RequestError(f'stop has {len(stops)} texts; expected at most {MOST_STOPS}', field='stop')
  return tuple(stops)


def _shorten(value: object) -> str:
  text = json.dumps(value)
  return text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'
