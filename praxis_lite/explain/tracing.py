"""What a model does with a batch of given shapes: its constraints and its program, traced without a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from praxis_lite.call import Constraint, Surroundings
from praxis_lite.partitioning.constraints import reshard_input_based_on_rank_fn
from praxis_lite.task import SingleTask


class Trace(NamedTuple):
  """A traced forward pass in training.

  Attributes:
    constraints: each constraint on an array of its field and shape, once, in the order of the pass.
    jaxpr: the program; its arguments are the leaves of the model's variables, then of the batch.
  """

  constraints: list[Constraint]
  jaxpr: Any


def abstract_mesh(mesh_sizes: Mapping[str, int]) -> AbstractMesh:
  """A mesh of these sizes without devices."""
  names = tuple(mesh_sizes)
  return AbstractMesh(tuple(mesh_sizes.values()), names, axis_types=(AxisType.Auto,) * len(names))


def trace_model(jax_task: SingleTask, inputs_struct: Any, mesh_sizes: Mapping[str, int]) -> Trace:
  """Traces the forward pass of a task's model, as in a train step.

  Args:
    jax_task: an instantiated task.
    inputs_struct: tree of shapes and dtypes of a global batch.
    mesh_sizes: size of each mesh axis.

  Raises:
    ShardingError: a mapping does not fit its activation, its input or the mesh.
  """
  variables = jax.tree.map(lambda weight: weight.as_struct(), jax_task.model.abstract_init())
  names = tuple(mesh_sizes)

  def forward(variables: Any, batch: Any) -> Any:
    batch = reshard_input_based_on_rank_fn(jax_task.train.inputs_split_mapping, names, batch)
    (metrics, _), _ = jax_task.model.apply(variables, batch, key=jax.random.key(0), surroundings=listening)
    return metrics['loss']

  found: list[Constraint] = []
  listening = Surroundings(listener=found.append)
  with jax.sharding.use_abstract_mesh(abstract_mesh(mesh_sizes)):
    jaxpr = jax.make_jaxpr(forward)(variables, inputs_struct)
  unique = {(c.field, c.shape, str(c.dtype)): c for c in reversed(found)}
  return Trace(list(unique.values())[::-1], jaxpr)
