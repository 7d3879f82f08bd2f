"""Encoders: a small BERT that learns Python in minutes on two CPU cores, a classifier of pairs, and published sizes.

  praxis-lite train --exp=encoders.StdlibBert --job_log_dir=runs/bert
  praxis-lite train --exp=encoders.SameDate --job_log_dir=runs/same
  praxis-lite train --exp=encoders.BertBase --job_log_dir=runs/base --set 'datasets[*].path=my_texts/*.txt' \\
    --set 'datasets[*].tokenizer_tpl.path=FOLDER_OF_A_TOKENIZER'
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.experiments.seq2seq import date_pairs
from praxis_lite.inputs import ByteTokenizer, HfTokenizer, LabelledTextInput, MaskedTextInput, stdlib_files
from praxis_lite.inputs.random_access import random_bits
from praxis_lite.models import masked_language_model, sequence_classifier, set_sharding
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.tasks.masked_language_modelling import MaskedLanguageModelTask
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.training.task import SingleTask

_ROWS = ('replica', 'data')
# Ids 0 to 255 are bytes; the ids of begin, end, padding and the mask follow.
_BYTES = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)


def _draw_by_fan_in(model: Config) -> Config:
  """Scales initial weights by their fan-in, so that small models begin to learn immediately; returns the config."""
  model.params_init = model.encoder_tpl.params_init = WeightInit.GaussianFanIn()
  return model


@registry.register
class StdlibBert(BaseExperiment):
  """Predicts hidden bytes of the Python standard library, in minutes on two CPU cores."""

  seq_len = 62
  batch_size = 64
  max_bytes: int | None = None

  def datasets(self) -> list[Config]:
    paths = {split: Config(stdlib_files, split=split, max_bytes=self.max_bytes) for split in ('train', 'validation')}
    train = Config(MaskedTextInput, name='train', path=paths['train'], is_training=True, packing='windows')
    validation = Config(MaskedTextInput, name='validation', path=paths['validation'])
    sizes = {'seq_len': self.seq_len, 'batch_size': self.batch_size}
    return [d.set(tokenizer_tpl=_BYTES.clone(), **sizes) for d in (train, validation)]

  def model(self) -> Config:
    model = masked_language_model(
      vocab_size=260, model_dims=64, num_layers=2, num_heads=4, hidden_dims=128, max_len=64, num_token_types=0
    )
    return _draw_by_fan_in(model).set(packed=False)

  def task(self) -> Config:
    task = Config(MaskedLanguageModelTask, model=self.model())
    task.train.learner = adamw_learner(learning_rate=5e-3, warmup_steps=50)
    task.train.set(num_train_steps=1000, log_interval_steps=50, eval_interval_steps=500, save_interval_steps=500)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_2d': None}
    task.evaluate.max_batches = 64
    return task


@registry.register
class StdlibBertTiny(StdlibBert):
  """For tests: 20 steps on packed documents, with whole words hidden, and sizes that most meshes have to pad."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  seq_len = 33
  batch_size = 6
  max_bytes = 200_000

  def datasets(self) -> list[Config]:
    packed = {'packing': 'packed', 'document_separator': '\n\n', 'whole_words': True}
    return [d.set(**packed) for d in super().datasets()]

  def model(self) -> Config:
    model = masked_language_model(
      vocab_size=261, model_dims=18, num_layers=2, num_heads=3, hidden_dims=45, max_len=35, num_token_types=2
    )
    return set_sharding(_draw_by_fan_in(model))

  def task(self) -> Config:
    task = super().task()
    task.train.learner.schedule.warmup_steps = 5
    task.train.set(num_train_steps=20, log_interval_steps=5, eval_interval_steps=None, save_interval_steps=10)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None)}
    task.evaluate.max_batches = 4
    return task


def same_dates(split: str = 'train', count: int | None = None) -> list[tuple[str, str, int]]:
  """Returns pairs of dates and whether they are the same day, such as ('3 March 1998', '2041-10-08', 0).

  In about half of the pairs, both dates are the same day. In the others, the second date comes from another pair.

  Args:
    split, count: see `date_pairs`.
  """
  pairs = date_pairs(split, count)
  bits = random_bits((1,), np.arange(len(pairs)))
  is_same = (bits >> np.uint64(63)).astype(int)
  others = (bits % np.uint64(len(pairs))).astype(int)
  return [
    (text, day if same else pairs[other][1], int(same or other == number))
    for number, ((text, day), same, other) in enumerate(zip(pairs, is_same, others))
  ]


@registry.register
class SameDate(BaseExperiment):
  """Decides whether two dates, such as "Tuesday, 3 March 1998" and 2041-10-08, are the same day: pairs of texts."""

  batch_size = 64

  def datasets(self) -> list[Config]:
    train = Config(LabelledTextInput, name='train', is_training=True, examples=Config(same_dates))
    validation = Config(
      LabelledTextInput, name='validation', examples=Config(same_dates, split='validation', count=1024)
    )
    fields = {'fields': ('text', 'day', 'same'), 'seq_len': 42, 'batch_size': self.batch_size}
    return [d.set(tokenizer_tpl=_BYTES.clone(), **fields) for d in (train, validation)]

  def model(self) -> Config:
    model = sequence_classifier(
      num_classes=2, vocab_size=259, model_dims=64, num_layers=2, num_heads=4, hidden_dims=128, max_len=42
    )
    return _draw_by_fan_in(model)

  def task(self) -> Config:
    task = Config(SingleTask, name='classifier', model=self.model())
    task.train.learner = adamw_learner(learning_rate=3e-3, warmup_steps=100)
    task.train.set(num_train_steps=1200, log_interval_steps=50, eval_interval_steps=600, save_interval_steps=600)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_2d': None}
    return task


class _Bert(BaseExperiment):
  """Trains BERT in bfloat16 on your own text, rows of 512 tokens."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 256

  def model(self) -> Config:
    raise NotImplementedError

  def datasets(self) -> list[Config]:
    train = Config(MaskedTextInput, name='train', is_training=True, split='train')
    validation = Config(MaskedTextInput, name='validation', split='validation')
    fields = {'seq_len': 510, 'whole_words': True, 'batch_size': self.batch_size}
    return [d.set(path=REQUIRED, tokenizer_tpl=Config(HfTokenizer), **fields) for d in (train, validation)]

  def task(self) -> Config:
    model = set_sharding(self.model()).set(packed=False, max_places=77, fprop_dtype=jnp.bfloat16)
    task = Config(MaskedLanguageModelTask, model=model)
    task.train.learner = adamw_learner(learning_rate=1e-4, warmup_steps=10_000, weight_decay=0.01)
    task.train.set(num_train_steps=1_000_000, eval_interval_steps=5000, save_interval_steps=5000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None)}
    task.evaluate.max_batches = 100
    return task


@registry.register
class BertBase(_Bert):
  """BERT base, 110M parameters (Devlin et al., 2019), fully sharded over 8 devices."""

  def model(self) -> Config:
    return masked_language_model(vocab_size=30_522, model_dims=768, num_layers=12, num_heads=12, dropout=0.1)


@registry.register
class BertLarge(_Bert):
  """BERT large, 335M parameters, fully sharded over 8 devices."""

  def model(self) -> Config:
    return masked_language_model(
      vocab_size=30_522, model_dims=1024, num_layers=24, num_heads=16, dropout=0.1, remat='full'
    )
