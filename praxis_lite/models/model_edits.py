"""ModelEdits: what a model changes in the layers below it: their adapters, and how their weights are stored."""

from __future__ import annotations

from collections.abc import Sequence

from praxis_lite.common.config import Config
from praxis_lite.common.trees import Path
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.stored import StoredWeight
from praxis_lite.models.adapter_edits import AdapterEdits
from praxis_lite.models.weight_edits import WeightEdits
from praxis_lite.sharding.weights import WeightHParams


class ModelEdits:
  """Edits of the layers below a model; see `ChildEdits`.

  Args:
    path, name: the path of the model, and as messages spell it.
    adapters, quantized, plain_children: fields of the model.
  """

  def __init__(
    self,
    path: Path,
    name: str,
    adapters: Config | Sequence[Config],
    quantized: Config | Sequence[Config],
    plain_children: Sequence[str] = (),
  ):
    self._adapters = AdapterEdits(path, name, adapters)
    self._weights = WeightEdits(path, name, quantized, plain_children)

  def edit(self, path: Path, config: Config) -> Config:
    return self._adapters.edit(path, config)

  def stored_weight(self, layer: Layer, name: str, weight: WeightHParams) -> StoredWeight | None:
    return self._weights.stored_weight(layer, name, weight)

  def check(self) -> None:
    self._adapters.check()
    self._weights.check()
