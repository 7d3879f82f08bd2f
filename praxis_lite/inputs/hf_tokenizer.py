"""Hugging Face tokenizers: `tokenizer.json`, its special tokens, and the chat template next to it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from praxis_lite.common.config import REQUIRED
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.files import parse_json
from praxis_lite.inputs.chat_template import ChatTemplate, Messages
from praxis_lite.inputs.tokenizers import (
  BaseTokenizer,
  ChatTokens,
  Tokens,
  code_points,
  groups_of_documents,
  loading_file,
  piece_bytes,
  utf8_sizes,
)

if TYPE_CHECKING:
  import tokenizers

TOKENIZER_FILE = 'tokenizer.json'
_WORD_MARKS = ('\u0120', '\u2581')  # The characters for the space before a word in byte-level BPE and in SentencePiece.


class HfTokenizer(BaseTokenizer):
  """A tokenizer of the package `tokenizers`. Needs `pip install praxis_lite[hf]`.

  The package transformers writes other files next to `tokenizer.json`: tokenizer_config.json, special_tokens_map.json,
  generation_config.json, config.json and chat_template.jinja. They name the tokens that begin (bos) and end (eos) a
  document, and have the chat template. If they name only one of bos and eos, it serves as both; if they name no pad,
  eos serves as pad.

  Attributes:
    path: a folder with `tokenizer.json`, or the path of that file.
    bos_token, eos_token, pad_token: special tokens to use in place of those in the files.
  """

  _how_to_set = {
    'path': 'name the folder of a tokenizer, or take bytes as tokens: tokenizer_tpl=praxis_lite.inputs.ByteTokenizer'
  }

  path: str = REQUIRED
  bos_token: str | None = None
  eos_token: str | None = None
  pad_token: str | None = None

  @functools.cached_property
  def _model(self) -> tokenizers.Tokenizer:
    try:
      import tokenizers
    except ImportError:
      raise ConfigError('HfTokenizer: the package tokenizers is not installed; pip install praxis_lite[hf]') from None
    file = os.path.join(self.folder, TOKENIZER_FILE) if os.path.isdir(self.path) else self.path
    with loading_file(file, 'HfTokenizer.path', 'a tokenizer'):
      return tokenizers.Tokenizer.from_file(file)

  @property
  def vocab_size(self) -> int:
    return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=-1)

  @functools.cached_property
  def special_ids(self) -> tuple[int, int, int]:
    bos, eos, pad = (self._special_id(name) for name in ('bos', 'eos', 'pad'))
    # BERT's tokenizer calls the tokens that begin and end a document cls and sep.
    bos, eos = (self._special_id(other) if own is None else own for own, other in ((bos, 'cls'), (eos, 'sep')))
    known = [i for i in (bos, eos) if i is not None]
    if not known:
      raise ConfigError(
        f'HfTokenizer.eos_token: the files beside {self.path} name neither a bos nor an eos token; set eos_token'
      )
    return known[0], known[-1], known[-1] if pad is None else pad

  @functools.cached_property
  def mask_id(self) -> int | None:
    return self._special_id('mask')

  @functools.cached_property
  def control_ids(self) -> frozenset[int]:
    added = self._model.get_added_tokens_decoder()
    return super().control_ids | {int(i) for i, token in added.items() if token.special}

  def word_starts(self) -> np.ndarray:
    pieces = [self._model.id_to_token(i) or '' for i in range(self.vocab_size)]
    marks = _WORD_MARKS if any(piece.startswith(_WORD_MARKS) for piece in pieces) else None
    # WordPiece marks the tokens that continue a word; other kinds mark the tokens that begin one.
    return np.array([piece.startswith(marks) if marks else not piece.startswith('##') for piece in pieces])

  def token_bytes(self) -> list[bytes]:
    described = json.loads(self._model.to_str())
    decoder = json.dumps(described.get('decoder'))
    if '"WordPiece"' in decoder:
      raise ConfigError(f'HfTokenizer.path: the tokens of {self.path} are words without the spaces between them')
    added = {int(i): token.content for i, token in self._model.get_added_tokens_decoder().items()}
    found = []
    for i in range(self.vocab_size):
      piece = self._model.id_to_token(i)
      if piece is None or i in self.control_ids:
        found.append(b'')
      elif i in added:
        found.append(added[i].encode())
      elif '"ByteLevel"' in decoder:
        found.append(bytes(_BYTE_OF_CHARACTER[c] for c in piece))
      else:
        found.append(piece_bytes(piece))
    return found

  def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
    out = []
    for group in groups_of_documents(documents):
      texts = [document.decode() for document in group]
      for text, encoded in zip(texts, self._model.encode_batch(texts, add_special_tokens=False)):
        out.append(Tokens(np.asarray(encoded.ids, np.int32), _bytes_of(text, encoded.offsets)))
    return out

  def decode(self, ids: Iterable[int]) -> str:
    known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
    return str(self._model.decode(known, skip_special_tokens=True))

  def prompt_ids(self, text: str) -> list[int]:
    """Returns the ids of a text to continue, with the special tokens that the tokenizer puts first, such as bos."""
    ids = [int(i) for i in self._model.encode(text, add_special_tokens=True).ids]
    return ids[:-1] if ids[-1:] == [self.special_ids[1]] else ids

  # ---------------------------------------------------------------- chats

  def chat_prompt(self, messages: Messages) -> str:
    """Returns the text to which a chat model adds its answer, formatted by the tokenizer's chat template.

    Messages have a `role` ('system', 'user' or 'assistant') and the `content`. Raises DataError if there is no
    template, or it fails.
    """
    return self._template.render(messages, add_generation_prompt=True).text

  def chat_ids(self, messages: Messages) -> list[int]:
    """Returns the ids of `chat_prompt(messages)`. Special tokens that the template writes as text get their ids."""
    return [int(i) for i in self._model.encode(self.chat_prompt(messages), add_special_tokens=False).ids]

  def chat_tokens(self, messages: Messages, first: int = 0) -> ChatTokens:
    """Returns the tokens of a whole chat, to train on, and which of them are answers.

    An answer is text that the template marks by `{% generation %}`; without that tag, it is the text that a message of
    the role 'assistant' adds. Only answers in message `first`, counted from 0, and later messages count. Raises
    DataError if there is no template, or if the template fails or does not show where answers are.
    """
    text, answers = self._template.answers(messages, first)
    encoded = self._model.encode(text, add_special_tokens=False)
    starts, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
    is_answer = np.zeros(len(starts), bool)
    for start, end in answers:
      is_answer |= (starts < end) & (ends > start)
    return ChatTokens(np.asarray(encoded.ids, np.int32), is_answer)

  @property
  def _template(self) -> ChatTemplate:
    specials = {f'{name}_token': self._special_token(name) or '' for name in ('bos', 'eos', 'pad', 'unk')}
    return ChatTemplate(self._chat_template(), specials, f'HfTokenizer.path: the chat template of {self.path}')

  def _chat_template(self) -> str:
    file = os.path.join(self.folder, 'chat_template.jinja')
    if os.path.isfile(file):
      with open(file, encoding='utf-8') as f:
        return f.read()
    template = self._settings.get('chat_template')
    if isinstance(template, list):  # Several templates, each with a name.
      template = next((t.get('template') for t in template if t.get('name') == 'default'), None)
    if not isinstance(template, str):
      raise DataError(
        f'HfTokenizer.path: there is no chat template in {self.folder}; this tokenizer does not belong to a chat model'
      )
    return template

  # ---------------------------------------------------------------- the files next to tokenizer.json

  @property
  def folder(self) -> str:
    """The folder with the files of the tokenizer."""
    return self.path if os.path.isdir(self.path) else os.path.dirname(os.path.abspath(self.path))

  @functools.cached_property
  def _settings(self) -> dict[str, Any]:
    """The settings in the files next to the tokenizer; if several files have a setting, the first file wins."""
    found: dict[str, Any] = {}
    for name in ('tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json', 'config.json'):
      file = os.path.join(self.folder, name)
      if os.path.isfile(file):
        try:
          content = dict(parse_json(Path(file).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
          raise DataError(f'HfTokenizer.path: {file} is not a JSON object: {error}') from None
        found = {**content, **{k: v for k, v in found.items() if v is not None}}
    return found

  def _special_token(self, name: str) -> str | None:
    given: str | None = getattr(self, f'{name}_token', None)
    token = given if given is not None else self._settings.get(f'{name}_token')
    return token.get('content') if isinstance(token, dict) else token

  def _special_id(self, name: str) -> int | None:
    token = self._special_token(name)
    found = None if token is None else self._model.token_to_id(token)
    if found is not None:
      return int(found)
    if getattr(self, f'{name}_token', None) is not None:
      raise ConfigError(f'HfTokenizer.{name}_token: {self.path} has no token {token!r}')
    number = self._settings.get(f'{name}_token_id')
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) else None


def _characters_of_bytes() -> dict[str, int]:
  """Returns the byte for each character of byte-level BPE.

  A printable byte is its own character; the characters of all other bytes are U+0100 and above.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _characters_of_bytes()


def _bytes_of(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
  """Returns the number of bytes of the text that each token represents, [n], given each token's range of characters.

  The sum is the size of the text. If several tokens share one character, the first gets all of its bytes.
  """
  if not offsets:
    return np.zeros(0, np.int64)
  before = np.concatenate([[0], np.cumsum(utf8_sizes(code_points(text)))])  # The number of bytes before each character.
  ends = np.maximum.accumulate(before[np.array([end for _, end in offsets])])
  ends[-1] = before[-1]
  return np.diff(ends, prepend=0)
