"""A problem with a sharding: where it is, what is wrong, and what to do about it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Severity(enum.StrEnum):
  """An error does not run; a warning runs, and wastes memory, time or communication."""

  ERROR = 'error'
  WARNING = 'warning'


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is wrong with a sharding.

  Attributes:
    severity: whether it keeps the task from running.
    kind: which check has found it, such as 'unused axis'.
    path: the field, rule, variable or axis it is about.
    message: what is so.
    remedy: what to change.
  """

  severity: Severity
  kind: str
  path: str
  message: str
  remedy: str

  def __str__(self) -> str:
    remedy = f'\n    {self.remedy}' if self.remedy else ''
    return f'{self.severity}: {self.kind}: {self.path}: {self.message}{remedy}'


@dataclasses.dataclass(frozen=True)
class Limits:
  """From where on something is a problem.

  Attributes:
    replicated_bytes: a weight of so many bytes that is whole on every device.
    wasted_fraction: this share of padding in a stored array, or of rows in a batch that only fill up the mesh.
    wasted_bytes: padding of fewer bytes than this is never reported for a stored array.
  """

  replicated_bytes: int = 64 * 2**20
  wasted_fraction: float = 0.1
  wasted_bytes: int = 2**20


def format_problems(problems: Sequence[Problem]) -> str:
  """The problems, errors first, and how many there are."""
  ordered = sorted(problems, key=lambda p: p.severity is not Severity.ERROR)
  errors = sum(p.severity is Severity.ERROR for p in problems)
  warnings = len(problems) - errors
  if not problems:
    return 'no problems found'
  total = f'{errors} error{"s" * (errors != 1)}, {warnings} warning{"s" * (warnings != 1)}'
  return '\n\n'.join([*map(str, ordered), total])
