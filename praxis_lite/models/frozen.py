"""FrozenVariables: variables of a model that its learner must not change."""

from __future__ import annotations

from typing import NamedTuple

from praxis_lite.common.trees import Path


class FrozenVariables(NamedTuple):
  """Variables that must keep their values. They have no gradients, but the learner's weight decay would change them.

  Attributes:
    paths: paths of the variables.
    field, value: a field of the learner, and the regex that it must contain to exclude the variables.
    reason: why they must keep their values: the end of the message '<a variable> would be trained, but ...'.
  """

  paths: frozenset[Path]
  field: str
  value: str
  reason: str
