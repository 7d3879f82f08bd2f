"""Ledger: the plan of work on the rows of files. A shard of the plan is finished if its output file exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from praxis_lite.common.errors import DataError
from praxis_lite.inputs.shard_folders import PLAN, part_name
from praxis_lite.runs.bulk.output_folder import OutputFolder, check_not_input
from praxis_lite.runs.bulk.plan import ShardPlan, check_unchanged, make_plan


class Ledger:
  """The finished shards in a folder."""

  def __init__(self, output: str, plan: ShardPlan, folder: OutputFolder):
    self.output, self.plan, self._folder = output, plan, folder
    self._format: str = plan.settings['format']

  @classmethod
  def open(
    cls, output: str, folder: OutputFolder, paths: Sequence[str], settings: Mapping[str, Any], shard_rows: int
  ) -> Self:
    """Returns the ledger of an output folder; makes and writes its plan, if there is none.

    Args:
      paths: files of the input, see `list_inputs`.
      settings: the settings that the files depend on; `format` is the ending of their names.
      shard_rows: the largest number of rows in a shard.

    Raises:
      DataError: the folder has results of another input or of other settings, files of something else, or a damaged
        plan.
    """
    settings = {**settings, 'shard_rows': shard_rows}
    names = folder.names()
    if PLAN not in names:
      if names:
        raise DataError(f'--output={output} has files and no {PLAN}, such as {names[0]}; name an empty folder')
      plan = make_plan(paths, settings, shard_rows)
      check_not_input(output, [file.file for file in plan.files])
      folder.create(PLAN, plan.to_bytes())
    plan = ShardPlan.from_bytes(folder.read(PLAN), f'{output}/{PLAN}')
    check_unchanged(plan, paths, settings, f'--output={output}')
    return cls(output, plan, folder)

  def remaining_shards(self) -> list[int]:
    """Returns the numbers of the shards that have no file yet."""
    there = set(self._folder.names())
    return [number for number in range(len(self.plan.shards)) if self._name(number) not in there]

  def check_all_there(self) -> None:
    """Raises DataError if the file of a shard is missing."""
    if missing := self.remaining_shards():
      raise DataError(f'{self.output}: {len(missing)} of {len(self.plan.shards)} shards are missing')

  def write(self, number: int, data: bytes) -> None:
    """Writes the file of a shard, which is finished then."""
    self._folder.clean(self._name(number))
    self._folder.write(self._name(number), data)

  def read(self, number: int) -> bytes:
    return self._folder.read(self._name(number))

  def path_of(self, number: int) -> str:
    return f'{self.output}/{self._name(number)}'

  def _name(self, number: int) -> str:
    return part_name(number, self._format)
