"""LayerPatterns: regexes of paths that select the layers of a model for a rule, such as an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable

from praxis_lite.common.config import Configurable
from praxis_lite.common.errors import ConfigError


def check_regexes(where: str, patterns: Iterable[str]) -> None:
  """Raises ConfigError, which names the field `where`, if a pattern is not a regular expression."""
  for pattern in patterns:
    try:
      re.compile(pattern)
    except (re.error, TypeError) as error:
      raise ConfigError(f'{where}: {pattern!r} is not a regular expression: {error}') from None


class LayerPatterns(Configurable):
  """Base of rules for some layers of a model.

  Attributes:
    layers: regex, or several, that match whole paths of layers below the model; None means all layers that the rule
      supports.
  """

  layers: str | tuple[str, ...] | None = None

  def __post_init__(self) -> None:
    where = f'{type(self).__name__}.layers'
    if self.layers is not None and not self.patterns:
      raise ConfigError(f'{where}: {self.layers!r} names no layer; None selects all')
    check_regexes(where, self.patterns)

  @property
  def patterns(self) -> tuple[str, ...]:
    """The regexes; () for None."""
    return () if self.layers is None else (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)

  def matches(self, path: str) -> bool:
    """Whether a regex matches a path."""
    return any(re.fullmatch(pattern, path) for pattern in self.patterns)
