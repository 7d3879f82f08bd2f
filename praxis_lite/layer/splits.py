"""Split mappings of a layer: a field for each tensor, which says how it is split over the mesh."""

from __future__ import annotations

from praxis_lite.config import Configurable
from praxis_lite.weights import SplitDimsMapping


class SplitMapping(Configurable):
  """Base of the split mappings of a layer: each field maps one tensor, one entry per dimension."""


class WeightSplit(SplitMapping):
  """`wt`: the layer's main weight."""

  wt: SplitDimsMapping = None


class ActivationSplit(SplitMapping):
  """`out`: the layer's output."""

  out: SplitDimsMapping = None
