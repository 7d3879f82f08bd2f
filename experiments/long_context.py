"""Language models of long contexts, whose sequences are split over a mesh axis: context parallelism.

praxis-lite show --exp=long_context.Llama8B128k
praxis-lite train --exp=long_context.RingLmTiny --job_log_dir=runs/ring
"""

from __future__ import annotations

import jax.numpy as jnp

from praxis_lite import registry
from praxis_lite.config import REQUIRED, Config
from praxis_lite.experiment import BaseExperiment
from praxis_lite.inputs import SentencePieceTokenizer, SyntheticLMInput, TextInput
from praxis_lite.layers.positions import Llama3RotaryScaling
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner


class _LongContext(BaseExperiment):
  """Rows are split over 'replica' and 'data', lengths over 'context', heads over 'mdl', weights over the last three."""

  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  context_method = 'ring'

  def split(self, model: Config) -> Config:
    """Sets the mappings of a model."""
    set_sharding(model, data_axis=('data', 'context'), context_axis='context')
    model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.context_method = self.context_method
    return model

  def inputs_split_mapping(self) -> dict[str, tuple[object, ...]]:
    batch = ('replica', 'data')
    return {'map_1d': (batch,), 'map_2d': (batch, 'context')}


@registry.register
class RingLmTiny(_LongContext):
  """For tests: a tiny model on counting sequences whose lengths, heads and rows do not divide by the mesh."""

  ici_mesh_shape = (1, 2, 2, 2)
  seq_len = 45
  batch_size = 3

  def datasets(self) -> list[Config]:
    train = Config(SyntheticLMInput, name='train', num_synthetic_examples=64, is_training=True)
    validation = Config(SyntheticLMInput, name='validation', num_synthetic_examples=10, seed=1)
    return [d.set(seq_len=self.seq_len, vocab_size=37, batch_size=self.batch_size) for d in (train, validation)]

  def model(self) -> Config:
    model = transformer_lm(
      vocab_size=37, model_dims=18, num_layers=2, num_heads=3, dims_per_head=6, hidden_dims=45, remat='full'
    )
    model.decoder_tpl.max_decode_steps = 16
    return model

  def task(self) -> Config:
    task = Config(LanguageModelTask, model=self.split(self.model()))
    task.train.learner = adamw_learner(learning_rate=3e-3, warmup_steps=5)
    task.train.set(num_train_steps=20, log_interval_steps=5, eval_interval_steps=None, save_interval_steps=10)
    task.train.inputs_split_mapping = self.inputs_split_mapping()
    return task


@registry.register
class AllToAllLmTiny(RingLmTiny):
  """As RingLmTiny, where devices exchange heads for parts of the sequence instead of passing keys and values round."""

  context_method = 'all_to_all'


@registry.register
class Llama8B128k(_LongContext):
  """LLaMA style, 8.0B parameters with the sizes of Llama 3.1 8B, for sequences of 131,072 tokens on 256 devices.

  Of these, 16 share a sequence, 2 are tensor parallel, and weights are fully sharded over the other 128.
  """

  ici_mesh_shape = (1, 8, 16, 2)
  seq_len = 131_072
  batch_size = 32

  def datasets(self) -> list[Config]:
    train = Config(TextInput, name='train', is_training=True, split='train')
    validation = Config(TextInput, name='validation', split='validation')
    sizes = {'seq_len': self.seq_len, 'batch_size': self.batch_size}
    return [d.set(path=REQUIRED, tokenizer_tpl=Config(SentencePieceTokenizer), **sizes) for d in (train, validation)]

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

  def task(self) -> Config:
    task = Config(LanguageModelTask, model=self.split(self.model()).set(packed=True, fprop_dtype=jnp.bfloat16))
    task.train.learner = adamw_learner(learning_rate=1e-4, warmup_steps=1000)
    task.train.set(num_train_steps=10_000, eval_interval_steps=500, save_interval_steps=500)
    task.train.inputs_split_mapping = self.inputs_split_mapping()
    task.evaluate.max_batches = 20
    return task
