"""Rematerialisation: what a layer computes again in its backward pass, instead of keeping it.

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
from typing import TypeVar

import jax

from praxis_lite.errors import ConfigError, check_choice
from praxis_lite.partitioning.explicit import save_all_but_gathered

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
