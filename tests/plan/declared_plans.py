"""Snapshots of what a task declares, which need no plan."""

import dataclasses

from praxis_lite.instruments.explain.explanation import format_mesh
from praxis_lite.instruments.explain.report import Explained, parameter_table, task_and_inputs
from praxis_lite.instruments.plan.memory import bytes_on_each
from praxis_lite.instruments.plan.snapshot import Snapshot, weights_of
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.state import state_layout


def declared_snapshot(task: Explained, kept: Snapshot) -> Snapshot:
  """Returns a snapshot with only the weights and the memory of the state. Uses shapes, and takes milliseconds.

  Args:
    task: a task or its config, an experiment class, or the result of `configure` for one.
    kept: the snapshot to compare the result with.
  """
  jax_task, _ = task_and_inputs(task)
  sizes = jax_task.mesh_sizes()
  state = state_layout(jax_task, abstract_mesh(sizes)).padded_shapes
  memory = {
    'parameters': bytes_on_each(state.mdl_vars),
    'optimizer slots': bytes_on_each(state.opt_states),
    'moving averages': bytes_on_each(state.ema_vars),
  }
  weights = weights_of(parameter_table(jax_task, sizes))
  return dataclasses.replace(
    kept, mesh=format_mesh(sizes), mode='declared', memory=memory, weights=weights, collectives={}
  )
