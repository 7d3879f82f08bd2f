"""The experiments with encoders learn, in a shorter form than in their guide, and are right on meshes."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import praxis_lite
from praxis_lite.experiments.encoders import SameDate, StdlibBert, StdlibBertTiny, same_dates
from praxis_lite.experiments.seq2seq import date_pairs
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.runs import run_train
from praxis_lite.training.experiment import configure

LETTERS = b'abcdefghijkl'


@pytest.mark.slow
def test_it_learns_to_predict_hidden_bytes_and_predicts_them_in_a_loaded_run(tmp_path):
  """A text that counts through 12 letters: any neighbour tells a hidden one, and a guess is right once in 12."""
  (tmp_path / 'text').write_bytes(LETTERS * 99)
  config = configure(StdlibBert)
  config.task.train.set(num_train_steps=200, eval_interval_steps=200, save_interval_steps=200)
  config.task.train.learner.schedule.warmup_steps = 10
  for dataset in config.datasets:
    dataset.set(path=str(tmp_path / 'text'), seq_len=22, batch_size=16)
  metrics = run_train(config, tmp_path / 'run').metrics['eval/validation']
  assert metrics['accuracy'] > 0.9 and metrics['loss'] < 0.6
  ids = np.array([[256, *(LETTERS * 2)[:22], 257]], np.int32)
  hidden = ids.copy()
  hidden[0, [6, 7, 15]] = 259
  logits = praxis_lite.open_run(tmp_path / 'run').load().predict({'ids': hidden})['logits']
  assert (logits[0].argmax(-1) == ids[0])[[6, 7, 15]].sum() >= 2


def test_half_of_the_pairs_of_dates_are_the_same_day():
  for split in ('train', 'validation'):
    pairs, texts = same_dates(split, 2000), date_pairs(split, 2000)
    assert [text for text, _, _ in pairs] == [text for text, _ in texts]
    for (_, day, same), (_, own) in zip(pairs, texts):
      assert same == (day == own)
    counts = collections.Counter(same for _, _, same in pairs)
    assert abs(counts[1] - 1000) < 100
  source = configure(SameDate).datasets[1].instantiate()
  assert source.num_examples == 1024 and source.get_next()['token_type_ids'].any()


def same_letters(seed, count):
  """Pairs of texts of three letters, and whether they begin with the same one of four."""
  letters = np.random.default_rng(seed).integers(0, 4, (count, 2, 3))
  letters[::2, 1, 0] = letters[::2, 0, 0]
  texts = [[''.join('abcd'[i] for i in text) for text in pair] for pair in letters]
  return [(one, other, int(one[0] == other[0])) for one, other in texts]


@pytest.mark.slow
def test_a_classifier_learns_to_compare_two_texts(tmp_path):
  """Five eighths of the pairs begin with the same letter."""
  config = configure(SameDate)
  config.task.train.set(num_train_steps=300, eval_interval_steps=300, save_interval_steps=300)
  config.task.train.learner.schedule.warmup_steps = 10
  for seed, dataset in enumerate(config.datasets):
    dataset.set(examples=same_letters(seed, 960 if seed == 0 else 256), seq_len=9, batch_size=32)
  assert run_train(config, tmp_path).metrics['eval/validation']['accuracy'] > 0.9


@pytest.mark.slow
def test_packed_documents_are_right_on_a_mesh_that_divides_nothing():
  config = configure(StdlibBertTiny)
  config.task.set(ici_mesh_shape=(2, 2, 2))
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)
