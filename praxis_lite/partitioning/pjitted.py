"""A function jitted for a mesh by specs of its arguments and results, any dimension of which may be uneven.

    fn(true arrays) -> true arrays              what the user writes
    jitted(padded arrays) -> padded arrays      slice to true shapes, fn, pad

Whether an array of 8 rows holds 8 or 5 padded to 8 cannot be seen from it, so the true shapes of arguments that may be
uneven are given as `arg_shapes`. What `fn` returns has true shapes, and is padded to its specs on the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from praxis_lite.errors import ShardingError
from praxis_lite.partitioning.layout import StateLayout, is_spec, layout_of
from praxis_lite.partitioning.logical_constraints import axis_rules
from praxis_lite.partitioning.padding import pad_to
from praxis_lite.partitioning.paths import path_names
from praxis_lite.partitioning.rules import LogicalAxisRules


def put_padded(tree: Any, layout: StateLayout) -> Any:
  """Pads the arrays of `tree` that have their true shapes, and puts all on the mesh.

  Raises:
    ShardingError: an array has neither its true nor its padded shape.
  """

  def put(key_path: Any, x: Any, true: Any, padded: Any) -> Any:
    if tuple(x.shape) not in (true.shape, padded.shape):
      raise ShardingError(
        f'{".".join(path_names(key_path))} has shape {tuple(x.shape)}; expected {true.shape}'
        + (f', or {padded.shape} with its padding' if padded.shape != true.shape else '')
      )
    if isinstance(x, jax.ShapeDtypeStruct):
      return padded
    return jax.device_put(x if x.shape == padded.shape else pad_to(x, padded), padded.sharding)

  return jax.tree_util.tree_map_with_path(put, tree, layout.unpadded_shapes, layout.padded_shapes)


class PjittedFnWithContext:
  """A partitioned function. It is traced with the mesh as the ambient one and the logical axis rules in force.

  Args:
    fn: function of true arrays.
    mesh: the mesh.
    in_axis_resources: for each argument that is not static, a PartitionSpec, None for replicated, or a tree of those
      that
      is a prefix of the argument.
    out_axis_resources: the same for the result.
    static_argnums, donate_argnums: as for `jax.jit`.
    logical_axis_rules: the rules in force while `fn` is traced.
    arg_shapes: for each argument that is not static, the tree of its true shapes, or None if it does not need padding.
  """

  def __init__(
    self,
    fn: Callable[..., Any],
    mesh: Mesh,
    in_axis_resources: Sequence[Any],
    out_axis_resources: Any,
    *,
    static_argnums: Sequence[int] = (),
    donate_argnums: Sequence[int] = (),
    logical_axis_rules: LogicalAxisRules = (),
    arg_shapes: Sequence[Any] | None = None,
  ):
    self.mesh = mesh
    self.logical_axis_rules = tuple(logical_axis_rules)
    self._static = frozenset(static_argnums)
    self._in_specs = tuple(in_axis_resources)
    shapes = (None,) * len(self._in_specs) if arg_shapes is None else tuple(arg_shapes)
    if len(shapes) != len(self._in_specs):
      raise ShardingError(f'{len(self._in_specs)} in_axis_resources are given, and {len(shapes)} arg_shapes')
    self._even: set[tuple[Any, ...]] = set()
    self._layouts = [None if s is None else layout_of(s, spec, mesh) for s, spec in zip(shapes, self._in_specs)]

    def on_mesh(*args: Any) -> Any:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), axis_rules(self.logical_axis_rules):
        out = jax.tree.map(jnp.asarray, fn(*self._map_arguments(self._unpad, args)))
        return layout_of(out, out_axis_resources, mesh).pad(out)

    on_mesh.__name__ = on_mesh.__qualname__ = getattr(fn, '__name__', 'fn')
    self.jitted = jax.jit(
      on_mesh,
      in_shardings=self._shardings(self._in_specs),
      out_shardings=self._shardings(out_axis_resources),
      static_argnums=tuple(static_argnums),
      donate_argnums=tuple(donate_argnums),
    )

  def __call__(self, *args: Any) -> Any:
    """Calls the function with arrays of true or padded shapes, on the mesh or on the host; returns padded arrays."""
    return self.jitted(*self._map_arguments(self._put, args))

  def lower(self, *args: Any) -> Any:
    """Lowers the function for arguments like these, which may be `jax.ShapeDtypeStruct`s."""
    return self.jitted.lower(*self._map_arguments(self._put, args))

  def _shardings(self, specs: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(self.mesh, s or PartitionSpec()), specs, is_leaf=is_spec)

  def _map_arguments(self, fn: Callable[[int, Any], Any], args: Sequence[Any]) -> list[Any]:
    """Applies `fn` to each argument that is not static, with its number among these."""
    dynamic = [i for i in range(len(args)) if i not in self._static]
    if len(dynamic) != len(self._in_specs):
      raise ShardingError(f'{len(self._in_specs)} in_axis_resources are given for {len(dynamic)} arguments')
    return [fn(dynamic.index(i), arg) if i in dynamic else arg for i, arg in enumerate(args)]

  def _put(self, i: int, arg: Any) -> Any:
    layout = self._layouts[i]
    if layout is not None:
      return put_padded(arg, layout)
    shapes = (i, *(jnp.shape(leaf) for leaf in jax.tree.leaves(arg)))
    if shapes not in self._even:
      self._check_even(i, arg)
      self._even.add(shapes)
    return arg

  def _unpad(self, i: int, arg: Any) -> Any:
    layout = self._layouts[i]
    return arg if layout is None else layout.unpad(arg)

  def _check_even(self, i: int, arg: Any) -> None:
    layout = layout_of(jax.eval_shape(lambda x: x, arg), self._in_specs[i], self.mesh)

    def check(key_path: Any, true: Any, padded: Any, spec: PartitionSpec) -> None:
      if true.shape != padded.shape:
        where = '.'.join(path_names(key_path))
        raise ShardingError(
          f'argument {i}{f", {where}," if where else ""} of shape {true.shape} does not divide by {spec} on the mesh '
          f'{dict(self.mesh.shape)}; pass its true shapes as arg_shapes[{i}], so that it is padded'
        )

    jax.tree_util.tree_map_with_path(check, layout.unpadded_shapes, layout.padded_shapes, layout.specs)
