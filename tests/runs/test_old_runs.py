"""Runs that older versions of this package wrote are opened, evaluated, decoded and resumed.

Each archive under `golden/runs` is the directory of a run of four steps: what `praxis-lite train` left at a commit of
November 2026, without its step 2, event files and heartbeats. `lm.SyntheticLmTiny` ran on one device, and
`digits.DigitsMlpSharded` on a mesh of 2 x 2. No test writes them anew: that is the point.
"""

import json
import pathlib
import tarfile

import pytest

import praxis_lite
from praxis_lite.runs import run_train

RUNS = pathlib.Path(__file__).parents[1] / 'golden' / 'runs'
ARCHIVES = [RUNS / f'{name}.tar.gz' for name in ('digits.DigitsMlpSharded', 'lm.SyntheticLmTiny')]


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix('.tar.gz'))
def old_run(request, tmp_path):
  """The directory of an old run, and what its last evaluation said."""
  with tarfile.open(request.param) as archive:
    archive.extractall(tmp_path, filter='data')
  last = json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[-1])
  assert last['split'] == 'eval/validation' and last['step'] == 4
  return tmp_path, last['metrics']


def test_an_old_run_is_evaluated_as_it_was_then(old_run):
  directory, metrics = old_run
  run = praxis_lite.open_run(directory)
  assert list(run.checkpoints.steps) == [4]
  assert not any(run.record.other_defaults)
  model = run.load(mesh=None)
  got = model.evaluate('validation')
  assert got['loss'] == pytest.approx(metrics['loss'], rel=1e-5)
  assert got['accuracy'] == pytest.approx(metrics['accuracy'], rel=1e-5)


def test_an_old_run_is_resumed(old_run, capsys):
  directory, _ = old_run
  config = praxis_lite.open_run(directory).config
  config.task.train.num_train_steps = 6
  result = run_train(config, directory)
  assert result.step == 6 and result.ended_by == 'done'
  _, differs, told = capsys.readouterr().out.partition('the config differs from the recorded one:\n')
  assert differs and 'praxis_lite.' not in told.partition('first step')[0]  # Modules that moved are no difference.
  assert praxis_lite.open_run(directory).checkpoints.latest == 6


def test_an_old_language_model_decodes(tmp_path):
  with tarfile.open(RUNS / 'lm.SyntheticLmTiny.tar.gz') as archive:
    archive.extractall(tmp_path, filter='data')
  model = praxis_lite.open_run(tmp_path).load()
  (tokens,) = model.decode([[1, 2, 3, 4]], max_tokens=4, temperature=0.0)
  assert len(tokens) == 4 and all(0 <= token < 37 for token in tokens)


def test_an_old_run_keeps_the_lowest_of_its_metric_and_says_so(old_run):
  directory, _ = old_run
  record, text = directory / 'run.json', directory / 'config.txt'
  record.write_text(record.read_text().replace('"early_stopping": {', '"best_metric": "accuracy", "early_stopping": {'))
  text.write_text(text.read_text().replace('train.best_metric = None', "train.best_metric = 'accuracy'"))
  run = praxis_lite.open_run(directory)
  assert (run.config.task.train.best_metric, run.config.task.train.best_metric_mode) == ('accuracy', 'min')
  assert run.record.other_defaults.used == {'task.train.best_metric_mode': ("'min'", "'auto'")}
