"""Repeat: one layer applied many times over, each time with its own weights, as a scan.

The program holds the layer once, whatever the number of repetitions. Its weights are stacked along a new first
dimension.

    for i in range(num_layers):
      x = layers(x, weights[i])
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.call import NestedDict, SideOutputs
from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.layers.remat import check_remat, remat
from praxis_lite.weights import SplitDimsMapping, WeightHParams


class RepeatWeightSplit(SplitMapping):
  """`stack`: the dimension along which weights are stacked; one entry."""

  stack: SplitDimsMapping = None


class Repeat(Layer):
  """Applies `layers` `num_layers` times. Its child is named `layers`, and all repetitions share its path.

  What a repetition yields aside is stacked like the weights: summaries, updates of non-trainable variables, decode
  state. Auxiliary losses add up: their value is the weighted mean, their weight the sum, over the repetitions.

  Attributes:
    layers_tpl: the repeated layer. Its result has the structure, shapes and dtypes of its first argument.
    num_layers: how many times it is applied.
    remat: what is kept for the backward pass; see `remat.py`.
    remat_save_names: tags of values that are kept as well.
    unroll: how many repetitions a round of the loop holds: faster where they are small, slower to compile.
    weight_split_dims_mapping: `stack`, how the stack of weights is split; the weights' own splits are the sub-layer's.
  """

  layers_tpl: Config = REQUIRED
  num_layers: int = REQUIRED
  remat: str = 'none'
  remat_save_names: tuple[str, ...] = ()
  unroll: int = 1
  weight_split_dims_mapping: Config = template(RepeatWeightSplit)
  activation_split_dims_mapping: Config = template(SplitMapping)

  def setup(self) -> None:
    if self.num_layers < 1:
      raise ConfigError(f'{self.path_name}.num_layers: expected at least 1, got {self.num_layers}')
    check_remat(self.remat, self.remat_save_names, f'{self.path_name}.remat')
    self._resolve(self.weight_split_dims_mapping.stack, rank=1, where='weight_split_dims_mapping.stack')
    self.create_child('layers', self.layers_tpl)

  def abstract_init(self) -> NestedDict:
    below = self.layers.abstract_init()
    split = (self.weight_split_dims_mapping.stack or (None,))[0]

    def stacked(weight: WeightHParams) -> WeightHParams:
      return weight.repeated(self.num_layers, split)

    return {'layers': jax.tree.map(stacked, below)} if below else {}

  def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of the last repetition.

    Args:
      x: what the repetitions pass on, an array or a tree of arrays.
      *args, **kwargs: given to each repetition as they are.
    """
    return self._scan('__call__', x, *args, policy=self.remat, **kwargs)

  def init_decode_state(self, *args: Any, **kwargs: Any) -> None:
    """Allocates the caches of all repetitions."""
    self._scan('init_decode_state', None, *args, **kwargs)

  def extend_step(self, x: Any, *args: Any, **kwargs: Any) -> Any:
    """As `__call__`, with the sub-layer's `extend_step` and caches."""
    return self._scan('extend_step', x, *args, **kwargs)

  def _scan(self, method: str, carry: Any, *args: Any, policy: str = 'none', **kwargs: Any) -> Any:
    key = self.next_prng_key() if self.has_prng_key() else None

    def one(carry: Any, variables: NestedDict, state: NestedDict, index: jax.Array) -> tuple[Any, SideOutputs]:
      # A key that nothing draws from is dead code, so no condition is needed for layers without randomness.
      layer_key = None if key is None else jax.random.fold_in(key, index)
      inputs = () if carry is None else (carry,)
      return self.layers.apply(variables, *inputs, *args, key=layer_key, decode_state=state, method=method, **kwargs)

    body = remat(one, policy, self.remat_save_names, in_scan=True)
    xs = (self.layers.variables, self.layers.decode_state, jnp.arange(self.num_layers))
    outputs, side = jax.lax.scan(
      lambda carry, xs: body(carry, *xs), carry, xs, length=self.num_layers, unroll=self.unroll
    )
    self.layers.absorb(side._replace(aux_losses={k: _total(*v) for k, v in side.aux_losses.items()}))
    return outputs


def _total(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (mean, weight) with mean * weight = sum_i values_i * weights_i."""
  weight = jnp.sum(weights)
  return jnp.sum(values * weights) / jnp.where(weight == 0, 1, weight), weight
