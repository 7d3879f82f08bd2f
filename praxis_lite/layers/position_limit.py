"""PositionLimit: how many positions a table of learned positions has."""

from __future__ import annotations

from typing import NamedTuple

from praxis_lite.common.errors import ConfigError


class PositionLimit(NamedTuple):
  """How many positions a network has."""

  field: str  # Path of the field `max_len` of the table, for messages.
  max_len: int  # The number of positions in the table.
  first: int = 0  # The row of the table that is position 0.

  @property
  def num_positions(self) -> int:
    """The most tokens that a segment may have."""
    return self.max_len - self.first

  def check(self, needed: int, what: str) -> None:
    """Raises a `ConfigError` if there are fewer than `needed` positions; `what` describes `needed` in the message."""
    if needed > self.num_positions:
      less = f', less first_position = {self.first},' if self.first else ''
      raise ConfigError(
        f'{self.field}: {self.max_len}{less} is less than {what}, {needed}; set it to at least {needed + self.first}, '
        'or use shorter rows'
      )


def limit_of_table(path: str, table: object, first: int = 0) -> PositionLimit | None:
  """Returns the limit of `table`, a template at `path`; None if it is not a template of a table of positions."""
  max_len = getattr(table, 'max_len', None)
  return None if max_len is None else PositionLimit(f'{path}.max_len', max_len, first)


def check_length(limit: PositionLimit | None, length: int) -> None:
  """Raises a `ConfigError` if rows of this length, with positions 0, 1, 2, ..., need more positions than there are."""
  if limit is not None:
    limit.check(length, 'the sequence length')
