"""Texts, or pairs of texts, with a class as batches for a `SequenceClassifier`.

    text a, class          ^ a a a $             ^ begins and $ ends a text
    texts a and b, class   ^ a a a $ b b b $     types 0 0 0 0 0 1 1 1 1
    pair_style='roberta'   ^ a a a $ $ b b b $   all types 0

A batch has `ids`, `segment_ids` (0 is padding) and `token_type_ids`, [B, T] int32; `label`, [B] int32; and `weights`,
[B] float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, DataError, check_choice, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.inputs.lines import parse_object, split_tsv
from praxis_lite.inputs.rows import Rows, Struct
from praxis_lite.inputs.text_examples import TextExamplesInput

Labelled = Sequence[Sequence[str | int]]


class _Example(NamedTuple):
  """The tokens of a row, the position of the first token of type 1, and the class."""

  ids: np.ndarray
  second: int
  label: int


class LabelledTextInput(TextExamplesInput):
  """Texts with a class, from TSV or JSON Lines files or from a function.

  Attributes: the same as for `TextExamplesInput`, and
    examples: instead of `path`, tuples of the values of `fields`, or a function (or the `Config` of one) that returns
      them.
    seq_len: T, tokens of a row, including begin and end tokens.
    fields: the names of the text, or of both texts, and of the class.
    classes: the names of the classes, in the order of their numbers; None means that classes are numbers.
    pair_style: 'bert' puts one end token between two texts, and gives the tokens of the second type 1. 'roberta' puts
      two end tokens between them, and gives all tokens type 0.
    truncate: whether to cut the longer text of a row that is too long, instead of treating the row as a bad record.
    unlabelled: whether the texts only get classified. Then lines may lack the class, plain text files are accepted too,
      and each label is 0.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, or there are no examples. Unless `on_bad_record` is 'skip', also
      if a line is not an example, is not UTF-8, has an empty text or an unknown class, or is too long.
  """

  examples: Labelled | Callable[[], Labelled] | Config | None = None
  seq_len: int = REQUIRED
  fields: tuple[str, ...] = ('text', 'label')
  classes: tuple[str, ...] | None = None
  pair_style: str = 'bert'
  truncate: bool = False
  unlabelled: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(seq_len=3)
    check_choice(f'{self.label}.pair_style', self.pair_style, ('bert', 'roberta'))
    if len(self.fields) not in (2, 3):
      raise ConfigError(
        f'{self.label}.fields: expected the names of a text and its class, or of two texts and their class, got '
        f'{self.fields!r}'
      )
    if len(set(self.classes or ())) < len(self.classes or ()):
      raise ConfigError(f'{self.label}.classes: expected the name of each class once, got {self.classes!r}')

  @property
  def num_examples(self) -> int:
    return len(self._examples)

  def example_struct(self) -> Struct:
    row = {name: jax.ShapeDtypeStruct((self.seq_len,), np.int32) for name in ('ids', 'segment_ids', 'token_type_ids')}
    return row | {'label': jax.ShapeDtypeStruct((), np.int32), 'weights': jax.ShapeDtypeStruct((), np.float32)}

  def rows(self, indices: np.ndarray) -> Rows:
    batch = self.blank_rows(len(indices))
    batch['weights'][:] = 1
    for row, index in enumerate(indices):
      ids, second, label = self._examples[index]
      batch['ids'][row, : len(ids)] = ids
      batch['segment_ids'][row, : len(ids)] = 1
      batch['token_type_ids'][row, second : len(ids)] = 1
      batch['label'][row] = label
    return batch

  @functools.cached_property
  def _examples(self) -> list[_Example]:
    if self.unlabelled and self.path is not None:
      return self._encode_all(self.fields, _TEXTS, self._encode, 'texts')
    return self._encode_all(self.fields, _LINES, self._encode, 'texts with a class')

  def _forms(self) -> tuple[str, str]:
    return f'tuples {self.fields}', str(self.fields)

  def _is_example(self, values: object) -> bool:
    return isinstance(values, tuple | list) and len(values) == len(self.fields)

  def _encode(self, values: Sequence[object]) -> _Example:
    """Returns the tokens and the class of an example; raises DataError if the example cannot be used."""
    *texts, label = values
    number = 0 if self.unlabelled else self._class_of(label)
    tokens = [self._tokens_of(name, text) for name, text in zip(self.fields, texts)]
    between = 2 if self.pair_style == 'roberta' else 1
    room = self.seq_len - 2 - between * (len(tokens) - 1)
    if sum(map(len, tokens)) > room and not self.truncate:
      raise DataError(
        f'the text has {number_of(sum(map(len, tokens)), "token")}, and seq_len = {self.seq_len} has room for {room}; '
        'set a larger one, or truncate=True'
      )
    bos, eos, _ = self.tokenizer.special_ids
    first, *others = cut_longest(tokens, room)
    ids = [bos, *first, eos]
    second = len(ids) if between == 1 else self.seq_len
    for other in others:
      ids += [*[eos] * (between - 1), *other, eos]
    return _Example(np.asarray(ids, np.min_scalar_type(self.vocab_size - 1)), second, number)

  def _tokens_of(self, name: str, text: object) -> list[int]:
    if not isinstance(text, str):
      raise DataError(f'its {name} is {text!r}; expected a text')
    tokens = self.tokenizer.encode(text)
    if not tokens:
      raise DataError(f'its {name} has no tokens')
    return tokens

  def _class_of(self, label: object) -> int:
    if self.classes is not None:
      if label not in self.classes:
        close = did_you_mean(str(label), self.classes)
        raise DataError(f'its class {label!r} is not one of {", ".join(map(repr, self.classes))}.{close}')
      return self.classes.index(str(label))
    if isinstance(label, str) and label.strip().isdecimal():
      return int(label)
    if type(label) is not int or label < 0:
      raise DataError(f'its class is {label!r}; expected a number of at least 0, or set classes to the names of all')
    return label


def cut_longest(texts: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
  """Cuts the ends of the longest texts, so that all texts have at most `room` tokens in total."""
  lengths = [len(text) for text in texts]
  while sum(lengths) > room:
    longest = lengths.index(max(lengths))
    lengths[longest] -= 1
  return [text[:length] for text, length in zip(texts, lengths)]


def _split_json(line: str, fields: tuple[str, ...]) -> Sequence[object]:
  values = parse_object(line)
  for name in fields:
    if name not in values:
      raise ValueError(f'has no {name!r}; its fields: {", ".join(map(str, values)) or "none"}')
  return [values[name] for name in fields]


def _texts_of_tsv(line: str, fields: tuple[str, ...]) -> Sequence[object]:
  has_class = line.count('\t') == len(fields) - 1
  return [*split_tsv(line, fields if has_class else fields[:-1])[: len(fields) - 1], None]


def _text_of_line(line: str, fields: tuple[str, ...]) -> Sequence[object]:
  if len(fields) > 2:
    raise ValueError(f'is one text; expected {" and ".join(fields[:-1])}, in a .tsv or .jsonl file')
  return [line, None]


_Parsers = dict[str, Callable[[str, tuple[str, ...]], Sequence[object]]]
_LINES: _Parsers = {'.tsv': split_tsv, '.jsonl': _split_json}
_TEXTS: _Parsers = {
  '.tsv': _texts_of_tsv,
  '.jsonl': lambda line, fields: [*_split_json(line, fields[:-1]), None],
  '.txt': _text_of_line,
}
