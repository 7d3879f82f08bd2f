"""Repeat: one layer applied several times, each time with its own weights, as a scan.

The compiled program contains the layer once, whatever the number of repetitions. The weights are stacked along a new
first dimension:

    for i in range(num_layers):
      x = layers(x, weights[i])
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.call import SideOutputs
from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.layers.remat import check_remat, remat
from praxis_lite.trees import NestedDict
from praxis_lite.weighted import mean_of_means
from praxis_lite.weights import SplitDimsMapping

T = TypeVar('T')


class RepeatWeightSplit(SplitMapping):
  """`stack`: one entry, for the dimension along which weights are stacked."""

  stack: SplitDimsMapping = None


class Repeat(Layer):
  """Applies the child `layers` `num_layers` times; all repetitions share its path.

  Summaries, updates of non-trainable variables and decode state of the repetitions are stacked like the weights. Of an
  auxiliary loss, the value is the weighted mean over the repetitions, and the weight is the sum.

  Attributes:
    layers_tpl: the repeated layer. Its result has the structure, shapes and dtypes of its first argument.
    num_layers: number of repetitions.
    remat: what is kept for the backward pass; see `remat.py`.
    remat_save_names: tags of values that are kept in addition.
    unroll: repetitions in one iteration of the loop: faster for small layers, slower to compile.
    weight_split_dims_mapping: `stack`, how the new dimension is split; the other dimensions are split by `layers`.
  """

  _stack: ClassVar[str] = 'stack'  # The field of weight_split_dims_mapping that splits the new dimension.

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
    self._stack_field = f'{self.path_name}.weight_split_dims_mapping.{self._stack}'
    self._stack_mapping: SplitDimsMapping = getattr(self.weight_split_dims_mapping, self._stack)
    self._resolve(self._stack_mapping, self._stack_field, rank=1)
    self.create_child('layers', self.layers_tpl)

  def abstract_init(self) -> NestedDict:
    split = (self._stack_mapping or (None,))[0]
    below = jax.tree.map(lambda w: w.repeated(self.num_layers, split, self._stack_field), self.layers.abstract_init())
    return {'layers': below} if below else {}

  def __call__(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last repetition.

    Args:
      x: what the repetitions pass on, an array or a tree of arrays.
      *args, **kwargs: given to each repetition unchanged.
    """
    return self._scan('__call__', x, *args, policy=self.remat, **kwargs)

  def init_decode_state(self, *args: object) -> None:
    """Allocates the caches of all repetitions; the arguments are those of the repeated layer."""
    self._scan('init_decode_state', None, *args)

  def extend_step(self, x: T, *args: object, **kwargs: Any) -> T:
    """As `__call__`, with the repeated layer's `extend_step` and caches."""
    return self._scan('extend_step', x, *args, **kwargs)

  def _scan(self, method: str, carry: T, *args: object, policy: str = 'none', **kwargs: Any) -> T:
    key = self.next_prng_key() if self.has_prng_key() else None

    def one(carry: T, variables: NestedDict, state: NestedDict, index: jax.Array) -> tuple[T, SideOutputs]:
      # A key from which nothing is drawn is dead code, so layers without randomness need no condition.
      layer_key = None if key is None else jax.random.fold_in(key, index)
      inputs = () if carry is None else (carry,)
      return self.layers.apply(variables, *inputs, *args, key=layer_key, decode_state=state, method=method, **kwargs)

    regathers = self.surroundings.reading_gathers
    body = remat(one, policy, self.remat_save_names, in_scan=True, regathers=regathers)
    xs = (self.layers.variables, self.layers.decode_state, jnp.arange(self.num_layers))
    outputs, side = jax.lax.scan(
      lambda carry, xs: body(carry, *xs), carry, xs, length=self.num_layers, unroll=self.unroll
    )
    self.layers.absorb(side._replace(aux_losses={k: mean_of_means(*v) for k, v in side.aux_losses.items()}))
    return outputs
