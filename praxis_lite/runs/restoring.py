"""Restores the model of a checkpoint on any mesh, without the optimizer."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import jax
from jax.sharding import Mesh

from praxis_lite.checkpoints import Checkpointer, OnDamage, Step, restore_variables
from praxis_lite.common.foreign_text import printable
from praxis_lite.common.processes import is_primary_process
from praxis_lite.models import BaseModel
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.records.differences import changes_named
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.taps import step_taps
from praxis_lite.training.task import SingleTask


class RestoreOptions(TypedDict, total=False):
  """Which checkpoint is restored, and where.

  Attributes:
    step: the step of the checkpoint, or 'best'; None uses the newest.
    devices: the devices to build the mesh of the task from; None means all devices.
    seed: the seed for models that draw random numbers in predictions or evaluations.
    on_damage: 'previous' uses the previous checkpoint if the newest is damaged, and says so on stderr; 'fail' raises.
  """

  step: Step
  devices: Sequence[jax.Device] | None
  seed: int
  on_damage: OnDamage


def restore_model(
  config: ExperimentConfig,
  job_log_dir: str | os.PathLike[str],
  *,
  step: Step = None,
  devices: Sequence[jax.Device] | None = None,
  seed: int = 0,
  on_damage: OnDamage = 'previous',
  create_mesh: Callable[[SingleTask], Mesh] | None = None,
  use_ema: bool | Literal['evaluate', 'decode'] = 'evaluate',
  tap: Sequence[str] = (),
  check: Callable[[BaseModel], None] = lambda model: None,
  meanwhile: Callable[[TrainedModel], None] = lambda model: None,
) -> TrainedModel:
  """Restores a checkpoint of a run on a mesh.

  Args:
    step, devices, seed, on_damage: see `RestoreOptions`.
    create_mesh: returns the mesh for a task; None creates the task's own mesh from `devices`.
    use_ema: whether to use the moving averages, if the learner keeps them; or the name of the section of the task whose
      field `use_ema` decides.
    tap: statistics of activations that evaluations report; see `praxis_lite.training.taps`.
    check: called with the model before anything is restored.
    meanwhile: called before restoring, for example to start compiling. Its argument is the model that is returned
      later, with shapes as variables.

  Raises:
    UserError: there is no checkpoint, or it does not fit the config, or the mesh does not fit the devices.
  """
  with contextlib.closing(Checkpointer(job_log_dir, read_only=True, on_damage=on_damage)) as checkpointer:
    checkpointer.existing_step(step)  # Raises an error, if the step is missing, before slow work.
    task: SingleTask = config.task.instantiate()
    mesh = task.create_mesh(devices) if create_mesh is None else create_mesh(task)
    tasks = TaskOnMesh.make_for_inference(task, mesh, step_taps(task, tap, trains=False) if tap else None)
    check(task.model)
    shapes = tasks.layout.padded_shapes
    model = TrainedModel(config, tasks, shapes.mdl_vars, shapes.step, seed, job_log_dir)
    meanwhile(model)
    ema: bool = getattr(task, use_ema).use_ema if isinstance(use_ema, str) else use_ema
    with changes_named(job_log_dir, config):
      model.stored_variables, model.global_step = restore_variables(
        checkpointer, tasks.layout, use_ema=ema, step=step, weights=task.model.abstract_init()
      )
    for line in checkpointer.notes if is_primary_process() else ():
      print(printable(line), file=sys.stderr)
  return model
