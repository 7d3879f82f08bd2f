"""A sample of what `tools/fuzz_parsers.py` gives to parsers, and what it has found; that it notices code that runs."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from praxis_lite.bridges.hf.files import read_folder
from praxis_lite.checkpoints.contents import add_checksum
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError
from praxis_lite.common.files import parse_json
from praxis_lite.runs.records.heartbeat import Heartbeat
from praxis_lite.runs.records.metrics import metric_lines
from tools.fuzz.parsers import PARSERS, _snapshot_text
from tools.fuzz_parsers import Guard, fuzz, run_case

_COPY = {'mesh': {}, 'processes': 1, 'variables': {}, 'step': 3, 'checkpoint': 0, 'input_state': None, 'metrics': []}


@pytest.fixture(scope='module')
def guard():
  return Guard()


@pytest.mark.slow
def test_bad_input_of_every_parser_is_an_error_of_one_line(guard):
  found = list(fuzz(0, range(600), guard))
  assert not [wrong for _, wrong in found if wrong is not None]
  assert set(collections.Counter(name for name, _ in found)) == set(PARSERS)


@pytest.mark.parametrize(
  ('parser', 'case'),
  [
    ('metrics.jsonl', b'{"step": 1, "split": "train", "metrics": {"loss": [1, 2]}}\n\xff\n' + b'[' * 5000),
    ('metrics.jsonl', b'{"step": 1e3, "split": "train", "metrics": []}\n{"step": %d, "split": "a"}' % 10**40),
    ('checkpoint metadata', b'{"variables": {"w": 1}}'),
    ('checkpoint metadata', b'{"variables": {"w": {"shape": [1], "dtype": "O"}}}'),
    ('checkpoint metadata', b'{"format": 1, "variables": {"w": {"shape": [1], "dtype": ",at"}}}'),
    ('heartbeat', json.dumps({**dataclasses.asdict(Heartbeat()), 'time': None}).encode()),
    ('snapshot of a plan', re.sub('(each device\n +)', r'\1-', _snapshot_text())),
    ('best.json', b'{"step": [2], "metric": "a", "mode": "min", "value": {}}'),
    ('vocabulary.json', b'[1]'),
    ('arrays', {'x': [[1.0], [1.0, 2.0]]}),
    ('input state', {'epoch': -1, 'position': 0, 'shuffle': True, 'seed': 0, 'num_examples': 5}),
    ('input state', None),
    ('strategies', ('.*', 'fsdp("\ud800")')),
    ('strategies', ('.*', '(' * 3000)),
    ('HF config.json', b'{"model_type": ["llama"]}'),
    ('safetensors', b'\x20' + bytes(7) + b'{"a": {"dtype": [], "shape": 1}}'),
    ('safetensors index', b'{"weight_map": {"a": 1}}'),
    ('calibration', b'{"cpu": {"compute": "fast"}}'),
    ('records', b'\n\x0d\n\x0b\n\x01x\x12\x06\x12\x04\n\x02\x00\x01'),  # Two bytes of floats.
    (
      'emergency copy',
      json.dumps(add_checksum({**_COPY, 'shards': [['w', [[0, 2**44]], 'int8', 0]]})).encode() + b'\n',
    ),
  ],
  ids=lambda value: value if isinstance(value, str) and len(value) < 30 else '',
)
def test_what_was_found(parser, case, guard, tmp_path):
  assert run_case(parser, case, tmp_path, guard) == ''


def test_it_notices_code_that_runs_and_files_that_change(guard, tmp_path, monkeypatch):
  def reads(action):
    monkeypatch.setitem(PARSERS, 'text', PARSERS['text']._replace(read=lambda case, folder: action(folder)))
    return run_case('text', b'', tmp_path / 'inside', guard)

  (tmp_path / 'inside').mkdir()
  assert reads(lambda folder: (folder / 'x').write_text('')) == ''
  assert 'open' in reads(lambda folder: (tmp_path / 'x').write_text(''))
  assert 'os.remove' in reads(lambda folder: os.remove(tmp_path / 'x'))
  assert 'os.system' in reads(lambda folder: os.system('true'))
  assert 'subprocess.Popen' in reads(lambda folder: subprocess.run([sys.executable, '--version'], check=False))
  assert 'fuzz_canary' in reads(lambda folder: __import__('fuzz_canary'))
  assert 'KeyError' in reads(lambda folder: {}['x'])


def test_lines_of_metrics_that_are_whole_are_read_beside_damaged_ones(tmp_path):
  good = [json.dumps({'step': i, 'split': 'train', 'metrics': {'loss': 0.5, 'x': None}}) for i in range(3)]
  (tmp_path / 'm').write_bytes('\n'.join(good).encode().replace(b'"step": 1', b'"st\xffp": 1') + b'\n{"step')
  assert [line for line, _ in metric_lines(tmp_path / 'm')] == [good[0], good[2]]


@pytest.mark.parametrize('name', ['../a.safetensors', '/etc/passwd', 'a/../../b', '', '.', 'a\x00b'])
def test_an_index_names_no_file_outside_of_its_folder(name, tmp_path):
  (tmp_path / 'a.safetensors').write_bytes(bytes(8))
  folder = tmp_path / 'model'
  folder.mkdir()
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'w': name}}))
  with pytest.raises(CheckpointError, match='there is no such file beside it'):
    read_folder(folder)


def test_json_that_is_nested_deeply_is_an_error_of_a_value():
  with pytest.raises(ValueError, match='nested too deeply'):
    parse_json('[' * 100_000)


def test_an_experiment_imports_what_it_names_and_a_record_imports_nothing(tmp_path, monkeypatch):
  """`--exp` runs the file that the user names; a directory that names the same module in its record does not."""
  from praxis_lite.cli.main import main
  from praxis_lite.runs.records.record import read_record

  (tmp_path / 'theirs.py').write_text('from pathlib import Path\nPath("ran").touch()\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  config = {'task': {'$config': 'theirs:Task', 'x': {'$partial': [{'$ref': 'theirs:run'}, [], {}]}}}
  record = {'format': 1, 'launches': [], 'lost': {}, 'config': config}
  Path('run.json').write_text(json.dumps(record))
  with pytest.raises(ConfigError, match='theirs is not one of the packages'):
    _ = read_record(tmp_path).config
  for command in (['show'], ['eval'], ['runs', '.'], ['decode'], ['export'], ['train']):
    assert main([*command, *([f'--job_log_dir={tmp_path}'] if len(command) == 1 else [])]) in (0, 2)
  assert not Path('ran').exists()
  with pytest.raises(UserError):
    from praxis_lite.training import registry

    registry.get(f'{tmp_path}/theirs.py:Missing')
  assert Path('ran').exists()
