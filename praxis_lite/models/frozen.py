"""FrozenVariables: variables of a model that its learner must not change."""

from __future__ import annotations

from typing import NamedTuple

from praxis_lite.common.trees import Path


class FrozenVariables(NamedTuple):
  """Variables that must keep their values. They have no gradients, but the learner's weight decay would change them.

  Attributes:
    paths: of the variables.
    field, value: the field of the learner that excludes them, and a regex that it needs.
    reason: why they must keep their values: the end of the message '<a variable> would be trained, but ...'.
  """

  paths: frozenset[Path]
  field: str
  value: str
  reason: str
