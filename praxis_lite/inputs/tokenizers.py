"""Tokenizers: text to token ids and back.

A byte tokenizer needs no training and no file, and accepts any bytes. The vocabulary of a character tokenizer consists
of the characters of a text. SentencePiece needs a trained model file. Tokenizers of characters and SentencePiece need
UTF-8. All tokenizers count the bytes of text that each token represents, so that losses can be compared in nats per
byte.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from praxis_lite.common.config import REQUIRED, Config, Configurable
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.files import FETCH_LFS, is_lfs_pointer, unless_empty
from praxis_lite.inputs.files import Paths, check_utf8, find_files, read_file

if TYPE_CHECKING:
  import sentencepiece


class Tokens(NamedTuple):
  """The tokens of a document."""

  ids: np.ndarray  # [n], any integer dtype.
  # [n] int, the number of bytes of the document that each token represents; the sum is the document's length. None
  # means one byte for each token.
  num_bytes: np.ndarray | None


class ChatTokens(NamedTuple):
  """The tokens of a chat, or of a prompt and its answer. Labels weighted by `is_answer` train only the answers."""

  ids: np.ndarray  # [n] int32.
  is_answer: np.ndarray  # [n] bool, whether each token is part of an answer.


class BaseTokenizer(Configurable):
  """Converts text to token ids and back. Special ids: begin (bos) and end (eos) of a document, and padding (pad)."""

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    raise NotImplementedError

  @property
  def special_ids(self) -> tuple[int, int, int]:
    """The ids (bos, eos, pad)."""
    raise NotImplementedError

  @property
  def is_byte_level(self) -> bool:
    """Whether each token that is not special represents one byte."""
    return False

  @property
  def mask_id(self) -> int | None:
    """The id that replaces a hidden token; None if the tokenizer has no such id."""
    return None

  @property
  def control_ids(self) -> frozenset[int]:
    """The ids that do not represent text, such as the special ids."""
    return frozenset(self.special_ids) | (frozenset() if self.mask_id is None else {self.mask_id})

  def word_starts(self) -> np.ndarray:
    """Returns which ids begin a word, [vocab_size] bool; other ids continue the word of the token before them.

    White space and punctuation begin words; letters and digits after them continue the word. Raises ConfigError if the
    tokenizer does not know this.
    """
    raise ConfigError(f'{type(self).__name__} does not know where words begin')

  def token_bytes(self) -> list[bytes]:
    """Returns the bytes that each id represents inside a text, [vocab_size]; b'' for control ids.

    Raises ConfigError if the tokenizer does not know this.
    """
    raise ConfigError(f'{type(self).__name__} does not know which bytes its tokens stand for')

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without special ids around it."""
    return self.encode_documents([text.encode()])[0].ids.tolist()

  def prompt_ids(self, text: str) -> list[int]:
    """Returns the ids of a text that a model should continue."""
    return self.encode(text)

  def chat_tokens(self, messages: Sequence[Mapping[str, Any]], first: int = 0) -> ChatTokens:
    """Returns the tokens of a whole chat, and which of them are answers; see `HfTokenizer.chat_tokens`.

    Raises ConfigError if the tokenizer has no chat template.
    """
    raise ConfigError(
      f'{type(self).__name__} has no chat template, which the messages of chats need; set '
      "tokenizer_tpl=praxis_lite.inputs.HfTokenizer with the path of a chat model's tokenizer"
    )

  def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the ids of a chat to which a model adds its answer; see `HfTokenizer.chat_ids`."""
    return self.chat_tokens(messages).ids.tolist()

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of ids. Special ids are left out; invalid UTF-8 becomes U+FFFD."""
    raise NotImplementedError

  def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
    """Returns the tokens of each document, without special tokens. Documents are UTF-8 unless `is_byte_level`."""
    raise NotImplementedError


class ByteTokenizer(BaseTokenizer):
  """A tokenizer whose ids are the bytes of the UTF-8 text.

  By default the vocabulary is the 256 bytes, and all special ids are byte 0, which text does not contain. Set special
  ids of 256 and above for data that may contain byte 0, or to distinguish bos, eos and pad.

  Attributes:
    bos_id, eos_id, pad_id: begin of document, end of document, padding.
    min_vocab_size: least vocabulary size, for example to test a size that the mesh does not divide.
  """

  bos_id: int = 0
  eos_id: int = 0
  pad_id: int = 0
  min_vocab_size: int = 256

  def __post_init__(self) -> None:
    for name, value in zip(('bos_id', 'eos_id', 'pad_id'), self.special_ids):
      if value < 0:
        raise ConfigError(f'ByteTokenizer.{name}: expected an id of at least 0, got {value}')

  @property
  def vocab_size(self) -> int:
    return max(256, self.min_vocab_size, *(i + 1 for i in self.special_ids))

  @property
  def special_ids(self) -> tuple[int, int, int]:
    return self.bos_id, self.eos_id, self.pad_id

  @property
  def is_byte_level(self) -> bool:
    return True

  def word_starts(self) -> np.ndarray:
    # Bytes of 128 and above are parts of characters outside ASCII.
    return np.array([i >= 256 or not (i >= 128 or _is_of_word(chr(i))) for i in range(self.vocab_size)])

  def token_bytes(self) -> list[bytes]:
    return [bytes([i]) if i < 256 and i not in self.control_ids else b'' for i in range(self.vocab_size)]

  def decode(self, ids: Iterable[int]) -> str:
    # A model with an enlarged vocabulary may produce ids that are neither bytes nor special.
    kept = [int(i) for i in ids if int(i) not in self.special_ids]
    data = b''.join(bytes([i]) if 0 <= i < 256 else b'\xef\xbf\xbd' for i in kept)
    return data.decode(errors='replace')

  def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
    return [Tokens(np.frombuffer(d, np.uint8), None) for d in documents]


class CharTokenizer(BaseTokenizer):
  """A tokenizer whose tokens are characters, numbered from 0 by code point. One more id is bos, eos and pad.

  A run stores the vocabulary in its directory, so the ids stay the same even if the text changes or is removed.

  Attributes:
    path: the text whose characters are the vocabulary; takes the forms of `TextInput.path`.
    vocabulary: the characters, in the order of their ids; None uses the characters of the text at `path`.

  Raises:
    ConfigError: neither is set, or `vocabulary` has a character twice.
    DataError (when the vocabulary is first needed): the text cannot be read, is empty or is not UTF-8; or a text to
      encode has a character that is not in the vocabulary.
  """

  path: Paths | Callable[[], Paths] | Config | None = None
  vocabulary: str | None = None

  def __post_init__(self) -> None:
    if self.vocabulary is None and self.path is None:
      raise ConfigError('CharTokenizer.path: expected the text whose characters are the vocabulary, got None')
    twice = {c for c, n in collections.Counter(self.vocabulary or '').items() if n > 1}
    if twice:
      raise ConfigError(f'CharTokenizer.vocabulary: it contains {min(twice)!r} more than once')

  @functools.cached_property
  def characters(self) -> str:
    """The vocabulary: the character of each id."""
    if self.vocabulary is not None:
      return self.vocabulary
    where = 'CharTokenizer.path'
    found: set[str] = set()
    for file in find_files(self.path, where):
      data = read_file(file, where)
      check_utf8(data, file, where)
      found.update(data.decode())
    if not found:
      raise DataError(f'{where}: there is no text in {self.path!r}')
    return ''.join(sorted(found))

  @property
  def vocab_size(self) -> int:
    return len(self.characters) + 1

  @property
  def special_ids(self) -> tuple[int, int, int]:
    return (len(self.characters),) * 3

  def decode(self, ids: Iterable[int]) -> str:
    # A model with an enlarged vocabulary may produce ids that are neither characters nor special.
    kept = [int(i) for i in ids if int(i) not in self.special_ids]
    return ''.join(self.characters[i] if 0 <= i < len(self.characters) else '\ufffd' for i in kept)

  def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
    return [self._encode(code_points(d.decode())) for d in documents]

  def word_starts(self) -> np.ndarray:
    return np.array([*(not _is_of_word(c) for c in self.characters), True])

  def token_bytes(self) -> list[bytes]:
    return [*(c.encode() for c in self.characters), b'']

  def _encode(self, codes: np.ndarray) -> Tokens:
    ids = self._id_of_code[np.minimum(codes, len(self._id_of_code) - 1)]
    if (ids < 0).any():
      unknown = chr(codes[ids < 0][0])
      raise DataError(
        f'{unknown!r} (U+{ord(unknown):04X}) is not among the {len(self.characters)} characters of the vocabulary, '
        f'{self.characters[:100]!r}{"..." if len(self.characters) > 100 else ""}'
      )
    return Tokens(ids, utf8_sizes(codes))

  @functools.cached_property
  def _id_of_code(self) -> np.ndarray:
    """The id of each code point up to the vocabulary's largest, then -1 for all larger ones. -1 means no id."""
    codes = np.array([ord(c) for c in self.characters], np.int64)
    ids = np.full(codes.max(initial=0) + 2, -1, np.int32)
    ids[codes] = np.arange(len(codes))
    return ids


def _is_of_word(character: str) -> bool:
  return character.isalnum() or character == '_'


def code_points(text: str) -> np.ndarray:
  """Returns the code point of each character, [n] uint32."""
  return np.frombuffer(text.encode('utf-32-le'), np.uint32)


def utf8_sizes(codes: np.ndarray) -> np.ndarray:
  """Returns the number of bytes of each code point in UTF-8."""
  return 1 + np.searchsorted(np.array([0x7F, 0x7FF, 0xFFFF], np.uint32), codes)


class SentencePieceTokenizer(BaseTokenizer):
  """A trained SentencePiece model (Kudo and Richardson, 2018). Needs `pip install praxis_lite[text]`.

  The special ids come from the model. If it has only one of bos and eos, that one serves as both; if it has no pad,
  id 0 serves as pad.

  Attributes:
    model_path: file of the model, as written by `spm_train`.
    num_threads: number of threads that encode documents.
  """

  model_path: str = REQUIRED
  num_threads: int = 2

  @functools.cached_property
  def _model(self) -> sentencepiece.SentencePieceProcessor:
    try:
      import sentencepiece
    except ImportError:
      raise ConfigError(
        'SentencePieceTokenizer: the package sentencepiece is not installed; pip install praxis_lite[text]'
      ) from None
    with loading_file(self.model_path, 'SentencePieceTokenizer.model_path', 'a SentencePiece model'):
      return sentencepiece.SentencePieceProcessor(model_file=self.model_path)

  @property
  def vocab_size(self) -> int:
    return int(self._model.vocab_size())

  @property
  def special_ids(self) -> tuple[int, int, int]:
    known = [i for i in (self._model.bos_id(), self._model.eos_id()) if i >= 0]
    if not known:
      raise ConfigError(f'SentencePieceTokenizer.model_path: {self.model_path} has neither a bos nor an eos id')
    return known[0], known[-1], max(self._model.pad_id(), 0)

  @property
  def mask_id(self) -> int | None:
    found = (self._model.piece_to_id(piece) for piece in ('[MASK]', '<mask>'))
    return next((i for i in found if not self._model.is_unknown(i)), None)

  @property
  def control_ids(self) -> frozenset[int]:
    model = self._model
    return super().control_ids | {i for i in range(self.vocab_size) if model.is_control(i) or model.is_unknown(i)}

  def word_starts(self) -> np.ndarray:
    # U+2581 represents the space before a word.
    return np.array([self._model.id_to_piece(i).startswith('\u2581') for i in range(self.vocab_size)])

  def token_bytes(self) -> list[bytes]:
    control = self.control_ids
    return [b'' if i in control else piece_bytes(self._model.id_to_piece(i)) for i in range(self.vocab_size)]

  def decode(self, ids: Iterable[int]) -> str:
    return self._model.decode([i for i in map(int, ids) if i not in self.special_ids and 0 <= i < self.vocab_size])

  def encode_documents(self, documents: Sequence[bytes]) -> list[Tokens]:
    out = []
    for group in groups_of_documents(documents):
      encoded = self._model.encode([d.decode() for d in group], num_threads=self.num_threads)
      for document, ids in zip(group, (np.asarray(ids, np.int32) for ids in encoded)):
        out.append(Tokens(ids, _spread(len(document), self._piece_bytes[ids])))
    return out

  @functools.cached_property
  def _piece_bytes(self) -> np.ndarray:
    """The number of bytes of each piece; 1 for the unknown piece."""
    model = self._model
    pieces = ['' if model.is_control(i) else model.id_to_piece(i) for i in range(self.vocab_size)]
    return np.array([model.is_unknown(i) or len(piece_bytes(piece)) for i, piece in enumerate(pieces)], np.int64)


@contextlib.contextmanager
def loading_file(file: str, where: str, kind: str) -> Iterator[None]:
  """Raises DataError, which begins with `where`, if there is no such file, or the block fails to load it."""
  if not os.path.isfile(file):
    raise DataError(f'{where}: there is no file {file}')
  if is_lfs_pointer(file):
    raise DataError(f'{where}: {file} {FETCH_LFS}')
  try:
    yield
  except Exception as error:  # The package tokenizers raises no narrower type.
    raise DataError(f'{where}: {file} {unless_empty(file, f"is not {kind}: {error}")}') from None


def piece_bytes(piece: str) -> bytes:
  """Returns the bytes of a piece of SentencePiece: U+2581 is a space, and <0x41> is one byte."""
  if len(piece) == 6 and piece.startswith('<0x') and piece.endswith('>'):
    return bytes.fromhex(piece[3:5])
  return piece.replace('\u2581', ' ').encode()


def groups_of_documents(documents: Sequence[bytes]) -> Iterator[list[bytes]]:
  """Yields the documents in groups of about 2 MiB, to be encoded one group at a time.

  Tokenizer packages return Python lists, which need much more memory than arrays.
  """
  number_of_group = np.cumsum([len(d) for d in documents]) // 2**21
  for _, group in itertools.groupby(zip(number_of_group, documents), operator.itemgetter(0)):
    yield [document for _, document in group]


def _spread(total: int, sizes: np.ndarray) -> np.ndarray:
  """Returns integers, [n], whose sum is exactly `total`, roughly in proportion to `sizes`.

  This corrects the sizes of pieces, which may not sum to the size of the text, because SentencePiece's normalization
  drops and replaces characters.
  """
  ends = np.cumsum(sizes if sizes.any() else np.ones_like(sizes))
  if not len(ends):
    return ends
  return np.diff(np.rint(ends * (total / ends[-1])).astype(np.int64), prepend=0)
