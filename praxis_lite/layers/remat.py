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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from praxis_lite.errors import ConfigError, did_you_mean
from praxis_lite.partitioning.explicit.sharded_params import regathered

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


def remat(fn: Callable[..., Any], policy: str, save_names: Sequence[str] = (), *, in_scan: bool) -> Callable[..., Any]:
  """Returns `fn` under a policy.

  Args:
    fn: a pure function of arrays.
    policy: one of `REMAT_POLICIES`.
    save_names: tags of values to save as well.
    in_scan: `fn` is the body of a scan. Elsewhere XLA must be kept from merging the recomputation with the first pass.
  """
  if policy == 'none':
    return regathered(fn, in_scan=in_scan)
  saveable = _POLICIES[policy]
  if save_names:
    named = jax.checkpoint_policies.save_only_these_names(*save_names)
    saveable = jax.checkpoint_policies.save_from_both_policies(saveable, named)
  return jax.checkpoint(fn, policy=saveable, prevent_cse=not in_scan)
