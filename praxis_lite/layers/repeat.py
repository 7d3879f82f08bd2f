"""Repeat: one layer applied several times, each time with its own weights, as a scan; and what it rematerialises.

The compiled program contains the layer once, whatever the number of repetitions. The weights are stacked along a new
first dimension:

    for i in range(num_layers):
      x = layers(x, weights[i])

A rematerialisation policy names what of a layer's forward pass is kept for its backward pass:

    none                               everything XLA keeps, except weights gathered by explicit collectives; the most
                                       memory, the least work
    full                               only the layer's inputs; the forward pass runs twice
    dots_saveable                      results of all matrix products
    dots_with_no_batch_dims_saveable   results of products with weights, not those of attention
    save_names                         values tagged with one of the given names

A layer tags a value with `jax.ad_checkpoint.checkpoint_name(x, name)`, which costs nothing. Tags of this package's
layers: query_proj, key_proj, value_proj, context, out_proj (attention); ffn_gate, ffn_up, ffn_out (feed-forward). Names
given with another policy are saved in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from praxis_lite.call import SideOutputs
from praxis_lite.config import REQUIRED, Config, template
from praxis_lite.errors import ConfigError, check_choice
from praxis_lite.layer import Layer, SplitMapping
from praxis_lite.partitioning.explicit import save_all_but_gathered
from praxis_lite.trees import NestedDict
from praxis_lite.weighted import mean_of_means
from praxis_lite.weights import SplitDimsMapping

T = TypeVar('T')

_POLICIES: dict[str, Callable[..., bool]] = {
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots_saveable': jax.checkpoint_policies.dots_saveable,
  'dots_with_no_batch_dims_saveable': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'save_names': jax.checkpoint_policies.nothing_saveable,
}
REMAT_POLICIES = ('none', *_POLICIES)


def check_remat(policy: str, save_names: Sequence[str], where: str) -> None:
  """Raises ConfigError, naming the field `where`, unless `policy` is known and fits `save_names`."""
  check_choice(where, policy, REMAT_POLICIES)
  if policy == 'save_names' and not save_names:
    raise ConfigError(f"{where}: policy 'save_names' needs the names: set remat_save_names")
  if policy == 'none' and save_names:
    raise ConfigError(
      f"{where}: remat_save_names is set, but policy 'none' does not rematerialise; set it to 'save_names'"
    )


def remat(
  fn: Callable[..., T], policy: str, save_names: Sequence[str] = (), *, in_scan: bool, regathers: bool = False
) -> Callable[..., T]:
  """Returns `fn` with rematerialisation by a policy.

  Args:
    fn: a pure function of arrays.
    policy: one of `REMAT_POLICIES`.
    save_names: tags of values to save in addition.
    in_scan: `fn` is the body of a scan. Outside one, XLA must be prevented from merging the recomputation with the
      first pass.
    regathers: the weights that `fn` gathers are not kept for the backward pass but gathered again.
  """
  if policy == 'none' and not regathers:
    return fn
  saveable = save_all_but_gathered if policy == 'none' else _POLICIES[policy]
  if save_names:
    named = jax.checkpoint_policies.save_only_these_names(*save_names)
    saveable = jax.checkpoint_policies.save_from_both_policies(saveable, named)
  return jax.checkpoint(fn, policy=saveable, prevent_cse=not in_scan)


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
    remat: what is kept for the backward pass; see the top of this file.
    remat_save_names: tags of values that are kept in addition.
    unroll: repetitions in one iteration of the loop: faster for small layers, slower to compile.
    weight_split_dims_mapping: `stack`, how the new dimension is split; the other dimensions are split by `layers`.
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
    self._stack_field = f'{self.path_name}.weight_split_dims_mapping.stack'
    self._resolve(self.weight_split_dims_mapping.stack, self._stack_field, rank=1)
    self.create_child('layers', self.layers_tpl)

  def abstract_init(self) -> NestedDict:
    split = (self.weight_split_dims_mapping.stack or (None,))[0]
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
