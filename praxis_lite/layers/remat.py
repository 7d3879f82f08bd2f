"""Rematerialisation: what a layer recomputes in its backward pass instead of keeping it.

A rematerialisation policy says which results of a layer's forward pass are kept for its backward pass:

    auto                               'products' on GPUs, 'none' elsewhere; also 'none' on a single GPU for layers
                                       without a loop, if there is memory for it; see `Remat.fit_to_memory`
    none                               everything that the backward pass reads, except weights gathered by explicit
                                       collectives; the most memory, the least work
    products                           results of matrix products, and inputs and outputs of attention; everything else,
                                       such as norms and activations, is computed again
    full                               only the layer's inputs; the forward pass runs twice
    dots_saveable                      results of all matrix products
    dots_with_no_batch_dims_saveable   results of products with weights, not those of attention
    save_names                         values tagged with one of the given names

A layer tags a value with `jax.ad_checkpoint.checkpoint_name(x, name)`, which costs nothing. Tags of this package's
layers: query_proj, key_proj, value_proj, context, out_proj (attention, and some mixers); ffn_gate, ffn_up, ffn_out
(feed-forward, also of experts); router_logits (experts). 'auto' and 'none' take no names; other policies than
'save_names' keep the named values in addition to their own. Values with names to offload are moved to host memory
after the forward pass, and back in the backward pass, if the devices can address host memory
(`sharding/host_memory.py`).

Layers that rematerialise other layers have the fields `remat`, `remat_save_names` and `remat_offload_names`:

    remat                 a policy; or one for each layer of a repeated pattern of different layers
    remat_save_names      tags of values that are kept in addition
    remat_offload_names   tags of values that are kept in host memory
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax import export
from jax.ad_checkpoint import Offloadable
from jax.extend.core import Primitive

from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import variables_of_call
from praxis_lite.layers.grouped_matmul import GROUPED_PRODUCT
from praxis_lite.sharding.explicit import save_all_but_gathered
from praxis_lite.sharding.host_memory import HOST_MEMORY
from praxis_lite.sharding.mesh import memory_of_single_gpu, platform

T = TypeVar('T')

# The fused attention kernel is found by its name, because its backward pass reads a result that cannot be tagged.
_FUSED_ATTENTION, _CONTEXT = 'dot_product_attention_fwd', 'context'
# Inputs of attention are kept in the form that its backward pass reads: rotated or normalized.
_OF_ATTENTION = frozenset({_CONTEXT, 'query_proj', 'key_proj', 'value_proj'})
# See `Remat.fit_to_memory`. The rest of the memory, 35 %, is for logits, the batch and temporaries.
_KEPT_FOR_A_WEIGHT, _BYTES_OF_A_WEIGHT, _SHARE_OF_GPU = 1.5, 16, 0.65
_PRODUCTS = frozenset({'dot_general', 'ragged_dot_general', 'conv_general_dilated'})
_SAVED_AS_PRODUCTS = _OF_ATTENTION | {GROUPED_PRODUCT}


def _products_saveable(primitive: Primitive, *args: Any, **params: Any) -> bool:
  return primitive.name in _PRODUCTS or _tag(primitive, params) in _SAVED_AS_PRODUCTS


def _also_grouped(policy: Callable[..., bool]) -> Callable[..., bool]:
  """Returns a policy that keeps what `policy` keeps, and grouped products, which `policy` sees as loops."""
  return lambda primitive, *args, **params: (
    policy(primitive, *args, **params) or _tag(primitive, params) == GROUPED_PRODUCT
  )


def _tag(primitive: Primitive, params: Mapping[str, Any]) -> str | None:
  """Returns the tag of the results of a primitive; None if they are not tagged."""
  if primitive.name.startswith(_FUSED_ATTENTION):
    return _CONTEXT
  return str(params['name']) if primitive.name == 'name' else None


_POLICIES: dict[str, Callable[..., bool]] = {
  'products': _products_saveable,
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots_saveable': _also_grouped(jax.checkpoint_policies.dots_saveable),
  'dots_with_no_batch_dims_saveable': _also_grouped(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
  'save_names': jax.checkpoint_policies.nothing_saveable,
}
REMAT_POLICIES = ('auto', 'none', *_POLICIES)
# The policies that a search tries, from the one with the most memory to the one with the most recomputation.
_SEARCHED = ('none', 'products', 'dots_with_no_batch_dims_saveable', 'full')


def other_policies(policy: str) -> list[str]:
  """Returns the policies that a search tries in place of `policy`."""
  return [other for other in _SEARCHED if other != policy]


class Remat(NamedTuple):
  """What each layer of a pattern of different layers keeps for the backward pass."""

  policies: tuple[str, ...]  # One of `REMAT_POLICIES` for each layer of the pattern.
  save_names: tuple[str, ...]  # Tags of values to keep in addition.
  offload_names: tuple[str, ...]  # Tags of values to keep in host memory.

  @classmethod
  def read(cls, layer: Layer, num_kinds: int = 1, field: str = 'remat') -> Remat:
    """Reads the fields `field`, `<field>_save_names` and `<field>_offload_names` of a layer.

    Raises:
      ConfigError: a policy is unknown; the number of policies is neither 1 nor `num_kinds`; a policy needs names and
        none are given, or takes none and some are given; or a name is in both fields.
    """
    where, policies = f'{layer.path_name}.{field}', getattr(layer, field)
    if isinstance(policies, str):
      policies = (policies,) * num_kinds
    elif len(policies) != num_kinds:
      raise ConfigError(
        f'{where}: {len(policies)} policies for a pattern of {num_kinds} layer(s); give one, or one for each of them'
      )
    for policy in policies:
      check_choice(where, policy, REMAT_POLICIES)
    saved, offloaded = f'{field}_save_names', f'{field}_offload_names'
    remat = cls(tuple(policies), tuple(getattr(layer, saved)), tuple(getattr(layer, offloaded)))
    names = {saved: remat.save_names, offloaded: remat.offload_names}
    if 'save_names' in policies and not any(names.values()):
      raise ConfigError(f"{where}: policy 'save_names' needs the names: set {saved} or {offloaded}")
    for name, given in names.items():
      if given and set(policies) <= {'auto', 'none'}:
        raise ConfigError(
          f"{where}: {name} is set, but policy {policies[0]!r} does not take names; set it to 'save_names'"
        )
    if twice := sorted({*remat.save_names} & {*remat.offload_names}):
      raise ConfigError(f'{layer.path_name}.{offloaded}: {twice[0]!r} is in {saved} too; choose one')
    return remat

  def fit_to_memory(self, x: Any, variables: Any) -> Remat:
    """Returns these policies with 'none' instead of 'auto' if a single GPU can hold all that the backward pass reads.

    A transformer block with W weights keeps about 1.5 W / D values for each token. A weight of the model takes 16
    bytes, with its gradient and the moments of Adam. Several stacks of a model share the rest of the memory in
    proportion to their weights. `x` is the input of the layers, an array [..., D] or a tree of such arrays; `variables`
    belong to all layers.
    """
    if 'auto' not in self.policies or not (memory := memory_of_single_gpu()):
      return self
    inputs, weights = jax.tree.leaves(x), _count(variables)
    if any(array.ndim < 2 or any(map(export.is_symbolic_dim, array.shape)) for array in inputs):
      return self
    in_model = max(weights, _count(variables_of_call()), 1)
    rest = _SHARE_OF_GPU * memory - _BYTES_OF_A_WEIGHT * in_model
    kept = sum(_KEPT_FOR_A_WEIGHT * array.nbytes * weights / array.shape[-1] ** 2 for array in inputs)
    if kept > rest * weights / in_model:
      return self
    return self._replace(policies=tuple('none' if policy == 'auto' else policy for policy in self.policies))

  def __call__(
    self, fn: Callable[..., T], kind: int = 0, *, in_scan: bool, regathers: bool = False
  ) -> Callable[..., T]:
    """Returns `fn` with rematerialisation; `fn` is a pure function of arrays, for layer number `kind` of the pattern.

    Unless `fn` is the body of a scan, XLA must be prevented from merging the recomputation with the first pass.
    `regathers` says whether the backward pass gathers weights again, instead of keeping those that `fn` has gathered.
    """
    policy = self.policies[kind]
    if policy == 'auto':
      policy = 'products' if platform() == 'gpu' else 'none'
    if policy == 'none' and not regathers:
      return fn
    saveable = save_all_but_gathered if policy == 'none' else self._saveable(_POLICIES[policy])
    return jax.checkpoint(fn, policy=saveable, prevent_cse=not in_scan)

  def run(self, parent: Layer, layer: Layer, *args: Any, kind: int = 0, **kwargs: Any) -> Any:
    """In a call of `parent`, outside of scans: runs a layer below it with rematerialisation, and returns its result.

    The key of `parent` gives the random numbers. `args` are arrays; the backward pass keeps what is in `kwargs`.
    """
    key = parent.next_prng_key() if parent.has_prng_key() else None
    fn, regathers = functools.partial(layer.apply, key=key, **kwargs), parent.surroundings.reading_gathers
    result, side = self(fn, kind, in_scan=False, regathers=regathers)(layer.variables, *args)
    layer.absorb(side)
    return result

  def _saveable(self, policy: Callable[..., bool]) -> Callable[..., Any]:
    def saveable(primitive: Primitive, *args: Any, **params: Any) -> Any:
      tag = _tag(primitive, params)
      if tag in self.offload_names:
        return Offloadable('device', HOST_MEMORY)
      return tag in self.save_names or policy(primitive, *args, **params)

    return saveable


def _count(variables: Any) -> int:
  return sum(math.prod(w.shape) for w in jax.tree.leaves(variables))
