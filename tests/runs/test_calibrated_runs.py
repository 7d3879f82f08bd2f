"""Weights in few bits that are chosen by data: sums over inputs on meshes, and runs that are made with them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.checkpoints.streamed import StreamedArray, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import leaves, nest, path_name
from praxis_lite.experiments.moe import MoeTiny
from praxis_lite.layers import QuantizedWeights
from praxis_lite.models import dequantize_variables, quantize_weights, transformer_lm
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.calibration import Calibration, calibrate_weights
from praxis_lite.runs.quantized import quantize_run
from praxis_lite.runs.quantized_arrays import dequantize_streamed
from praxis_lite.training.experiment import configure

FEW = Config(QuantizedWeights, format='int2', group_size=4)
MOE = 'lm.transformer.layers.ff'


class InMemory(StreamedArray):
  def __init__(self, array):
    self.array, self.shape, self.dtype = array, array.shape, array.dtype

  def read(self, box):
    return np.array(self.array[box])


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  directory = tmp_path_factory.mktemp('runs') / 'base'
  config = configure(MoeTiny)
  config.task.ici_mesh_shape = (1, 1, 1)
  config.task.train.set(num_train_steps=3, save_interval_steps=3, log_interval_steps=3)
  run_train(config, directory)
  return open_run(directory)


def sums_by_path(run, mesh):
  quantized = quantize_weights(run.config.task.model.clone(), FEW).instantiate()
  found = calibrate_weights(run.load(mesh=mesh), quantized, Calibration('gptq', 2))
  return {path_name(path): weight.inputs for path, weight in found.items()}


def batches(run):
  data = run.config.datasets[0].instantiate(is_training=False)
  return [next(data) for _ in range(2)]


@pytest.mark.slow
def test_sums_over_inputs_are_those_of_the_rows_on_every_mesh(run):
  on_one = sums_by_path(run, (1, 1, 1))
  model = run.load()
  weights = model.variables['lm']['transformer']['layers']['ff']
  rows = {name: [] for name in ('query', 'up', 'down')}
  for batch in batches(run):
    tapped = model.tap(batch, f'{MOE.removesuffix("ff")}attention.query.in', f'{MOE}.in', f'{MOE}.router')
    query, x, logits = tapped.values()
    real = batch['weights'] > 0
    rows['query'].append(query[:, real])
    x, logits = x[:, real], logits[:, real]
    best = np.argsort(-logits, axis=-1)[..., : model.layer.lm.transformer.layers.ff.num_experts_per_token]
    chosen = (best[..., None] == np.arange(logits.shape[-1])).any(2)
    rows['up'].append(chosen[..., None] * x[:, :, None])
    gate, up = (np.einsum('lnd,ledf->lnef', x, weights[name]) for name in ('gate', 'up'))
    rows['down'].append(chosen[..., None] * gate / (1 + np.exp(-gate)) * up)
  for name, of_weight in rows.items():
    x = np.concatenate(of_weight, axis=1).astype(np.float64)
    path = f'{MOE}.{name}' if name != 'query' else 'lm.transformer.layers.attention.query.w'
    expected = {'gram': np.einsum('ln...i,ln...j->l...ij', x, x), 'max_abs': np.abs(x).max(1)}
    for part, value in expected.items():
      np.testing.assert_allclose(on_one[path][part], value, atol=1e-4 * np.abs(value).max(), err_msg=path)
  for mesh in ((1, 3, 1), (2, 2, 2)):
    for path, sums in sums_by_path(run, mesh).items():
      for part, value in sums.items():
        expected = on_one[path][part]
        np.testing.assert_allclose(value, expected, atol=1e-4 * np.abs(expected).max(), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['gptq', 'awq'])
def test_a_run_that_is_made_with_data_is_nearer_to_its_model(run, tmp_path, method):
  batch = batches(run)[0]
  expected = run.load().predict(batch)['logits']
  errors = []
  for name, calibration in (('nearest', None), (method, Calibration(method, 2))):
    lines = quantize_run(run.config, run.directory, tmp_path / name, FEW, calibration=calibration)
    assert 'of variables became' in lines[0]
    errors.append(np.square(open_run(tmp_path / name).load().predict(batch)['logits'] - expected).mean())
  assert errors[1] < errors[0]
  made = open_run(tmp_path / method).load()
  plain = dequantize_variables(made.layer, made.variables)
  variables = leaves(dequantize_streamed(made.layer, nest({p: InMemory(x) for p, x in leaves(made.variables).items()})))
  for path, value in leaves(plain).items():
    np.testing.assert_allclose(variables[path].read(whole_box(value.shape)), value, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('percentile', [90.0, 100.0])
def test_ranges_of_inputs_cover_a_percentage_of_the_data(run, tmp_path, percentile):
  config = dataclasses.replace(run.config, task=run.config.task.clone())
  config.task.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.proj_tpl.matmul = 'int8'
  rule = Config(QuantizedWeights, layers=r'.*\.(query|key|value)')
  with pytest.raises(ConfigError, match='input_range: data decides it'):
    quantize_run(config, run.directory, tmp_path / 'none', rule.clone(input_range=True))
  quantize_run(config, run.directory, tmp_path / 'fixed', rule, calibration=Calibration('nearest', 2, None, percentile))
  model, rows = run.load(), []
  for batch in batches(run):
    (x,) = model.tap(batch, f'{MOE.removesuffix("ff")}attention.query.in').values()
    rows.append(np.abs(x[:, batch['weights'] > 0]))
  rows = np.concatenate(rows, axis=1)
  if percentile < 100:
    rows = rows.astype(jnp.bfloat16).astype(np.float32)
  expected = np.quantile(rows.reshape(len(rows), -1), percentile / 100, axis=1, method='inverted_cdf')
  made = open_run(tmp_path / 'fixed').load()
  found = made.variables['lm']['transformer']['layers']['attention']['key']['w_quantized_input_range']
  np.testing.assert_allclose(found.reshape(-1)[0], expected[0], rtol=1e-6)  # Later layers see rounded inputs.
  np.testing.assert_allclose(found.reshape(-1), expected, rtol=0.05)
  losses = [model.evaluate(0)['loss'] for model in (model, made)]
  np.testing.assert_allclose(losses[1], losses[0], rtol=0.02)


def test_inputs_without_a_range_or_not_finite_are_errors(monkeypatch):
  config = transformer_lm(vocab_size=7, model_dims=8, num_layers=2, num_heads=2, hidden_dims=6, matmul='int8')
  rule = Config(QuantizedWeights, layers=r'.*\.down', input_range=True)
  model = quantize_weights(config, rule).instantiate()
  counts = np.ones((2, 1 << 15))
  counts[1, 0] = 9 * counts.shape[1]  # In the second layer, 90 % of the inputs are 0.
  sums = {'lm.transformer.layers.ff.down.in': {'counts': counts}}
  monkeypatch.setattr('praxis_lite.runs.calibration._sum_over_batches', lambda *_: sums)
  found = calibrate_weights(SimpleNamespace(layer=model), model, Calibration('nearest', 1, None, 95.0))
  assert found.values()
  with pytest.raises(ConfigError, match=r'90 % of the inputs of lm.*down.w are 0, so 80.0 would give them no range'):
    calibrate_weights(SimpleNamespace(layer=model), model, Calibration('nearest', 1, None, 80.0))
  sums['lm.transformer.layers.ff.down.in'] = {'sum_abs': np.array([[1.0, np.inf], [1.0, np.nan]])}
  with pytest.raises(DataError, match=r'the inputs of lm.*down.w have NaN or infinities in the calibration data'):
    calibrate_weights(SimpleNamespace(layer=model), model, Calibration('gptq', 1))


def test_mistakes_are_named_before_anything_is_read(tmp_path):
  config = configure(MoeTiny)
  for rule, calibration, message in (
    (FEW, Calibration('smooth'), 'smooth is for integers with one scale for each output'),
    (Config(QuantizedWeights, format='nf4'), Calibration('smooth'), 'smooth is for integers'),
  ):
    with pytest.raises(ConfigError, match=message):
      quantize_run(config, tmp_path / 'none', tmp_path / 'out', rule, calibration=calibration)
  for calibration, message in (
    (('best',), "method: .*'best'"),
    (('nearest',), 'only for input_percentile'),
    (('gptq', 1, None, 40), 'input_percentile: expected a number above 50'),
    (('smooth', 1, None, 99), 'input_percentile: with smooth, only 100'),
  ):
    with pytest.raises(ConfigError, match=message):
      Calibration(*calibration)
