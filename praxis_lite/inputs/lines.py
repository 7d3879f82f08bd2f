"""Examples in the lines of TSV and JSON Lines files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from praxis_lite.common.errors import DataError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import parse_json_line
from praxis_lite.inputs.bad_records import BadRecord, RecordsInput
from praxis_lite.inputs.files import find_files, read_file

T = TypeVar('T')
FieldsT = TypeVar('FieldsT', bound=tuple[str, ...])


def read_lines(
  data: RecordsInput, path: object, fields: FieldsT, parsers: Mapping[str, Callable[[str, FieldsT], T]]
) -> Iterator[tuple[str, str, T]]:
  """Yields the file, the place in it, and the parsed text of each line that is not blank.

  Args:
    data: the input; it counts each line that cannot be parsed as a bad record.
    path: the value of the input's field `path`; see `find_files`.
    fields: the names of the values in a line.
    parsers: for each ending of a file name, such as '.tsv', a function of a line and `fields` that returns the
      values; its ValueError says what is wrong with the line.
  """
  where = f'{data.label}.path'
  for file in find_files(path, where):
    parse = parsers.get(os.path.splitext(file)[1])
    if parse is None:
      raise DataError(f'{where}: {file} is neither {" nor ".join(f"*{ending}" for ending in parsers)}')
    for number, line in enumerate(read_file(file, where).split(b'\n'), 1):
      if not line.strip():
        continue
      try:
        yield file, f'line {number}', parse(line.removesuffix(b'\r').decode(), fields)
      except ValueError as error:  # Includes UnicodeDecodeError.
        data.leave_out(BadRecord(file, f'line {number}', str(error)))


def parse_object(line: str) -> dict[str, Any]:
  """Returns the JSON object in a line; raises ValueError if there is none."""
  try:
    values = parse_json_line(line)
  except ValueError as error:
    raise ValueError(f'is not JSON: {error}') from None
  if not isinstance(values, dict):
    raise ValueError('is no JSON object')
  return values


def split_tsv(line: str, names: Sequence[str], expected: str = '') -> list[str]:
  """Returns the columns of a line; raises ValueError unless there is one for each of `names`.

  The message says what was expected: the text `expected`, or `names` if it is ''.
  """
  columns = line.split('\t')
  if len(columns) != len(names):
    expected = expected or f'{", ".join(names)}{", separated by tabs" * (len(names) > 1)}'
    raise ValueError(f'has {number_of(len(columns), "column")}; expected {expected}')
  return columns


TwoTexts = tuple[str, str]


def pair_parsers(expected: str) -> dict[str, Callable[[str, TwoTexts], TwoTexts]]:
  """Returns parsers for `read_lines` of lines with two texts.

  `expected` says in error messages what the two are, for example 'a source and a target'.
  """

  def split_two(line: str, fields: TwoTexts) -> TwoTexts:
    one, other = split_tsv(line, fields, f'{expected}, separated by a tab')
    return one, other

  return {'.tsv': split_two, '.jsonl': _parse_two_texts}


def _parse_two_texts(line: str, fields: TwoTexts) -> TwoTexts:
  values = parse_object(line)
  for name in fields:
    if not isinstance(values.get(name), str):
      raise ValueError(f'has no text {name!r}; its fields: {", ".join(map(str, values)) or "none"}')
  return values[fields[0]], values[fields[1]]
