"""ShardFolder: the finished shards that `praxis-lite predict` or `tokenize` has written to a folder.

plan.json             the settings and the shards
part-00000.jsonl      shard 0
part-00001.jsonl      ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from praxis_lite.common.errors import DataError, error_summary
from praxis_lite.common.files import parse_json
from praxis_lite.inputs.files import read_file

PLAN = 'plan.json'


def part_name(number: int, format: str) -> str:
  """Returns the file name of a shard; `format` is the file's ending."""
  return f'part-{number:05}.{format}'


class ShardFolder(NamedTuple):
  """A folder in which no shard is missing: the settings in its plan, as JSON values; and the file of each shard."""

  settings: dict[str, Any]
  parts: list[Path]


def read_shard_folder(folder: Path, command: str, format: str, where: str = '') -> ShardFolder:
  """Returns the shards in a folder that a command writes, in files that end in `format`.

  Raises DataError, which begins with `where`, if the plan or a shard is missing, or the plan is damaged.
  """
  plan = folder / PLAN
  if not plan.is_file():
    raise DataError(f'{where}{folder} has no {PLAN}; expected a folder that `praxis-lite {command} --output` wrote')
  try:
    content = parse_json(read_file(str(plan), str(folder)))
    settings, number = dict(content.get('settings', {})), len(content['shards'])
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise DataError(f'{where}{plan} is damaged, {error_summary(error)}') from None
  parts = [folder / part_name(i, format) for i in range(number)]
  if missing := [part.name for part in parts if not part.is_file()]:
    raise DataError(
      f'{where}{folder}: {len(missing)} of {number} parts are missing, such as {missing[0]}; run `praxis-lite '
      f'{command}` to its end, with --format={format}'
    )
  return ShardFolder(settings, parts)
