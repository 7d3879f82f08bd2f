"""Theta: how a layer reads its own variables in a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import jax
import jax.numpy as jnp

from praxis_lite import call
from praxis_lite.errors import ConfigError, UnknownFieldError, did_you_mean
from praxis_lite.weights import WeightHParamsCollection

if TYPE_CHECKING:
  from praxis_lite.layer.in_call import InCall


class Theta:
  """A layer's own variables as attributes, cast to the dtype the layer computes in."""

  __slots__ = ('_layer',)
  _layer: InCall

  def __init__(self, layer: InCall):
    object.__setattr__(self, '_layer', layer)

  def __getattr__(self, name: str) -> jax.Array:
    layer = self._layer
    weight = layer._weights.get(name)
    if weight is None:
      raise UnknownFieldError(
        f'{layer.path_name} ({type(layer).__name__}) has no variable {name!r}.{did_you_mean(name, layer._weights)} '
        f'Declare it in setup(): self.create_variable({name!r}, WeightHParams(shape))'
      )
    path, frame = (*layer.path, name), layer._frame()
    value = frame.variable(path)
    if value is None:
      raise ConfigError(
        f'{layer.path_name}.{name}: the variables passed to apply() have no such entry. If {type(layer).__name__} is '
        'part of another layer, build it in the setup() of that one, by self.create_child(name, Config(...))'
      )
    kept = WeightHParamsCollection.KEEP_FLOAT32 in weight.collections or not jnp.issubdtype(value.dtype, jnp.floating)
    read = frame.surroundings.read_weight(path, value, None if kept else layer.fprop_dtype)
    return call.read_through(frame, read)

  def __setattr__(self, name: str, value: object) -> NoReturn:
    raise ConfigError(
      f'{self._layer.path_name}.{name}: a variable is not assigned to. One that is declared with trainable=False is '
      f'given a new value by self.update_var({name!r}, value); the others are trained'
    )

  def __getitem__(self, name: str) -> NoReturn:
    raise ConfigError(f'{self._layer.path_name}: variables are attributes; write self.theta.{name}')
