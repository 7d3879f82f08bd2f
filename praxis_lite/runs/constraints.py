"""Constrains continuations to a regular expression or a JSON schema; the package llguidance computes allowed tokens.

llguidance (Microsoft) comes with the extra `praxis_lite[constrain]`, and is imported when a constraint is made.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from praxis_lite.common.errors import ConfigError, DataError, UserError, first_line
from praxis_lite.common.files import parse_json, read_plain, unless_empty
from praxis_lite.inputs import BaseTokenizer
from praxis_lite.models.decoding import Constraint

# The number of rows or beams whose parser state is cached, so that each step parses only one token.
_MOST_STATES = 4096


class TextConstraint(Constraint):
  """Allows only tokens after which a continuation can still become a matching text, and then the end of the text."""

  def __init__(self, tokenizer: BaseTokenizer, grammar: str, where: str):
    library = _llguidance()
    self.eos_id, self._name = tokenizer.special_ids[1], where
    self.stop_ids = (self.eos_id,)
    self._end = np.arange(tokenizer.vocab_size) == self.eos_id
    self._tokenizer = library.LLTokenizer(library.TokenizerWrapper(_LlTokenizer(tokenizer)))
    if wrong := library.LLMatcher.validate_grammar(grammar, self._tokenizer):
      why = re.search(r'^error: (.*)', wrong, re.MULTILINE)  # For an expression that cannot be parsed.
      raise ConfigError(f'{where}: {why[1] if why else first_line(ValueError(wrong))}')
    self._matchers: collections.OrderedDict[tuple[int, ...], Any] = collections.OrderedDict()
    self._matchers[()] = library.LLMatcher(self._tokenizer, grammar)
    self._bits = library.numpy

  def __repr__(self) -> str:
    return f'<{self._name} at {id(self)}>'  # The result is part of the keys of a model's compiled programs.

  def __deepcopy__(self, memo: dict[int, object]) -> TextConstraint:
    return self  # Copies of a config share it, because it is immutable.

  def allowed_tokens(self, continuation: tuple[int, ...], vocab_size: int) -> np.ndarray:
    allowed = np.zeros(vocab_size, bool)
    if self.eos_id in continuation:
      return ~allowed  # The row has ended, so the next token is dropped.
    matcher = self._matcher(continuation)
    if matcher.is_error() or matcher.is_stopped():
      bits = self._end
    else:
      mask = self._bits.allocate_token_bitmask(1, self._tokenizer.vocab_size)
      self._bits.fill_next_token_bitmask(matcher, mask)
      bits = np.unpackbits(mask.view(np.uint8), bitorder='little').astype(bool)
    size = min(vocab_size, len(bits))
    allowed[:size] = bits[:size]
    if not allowed.any():
      allowed[self.eos_id] = True
    return allowed

  def is_match(self, continuation: list[int]) -> bool:
    """Whether the tokens of a continuation, with or without the end of the text, are a complete matching text."""
    tokens = continuation[: continuation.index(self.eos_id)] if self.eos_id in continuation else continuation
    matcher = self._matcher(tuple(tokens))
    return not matcher.is_error() and (matcher.is_stopped() or matcher.is_accepting())

  def _matcher(self, continuation: tuple[int, ...]) -> Any:
    """Returns the parser state after some tokens, computed from the cached state of the longest known prefix."""
    known = next(n for n in range(len(continuation), -1, -1) if continuation[:n] in self._matchers)
    self._matchers.move_to_end(continuation[:known])
    matcher = self._matchers[continuation[:known]]
    if known < len(continuation):
      matcher = matcher.deep_copy()
      if not matcher.is_stopped():
        matcher.consume_tokens(list(continuation[known:]))
      self._matchers[continuation] = matcher
      if len(self._matchers) > _MOST_STATES:
        self._matchers.move_to_end(())
        self._matchers.popitem(last=False)
    return matcher


def make_constraint(
  tokenizer: BaseTokenizer | None,
  regex: str | None,
  json_schema: str | os.PathLike[str] | Mapping[str, Any] | None,
  prefix: str = '',
) -> TextConstraint | None:
  """Returns the constraint for a regular expression or a JSON schema; None if both are None.

  Raises:
    UserError: both are given; or see `regex_constraint` and `json_constraint`. Messages put `prefix` before the names
      of the two settings.
  """
  if regex is not None and json_schema is not None:
    second = f'{prefix.rpartition(" ")[2]}json_schema'
    raise ConfigError(f'{prefix}regex and {second} cannot be combined; leave out one of them')
  if regex is not None:
    return regex_constraint(tokenizer, regex, f'{prefix}regex')
  return None if json_schema is None else json_constraint(tokenizer, json_schema, f'{prefix}json_schema')


def regex_constraint(tokenizer: BaseTokenizer | None, regex: str, where: str = 'regex') -> TextConstraint:
  """Returns a constraint that makes the whole continuation match a regular expression.

  Args:
    tokenizer: the tokenizer of the model; None raises UserError.
    regex: an expression in the syntax of Rust's crate `regex`, which has no lookaround and no backreferences.
    where: the name of the expression in messages.

  Raises:
    UserError: the expression is not valid, llguidance is not installed, or it is unknown what the tokens stand for.
  """
  if not isinstance(regex, str) or not regex:
    raise ConfigError(f'{where}: expected a regular expression, such as [0-9]+, got {regex!r}')
  known = _check_tokenizer(tokenizer, where)
  return TextConstraint(known, _llguidance().LLMatcher.grammar_from_regex(regex), f'{where}={regex!r}')


def json_constraint(
  tokenizer: BaseTokenizer | None, schema: str | os.PathLike[str] | Mapping[str, Any], where: str = 'json_schema'
) -> TextConstraint:
  """Returns a constraint that makes the continuation JSON of a schema, without optional white space.

  Args:
    tokenizer, where: see `regex_constraint`.
    schema: the JSON schema as a dict, or the path of a file.

  Raises:
    UserError: see `regex_constraint`; or the file cannot be read, or contains no JSON object.
  """
  known = _check_tokenizer(tokenizer, where)
  if isinstance(schema, str) and schema.lstrip().startswith('{'):
    raise ConfigError(
      f'{where}: expected the path of a file, or a dict in Python, as json.loads returns; got the schema'
    )
  if isinstance(schema, str | os.PathLike):
    file, where = schema, f'{where}={os.fspath(schema)}'
    try:
      schema = parse_json(read_plain(file))
    except OSError as error:
      raise DataError(f'{where}: {error.strerror or error}; expected a file with a JSON schema') from None
    except ValueError as error:
      raise DataError(f'{where}: {unless_empty(file, f"not JSON: {error}")}') from None
  if not isinstance(schema, Mapping):
    raise ConfigError(f'{where}: expected a JSON schema, which is an object, got {type(schema).__name__}')
  try:
    text = json.dumps(schema)
    grammar = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides={'whitespace_flexible': False})
  except (TypeError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise ConfigError(f'{where}: {first_line(error)}') from None
  return TextConstraint(known, grammar, where)


def _check_tokenizer(tokenizer: BaseTokenizer | None, where: str) -> BaseTokenizer:
  """Returns a tokenizer; raises UserError if there is none."""
  if tokenizer is None:
    raise UserError(f'{where}: needs a dataset with a tokenizer, but there is none')
  return tokenizer


@functools.cache
def _llguidance() -> Any:
  try:
    import llguidance
    import llguidance.numpy
  except ImportError:
    why = 'the package llguidance is not installed; pip install praxis_lite[constrain]'
    raise ConfigError(f'constrained decoding: {why}') from None
  return llguidance


class _LlTokenizer:
  """Adapts a tokenizer to the interface that llguidance expects."""

  def __init__(self, tokenizer: BaseTokenizer):
    self._tokenizer = tokenizer
    self.bos_token_id, self.eos_token_id = tokenizer.special_ids[:2]
    self.special_token_ids = sorted(tokenizer.control_ids)
    # The byte 0xff, which no text contains, marks special tokens.
    texts = tokenizer.token_bytes()
    self.tokens = [b'\xff<%d>' % i if i in tokenizer.control_ids else text for i, text in enumerate(texts)]
    self._texts, self._ids = texts, {text: i for i, text in enumerate(texts) if text}
    self._longest = max(map(len, texts), default=0)

  def __call__(self, text: bytes) -> list[int]:
    """Returns the tokens of a part of a text, given as bytes.

    If the tokenizer cannot encode it, takes the longest token that matches, again and again, until none matches.
    """
    with contextlib.suppress(UserError, UnicodeError):  # A part of a character, or one not in the vocabulary.
      ids = self._tokenizer.encode_documents([text])[0].ids.tolist()
      if b''.join(self._texts[i] for i in ids) == text:
        return ids
    found: list[int] = []
    while size := next((n for n in range(self._longest, 0, -1) if text[:n] in self._ids), 0):
      found.append(self._ids[text[:size]])
      text = text[size:]
    return found
