"""Byte-level language models on the source of the Python standard library, and on text of your own.

The source of the installed standard library needs no download: about 10 MB, split by file into training and validation.
"""

from __future__ import annotations

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.inputs import ByteTokenizer, SyntheticLMInput, TextInput, stdlib_files
from praxis_lite.layers import Lora
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry
from praxis_lite.training.adapters import train_adapters
from praxis_lite.training.experiment import BaseExperiment


class _ByteLm(BaseExperiment):
  """A small LLaMA-style model over bytes."""

  seq_len = 256
  batch_size = 8
  inputs_split_mapping: dict[str, tuple[object, ...] | None] = {'map_1d': None, 'map_2d': None}

  def text(self, split: str) -> Config | str:
    """Returns the value of `TextInput.path` for a split."""
    return Config(stdlib_files, split=split)

  def datasets(self) -> list[Config]:
    train = Config(TextInput, name='train', path=self.text('train'), is_training=True)
    validation = Config(TextInput, name='validation', path=self.text('validation'))
    return [d.set(seq_len=self.seq_len, batch_size=self.batch_size) for d in (train, validation)]

  def model(self) -> Config:
    model = transformer_lm(vocab_size=256, model_dims=128, num_layers=4, num_heads=4)
    model.lm_tpl.transformer_tpl.unroll = 4  # A loop of four small layers costs more than it saves.
    # Positions beyond seq_len are not trained, so decoding attends to at most seq_len tokens.
    model.decoder_tpl.set(max_decode_steps=220, temperature=0.5, max_context=self.seq_len)
    return model.set(tokens_are_bytes=True, packed=False)

  def task(self) -> Config:
    task = Config(LanguageModelTask, model=self.model())
    task.train.learner = adamw_learner(learning_rate=3e-3, warmup_steps=50)
    task.train.set(num_train_steps=900, log_interval_steps=20, eval_interval_steps=450, save_interval_steps=150)
    task.train.inputs_split_mapping = dict(self.inputs_split_mapping)
    return task


@registry.register
class StdlibLm(_ByteLm):
  """The default: a model of the Python standard library, trained in minutes on two CPU cores."""


@registry.register
class TextLm(_ByteLm):
  """A model as small as StdlibLm on your own text files: --set 'datasets[*].path=my_texts/*.txt'."""

  def datasets(self) -> list[Config]:
    train, validation = super().datasets()
    return [train.set(path=REQUIRED, split='train'), validation.set(path=REQUIRED, split='validation')]


class _ShardedByteLm(_ByteLm):
  """The model for 8 devices, with sizes that need padding: 259 ids, 126 and 341 dims, 3 heads, a batch of 12."""

  seq_len = 128
  batch_size = 12
  mesh_axis_names = ('replica', 'data', 'mdl')
  inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}

  def datasets(self) -> list[Config]:
    # The ids for begin, end and padding follow the ids of bytes.
    tokenizer = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
    return [d.set(tokenizer_tpl=tokenizer) for d in super().datasets()]

  def model(self) -> Config:
    model = super().model().set(vocab_size=259, model_dims=126, hidden_dims=341, num_heads=3, dims_per_head=42)
    return set_sharding(model)


@registry.register
class StdlibLmData(_ShardedByteLm):
  """Data parallel over 8 devices: weights are replicated, the batch is split."""

  ici_mesh_shape = (8, 1, 1)


@registry.register
class StdlibLmFsdp(_ShardedByteLm):
  """Fully sharded over 8 devices: every weight and the batch are split."""

  ici_mesh_shape = (1, 8, 1)


@registry.register
class StdlibLmTensor(_ShardedByteLm):
  """Tensor parallel over 4 devices: heads, hidden dims and vocabulary are split."""

  ici_mesh_shape = (1, 1, 4)


@registry.register
class StdlibLmMixed(_ShardedByteLm):
  """Replicated, fully sharded and tensor parallel at once, on a 2 x 2 x 2 mesh."""

  ici_mesh_shape = (2, 2, 2)


def counting_data(seq_len: int, batch_size: int) -> list[Config]:
  """Returns configs of test data for training and validation: counting sequences of 37 ids."""
  train = Config(SyntheticLMInput, name='train', num_synthetic_examples=64, is_training=True)
  validation = Config(SyntheticLMInput, name='validation', num_synthetic_examples=10, seed=1)
  return [d.set(seq_len=seq_len, vocab_size=37, batch_size=batch_size) for d in (train, validation)]


class Counting(BaseExperiment):
  """A small model of counting sequences, which has learned them when the loss has fallen from 3.6 nats to below 0.1."""

  mesh_axis_names: tuple[str, ...] = ('replica', 'data', 'mdl')

  def datasets(self) -> list[Config]:
    return counting_data(seq_len=32, batch_size=6)

  def model(self) -> Config:
    raise NotImplementedError

  def task(self) -> Config:
    model = set_sharding(self.model())
    model.decoder_tpl.set(max_decode_steps=16, temperature=0.0)
    task = Config(LanguageModelTask, model=model)
    task.train.learner = adamw_learner(learning_rate=1e-2, warmup_steps=10)
    task.train.set(num_train_steps=200, log_interval_steps=50, eval_interval_steps=100, save_interval_steps=100)
    rows = ('replica', 'data')
    task.train.inputs_split_mapping = {'map_1d': (rows,), 'map_2d': (rows, None)}
    task.evaluate.max_batches = 4
    return task


class _Tiny(_ByteLm):
  seq_len = 32
  batch_size = 4

  def model(self) -> Config:
    model = super().model().set(model_dims=16, num_layers=2, num_heads=2, hidden_dims=32)
    model.lm_tpl.transformer_tpl.unroll = 1
    model.decoder_tpl.max_decode_steps = 16
    return model

  def task(self) -> Config:
    task = super().task()
    task.train.learner.schedule.warmup_steps = 5
    task.train.set(num_train_steps=20, log_interval_steps=5, eval_interval_steps=None, save_interval_steps=10)
    task.evaluate.max_batches = 4
    return task


@registry.register
class StdlibLmTiny(_Tiny):
  """For tests and first tries: 13,000 parameters, 20 steps on the source of the standard library."""

  def text(self, split: str) -> Config | str:
    return Config(stdlib_files, split=split, max_bytes=200_000)


@registry.register
class SyntheticLmTiny(_Tiny):
  """For tests: the tiny model on counting sequences, with sizes that most meshes have to pad; reads no files."""

  mesh_axis_names: tuple[str, ...] = ('replica', 'data', 'mdl')
  inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}

  def datasets(self) -> list[Config]:
    return counting_data(self.seq_len, batch_size=6)

  def model(self) -> Config:
    model = super().model().set(vocab_size=37, model_dims=18, hidden_dims=45, num_heads=3, dims_per_head=6)
    return set_sharding(model.set(tokens_are_bytes=False))


@registry.register
class SyntheticLoraTiny(SyntheticLmTiny):
  """For tests: trains only low-rank updates (LoRA) of the tiny model on counting sequences; reads no files.

  With task.train.init_from.path=runs/lm, it starts from the weights of a run of SyntheticLmTiny.
  """

  def task(self) -> Config:
    task = super().task()
    task.train.learner.learning_rate = 1e-2
    return train_adapters(task, Config(Lora, rank=5))
