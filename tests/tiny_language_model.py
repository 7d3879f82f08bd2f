"""A language model of two layers with random variables, on any mesh, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from drawn_state import drawn_variables

from praxis_lite.bridges.hf import import_run, write_model
from praxis_lite.common.config import Config
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

AXES = ('replica', 'data', 'mdl')


def tiny_language_model(mesh: tuple[int, ...] = (1, 1, 1), **fields: Any) -> TrainedModel:
  """A model of 37 tokens whose dimensions do not divide by 3, with variables that are large enough to matter."""
  sizes: dict[str, Any] = {'vocab_size': 37, 'model_dims': 16, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 20}
  model = set_sharding(transformer_lm(**{**sizes, 'rotary_base': 30.0, **fields}))
  task = Config(SingleTask, name='lm', model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.inputs_split_mapping = {'map_1d': (AXES[:2],), 'map_2d': (AXES[:2], None)}
  built = task.instantiate()
  count = mesh[0] * mesh[1] * mesh[2]
  tasks = TaskOnMesh.make_for_inference(built, built.create_mesh(jax.devices()[:count]))
  variables = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, drawn_variables(built.model.abstract_init()))
  stored = tasks.layout.mdl_vars.to_mesh(variables)
  return TrainedModel(ExperimentConfig(task, [], []), tasks, stored, jnp.int32(0))


def import_tiny_run(folder: Path) -> Path:
  """A run directory, without data and without a tokenizer, whose checkpoint is the tiny model; returns its path."""
  model = tiny_language_model()
  write_model(folder / 'exported', model.layer, model.variables)
  import_run(folder / 'exported', folder / 'run')
  return folder / 'run'
