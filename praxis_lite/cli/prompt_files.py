"""Files of prompts for `praxis-lite decode --prompts=FILE`.

prompts.txt       a prompt in each line; empty lines are left out
prompts.jsonl     a text, or an object, in each line; an object has one of
                    {"prompt": "def main("}
                    {"prompt_ids": [1, 2, 3]}
                    {"messages": [{"role": "user", "content": "Why?"}]}      for a chat template
                  and any other fields, which are printed again with its continuation
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from praxis_lite.common.errors import UserError, first_lines
from praxis_lite.common.files import parse_json_line, read_plain

_KINDS = ('prompt', 'prompt_ids', 'messages')


class GivenPrompt(NamedTuple):
  """A prompt in a file: a text, a list of ids, or a list of messages."""

  where: str  # The line, for messages.
  value: Any
  kind: str = 'prompt'  # Or 'prompt_ids' or 'messages'.
  record: dict[str, Any] | None = None  # The object in the line; None if the file is not JSON lines.


def read_prompts(path: str) -> list[GivenPrompt]:
  """Returns the prompts in a file. Raises UserError if it has none, or, naming the line, if one is not valid."""
  flag = f'--prompts={path}'
  try:
    lines = read_plain(path).decode().split('\n')
  except OSError as error:
    raise UserError(f'{flag} cannot be read: {error.strerror}') from None
  except UnicodeDecodeError as error:
    raise UserError(f'{flag} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}') from None
  numbered = [(f'{flag}: line {i}', line.removesuffix('\r')) for i, line in enumerate(lines, 1) if line.strip()]
  if not numbered:
    raise UserError(f'{flag} has no prompts; expected one in each line')
  blank = [i for i, line in enumerate('\n'.join(lines).rstrip().split('\n'), 1) if not line.strip()]
  if blank:
    shown = ', '.join(first_lines([str(i) for i in blank], 5))
    print(f'note: {flag}: blank lines are no prompts: {shown}', file=sys.stderr)
  is_json = path.endswith(('.jsonl', '.json'))
  return [_parse(where, line) if is_json else GivenPrompt(where, line) for where, line in numbered]


def _parse(where: str, line: str) -> GivenPrompt:
  try:
    value = parse_json_line(line)
  except ValueError as error:
    raise UserError(f'{where} is not JSON: {error}; each line is a text or an object') from None
  record = {'prompt': value} if isinstance(value, str) else value
  kinds = [kind for kind in _KINDS if isinstance(record, dict) and kind in record]
  if len(kinds) != 1:
    raise UserError(f'{where}: expected a text, or an object with one of {", ".join(_KINDS)}')
  (kind,) = kinds
  given = record[kind]
  entries = given if isinstance(given, list) else [None]
  is_valid, expected = {
    'prompt': (isinstance(given, str), 'a text'),
    'prompt_ids': (all(type(i) is int for i in entries), 'a list of ids'),
    'messages': (entries and all(map(_is_message, entries)), 'a list of {"role": ..., "content": ...}'),
  }[kind]
  if not is_valid:
    raise UserError(f'{where}: {kind} must be {expected}')
  return GivenPrompt(where, given, kind, record)


def _is_message(message: object) -> bool:
  return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ('role', 'content'))
