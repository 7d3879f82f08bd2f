"""ModelEdits: the changes that a model makes to layers below it: adapters, and quantized weights.

The fields `adapters` and `quantized` of the model hold the rules. Each layer gets the first rule that matches it. A
rule that applies to no layer is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from praxis_lite.common.config import Config, build_at, target
from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.common.trees import Path, path_name, suggest_pattern
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.stored import StoredWeight
from praxis_lite.layers.layer_patterns import LayerPatterns
from praxis_lite.layers.lora import Adapter
from praxis_lite.layers.low_rank import LowRankUpdate
from praxis_lite.layers.quantized_weights import QuantizedWeights
from praxis_lite.sharding.weights import WeightHParams

RuleT = TypeVar('RuleT', bound=LayerPatterns)


class ModelEdits:
  """Edits of the layers below a model; see `ChildEdits`. The model is at `path`, and messages call it `name`.

  A rule of `quantized` that has no regexes leaves out the `plain_children` of the model.

  Raises:
    ConfigError: an adapter or a rule is not valid.
  """

  def __init__(
    self,
    path: Path,
    name: str,
    adapters: Config | Sequence[Config],
    quantized: Config | Sequence[Config],
    plain_children: Sequence[str] = (),
  ):
    self._path, self._plain = path, plain_children
    self._adapters = _Rules(
      f'{name}.adapters', adapters, Adapter, 'the config of an adapter, such as Config(Lora)', what='layer'
    )
    self._formats = _Rules(
      f'{name}.quantized',
      quantized,
      QuantizedWeights,
      'a config such as Config(QuantizedWeights)',
      'layer with weights',
    )

  def edit(self, path: Path, config: Config) -> Config:
    name = path_name(path[len(self._path) :])
    if f'{name}.'.partition('.lora.')[0] in self._adapters.used:  # This layer is part of an adapter.
      return config
    kind = getattr(target(config), '__name__', '')
    i = self._adapters.choose(name, kind, lambda adapter: adapter.is_for(name, config))
    if i is None:
      return config
    with prefix_errors(f'{self._adapters.field}[{i}], for {name}'):
      return self._adapters.rules[i].adapt_at(name, config)

  def stored_weight(self, layer: Layer, name: str, weight: WeightHParams) -> StoredWeight | None:
    path = path_name(layer.path[len(self._path) :])
    if isinstance(layer, LowRankUpdate):  # The layer is part of an adapter. A regex for the adapted layer may match it.
      return None

    def is_for(rule: QuantizedWeights) -> bool:
      is_plain = rule.layers is None and path.partition('.')[0] in self._plain
      return name in layer.product_weights and rule.is_for(path) and not is_plain

    i = self._formats.choose(path, type(layer).__name__, is_for)
    if i is None:
      return None
    with prefix_errors(f'{self._formats.field}[{i}]'):
      return self._formats.rules[i].store(layer, name, weight)

  def check(self) -> None:
    """Raises ConfigError if a rule applies to no layer, or one of its regexes matches no layer or an unsuitable one."""
    for i, adapter in enumerate(self._adapters.rules):
      field, kind = f'{self._adapters.field}[{i}]', type(adapter).__name__
      if adapter.layers is None and i not in self._adapters.used.values():
        raise ConfigError(f'{field}: no layer can have a {kind} that an earlier adapter does not have')
      self._adapters.check(i, f'which cannot have a {kind}; let it match only {adapter.adaptable}')
      own = [name for name, number in self._adapters.used.items() if number == i]
      for further, patterns in adapter.further_patterns.items():
        for pattern in patterns:
          if not any(re.fullmatch(pattern, name) for name in own):
            raise ConfigError(
              f'{field}.{further}: {pattern!r} matches no layer that has this adapter.{suggest_pattern(pattern, own)}'
            )
    for i in range(len(self._formats.rules)):
      self._formats.check(
        i, 'whose weights cannot be quantized; let it match only linear layers, projections and experts'
      )
      if i not in self._formats.used.values():
        raise ConfigError(
          f'{self._formats.field}[{i}]: it does nothing, because there is no layer that it is for, with weights that '
          'can be quantized, and that no earlier rule is for'
        )


class _Rules(Generic[RuleT]):
  """The rules of a field of a model, which are of class `cls`.

  For messages, `expected` describes a valid rule, and `what` says what a regex of a rule should match.
  """

  def __init__(
    self, field: str, configs: Config | Sequence[Config], cls: type[RuleT], expected: str, what: str = 'layer'
  ):
    self.field, self._what = field, what
    self.rules: list[RuleT] = []
    for i, config in enumerate((configs,) if isinstance(configs, Config) else configs):
      built = build_at(f'{field}[{i}]', config) if isinstance(config, Config) else config
      if not isinstance(built, cls):
        raise ConfigError(f'{field}[{i}]: expected {expected}, got {built!r}')
      self.rules.append(built)
    self.used: dict[str, int] = {}  # The index of the rule that each layer has got, by the path of the layer.
    self._kinds: dict[str, str] = {}  # Class names of layers that a regex may match, by path.

  def choose(self, name: str, kind: str, is_for: Callable[[RuleT], bool]) -> int | None:
    """Returns the index of the first rule for which `is_for` is true, or None if there is none.

    Records the layer's `name` and `kind` for `check`.
    """
    self._kinds[name] = kind
    i = next((i for i, rule in enumerate(self.rules) if is_for(rule)), None)
    if i is not None:
      self.used[name] = i
    return i

  def check(self, i: int, why: str) -> None:
    """Raises ConfigError if a regex of rule `i` matches no layer, or matches a layer to which no rule applies.

    In the second case, the message ends with `why`.
    """
    for pattern in self.rules[i].patterns:
      field = f'{self.field}[{i}].layers'
      matched = [name for name in self._kinds if re.fullmatch(pattern, name)]
      if not matched:
        raise ConfigError(f'{field}: {pattern!r} matches no {self._what}.{suggest_pattern(pattern, self._kinds)}')
      wrong = next((name for name in matched if name not in self.used), None)
      if wrong is not None:
        raise ConfigError(f'{field}: {pattern!r} matches {wrong}, a {self._kinds[wrong]}, {why}')
