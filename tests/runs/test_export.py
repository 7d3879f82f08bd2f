"""Exported models compute what the model does, in a process that cannot import praxis_lite."""

import json
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny_runs import examples, tiny_run

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.layers.blockwise import blockwise_attention
from praxis_lite.layers.chunked_loss import auto_chunk_size
from praxis_lite.layers.masks import Causal
from praxis_lite.models.base import BaseModel
from praxis_lite.runs import exported
from praxis_lite.runs.export import ExportSettings, _forward_program
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.run import _mesh_for
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.experiment import ExperimentConfig, configure
from praxis_lite.training.state import initialize_train_state

P, M = 8, 5  # Length of prompts; tokens to decode.

LOAD_AND_RUN = """
import json, re, sys
sys.modules['praxis_lite'] = None  # Importing it fails.
import jax, numpy as np, os
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'
import tensorflow as tf


class ForJax:
  def __init__(self, folder):
    signature = json.load(open(f'{folder}/signature.json'))
    stored = np.load(f'{folder}/variables.npz')
    self.variables = {n: stored[n].view(jax.numpy.dtype(v['dtype'])) for n, v in signature['variables'].items()}
    self.programs = {
      n: jax.jit(jax.export.deserialize(open(f'{folder}/{n}.stablehlo', 'rb').read()).call)
      for n in signature['programs']
    }

  def __call__(self, name, inputs):
    return {n: np.asarray(x) for n, x in self.programs[name](self.variables, inputs).items()}


class ForTensorFlow:
  def __init__(self, folder):
    self.model = tf.saved_model.load(f'{folder}/saved_model')

  def __call__(self, name, inputs):
    outputs = self.model.signatures[name](**{n: tf.constant(x) for n, x in inputs.items()})
    return {n: x.numpy() for n, x in outputs.items()}


def decoded(run, ids, lengths, tokens):
  out = run('prefill', {'ids': ids, 'lengths': lengths})
  chosen, logits = [], [out['logits']]
  for i in range(tokens):
    chosen.append(np.argmax(out['logits'], -1).astype(np.int32))
    if i < tokens - 1:
      caches = {n: x for n, x in out.items() if n != 'logits'}
      out = run('decode_step', {'ids': chosen[-1], 'positions': (lengths + i).astype(np.int32), **caches})
      logits.append(out['logits'])
  return np.stack(chosen, 1), np.stack(logits, 1)


root, given, results = sys.argv[1], np.load(f'{sys.argv[1]}/given.npz'), {}
for name, loader in (('jax', ForJax), ('tf', ForTensorFlow)):
  forward = loader(f'{root}/forward')
  for rows in (1, 5):
    results[f'{name}_forward_{rows}'] = forward('forward', {'x': given['x'][:rows]})['predictions']
  if name == 'tf':
    results['tf_serving'] = forward('serving_default', {'x': given['x']})['predictions']
  results[f'{name}_logits'] = loader(f'{root}/lm')('forward', {'ids': given['text']})['logits']
  results[f'{name}_tokens'], results[f'{name}_each'] = decoded(
    loader(f'{root}/decode'), given['ids'], given['lengths'], int(given['tokens'])
  )
os.chdir(f'{root}/forward')
for block in re.findall(r'^```python\\n(.*?)^```', open('README.md').read(), re.M | re.S):
  exec(block, {})  # The README says how, and what it says runs.
np.savez(f'{root}/results.npz', **results)
"""


def loaded(config, devices=1, seed=0):
  """A model with first values, as `load` returns it."""
  task = config.task.instantiate()
  tasks = TaskOnMesh(task, _mesh_for(task, (devices,)))
  state = tasks.layout.to_mesh(initialize_train_state(task, jax.random.key(seed)))
  return TrainedModel(config, tasks, state.mdl_vars, state.step)


@pytest.fixture(scope='module')
def regression():
  config = tiny_run()
  config.task.model.set(dtype='bfloat16', fprop_dtype='float32')
  return loaded(config, devices=8)


@pytest.fixture(scope='module')
def lm(tmp_path_factory):
  path = tmp_path_factory.mktemp('data') / 'text.txt'
  path.write_text('def main():\n  return 1\n' * 200)
  config = configure(StdlibLmTiny)
  for dataset in config.datasets:
    dataset.path = str(path)
  return loaded(config)


@pytest.mark.slow
def test_programs_of_both_kinds_compute_elsewhere_what_the_model_computes(tmp_path, regression, lm, run_python):
  regression.export(tmp_path / 'forward')
  lm.export(tmp_path / 'lm')
  lm.export(tmp_path / 'decode', 'decode', prompt_length=P, max_tokens=M)
  x = examples(5, 3)['x']
  text = np.random.default_rng(0).integers(0, 256, (3, 32), np.int32)
  lengths = np.array([3, 8, 1], np.int32)
  given = {'x': x, 'text': text, 'ids': text[:, :P], 'lengths': lengths, 'tokens': M}
  np.savez(tmp_path / 'given.npz', **given)
  process = run_python(LOAD_AND_RUN, str(tmp_path), cwd=tmp_path, warm=False)
  assert process.wait() == 0, process.communicate()[1]
  results = np.load(tmp_path / 'results.npz')

  prompts = [row[:length].tolist() for row, length in zip(text, lengths)]
  tokens = np.array(lm.decode(prompts, temperature=0, max_tokens=M))
  whole = [np.array([prompt + row.tolist()]) for prompt, row in zip(prompts, tokens)]
  each = [lm.predict({'ids': ids})['logits'][0, len(p) - 1 : -1] for ids, p in zip(whole, prompts)]
  close = {'rtol': 1e-5, 'atol': 1e-5}
  for name in ('jax', 'tf'):
    for rows in (1, 5):
      np.testing.assert_allclose(results[f'{name}_forward_{rows}'], regression.predict({'x': x[:rows]}), **close)
    np.testing.assert_allclose(results[f'{name}_logits'], lm.predict({'ids': text})['logits'], **close)
    np.testing.assert_array_equal(results[f'{name}_tokens'], tokens)
    np.testing.assert_allclose(results[f'{name}_each'], np.stack(each), **close)
  np.testing.assert_allclose(results['tf_serving'], regression.predict({'x': x}), **close)

  signature = json.loads((tmp_path / 'decode' / 'signature.json').read_text())
  assert signature['model'] == 'LanguageModel' and set(signature['programs']) == {'prefill', 'decode_step'}
  ids = {'shape': ['batch', P], 'dtype': 'int32'}
  assert signature['programs']['prefill']['inputs'] == {'ids': ids, 'lengths': {'shape': ['batch'], 'dtype': 'int32'}}
  # Labels, and segments that the model ignores, are no inputs.
  forward = json.loads((tmp_path / 'lm' / 'signature.json').read_text())['programs']['forward']
  assert list(forward['inputs']) == ['ids'] and forward['platforms'] == ['cpu', 'cuda', 'tpu']
  variables = json.loads((tmp_path / 'forward' / 'signature.json').read_text())['variables']
  assert variables['w'] == {'shape': [10, 7], 'dtype': 'bfloat16'}


def test_one_format_one_batch_size_and_chosen_inputs(tmp_path, lm):
  batch = {'ids': np.zeros((1, 12), np.int32)}
  out = lm.export(tmp_path / 'new' / 'out', batch=batch, batch_size=3, formats=('stablehlo',), platforms=('cpu',))
  names = ['README.md', 'forward.stablehlo', 'load.py', 'signature.json', 'variables.npz']
  assert sorted(p.name for p in out.iterdir()) == names
  program = jax.export.deserialize((out / 'forward.stablehlo').read_bytes())
  assert [x.shape for x in program.out_avals] == [(3, 12, 256)]
  assert 'tensorflow' not in (out / 'README.md').read_text()
  assert [p.name for p in out.parent.iterdir()] == ['out']  # Nothing else is left behind.


class CountsRows(BaseModel):
  """Its Python needs the number of rows."""

  def compute_predictions(self, batch):
    return batch['x'] / len(batch['x'])


def test_what_cannot_be_exported_is_told_and_nothing_is_written(tmp_path, regression, lm):
  out = tmp_path / 'out'
  told = (
    r"^task.model: TinyModel has no prefill and extend_step, so it cannot be exported as 'decode'; 'forward' exports"
  )
  with pytest.raises(ConfigError, match=told):
    regression.export(out, 'decode')
  with pytest.raises(
    ConfigError, match=r"^what: expected 'forward' or 'decode', got 'foward'.* Did you mean 'forward'"
  ):
    regression.export(out, 'foward')
  with pytest.raises(ConfigError, match=r"^format: expected 'stablehlo' or 'saved_model', got 'onnx'"):
    regression.export(out, formats=('onnx',))
  with pytest.raises(ConfigError, match=r"^platforms: 'gpu' is two platforms here, 'cuda' .* and 'rocm'"):
    regression.export(out, platforms=('gpu',))
  with pytest.raises(ConfigError, match=r'^prompt_length: expected at least 1, got 0'):
    lm.export(out, 'decode', prompt_length=0)
  alike = {'a_b': np.zeros((2, 3)), 'a': {'b': np.zeros((2, 3))}}
  with pytest.raises(ConfigError, match=r"the inputs '(a.b|a_b)' and '(a.b|a_b)' get the same name"):
    _forward_program(None, {}, alike, ExportSettings(batch_size=2))
  odd = tiny_run()
  odd.task.model = type(odd.task)(CountsRows)
  with pytest.raises(
    ConfigError,
    match=r'forward cannot be exported for any batch size on cpu, cuda, tpu \(.*; choose a size, .*--batch_size=8\)$',
  ):
    loaded(odd).export(out)
  assert not out.exists() and not list(tmp_path.iterdir())
  out.mkdir()
  (out / 'mine').write_text('kept')
  with pytest.raises(UserError, match=rf'^out: {re.escape(str(out))} exists and is not an empty directory'):
    regression.export(out)
  with pytest.raises(UserError, match=r'^out: .*mine exists and is not an empty directory'):
    regression.export(out / 'mine')
  assert (out / 'mine').read_text() == 'kept'


def test_shapes_of_text_are_known_without_its_path(lm):
  config = ExperimentConfig(lm.config.task, [dataset.clone(path=REQUIRED) for dataset in lm.config.datasets], [])
  without = TrainedModel(config, lm.tasks, lm.stored_variables, lm.step)
  assert without.batch_struct()['ids'].shape == lm.batch_struct()['ids'].shape
  config.datasets[1].packing = 'unknown'
  with pytest.raises(
    ConfigError, match=r"datasets\[0\]\.path: a value is required .* --set 'datasets\[\*\]\.path=\.\.\.'"
  ):
    without.batch_struct()


def test_layers_that_choose_by_the_number_of_rows_are_exported_for_any_number():
  class Long(BaseModel):
    """Attention in blocks, and the loss of a model of many classes."""

    def setup(self):
      self.create_variable('w', WeightHParams((8, 70_000)))

    def compute_predictions(self, batch):
      x = batch['x']
      size = auto_chunk_size(70_000, x.shape[0] * x.shape[1], ())
      assert isinstance(size, int)
      return blockwise_attention(x, x, x, Causal()) + self.theta.w[0, 0]

  model = Config(Long).instantiate()
  variables = model.init(jax.random.key(0))
  struct = {'x': jax.ShapeDtypeStruct((2, 1024, 6, 4), np.float32)}
  program = _forward_program(model, variables, struct, ExportSettings(formats=('stablehlo',)))
  assert str(program.inputs['x'].shape[0]) == 'batch'


# ---- files that are not of one export


class Doubles(BaseModel):
  """x w."""

  def setup(self):
    self.create_variable('w', WeightHParams((10,)))

  def compute_predictions(self, batch):
    return batch['x'] * self.theta.w


@pytest.fixture(scope='module')
def two_exports(tmp_path_factory):
  """Two folders of one model that differ in the values of its variables, and in what their programs compute."""
  folder = tmp_path_factory.mktemp('exports')
  for seed, name in enumerate(('one', 'other')):
    config = tiny_run()
    config.task.model = type(config.task)(Doubles)
    model = loaded(config, seed=seed)
    model.export(folder / name, formats=('stablehlo',), platforms=('cpu',), batch={'x': np.zeros((1 + seed, 10))})
    with_saved_model = exported.read_signature(folder / name)
    (folder / name / 'saved_model' / 'variables').mkdir(parents=True)
    (folder / name / 'saved_model' / 'variables' / 'index').write_text(f'those of {name}')
    (folder / name / 'signature.json').unlink()
    for other in ('load.py', 'README.md'):
      (folder / name / other).rename(folder / f'{name}-{other}')
    signature = exported.seal_signature({n: x for n, x in with_saved_model.items() if n != 'files'}, folder / name)
    (folder / name / 'signature.json').write_text(json.dumps(signature))
    for other in ('load.py', 'README.md'):
      (folder / f'{name}-{other}').rename(folder / name / other)
  return folder


def read_in_all_ways(folder):
  """What a process says that checks the export, and whether reading it for JAX is refused likewise."""
  done = subprocess.run(
    [sys.executable, '-S', folder / 'load.py'], capture_output=True, text=True, timeout=60, check=False
  )
  try:
    exported.load_for_jax(folder)
    refused = ''
  except exported.MixedExportError as error:
    refused = str(error)
  return done, refused


def test_an_export_is_whole(two_exports):
  done, refused = read_in_all_ways(two_exports / 'one')
  assert (done.returncode, refused) == (0, '') and '3 files, complete and of one export' in done.stdout
  x = np.ones((4, 10), np.float32)
  one, other = (exported.load_for_jax(two_exports / name)['forward']({'x': x}) for name in ('one', 'other'))
  assert not np.array_equal(one['predictions'], other['predictions'])


PARTS = ['variables.npz', 'forward.stablehlo', 'signature.json', 'saved_model/variables/index']


@pytest.mark.parametrize('how', ['mixed', 'flipped', 'cut', 'gone', 'a named pipe', 'a directory'])
@pytest.mark.parametrize('part', PARTS)
def test_parts_of_two_exports_and_changed_files_are_refused_in_one_line(two_exports, tmp_path, part, how):
  folder = tmp_path / 'export'
  shutil.copytree(two_exports / 'one', folder)
  file = folder / part
  data = bytearray(file.read_bytes())
  file.unlink()
  if how == 'mixed':
    shutil.copy(two_exports / 'other' / part, file)
    if file.read_bytes() == data:
      pytest.skip('this part is the same in both')
  elif how in ('flipped', 'cut'):
    data[len(data) // 2] ^= 1
    file.write_bytes(data if how == 'flipped' else data[:-1])
  elif how == 'a named pipe':
    os.mkfifo(file)
  elif how == 'a directory':
    file.mkdir()
  done, refused = read_in_all_ways(folder)
  assert done.returncode == 1 and done.stdout == ''
  assert re.fullmatch(rf'error: {re.escape(str(folder))}/\S+ .*\n', done.stderr), done.stderr
  of_jax = not part.startswith('saved_model')
  assert bool(refused) == of_jax and '\n' not in refused
  with pytest.raises(exported.MixedExportError):
    exported.check_files(folder, '' if of_jax else 'saved_model/')


@pytest.mark.parametrize('text', ['', '[]', '{"files": {}}', '[' * 100_000, '{"seal": 3, "files": {}}', '\0'])
def test_a_signature_that_is_none_is_refused(tmp_path, text):
  (tmp_path / 'signature.json').write_text(text)
  with pytest.raises(exported.MixedExportError, match=r'signature\.json (cannot be read|has no seal|was changed)'):
    exported.check_files(tmp_path)


# ---- programs that XLA would compute wrongly on one device


class Crops(BaseModel):
  """A convolution that crops, and slices of slices that begin past the end."""

  def setup(self):
    self.create_variable('w', WeightHParams((2, 2, 3)))

  def compute_predictions(self, batch):
    found = jax.lax.conv_general_dilated(batch['x'], self.theta.w, (1,), [(-1, 1)], None, None, ('NHC', 'HIO', 'NHC'))

    def two(row, begin):
      row = jax.lax.dynamic_slice_in_dim(row, begin, 4)
      return jax.lax.dynamic_slice_in_dim(row, begin - 2, 2)

    return {'conv': found, 'slice': jax.lax.map(lambda both: two(*both), (batch['x'][:3], batch['begin'][:3]))}


@pytest.mark.parametrize('batch_size', [None, 3])
def test_what_is_exported_is_guarded(tmp_path, batch_size):
  rng = np.random.default_rng(0)
  x, begin = rng.integers(-9, 9, (3, 6, 2)).astype(np.float32), np.array([3, 4, 1], np.int32)
  config = tiny_run()
  config.task.model = type(config.task)(Crops)
  config.datasets[0].arrays = config.datasets[1].arrays = {'x': x, 'begin': begin}
  model = loaded(config)
  out = model.export(tmp_path / 'out', formats=('stablehlo',), platforms=('cpu',), batch_size=batch_size)
  found = exported.load_for_jax(out)['forward']({'x': x, 'begin': begin})
  w = np.asarray(model.variables['w'])
  padded = np.concatenate([x[:, 1:], np.zeros((3, 1, 2))], 1)
  windows = np.stack([padded[:, :-1], padded[:, 1:]], 2)
  np.testing.assert_allclose(found['conv'], np.einsum('bthi,hio->bto', windows, w), rtol=1e-5, atol=1e-5)
  firsts = np.clip(begin, 0, 2)  # 2 and 2 are left where 4 of 6 are taken, then 2 of 4.
  seconds = np.clip(np.where(begin < 2, begin + 2, begin - 2), 0, 2)  # A start below 0 counts from the end.
  rows = [row[a : a + 4][b : b + 2] for row, a, b in zip(x, firsts, seconds)]
  np.testing.assert_array_equal(found['slice'], np.stack(rows))
