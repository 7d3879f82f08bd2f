"""Configs: trees of hyperparameters that are edited first and instantiated later."""

from praxis_lite.config.base import (
  REQUIRED,
  Config,
  Configurable,
  config_values,
  field_names,
  field_type_hints,
  instantiate,
  map_nested,
  nested_configs,
  target,
  template,
)
