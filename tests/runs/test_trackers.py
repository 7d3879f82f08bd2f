"""The trackers themselves, in their offline modes: config, curves, checkpoints, and one run for all launches."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.config.text import to_text
from praxis_lite.runs import AimLogger, CometLogger, MlflowLogger, WandbLogger
from praxis_lite.runs.loggers.of_run import LoggersOfRun

pytestmark = pytest.mark.slow


def need(package):
  extra = package.removesuffix('_ml')
  return pytest.importorskip(package, reason=f"needs {package}: pip install 'praxis_lite[{extra}]'")


def launch(logger, directory, step):
  """A launch of the run in a directory, which logs a metric and saves a checkpoint after a step."""
  folder = directory / 'checkpoints' / str(step)
  (folder / 'state').mkdir(parents=True)
  (folder / 'state' / 'data').write_text(f'weights after {step}')
  (directory / 'run.json').write_text('{"launches": [{"started": 12.5}]}')
  (directory / 'config.txt').write_text(to_text({'task': Config(dict, api_key='secret', steps=3)}))
  with LoggersOfRun([logger()], directory, pytest.fail) as loggers:
    loggers.log(step, 'train', {'loss': 1 / step})
    loggers.save(step, folder)


def launch_twice(logger, directory):
  for step in (2, 4):
    launch(logger, directory, step)


def test_weights_and_biases(tmp_path, monkeypatch):
  need('wandb')
  for name, value in (('MODE', 'offline'), ('DIR', tmp_path), ('DATA_DIR', tmp_path), ('CACHE_DIR', tmp_path)):
    monkeypatch.setenv(f'WANDB_{name}', str(value))
  monkeypatch.setenv('WANDB_SILENT', 'true')
  launch_twice(lambda: WandbLogger(checkpoints=True), tmp_path / 'curves' / '1')
  kept = sorted((tmp_path / 'wandb').glob('offline-run-*-1-30d4/run-1-30d4.wandb'))
  assert kept, list((tmp_path / 'wandb').iterdir())
  data = b''.join(path.read_bytes() for path in (tmp_path / 'wandb').glob('offline-run-*-1-30d4/*.wandb'))
  assert b'train/loss' in data and b'checkpoint-1-30d4' in data and b'task.steps' in data and b'secret' not in data
  staged = [
    path.read_text()
    for path in tmp_path.rglob('*')
    if path.is_file() and path.stat().st_size < 30 and 'staging' in str(path)
  ]
  assert set(staged) >= {'weights after 2', 'weights after 4'}


def test_mlflow(tmp_path, monkeypatch):
  mlflow = need('mlflow')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'sqlite:///{tmp_path / "mlflow.db"}')
  monkeypatch.chdir(tmp_path)  # Where artifacts go.
  mlflow.set_tracking_uri(f'sqlite:///{tmp_path / "mlflow.db"}')
  launch_twice(lambda: MlflowLogger(checkpoints=True), tmp_path / 'curves' / '1')
  (run,) = mlflow.search_runs(experiment_names=['curves'], output_format='list')
  assert run.info.run_name == '1' and run.data.tags['praxis_lite'] == '1-30d4' and run.info.status == 'FINISHED'
  curve = mlflow.MlflowClient().get_metric_history(run.info.run_id, 'train/loss')
  assert [(point.step, point.value) for point in curve] == [(2, 0.5), (4, 0.25)]
  assert 'task.steps = 3' in mlflow.artifacts.load_text(f'{run.info.artifact_uri}/config.txt')
  for step in (2, 4):
    path = f'{run.info.artifact_uri}/checkpoints/{step}/state/data'
    assert mlflow.artifacts.load_text(path) == f'weights after {step}'


AIM_READER = """
import json, sys
import aim
from aim.sdk.index_manager import RepoIndexManager
repo = aim.Repo.from_path(sys.argv[1])
(name,) = repo.list_all_runs()
RepoIndexManager.get_index_manager(repo).index(name)  # As `aim up` does.
run = aim.Run(name, repo=repo, read_only=True)
(metric,) = run.metrics()
curve = sorted(metric.dataframe()[['step', 'value']].values.tolist())
print(json.dumps([run.name, run.experiment, run['praxis_lite'], run['config'], metric.name, curve]))
"""


def test_aim(tmp_path):
  need('aim')
  launch_twice(lambda: AimLogger(repo=str(tmp_path / 'repo'), checkpoints=True), tmp_path / 'curves' / '1')
  reader = [sys.executable, '-c', AIM_READER, str(tmp_path / 'repo')]
  out = subprocess.run(reader, capture_output=True, text=True, timeout=120, check=True).stdout
  name, experiment, id_, config, metric, curve = json.loads(out.splitlines()[-1])
  assert (name, experiment, id_) == ('1', 'curves', '1-30d4')
  assert config['task.steps'] == '3' and 'secret' not in str(config)
  assert (metric, curve) == ('train/loss', [[2, 0.5], [4, 0.25]])
  kept = [path.read_text() for path in (tmp_path / 'curves' / '1' / 'aim-artifacts').rglob('*') if path.is_file()]
  assert sorted(kept) == ['weights after 2', 'weights after 4']


def test_comet(tmp_path):
  need('comet_ml')
  folder = tmp_path / 'offline'
  launch_twice(lambda: CometLogger(offline_directory=str(folder), checkpoints=True), tmp_path / 'curves' / '1')
  archives = [zipfile.ZipFile(path) for path in sorted(folder.glob('*.zip'))]
  assert len(archives) == 2  # `comet upload` sends both to the same run.
  lines = [[json.loads(line) for line in archive.read('messages.json').splitlines()] for archive in archives]
  kept = [json.loads(archive.read('experiment.json')) for archive in archives]
  assert kept[0]['offline_id'] == kept[1]['offline_id']
  text = str(lines)
  assert 'train/loss' in text and 'task.steps' in text and 'secret' not in text and 'checkpoint-4' in text
  files = [archive.read(name) for archive in archives for name in archive.namelist()]
  assert {b'weights after 2', b'weights after 4'} <= set(files)
