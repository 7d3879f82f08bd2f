"""A tiny regression task whose layers are repeated, or spread over the stages of a pipeline, and its runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from tiny_runs import GatedInput, examples

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.layers import FeedForward, Pipelined, Repeat, RMSNorm
from praxis_lite.layers.base import Layer
from praxis_lite.models.base import BaseModel
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask

DIMS = 10
AXES = ('stage', 'data', 'mdl')


class Block(Layer):
  """x + dropout(ff(norm(x)) * gate), with an auxiliary loss and, as a side input, the gate [B, 1]."""

  rate: float = 0.0
  aux: float = 0.01

  def setup(self):
    self.create_child('norm', Config(RMSNorm, dims=DIMS))
    ff = Config(FeedForward, input_dims=DIMS, hidden_dims=7)
    ff.weight_split_dims_mapping.wt = ('data', 'mdl')
    ff.activation_split_dims_mapping.set(hidden=('data', 'mdl'), out=('data', None))
    ff.dropout_tpl.rate = self.rate
    self.create_child('ff', ff)

  def __call__(self, x_BD, gate_B1):
    y_BD = self.ff(self.norm(x_BD)) * gate_B1
    self.add_aux_loss('size', jnp.mean(y_BD**2), weight=self.aux)
    return x_BD + y_BD


class StagedModel(BaseModel):
  """The mean over dims of what the layers make of x."""

  layers_tpl: Config = REQUIRED

  def setup(self):
    self.create_child('layers', self.layers_tpl)

  def compute_predictions(self, batch):
    return jnp.mean(self.layers(batch['x'], jnp.cos(batch['y'])[:, None]), axis=-1)

  def compute_loss(self, predictions, batch):
    errors, weights = (predictions - batch['y']) ** 2, batch['weights']
    total = weights.sum()
    return {'loss': ((errors * weights).sum() / jnp.maximum(total, 1), total)}, {}


def staged_run(
  num_layers: int, mesh=(1, 1, 1), stages: dict[str, Any] | None = None, gate='', block=None, **train: Any
):
  """The configs of a run of 20 steps; without `stages`, the layers are repeated by a scan."""
  layers: Config = Config(Repeat, num_layers=num_layers, layers_tpl=Config(Block, **(block or {})))
  if stages is not None:
    layers = Config(Pipelined, num_layers=num_layers, layers_tpl=Config(Block, **(block or {})), **stages)
    layers.weight_split_dims_mapping.stages = ('stage',)
  model = Config(StagedModel, layers_tpl=layers)
  task = Config(SingleTask, name='staged', model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.inputs_split_mapping = {'map_1d': ('data',), 'map_2d': ('data', None)}
  task.train.learner = Config(Learner, optimizer=Config(optax.adam), learning_rate=0.01)
  task.train.set(**{'num_train_steps': 20, 'log_interval_steps': 1, 'save_interval_steps': 3, **train})
  data = Config(GatedInput, name='train', arrays=examples(48, 0), batch_size=8, is_training=True, gate=gate)
  return ExperimentConfig(task, [data])


def flat_layers(variables: Any, num_layers: int) -> Any:
  """Variables of the layers as those of `Repeat`: circular ones are [rounds, layers in a round, ...]."""
  one = jax.eval_shape(Config(Block).instantiate().init, jax.random.key(0))
  return jax.tree.map(lambda v, s: v.reshape(num_layers, *s.shape), variables['layers']['layers'], one)
