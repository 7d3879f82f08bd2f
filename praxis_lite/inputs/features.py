"""Feature: the shape and dtype of one array of an example, as inputs declare them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.config import Config, Configurable
from praxis_lite.errors import ConfigError


class Feature(Configurable):
  """One array of an example.

  Attributes:
    shape: without the batch dimension; () is a scalar.
    dtype: name of a numpy dtype of numbers or booleans.
  """

  shape: tuple[int, ...] = ()
  dtype: str = 'float32'

  def struct(self) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype, as JAX keeps it."""
    return jax.ShapeDtypeStruct(tuple(self.shape), jax.dtypes.canonicalize_dtype(np.dtype(self.dtype)))


def build_features(features: Any, where: str) -> dict[str, Feature]:
  """Returns the features, built where they are configs.

  Raises:
    ConfigError: not a dict of features, or one has an unknown dtype or a negative size.
  """
  if not isinstance(features, dict) or not features:
    raise ConfigError(f'{where}: expected a dict of Feature configs by name, got {features!r}')
  built = {}
  for key, value in features.items():
    feature = value.instantiate() if isinstance(value, Config) else value
    if not isinstance(feature, Feature):
      raise ConfigError(f'{where}[{key!r}]: expected the config of a Feature, got {value!r}')
    if not _is_numeric(feature.dtype):
      raise ConfigError(
        f'{where}[{key!r}].dtype: {feature.dtype!r} is not a dtype of numbers, such as float32 or int32'
      )
    if any(not isinstance(d, int) or d < 0 for d in feature.shape):
      raise ConfigError(f'{where}[{key!r}].shape: expected sizes that are not negative, got {feature.shape!r}')
    built[key] = feature
  return built


def _is_numeric(name: str) -> bool:
  try:
    dtype = np.dtype(name)
  except TypeError:
    return False
  # jnp knows that bfloat16 is a number; numpy does not.
  return dtype == np.bool_ or bool(jnp.issubdtype(dtype, np.number))
