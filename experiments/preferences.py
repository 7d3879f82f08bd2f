"""Preferences: a small model learns which of two answers is preferred, in less than a minute on two CPU cores.

praxis-lite train --exp=preferences.SortedTiny --job_log_dir=runs/sorted
"""

from __future__ import annotations

import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.inputs import PreferenceInput
from praxis_lite.models import Orpo, set_sharding, transformer_lm
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training import registry, train_preferences
from praxis_lite.training.experiment import BaseExperiment


def sorting_pairs(count: int, seed: int = 0, length: int = 5) -> list[dict[str, str]]:
  """Returns prompts such as 'mkbca:', with 'abckm' preferred to the same text with two neighbouring letters exchanged.

  Args:
    count: the number of pairs.
    seed: the seed of the letters.
    length: the number of letters in a prompt.
  """
  rng = np.random.RandomState(seed)
  pairs = []
  for _ in range(count):
    letters = rng.permutation(26)[:length]
    right = np.sort(letters)
    at, wrong = rng.randint(length - 1), right.copy()
    wrong[[at, at + 1]] = right[[at + 1, at]]
    prompt, chosen, rejected = (''.join(chr(ord('a') + i) for i in x) for x in (letters, right, wrong))
    pairs.append({'prompt': f'{prompt}:', 'chosen': chosen, 'rejected': rejected})
  return pairs


@registry.register
class SortedTiny(BaseExperiment):
  """Learns to prefer sorted letters to almost sorted ones; the accuracy on new prompts rises above chance."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  batch_size = 64

  def datasets(self) -> list[Config]:
    train = Config(PreferenceInput, name='train', is_training=True, examples=Config(sorting_pairs, count=4096))
    validation = Config(PreferenceInput, name='validation', examples=Config(sorting_pairs, count=256, seed=1))
    return [d.set(seq_len=12, batch_size=self.batch_size) for d in (train, validation)]

  def model(self) -> Config:
    model = transformer_lm(vocab_size=256, model_dims=48, num_layers=2, num_heads=3, hidden_dims=96)
    model.lm_tpl.transformer_tpl.unroll = 2
    model.decoder_tpl.set(max_decode_steps=6, temperature=0.0, stop_ids=(0,))
    return set_sharding(model.set(packed=False))

  def task(self) -> Config:
    task = Config(LanguageModelTask, model=self.model())
    train_preferences(task, Config(Orpo, weight=1.0))
    task.train.learner = adamw_learner(learning_rate=5e-3, warmup_steps=20, weight_decay=0.0)
    task.train.set(num_train_steps=200, log_interval_steps=20, eval_interval_steps=100, save_interval_steps=100)
    rows = ('replica', 'data')
    task.train.inputs_split_mapping = {'map_1d': (rows,), 'map_2d': (rows, None)}
    return task
