"""Encoder-decoders: one that learns to read dates in minutes on two CPU cores, and T5 v1.1 in published sizes.

  praxis-lite train --exp=seq2seq.Dates --job_log_dir=runs/dates
  praxis-lite decode --exp=seq2seq.Dates --job_log_dir=runs/dates --prompt='Tuesday, 3 March 1998'
  praxis-lite train --exp=seq2seq.T5Base --job_log_dir=runs/t5 --set 'datasets[*].path=my_texts/*.txt' \\
    --set 'datasets[*].tokenizer_tpl.model_path=my_tokenizer.model'
"""

from __future__ import annotations

import datetime

import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.inputs import SentencePieceTokenizer, SourceTargetInput, SpanCorruptionInput
from praxis_lite.inputs.random_access import permutation
from praxis_lite.models import encoder_decoder, set_sharding
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment

_MONTHS = (
  *('January', 'February', 'March', 'April', 'May', 'June'),
  *('July', 'August', 'September', 'October', 'November', 'December'),
)
_DAYS = ('Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday')
_FORMS = (
  '{d.day} {month} {d.year}',
  '{month} {d.day}, {d.year}',
  '{day}, {d.day} {month} {d.year}',
  '{d.year} {month:.3} {d.day}',
  '{day:.3} {month:.3} {d.day} {d.year}',
  '{d.day:02}.{d.month:02}.{d.year}',
)


def date_pairs(split: str = 'train', count: int | None = None) -> list[tuple[str, str]]:
  """Returns pairs such as ('Tuesday, 3 March 1998', '1998-03-03'), for days in the years 1900 to 2099.

  Args:
    split: 'train', or 'validation', which has a twentieth of the days.
    count: the number of pairs; None returns one for each day.
  """
  first = datetime.date(1900, 1, 1).toordinal()
  days = permutation(datetime.date(2100, 1, 1).toordinal() - first, 0)
  held_out = len(days) // 20
  days = days[held_out:] if split == 'train' else days[:held_out]
  dates = [datetime.date.fromordinal(first + int(day)) for day in days[:count]]

  def describe(number: int, d: datetime.date) -> str:
    return _FORMS[number % len(_FORMS)].format(d=d, month=_MONTHS[d.month - 1], day=_DAYS[d.weekday()])

  return [(describe(number, d), d.isoformat()) for number, d in enumerate(dates)]


@registry.register
class Dates(BaseExperiment):
  """Translates dates such as "Tuesday, 3 March 1998" to 1998-03-03, character by character, in minutes on two cores."""

  batch_size = 64

  def datasets(self) -> list[Config]:
    train = Config(SourceTargetInput, name='train', is_training=True, pairs=Config(date_pairs))
    validation = Config(SourceTargetInput, name='validation', pairs=Config(date_pairs, split='validation', count=512))
    return [d.set(source_len=29, target_len=11, batch_size=self.batch_size) for d in (train, validation)]

  def decode_datasets(self) -> list[Config]:
    return [self.datasets()[1]]

  def model(self) -> Config:
    model = encoder_decoder(vocab_size=256, model_dims=64, num_layers=2, num_heads=4, hidden_dims=128)
    model.decoder_tpl.set(max_decode_steps=12, temperature=0.0, stop_ids=(0,))
    return model.set(packed=False)

  def task(self) -> Config:
    task = Config(SequenceToSequenceTask, model=self.model())
    task.train.learner = adamw_learner(learning_rate=6e-3, warmup_steps=50)
    task.train.set(num_train_steps=800, log_interval_steps=50, eval_interval_steps=400, save_interval_steps=400)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_2d': None}
    return task


@registry.register
class DatesTiny(Dates):
  """For tests: 20 steps on packed pairs, with sizes that most meshes have to pad."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  batch_size = 6

  def datasets(self) -> list[Config]:
    return [d.set(source_len=61, target_len=25, packed=True) for d in super().datasets()]

  def model(self) -> Config:
    model = encoder_decoder(
      vocab_size=256, model_dims=18, num_layers=2, num_encoder_layers=3, num_heads=3, hidden_dims=45
    )
    model.decoder_tpl.set(max_decode_steps=12, temperature=0.0, stop_ids=(0,))
    return set_sharding(model)

  def task(self) -> Config:
    task = super().task()
    task.train.learner.schedule.warmup_steps = 5
    task.train.set(num_train_steps=20, log_interval_steps=5, eval_interval_steps=None, save_interval_steps=10)
    task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
    task.evaluate.max_batches = 4
    return task


class _T5(BaseExperiment):
  """Trains T5 v1.1 by span corruption in bfloat16: sources of 512 tokens, targets of 114."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 256

  def model(self) -> Config:
    raise NotImplementedError

  def datasets(self) -> list[Config]:
    train = Config(SpanCorruptionInput, name='train', is_training=True, split='train')
    validation = Config(SpanCorruptionInput, name='validation', split='validation')
    # T5's tokenizer has 32,000 tokens; its sentinels count down from 32,099.
    fields = {'seq_len': 568, 'first_sentinel': 32_099, 'batch_size': self.batch_size}
    return [d.set(path=REQUIRED, tokenizer_tpl=Config(SentencePieceTokenizer), **fields) for d in (train, validation)]

  def task(self) -> Config:
    model = set_sharding(self.model()).set(packed=False, fprop_dtype=jnp.bfloat16)
    model.set(source_end_id=1).decoder_tpl.stop_ids = (1,)
    task = Config(SequenceToSequenceTask, model=model)
    task.train.learner = adamw_learner(learning_rate=1e-3, warmup_steps=10_000, weight_decay=0.0)
    task.train.set(num_train_steps=1_000_000, eval_interval_steps=5000, save_interval_steps=5000)
    rows = ('replica', 'data')
    task.train.inputs_split_mapping = {'map_1d': (rows,), 'map_2d': (rows, None)}
    task.evaluate.max_batches = 100
    return task


@registry.register
class T5Base(_T5):
  """T5 v1.1 base, 248M parameters (Shazeer, 2020), fully sharded over 8 devices."""

  def model(self) -> Config:
    return encoder_decoder(
      vocab_size=32_128, model_dims=768, num_layers=12, num_heads=12, dims_per_head=64, hidden_dims=2048
    )


@registry.register
class T5Large(_T5):
  """T5 v1.1 large, 783M parameters, fully sharded over 8 devices."""

  def model(self) -> Config:
    return encoder_decoder(
      vocab_size=32_128,
      model_dims=1024,
      num_layers=24,
      num_heads=16,
      dims_per_head=64,
      hidden_dims=2816,
      remat='full',
    )


@registry.register
class T5Xl(_T5):
  """T5 v1.1 XL, also the sizes of Flan-T5 XL: 2.8B parameters, fully sharded over 8 devices."""

  def model(self) -> Config:
    return encoder_decoder(
      vocab_size=32_128,
      model_dims=2048,
      num_layers=24,
      num_heads=32,
      dims_per_head=64,
      hidden_dims=5120,
      remat='full',
    )
