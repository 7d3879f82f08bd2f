"""Text that someone else has written, or that is not for everyone: what a terminal would act on, and passwords.

A name in a record, a metric, a path or an error may have escape sequences, which move the cursor, write the clipboard
or hide what was printed. `printable` shows them instead. What is recorded may be read by others: `remove_secrets`
leaves passwords out, of URLs and of fields that are called so.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TextIO, cast

# What stands for a password.
LEFT_OUT = '***'

# scheme://user:password@; a password may have / and @, and a port is none.
_PASSWORD = re.compile(r'(?<=://)(?P<user>[^\s/?#:@]*):(?!\d{1,5}(?:[/?#]|\s|$))[^\s?#]*@')
# A user without a password is a token where the protocol has no other users.
_TOKEN = re.compile(r'(?<=http://|ttps://)[^\s/?#:@]+@')
_NAMES = r'(?:token(?!i)|secret|passw(?:or)?d|signature|credential|(?:api|access|private)_?key)'
_IN_QUERY = re.compile(rf'(?i)(?P<name>[?&](?:[\w.%-]*{_NAMES}[\w.%-]*|sig|key|auth)=)[^&#\s\'"]+')
_SECRET_NAME = re.compile(
  r'(?i)(?:^|_)(?:password|passwd|secret|api_?key|(?:access|auth)_?token|(?:secret|access|private)_?key)$'
)
_ASSIGNED = re.compile(r'(?P<path>[\w.\[\]*-]+)=(?P<value>.+)', re.DOTALL)


def printable(text: str, *, one_line: bool = False) -> str:
  """Returns text in which all that a terminal would act on is written as in Python: `\\x1b`, `\\u202e`.

  Args:
    text: by anyone. Ends of lines, tabs, spaces of any kind and letters of any language stay.
    one_line: ends of lines and tabs do not.
  """
  if text.isprintable():
    return text
  kept = '' if one_line else '\n\t'
  return ''.join(c if c.isprintable() or c in kept or unicodedata.category(c) == 'Zs' else _escape(c) for c in text)


def _escape(character: str) -> str:
  return character.encode('unicode_escape').decode()


def remove_secrets(text: str) -> str:
  """Returns text with `***` for the passwords and tokens in its URLs."""
  if '://' not in text:
    return text
  text = _PASSWORD.sub(rf'\g<user>:{LEFT_OUT}@', text)
  return _IN_QUERY.sub(rf'\g<name>{LEFT_OUT}', _TOKEN.sub(f'{LEFT_OUT}@', text))


def remove_secrets_of_argument(argument: str) -> str:
  """Returns an argument of a command line, such as `--set=task.train.mirror=s3://...`, without its secrets."""
  head = '--set=' if argument.startswith('--set=') else ''
  assigned = _ASSIGNED.fullmatch(argument.removeprefix(head))
  if assigned and is_secret(assigned['path']):
    return f'{head}{assigned["path"]}={LEFT_OUT}'
  return remove_secrets(argument)


def is_secret(path: str) -> bool:
  """Whether the field at a path of a config is a password, by its name."""
  return _SECRET_NAME.search(path.lstrip('-').rpartition('.')[2]) is not None


def has_lost_secret(text: str) -> bool:
  """Whether something has been left out of a URL."""
  return '://' in text and (f'{LEFT_OUT}@' in text or f'={LEFT_OUT}' in text)


class PrintableStream:
  """A stream of text that writes all of it `printable`.

  Attributes:
    unfiltered: the stream that it writes to, for what this program itself draws.
  """

  def __init__(self, stream: TextIO):
    self.unfiltered = stream

  def write(self, text: str) -> int:
    self.unfiltered.write(printable(text))
    return len(text)

  def writelines(self, lines: list[str]) -> None:
    for line in lines:
      self.write(line)

  def __getattr__(self, name: str) -> object:
    return getattr(self.unfiltered, name)


def unfiltered_stream(stream: TextIO) -> TextIO:
  """Returns the stream that a `PrintableStream` writes to; others are returned as they are."""
  return cast(TextIO, getattr(stream, 'unfiltered', stream))
