"""The sharding rules that are always there, after those of big_vision (Beyer et al., 2022).

On a mesh of data = 8, model = 4, for a float32 variable of shape (2048, 2048):

    replicate                                    (None, None)
    fsdp(axis="data")                            (None, 'data')      the largest dimension; of equal ones, the last
    shard_dim("model", 0)                        ('model', None)
    shard_dim("model", 0) | fsdp(axis="data")    ('model', 'data')
    logical_partitioning                         as the logical axis rules say for its declared names
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.logical_constraints import current_axis_rules
from praxis_lite.partitioning.padding import num_parts
from praxis_lite.partitioning.rules import resolve_split_mapping, standard_logical_axis_rules
from praxis_lite.partitioning.specs import axes_to_entry, spec_axes
from praxis_lite.partitioning.strategy_rules import Change, Rule, Spec, Variable, register_rule


@register_rule('replicate')
def replicate() -> Rule:
  """Says that the variable is whole on every device."""

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec:
    if any(entry is not None for entry in spec):
      raise ShardingError(f'{variable.name} is split {spec!r} already; to replicate it is inconsistent with that')
    return spec

  return rule


@register_rule('fsdp')
def fsdp(axis: str | tuple[str, ...], min_size_to_shard_mb: float = 4, allow_padding: bool = True) -> Rule:
  """Splits the largest free dimension that divides; of equal ones, the last.

  Args:
    axis: mesh axis, or several, over which to split.
    min_size_to_shard_mb: variables of up to this many MiB are left as they are.
    allow_padding: where no free dimension divides, split the largest all the same, and pad it; otherwise leave it
      whole.
  """

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | Change:
    parts = num_parts(axis, mesh)
    if variable.num_bytes <= min_size_to_shard_mb * 2**20:
      return Change(spec, f'{variable.num_bytes / 2**20:.3g} MiB is not above the {min_size_to_shard_mb} MiB of fsdp')
    free = [i for i, entry in enumerate(spec) if entry is None]
    largest_first = sorted(free, key=lambda i: (variable.shape[i], i), reverse=True)
    divisible = [i for i in largest_first if variable.shape[i] % parts == 0]
    if divisible:
      return _split(spec, divisible[0], axis)
    if not largest_first or not allow_padding:
      return Change(spec, f'fsdp splits nothing: none of the free dimensions of {variable.shape} divides by {parts}')
    size = variable.shape[largest_first[0]]
    remark = f'none of the free dimensions of {variable.shape} divides by {parts}; {size} is padded'
    return Change(_split(spec, largest_first[0], axis), f'{remark} to {-(-size // parts) * parts}')

  return rule


@register_rule('shard_dim')
def shard_dim(
  axis: str | tuple[str, ...], dim: int, ignore_ndim_error: bool = False, allow_padding: bool = True
) -> Rule:
  """Splits one dimension.

  Args:
    axis: mesh axis, or several.
    dim: the dimension; negative ones count from the last.
    ignore_ndim_error: leave variables as they are that have no such dimension.
    allow_padding: pad the dimension where it does not divide; otherwise that is an error.
  """

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | Change:
    rank = len(variable.shape)
    if not -rank <= dim < rank:
      if ignore_ndim_error:
        return Change(spec, f'it has no dimension {dim} for shard_dim to split')
      raise ShardingError(
        f'{variable.name} has {rank} dimensions, and shard_dim is to split dimension {dim}; '
        'pass ignore_ndim_error=True to leave such variables as they are'
      )
    if spec[dim] is not None:
      raise ShardingError(
        f'{variable.name}: dimension {dim} is split over {spec[dim]!r} already, not over {axis!r} too'
      )
    size, parts = variable.shape[dim], num_parts(axis, mesh)
    if size % parts and not allow_padding:
      raise ShardingError(
        f'{variable.name}: dimension {dim} of size {size} does not divide by the {parts} parts of {axis!r}; '
        'allow_padding=True pads it'
      )
    return _split(spec, dim % rank, axis)

  return rule


@register_rule('logical_partitioning')
def logical_partitioning(rules: tuple[tuple[str, Any], ...] | None = None) -> Rule:
  """Splits the variable as logical axis rules say for the names it is declared with; without names, leaves it.

  Args:
    rules: the rules; by default those in force (`axis_rules`), or else the standard ones.
  """

  def rule(spec: Spec, variable: Variable, mesh: Mapping[str, int]) -> Spec | Change:
    if variable.logical_axes is None:
      return Change(spec, 'it is declared without logical axes')
    chosen = rules or current_axis_rules() or standard_logical_axis_rules()
    logical = resolve_split_mapping(
      variable.logical_axes, tuple(mesh), chosen, rank=len(variable.shape), path=variable.name
    )
    both = next((i for i in range(len(spec)) if spec[i] is not None and logical[i] not in (None, spec[i])), None)
    if both is not None:
      raise ShardingError(f'{variable.name}: dimension {both} is split over {spec[both]!r} already')
    return tuple(entry if entry is not None else new for entry, new in zip(spec, logical))

  return rule


def _split(spec: Spec, dim: int, axis: str | tuple[str, ...]) -> Spec:
  return (*spec[:dim], axes_to_entry(spec_axes(axis)), *spec[dim + 1 :])
