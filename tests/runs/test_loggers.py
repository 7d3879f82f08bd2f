"""What else gets the metrics of a run: Weights & Biases, MLflow, and loggers of a user's own."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import numpy as np
import pytest
from tiny_runs import tiny_run

from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.config.text import to_text
from praxis_lite.common.errors import ConfigError
from praxis_lite.runs import AimLogger, Logger, MlflowLogger, PrometheusLogger, WandbLogger, run_train
from praxis_lite.runs.loggers.base import LoggedRun
from praxis_lite.runs.loggers.of_run import LoggersOfRun, build_loggers


class Service:
  """Stands for the module of a service: what was called, with which arguments."""

  def __init__(self, name, monkeypatch):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__getattr__ = lambda method: lambda *args, **named: self.call(method, args, named)
    monkeypatch.setitem(sys.modules, name, module)
    self.calls, self.fails_in = [], None

  def call(self, method, args, named):
    self.calls.append((method, args, named))
    if method == self.fails_in:
      raise OSError('no network\nand more')
    return types.SimpleNamespace(
      log=lambda *a, **n: self.call('log', a, n), finish=lambda *a, **n: self.call('finish', a, n)
    )


class Recorder(Logger):
  calls = []

  def start(self, run):
    self.calls.append(('start', run.directory.name, run.config['task.name']))

  def log(self, step, metrics):
    self.calls.append((step, dict(metrics)))

  def finish(self, *, failed):
    self.calls.append(('finish', failed))


def metrics_by_step(directory):
  lines = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
  return [(r['step'], {f'{r["split"]}/{name}': value for name, value in r['metrics'].items()}) for r in lines]


def test_a_logger_gets_what_is_written_and_a_resumed_run_goes_on(tmp_path, capsys):
  Recorder.calls.clear()
  config = tiny_run(1, num_train_steps=4, eval_interval_steps=4, log_interval_steps=2)
  config.task.train.loggers = (Config(Recorder),)
  run_train(config, tmp_path / 'run')
  (name, *start), *logged, finish = Recorder.calls
  assert (name, start, finish) == ('start', ['run', repr(config.task.name)], ('finish', False))
  assert logged == metrics_by_step(tmp_path / 'run') and {step for step, _ in logged} == {1, 2, 4}
  Recorder.calls.clear()
  config.task.train.num_train_steps = 6
  run_train(config, tmp_path / 'run')
  assert [call[0] for call in Recorder.calls] == ['start', 5, 6, 6, 'finish']


class Keeper(Recorder):
  """Also gets checkpoints, and lists what is in them; fails for the one of step 6."""

  saved = []

  def save(self, step, folder):
    self.saved.append((step, folder.name, any(folder.iterdir())))
    if step == 6:
      raise OSError('disk full')


def test_a_logger_gets_complete_checkpoints_if_it_asks_for_them(tmp_path, capsys):
  Recorder.calls.clear()
  Keeper.saved.clear()
  config = tiny_run(1, num_train_steps=8, save_interval_steps=3, log_interval_steps=8)
  config.task.train.loggers = (Config(Recorder), Config(Keeper, checkpoints=True))
  run_train(config, tmp_path / 'run')
  assert [step for step, *_ in Keeper.saved] == [3, 6] and all(is_full for *_, is_full in Keeper.saved)
  line = 'Keeper gets no more checkpoints: OSError: disk full; training and metrics go on\n'
  assert capsys.readouterr().out.count(line) == 1
  assert [call for call in Recorder.calls if call[0] == 8]  # Of both loggers.
  assert sum(call[0] == 8 for call in Recorder.calls) % 2 == 0
  assert Recorder.calls[-1] == ('finish', False)


@pytest.mark.slow_cases
@pytest.mark.parametrize('fails_in', ['init', 'log', 'finish'])
def test_a_logger_that_fails_is_told_once_and_training_goes_on(tmp_path, monkeypatch, capsys, fails_in):
  wandb = Service('wandb', monkeypatch)
  wandb.fails_in = fails_in
  config = tiny_run(1, num_train_steps=4, log_interval_steps=1)
  config.task.train.loggers = ('wandb', Config(Recorder))
  Recorder.calls.clear()
  assert run_train(config, tmp_path / 'run').step == 4
  line = 'WandbLogger gets no more metrics: OSError: no network; training goes on without it\n'
  assert capsys.readouterr().out.count(line) == 1
  assert len(metrics_by_step(tmp_path / 'run')) == len(Recorder.calls) - 2
  assert sum(method == fails_in for method, *_ in wandb.calls) == 1


def logged(logger, directory, failed=False):
  directory.mkdir(parents=True, exist_ok=True)
  (directory / 'run.json').write_text('{"launches": [{"started": 12.5}]}')
  (directory / 'config.txt').write_text(to_text({'task': Config(dict, api_key='secret', steps=3)}))
  try:
    with LoggersOfRun([logger], directory, pytest.fail) as loggers:
      loggers.log(2, 'train', {'loss': 0.5})
      assert not failed
  except AssertionError:
    pass


def test_weights_and_biases_get_the_run_and_its_metrics(tmp_path, monkeypatch):
  wandb = Service('wandb', monkeypatch)
  logged(WandbLogger(entity='we'), tmp_path / 'curves' / '1', failed=True)
  init, log, finish = wandb.calls
  assert init[2] | {'config': None} == {
    **{'project': 'curves', 'entity': 'we', 'name': '1', 'id': '1-30d4', 'resume': 'allow', 'config': None}
  }
  assert init[2]['config']['task.steps'] == '3' and 'secret' not in str(init[2]['config'])
  assert log == ('log', ({'train/loss': 0.5},), {'step': 2})
  assert finish == ('finish', (), {'exit_code': 1})


@pytest.mark.parametrize('is_resumed', [False, True])
def test_mlflow_gets_the_run_and_its_metrics(tmp_path, monkeypatch, is_resumed):
  mlflow = Service('mlflow', monkeypatch)
  found = [types.SimpleNamespace(info=types.SimpleNamespace(run_id='abc'))] if is_resumed else []
  sys.modules['mlflow'].search_runs = lambda **named: found
  logged(MlflowLogger(), tmp_path / 'curves' / '1')
  experiment, start, text, log, end = mlflow.calls
  assert experiment == ('set_experiment', ('curves',), {})
  named = {'run_id': 'abc'} if is_resumed else {'run_name': '1', 'tags': {'praxis_lite': '1-30d4'}}
  assert start == ('start_run', (), named)
  assert 'task.steps = 3\n' in text[1][0] and 'secret' not in text[1][0]
  assert log == ('log_metrics', ({'train/loss': 0.5},), {'step': 2})
  assert end == ('end_run', ('FINISHED',), {})


WRONG = {
  'misspelled': (('wandbb',), r"^task\.train\.loggers\[0\]: expected .*, got 'wandbb'\. Did you mean 'wandb'\? .*"),
  'a path': (('my_log.Csv',), r"got 'my_log\.Csv'\. Loggers of your own are set in Python, as in config\.task\."),
  'no logger': ((Config(dict),), r'^task\.train\.loggers\[0\]: expected the config of a Logger, got that of dict$'),
  'the class of a logger': ((MlflowLogger,), r'as in Config\(MlflowLogger\); got <class .*MlflowLogger'),
  'a logger': (
    (MlflowLogger(),),
    r'^task\.train\.loggers\[0\]: expected a name, .*, as in Config\(MlflowLogger\); got ',
  ),
  'a number': ((5,), r'as in Config\(MyLogger\); got 5$'),
  'no checkpoints': (
    (Config(PrometheusLogger, checkpoints=True),),
    r'^task\.train\.loggers\[0\]\.checkpoints = True: PrometheusLogger takes no checkpoints; leave it out$',
  ),
  'no folder': (
    (Config(PrometheusLogger, folder='/nothing/there'),),
    r'^task\.train\.loggers\[0\]\.folder: /nothing/there is not a directory; make it, or name',
  ),
  'not installed': (
    ('tensorboard', 'mlflow'),
    r'^task\.train\.loggers\[1\]: mlflow is not installed; pip',
  ),
}


@pytest.mark.parametrize(('entries', 'message'), WRONG.values(), ids=WRONG)
def test_a_logger_that_cannot_be_is_told_before_anything_is_written(tmp_path, monkeypatch, entries, message):
  monkeypatch.setitem(sys.modules, 'mlflow', None)  # As if it were not installed.
  with pytest.raises(ConfigError, match=message):
    build_loggers(entries)
  config = tiny_run(1)
  config.task.train.loggers = entries
  with pytest.raises(ConfigError, match=message):
    run_train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('command', ['train', 'sweep'])
def test_the_command_line_names_loggers(tmp_path, capsys, monkeypatch, command):
  monkeypatch.setitem(sys.modules, 'mlflow', None)
  sets = ['--set=task.train.num_train_steps=1,2'] if command == 'sweep' else []
  run = [command, '--exp=lm.SyntheticLmTiny', f'--job_log_dir={tmp_path / "run"}', *sets]
  assert main([*run, '--track=mlflow']) == 2
  assert (
    "task.train.loggers[0]: mlflow is not installed; pip install 'praxis_lite[mlflow]'\n" in capsys.readouterr().err
  )
  assert not (tmp_path / 'run').exists()


LABELS = {'run': 'a "b"\\', 'id': 'b-1'}


def test_prometheus_writes_into_a_folder_of_the_home_directory(tmp_path, monkeypatch):
  (tmp_path / 'x').mkdir()
  monkeypatch.setenv('HOME', str(tmp_path))
  (logger,) = build_loggers([Config(PrometheusLogger, folder='~/x')])
  for identity in ('1-a', '1-b'):  # Two runs in directories of the same name.
    logger.start(LoggedRun(tmp_path / '1', identity, {}))
    logger.log(3, {'train/loss': 2.0})
    text = (tmp_path / 'x' / f'praxis_lite_{identity}.prom').read_text()
    assert f'praxis_lite_metric{{run="1",id="{identity}",name="train/loss"}} 2.0\n' in text


def test_an_artifact_of_weights_and_biases_has_a_name_that_it_takes(tmp_path, monkeypatch):
  wandb = Service('wandb', monkeypatch)
  logger = WandbLogger(checkpoints=True)
  logger._run = types.SimpleNamespace(id='my run=ä-30d4', log_artifact=lambda *args, **named: None)
  sys.modules['wandb'].Artifact = lambda name, **named: wandb.calls.append(name) or types.SimpleNamespace(add_dir=str)
  logger.save(3, tmp_path)
  assert wandb.calls == ['checkpoint-my-run---30d4']


@pytest.mark.parametrize('known', [None, '', 'abc\n'])
def test_aim_goes_on_with_the_run_whose_name_is_kept(tmp_path, monkeypatch, known):
  aim = Service('aim', monkeypatch)

  class Run(dict):
    def __init__(self, name, *, force_resume, **settings):
      aim.calls.append((name, force_resume))
      self.hash = 'new'

  sys.modules['aim'].Run = Run
  if known is not None:
    (tmp_path / 'aim_run.txt').write_text(known)
  AimLogger().start(LoggedRun(tmp_path, '1-a', {}))
  assert aim.calls == [('abc', True) if known else (None, False)]
  assert (tmp_path / 'aim_run.txt').read_text() == 'new\n'


def test_prometheus_reads_the_last_metrics_from_a_file(tmp_path):
  parser = pytest.importorskip('prometheus_client.parser')
  text_string_to_metric_families = parser.text_string_to_metric_families

  def samples(file):
    families = text_string_to_metric_families(file.read_text())
    return {(s.name, s.labels.get('name')): s.value for family in families for s in family.samples}

  logger = PrometheusLogger(folder=str(tmp_path))
  logger.start(LoggedRun(tmp_path / 'a "b"\\', 'b-1', {}))
  logger.log(10, {'train/loss': 2.5, 'train/x': float('nan')})
  logger.log(12, {'eval/valid/loss': float('-inf'), 'train/loss': 1})
  file = tmp_path / 'praxis_lite_b-1.prom'
  found = samples(file)
  assert found['praxis_lite_step', None] == 12 and found['praxis_lite_ended', None] == 0
  assert found['praxis_lite_metric', 'train/loss'] == 1 and found['praxis_lite_metric', 'eval/valid/loss'] == -np.inf
  assert np.isnan(found['praxis_lite_metric', 'train/x'])
  assert next(iter(text_string_to_metric_families(file.read_text()))).samples[0].labels == LABELS
  logger.finish(failed=True)
  assert samples(file)['praxis_lite_ended', None] == 2
  assert [path.name for path in tmp_path.iterdir()] == [file.name]
  (built,) = build_loggers(['prometheus'])
  built.start(LoggedRun(tmp_path, 'b-1', {}))
  built.log(1, {})
  assert samples(tmp_path / 'metrics.prom')['praxis_lite_step', None] == 1
