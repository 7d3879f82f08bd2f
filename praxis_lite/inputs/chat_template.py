"""Chat templates: from messages to text, and which parts of the text are answers.

A template is a jinja2 program that comes with a checkpoint from someone else. So it runs in jinja2's sandbox, and its
ranges may have only a million numbers in total, which stops nested ranges early; other loops are not limited. A
template may mark the answers:    {% generation %}{{ message.content }}<|end|>{% endgeneration %}
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from praxis_lite.common.errors import ConfigError, DataError, did_you_mean, first_line

if TYPE_CHECKING:
  import jinja2.nodes
  import jinja2.parser
  from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]
_MOST_NUMBERS = 1_000_000
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# What a template may raise, besides jinja2's own errors.
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError)
_TAG = re.compile(r'{%[-+]?\s*generation\b')


class ChatText(NamedTuple):
  """A chat as text, and (start, end) of each part of the text that is an answer, in characters."""

  text: str
  answers: list[tuple[int, int]]


class ChatTemplate:
  """A chat template: a jinja2 program with the values of its variables for special tokens, such as `bos_token`.

  `where` is the name of the template in error messages.
  """

  def __init__(self, source: str, specials: Mapping[str, str], where: str):
    self._source, self._specials, self._where = source, specials, where

  def render(self, messages: Messages, *, add_generation_prompt: bool) -> ChatText:
    """Returns the text of a chat; with `add_generation_prompt`, it ends with the beginning of an answer.

    Messages have a `role`, such as 'system', 'user' or 'assistant', and the `content`. The template may define other
    roles.

    Raises:
      DataError: the template fails, or a role is misspelled or unknown to the template.
      ConfigError: the package jinja2 is not installed.
    """
    try:
      import jinja2
    except ImportError:
      raise ConfigError(
        'HfTokenizer: chat templates need the package jinja2, which is not installed; pip install praxis_lite[hf]'
      ) from None
    # These marks surround each answer in the rendered text, because the template may go on computing with an answer
    # after marking it. They are random, so a message cannot contain them by chance.
    begin, end = (f'\ue000{secrets.token_hex(8)}{kind}\ue001' for kind in 'be')
    try:
      template = _environment(begin, end).from_string(self._source)
      marked = template.render(
        messages=[*map(dict, messages)], add_generation_prompt=add_generation_prompt, tools=None, **self._specials
      )
    except (jinja2.TemplateError, *_FAILURES) as error:
      raise DataError(f'{self._where} fails: {first_line(error)}') from None
    self._check_roles(messages, marked)
    return _strip_marks(marked, begin, end)

  def _check_roles(self, messages: Messages, text: str) -> None:
    """Raises DataError for a role that is misspelled, or that the template neither mentions nor writes.

    Without this check, many templates would treat such a message as the assistant's.
    """
    for number, message in enumerate(messages, 1):
      role = str(message.get('role'))
      if role in _ROLES or any(f'{quote}{role}{quote}' in self._source for quote in ('"', "'")):
        continue
      meant = did_you_mean(role, _ROLES, cutoff=0.75)
      if meant or role not in text:
        known = ', '.join(_ROLES)
        raise DataError(f'message {number} has the role {role!r}; expected one of {known}, or of {self._where}.{meant}')

  def answers(self, messages: Messages, first: int = 0) -> ChatText:
    """Returns the text of a whole chat, with the answers that the template marks.

    If it marks none, an answer is the text that an assistant's message adds to the text of the messages before it.
    Only the answers in message `first`, counted from 0, and in later messages are returned.

    Raises:
      DataError: the template fails; or it marks no answers and changes the text of earlier messages.
    """
    whole = self.render(messages, add_generation_prompt=False)
    if _TAG.search(self._source):
      before = len(self.render(messages[:first], add_generation_prompt=False).answers) if first else 0
      return ChatText(whole.text, whole.answers[before:])
    answers = []
    for i, message in enumerate(messages):
      if i >= first and message.get('role') == 'assistant':
        prompt = self.render(messages[:i], add_generation_prompt=True).text if i else ''
        after = self.render(messages[: i + 1], add_generation_prompt=False).text
        if not (after.startswith(prompt) and whole.text.startswith(after)):
          raise DataError(
            f'{self._where} does not mark answers by {{% generation %}}, and its text does not show where they are'
          )
        answers.append((len(prompt), len(after)))
    return ChatText(whole.text, answers)


def _environment(begin: str, end: str) -> ImmutableSandboxedEnvironment:
  import jinja2
  from jinja2.ext import Extension
  from jinja2.sandbox import ImmutableSandboxedEnvironment

  class Generation(Extension):
    """A jinja2 extension for the tag `generation`, which puts marks around its text."""

    tags = {'generation'}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method('mark'), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
      return f'{begin}{caller()}{end}'

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  left = _MOST_NUMBERS

  def limited_range(*bounds: int) -> range:
    nonlocal left
    numbers = range(*bounds)
    left -= len(numbers)
    if left < 0:
      raise jinja2.TemplateError(f'its ranges have more than {_MOST_NUMBERS:,} numbers in all')
    return numbers

  extensions = ['jinja2.ext.loopcontrols', Generation]
  environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
  environment.filters['tojson'] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
  environment.globals['range'] = limited_range
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: datetime.now().strftime(form)
  return environment


def _strip_marks(marked: str, begin: str, end: str) -> ChatText:
  first, *parts = marked.split(begin)
  text, answers = first, []
  for part in parts:
    answer, _, after = part.partition(end)
    answers.append((len(text), len(text) + len(answer)))
    text += answer + after
  return ChatText(text.replace(end, ''), answers)
