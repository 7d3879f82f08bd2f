"""Access to saved runs from Python: `open_run` reads a run directory, and `load` restores its model.

run = praxis_lite.open_run('runs/demo')
run.config.task, run.metrics['eval/validation/loss'], run.checkpoints.steps
model = run.load()
model.decode(['def '], temperature=0.7)
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from praxis_lite.checkpoints import BestCheckpoint, Checkpointer, Step
from praxis_lite.common.errors import ShardingError, UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import user_path
from praxis_lite.runs.power_averages import power_average as averaged
from praxis_lite.runs.records.curves import MetricsTable, read_metrics
from praxis_lite.runs.records.record import RunRecord, has_record, read_record
from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
from praxis_lite.runs.records.runs import runs_near
from praxis_lite.runs.restoring import restore_model
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.sharding.mesh import auto_mesh, create_device_mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment, ExperimentConfig, configure
from praxis_lite.training.learning.multi_learner import has_averages
from praxis_lite.training.task import SingleTask


class Checkpoints(NamedTuple):
  """The checkpoints of a run.

  Attributes:
    steps: the steps of all checkpoints, in order.
    best: the best checkpoint by `task.train.best_metric`; None if the run records none.
  """

  steps: list[int]
  best: BestCheckpoint | None

  @property
  def latest(self) -> int | None:
    """The step of the newest checkpoint; None if there is none."""
    return self.steps[-1] if self.steps else None


class SavedRun:
  """A run directory. Its metrics and checkpoints are read anew at each access, so the run may still be training.

  Attributes:
    directory: the job_log_dir.
  """

  def __init__(self, directory: Path, config: ExperimentConfig | None = None, trusted: Collection[str] = ()):
    self.directory = directory
    self._config = config
    self._trusted = trusted

  @functools.cached_property
  def config(self) -> ExperimentConfig:
    """The configs of the run: the ones given to `open_run`, or the ones recorded in the directory.

    They may be edited before `load`, for example to give a dataset another path.
    """
    if self._config is None and not has_record(self.directory):
      raise UserError(f'{self.directory} does not record its config; name its experiment: open_run(directory, exp=...)')
    return self.record.config if self._config is None else self._config

  @functools.cached_property
  def record(self) -> RunRecord:
    """The record of how the run was made: commands, seeds, versions, meshes; see `RunRecord`."""
    return read_record(self.directory, trusted=self._trusted)

  @property
  def metrics(self) -> MetricsTable:
    """The metrics that the run has written: a column for each metric, and a row for each step with any metric."""
    return read_metrics(self.directory)

  @property
  def checkpoints(self) -> Checkpoints:
    """The complete checkpoints."""
    with contextlib.closing(Checkpointer(self.directory, read_only=True)) as checkpointer:
      return Checkpoints(checkpointer.steps(), checkpointer.best())

  def load(
    self,
    *,
    mesh: Mesh | Sequence[int] | None = None,
    step: Step = None,
    ema: bool | None = None,
    power_average: float | None = None,
    seed: int = 0,
  ) -> TrainedModel:
    """Restores the model of a checkpoint.

    Args:
      mesh: a mesh with the task's axes, or its size along each of these axes; None uses one device.
      step: the step of the checkpoint, or 'best'; None uses the newest.
      ema: whether to use the moving averages of the variables. None means `task.evaluate.use_ema`, or False if the
        learner keeps no averages or `power_average` is given.
      power_average: the relative width of an average of the weights, computed from the averages that the learner's
        `power_averages` has stored in this and earlier checkpoints; None uses no such average.
      seed: the seed for models that draw random numbers in predictions or evaluations.

    Raises:
      UserError: there is no such checkpoint; the mesh does not fit the task or the devices; `ema` is True, but the run
        keeps no averages; or `ema` is True and `power_average` is given.
    """
    if ema and power_average is not None:
      raise UserError(
        f'load(ema=True, power_average={power_average}): these are two averages of the weights; choose one'
      )
    create_mesh = functools.partial(_mesh_for, mesh=mesh)
    config = use_kept_vocabulary(self.config, self.directory)
    if ema and not has_averages(config.task.train.learner):
      raise UserError('load(ema=True): the run keeps no moving averages: its task.train.learner.ema_decay is 0')
    if self._config is None:
      for line in self.record.other_defaults.describe(self.config.roots()):
        print(line, file=sys.stderr)
    use_ema: bool | Literal['evaluate'] = 'evaluate' if ema is None and power_average is None else bool(ema)
    model = restore_model(config, self.directory, step=step, seed=seed, create_mesh=create_mesh, use_ema=use_ema)
    if power_average is not None:
      learner, at = config.task.train.learner, int(model.global_step)
      model.stored_variables = averaged(self.directory, learner, model.stored_variables, power_average, at)
    return model

  def __repr__(self) -> str:
    return f'<run {self.directory}, checkpoints of steps {self.checkpoints.steps}>'


def open_run(
  job_log_dir: str | os.PathLike[str],
  exp: str | type[BaseExperiment] | ExperimentConfig | None = None,
  *,
  trusted: str | Collection[str] = (),
) -> SavedRun:
  """Opens a run directory. Nothing is restored or compiled before it is needed.

  Args:
    job_log_dir: the directory of the run.
    exp: the experiment of the run: a name, see --exp, a class, or edited configs; None uses the recorded configs.
    trusted: further modules, packages or Python files whose code the recorded config may name, see --trust.

  Raises:
    UserError: there is no such directory or experiment; or the directory is not a run, but contains runs or is part of
      one.
  """
  directory = user_path(job_log_dir)
  if not directory.is_dir():
    raise UserError(f'there is no run in {directory}: it is not a directory')
  is_run = has_record(directory) or any((directory / name).exists() for name in ('checkpoints', 'metrics.jsonl'))
  if exp is None and not is_run and (near := runs_near(directory)):
    raise UserError(f'{directory} is not a run{near}')
  if isinstance(exp, str):
    exp = registry.get(exp)
  if isinstance(exp, type):
    exp = configure(exp)
  return SavedRun(directory, exp, (trusted,) if isinstance(trusted, str) else trusted)


def _mesh_for(task: SingleTask, mesh: Mesh | Sequence[int] | None) -> Mesh:
  """Returns the mesh for a model to load. The axes of the mesh are Auto axes with the task's names."""
  names = task.mesh_axis_names or ('data',)
  if isinstance(mesh, int):
    fits = (mesh, *(1 for _ in names[1:]))
    raise ShardingError(f'load: mesh = {mesh}: expected the size along each of the axes {names}, such as {fits}')
  if not isinstance(mesh, Mesh):
    needed, count = math.prod(mesh or ()), jax.device_count()
    if mesh is not None and len(mesh) == len(names) and needed > count:
      fits = (count, *(1 for _ in names[1:]))
      raise ShardingError(
        f'load: mesh = {tuple(mesh)} needs {number_of(needed, "device")}, and this process has {count}; pass a smaller '
        f'one, such as mesh={fits}, or call simulate_cpu_devices({needed}) before anything of JAX runs'
      )
    return create_device_mesh((1,) * len(names) if mesh is None else tuple(mesh), None, names)
  if set(mesh.axis_names) != set(names):
    raise ShardingError(f'load: the mesh has the axes {mesh.axis_names}; the axes of the task are {names}')
  return auto_mesh(np.asarray(mesh.devices), mesh.axis_names)
