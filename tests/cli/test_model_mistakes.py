"""Mistakes in a model of one's own: a line with the path, what is wrong and the remedy, before anything is written."""

from __future__ import annotations

import re
import sys

import pytest
from test_bad_input import fails

from praxis_lite.cli.main import main

FILE = """
import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite import BaseExperiment, BaseModel, Config, Layer, SingleTask, WeightHParams
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers import Linear
from praxis_lite.models import weighted_mean


class Scale(Layer):
  dims: int = 6

  def setup(self):
    self.create_variable('s', WeightHParams((self.dims,)))

  def __call__(self, x_BD):
    return x_BD * self.theta.s


class Right(BaseModel):
  def setup(self):
    self.create_child('scale', Config(Scale))
    self.create_child('head', Config(Linear, input_dims=6, output_dims=1))

  def compute_predictions(self, batch):
    return self.head(self.scale(batch['x']))[:, 0]

  def compute_loss(self, predictions, batch):
    error_B = jnp.square(predictions - batch['y'])
    return {'loss': weighted_mean(error_B, batch['weights'])}, {'error': error_B}


class Mine(Right):
MISTAKE


class Experiment(BaseExperiment):
  def datasets(self):
    arrays = {'x': np.ones((8, 6), np.float32), 'y': np.ones(8, np.float32)}
    return [Config(ArrayInput, name='train', arrays=arrays, batch_size=4, is_training=True)]

  def task(self):
    task = Config(SingleTask, model=Config(Mine))
    task.train.set(num_train_steps=2)
    return task
"""

LOSS = 'def compute_loss(self, predictions, batch):'
SETUP = 'def setup(self):'
MISTAKES = {
  'no loss': (
    LOSS,
    "return {'Loss': weighted_mean(predictions, batch['weights'])}, {}",
    r"^task\.model: Mine\.compute_loss: there is no 'loss' among the metrics, Loss\. "
    r"It is what is trained on; add 'loss': weighted_mean\(",
  ),
  'no pair': (
    LOSS,
    "return {**super().compute_loss(predictions, batch)[0], 'mean': predictions.mean()}, {}",
    r"^task\.model: Mine\.compute_loss: the metric 'mean' is a float32 scalar; it must be a pair \(mean, weight\), as",
  ),
  'bare scalar': (
    LOSS,
    'return jnp.mean(predictions)',
    r'^task\.model: Mine\.compute_loss returned a float32 scalar; it must return two dicts, metrics and per-example',
  ),
  'metrics alone': (
    LOSS,
    'return super().compute_loss(predictions, batch)[0]',
    r'^task\.model: Mine\.compute_loss returned a dict of loss; it must return two dicts',
  ),
  'loss of each example': (
    LOSS,
    "return {'loss': (predictions, batch['weights'])}, {}",
    r'^task\.model: Mine\.compute_loss: the loss is float32\[\d\] with a weight of float32\[\d\]; both must be scalars',
  ),
  'scalar beside examples': (
    LOSS,
    "return super().compute_loss(predictions, batch)[0], {'mean': predictions.mean()}",
    r'^task\.model: Mine\.compute_loss: mean is a scalar, .* with the batch as dimension 0; a scalar is a metric$',
  ),
  'no create_child': (
    SETUP,
    'super().setup(); self.other = Config(Scale).instantiate()',
    r"^Mine\.other: Scale was built without create_child, .*; write self\.create_child\('other', Config\(Scale, \.\.\.",
  ),
  'list without create_children': (
    SETUP,
    'super().setup(); self.others = [Config(Scale).instantiate() for _ in range(2)]',
    r'^Mine\.others: Scale was built without create_child, .* or create_children for a list$',
  ),
  'built in the call': (
    'def compute_predictions(self, batch):',
    "return Config(Scale).instantiate()(batch['x'])[:, 0]",
    r'^Scale\.s: the variables .* have no such entry\. If Scale is part of another layer, build it in the setup\(\) of',
  ),
  'layer for a config': (
    SETUP,
    "self.create_child('scale', Config(Scale).instantiate())",
    r'^Mine\.scale: create_child takes the Config of a layer, as in Config\(MyLayer, \.\.\.\), got <Scale ',
  ),
  'no such weight': (
    LOSS,
    'return predictions * self.theta.bias',
    r"^Mine \(Mine\) has no variable 'bias'\. Declare it in setup\(\): self\.create_variable\('bias', WeightHParams\(",
  ),
  'no such child': (
    LOSS,
    'return self.haed(predictions)',
    r"^Mine \(Mine\) has no attribute or child 'haed'\. Did you mean 'head'\? A child is made in setup\(\) by ",
  ),
  'no such entry': (
    LOSS,
    "return super().compute_loss(predictions - batch['labels'], batch)",
    r"^Mine\.compute_loss: the batch has no entry 'labels'; its entries: weights, x, y\. The input has to yield it\. "
    r'\(own\.py:36\)$',
  ),
  'shapes in a layer of the package': (
    'def compute_predictions(self, batch):',
    "return self.head(batch['x'][:, :5])[:, 0]",
    r'^head \(Linear\.__call__\): dot_general requires contracting .*got \(5,\) and \(6,\); .*x \[\d, 5\], '
    r'w \[6, 1\] \(own\.py:36\)$',
  ),
  'shapes in a layer of their own': (
    SETUP,
    "super().setup(); self.create_child('wide', Config(Scale, dims=7))\n"
    "  def compute_predictions(self, batch): return self.wide(batch['x'])[:, 0]",
    r'^wide \(Scale\.__call__\): .*ncompatible shapes for broadcasting: .*; x_BD \[\d, 6\], s \[7\] \(own\.py:18\)$',
  ),
  'weights': (
    LOSS,
    "return {'loss': weighted_mean(predictions[:, None], batch['weights'])}, {}",
    r'^Mine\.compute_loss: weighted_mean: values \(\d, 1\) have weights \(\d,\); each value needs one of its own; '
    r'predictions \[\d\] \(own\.py:36\)$',
  ),
  'rank': (
    LOSS,
    'B, T = predictions.shape',
    r'^Mine\.compute_loss: not enough values to unpack \(expected 2, got 1\); predictions \[\d\] \(own\.py:36\)$',
  ),
  'no method': (
    SETUP,
    'pass\n  compute_predictions = BaseModel.compute_predictions',
    r'^task\.model: Mine has no method compute_predictions\(batch\); define it$',
  ),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
  """Writes a file with a mistake, and returns the flags that train its experiment."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))

  def write(head, body):
    (tmp_path / 'own.py').write_text(FILE.replace('MISTAKE', f'  {head}\n    {body}').lstrip('\n'))
    return '--exp=own.py:Experiment', f'--job_log_dir={tmp_path / "run"}'

  return write


@pytest.mark.parametrize(('head', 'body', 'message'), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_model_is_told_in_a_line_with_its_remedy(capsys, tmp_path, own, head, body, message):
  told = fails(capsys, 'train', *own(head, body))
  assert re.search(message, told), told
  assert not (tmp_path / 'run').exists()


def test_the_traceback_is_printed_on_request(capsys, own):
  flags = own(LOSS, 'return predictions + self.theta.bias')
  assert main(['train', '--nocompilation_cache', *flags, '--traceback']) == 2
  told = capsys.readouterr().err.splitlines()
  assert told[0].startswith('Traceback') and any('own.py", line 36, in compute_loss' in line for line in told)
  assert told[-1].startswith("praxis-lite train: error: Mine (Mine) has no variable 'bias'")


def test_what_is_no_mistake_about_arrays_keeps_its_type(capsys, own):
  flags = own(LOSS, "raise TypeError('mine')")
  with pytest.raises(TypeError, match=r'^mine'):
    main(['train', '--nocompilation_cache', *flags])
