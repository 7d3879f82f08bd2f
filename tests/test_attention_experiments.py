"""The tiny experiments with further kinds of attention learn what needs attention, and are right on meshes."""

from __future__ import annotations

import pytest

from praxis_lite.experiments import attention_kinds
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.runs import run_train
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.training.experiment import configure

NAMES = [name for name in dir(attention_kinds) if name.endswith('Tiny')]


def sums(first, second, count):
  """The ids of a row: each digit, an id minus 1, is the sum of the two before it, modulo 10."""
  digits = [first, second]
  while len(digits) < count:
    digits.append((digits[-1] + digits[-2]) % 10)
  return [digit + 1 for digit in digits]


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_it_learns_to_add_and_adds_on(name, tmp_path):
  """A guess, and a model whose tokens attend only to themselves, has log 10 = 2.3 nats and an accuracy of 0.1."""
  config = configure(getattr(attention_kinds, name))
  config.task.train.set(num_train_steps=150, save_interval_steps=150, eval_interval_steps=150)
  metrics = run_train(config, tmp_path).metrics['eval/validation']
  assert metrics['loss'] < 0.5 and metrics['accuracy'] > 0.85
  rows = [sums(*first, 13) for first in ((1, 1), (4, 7), (9, 2))]
  config.task.model.decoder_tpl.max_decode_steps = 4
  decoded = decode_prompts(config, tmp_path, [row[:9] for row in rows])
  right = [a == b for row, found in zip(rows, decoded) for a, b in zip(row[9:], found)]
  assert sum(right) >= 9, decoded


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_it_is_right_on_a_mesh_that_divides_nothing(name):
  config = configure(getattr(attention_kinds, name))
  config.task.set(ici_mesh_shape=(2, 2, 2))
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)
