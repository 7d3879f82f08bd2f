"""Predictions for many rows: each row once, in order, whatever is killed, and nothing of another input or setting."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from batched_lm import made
from warm_python import WarmPopen

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, UserError
from praxis_lite.inputs import ImageRecordInput, LabelledTextInput
from praxis_lite.layers import Linear
from praxis_lite.models import ClassificationModel
from praxis_lite.runs.bulk import processes
from praxis_lite.runs.bulk.input_files import list_inputs, read_part
from praxis_lite.runs.bulk.job import ShardJob
from praxis_lite.runs.bulk.kept_values import check_keep
from praxis_lite.runs.bulk.kinds import make_compute
from praxis_lite.runs.bulk.on_ray import run_on_ray
from praxis_lite.runs.bulk.output_folder import LocalFolder, StoredFolder
from praxis_lite.runs.bulk.results import ResultLedger
from praxis_lite.runs.cluster.object_store import ObjectStore
from praxis_lite.runs.predict_files import predict_files

SETTINGS = {'format': 'jsonl', 'step': 3}
ROOT = pathlib.Path(__file__).parents[2]


def double(rows, first):
  if any(not isinstance(row.get('x'), int) for row in rows):
    raise DataError("'x' is no number")
  return [{'y': 2 * row['x']} for row in rows]


def write_lines(path, numbers):
  path.write_text(''.join(f'{json.dumps({"x": x, "id": f"n{x}"})}\n' for x in numbers))
  return str(path)


def open_ledger(output, *paths, shard_rows=4, **settings):
  folder = StoredFolder(ObjectStore(output)) if '://' in output else LocalFolder(output)
  return ResultLedger.open(output, folder, paths, {**SETTINGS, **settings}, shard_rows)


def run(ledger, shards=None, **fields):
  job = ShardJob(ledger, double, **{'batch_size': 3, **fields})
  job.run(ledger.remaining_shards() if shards is None else shards)
  return job


def results(folder):
  parts = sorted(pathlib.Path(folder).glob('part-*.jsonl'))
  return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def test_rows_of_all_kinds_of_files_come_out_in_order(tmp_path):
  pa = pytest.importorskip('pyarrow', reason='needs the package pyarrow: pip install praxis_lite[grain]')
  import pyarrow.parquet as pq

  (tmp_path / 'b.jsonl').write_bytes(
    b'\n{"x": 0, "id": "a"}\r\n\n{"x": 1}\n{"x": 2}\n  \n{"x": 3}\n{"x": 4}'
  )  # No last \n.
  (tmp_path / 'empty.jsonl').write_bytes(b'')
  pq.write_table(pa.table({'x': list(range(5, 16)), 'id': [None] * 11}), tmp_path / 'c.parquet', row_group_size=3)
  write_lines(tmp_path / 'a.jsonl', range(16, 21))
  inputs = [str(tmp_path / name) for name in ('b.jsonl', 'empty.jsonl', '*.parquet', 'a.jsonl')]
  ledger = open_ledger(str(tmp_path / 'out'), *inputs, shard_rows=4)
  assert [shard.num_rows for shard in ledger.plan.shards] == [4, 1, 4, 4, 3, 4, 1]
  rows = [row for shard in ledger.plan.shards for row in read_part(shard)]
  assert [row.number for row in rows] == [row.values['x'] for row in rows] == list(range(21))
  assert rows[3].where == f'{tmp_path}/b.jsonl: line 7' and rows[14].where == f'{tmp_path}/c.parquet: row 9'
  assert rows[4].where == f'{tmp_path}/b.jsonl: line 8' and rows[20].where == f'{tmp_path}/a.jsonl: line 5'
  run(ledger, keep=['id'])
  assert ledger.check_complete() == (21, 0)
  found = results(tmp_path / 'out')
  assert [row['row'] for row in found] == list(range(21)) and [row['y'] for row in found] == list(range(0, 42, 2))
  assert found[0]['id'] == 'a' and 'id' not in found[1] and found[20]['id'] == 'n20'


def test_results_in_parquet_and_lines_of_text(tmp_path):
  pq = pytest.importorskip('pyarrow.parquet', reason='needs the package pyarrow: pip install praxis_lite[grain]')
  (tmp_path / 'a.txt').write_bytes('to be\nnaïve\n\n\xff\n'.encode().replace(b'\xc3\xbf', b'\xff'))
  ledger = open_ledger(str(tmp_path / 'out'), str(tmp_path / 'a.txt'), format='parquet', shard_rows=2)
  job = ShardJob(ledger, lambda rows, first: [{'n': len(row['text'])} for row in rows], batch_size=8, most_bad=1)
  job.run(ledger.remaining_shards())
  assert ledger.check_complete() == (3, 1)
  first, last = (pq.read_table(tmp_path / 'out' / f'part-0000{i}.parquet').to_pylist() for i in range(2))
  assert first == [{'row': 0, 'n': 5, 'error': None}, {'row': 1, 'n': 5, 'error': None}]
  assert last[0]['row'] == 2 and 'a.txt: line 4: is not UTF-8 text' in last[0]['error']


def test_kept_values_that_a_file_cannot_hold_are_bad_rows(tmp_path):
  pa = pytest.importorskip('pyarrow', reason='needs the package pyarrow: pip install praxis_lite[grain]')
  import pyarrow.parquet as pq

  when = [datetime.datetime(2020, 1, 1), None]
  pq.write_table(pa.table({'x': [1, 2], 'id': when}), tmp_path / 'a.parquet')
  ledger = open_ledger(str(tmp_path / 'lines'), str(tmp_path / 'a.parquet'))
  with pytest.raises(DataError, match=r'a\.parquet: row 0: --keep=id: datetime cannot be written as JSON; --format='):
    run(ledger, keep=['id'])
  assert run(ledger, keep=['id'], most_bad=1).num_bad == 1 and ledger.check_complete() == (2, 1)
  run(ledger := open_ledger(str(tmp_path / 'table'), str(tmp_path / 'a.parquet'), format='parquet'), keep=['id'])
  table = pq.read_table(tmp_path / 'table' / 'part-00000.parquet')
  assert table['id'].to_pylist() == when and table.schema.field('error').type == pa.string()
  (tmp_path / 'b.jsonl').write_text('{"x": 1, "id": null}\n{"x": 2, "id": 3}\n{"x": 3, "id": 2.5}\n{"x": 4, "id": "a"}')
  ledger = open_ledger(str(tmp_path / 'mixed'), str(tmp_path / 'b.jsonl'), format='parquet')
  with pytest.raises(DataError, match='line 4: --keep=id: the value is str, and an earlier one number; a column has'):
    run(ledger, keep=['id'])
  run(ledger, keep=['id'], most_bad=1)
  found = pq.read_table(tmp_path / 'mixed' / 'part-00000.parquet').to_pylist()
  assert [row['id'] for row in found] == [None, 3.0, 2.5, None] and ledger.check_complete() == (4, 1)


def test_a_kept_name_that_results_have_is_refused(tmp_path):
  for name, what in (('row', 'predict'), ('error', 'evaluate'), ('log_prob', 'score'), ('continuation', 'generate')):
    with pytest.raises(UserError, match=f"--keep={name}: results of --what={what} have a value '{name}' themselves"):
      check_keep(['id', name], what)
  check_keep(['log_prob', 'continuation'], 'predict')
  (tmp_path / 'a.jsonl').write_text('{"x": 1, "y": 3}')
  with pytest.raises(UserError, match="--keep=y: results have a value 'y' themselves"):
    run(open_ledger(str(tmp_path / 'out'), str(tmp_path / 'a.jsonl')), keep=['y'], most_bad=9)
  assert not results(tmp_path / 'out')


@pytest.mark.parametrize('error', [UserError('no model'), ConfigError('temperature = -1')])
def test_a_wrong_setting_or_model_is_no_bad_row(tmp_path, error):
  def fail(rows, first):
    raise error

  ledger = open_ledger(str(tmp_path / 'out'), write_lines(tmp_path / 'a.jsonl', range(3)))
  with pytest.raises(UserError, match=str(error)):
    ShardJob(ledger, fail, batch_size=2, most_bad=100).run([0])
  assert ledger.remaining_shards() == [0]


def test_an_unexpected_error_about_a_row_is_a_bad_row_with_its_place(tmp_path):
  def compute(rows, first):
    return [{'y': 1 + row['x']} for row in rows]

  (tmp_path / 'a.jsonl').write_text('{"x": 1}\n{"x": "a"}\n')
  ledger = open_ledger(str(tmp_path / 'out'), str(tmp_path / 'a.jsonl'))
  with pytest.raises(DataError, match=r'a\.jsonl: line 2: TypeError: unsupported operand'):
    ShardJob(ledger, compute, batch_size=2).run([0])
  ShardJob(ledger, compute, batch_size=2, most_bad=1).run([0])
  assert ledger.check_complete() == (2, 1)


def test_nothing_is_written_if_the_check_before_it_ends_the_process(tmp_path):
  ledger = open_ledger(str(tmp_path / 'out'), write_lines(tmp_path / 'a.jsonl', range(3)))
  checks = iter([None])  # Before the only batch; the parent is gone when the results are there.
  with pytest.raises(StopIteration):
    ShardJob(ledger, double, batch_size=9).run([0], lambda: next(checks))
  assert ledger.remaining_shards() == [0]


def test_a_plan_is_written_once_and_a_temporary_file_that_is_gone_is_written_again(tmp_path, monkeypatch):
  folder = LocalFolder(str(tmp_path / 'out'))
  assert folder.names() == [] and not (tmp_path / 'out').exists()  # A command that ends with an error leaves no folder.
  folder.create('plan.json', b'first')
  folder.create('plan.json', b'second')
  assert folder.read('plan.json') == b'first' and folder.names() == os.listdir(tmp_path / 'out') == ['plan.json']
  replace, calls = os.replace, []

  def replace_after_clean(source, target):
    if not calls:
      folder.clean('a')  # As another process that has begun to write the same file.
    calls.append(source)
    replace(source, target)

  monkeypatch.setattr(os, 'replace', replace_after_clean)
  folder.write('a', b'x')
  assert folder.read('a') == b'x' and len(calls) == 2


def test_a_field_of_the_config_that_differs_is_named(tmp_path):
  data, out = write_lines(tmp_path / 'a.jsonl', range(3)), str(tmp_path / 'out')
  open_ledger(out, data, config={'task.a': '1', 'datasets[0].tokenizer.path': "'old'"})
  with pytest.raises(DataError, match=r"datasets\[0\]\.tokenizer\.path = \"'old'\", and now it is \"'new'\""):
    open_ledger(out, data, config={'task.a': '1', 'datasets[0].tokenizer.path': "'new'"})


def test_a_row_group_is_decoded_once_and_a_damaged_one_is_named(tmp_path, monkeypatch):
  pa = pytest.importorskip('pyarrow', reason='needs the package pyarrow: pip install praxis_lite[grain]')
  import pyarrow.parquet as pq

  file = tmp_path / 'a.parquet'
  pq.write_table(pa.table({'x': list(range(40))}), file, row_group_size=20, compression='none', use_dictionary=False)
  read, groups = pq.ParquetFile.read_row_group, []
  monkeypatch.setattr(pq.ParquetFile, 'read_row_group', lambda self, i: groups.append(i) or read(self, i))
  run(open_ledger(str(tmp_path / 'out'), str(file), shard_rows=4))
  assert groups == [0, 1] and [row['y'] for row in results(tmp_path / 'out')] == list(range(0, 80, 2))
  data = bytearray(file.read_bytes())
  data[4:24] = b'\xff' * 20  # The header of the first page.
  file.write_bytes(data)
  with pytest.raises(DataError, match=r'a\.parquet: row group 0: cannot be read as Parquet: '):
    run(open_ledger(str(tmp_path / 'other'), str(file), shard_rows=4))


def test_each_process_gets_a_gpu_of_its_own(monkeypatch):
  started = []

  def start(command, env):
    started.append((command[-1], env.get('CUDA_VISIBLE_DEVICES')))
    return SimpleNamespace(wait=lambda: 0, poll=lambda: 0)

  monkeypatch.setattr(processes.subprocess, 'Popen', start)
  monkeypatch.setattr(processes.importlib.util, 'find_spec', lambda name: name == 'jax_cuda13_plugin')
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda,cpu')
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3,5')
  processes.run_processes(['predict'], [0, 2])
  assert started == [('--process_index=0', '3'), ('--process_index=2', '5')]
  with pytest.raises(ConfigError, match='--processes needs a GPU for each of 3 processes, and there are 2'):
    processes.run_processes(['predict'], [0, 1, 2])
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  assert processes.visible_gpus() == []


def test_a_second_start_goes_on_and_computes_nothing_twice(tmp_path):
  data, seen = write_lines(tmp_path / 'a.jsonl', range(10)), []
  ledger = open_ledger(str(tmp_path / 'out'), data)
  run(ledger, [1])
  again = open_ledger(str(tmp_path / 'out'), data)
  assert again.plan == ledger.plan and again.remaining_shards() == [0, 2]
  with pytest.raises(DataError, match='out: 2 of 3 shards are missing'):
    again.check_complete()
  ShardJob(again, lambda rows, first: seen.append(first) or double(rows, first), batch_size=4).run(
    again.remaining_shards()
  )
  assert seen == [0, 8] and again.check_complete() == (10, 0)
  os.utime(data, (1, 1))  # Written again, with the same content.
  assert not open_ledger(str(tmp_path / 'out'), data).remaining_shards()


def test_another_input_or_setting_is_refused_with_one_line(tmp_path):
  data, out = write_lines(tmp_path / 'a.jsonl', range(10)), str(tmp_path / 'out')
  ledger = open_ledger(out, data)
  for change, told in (
    ({'step': 4}, r'was begun with step = 3, and now it is 4; give the first value again, or name another --output'),
    ({'shard_rows': 5}, r'was begun with shard_rows = 4, and now it is 5'),
    ({'temperature': 0.5}, r'was begun with temperature = null, and now it is 0.5'),
  ):
    with pytest.raises(DataError, match=told) as raised:
      open_ledger(out, data, **change)
    assert '\n' not in str(raised.value)
  other = write_lines(tmp_path / 'b.jsonl', range(3))
  with pytest.raises(DataError, match=r'was begun with other files of --input, or in another order: .*b\.jsonl'):
    open_ledger(out, data, other)
  (tmp_path / 'a.jsonl').write_text(pathlib.Path(data).read_text().replace('"x": 9', '"x": 8'))  # The same size.
  with pytest.raises(DataError, match=r'a\.jsonl has changed since --output=.* was begun'):
    open_ledger(out, data)
  with pytest.raises(DataError, match=r'a\.jsonl: it has changed since the plan was made'):
    run(ledger, [2])
  run(ledger, [0])
  assert results(out) == [{'row': i, 'y': 2 * i} for i in range(4)]


def test_what_is_in_the_output_folder_is_never_overwritten_or_believed(tmp_path):
  data, out = write_lines(tmp_path / 'a.jsonl', range(10)), tmp_path / 'out'
  ledger = open_ledger(str(out), data)
  run(ledger)
  second = out / 'part-00001.jsonl'
  whole = second.read_text()
  for wrong in (whole.splitlines(True)[:-1], whole.splitlines(True)[::-1], [whole, whole.splitlines(True)[0]]):
    second.write_text(''.join(wrong))
    with pytest.raises(DataError, match=r'part-00001\.jsonl: expected rows 4 to 7, each once and in order'):
      ledger.check_complete()
  for wrong in (whole[:-9], whole.replace('"row"', '"column"'), '[]\n'):
    second.write_text(wrong)
    with pytest.raises(DataError, match=r'part-00001\.jsonl is damaged: .*; remove the file, and start again'):
      ledger.check_complete()
  plan = out / 'plan.json'
  plan.write_text(plan.read_text().replace('"num_rows": 4', '"num_rows": 5', 1))
  with pytest.raises(DataError, match=r'plan\.json is damaged: its seal does not fit; name another --output'):
    open_ledger(str(out), data)
  plan.unlink()
  with pytest.raises(DataError, match=r'has files and no plan\.json, such as part-0000'):
    open_ledger(str(out), data)
  with pytest.raises(DataError, match=r'has files and no plan\.json, such as a\.jsonl'):
    open_ledger(str(tmp_path), data)


def test_what_killed_processes_leave_is_removed_and_no_result(tmp_path):
  data, out = write_lines(tmp_path / 'a.jsonl', range(10)), tmp_path / 'out'
  ledger = open_ledger(str(out), data)
  (out / '.writing-part-00000.jsonl-x1').write_text('{"row": 0')
  assert ledger.remaining_shards() == [0, 1, 2]
  run(ledger)
  assert sorted(path.name for path in out.iterdir()) == [f'part-0000{i}.jsonl' for i in range(3)] + ['plan.json']


def test_bad_rows_are_named_and_a_limit_says_how_many_may_be(tmp_path):
  lines = ['{"x": 0}', '{"x": "a"}', '[1]', '{"x": 3}', '{', '{"x": 5}']
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  out = str(tmp_path / 'out')
  ledger = open_ledger(out, str(tmp_path / 'a.jsonl'), shard_rows=6)
  with pytest.raises(DataError, match=r'a\.jsonl: line 3: expected an object, got list; --max_bad_rows=10 allows some'):
    run(ledger)
  with pytest.raises(DataError, match=r"a\.jsonl: line 2: 'x' is no number \(3 bad rows, and --max_bad_rows=2\)"):
    run(ledger, most_bad=2)
  assert not results(out)
  assert run(ledger, most_bad=3).num_bad == 3 and ledger.check_complete() == (6, 3)
  found = results(out)
  assert [row['row'] for row in found] == list(range(6)) and [row.get('y') for row in found] == [
    0,
    None,
    None,
    6,
    None,
    10,
  ]
  assert 'line 5: is not JSON' in found[4]['error']


@pytest.mark.parametrize(
  'names, told',
  [
    (['nothing.jsonl'], 'nothing.jsonl'),
    (['a.jsonl', '*.jsonl'], 'is named twice'),
    (['a.npz'], r'a\.npz is no file of rows: \*\.jsonl, \*\.txt or \*\.parquet'),
    (['blank.txt'], 'there are no rows'),
    (['no.parquet'], r'no\.parquet: is not a Parquet file'),
  ],
)
def test_inputs_that_cannot_be_read_are_named(tmp_path, names, told):
  pytest.importorskip('pyarrow', reason='needs the package pyarrow: pip install praxis_lite[grain]')
  write_lines(tmp_path / 'a.jsonl', range(3))
  (tmp_path / 'a.npz').write_bytes(b'x')
  (tmp_path / 'blank.txt').write_bytes(b'\n \n')
  (tmp_path / 'no.parquet').write_bytes(b'PAR1')
  with pytest.raises(UserError, match=told):
    open_ledger(str(tmp_path / 'out'), *(str(tmp_path / name) for name in names))


def test_files_and_results_may_be_in_an_object_store(tmp_path):
  fsspec = pytest.importorskip('fsspec', reason='needs the package fsspec: pip install praxis_lite[remote]')
  store = fsspec.filesystem('memory')
  store.pipe('/bulk/in/b.jsonl', b'{"x": 0}\n{"x": 1}\n{"x": 2}\n')
  store.pipe('/bulk/in/a.jsonl', b'{"x": 3}\n')
  assert list_inputs(['memory://bulk/in/*.jsonl']) == ['memory:///bulk/in/a.jsonl', 'memory:///bulk/in/b.jsonl']
  inputs = ['memory://bulk/in/b.jsonl', 'memory://bulk/in/a.jsonl']
  ledger = open_ledger('memory://bulk/out', *inputs, shard_rows=2)
  run(ledger, [0])
  again = open_ledger('memory://bulk/out', *inputs, shard_rows=2)
  assert again.remaining_shards() == [1, 2]
  run(again)
  assert again.check_complete() == (4, 0)
  assert store.cat('/bulk/out/part-00001.jsonl') == b'{"row": 2, "y": 4}\n'
  store.pipe('/bulk/in/a.jsonl', b'{"x": 4}\n')
  with pytest.raises(DataError, match=r'in/a\.jsonl has changed since'):
    open_ledger('memory://bulk/out', *inputs, shard_rows=2)
  with pytest.raises(DataError, match='nothing-there'):
    list_inputs(['memory://bulk/nothing-there.jsonl']) and open_ledger(
      str(tmp_path), 'memory://bulk/nothing-there.jsonl'
    )
  with pytest.raises(ConfigError, match='unknown://x'):
    list_inputs(['unknown://x/a.jsonl'])
  store.rm('/bulk', recursive=True)


WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_bulk import double, open_ledger
from praxis_lite.runs.bulk.job import ShardJob

ledger = open_ledger(*sys.argv[2:4], shard_rows=10)
slow = lambda rows, first: time.sleep(0.002) or double(rows, first)
ShardJob(ledger, slow, batch_size=4).run([n for n in ledger.remaining_shards() if n % 2 == int(sys.argv[4])])
"""


def test_processes_that_are_killed_leave_each_row_once_and_in_order(tmp_path):
  data, out = write_lines(tmp_path / 'a.jsonl', range(1000)), tmp_path / 'out'
  for kill in range(3):
    workers = [
      WarmPopen(
        [sys.executable, '-c', WORKER, str(pathlib.Path(__file__).parent), str(out), data, str(index)],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
        start_new_session=True,
      )
      for index in range(2)
    ]
    until = time.monotonic() + 120
    if kill < 2:
      while len(list(out.glob('part-*'))) < 20 * (kill + 1) and time.monotonic() < until:
        time.sleep(0.01)
      for worker in workers:
        os.killpg(worker.pid, signal.SIGKILL)
    assert [worker.wait(120) for worker in workers] == [-signal.SIGKILL if kill < 2 else 0] * 2
  assert [row['row'] for row in results(out)] == list(range(1000))
  assert [row['y'] for row in results(out)] == list(range(0, 2000, 2))
  assert open_ledger(str(out), data, shard_rows=10).check_complete() == (1000, 0)


def test_scores_and_continuations_do_not_depend_on_their_batch():
  model = made()
  texts = [
    {'text': 'abc'},
    {'context': 'ab', 'continuation': 'cde'},
    {'ids': [1, 2, 3]},
    {'context': 'x', 'continuation': ''},
  ]
  score = make_compute(model, 'score', 4, {})
  scores = score(texts, 0)
  wanted = model.score(['ab'], ['cde'])[0]
  assert scores[1]['log_prob'] == pytest.approx(wanted.log_prob, rel=1e-4) and scores[1]['num_tokens'] == 3
  assert scores[3] == {'log_prob': 0.0, 'num_tokens': 0, 'is_greedy': True}
  generate = make_compute(model, 'generate', 4, {'temperature': 0.0, 'max_tokens': 5, 'seed': 1})
  prompts = [{'prompt': 'ab'}, {'prompt_ids': [97, 98]}, {'text': 'ab'}]
  (text,) = model.decode(['ab'], temperature=0.0, max_tokens=5)
  assert generate(prompts, 0) == [
    {'continuation': text},
    {'continuation_ids': list(text.encode())},
    {'continuation': text},
  ]
  for rows, told in (
    ([{'prompt': 3}], "'prompt' is 3; expected a text"),
    ([{'prompt_ids': 'ab'}], "'prompt_ids' is 'ab'; expected a list of integers"),
    ([{'prompt_ids': [1, True]}], "'prompt_ids' is .*; expected a list of integers"),
    ([{'prompt_ids': []}], "'prompt_ids' is empty; a prompt needs at least one token"),
    ([{'prompt': ''}], "'prompt' is empty"),
    ([{'prompt': '\ud800'}], 'is not UTF-8 text'),
    ([{'messages': 'a'}], "'messages' is 'a'; expected a list of objects"),
    ([{'other': 'a'}], 'expected prompt, prompt_ids, messages or text'),
    ([{'messages': [{'role': 'user', 'content': 'a'}]}], 'a chat needs a tokenizer with a chat template'),
  ):
    with pytest.raises(UserError, match=told):
      generate(rows, 0)
  for rows, told in (
    ([{'continuation': [1], 'context': 'a'}], 'a text and a list of tokens'),
    ([{}], 'expected context and continuation, or text, or ids'),
    ([{'text': '\ud800'}], 'is not UTF-8 text'),
    ([{'context': None, 'continuation': 'a'}], 'pair 0 has None'),
  ):
    with pytest.raises(DataError, match=told):
      score(rows, 0)


@pytest.mark.slow
def test_drawn_continuations_of_equal_prompts_differ_between_batches():
  generate = make_compute(made(), 'generate', 2, {'temperature': 1.0, 'max_tokens': 8, 'seed': 1})
  both = [generate([{'prompt': 'ab'}] * 2, first) for first in (0, 2)]
  assert len({result['continuation'] for results in both for result in results}) > 2
  assert generate([{'prompt': 'ab'}] * 2, 2) == both[1]


def model_of(dataset, seen):
  """A model that counts what it gets, whose run has one dataset."""

  def predict(batch):
    seen.append(batch)
    return {'size': np.array([x.size for x in batch.get('ids', batch.get('image'))])}

  def no_data():
    raise DataError('the data is elsewhere')

  config, layer = SimpleNamespace(datasets=[dataset]), SimpleNamespace(adapters=())
  return SimpleNamespace(predict=predict, batch_struct=no_data, config=config, layer=layer)


def test_texts_are_read_as_by_the_dataset_of_the_run_that_reads_texts():
  seen, sizes = [], {'seq_len': 9, 'batch_size': 4}
  dataset = Config(LabelledTextInput, name='t', path='gone.tsv', classes=('no', 'yes'), is_training=False, **sizes)
  compute = make_compute(model_of(dataset, seen), 'predict', 4, {})
  assert compute([{'text': 'ab'}, {'text': 'abc'}], 0) == [{'size': 9}, {'size': 9}]
  whole = dataset.clone(path=None, examples=[('ab', 'no'), ('abc', 'no')]).instantiate().rows(np.arange(2))
  np.testing.assert_array_equal(seen[0]['ids'], whole['ids'])
  for rows, told in (
    ([{'text': 'abcdefghij'}], r'example 0 of examples: .*9'),
    ([{'text': 'a'}, {'texts': 'b'}], 'expected the names text, got texts'),
    ([{'text': ''}], 'its text has no tokens'),
    ([{'text': 'a'}, {'text': 3}], "'text' is 3; expected a text"),
  ):
    with pytest.raises(UserError, match=told):
      compute(rows, 0)
  other = make_compute(model_of(Config(dict, is_training=False), seen), 'predict', 4, {})
  with pytest.raises(ConfigError, match='the datasets of the run read no single texts; give arrays by name'):
    other([{'text': 'a'}], 0)
  with pytest.raises(DataError, match='has lists of unequal lengths'):
    other([{'ids': [1, 2]}, {'ids': [1]}], 0)
  assert other([{'ids': [1, 2]}, {'ids': [1, 3]}], 0) == [{'size': 2}, {'size': 2}]


def test_classes_are_named_as_by_predict_for_files(tmp_path):
  network = Config(Linear, input_dims=2, output_dims=2)
  layer = Config(ClassificationModel, num_classes=2, network_tpl=network).instantiate()
  config = SimpleNamespace(datasets=[Config(LabelledTextInput, classes=('no', 'yes'))])
  model = SimpleNamespace(config=config, layer=layer, directory=None, batch_struct=dict)
  model.predict = lambda batch: {'prediction': np.array([1, 0]), 'probabilities': np.eye(2)}
  model.evaluate_examples = lambda batch: {'loss': np.zeros(2)}
  rows = [{'x': [1.0, 2.0]}] * 2
  named = make_compute(model, 'predict', 2, {})(rows, 0)
  assert [(row['class'], row['prediction']) for row in named] == [('yes', 1), ('no', 0)]
  np.savez(tmp_path / 'a.npz', x=np.ones((2, 2)))
  assert named == list(predict_files(model, [str(tmp_path / 'a.npz')]))
  assert make_compute(model, 'evaluate', 2, {})(rows, 0) == [{'loss': 0.0}] * 2


@pytest.mark.slow
def test_images_are_read_as_by_the_dataset_of_the_run_that_reads_images(tmp_path):
  import tensorflow as tf

  pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), np.uint8)
  (tmp_path / 'a.png').write_bytes(tf.io.encode_png(pixels).numpy())
  (tmp_path / 'b.png').write_bytes(b'no image')
  dataset = Config(ImageRecordInput, name='i', file_pattern='gone', image_size=(4, 5), batch_size=4, is_training=False)
  compute = make_compute(model_of(dataset, seen := []), 'predict', 4, {})
  assert compute([{'file': str(tmp_path / 'a.png')}], 0) == [{'size': 60}] and seen[0]['image'].shape == (1, 4, 5, 3)
  for name, told in (('b.png', r'b\.png: is not a JPEG, PNG, BMP or GIF image'), ('c.png', r'c\.png: No such file')):
    with pytest.raises(DataError, match=told):
      compute([{'file': str(tmp_path / name)}], 0)


def test_ray_that_is_not_installed_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(ConfigError, match=r"--ray needs praxis_lite\[ray\]: pip install 'praxis_lite\[ray\]'"):
    run_on_ray(lambda: None, [0], 1)
