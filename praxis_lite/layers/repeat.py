"""Rematerialisation by name: what of a layer's forward pass is kept for its backward pass.

    none                               everything XLA wants, but for weights that explicit collectives gather; the
                                       most memory, the least work
    full                               nothing but the layer's inputs; the forward pass runs twice
    dots_saveable                      results of all matrix products
    dots_with_no_batch_dims_saveable   results of products with weights, not those of attention
    save_names                         what is tagged with one of the given names

A layer tags a value with `jax.ad_checkpoint.checkpoint_name(x, name)`, which costs nothing. Tags of this package's
layers: query_proj, key_proj, value_proj, context, out_proj (attention); ffn_gate, ffn_up, ffn_out (feed-forward). Names
given with another policy are saved in addition.

Repeat: one layer applied many times over, each time with its own weights, as a scan.

The program holds the layer once, whatever the number of repetitions. Its weights are stacked along a new first
dimension.

    for i in range(num_layers):
      x = layers(x, weights[i])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.call import SideOutputs
from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.partitioning.explicit import save_all_but_gathered
from praxis_lite.trees import NestedDict
from praxis_lite.weighted import mean_of_means
from praxis_lite.weights import SplitDimsMapping, WeightHParams

T = TypeVar('T')

_POLICIES: dict[str, Callable[..., Any]] = {
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots_saveable': jax.checkpoint_policies.dots_saveable,
  'dots_with_no_batch_dims_saveable': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'save_names': jax.checkpoint_policies.nothing_saveable,
}
REMAT_POLICIES = ('none', *_POLICIES)


def check_remat(policy: str, save_names: Sequence[str], where: str) -> None:
  """Raises ConfigError, naming the field `where`, unless `policy` is known and fits `save_names`."""
  if policy not in REMAT_POLICIES:
    raise ConfigError(
      f'{where}: unknown policy {policy!r}.{did_you_mean(policy, REMAT_POLICIES)} Known: {", ".join(REMAT_POLICIES)}'
    )
  if policy == 'save_names' and not save_names:
    raise ConfigError(f"{where}: policy 'save_names' needs the names, in remat_save_names")
  if policy == 'none' and save_names:
    raise ConfigError(
      f"{where}: remat_save_names are given, but policy 'none' does not rematerialise; set 'save_names'"
    )


def remat(
  fn: Callable[..., T], policy: str, save_names: Sequence[str] = (), *, in_scan: bool, regathers: bool = False
) -> Callable[..., T]:
  """Returns `fn` under a policy.

  Args:
    fn: a pure function of arrays.
    policy: one of `REMAT_POLICIES`.
    save_names: tags of values to save as well.
    in_scan: `fn` is the body of a scan. Elsewhere XLA must be kept from merging the recomputation with the first pass.
    regathers: weights that `fn` gathers are not kept for the backward pass, but gathered again.
  """
  if policy == 'none':
    if not regathers:
      return fn
    return jax.checkpoint(fn, policy=save_all_but_gathered, prevent_cse=not in_scan)
  saveable = _POLICIES[policy]
  if save_names:
    named = jax.checkpoint_policies.save_only_these_names(*save_names)
    saveable = jax.checkpoint_policies.save_from_both_policies(saveable, named)
  return jax.checkpoint(fn, policy=saveable, prevent_cse=not in_scan)


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
    self._resolve(self.weight_split_dims_mapping.stack, self._stack_field, rank=1)
    self.create_child('layers', self.layers_tpl)

  @property
  def _stack_field(self) -> str:
    return f'{self.path_name}.weight_split_dims_mapping.stack'

  def abstract_init(self) -> NestedDict:
    below = self.layers.abstract_init()
    split = (self.weight_split_dims_mapping.stack or (None,))[0]

    def stacked(weight: WeightHParams) -> WeightHParams:
      return weight.repeated(self.num_layers, split, self._stack_field)

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

    regathers = self.surroundings.reading_gathers
    body = remat(one, policy, self.remat_save_names, in_scan=True, regathers=regathers)
    xs = (self.layers.variables, self.layers.decode_state, jnp.arange(self.num_layers))
    outputs, side = jax.lax.scan(
      lambda carry, xs: body(carry, *xs), carry, xs, length=self.num_layers, unroll=self.unroll
    )
    self.layers.absorb(side._replace(aux_losses={k: mean_of_means(*v) for k, v in side.aux_losses.items()}))
    return outputs
