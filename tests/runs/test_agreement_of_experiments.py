"""Each registered language model, in small: training, evaluation, decoding, a batcher and an export agree."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.bridges.hf.agreement import agree
from praxis_lite.common.config import fill_required, target
from praxis_lite.common.config.text import to_text
from praxis_lite.instruments.verification.shrink import small_task
from praxis_lite.models import BaseModel
from praxis_lite.runs.forced_tokens import KnownTexts, random_texts
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training import registry
from praxis_lite.training.experiment import ExperimentConfig, configure

registry.load_all()
NAMES = [name for name in registry.names() if name.startswith('praxis_lite.experiments.')]
KNOWN: dict[str, str] = {}  # The first experiment with a model, whatever its mesh.


def is_language_model(config):
  return target(config.task.model).score_limits is not BaseModel.score_limits


def small_model(config):
  """The model of an experiment, small, in float32, on one device, with random variables; None if it stays large."""
  struct = fill_required(config.datasets[0]).instantiate().batch_struct()
  task = small_task(config.task, struct).config
  task.mesh_axis_names = tuple(task.mesh_axis_names or ('data',))
  task.ici_mesh_shape, task.dcn_mesh_shape = (1,) * len(task.mesh_axis_names), None
  built = task.instantiate()
  if sum(math.prod(weight.full_shape) for weight in jax.tree.leaves(built.model.abstract_init())) > 10**8:
    return None
  tasks = TaskOnMesh.make_for_inference(built, built.create_mesh(jax.devices()[:1]))
  variables = jax.tree.map(lambda x: 1.5 * x if x.ndim > 1 else x, drawn_variables(built.model.abstract_init()))
  return TrainedModel(ExperimentConfig(task, [], []), tasks, tasks.layout.mdl_vars.to_mesh(variables), jnp.int32(0))


def texts_for(limits):
  if limits.start_id is None:
    return random_texts(limits, 3, 20)
  rng = np.random.default_rng(0)
  contexts, continuations = (
    [rng.integers(2, limits.vocab_size, n).tolist() for n in sizes] for sizes in ((5, 3), (4, 7))
  )
  return KnownTexts(contexts, continuations)


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_it_agrees(name):
  config = configure(registry.get(name))
  if not is_language_model(config):
    return
  lines = to_text({'model': config.task.model}).splitlines()
  text = '\n'.join(line for line in lines if '_split_dims_mapping' not in line)
  if KNOWN.setdefault(text, name) != name:  # Its mesh is another one, and here it has one device.
    return
  model, lines = small_model(config), []
  if model is None:
    pytest.skip('it cannot be made small')
  if model.layer.score_limits() is None:  # A model of speech: its sources are no tokens.
    return
  compared = agree(model, texts_for(model.layer.score_limits()), progress=lines.append)
  assert all(each.is_right for each in compared), '\n'.join(lines)
  done = {each.name for each in compared if not each.problem}
  assert {'one pass, as in evaluation', 'cached decoding'} <= done, '\n'.join(lines)
