"""WeightEdits: how the weights of layers are stored, while a model builds these layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from praxis_lite.common.config import Config, build_at
from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.common.trees import Path, path_name, suggest_pattern
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.stored import StoredWeight
from praxis_lite.layers.low_rank import LowRankUpdate
from praxis_lite.layers.quantized_weights import QuantizedWeights
from praxis_lite.sharding.weights import WeightHParams


class WeightEdits:
  """The part of the edits of a model that stores weights in few bits; see `ChildEdits`.

  Args:
    path, name: the path of the model, and as messages spell it.
    quantized: config of a `QuantizedWeights`, or several; the first one that is for a layer wins.
    plain_children: names of children of the model to which a rule without regexes does not apply.

  Raises:
    ConfigError: one of them is not valid.
  """

  def __init__(self, path: Path, name: str, quantized: Config | Sequence[Config], plain_children: Sequence[str] = ()):
    self._path, self._field, self._plain = path, f'{name}.quantized', plain_children
    self._rules: list[QuantizedWeights] = []
    for i, config in enumerate((quantized,) if isinstance(quantized, Config) else quantized):
      built = build_at(f'{self._field}[{i}]', config) if isinstance(config, Config) else config
      if not isinstance(built, QuantizedWeights):
        raise ConfigError(f'{self._field}[{i}]: expected a config such as Config(QuantizedWeights), got {built!r}')
      self._rules.append(built)
    self._kinds: dict[str, str] = {}  # The class of each layer with weights, by path below the model.
    self._used: dict[str, int] = {}  # Which rule a layer has got.

  def stored_weight(self, layer: Layer, name: str, weight: WeightHParams) -> StoredWeight | None:
    path = path_name(layer.path[len(self._path) :])
    if isinstance(layer, LowRankUpdate):  # A part of an adapter, which a regex for the layer's own weights may match.
      return None
    self._kinds[path] = type(layer).__name__
    if name not in layer.product_weights:
      return None
    for i, rule in enumerate(self._rules):
      if rule.is_for(path) and not (rule.layers is None and path.partition('.')[0] in self._plain):
        self._used[path] = i
        with prefix_errors(f'{self._field}[{i}]'):
          return rule.store(layer, name, weight)
    return None

  def check(self) -> None:
    """Raises ConfigError if a rule is used for no layer, or a regex matches no layer or one without such weights."""
    for i, rule in enumerate(self._rules):
      field = f'{self._field}[{i}]'
      for pattern in rule.patterns:
        matched = [name for name in self._kinds if re.fullmatch(pattern, name)]
        if not matched:
          raise ConfigError(
            f'{field}.layers: {pattern!r} matches no layer with weights.{suggest_pattern(pattern, self._kinds)}'
          )
        wrong = next((name for name in matched if name not in self._used), None)
        if wrong is not None:
          raise ConfigError(
            f'{field}.layers: {pattern!r} matches {wrong}, a {self._kinds[wrong]}, whose weights cannot be quantized; '
            'let it match only linear layers, projections and experts'
          )
      if i not in self._used.values():
        raise ConfigError(
          f'{field}: it does nothing, because there is no layer that it is for, with weights that can be quantized, '
          'and that no earlier rule is for'
        )
