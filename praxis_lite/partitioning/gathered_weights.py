"""Weights that are gathered before they are used, because XLA multiplies by them wrongly as they lie.

Where the rows of activations are split over two mesh axes or more, and a weight over some of these, XLA's partitioner
(seen with jaxlib 0.10.2, with Shardy and without) may return the rows of their product in another order, and say
nothing. On a mesh r 2 x d 2 x m 2 this sum over v is wrong:

    y[b, c] = sum_v x[b, v] w[c, v]        x, y over (('r', 'd'), 'm')        w over ('d', 'm')

With w gathered over the axes of the rows first it is right; fully sharded training gathers it there anyway. Meshes that
split rows over one axis are left alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from praxis_lite.partitioning.constraints import with_sharding_constraint
from praxis_lite.partitioning.paths import Path, leaves_by_path
from praxis_lite.partitioning.rules import resolve_split_mapping
from praxis_lite.partitioning.specs import axes_to_entry, spec_axes, to_partition_spec

_gathered: contextvars.ContextVar[Mapping[Path, PartitionSpec] | None] = contextvars.ContextVar(
  'praxis_lite_gathered_weights', default=None
)


def specs_to_gather(
  model: Any, specs: Any, inputs_split_mapping: Mapping[str, Any] | None, mesh_sizes: Mapping[str, int]
) -> dict[Path, PartitionSpec]:
  """Returns for each variable to be gathered the spec it is used in, by its path.

  Args:
    model: its layers' activation mappings tell which axes split rows, beside those of the inputs.
    specs: the variables' PartitionSpecs of full rank.
    inputs_split_mapping: of the task.
    mesh_sizes: size of each mesh axis.
  """
  rows = _row_axes(model, inputs_split_mapping, mesh_sizes)
  used: dict[Path, PartitionSpec] = {}
  for path, spec in leaves_by_path(specs).items():
    gathered = PartitionSpec(*(axes_to_entry([a for a in spec_axes(entry) if a not in rows]) for entry in spec))
    if gathered != spec:
      used[(*model.path, *path)] = gathered
  return used


@contextlib.contextmanager
def gathering(specs: Mapping[Path, PartitionSpec]) -> Iterator[None]:
  """While a step is traced: weights at these paths are gathered to these specs where layers read them."""
  token = _gathered.set(specs)
  try:
    yield
  finally:
    _gathered.reset(token)


def as_used(path: Path, weight: jax.Array) -> jax.Array:
  """Returns a weight as a layer multiplies by it; inside a scan over layers it has lost its leading dimensions."""
  spec = (_gathered.get() or {}).get(path)
  if spec is None:
    return weight
  return with_sharding_constraint(weight, PartitionSpec(*tuple(spec)[len(spec) - weight.ndim :]))


def _row_axes(model: Any, inputs_split_mapping: Mapping[str, Any] | None, mesh_sizes: Mapping[str, int]) -> set[str]:
  """All axes that split dimension 0 of an input or an activation together with others."""
  specs = [
    to_partition_spec(mapping, tuple(mesh_sizes), path=f'inputs_split_mapping.{key}')
    for key, mapping in (inputs_split_mapping or {}).items()
    if mapping
  ]
  for layer in model.descendants():
    mappings = layer.activation_split_dims_mapping
    if layer.mesh_axis_names is None or mappings is None:
      continue
    for field in dataclasses.fields(mappings.__fn_or_cls__):
      mapping = getattr(mappings, field.name)
      if mapping:
        specs.append(resolve_split_mapping(mapping, layer.mesh_axis_names, layer.logical_axis_rules))
  rows: set[str] = set()
  for spec in specs:
    axes = [axis for axis in spec_axes(spec[0]) if mesh_sizes.get(axis, 1) > 1]
    if len(axes) > 1:
      rows.update(axes)
  return rows
