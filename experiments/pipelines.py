"""Language models in stages of a pipeline: tiny ones, and one of 175B parameters.

praxis-lite show --exp=pipelines.Gpt3
praxis-lite train --exp=pipelines.SyntheticLmPipelined --job_log_dir=runs/pipelined --devices=8
"""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.experiments.lm_sizes import PublishedSize
from praxis_lite.experiments.recurrent import GriffinTiny
from praxis_lite.models import set_pipeline, transformer_lm
from praxis_lite.training import registry

AXES = ('stage', 'replica', 'data', 'mdl')


@registry.register
class SyntheticLmPipelined(SyntheticLmTiny):
  """For tests: 3 layers in 2 stages, fully sharded and tensor parallel; microbatches have 3 rows."""

  mesh_axis_names = AXES
  ici_mesh_shape = (2, 1, 2, 2)

  def model(self) -> Config:
    return set_pipeline(super().model().set(num_layers=3), num_stages=2, microbatch_size=3)


@registry.register
class SyntheticLmCircular(SyntheticLmTiny):
  """For tests: 8 layers in 4 circular stages, each with two groups of one layer, and data parallel."""

  mesh_axis_names = AXES
  ici_mesh_shape = (4, 2, 1, 1)

  def model(self) -> Config:
    model = super().model().set(num_layers=8)
    return set_pipeline(model, num_stages=4, num_microbatches=4, circular_repeat=2, stage_remat='full')


@registry.register
class GriffinPipelined(GriffinTiny):
  """For tests: two stages of a pattern of three blocks, and a seventh block that is in no stage."""

  mesh_axis_names = AXES
  ici_mesh_shape = (2, 1, 2, 2)

  def model(self) -> Config:
    return set_pipeline(super().model().set(num_layers=7), num_stages=2, num_microbatches=3)


@registry.register
class Gpt3(PublishedSize):
  """GPT-3 style, 175B parameters, on 512 devices: 16 stages, fully sharded over 16, tensor parallel over 2.

  Its batches have 3.1M tokens (Brown et al., 2020). Weights are gathered once in a step. For the backward pass, only
  the inputs of stages are kept, and each stage of six layers is recomputed. The six layers are unrolled, because a loop
  would copy the weights of each layer out of their stack. Layers before and after the stages split the rows of the
  batch over the devices of all stages, which would otherwise all compute the same.
  """

  mesh_axis_names = AXES
  ici_mesh_shape = (16, 1, 16, 2)
  seq_len = 2048
  batch_size = 1536
  learning_rate = 6e-5

  def model(self) -> Config:
    model = transformer_lm(
      style='gpt2',
      vocab_size=50257,
      max_len=self.seq_len,
      model_dims=12288,
      num_layers=96,
      num_heads=96,
      remat='none',
    )
    model.lm_tpl.transformer_tpl.unroll = 6
    return set_pipeline(model, num_stages=16, num_microbatches=96, gather_axes='data', stage_remat='full')

  def task(self) -> Config:
    task = super().task()
    lm = task.model.lm_tpl
    lm.position_tpl.weight_split_dims_mapping.wt = (None, 'data')
    rows = ('replica', 'data', 'stage')
    lm.activation_split_dims_mapping.out = (rows, None, None)
    lm.softmax_tpl.weight_split_dims_mapping.wt = ('mdl', 'data')
    lm.softmax_tpl.activation_split_dims_mapping.set(emb=(rows, None, None), out=(rows, None, 'mdl'))
    return task
