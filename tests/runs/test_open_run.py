"""Runs from Python: what a run directory says, and its model on one device or on a mesh."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny_runs import INPUTS, examples, expected_loss, tiny_run

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, ShardingError, UserError
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.inputs import ArrayInput
from praxis_lite.runs import run_eval, run_train
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.runs.prompts import check_ids
from praxis_lite.training.experiment import configure

pytestmark = pytest.mark.usefixtures('shared_programs')


@pytest.fixture(scope='module')
def tiny(shared_programs, tmp_path_factory):
  """A run of a regression task on 8 devices, with moving averages, and its config."""
  directory = tmp_path_factory.mktemp('tiny')
  config = tiny_run(8, learner={'ema_decay': 0.5}, log_interval_steps=5, save_interval_steps=10, eval_interval_steps=10)
  result = run_train(config, directory)
  return directory, config, result


@pytest.fixture(scope='module')
def run(tiny):
  directory, config, _ = tiny
  return praxis_lite.open_run(directory, config)


@pytest.fixture(scope='module')
def model(run):
  return run.load()


@pytest.fixture(scope='module')
def lm(shared_programs, tmp_path_factory):
  """A run of a language model, which its directory describes."""
  directory = tmp_path_factory.mktemp('lm')
  (directory / 'text.txt').write_text('def main():\n  return 1\n' * 200)
  config = configure(StdlibLmTiny)
  for dataset in config.datasets:
    dataset.path = str(directory / 'text.txt')
  config.task.train.set(num_train_steps=40, log_interval_steps=40)
  run_train(config, directory / 'run')
  return praxis_lite.open_run(directory / 'run')


def test_importing_and_finding_open_run_loads_neither_orbax_nor_tensorflow():
  code = """
import sys, praxis_lite
assert 'jax' not in sys.modules
praxis_lite.open_run
assert not {m.partition('.')[0] for m in sys.modules} & {'orbax', 'tensorflow'}
"""
  subprocess.run([sys.executable, '-c', code], check=True)


# -------------------------------------------------------------------- the run


def test_a_run_says_its_checkpoints_and_metrics(tiny, run):
  directory, _, result = tiny
  assert run.checkpoints.steps == [10, 20] and run.checkpoints.latest == 20 and run.checkpoints.best is None
  assert repr(run) == f'<run {directory}, checkpoints of steps [10, 20]>'
  table = run.metrics
  assert list(table.steps) == [1, 5, 10, 15, 20]
  curve = table.curve('eval/valid/loss')
  assert list(curve.steps) == [10, 20] and curve.values[-1] == result.metrics['eval/valid']['loss']
  column = table['eval/valid/loss']
  assert list(np.isnan(column)) == [True, True, False, True, False] and column[-1] == table.last()['eval/valid/loss']
  assert list(table.curve('train/loss').steps) == [1, 5, 10, 15, 20]
  assert 'eval/valid/loss' in repr(table) and '2 values' in repr(table)
  with pytest.raises(KeyError, match=r"there is no metric 'eval/valid/los'\. Did you mean 'eval/valid/loss'"):
    table['eval/valid/los']


def test_a_table_keeps_what_was_not_finite_and_skips_a_line_that_is_being_written(tmp_path):
  lines = [{'step': 1, 'split': 'train', 'metrics': {'loss': None}}, {'step': 2, 'split': 'train', 'metrics': {'a': 1}}]
  (tmp_path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines) + '{"step": 3, "spl')
  table = praxis_lite.open_run(tmp_path).metrics
  assert list(table.steps) == [1, 2] and list(table) == ['train/a', 'train/loss']
  assert table.curve('train/loss').steps == [1] and np.isnan(table.curve('train/loss').values[0])
  (tmp_path / 'empty').mkdir()
  assert len(praxis_lite.open_run(tmp_path / 'empty').metrics) == 0


def test_a_run_that_records_its_config_needs_no_experiment(lm):
  assert lm.config.task.train.num_train_steps == 40
  assert lm.record.launches[-1].step == 0
  assert lm.load().step == 40


# -------------------------------------------------------------------- its model


def test_variables_have_true_shapes_whatever_the_mesh(tiny, run, model):
  _, _, result = tiny
  expected = np.asarray(result.state.ema_vars['w'])[:INPUTS]
  for loaded in (model, run.load(mesh=(8,)), run.load(mesh=jax.make_mesh((3,), ('data',), devices=jax.devices()[:3]))):
    assert jax.tree.map(np.shape, loaded.variables) == {'w': (10, 7), 'v': (7,)}
    np.testing.assert_array_equal(loaded.variables['w'], expected)
  trained = run.load(ema=False).variables['w']
  np.testing.assert_array_equal(trained, np.asarray(result.state.mdl_vars['w'])[:INPUTS])
  assert not np.array_equal(run.load(step=10).variables['w'], expected)


def test_evaluate_is_what_eval_prints(tiny, run, model):
  directory, config, result = tiny
  expected = expected_loss(model.variables, 33, 1)
  data = config.datasets[1]
  for dataset in ('valid', 1, -1, data, data.instantiate(), examples(33, 1)):
    np.testing.assert_allclose(model.evaluate(dataset)['loss'], expected, rtol=1e-5)
  np.testing.assert_allclose(run.load(mesh=(3,)).evaluate('valid')['loss'], expected, rtol=1e-5)
  printed = run_eval(config, directory)['eval/valid']['loss']
  np.testing.assert_allclose([printed, result.metrics['eval/valid']['loss']], expected, rtol=1e-5)
  # Training data is read once, in order, and without the noise of training.
  np.testing.assert_allclose(model.evaluate('train')['loss'], expected_loss(model.variables, 50, 0), rtol=1e-5)


def test_predict_takes_batches_of_any_size_and_needs_no_labels(run, model):
  x = examples(33, 1)['x']
  w, v = model.variables['w'], model.variables['v']
  for loaded in (model, run.load(mesh=(8,)), run.load(mesh=(3,))):
    for count in (7, 3, 1, 33):
      expected = np.tanh(x[:count] @ w) @ v
      predicted = loaded.predict({'x': x[:count].astype(np.float64)})
      assert isinstance(predicted, np.ndarray) and predicted.shape == (count,)
      np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-6)
  (compiled,) = (sizes for kind, sizes in model._sizes.items() if "'x'" in kind and "'y'" not in kind)
  assert compiled == [7, 33]  # 3 and 1 ran in the program for 7.


def test_per_example_outputs_decoding_a_batch_and_the_pure_call_agree(model):
  batch = examples(5, 1)
  predicted = model.predict(batch)
  np.testing.assert_allclose(
    model.evaluate_examples(batch)['errors'], (predicted - batch['y']) ** 2, rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(model.decode(batch)['y'], predicted, rtol=1e-5)
  alone, _ = model.layer.apply(model.variables, batch, method='predict', do_eval=True)
  np.testing.assert_allclose(alone, predicted, rtol=1e-5)


def test_ids_that_are_not_in_the_vocabulary_are_told_before_anything_is_compiled(lm):
  model = lm.load()
  size = model.layer.lm.vocab_size
  with pytest.raises(DataError, match=rf'^ids: {size}, at position 1 of row 1, is not in .* ids are 0 to {size - 1};'):
    model.decode([[1], [2, size]])
  with pytest.raises(DataError, match=r'^ids: -1, at position 0 of row 0, is not'):
    model.predict({'ids': np.array([[-1, 2]])})
  with pytest.raises(DataError, match=r'^ids: \d+, at position 0 of row 0, is not'):
    model.evaluate_examples({'ids': np.array([[size, 2]]), 'labels': np.array([[1, 2]])})
  prompts = {'ids': np.array([[1, -7]]), 'prompt_lengths': np.array([1]), 'weights': np.ones(1)}
  check_ids(prompts, size)
  check_ids({'ids': np.array([[-1, 2]]), 'weights': np.array([[0, 1]])}, size)


def test_texts_in_and_texts_out(lm):
  model = lm.load()
  texts = model.decode(['def ', 'class A'], temperature=0.7, max_tokens=6)
  assert len(texts) == 2 and all(isinstance(text, str) for text in texts)
  assert model.decode(['def ', 'class A'], temperature=0.7, max_tokens=6) == texts
  assert model.decode(['def ', 'class A'], temperature=0.7, max_tokens=6, seed=1) != texts
  ids = [list(b'def '), list(b'class A')]
  tokens = model.decode(ids, temperature=0, max_tokens=6)
  assert [len(row) for row in tokens] == [6, 6]
  # Greedy decoding is the likeliest token after each prefix; what is after it makes no difference.
  whole = [prompt + row for prompt, row in zip(ids, tokens)]
  logits = model.predict({'ids': np.array([row + [0] * (13 - len(row)) for row in whole])})['logits']
  for prompt, row, after in zip(ids, tokens, np.argmax(logits, -1)):
    assert row == after[len(prompt) - 1 :][:6].tolist()
  first = bytes(tokens[0][:1]).decode()
  assert model.decode(ids, temperature=0, max_tokens=6, stop=[first])[0] == tokens[0][:1]
  # Other lengths take the same program, and change nothing.
  programs = len(model._tasks_by_sampler)
  assert model.decode(ids, temperature=0, max_tokens=3) == [row[:3] for row in tokens]
  longer = model.decode([ids[0] + tokens[0][:5]], temperature=0, max_tokens=1)
  assert longer == [tokens[0][5:6]]
  assert len(model._tasks_by_sampler) == programs
  # The command line does the same.
  config = lm.config
  config.task.model.decoder_tpl.set(temperature=0, max_decode_steps=6)
  assert decode_prompts(config, lm.directory, ids) == tokens


# -------------------------------------------------------------------- mistakes


def open_beside(run, name):
  return praxis_lite.open_run(run.directory / name)


def mistakes():
  yield lambda run, model: run.load(step=7), CheckpointError, r'there is no checkpoint of step 7 in .*; there are \[10'
  yield lambda run, model: run.load(mesh=(2, 2)), ShardingError, r'has 2 sizes, but mesh_axis_names'
  yield lambda run, model: run.load(mesh=2), ShardingError, r'^load: mesh = 2: expected the size .*, such as \(2,\)'
  wrong = jax.make_mesh((2,), ('mdl',), devices=jax.devices()[:2])
  told = r"^load: the mesh has the axes \('mdl',\); the axes of the task are \('data',\)"
  yield lambda run, model: run.load(mesh=wrong), ShardingError, told
  told = r"^evaluate: there is no dataset 'val'. Did you mean 'valid'\? There are: 'train', 'valid'"
  yield lambda run, model: model.evaluate('val'), ConfigError, told
  yield lambda run, model: model.evaluate(2), ConfigError, r'^evaluate: there is no dataset 2'
  endless = Config(ArrayInput, name='own', arrays=examples(9, 0), batch_size=3, is_training=True)
  yield lambda run, model: model.evaluate(endless.instantiate()), ConfigError, r'^evaluate: own is endless'
  yield lambda run, model: model.evaluate(None), ConfigError, r'^evaluate: expected a dataset, got NoneType'
  yield lambda run, model: model.decode('def'), UserError, r"expected a list of prompts, got one text; pass \['def'\]"
  yield lambda run, model: model.decode(['def']), UserError, r'texts need a dataset with a tokenizer, but there is none'
  yield lambda run, model: model.decode([[1]], top_k=1), ConfigError, r'^prompt needs a language model'
  yield lambda run, model: model.decode([]), ConfigError, r'^there are no prompts'
  yield lambda run, model: model.decode([b'def']), DataError, r"^a prompt is bytes; expected a text, such as 'def', or"
  yield lambda run, model: model.decode([[0.5, 1.7]]), DataError, r'^a prompt is \[0.5, 1.7\]; expected a list of'
  yield lambda run, model: model.decode([[[1, 2]]]), DataError, r'^a prompt is \[\[1, 2\]\]; expected a list of'
  yield lambda run, model: model.export('x', formats='stablehlo'), ConfigError, r"^format: expected a tuple, .*lo',\)"
  yield lambda run, model: open_beside(run, '..'), UserError, 'is not a run; the runs below it are '
  yield lambda run, model: open_beside(run, 'checkpoints'), UserError, 'is not a run; it is a part of the run '
  yield lambda run, model: model.predict({'x': np.zeros((0, 10))}), DataError, r'^batch: there are no examples'
  yield lambda run, model: model.predict(np.zeros((2, 10))), DataError, r'^batch: expected a dict of arrays, got ndarr'


@pytest.mark.parametrize('call, error, message', mistakes())
def test_a_mistake_is_one_clear_line(run, model, call, error, message):
  with pytest.raises(error, match=message):
    call(run, model)


def test_a_directory_that_is_no_run_is_told(tmp_path):
  with pytest.raises(UserError, match=r'there is no run in .*/none: it is not a directory'):
    praxis_lite.open_run(tmp_path / 'none')
  with pytest.raises(UserError, match=r'does not record its config; name its experiment: open_run\(directory, exp='):
    praxis_lite.open_run(tmp_path).load()
  with pytest.raises(CheckpointError, match='there is no checkpoint in'):
    praxis_lite.open_run(tmp_path, StdlibLmTiny).load()
  with pytest.raises(UserError, match='no experiment'):
    praxis_lite.open_run(tmp_path, 'lm.Nope')
