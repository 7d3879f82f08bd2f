"""Sharding constraints by logical names, under the rules that are in force.

with axis_rules(standard_logical_axis_rules()):
  h_BTF = with_logical_constraint(h_BTF, ('batch', 'length', 'mlp'))
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax

from praxis_lite.partitioning.constraints import global_mesh_defined, with_sharding_constraint
from praxis_lite.partitioning.rules import LogicalAxisRule, LogicalAxisRules, resolve_split_mapping

_rules: contextvars.ContextVar[tuple[LogicalAxisRule, ...]] = contextvars.ContextVar('praxis_lite_rules', default=())


@contextlib.contextmanager
def axis_rules(rules: LogicalAxisRules) -> Iterator[None]:
  """Puts rules in force, instead of those that were."""
  token = _rules.set(tuple(rules))
  try:
    yield
  finally:
    _rules.reset(token)


def current_axis_rules() -> tuple[LogicalAxisRule, ...]:
  """The rules in force; none by default."""
  return _rules.get()


def with_logical_constraint(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
  """Constrains `x` to be split as the rules in force say for these names, of which mesh axes may be some.

  Without a mesh, or without rules, returns `x` as it is.

  Raises:
    ShardingError: the names do not fit the rank of `x`, the rules or the mesh.
  """
  if not global_mesh_defined() or not current_axis_rules():
    return x
  mesh = jax.sharding.get_abstract_mesh()
  return with_sharding_constraint(
    x, resolve_split_mapping(tuple(names), mesh.axis_names, current_axis_rules(), rank=x.ndim)
  )
