"""Sharding constraints inside a step, by specs or by logical names, on the ambient mesh if there is one.

The same layer code runs with and without a mesh: without one, a constraint returns its argument. The ambient mesh is
set by `jax.set_mesh` or `jax.sharding.use_abstract_mesh`. Logical names are resolved by the current rules
(`axis_rules`); inside the steps of a task, these are the rules of the task.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.errors import ShardingError, ShardingFault, did_you_mean
from praxis_lite.sharding.rules import LogicalAxisRule, LogicalAxisRules, resolve
from praxis_lite.sharding.specs import (
  MappingsByRank,
  all_axes,
  check_axes_once,
  complete_spec,
  drop_axes,
  infer_partition_spec_based_on_rank_fn,
)

T = TypeVar('T')


def global_mesh_defined() -> bool:
  """Whether there is an ambient mesh."""
  return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: jax.Array, spec_or_sharding: PartitionSpec | NamedSharding | None) -> jax.Array:
  """Constrains `x` to be split by a spec over the ambient mesh, or by a sharding, which has its own mesh.

  Returns `x` itself in two cases: the second argument is None; or it is a spec, and there is no mesh, or only a mesh of
  one device. The mesh need not divide the dimensions. An UNCONSTRAINED dimension is left to the compiler. Inside
  `shard_map`, `x` is already one device's part along the mapped (Manual) axes, so the constraint leaves these out.
  There, a sharding means its spec over the ambient mesh. Outside of jit, an uneven constraint does not split an array.

  Raises:
    ShardingError: the spec names an axis that the mesh does not have, names one twice, or has more entries than `x` has
      dimensions.
  """
  if spec_or_sharding is None:
    return x
  manual, sharding = manual_axes(), spec_or_sharding
  spec = complete_spec(sharding.spec if isinstance(sharding, NamedSharding) else sharding, x.ndim)
  if isinstance(sharding, NamedSharding) and not manual:
    return _constrain(x, sharding)
  check_axes_once(spec)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  for axis in all_axes(spec):
    if axis not in mesh.axis_names:
      raise ShardingError(
        f'axis {axis!r} of {spec} is not an axis of the mesh {dict(mesh.shape)}.{did_you_mean(axis, mesh.axis_names)}',
        ShardingFault.UNKNOWN_AXIS,
      )
  if mesh.size == 1 or manual == set(mesh.axis_names):
    return x
  return _constrain(x, drop_axes(spec, manual))


def reshard_input_based_on_rank_fn(mapping_dict: MappingsByRank, mesh_names: Sequence[str], x: T) -> T:
  """Constrains each array of a tree by the mapping for its rank; see `infer_partition_spec_based_on_rank_fn`."""

  def reshard(leaf: jax.Array) -> jax.Array:
    return with_sharding_constraint(leaf, infer_partition_spec_based_on_rank_fn(mapping_dict, mesh_names, leaf))

  return jax.tree.map(reshard, x)


def _constrain(x: jax.Array, sharding: PartitionSpec | NamedSharding) -> jax.Array:
  constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
  return constrain(x) if isinstance(x, jax.core.Tracer) else jax.jit(constrain)(x)


def manual_axes() -> frozenset[str]:
  """Returns the mesh axes that an enclosing `shard_map` maps over."""
  mesh = jax.sharding.get_abstract_mesh()
  return frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual)


def unmapped_axes() -> dict[str, int]:
  """Returns the sizes of the ambient mesh's axes that are larger than 1 and not mapped by an enclosing `shard_map`."""
  mesh, manual = jax.sharding.get_abstract_mesh(), manual_axes()
  return {name: size for name, size in mesh.shape.items() if size > 1 and name not in manual}


def is_partly_mapped() -> bool:
  """Whether an enclosing `shard_map` maps over some axes of the ambient mesh, while other axes may split arrays."""
  return bool(manual_axes() and unmapped_axes())


_rules: contextvars.ContextVar[tuple[LogicalAxisRule, ...]] = contextvars.ContextVar('praxis_lite_rules', default=())


@contextlib.contextmanager
def axis_rules(rules: LogicalAxisRules) -> Iterator[None]:
  """Makes `rules` the current rules inside a `with` block."""
  token = _rules.set(tuple(rules))
  try:
    yield
  finally:
    _rules.reset(token)


def current_axis_rules() -> tuple[LogicalAxisRule, ...]:
  """Returns the current rules; () outside of `axis_rules`."""
  return _rules.get()


def with_logical_constraint(x: jax.Array, names: Sequence[object] | None) -> jax.Array:
  """Constrains `x` to be split as the current rules say for the names of its dimensions.

  Args:
    x: any array.
    names: for each dimension a logical name, a mesh axis, None, or UNCONSTRAINED. If `names` itself is None, or there
      is no mesh or no rules, `x` is returned unchanged.

  Raises:
    ShardingError: the names do not fit the rank of `x`, the rules or the mesh.
  """
  if names is None or not global_mesh_defined() or not current_axis_rules():
    return x
  mesh = jax.sharding.get_abstract_mesh()
  return with_sharding_constraint(x, resolve(tuple(names), mesh.axis_names, current_axis_rules(), rank=x.ndim).spec)
