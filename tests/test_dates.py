"""The experiment that translates dates learns them: in a shorter form here, so with a lower bound than in its guide."""

from __future__ import annotations

import datetime
import re

import pytest

import praxis_lite
from praxis_lite.experiments.seq2seq import Dates, DatesTiny, date_pairs
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.runs import DraftStatistics, run_decode, run_train
from praxis_lite.training.experiment import configure


def test_dates_are_of_all_forms_and_no_day_is_in_both_parts():
  train, validation = date_pairs(), date_pairs('validation')
  assert (len(train), len(validation)) == (69_397, 3652)
  assert not {target for _, target in train} & {target for _, target in validation}
  assert {len(target) for _, target in train} == {10}
  assert max(len(source) for source, _ in train + validation) <= configure(Dates).datasets[0].source_len
  assert train[:6] == date_pairs(count=6)
  by_hand = ('%d %B %Y', '%B %d, %Y', '%A, %d %B %Y', '%Y %b %d', '%a %b %d %Y', '%d.%m.%Y')
  for number, (source, target) in enumerate(train[:60]):
    expected = datetime.date.fromisoformat(target)
    assert datetime.datetime.strptime(source, by_hand[number % 6]).date() == expected


@pytest.mark.slow
def test_it_learns_dates_that_it_has_not_seen_and_decodes_them(tmp_path):
  """Two of the six forms, in a third of the steps."""
  config = configure(Dates)
  config.task.train.set(num_train_steps=250, eval_interval_steps=None, save_interval_steps=250)
  train, validation = (two_forms(split) for split in ('train', 'validation'))
  for dataset in (*config.datasets, *config.decode_datasets):
    dataset.pairs = train if dataset.name == 'train' else validation[:256]
  run_train(config, tmp_path)
  metrics = run_decode(config, tmp_path)['decode/validation']
  assert metrics['exact_match'] > 0.75
  run = praxis_lite.open_run(tmp_path).load()
  sources, targets = zip(*validation[:256])
  right = [found == target for found, target in zip(run.decode(sources), targets)]
  assert sum(right) == round(metrics['exact_match'] * 256)
  known = right.index(True)
  some = sources[:3]
  for settings in ({'temperature': 0.0}, {'temperature': 1.5, 'seed': 3}):
    expected, pieces = run.decode(some, **settings), []
    assert run.decode(some, stream=lambda *piece, pieces=pieces: pieces.append(piece), **settings) == expected
    assert [''.join(text for row, text in pieces if row == i) for i in range(3)] == expected and len(pieces) > 3
    assert run.decode(some, batch_size=2, **settings) == expected
    assert run.decode(some, lookup=2, **settings) == expected
  stopped = run.decode(some, temperature=0.0, stop=['-1', '-0'])
  assert stopped == [text[:6] for text in run.decode(some, temperature=0.0)]
  counts = DraftStatistics()
  assert run.decode(some, temperature=0.0, draft=run, statistics=counts) == run.decode(some, temperature=0.0)
  assert counts.tokens_per_pass > 2
  assert all(re.fullmatch('[0-9]{3}/[0-9]{2}', text) for text in run.decode(some, regex='[0-9]{3}/[0-9]{2}'))
  batcher = run.batcher(rows=2, max_length=32)
  requests = [batcher.submit(source, max_tokens=12, temperature=0.0) for source in some]
  batcher.run()
  assert [request.text for request in requests] == run.decode(some, temperature=0.0)
  found, other = run.score([sources[known]] * 2, [targets[known], '1900-01-01'])
  assert found.is_greedy and found.log_prob > other.log_prob + 3


def two_forms(split):
  return [pair for number, pair in enumerate(date_pairs(split)) if number % 6 < 2]


@pytest.mark.slow
def test_packed_pairs_are_right_on_a_mesh_that_divides_nothing():
  config = configure(DatesTiny)
  config.task.set(ici_mesh_shape=(2, 2, 2))
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)
