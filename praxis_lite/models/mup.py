"""Mup: transfers hyperparameters that were tuned on a smaller model to a larger one.

    model = transformer_lm(vocab_size=256, model_dims=1024, hidden_dims=4096, num_layers=24, num_heads=16)
    model.mup = Config(Mup, base={'model_dims': 128, 'hidden_dims': 512, 'num_layers': 4})

The learning rate, the initial scales and other hyperparameters that were tuned for the base can be used for the model.
The corrections of these hyperparameters are derived from the shapes of the variables of the model and of the base; see
`sharding/growth.py`.
"""

from __future__ import annotations

from typing import Any

from praxis_lite.common.config import REQUIRED, Config, Configurable, build_at, field_names, target
from praxis_lite.common.config.overrides import set_by_path
from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.growth import Counterpart


class Mup(Configurable):
  """The maximal update parametrisation (Yang et al., 2022), in relation to a smaller model, the base.

  Attributes:
    base: the fields that differ in the base, by path in the config of the model, such as
      {'model_dims': 64, 'hidden_dims': 256}; or the whole config of the base. The base must have the same layers; only
      widths and numbers of layers may differ.
    depth_exponent: an exponent a from 0.5 (Yang et al., 2023) to 1 (Dey et al., 2025). If a stack has d times as many
      layers as in the base, its residual branches are multiplied by d^-a.

  Raises:
    ConfigError: a value is out of range.
  """

  base: Config | dict[str, Any] = REQUIRED
  depth_exponent: float = 0.5

  def __post_init__(self) -> None:
    if not 0.5 <= self.depth_exponent <= 1:
      raise ConfigError(f'mup.depth_exponent: expected at least 0.5 and at most 1, got {self.depth_exponent}')
    if not self.base:
      raise ConfigError("mup.base: expected what is different in the smaller model, such as {'model_dims': 64}")


def build_counterpart(model: Layer, mup: object) -> Counterpart:
  """Returns the base of a model that has the field `mup`, built from the fields of the model.

  Raises:
    ConfigError: `mup` is not valid, or the base cannot be built; the message begins with the path of `mup`.
  """
  where = f'{model.path_name}.mup'
  found = build_at(where, mup) if isinstance(mup, Config) else mup
  if not isinstance(found, Mup):
    raise ConfigError(f"{where}: expected Config(Mup, base={{'model_dims': 64}}), got {mup!r}")
  config = base_config(model_config(model), found, where)
  with prefix_errors(f'{where}.base'):
    return Counterpart(build_at('', config, name=model.name), depth_exponent=found.depth_exponent)


def model_config(model: Layer) -> Config:
  """Returns the config of a model without its `mup`; the model may still be under construction."""
  names = [name for name in field_names(type(model)) or () if name != 'mup']
  return Config(type(model), **{name: getattr(model, name) for name in names}).clone()


def base_config(config: Config, mup: Mup, where: str = 'mup') -> Config:
  """Returns the config of the base of a model; `config`, the config of the model, is not changed."""
  if isinstance(mup.base, Config):
    kind, own = target(mup.base), target(config)
    if not (isinstance(kind, type) and issubclass(kind, Layer)):
      raise ConfigError(f'{where}.base: expected the config of a {getattr(own, "__name__", own)}, got {mup.base!r}')
    return mup.base.clone(mup=None)
  base = config.clone(mup=None)
  for path, value in mup.base.items():
    with prefix_errors(f'{where}.base'):
      set_by_path(base, path, value)
  return base
