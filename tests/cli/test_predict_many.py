"""`praxis-lite predict --input --output` as a command: processes, kills, Ray, and what it refuses."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.files import parse_json
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.runs import open_run, run_train
from praxis_lite.training.experiment import configure

FILE = pathlib.Path(__file__).parent / 'tiny_experiment.py'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  directory = tmp_path_factory.mktemp('run')
  config = configure(StdlibLmTiny)
  apply_overrides(config.roots(), ['task.train.num_train_steps=1', 'task.evaluate.max_batches=1'])
  run_train(config, directory)
  return directory


@pytest.fixture
def predicted(run, capsys):
  def predict(*arguments):
    code = main(['predict', f'--job_log_dir={run}', '--nocompilation_cache', *map(str, arguments)])
    return code, capsys.readouterr()

  return predict


def results(folder):
  return [parse_json(line) for part in sorted(folder.glob('part-*')) for line in part.read_text().splitlines()]


def test_results_are_those_of_the_model_and_a_second_start_says_so(run, predicted, tmp_path):
  ids = np.random.default_rng(0).integers(0, 256, (5, 8))
  data, out = tmp_path / 'a.jsonl', tmp_path / 'out'
  data.write_text(''.join(f'{json.dumps({"ids": row.tolist(), "name": f"n{i}"})}\n' for i, row in enumerate(ids)))
  flags = [f'--input={data}', f'--output={out}', '--shard_rows=3', '--batch_size=2', '--keep=name']
  code, told = predicted(*flags)
  assert code == 0 and [row['name'] for row in results(out)] == [f'n{i}' for i in range(5)]  # It is no array.
  data.write_text(''.join(f'{json.dumps({"ids": row.tolist()})}\n' for row in ids))
  code, told = predicted(*flags)
  assert code == 2 and f'{data} has changed since --output={out} was begun; name another --output' in told.err
  out = tmp_path / 'second'
  flags = [f'--input={data}', f'--output={out}', '--shard_rows=3', '--batch_size=2']
  code, told = predicted(*flags)
  assert code == 0 and told.err == f'5 rows: complete in {out}\n'
  wanted = open_run(run).load().predict({'ids': ids})['logits']
  np.testing.assert_allclose([row['logits'] for row in results(out)], wanted, rtol=1e-4, atol=1e-5)
  code, told = predicted(*flags)
  assert code == 0 and told.out == '2 of 2 shards are finished; going on with the rest\n'
  code, told = predicted(*flags, '--what=evaluate')
  assert code == 2 and 'was begun with what = "predict", and now it is "evaluate"' in told.err


def test_processes_and_what_each_does(predicted, tmp_path):
  data, out = tmp_path / 'a.txt', tmp_path / 'out'
  data.write_text(''.join(f'line {i}\n' for i in range(5)))
  flags = [f'--input={data}', f'--output={out}', '--shard_rows=1', '--what=score', '--processes=2']
  assert predicted(*flags, '--process_index=1')[0] == 0
  assert sorted(path.name for path in out.glob('part-*')) == ['part-00001.jsonl', 'part-00003.jsonl']
  assert predicted(*flags, '--process_index=0')[0] == 0
  code, told = predicted(*flags)
  assert code == 0 and '5 rows: complete' in told.err
  assert [row['row'] for row in results(out)] == list(range(5)) and all(row['log_prob'] < 0 for row in results(out))


@pytest.mark.parametrize(
  'flags, told',
  [
    (['--input=a.jsonl'], '--input and --output belong together, as in'),
    (['--output=out'], '--input and --output belong together'),
    (['--input=a.jsonl', '--output=out', 'b.jsonl'], 'b.jsonl: with --output, name files by --input'),
    (['--input=a.jsonl', '--output=out', '--process_index=1'], '--process_index=1: expected less than --processes=1'),
    (['--input=a.jsonl', '--output=out', '--top_k=5'], '--top_k is a setting of --what=generate'),
    (['--input=a.jsonl', '--output=out', '--ray', '--process_index=0'], 'with --ray, leave it out'),
    (['--input=a.jsonl', '--output=out', '--keep=row'], '--keep=row: results of --what=predict have a value'),
    (['--keep=id', 'a.jsonl'], '--keep needs --input and --output, as in'),
    (['--max_bad_rows=1', 'a.jsonl'], '--max_bad_rows needs --input and --output'),
    (['--what=score', 'a.jsonl'], '--what=score needs --input and --output, as in --input=data/*.jsonl'),
    (['--input=nothing.jsonl', '--output=out'], 'nothing.jsonl'),
  ],
)
def test_what_does_not_fit_together_is_named(predicted, tmp_path, monkeypatch, flags, told):
  monkeypatch.chdir(tmp_path)
  code, output = predicted(*flags)
  assert code == 2 and told in output.err and 'Traceback' not in output.err
  assert not [*tmp_path.glob('out/*')]


def started(*arguments):
  command = [sys.executable, '-m', 'praxis_lite', 'predict', *map(str, arguments)]
  environment = {**os.environ, 'XLA_FLAGS': ''}
  return subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, env=environment, text=True)


@pytest.mark.slow
def test_a_hundred_thousand_rows_killed_ten_times_are_there_once_and_in_order(tmp_path):
  count, drawn = 100_000, random.Random(0)
  run, data, out = tmp_path / 'run', tmp_path / 'data', tmp_path / 'out'
  assert main(['train', f'--exp={FILE}:Tiny', f'--job_log_dir={run}']) == 0
  x = np.random.default_rng(0).standard_normal((count, 5)).astype(np.float32)
  data.mkdir()
  for number, rows in enumerate(np.split(x, 4)):
    (data / f'{number}.jsonl').write_text(''.join(f'{json.dumps({"x": row.tolist()})}\n' for row in rows))
  flags = [f'--job_log_dir={run}', f'--trust={FILE}', f'--input={data}/*.jsonl', f'--output={out}']
  flags += ['--shard_rows=50', '--batch_size=50']
  kills = 0
  while kills < 10:
    process = started(*flags, f'--processes={1 + kills % 2}')
    wanted = len(list(out.glob('part-*'))) + drawn.randrange(3, 30)
    until = time.monotonic() + 300
    while len(list(out.glob('part-*'))) < wanted and process.poll() is None and time.monotonic() < until:
      time.sleep(0.002)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    kills += 1
  there = len(list(out.glob('part-*')))
  assert 30 < there < 2000
  process = started(*flags, '--processes=2')
  _, told = process.communicate(timeout=600)
  assert process.returncode == 0 and '100,000 rows: complete' in told, told
  found = results(out)
  assert [row['row'] for row in found] == list(range(count))
  predictions = open_run(run, trusted=[str(FILE)]).load().predict({'x': x})
  np.testing.assert_allclose([row['prediction'] for row in found], predictions, rtol=1e-4, atol=1e-5)
  assert not list(out.glob('.writing-*'))


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_its_parent_ends_with_an_error(tmp_path):
  run, data, out = tmp_path / 'run', tmp_path / 'a.jsonl', tmp_path / 'out'
  assert main(['train', f'--exp={FILE}:Tiny', f'--job_log_dir={run}']) == 0
  data.write_text('{"x": [1, 2, 3, 4, 5]}\n' * 20_000)
  flags = [f'--job_log_dir={run}', f'--trust={FILE}', f'--input={data}', f'--output={out}', '--shard_rows=20']
  process = started(*flags, '--processes=2')
  until = time.monotonic() + 300
  while not list(out.glob('part-*')) and time.monotonic() < until:
    time.sleep(0.01)
  children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
  os.kill(int(children[1]), signal.SIGKILL)
  _, told = process.communicate(timeout=300)
  assert process.returncode == 2 and 'process 1 was ended by SIGKILL; the same command continues' in told
  process = started(*flags, '--processes=3')
  _, told = process.communicate(timeout=300)
  assert process.returncode == 0 and [row['row'] for row in results(out)] == list(range(20_000)), told


@pytest.mark.slow
def test_actors_of_a_local_ray_compute_the_same(run, predicted, tmp_path):
  pytest.importorskip('ray.data', reason="needs Ray: pip install 'praxis_lite[ray]'")
  data, out, other = tmp_path / 'a.txt', tmp_path / 'out', tmp_path / 'other'
  data.write_text(''.join(f'line {i}\n' for i in range(40)))
  flags = [f'--input={data}', '--shard_rows=4', '--what=score', '--keep=text']
  assert predicted(*flags, f'--output={out}', '--max_bad_rows=0', '--format=jsonl', '--process_index=0')[0] == 0
  (out / 'part-00003.jsonl').unlink()
  (out / 'part-00007.jsonl').unlink()
  process = started(f'--job_log_dir={run}', *flags, f'--output={out}', '--ray', '--processes=2')
  _, told = process.communicate(timeout=500)
  assert process.returncode == 0 and '40 rows: complete' in told, told
  assert predicted(*flags, f'--output={other}')[0] == 0
  for one, two in zip(results(out), results(other), strict=True):
    assert one['row'] == two['row'] and one['text'] == two['text']
    assert one['log_prob'] == pytest.approx(two['log_prob'], rel=1e-4)
