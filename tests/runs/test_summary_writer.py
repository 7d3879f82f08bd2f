"""metrics.jsonl and TensorBoard event files."""

from __future__ import annotations

import json
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.errors import UserError
from praxis_lite.common.statistics import compute_parts
from praxis_lite.layers.base.call import Summary
from praxis_lite.runs.records.curves import read_metrics
from praxis_lite.runs.records.metrics import SummaryWriter, expand_scalars


def read_jsonl(directory):
  return [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]


def read_events(directory, split):
  """(tag, step) -> value of the newest event, and the events in order, read without the library that wrote them."""
  tf = pytest.importorskip('tensorflow')
  events = []
  for path in sorted((directory / 'summaries' / split).glob('events.*')):
    events += list(tf.compat.v1.train.summary_iterator(str(path)))
  return events


def test_each_line_is_a_step_of_a_split(tmp_path):
  writer = SummaryWriter(tmp_path)
  writer.write(10, 'train', {'loss': np.float64(2.5), 'lr': 0.1})
  writer.write(10, 'eval/valid', {'loss': 3.0})
  writer.close()
  first, second = read_jsonl(tmp_path)
  assert (first['step'], first['split'], first['metrics']) == (10, 'train', {'loss': 2.5, 'lr': 0.1})
  assert (second['split'], second['metrics']) == ('eval/valid', {'loss': 3.0})
  assert first['time'] <= second['time']


def test_damaged_lines_are_left_out_and_mentioned_once(tmp_path, capsys):
  good = json.dumps({'step': 1, 'split': 'train', 'metrics': {'loss': 1.0}})
  path = tmp_path / 'metrics.jsonl'
  path.write_text(f'{good}\n\n{good[:20]}')  # Empty lines, and a last one that is still being written, are no damage.
  assert list(read_metrics(tmp_path).steps) == [1]
  assert capsys.readouterr() == ('', '')
  path.write_text(f'garbage\n{good}\n{{"step": "1"}}\n{good}\n')
  for _ in range(2):
    assert list(read_metrics(tmp_path).steps) == [1]
  assert capsys.readouterr() == ('', f'{path}: line 1 and 1 more are damaged, and left out\n')


def test_event_files_hold_the_same_numbers(tmp_path):
  writer = SummaryWriter(tmp_path)
  writer.write(10, 'train', {'loss': 2.5})
  writer.write(20, 'train', {'loss': 1.5})
  writer.close()
  scalars = [(v.tag, e.step, v.simple_value) for e in read_events(tmp_path, 'train') for v in e.summary.value]
  assert scalars == [('loss', 10, 2.5), ('loss', 20, 1.5)]


def test_a_clock_that_is_set_back_by_months_stops_nothing(tmp_path, monkeypatch):
  threads = threading.active_count()
  writer, now = SummaryWriter(tmp_path), time.time
  writer.write(1, 'train', {'loss': 2.5})
  monkeypatch.setattr(time, 'time', lambda: now() - 200 * 86400)
  for step in range(2, 30):
    writer.write(step, 'train', {'loss': 2.5})
  assert threading.active_count() == threads
  # What was reported is there, whatever becomes of this process.
  assert [e.step for e in read_events(tmp_path, 'train') for _ in e.summary.value] == [*range(1, 30)]
  writer.close()


def test_arrays_over_layers_become_one_scalar_each():
  assert expand_scalars({'norm': jnp.array([1.0, 2.0])}) == {'norm/0': 1.0, 'norm/1': 2.0}
  assert expand_scalars({'norm': np.arange(4.0).reshape(2, 2)}) == {
    'norm/0/0': 0.0,
    'norm/0/1': 1.0,
    'norm/1/0': 2.0,
    'norm/1/1': 3.0,
  }
  assert expand_scalars({'loss': 2}) == {'loss': 2.0}


def test_what_json_has_no_word_for_is_null(tmp_path):
  writer = SummaryWriter(tmp_path)
  writer.write(1, 'train', {'loss': float('nan'), 'norm': float('inf'), 'lr': 1.0})
  writer.close()
  assert read_jsonl(tmp_path)[0]['metrics'] == {'loss': None, 'norm': None, 'lr': 1.0}


def test_summaries_of_all_kinds(tmp_path):
  writer = SummaryWriter(tmp_path)
  text = jnp.array(list('naïve'.encode()), jnp.uint8)
  summaries = {
    'norm': Summary(jnp.array([1.0, 2.0])),
    'weights': Summary(jnp.linspace(0, 1, 10).reshape(2, 5), 'histogram'),
    'tapped': Summary(compute_parts(jnp.array([0.0, 1.25, -3.0, 3.5]), None, ['hist'])['bins'], 'bins'),
    'picture': Summary(jnp.zeros((2, 4, 4, 3)), 'image'),
    'sample': Summary(text, 'text'),
  }
  writer.write(1, 'train', {}, summaries)
  writer.close()
  assert read_jsonl(tmp_path)[0]['metrics'] == {'norm/0': 1.0, 'norm/1': 2.0}
  values = {v.tag: v for e in read_events(tmp_path, 'train') for v in e.summary.value}
  assert values['weights'].histo.num == 10 and values['weights'].histo.max == 1.0
  tapped = values['tapped'].histo
  assert (tapped.num, tapped.min, tapped.max, sum(tapped.bucket)) == (4, -4, 4, 4)
  assert [limit for limit, count in zip(tapped.bucket_limit, tapped.bucket) if count] == pytest.approx([-3, 0, 1.5, 4])
  assert values['picture/0'].image.height == 4 if 'picture/0' in values else values['picture'].image.height == 4
  assert next(v for tag, v in values.items() if tag.startswith('sample')).tensor.string_val == ['naïve'.encode()]


def test_a_resumed_run_drops_the_lines_of_later_steps_and_a_half_written_one(tmp_path):
  writer = SummaryWriter(tmp_path)
  for step in (10, 20, 30):
    writer.write(step, 'train', {'loss': float(step)})
  writer.write(20, 'eval/valid', {'loss': 0.5})
  writer.close()
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 15, "spl')
  resumed = SummaryWriter(tmp_path, resumed_step=20)
  resumed.write(30, 'train', {'loss': -1.0})
  resumed.close()
  lines = [(r['step'], r['split'], r['metrics']['loss']) for r in read_jsonl(tmp_path)]
  assert lines == [(10, 'train', 10), (20, 'train', 20), (20, 'eval/valid', 0.5), (30, 'train', -1)]
  assert resumed.was_written('eval/valid') and not resumed.was_written('eval/test')


def test_a_line_cut_off_before_its_newline_does_not_swallow_the_next(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "split": "train", "time": 0, "metrics": {}}')
  writer = SummaryWriter(tmp_path, resumed_step=1)
  writer.write(2, 'train', {'loss': 1.0})
  writer.close()
  assert [r['step'] for r in read_jsonl(tmp_path)] == [1, 2]


def test_event_files_of_a_resumed_run_purge_what_came_after(tmp_path):
  for resumed_step, steps in ((0, (10, 20, 30)), (20, (30,))):
    writer = SummaryWriter(tmp_path, resumed_step=resumed_step)
    for step in steps:
      writer.write(step, 'train', {'loss': float(step)})
    writer.close()
  accumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
  events = accumulator.EventAccumulator(str(tmp_path / 'summaries' / 'train')).Reload().Scalars('loss')
  assert [e.step for e in events] == [10, 20, 30]


def test_an_evaluation_that_the_lines_have_lost_is_in_the_events_once(tmp_path):
  curves = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator').EventAccumulator
  for resumed_step, losses in ((0, {10: 3.0, 20: 2.0}), (20, {20: 2.0, 30: 1.0})):
    writer = SummaryWriter(tmp_path, resumed_step=resumed_step)
    assert not writer.was_written('eval/valid')
    for step, loss in losses.items():
      writer.write(step, 'eval/valid', {'loss': loss})
    writer.close()
    (tmp_path / 'metrics.jsonl').write_text('')  # As where the file could not be written until the end.
  events = curves(str(tmp_path / 'summaries' / 'eval' / 'valid')).Reload().Scalars('loss')
  assert [(e.step, e.value) for e in events] == [(10, 3.0), (20, 2.0), (30, 1.0)]


def test_a_run_started_anew_in_a_used_directory_starts_its_curves_anew(tmp_path):
  for loss in (1.0, 2.0):
    writer = SummaryWriter(tmp_path)
    writer.write(5, 'train', {'loss': loss})
    writer.close()
  assert [r['metrics']['loss'] for r in read_jsonl(tmp_path)] == [2.0]


def test_what_waits_for_an_event_file_that_cannot_be_made_is_in_it_once_it_can(tmp_path):
  said = []
  writer = SummaryWriter(tmp_path, report=said.append)
  (tmp_path / 'summaries').mkdir()
  (tmp_path / 'summaries' / 'eval').write_text('')
  picture = {'picture': Summary(jnp.zeros((1, 4, 4, 3)), 'image')}
  for step in (1, 2, 3):
    writer.write(step, 'eval/valid', {'loss': float(step)}, picture)
    writer.write(step, 'train', {'loss': float(step)})
    assert len(read_events(tmp_path, 'train')) == 2 + step  # Others do not wait for it.
  assert len(said) == 1 and len(writer.unwritten) == 6
  (tmp_path / 'summaries' / 'eval').unlink()
  writer.write(4, 'train', {'loss': 4.0})
  assert len(said) == 2 and not writer.unwritten
  writer.close()
  values = [(e.step, v.tag) for e in read_events(tmp_path, 'eval/valid') for v in e.summary.value]
  assert [step for step, tag in values if tag == 'loss'] == [1, 2, 3]
  assert len({step for step, tag in values if tag.startswith('picture')}) == 3


def test_at_its_end_it_says_that_an_event_file_cannot_be_made(tmp_path):
  writer = SummaryWriter(tmp_path)
  (tmp_path / 'summaries').write_text('')
  writer.write(1, 'train', {'loss': 1.0})
  with pytest.raises(UserError, match=f'metrics cannot be written to {tmp_path}: '):
    writer.close()


def test_a_writer_that_is_not_enabled_writes_nothing(tmp_path):
  writer = SummaryWriter(tmp_path, enabled=False)
  writer.write(1, 'train', {'loss': 1.0})
  writer.close()
  assert list(tmp_path.iterdir()) == []
