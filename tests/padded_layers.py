"""Layers on a mesh as a step runs them: variables padded to even parts, and programs with guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from praxis_lite.layers.base import Layer
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.padding import padded_shape, slice_to
from praxis_lite.sharding.specs import to_partition_spec
from praxis_lite.sharding.weights import WeightHParams


def place_on(mesh: Mesh) -> Callable[[WeightHParams, Any], jax.Array]:
  """Returns a function of a declaration and its value that puts it on the mesh, padded."""

  def place(weight, value):
    spec = to_partition_spec(weight.full_split_dims_mapping, mesh.axis_names, rank=value.ndim)
    amounts = [(0, p - d) for d, p in zip(value.shape, padded_shape(value.shape, spec, mesh))]
    return jax.device_put(np.pad(value, amounts) if amounts else value, NamedSharding(mesh, spec))

  return place


def place_variables(layer: Layer, variables: Any, mesh: Mesh) -> Any:
  """Returns the variables of a layer, padded and split over a mesh as the layer declares."""
  return jax.tree.map(place_on(mesh), layer.abstract_init(), variables)


def step_on_mesh(step: Callable[..., Any], layer: Layer, variables: Any, mesh: Mesh) -> Callable[..., Any]:
  """Returns `step(layer, variables, args)` as a guarded program of padded variables and `args`."""

  def on_mesh(padded, args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return step(layer, slice_to(padded, variables), args)

  return GuardedJit(on_mesh)
