"""Configs: trees of hyperparameters that are edited first and instantiated later."""

import praxis_lite.common.config.values  # Adds its check to `field_checks`.
from praxis_lite.common.config.base import (
  Config,
  build_at,
  config_values,
  field_names,
  field_type_hints,
  fill_required,
  instantiate,
  map_nested,
  nested_configs,
  target,
  template,
)
from praxis_lite.common.config.configurable import REQUIRED, Configurable, child

__all__ = [
  'REQUIRED',
  'Config',
  'Configurable',
  'build_at',
  'child',
  'config_values',
  'field_names',
  'field_type_hints',
  'fill_required',
  'instantiate',
  'map_nested',
  'nested_configs',
  'target',
  'template',
]
