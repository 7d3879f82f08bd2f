"""A small language model with drawn variables, whose continuations look random, for tests of batchers and servers."""

from __future__ import annotations

import functools

import jax
import numpy as np
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.models import encoder_decoder, set_sharding, transformer_lm
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

V, AXES = 128, ('spare', 'replica', 'data', 'mdl')
ONE = (1, 1, 1, 1)


def task(mesh=ONE, style=None, **decoder):
  """Of a language model, or of an encoder-decoder in a style."""
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_heads': 3, 'hidden_dims': 10, 'num_layers': 2}
  if style is None:
    model = set_sharding(transformer_lm(**sizes))
    model.lm_tpl.transformer_tpl.sliding_windows = (5, None)
  else:
    model = set_sharding(encoder_decoder(**sizes, style=style, max_len=50, start_id=3)).set(source_end_id=7)
  model.decoder_tpl.set(**{'max_decode_steps': 12, 'stop_ids': (7,), **decoder})
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  return task


@functools.cache
def made(mesh=ONE, style=None, cache_dtype=None):
  """A model with drawn variables, on a mesh."""
  config = task(mesh, style)
  if cache_dtype is not None:
    config.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.cache_dtype = cache_dtype
  weights = config.instantiate().model.abstract_init()
  variables = jax.tree.map(lambda w: 9 * w if w.ndim > 1 else w, drawn_variables(weights))
  tasks = TaskOnMesh(config.instantiate(), create_device_mesh(mesh, None, AXES))
  stored = tasks.layout.mdl_vars.to_mesh(variables)
  model = TrainedModel(ExperimentConfig(config, [], []), tasks, stored, np.int32(3), seed=1)
  model.__dict__['tokenizer'] = ByteTokenizer()
  return model
