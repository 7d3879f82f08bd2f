"""Policies: a small model learns to sort digits from rewards for its own answers, in minutes on two CPU cores.

praxis-lite train --exp=policies.DigitsImitated --job_log_dir=runs/imitated
praxis-lite train --exp=policies.DigitsRewarded --job_log_dir=runs/rewarded \
  --set task.train.init_from.path=runs/imitated
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.inputs import ChatInput, RewardedInput
from praxis_lite.models import Grpo, set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry, train_policy
from praxis_lite.training.experiment import BaseExperiment

LENGTH = 3


def numbers_to_sort(part: str, count: int | None = None) -> list[dict[str, str]]:
  """Returns examples such as {'prompt': '314:', 'completion': '134'}: all numbers of 3 digits in a fixed order.

  Args:
    part: 'train', or 'validation' for a tenth of the numbers, which are not in the other part.
    count: the number of examples; None returns all.
  """
  numbers = [''.join(digits) for digits in itertools.product('0123456789', repeat=LENGTH)]
  order = np.random.RandomState(0).permutation(len(numbers))
  chosen = order[: len(order) // 10] if part == 'validation' else order[len(order) // 10 :]
  return [{'prompt': f'{numbers[i]}:', 'completion': ''.join(sorted(numbers[i]))} for i in chosen[:count]]


def is_sorted(prompt: str, answer: str, example: dict[str, Any]) -> float:
  """Returns 1 if the answer is the sorted digits of the prompt, otherwise 0."""
  return float(answer == example['completion'])


class _Digits(BaseExperiment):
  """The model of the experiments: it reads 3 digits and a colon, and writes 3 digits and the end."""

  mesh_axis_names = ('replica', 'data', 'mdl')

  def task(self) -> Config:
    model = transformer_lm(vocab_size=256, model_dims=64, num_layers=2, num_heads=4, hidden_dims=128)
    model.lm_tpl.transformer_tpl.unroll = 2
    model.decoder_tpl.set(max_decode_steps=LENGTH + 1, temperature=0.0, stop_ids=(0,))
    task = Config(LanguageModelTask, model=set_sharding(model.set(packed=False)))
    rows = ('replica', 'data')
    task.train.inputs_split_mapping = {'map_1d': (rows,), 'map_2d': (rows, None)}
    return task


@registry.register
class DigitsImitated(_Digits):
  """Imitates sorted numbers for a short time: it learns the form of an answer, and sorts some numbers."""

  def datasets(self) -> list[Config]:
    train = Config(ChatInput, name='train', is_training=True, examples=Config(numbers_to_sort, part='train'))
    validation = Config(ChatInput, name='validation', examples=Config(numbers_to_sort, part='validation'))
    return [data.set(seq_len=8, batch_size=128) for data in (train, validation)]

  def task(self) -> Config:
    task = super().task()
    task.train.learner = adamw_learner(learning_rate=3e-3, warmup_steps=20, weight_decay=0.0)
    task.train.set(num_train_steps=40, log_interval_steps=10, eval_interval_steps=40, save_interval_steps=40)
    return task


@registry.register
class DigitsRewarded(_Digits):
  """Continues from a run of `DigitsImitated` (`task.train.init_from.path`), only with rewards for right answers."""

  def datasets(self) -> list[Config]:
    common = {'seq_len': 8, 'answer_length': LENGTH + 1, 'rewards': {'exact': is_sorted}}
    train = Config(
      RewardedInput,
      name='train',
      is_training=True,
      examples=Config(numbers_to_sort, part='train'),
      batch_size=256,
      num_answers=8,
      **common,
    )
    validation = Config(
      RewardedInput,
      name='validation',
      examples=Config(numbers_to_sort, part='validation'),
      batch_size=100,
      num_answers=1,
      **common,
    )
    return [train, validation]

  def task(self) -> Config:
    task = train_policy(super().task(), Config(Grpo, mean='tokens'))
    task.train.learner = adamw_learner(learning_rate=1e-3, warmup_steps=10, weight_decay=0.0)
    task.train.set(num_train_steps=200, log_interval_steps=20, eval_interval_steps=100, save_interval_steps=100)
    return task
