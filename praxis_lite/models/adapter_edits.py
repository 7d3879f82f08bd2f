"""AdapterEdits: gives layers their adapters while a model builds them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from praxis_lite.common.config import Config, build_at, target
from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.common.trees import Path, path_name, suggest_pattern
from praxis_lite.layers.lora import Adapter


class AdapterEdits:
  """Edits of the layers below a model; see `ChildEdits`.

  Args:
    path, name: the path of the model, and as messages spell it.
    adapters: config of an adapter, or several; the first one that is for a layer wins.

  Raises:
    ConfigError: an adapter is not valid.
  """

  def __init__(self, path: Path, name: str, adapters: Config | Sequence[Config]):
    self._path, self._field = path, f'{name}.adapters'
    self._adapters: list[Adapter] = []
    for i, config in enumerate((adapters,) if isinstance(adapters, Config) else adapters):
      built = build_at(f'{self._field}[{i}]', config) if isinstance(config, Config) else config
      if not isinstance(built, Adapter):
        raise ConfigError(f'{self._field}[{i}]: expected the config of an adapter, such as Config(Lora), got {built!r}')
      self._adapters.append(built)
    self._kinds: dict[str, str] = {}  # The class of each layer that may get an adapter, by path below the model.
    self._adapted: dict[str, int] = {}  # Which adapter a layer has got.

  def edit(self, path: Path, config: Config) -> Config:
    name = path_name(path[len(self._path) :])
    if f'{name}.'.partition('.lora.')[0] in self._adapted:  # A part of an adapter.
      return config
    self._kinds[name] = getattr(target(config), '__name__', '')
    for i, adapter in enumerate(self._adapters):
      if adapter.is_for(name, config):
        self._adapted[name] = i
        with prefix_errors(f'{self._field}[{i}], for {name}'):
          return adapter.adapt_at(name, config)
    return config

  def check(self) -> None:
    """Raises ConfigError if a regex matches no layer, or one that does not have the adapter that it needs."""
    for i, adapter in enumerate(self._adapters):
      field = f'{self._field}[{i}]'
      if adapter.layers is None and i not in self._adapted.values():
        raise ConfigError(
          f'{field}: no layer can have a {type(adapter).__name__} that an earlier adapter does not have'
        )
      for pattern in adapter.patterns:
        self._check_pattern(f'{field}.layers', pattern, adapter)
      own = [name for name, number in self._adapted.items() if number == i]
      for further, patterns in adapter.further_patterns.items():
        for pattern in patterns:
          if not any(re.fullmatch(pattern, name) for name in own):
            raise ConfigError(
              f'{field}.{further}: {pattern!r} matches no layer that has this adapter.{suggest_pattern(pattern, own)}'
            )

  def _check_pattern(self, field: str, pattern: str, adapter: Adapter) -> None:
    matched = [name for name in self._kinds if re.fullmatch(pattern, name)]
    if not matched:
      raise ConfigError(f'{field}: {pattern!r} matches no layer.{suggest_pattern(pattern, self._kinds)}')
    wrong = next((name for name in matched if name not in self._adapted), None)
    if wrong is not None:
      raise ConfigError(
        f'{field}: {pattern!r} matches {wrong}, a {self._kinds[wrong]}, which cannot have a {type(adapter).__name__}; '
        f'let it match only {adapter.adaptable}'
      )
