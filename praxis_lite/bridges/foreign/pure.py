"""One of our layers as a pair of pure functions, for the modules and loops of other libraries."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves, merge, select
from praxis_lite.layers.base import Layer


class PureOutput(NamedTuple):
  """The result of a pure call.

  Attributes:
    outputs: what the layer returns.
    state: the variables that are not trained, after the call.
    aux_loss: the sum of the auxiliary losses, each times its weight, to be added to the loss; 0 if there are none.
  """

  outputs: Any
  state: NestedDict
  aux_loss: jax.Array


class PureLayer:
  """A layer as pure functions of its trained parameters and its state.

      pure = PureLayer(Config(Linear, input_dims=6, output_dims=4))
      params, state = pure.init(jax.random.key(0))
      y, state, aux_loss = pure.apply(params, state, x, key=jax.random.key(1))

  Both functions may be transformed by JAX. Parameters and state are nested dicts of arrays.

  Args:
    layer: a layer, or its config.
  """

  def __init__(self, layer: Layer | Config):
    built = layer.instantiate() if isinstance(layer, Config) else layer
    if not isinstance(built, Layer):
      raise ConfigError(f'PureLayer takes a layer or its config, not {type(built).__name__}')
    self.layer = built
    weights = leaves(built.abstract_init())
    self._trained = {path for path, weight in weights.items() if weight.trainable}

  def init(self, key: jax.Array) -> tuple[NestedDict, NestedDict]:
    """Returns (trained parameters, state), drawn with `key`."""
    return self.split(self.layer.init(key))

  def split(self, variables: NestedDict) -> tuple[NestedDict, NestedDict]:
    """Returns (trained parameters, state) of the layer's variables, such as those of a checkpoint."""
    return select(variables, self._trained.__contains__), select(variables, lambda path: path not in self._trained)

  def apply(
    self,
    params: NestedDict,
    state: NestedDict,
    *args: Any,
    key: jax.Array | None = None,
    train: bool = True,
    method: str = '__call__',
    **kwargs: Any,
  ) -> PureOutput:
    """Calls the layer.

    Args:
      params, state: as `init` returns them.
      *args, **kwargs: arguments of the layer.
      key: key of random numbers, such as those of dropout; None if the call draws none.
      train: whether the layer is trained: draws dropout, and updates its state.
      method: which method of the layer to call.
    """
    outputs, side = self.layer.apply(merge(params, state), *args, key=key, do_eval=not train, method=method, **kwargs)
    zero = jnp.zeros((), jnp.float32)
    aux_loss = sum((jnp.asarray(v * w, jnp.float32) for v, w in side.aux_losses.values()), zero)
    return PureOutput(outputs, merge(state, side.updates), aux_loss)
