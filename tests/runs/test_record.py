"""A run directory says what it is: the config that is read from it is the one that was run, and nothing else runs."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
import optax
import pytest
from tiny_runs import TinyModel, tiny_run

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.config.text import to_text
from praxis_lite.common.config.trusted import UntrustedError
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError
from praxis_lite.inputs import TableInput
from praxis_lite.runs import run_train
from praxis_lite.runs.records.record import first_launch, read_record, recorded_seed, write_record
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


def experiment(name='lm.SyntheticLmTiny', *overrides):
  config = configure(registry.get(name))
  apply_overrides(config.roots(), overrides)
  return config


def test_what_is_written_is_read(tmp_path):
  config = experiment()
  assert write_record(tmp_path, config, seed=3, command='train it', mesh={'data': 2}, step=5) == []
  record = read_record(tmp_path)
  assert to_text(record.config.roots()) == to_text(config.roots())
  assert record.text == to_text(config.roots()) + '\n' == (tmp_path / 'config.txt').read_text()
  assert record.seed == 3
  (launch,) = record.launches
  assert (launch.command, launch.mesh, launch.step) == ('train it', {'data': 2}, 5)
  assert launch.versions.keys() >= {'python', 'jax', 'praxis_lite', 'optax'}
  assert all(len(source['commit']) == 40 for source in launch.sources)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['config.txt', 'run.json']  # No file is left half written.


def test_each_launch_is_kept_with_what_it_changed(tmp_path):
  write_record(tmp_path, experiment())
  changed = experiment('lm.SyntheticLmTiny', 'task.train.num_train_steps=7', 'task.train.learner.learning_rate=0.5')
  changes = write_record(tmp_path, changed, seed=1)
  lines = ['task.train.learner.learning_rate: 0.003 -> 0.5', 'task.train.num_train_steps: 20 -> 7', 'seed: 0 -> 1']
  assert changes == ['the config differs from the recorded one:', *(f'  {line}' for line in lines)]
  record = read_record(tmp_path)
  assert [list(launch.changes) for launch in record.launches] == [[], lines]
  assert record.config.task.train.num_train_steps == 7
  assert write_record(tmp_path, changed, seed=1) == []


def test_what_cannot_be_read_back_is_left_out_and_the_rest_is_read(tmp_path):
  config = tiny_run(learner={'schedule': lambda step: 1.0})
  config.datasets[0].arrays = {'x': np.zeros((1 << 18, 2), np.float32)}
  write_record(tmp_path, config)
  record = read_record(tmp_path)
  assert 'lambda' in record.lost['task.train.learner.schedule']
  assert '2.0 MiB' in record.lost['datasets[0].arrays']
  assert record.config.task.train.learner.schedule is REQUIRED
  assert record.config.task.model == config.task.model
  assert record.config.datasets[1].arrays.keys() == {'x', 'y'}
  with pytest.raises(ConfigError, match=r'ArrayInput\.arrays|GatedInput\.arrays'):
    record.config.datasets[0].instantiate()


def test_a_config_that_names_an_unknown_module_is_refused_with_the_remedy(tmp_path):
  write_record(tmp_path, experiment(), command='praxis-lite train --exp=theirs.py:Theirs')
  for command in ('praxis-lite train --job_log_dir=a', 'praxis-lite train --job_log_dir=a'):
    write_record(tmp_path, experiment(), command=command)
  text = (tmp_path / 'run.json').read_text().replace('praxis_lite.models.language_model:', 'theirs.models:')
  (tmp_path / 'run.json').write_text(text)
  (tmp_path / 'theirs').mkdir()
  (tmp_path / 'theirs' / 'models.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")')
  made_by = r'made by: .*theirs\.py:.* resumed by: [^;]*$'
  with pytest.raises(
    UntrustedError, match=rf'run\.json: task\.model: theirs\.models .*--trust=theirs\.models.*{made_by}'
  ):
    _ = read_record(tmp_path).config
  assert not (tmp_path / 'ran').exists()


def test_a_class_of_a_script_is_refused_with_another_remedy(tmp_path):
  write_record(tmp_path, experiment())
  text = (tmp_path / 'run.json').read_text().replace('praxis_lite.models.language_model:', '__main__:')
  (tmp_path / 'run.json').write_text(text)
  with pytest.raises(ConfigError, match=r'defined in a script or a notebook.*--exp'):
    _ = read_record(tmp_path).config


def test_functions_of_a_script_are_left_out_of_datasets(tmp_path, monkeypatch):
  """So commands that read no data work on a run that a script has trained."""

  def answers(row, length=8):
    return row

  answers.__module__, answers.__qualname__ = '__main__', 'answers'
  monkeypatch.setattr(sys.modules['__main__'], 'answers', answers, raising=False)
  config = experiment()
  data = Config(TableInput, name='train', path='x.parquet', parse_fn=answers, batch_size=8, is_training=True)
  config.datasets[:] = [data, data.clone(parse_fn=functools.partial(answers, length=9), is_training=False)]
  write_record(tmp_path, config)
  record = read_record(tmp_path)
  assert to_text(record.config.task) == to_text(config.task)
  for i, dataset in enumerate(record.config.datasets):
    assert dataset.parse_fn is REQUIRED and 'put it in a module' in record.lost[f'datasets[{i}].parse_fn']
    with pytest.raises(ConfigError, match='parse_fn'):
      dataset.instantiate()
  assert read_record(tmp_path, trusted=['__main__']).config.datasets[0].parse_fn is answers


def test_a_file_that_is_trusted_by_its_path(tmp_path, monkeypatch):
  (tmp_path / 'mine_of_record.py').write_text('def schedule(step):\n  return 1.0\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  config = experiment()
  config.task.train.learner.schedule = __import__('mine_of_record').schedule
  write_record(tmp_path, config)
  monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path / 'state'))  # As for a user who did not train the run.
  with pytest.raises(UntrustedError, match=r'task\.train\.learner\.schedule: mine_of_record'):
    _ = read_record(tmp_path).config
  record = read_record(tmp_path, trusted=['mine_of_record.py'])
  assert to_text(record.config.roots()) == to_text(config.roots())


@pytest.mark.parametrize(
  'text',
  [
    '',
    '{',
    '[]',
    '{"format": 1}',
    '{"format": 99}',
    '{"format": 1, "launches": 3, "config": {}, "lost": {}}',
    '{"format": 1, "launches": [{"started": 1, "command": "", "seed": Infinity, "step": 0}], "config": {}, "lost": {}}',
    '["' * 9,
  ],
)
def test_a_record_that_cannot_be_read_is_one_line_with_the_remedy_and_is_written_anew(tmp_path, text):
  (tmp_path / 'run.json').write_text(text)
  (tmp_path / 'config.txt').write_text('')
  remedy = r'name its experiment with --exp, and train then records it; .*config\.txt has its config as text'
  what = 'is empty' if not text else 'has format 99' if '99' in text else 'is not (JSON|the record of a run)'
  with pytest.raises(UserError, match=rf'run\.json {what}.*{"" if "99" in text else remedy}$'):
    read_record(tmp_path)
  assert recorded_seed(tmp_path) == 0  # So a run whose record is damaged goes on.
  (told,) = write_record(tmp_path, experiment())
  assert told == f'{tmp_path / "run.json"} could not be read and was written anew; its earlier launches are lost'
  assert len(read_record(tmp_path).launches) == 1


def test_without_a_record_the_message_says_so(tmp_path):
  with pytest.raises(UserError, match=r'has no record of a run .*--exp'):
    read_record(tmp_path)


def test_text_of_a_record_cannot_command_a_terminal(tmp_path):
  write_record(tmp_path, experiment(), command='\x1b]0;title\x07')
  (tmp_path / 'config.txt').write_text('task.name = \x1b[2J\n')
  record = read_record(tmp_path)
  assert '\x1b' not in record.text + record.launches[0].command


def test_training_records_and_a_changed_model_is_refused_by_its_paths(tmp_path, capsys):
  run_train(tiny_run(num_train_steps=2), tmp_path, seed=4)
  (launch,) = read_record(tmp_path).launches
  assert (launch.seed, launch.step, launch.mesh) == (4, 0, {'data': 1})
  capsys.readouterr()

  longer = tiny_run(num_train_steps=3, learner={'learning_rate': 0.01})
  run_train(longer, tmp_path, seed=4)
  out = capsys.readouterr().out
  assert 'task.train.num_train_steps: 2 -> 3' in out
  assert 'task.train.learner.learning_rate: 0.05 -> 0.01' in out
  assert [launch.step for launch in read_record(tmp_path).launches] == [0, 2]

  other = tiny_run(num_train_steps=9, learner={'optimizer': Config(optax.sgd, momentum=0.9), 'ema_decay': 0.9})
  with pytest.raises(CheckpointError, match=r'task\.train\.learner\.optimizer: optax\.adam -> optax\.sgd') as refused:
    run_train(other, tmp_path)
  assert 'num_train_steps' not in str(refused.value)
  assert to_text(read_record(tmp_path).config.task) == to_text(longer.task)  # What was refused is not recorded.


def test_the_config_of_a_record_builds_the_model(tmp_path):
  write_record(tmp_path, tiny_run())
  record = read_record(tmp_path)
  assert isinstance(record.config.task.instantiate().model, TinyModel)
  assert json.loads((tmp_path / 'run.json').read_text())['format'] == 1


@pytest.mark.parametrize('data', [b'', b'[]', b'{"launches": []}', b'{"launches": [{"started": 1%s}]}' % (b'0' * 400)])
def test_a_record_that_does_not_say_when_its_run_was_started(data):
  assert first_launch(data) is None
