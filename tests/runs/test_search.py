"""Searches: trials are recorded, interrupted ones come first, hopeless ones end, and fields have shares."""

import json
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from tiny_runs import tiny_run

from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.runs.loop.job import check_configs
from praxis_lite.runs.search import Search, SearchRange, Trial, parse_ranges
from praxis_lite.runs.search_picture import draw_search

pytest.importorskip('optuna')

RATE, WIDTH = 'task.train.learner.learning_rate', 'task.model.hidden'
RANGES = parse_ranges([f'{RATE}=log(1e-4, 1e-1)', f'{WIDTH}=int(2,9)'])


def write(folder, point, values):
  """Metrics of a run, as training writes them."""
  (folder / point.name).mkdir(exist_ok=True)
  lines = [
    json.dumps({'step': step, 'split': 'eval/valid', 'time': 0.0, 'metrics': {'loss': value}})
    for step, value in enumerate(values, 1)
  ]
  (folder / point.name / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')


def loss(trial):
  """Only the learning rate matters, and 0.003 is best."""
  return float(np.log(trial.values[RATE] / 0.003) ** 2)


def run(folder, count, seed=0):
  search = Search(folder, RANGES, ['task.a=1'], seed=seed)
  for point in search.points(count):
    number = int(point.name[:3])
    write(folder, point, [loss(search.trials[number])])
    search.end(point, 0)
  return search


def test_a_search_comes_near_the_best_value_and_tells_what_matters(tmp_path):
  search = run(tmp_path, 20)
  best = search.best()
  assert len(search.trials) == 20 and 0.0015 < best.values[RATE] < 0.006
  shares = search.importances()
  assert next(iter(shares)) == RATE and shares[RATE] > 0.8 and sum(shares.values()) == pytest.approx(1)
  assert search.point(0).overrides[:2] == ('task.a=1', f'{RATE}={search.trials[0].values[RATE]}')
  assert search.point(3).name.startswith('003,learning_rate=')


@pytest.mark.parametrize('sign', [1, -1])
def test_the_picture_has_a_panel_for_each_field_and_a_point_for_each_trial(sign):
  ranges = [*RANGES, SearchRange.parse('task.model.kind=a,"b<c"')]
  trials = [Trial({RATE: 1e-4, WIDTH: 2, 'task.model.kind': 'a'}, 'complete', 5.0)]
  trials += [Trial({RATE: 1e-1, WIDTH: 9, 'task.model.kind': '"b<c"'}, state, x) for state, x in _STATES]
  drawn = draw_search(trials, ranges, {WIDTH: 0.5, RATE: 0.3, 'task.model.kind': 0.2}, sign)
  root = ElementTree.fromstring(drawn)
  circles = root.findall('.//{http://www.w3.org/2000/svg}circle')
  assert len(circles) == 3 * 3
  places = [(float(c.get('cx')), float(c.get('cy'))) for c in circles]
  assert [x for x, _ in places[:3]] == [70.0, 620.0, 620.0] == [x for x, _ in places[3:6]]
  # 5.0 is worse than 4.0: above it if less is better, else the picture is of -5.0, below -4.0.
  assert (places[0][1] < places[1][1]) == (sign == 1)
  texts = [t.text for t in root.iter('{http://www.w3.org/2000/svg}text')]
  assert texts[0] == f'{WIDTH}: 50%' and '"b<c"' in texts
  assert draw_search([], ranges, {}, 1).startswith('<svg')


_STATES = [('complete', 4.0), ('pruned', 6.0), ('failed', None)]


def test_a_search_that_was_killed_goes_on_with_its_unfinished_trials(tmp_path):
  first = Search(tmp_path, RANGES)
  points = first.points(5)
  done, killed = next(points), next(points)
  write(tmp_path, done, [1.0])
  first.end(done, 0)
  again = Search(tmp_path, RANGES)
  assert [trial.state for trial in again.trials] == ['complete', 'running']
  rest = list(again.points(5))
  assert [point.name[:3] for point in rest] == ['001', '002', '003', '004'] and rest[0] == killed
  assert list(Search(tmp_path, RANGES).points(1)) == rest  # Nothing new, but all that is unfinished.
  with pytest.raises(UserError, match='has a search of other ranges'):
    Search(tmp_path, RANGES[:1])
  (tmp_path / 'search.json').write_text('{')
  with pytest.raises(UserError, match='cannot be read'):
    Search(tmp_path, RANGES)


def test_a_trial_that_is_worse_than_the_median_is_hopeless(tmp_path):
  search = Search(tmp_path, RANGES)
  points = search.points(7)
  for value in (1.0, 1.1, 1.2, 1.3):
    point = next(points)
    write(tmp_path, point, [value + 1, value])
    assert not search.is_hopeless(point)
    search.end(point, 0)
  bad, good = next(points), next(points)
  assert not search.is_hopeless(bad)  # It has written nothing.
  write(tmp_path, bad, [9.0])
  write(tmp_path, good, [1.5])
  assert search.is_hopeless(bad) and search.was_pruned(bad) and not search.is_hopeless(good)
  assert search.end(bad, 143).state == 'pruned'
  assert search.end(good, 1).state == 'failed'
  assert search.best().reached == 1.0
  assert [trial.state for trial in Search(tmp_path, RANGES).trials][4:] == ['pruned', 'failed']


def test_higher_may_be_better(tmp_path):
  search = Search(tmp_path, RANGES, metric='eval/valid/loss', mode='max')
  for point, value in zip(search.points(2), (1.0, 2.0)):
    write(tmp_path, point, [value])
    search.end(point, 0)
  assert search.best() is search.trials[1]


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'overrides': ['task.a=2']}, r"--set \['task\.a=1'\], not \['task\.a=2'\]"),
    ({'metric': 'accuracy'}, '--metric=None, not accuracy'),
    ({'mode': 'max'}, '--mode=None, not max'),
    ({'config': 'other'}, 'another config'),
  ],
)
def test_trials_of_another_search_are_not_taken(tmp_path, fields, message):
  same = {'overrides': ['task.a=1'], 'config': 'text'}
  search = Search(tmp_path, RANGES, **same)
  point = next(search.points(1))
  if fields.keys() & {'metric', 'mode'}:
    assert Search(tmp_path, RANGES, **same | fields).trials  # Nothing is compared yet.
  write(tmp_path, point, [1.0])
  search.end(point, 0)
  assert len(Search(tmp_path, RANGES, **same).trials) == 1
  with pytest.raises(UserError, match=f'has a search with {message}, so its trials cannot be compared'):
    Search(tmp_path, RANGES, **same | fields)


@pytest.mark.parametrize('metric', ['train/speed/steps_per_second', 'decode/prompts/num_decoded'])
def test_a_metric_of_training_or_decoding_is_not_refused(metric):
  check_configs({'a': tiny_run(decode_interval_steps=5)}, 1, metric)


def test_a_metric_that_no_run_has_ends_the_search_after_a_trial(tmp_path):
  search = Search(tmp_path, RANGES, metric='accurcy')
  points = search.points(5)
  first, second, third = next(points), next(points), next(points)
  write(tmp_path, first, [1.0])
  write(tmp_path, second, [1.0])
  assert search.end(second, 1).state == 'failed' and not search.is_hopeless(third)
  with pytest.raises(UserError, match=r'--metric=accurcy: no run has it\..* They have eval/valid/loss'):
    search.end(first, 0)
  assert list(points) == [] and search.is_hopeless(third) and not search.was_pruned(third)
  again = Search(tmp_path, RANGES, metric='loss')
  assert next(again.points(3)).name == first.name
  assert again.end(first, 0).reached == 1.0


@pytest.mark.parametrize(
  'text, message',
  [
    ('a.b=log(1,2,3)', 'expected path=log'),
    ('a.b=3', 'expected path=log'),
    ('a.b=logg(1,2)', r"there is no logg\(...\). Did you mean 'log'"),
    ('a.b=log(0,1)', 'log needs numbers above 0; write uniform'),
    ('a.b=uniform(2,1)', 'the lower one first'),
    ('a.b=int(1,2.5)', 'expected integers'),
    ('a.b=uniform(x,1)', 'are not two numbers'),
  ],
)
def test_mistakes_in_ranges_are_told(text, message):
  with pytest.raises(ConfigError, match=message):
    SearchRange.parse(text)


def test_ranges_are_read():
  assert SearchRange.parse('a.b=log_int(1,64)') == SearchRange('a.b', 'log_int', 1, 64)
  assert SearchRange.parse('a=x,(1,2)') == SearchRange('a', 'choice', choices=('x', '(1,2)'))
  assert SearchRange('a', 'uniform', 0.0, 0.12346).round(0.123456) == 0.123456  # Short numbers stay inside.
  for text, checked in {'a=int(2,4)': (2, 3, 4), 'a=int(2,99)': (2, 99), 'a=log_int(1,4)': (1, 2, 3, 4)}.items():
    assert SearchRange.parse(text).ends() == checked
  assert SearchRange.parse('a=uniform(0,1)').ends() == (0.0, 1.0)
  with pytest.raises(ConfigError, match='a is given twice'):
    parse_ranges(['a=1,2', 'a=3,4'])


def test_without_optuna_the_message_names_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'optuna', None)
  with pytest.raises(UserError, match=r'pip install praxis_lite\[search\]'):
    Search(tmp_path, RANGES)
