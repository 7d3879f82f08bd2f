"""Language models with long contexts: a mesh axis splits their sequences (context parallelism).

praxis-lite show --exp=long_context.Llama8B128k
praxis-lite train --exp=long_context.RingLmTiny --job_log_dir=runs/ring
"""

from __future__ import annotations

from praxis_lite.common.config import Config
from praxis_lite.experiments.lm import counting_data
from praxis_lite.experiments.lm_sizes import PublishedSize
from praxis_lite.layers.positions import Llama3RotaryScaling
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment

AXES = ('replica', 'data', 'context', 'mdl')
_BATCH = ('replica', 'data')
INPUTS_SPLIT = {'map_1d': (_BATCH,), 'map_2d': (_BATCH, 'context')}


def split_sequences(model: Config, method: str = 'ring') -> Config:
  """Splits rows over 'replica' and 'data', lengths over 'context', heads over 'mdl', weights over all but 'replica'."""
  set_sharding(model, data_axis=('data', 'context'), context_axis='context')
  model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.context_method = method
  return model


@registry.register
class RingLmTiny(BaseExperiment):
  """For tests: a tiny model on counting sequences; the mesh does not divide its lengths, heads and rows evenly."""

  mesh_axis_names = AXES
  ici_mesh_shape = (1, 2, 2, 2)
  context_method = 'ring'

  def datasets(self) -> list[Config]:
    return counting_data(seq_len=45, batch_size=3)

  def model(self) -> Config:
    model = transformer_lm(
      vocab_size=37, model_dims=18, num_layers=2, num_heads=3, dims_per_head=6, hidden_dims=45, remat='full'
    )
    model.decoder_tpl.max_decode_steps = 16
    return model

  def task(self) -> Config:
    task = Config(LanguageModelTask, model=split_sequences(self.model(), self.context_method))
    task.train.learner = adamw_learner(learning_rate=3e-3, warmup_steps=5)
    task.train.set(num_train_steps=20, log_interval_steps=5, eval_interval_steps=None, save_interval_steps=10)
    task.train.inputs_split_mapping = dict(INPUTS_SPLIT)
    return task


@registry.register
class AllToAllLmTiny(RingLmTiny):
  """RingLmTiny with all-to-all: devices exchange heads for parts of sequences, and pass on no keys and values."""

  context_method = 'all_to_all'


@registry.register
class Llama8B128k(PublishedSize):
  """LLaMA style, 8.0B parameters with the sizes of Llama 3.1 8B, for sequences of 131,072 tokens on 256 devices.

  Sequences are split over 16 devices, and heads over 2. Weights are split over 2 devices for tensor parallelism, and
  fully sharded over 128.
  """

  mesh_axis_names = AXES
  ici_mesh_shape = (1, 8, 16, 2)
  seq_len = 131_072
  batch_size = 32
  learning_rate = 1e-4

  def model(self) -> Config:
    model = transformer_lm(
      vocab_size=128_256,
      model_dims=4096,
      num_layers=32,
      num_heads=32,
      num_kv_heads=8,
      hidden_dims=14_336,
      rotary_base=500_000.0,
      remat='full',
    )
    scaling = Config(Llama3RotaryScaling, factor=8.0, original_max_len=8192)
    model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.rotary_tpl.scaling_tpl = scaling
    return model

  def split(self, model: Config) -> Config:
    return split_sequences(model)

  def task(self) -> Config:
    task = super().task()
    task.model.packed = True
    task.train.learner = adamw_learner(learning_rate=self.learning_rate, warmup_steps=1000)
    task.train.set(num_train_steps=10_000, eval_interval_steps=500, save_interval_steps=500)
    task.train.inputs_split_mapping = dict(INPUTS_SPLIT)
    task.evaluate.max_batches = 20
    return task
