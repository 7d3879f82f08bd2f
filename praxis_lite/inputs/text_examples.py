"""TextExamplesInput: base of the inputs whose examples are texts, from TSV or JSON Lines files or from a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from praxis_lite.common.config import Config, build_at, template
from praxis_lite.common.errors import ConfigError, DataError, UserError
from praxis_lite.inputs.bad_records import BadRecord, RecordsInput
from praxis_lite.inputs.files import Paths, find_files
from praxis_lite.inputs.lines import FieldsT, read_lines
from praxis_lite.inputs.random_access import RandomAccessInput
from praxis_lite.inputs.rows import Rows, blank_rows, resolve_source
from praxis_lite.inputs.tokenizers import BaseTokenizer, ByteTokenizer

T = TypeVar('T')
Parsers = Mapping[str, Callable[[str, FieldsT], Any]]


class TextExamplesInput(RecordsInput, RandomAccessInput):
  """Base of the inputs of texts. The field that `_given` names, such as `examples`, may be set in place of `path`.

  Attributes:
    path: files `*.tsv`, with texts separated by tabs in each line; or `*.jsonl`, with an object in each line. It takes
      the forms of `TextInput.path`.
    tokenizer_tpl: config of the tokenizer, which is built as `tokenizer`.
  """

  path: Paths | Callable[[], Paths] | Config | None = None
  tokenizer_tpl: Config = template(ByteTokenizer)

  _given: ClassVar[str] = 'examples'

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.path is None) == (getattr(self, self._given) is None):
      raise ConfigError(
        f'{self.label}.path: expected either path, files with {self._given}, or {self._given}, a function'
        + (f"; both are set: leave one out, as in --set 'datasets[*].{self._given}=None'" if self.path else '')
      )
    self.tokenizer: BaseTokenizer = build_at(f'{self.label}.tokenizer_tpl', self.tokenizer_tpl)

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    return self.tokenizer.vocab_size

  def data_files(self) -> list[str]:
    return [] if self.path is None else find_files(self.path, f'{self.label}.path')

  def blank_rows(self, count: int) -> Rows:
    """Returns rows without examples: zeros, and the tokenizer's padding as tokens."""
    return blank_rows(count, self.example_struct(), self.tokenizer.special_ids[2])

  def _forms(self) -> tuple[str, str]:
    """Returns, for error messages, what the field should hold, such as 'a list of dicts', and what an example is."""
    raise NotImplementedError

  def _is_example(self, values: object) -> bool:
    """Whether an example from the field, not from a file, has the right form."""
    raise NotImplementedError

  def _encode_all(
    self, names: FieldsT, parsers: Parsers[FieldsT], encode: Callable[[Any], T], what: str = 'examples'
  ) -> list[T]:
    """Applies `encode` to each example; returns the results. Bad examples are left out.

    Args:
      names, parsers: see `read_lines`.
      encode: a function of an example in the form that a parser returns or the field holds. A UserError or ValueError
        of the function says what is wrong with the example.
      what: a name for the examples, in the plural, for the error if there are none.
    """
    field = self._given if self.path is None else 'path'
    kept = []
    for file, place, values in self._records(names, parsers):
      try:
        kept.append(encode(values))
      except ConfigError:  # This error is about the tokenizer, not about the example.
        raise
      except (UserError, ValueError) as error:
        self.leave_out(BadRecord(file, place, str(error)), field)
    if not kept:
      is_empty = field == 'path' and all(os.path.getsize(file) == 0 for file in self.data_files())
      raise DataError(f'{self.label}.{field}: ' + (f'{self.path} is empty' if is_empty else f'there are no {what}'))
    return kept

  def _records(self, names: FieldsT, parsers: Parsers[FieldsT]) -> Iterator[tuple[str, str, Any]]:
    """Yields the file, the place in it, and the values of each example.

    If there are no files, because the examples are in a field of the config, the name of this field is given instead.
    """
    if self.path is not None:
      yield from read_lines(self, self.path, names, parsers)
      return
    all_of_them, each = self._forms()
    examples, where = resolve_source(getattr(self, self._given)), f'{self.label}.{self._given}'
    if not isinstance(examples, Sequence) or isinstance(examples, str):
      raise ConfigError(f'{where}: expected {all_of_them}, or a function, got {examples!r}')
    for number, values in enumerate(examples):
      place = f'{self._given.removesuffix("s")} {number}'
      if not self._is_example(values):
        raise DataError(f'{where}: {place} is {values!r}; expected {each}')
      yield self._given, place, values
