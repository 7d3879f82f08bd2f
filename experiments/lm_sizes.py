"""Language models of published sizes, with meshes and shardings to start from. They train on your own text.

  praxis-lite show --exp=lm_sizes.Llama8B
  praxis-lite train --exp=lm_sizes.Gpt2Small --job_log_dir=runs/gpt2 --set 'datasets[*].path=my_texts/*.txt' \\
    --set 'datasets[*].tokenizer_tpl.model_path=my_tokenizer.model'
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.inputs import SentencePieceTokenizer, TextInput
from praxis_lite.layers import Lora, QuantizedWeights
from praxis_lite.models import quantize_weights, set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.adapters import train_adapters
from praxis_lite.training.experiment import BaseExperiment


class PublishedSize(BaseExperiment):
  """Trains the language model of `model()` in bfloat16 on text. `batch_axes` split the rows of a batch."""

  mesh_axis_names: tuple[str, ...] = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 1, 1)
  seq_len = 1024
  batch_size = 32
  batch_axes: tuple[str, ...] = ('replica', 'data')
  learning_rate = 6e-4

  def model(self) -> Config:
    raise NotImplementedError

  def split(self, model: Config) -> Config:
    """Sets the mappings of a model, and returns it."""
    return set_sharding(model)

  def datasets(self) -> list[Config]:
    train = Config(TextInput, name='train', is_training=True, split='train')
    validation = Config(TextInput, name='validation', split='validation')
    sizes = {'seq_len': self.seq_len, 'batch_size': self.batch_size}
    return [d.set(path=REQUIRED, tokenizer_tpl=Config(SentencePieceTokenizer), **sizes) for d in (train, validation)]

  def task(self) -> Config:
    task = Config(LanguageModelTask, model=self.split(self.model()).set(packed=False, fprop_dtype=jnp.bfloat16))
    task.train.learner = adamw_learner(learning_rate=self.learning_rate, warmup_steps=2000)
    task.train.set(num_train_steps=100_000, eval_interval_steps=1000, save_interval_steps=1000)
    task.train.inputs_split_mapping = {'map_1d': (self.batch_axes,), 'map_2d': (self.batch_axes, None)}
    task.evaluate.max_batches = 100
    return task


_gpt2 = functools.partial(transformer_lm, style='gpt2', vocab_size=50257)
_llama3 = functools.partial(transformer_lm, vocab_size=128256, num_kv_heads=8, rotary_base=500_000.0, remat='full')


@registry.register
class Gpt2Small(PublishedSize):
  """GPT-2, 124M parameters (Radford et al., 2019), on one accelerator."""

  def model(self) -> Config:
    return _gpt2(model_dims=768, num_layers=12, num_heads=12, max_len=self.seq_len)


@registry.register
class Gpt2Xl(PublishedSize):
  """GPT-2, 1.5B parameters, fully sharded over 8 devices; 25 heads and 50,257 tokens are padded."""

  ici_mesh_shape = (1, 8, 1)
  batch_size = 64
  learning_rate = 2e-4

  def model(self) -> Config:
    return _gpt2(model_dims=1600, num_layers=48, num_heads=25, max_len=self.seq_len, remat='full')


@registry.register
class Llama1B(PublishedSize):
  """LLaMA style, 1.2B parameters with the sizes of Llama 3.2 1B, fully sharded over 8 devices."""

  ici_mesh_shape = (1, 8, 1)
  seq_len = 4096
  batch_size = 64
  learning_rate = 3e-4

  def model(self) -> Config:
    return _llama3(model_dims=2048, num_layers=16, num_heads=32, hidden_dims=8192, tie_embeddings=True)


@registry.register
class Llama8B(PublishedSize):
  """LLaMA style, 8.0B parameters as in Llama 3 8B, on 64 devices: fully sharded over 16, tensor parallel over 4."""

  ici_mesh_shape = (1, 16, 4)
  seq_len = 8192
  batch_size = 128
  learning_rate = 3e-4

  def model(self) -> Config:
    return _llama3(model_dims=4096, num_layers=32, num_heads=32, hidden_dims=14336)


@registry.register
class Llama8BLora(Llama8B):
  """Fine-tunes Llama8B by LoRA on one accelerator of 80 GB: weights in bfloat16, updates of rank 16 in float32.

  It starts from the weights of another run, such as an imported one: --set task.train.init_from.path=runs/llama.
  """

  ici_mesh_shape = (1, 1, 1)
  seq_len = 2048
  batch_size = 8
  learning_rate = 2e-4

  def task(self) -> Config:
    task = super().task()
    task.model.dtype = jnp.bfloat16
    task.model.lm_tpl.transformer_tpl.unroll = 1  # Without a loop, the step would keep a copy of the frozen weights.
    task.train.learner.schedule.warmup_steps = 100
    task.train.set(num_train_steps=2000, eval_interval_steps=200, save_interval_steps=200)
    return train_adapters(task, Config(Lora, rank=16, alpha=32.0))


@registry.register
class Llama8BQlora(Llama8BLora):
  """Llama8BLora with frozen weights in 4 bits: NF4 with one bfloat16 scale for every 64 inputs.

  It starts from a run with such weights, which `praxis-lite quantize` makes: --set task.train.init_from.path=runs/nf4.
  """

  def task(self) -> Config:
    task = super().task()
    nf4 = Config(QuantizedWeights, format='nf4', group_size=64, scale_dtype='bfloat16')
    quantize_weights(task.model, nf4)
    return task
