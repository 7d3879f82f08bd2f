"""Text from untrusted sources, and text with secrets: escapes what a terminal would act on, and removes passwords.

A name in a record, a metric, a path or an error may contain escape sequences. A terminal that obeys them moves the
cursor, writes to the clipboard or hides what was printed. `printable` makes them visible characters. Others may read
what is recorded, so `remove_secrets` removes passwords from URLs, and the values of fields whose names say that they
are secret.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TextIO, cast

# Replaces a password.
LEFT_OUT = '***'

# scheme://user:password@; a password may contain / and @; a port is not a password.
_PASSWORD = re.compile(r'(?<=://)(?P<user>[^\s/?#:@]*):(?!\d{1,5}(?:[/?#]|\s|$))[^\s?#]*@')
# In http and https URLs, a user without a password is a token.
_TOKEN = re.compile(r'(?<=http://|ttps://)[^\s/?#:@]+@')
_NAMES = r'(?:token(?!i)|secret|passw(?:or)?d|signature|credential|(?:api|access|private)_?key)'
_IN_QUERY = re.compile(rf'(?i)(?P<name>[?&](?:[\w.%-]*{_NAMES}[\w.%-]*|sig|key|auth)=)[^&#\s\'"]+')
_SECRET_NAME = re.compile(
  r'(?i)(?:^|_)(?:password|passwd|secret|api_?key|(?:access|auth)_?token|(?:secret|access|private)_?key)$'
)
_ASSIGNED = re.compile(r'(?P<path>[\w.\[\]*-]+)=(?P<value>.+)', re.DOTALL)


def printable(text: str, *, one_line: bool = False) -> str:
  """Returns text in which everything that a terminal would act on is escaped as in Python: `\\x1b`, `\\u202e`.

  Args:
    text: from anyone. Line ends, tabs, spaces of any kind and letters of any language are kept.
    one_line: escape line ends and tabs too.
  """
  if text.isprintable():
    return text
  kept = '' if one_line else '\n\t'
  return ''.join(
    c if c.isprintable() or c in kept or unicodedata.category(c) == 'Zs' else c.encode('unicode_escape').decode()
    for c in text
  )


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
  """Whether the field at a path of a config is a password, judging by its name."""
  return _SECRET_NAME.search(path.lstrip('-').rpartition('.')[2]) is not None


def has_lost_secret(text: str) -> bool:
  """Whether `text` contains a URL from which a secret was removed."""
  return '://' in text and (f'{LEFT_OUT}@' in text or f'={LEFT_OUT}' in text)


class PrintableStream:
  """A text stream that makes everything `printable`, then writes it to the stream `unfiltered`."""

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
  """Returns the underlying stream of a `PrintableStream`; returns other streams unchanged."""
  return cast(TextIO, getattr(stream, 'unfiltered', stream))
