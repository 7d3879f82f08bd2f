"""Runs with taps: their statistics are metrics like others, and an evaluation has those of all of its batches."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import HIDDEN, INPUTS, TinyModel, examples, tiny_run

import praxis_lite
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config, child
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import Layer
from praxis_lite.runs import run_eval, run_train
from praxis_lite.runs.replay import replay_taps
from praxis_lite.sharding.weights import WeightHParams

pytestmark = pytest.mark.usefixtures('shared_programs')


class Hidden(Layer):
  def setup(self):
    self.create_variable('w', WeightHParams((INPUTS, HIDDEN)))

  def __call__(self, x_BD):
    return jnp.maximum(x_BD @ self.theta.w, 0)


class TwoLayers(TinyModel):
  hidden: Hidden = child()

  def setup(self):
    super().setup()
    self.create_child('hidden', Config(Hidden))

  def compute_predictions(self, batch):
    return self.hidden(batch['x']) @ self.theta.v


TAPS = ('hidden:rms,frac_zero,hist', 'hidden.grad:rms', 'grad(v):rms', 'update(hidden.w):ratio')


@pytest.fixture(scope='module')
def trained(shared_programs, tmp_path_factory):
  directory = tmp_path_factory.mktemp('tapped')
  config = tiny_run(1, num_train_steps=4, log_interval_steps=2, eval_interval_steps=4)
  config.task.model = Config(TwoLayers)
  run_train(config, directory, tap=TAPS)
  return directory, config


def test_statistics_are_metrics_of_the_run(trained):
  directory, _ = trained
  lines = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
  training = [line['metrics'] for line in lines if line['split'] == 'train']
  assert len(training) == 3
  for metrics in training:
    assert {
      'hidden/rms',
      'hidden.grad/rms',
      'hidden/frac_zero',
      'grad(v)/rms',
      'update(hidden.w)/ratio',
    } <= metrics.keys()
    assert 0 < metrics['hidden/frac_zero'] < 1
    assert not any(name.startswith('tap:') for name in metrics)
  with pytest.raises(ConfigError, match="there is no statistic 'rmz'"):
    run_train(trained[1], directory / 'other', tap='hidden:rmz')


def test_a_step_that_is_replayed_has_the_statistics_of_the_run(trained, capsys):
  directory, config = trained
  lines = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
  logged = next(line['metrics'] for line in lines if line['split'] == 'train' and line['step'] == 2)
  found = replay_taps(config, directory, 2, 0, TAPS)
  counts = found.pop('hidden/hist')
  out = capsys.readouterr().out
  in_bins = re.search(r'^hidden/hist to (?:-?[\d.e+-]+: \d+(?:, to )?)+$', out, re.MULTILINE)
  assert in_bins and sum(map(int, re.findall(r': (\d+)', in_bins[0]))) == counts.sum() > 0
  assert int(re.search(r'to 0: (\d+)', in_bins[0])[1]) / counts.sum() == pytest.approx(float(found['hidden/frac_zero']))
  assert {name: float(x) for name, x in found.items()} == pytest.approx({name: logged[name] for name in found})
  assert {'hidden.grad/rms', 'update(hidden.w)/ratio'} <= found.keys()
  assert re.search(r'^hidden/rms 0\.\d+$', out, re.MULTILINE)
  with pytest.raises(ConfigError, match='matches no layer that the step calls'):
    replay_taps(config, directory, 2, 0, 'hiden:rms')


def test_an_evaluation_has_the_statistics_of_all_batches(trained, capsys):
  directory, config = trained
  metrics = run_eval(config, directory, tap=['hidden:rms,max'])['eval/valid']
  w = praxis_lite.open_run(directory, config).load().variables['hidden']['w']
  x = np.maximum(examples(33, 1)['x'] @ w, 0)
  np.testing.assert_allclose(metrics['hidden/rms'], np.sqrt(np.mean(x**2)), rtol=1e-5)
  np.testing.assert_allclose(metrics['hidden/max'], x.max(), rtol=1e-5)
  assert '  hidden/max ' in capsys.readouterr().out
  with pytest.raises(ConfigError, match='matches no layer that the step calls'):
    run_eval(config, directory, tap=['hiden:rms'])


def test_the_flag_reaches_the_run(trained, capsys):
  directory, _ = trained
  assert main(['eval', f'--job_log_dir={directory}', '--trust', __file__, '--tap', 'grad(v):rms']) == 2
  assert 'is of a train step' in capsys.readouterr().err
