"""Configs: trees of hyperparameters that are edited first and instantiated later."""

import praxis_lite.common.config.values  # Adds its check to `field_checks`.
from praxis_lite.common.config.base import (
  Config as Config,
  build_at as build_at,
  config_values as config_values,
  field_names as field_names,
  field_type_hints as field_type_hints,
  fill_required as fill_required,
  instantiate as instantiate,
  map_nested as map_nested,
  nested_configs as nested_configs,
  target as target,
  template as template,
)
from praxis_lite.common.config.configurable import REQUIRED as REQUIRED, Configurable as Configurable, child as child
