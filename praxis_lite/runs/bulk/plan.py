"""ShardPlan: the work of `predict` or `tokenize` on many rows, cut into shards. It is made once, with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from praxis_lite.common.errors import DataError
from praxis_lite.common.files import parse_json
from praxis_lite.runs.bulk.input_files import InputFile, Part, cut_file, list_inputs, stamp_of, sum_of_input

_VERSION = 1


class ShardPlan(NamedTuple):
  """The work on the rows of files; `settings` are the JSON values that the results depend on, besides the input."""

  settings: dict[str, Any]
  files: list[InputFile]
  shards: list[Part]

  @property
  def num_rows(self) -> int:
    return sum(shard.num_rows for shard in self.shards)

  def to_bytes(self) -> bytes:
    """Returns the plan as JSON, with a checksum."""
    content = {
      'version': _VERSION,
      'settings': self.settings,
      'files': [file._asdict() for file in self.files],
      'shards': [shard._asdict() for shard in self.shards],
    }
    return json.dumps({'seal': _seal(content), **content}, indent=1).encode()

  @classmethod
  def from_bytes(cls, data: bytes, where: str) -> ShardPlan:
    """Reads a plan that `to_bytes` wrote; raises DataError if it is damaged."""
    try:
      content = parse_json(data)
      seal = content.pop('seal')
      if content['version'] != _VERSION or seal != _seal(content):
        raise ValueError('its seal does not fit')
      files, shards = content['files'], content['shards']
      return cls(content['settings'], [InputFile(**file) for file in files], [Part(**shard) for shard in shards])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise DataError(f'{where} is damaged: {error}; name another --output, or remove the whole folder') from None


def make_plan(paths: Sequence[str], settings: Mapping[str, Any], shard_rows: int) -> ShardPlan:
  """Cuts the rows of each file into shards of at most `shard_rows`; reads each file once.

  Raises:
    DataError: a file cannot be read, or there are no rows.
  """
  files, shards = list[InputFile](), list[Part]()
  for file in list_inputs(paths):
    found, parts = cut_file(file, sum(each.rows for each in files), shard_rows)
    files.append(found)
    shards += parts
  if not shards:
    raise DataError(f'--input={paths[0]}: there are no rows')
  return ShardPlan(dict(settings), files, shards)


def check_unchanged(plan: ShardPlan, paths: Sequence[str], settings: Mapping[str, Any], where: str) -> None:
  """Raises DataError unless a plan was made for this input and these settings.

  Reads only files that may have changed.
  """
  sealed, given = _flatten(plan.settings), _flatten(settings)
  for name in sorted({*sealed, *given}):
    before, now = sealed.get(name), given.get(name)
    if before != now:
      raise DataError(
        f'{where} was begun with {name} = {json.dumps(before)}, and now it is {json.dumps(now)}; give the first '
        'value again, or name another --output'
      )
  if (names := list_inputs(paths)) != (known := [file.file for file in plan.files]):
    other = next(iter(set(names) ^ set(known)), names[0])
    raise DataError(f'{where} was begun with other files of --input, or in another order: {other}')
  for file in plan.files:
    stamp, size = stamp_of(file.file)
    if size != file.size or (stamp != file.stamp and sum_of_input(file.file) != file.sha256):
      raise DataError(f'{file.file} has changed since {where} was begun; name another --output')


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns settings by name, with the fields of nested ones, such as a config, at the top level."""
  groups = {name: value if isinstance(value, Mapping) else {name: value} for name, value in settings.items()}
  return {name: value for group in groups.values() for name, value in group.items()}


def _seal(content: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
