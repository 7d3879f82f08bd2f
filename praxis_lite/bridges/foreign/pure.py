"""One of our layers as a pair of pure functions, for the modules and loops of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, leaves, merge, nest, path_name, select
from praxis_lite.layers.base import Layer
from praxis_lite.sharding.rules import resolve


class PureOutput(NamedTuple):
  """The result of a pure call.

  Attributes:
    outputs: what the layer returns.
    state: the values of the untrained variables after the call.
    aux_loss: the sum of the auxiliary losses times their weights, to be added to the loss; 0 if there are none.
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
    self._weights = leaves(built.abstract_init())
    self._trained = {path for path, weight in self._weights.items() if weight.trainable}

  def init(self, key: jax.Array) -> tuple[NestedDict, NestedDict]:
    """Returns (trained parameters, state), drawn with `key`. `specs` says how a mesh would split them."""
    return self.split(self.layer.init(key))

  def specs(self) -> tuple[NestedDict, NestedDict]:
    """Returns the `PartitionSpec`s that the layer's mappings declare, as (trained parameters, state) like `init`.

    Raises:
      ConfigError: the layer has no `mesh_axis_names`.
      ShardingError: a mapping names an unknown axis, or does not have one entry for each dimension of the array.
    """
    axes, rules = self.layer.mesh_axis_names, self.layer.logical_axis_rules
    if axes is None:
      raise ConfigError(f'{self.layer.path_name}.mesh_axis_names: is not set, and specs are of mesh axes')
    specs = {
      path: resolve(weight.full_split_dims_mapping, axes, rules, rank=len(weight.full_shape), path=path_name(path)).spec
      for path, weight in self._weights.items()
    }
    return self.split(nest(specs))

  def split(self, variables: NestedDict) -> tuple[NestedDict, NestedDict]:
    """Splits the layer's variables, for example from a checkpoint, into (trained parameters, state)."""
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
      key: PRNG key, for example for dropout; None if the call needs no random numbers.
      train: whether this is training, in which the layer applies dropout and updates its state.
      method: which method of the layer to call.

    Raises:
      ConfigError: the mesh that `jax.set_mesh` has set has an Explicit axis, or `params` or `state` is no dict.
    """
    for name, tree in (('params', params), ('state', state)):
      if not isinstance(tree, Mapping):
        raise ConfigError(
          f'PureLayer.apply: {name} is a {type(tree).__name__}; expected a dict, as init returns it, in '
          'apply(params, state, *args)'
        )
    mesh = jax.sharding.get_abstract_mesh()
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit]
    if explicit:
      raise ConfigError(
        f'PureLayer: axis {explicit[0]!r} of the mesh is Explicit, and mappings are constraints for the compiler; make '
        f'the mesh with axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}'
      )
    outputs, side = self.layer.apply(merge(params, state), *args, key=key, do_eval=not train, method=method, **kwargs)
    zero = jnp.zeros((), jnp.float32)
    aux_loss = sum((jnp.asarray(v * w, jnp.float32) for v, w in side.aux_losses.values()), zero)
    return PureOutput(outputs, merge(state, side.updates), aux_loss)
