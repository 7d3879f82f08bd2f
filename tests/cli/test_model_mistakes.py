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
import optax

from praxis_lite import REQUIRED, BaseExperiment, BaseModel, Config, Layer, SingleTask, WeightHParams, child, template
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
PREDICTIONS = 'def compute_predictions(self, batch):'
SETUP = 'def setup(self):'
MISTAKES = {
  'no loss': (
    LOSS,
    "return {'Loss': weighted_mean(predictions, batch['weights'])}, {}",
    r"^task\.model: Mine\.compute_loss: there is no 'loss' among the metrics \(Loss\)\. "
    r"Training minimizes it; add 'loss': weighted_mean\(",
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
    r'^task\.model: Mine\.compute_loss: mean is a float32 scalar; .* with the batch as dimension 0; '
    r'a scalar is a metric$',
  ),
  'no create_child': (
    SETUP,
    'super().setup(); self.other = Config(Scale).instantiate()',
    r"^Mine\.other: Scale was built without create_child, .*; write self\.create_child\('other', Config\(Scale, \.\.\.",
  ),
  'no such field, of a child that is declared': (
    'bend_tpl: Config = template(Scale)\n  bend: Scale = child()\n\n  def setup(self):',
    "super().setup(); self.create_child('bend', self.bend_tpl.clone(dimz=6))",
    r"Scale.* has no field 'dimz'\. Did you mean 'dims'\? .*own\.py:40",
  ),
  'no such field that is set, of a child that is declared': (
    'bend_tpl: Config = template(Scale)\n  bend: Scale = child()\n\n  def setup(self):',
    "super().setup(); self.bend_tpl.dimz = 6; self.create_child('bend', self.bend_tpl)",
    r"Scale.* has no field 'dimz'\. Did you mean 'dims'\? .*own\.py:40",
  ),
  'list without create_children': (
    SETUP,
    'super().setup(); self.others = [Config(Scale).instantiate() for _ in range(2)]',
    r'^Mine\.others: Scale was built without create_child, .* or create_children for a list$',
  ),
  'built in the call': (
    PREDICTIONS,
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
    r"^Mine\.compute_loss: the batch has no entry 'labels'; its entries: weights, x, y\. The input, or the rows given "
    r'to predict, must have it\. \(own\.py:37\)$',
  ),
  'shapes in a layer of the package': (
    PREDICTIONS,
    "return self.head(batch['x'][:, :5])[:, 0]",
    r'^head \(Linear\.__call__\): dot_general requires contracting .*got \(5,\) and \(6,\); .*x \[\d, 5\], '
    r'w \[6, 1\]; head\.input_dims = 5 would fit \(own\.py:37\)$',
  ),
  'shapes in a layer of their own': (
    SETUP,
    "super().setup(); self.create_child('wide', Config(Scale, dims=7))\n"
    "  def compute_predictions(self, batch): return self.wide(batch['x'])[:, 0]",
    r'^wide \(Scale\.__call__\): .*ncompatible .*; x_BD \[\d, 6\], s \[7\]; wide\.dims = 6 would fit \(own\.py:19\)$',
  ),
  'weights': (
    LOSS,
    "return {'loss': weighted_mean(predictions[:, None], batch['weights'])}, {}",
    r'^Mine\.compute_loss: weighted_mean: values \(\d, 1\) have weights \(\d,\); each value needs one of its own; '
    r"predictions \[\d\], batch\['weights'\] \[\d\] \(own\.py:37\)$",
  ),
  'rank': (
    LOSS,
    'B, T = predictions.shape',
    r'^Mine\.compute_loss: not enough values to unpack \(expected 2, got 1\); predictions \[\d\] \(own\.py:37\)$',
  ),
  'no method': (
    SETUP,
    'pass\n  compute_predictions = BaseModel.compute_predictions',
    r'^task\.model: Mine has no method compute_predictions\(batch\); define it$',
  ),
  # What is forgotten, or in the wrong place.
  'no return of predictions': (
    PREDICTIONS,
    'super().compute_predictions(batch)',
    r'^task\.model: Mine\.compute_predictions returned None; does it lack a return\? \(own\.py:36\)$',
  ),
  'no return of a call': (
    SETUP,
    "super().setup(); self.create_child('block', Config(Block))\n"
    "  def compute_predictions(self, batch): return self.head(self.block(batch['x']))[:, 0]\n\n"
    'class Block(Layer):\n'
    '  def __call__(self, x): x + 1',
    r'^block \(Block\.__call__\) returned None; does it lack a return\? \(own\.py:41\)$',
  ),
  'no return of the loss': (
    LOSS,
    'super().compute_loss(predictions, batch)',
    r'^task\.model: Mine\.compute_loss returned None; it must return two dicts',
  ),
  'variable in a call': (
    PREDICTIONS,
    "self.create_variable('w', WeightHParams((3,)))",
    r'^Mine\.w: call create_variable in setup\(\); in a call, use self\.theta\.w$',
  ),
  'child in a call': (
    PREDICTIONS,
    "self.create_child('other', Config(Scale))",
    r'^Mine\.other: call create_child in setup\(\); in a call, use self\.other$',
  ),
  'weight in setup': (
    SETUP,
    'super().setup(); self.scale.theta.s',
    r'^scale is used outside a call; .* In setup\(\) there are no arrays yet$',
  ),
  'no super().setup()': (
    SETUP,
    "self.create_child('other', Config(Scale))",
    r"^Mine \(Mine\) has no attribute or child 'head'\. .*; its setup\(\) may lack super\(\)\.setup\(\) \(own\.py:",
  ),
  'variable as an attribute': (
    PREDICTIONS,
    "return self.scale.s * batch['x'][:, 0]",
    r"^scale \(Scale\): 's' is a variable; read it in a call as self\.theta\.s$",
  ),
  'assigned weight': (
    PREDICTIONS,
    'self.scale.theta.s = 3',
    r"^scale\.s: variables cannot be assigned\. self\.update_var\('s', value\) .*; the others are trained$",
  ),
  'weight as an entry': (
    PREDICTIONS,
    "return self.scale.theta['s']",
    r'^scale: variables are attributes; write self\.theta\.s$',
  ),
  # What is declared.
  'config for a child': (
    SETUP,
    'super().setup(); self.extra = Config(Linear)\n'
    "  def compute_predictions(self, batch): return self.extra(batch['x'])",
    r'^Mine\.compute_predictions: self\.extra is the Config of a layer, not a layer; build it in setup\(\) '
    r"by self\.create_child\('extra', Config\(Linear, \.\.\.\)\) \(own\.py:38\)$",
  ),
  'list of layers called': (
    SETUP,
    "super().setup(); self.create_children('blocks', templates=[Config(Scale)] * 2)\n"
    "  def compute_predictions(self, batch): return self.blocks(batch['x'])",
    r'^Mine\.compute_predictions: self\.blocks is a list; call each of its layers: for layer in self\.blocks',
  ),
  'no __call__': (
    SETUP,
    "self.create_child('block', Config(Layer))\n  def compute_predictions(self, batch): return self.block(batch['x'])",
    r'^Mine\.compute_predictions: Layer has no method __call__; define it, as in def __call__\(self, x\)',
  ),
  'array for a weight': (
    SETUP,
    'self.w = jnp.zeros((6, 1))',
    r"^Mine\.w: a layer holds no arrays; declare a weight by self\.create_variable\('w', WeightHParams\(\(6, 1\)",
  ),
  'dict of layers': (
    SETUP,
    "self.others = {'a': Config(Scale).instantiate()}",
    r'^Mine\.others: Scale was built without create_child',
  ),
  'config of no layer': (
    SETUP,
    "self.create_child('other', Config(jnp.sin))",
    r'^Mine\.other: create_child takes the Config of a layer, as in Config\(MyLayer, \.\.\.\), got that of sin$',
  ),
  'name twice': (
    SETUP,
    "super().setup(); self.create_variable('head', WeightHParams((3,)))",
    r"^Mine: the name 'head' is declared twice$",
  ),
  'name of two words': (
    SETUP,
    "self.create_variable('my weight', WeightHParams((3,)))",
    r"^Mine\.create_variable: a name is a Python identifier, such as head or layer_0, not 'my weight'$",
  ),
  'shape of one number': (
    SETUP,
    "self.create_variable('w', WeightHParams(3))",
    r'^WeightHParams: the shape is a tuple, such as \(6,\) or \(4, 6\), not 3$',
  ),
  'shape of fractions': (
    SETUP,
    "self.create_variable('w', WeightHParams((6 / 2, 3)))",
    r'^Mine\.w: shape \(3\.0, 3\); every dimension must be an integer, not 3\.0$',
  ),
  'array for a declaration': (
    SETUP,
    "self.create_variable('w', np.zeros((3, 3)))",
    r'^Mine\.w: create_variable takes WeightHParams\(shape, \.\.\.\), got ndarray$',
  ),
  'function for an initializer': (
    SETUP,
    "self.create_variable('w', WeightHParams((3,), init=jax.nn.initializers.ones))",
    r'^Mine\.w: init is a WeightInit, such as WeightInit\.Gaussian\(0\.02\), not <function',
  ),
  'dtype of a weight': (
    SETUP,
    "self.create_variable('w', WeightHParams((3,), dtype='float33'))",
    r"^Mine\.w: expected the name of a dtype, such as float32 or int32, got 'float33'$",
  ),
  'weight of integers': (
    SETUP,
    "super().setup(); self.create_variable('w', WeightHParams((3,), dtype='int32'))",
    r'^task\.train: w is int32, which no optimizer can train; declare it with create_variable\(.*trainable=False\)$',
  ),
  'field of an activation': (
    PREDICTIONS,
    "return self.shard(super().compute_predictions(batch), 'hidden')",
    r"^task\.model\.activation_split_dims_mapping has no field 'hidden'\. Its fields: out\.$",
  ),
  # What is only known when the compiled step runs.
  'if': (
    PREDICTIONS,
    "if batch['x'].sum() > 0: return 1",
    r'^Mine\.compute_predictions: Python decides by the value of an array, which is known only when the compiled step '
    r"runs, in `if batch\['x'\]\.sum\(\) > 0: return 1`; choose by jnp\.where\(condition, a, b\), or branch by "
    r'jax\.lax\.cond \(own\.py:37\)$',
  ),
  'if in a layer': (
    SETUP,
    "super().setup(); self.create_child('block', Config(Block))\n"
    "  def compute_predictions(self, batch): return self.head(self.block(batch['x']))[:, 0]\n\n"
    'class Block(Layer):\n'
    '  def __call__(self, x): return x if x.sum() > 0 else -x',
    r'^block \(Block\.__call__\): Python decides by the value .*jnp\.where.* \(own\.py:41\)$',
  ),
  'float()': (
    LOSS,
    "return {'loss': (float(predictions.mean()), 1.0)}, {}",
    r'^Mine\.compute_loss: Python needs the value .*; leave out float\(\), .* \(own\.py:37\)$',
  ),
  'range': (
    PREDICTIONS,
    "for i in range(batch['y'][0].astype(int)): pass",
    r'^Mine\.compute_predictions: Python needs the value .*; loop by jax\.lax\.fori_loop .* \(own\.py:37\)$',
  ),
  'NumPy': (
    PREDICTIONS,
    'return np.sin(super().compute_predictions(batch))',
    r'^Mine\.compute_predictions: NumPy needs the values .*; use jax\.numpy in place of numpy \(own\.py:37\)$',
  ),
  'shape of values': (
    PREDICTIONS,
    "return jnp.zeros(batch['y'].sum().astype(int))",
    r'^Mine\.compute_predictions: a shape depends on the value .*; take sizes from x\.shape, .* \(own\.py:37\)$',
  ),
  'mask': (
    PREDICTIONS,
    "return batch['y'][batch['y'] > 0]",
    r'^Mine\.compute_predictions: the shape of the result depends on .* mask, .*jnp\.where\(mask, x, 0\), .*:37\)$',
  ),
  'format': (
    LOSS,
    "print(f'{predictions.mean():.3f}')",
    r"^Mine\.compute_loss: text is made of the value .*; print it by jax\.debug\.print\('\{x\}', x=x\), .*:37\)$",
  ),
  'state kept in a dict': (
    SETUP,
    'super().setup(); self.kept = {}\n'
    '  def compute_predictions(self, batch):\n'
    "    return self.kept.setdefault('p', super().compute_predictions(batch))",
    r'^Mine\.kept keeps an array of the call, which has no value after it\. Return it, or keep it in a variable: ',
  ),
  'state of a global': (
    SETUP,
    'super().setup()\n'
    '  def compute_predictions(self, batch):\n'
    "    KEPT.append(batch['y']); return super().compute_predictions(batch) + KEPT[0]\n\n"
    'KEPT = []\n'
    'jax.eval_shape(KEPT.append, jnp.ones(4))',
    r'^task\.model: train_step uses an array that another step has left in a global or in an object, ',
  ),
  'a loss of a loop': (
    PREDICTIONS,
    "jax.lax.scan(lambda c, y: (self.add_aux_loss('size', y), (c, y))[1], 0.0, batch['y'])\n"
    '    return super().compute_predictions(batch)',
    r'^Mine\.size: the auxiliary loss is computed in a function that a transform of JAX traces, .* body of a scan, .* '
    r'return the value from that function, and report it after the transform$',
  ),
  # What is returned, and in which dtype.
  'integers for labels': (
    LOSS,
    "return {'loss': weighted_mean(jnp.ones((4, 3))[batch['y']][:, 0], batch['weights'])}, {}",
    r"^Mine\.compute_loss: Indexer must have integer .*batch\['y'\] float32\[\d\].*; have the input yield integers, or "
    r'cast by x\.astype\(jnp\.int32\) \(own\.py:37\)$',
  ),
  'integers for a loss of optax': (
    LOSS,
    'return optax.softmax_cross_entropy_with_integer_labels(predictions[:, None], batch["y"])',
    r'^Mine\.compute_loss: .*got float32.*; predictions float32.*; have the input yield integers, .* \(own\.py:37\)$',
  ),
  'pair reversed': (
    LOSS,
    "mean, weight = super().compute_loss(predictions, batch)[0]['loss']; return {'loss': (weight, mean)}, {}",
    r'^task\.model: Mine\.compute_loss: the loss depends on no variable that is trained, so its gradient is zero; its '
    r'weight does, so the pair seems to be reversed: it is \(mean, weight\)$',
  ),
  'loss without a gradient': (
    LOSS,
    "return {'loss': weighted_mean((predictions > 0) * 1.0, batch['weights'])}, {}",
    r'^task\.model: Mine\.compute_loss: the loss depends on no variable that is trained, .*; leave out stop_gradient, ',
  ),
  'no weight in the pair': (
    LOSS,
    "return {'loss': (predictions.mean(), None)}, {}",
    r"^task\.model: Mine\.compute_loss: the metric 'loss' is \(a float32 scalar, None\); it must be a pair",
  ),
  'metric without a name': (
    LOSS,
    'return {**super().compute_loss(predictions, batch)[0], 3: (0, 1)}, {}',
    r'^task\.model: Mine\.compute_loss: the names of metrics and outputs must be strings, got 3$',
  ),
  'other rows': (
    LOSS,
    "return super().compute_loss(predictions, batch)[0], {'out': jnp.ones(3)}",
    r'^task\.model: Mine\.compute_loss: out is float32\[3\]; the second dict, per-example outputs, has only arrays '
    r'with the batch as dimension 0, of \d here$',
  ),
  'auxiliary loss of each example': (
    PREDICTIONS,
    "self.add_aux_loss('size', batch['x']); return 1",
    r"^Mine: the auxiliary loss 'size' has shape \(\d, 6\) and a weight of shape \(\); both are scalars, such as",
  ),
  'summary of an array': (
    PREDICTIONS,
    "self.add_summary('x', batch['x']); return 1",
    r"^Mine: the summary 'x' has shape \(\d, 6\); log its mean, or pass kind='histogram'$",
  ),
  'kind of a summary': (
    PREDICTIONS,
    "self.add_summary('x', batch['x'], kind='histo'); return 1",
    r"^Mine: kind of the summary 'x': expected 'scalar', .*, got 'histo'\. Did you mean 'histogram'\?$",
  ),
  # What is a mistake in Python.
  'misspelt name': (
    PREDICTIONS,
    "return jpn.sin(batch['x'])",
    r"^NameError: name 'jpn' is not defined\. Did you mean 'jnp'\? \(own\.py:37\); --traceback shows how",
  ),
  'misspelt function': (
    PREDICTIONS,
    "return jnp.sinn(batch['x'])",
    r"^AttributeError: module 'jax\.numpy' has no attribute 'sinn'\. Did you mean 'sin'\? \(own\.py:37\); --trace",
  ),
  'entry as an attribute': (
    PREDICTIONS,
    'return batch.x',
    r"^AttributeError: 'dict' object has no attribute 'x'\. An entry of a dict is read as \['x'\] \(own\.py:37\)",
  ),
  'argument that is missing': (
    PREDICTIONS,
    'return self.scale()',
    r"^TypeError: Scale\.__call__\(\) missing 1 required positional argument: 'x_BD' \(own\.py:37\); --traceback",
  ),
  'assert': (
    PREDICTIONS,
    "assert batch['x'].shape[1] == 7",
    r"^AssertionError in `assert batch\['x'\]\.shape\[1\] == 7` \(own\.py:37\); --traceback shows how",
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


def test_a_mistake_that_only_the_evaluation_finds_names_its_data(capsys, own, tmp_path):
  flags = own(SETUP, 'super().setup()')
  file = tmp_path / 'own.py'
  other = "Config(ArrayInput, name='valid', arrays={'x': np.ones((4, 5)), 'y': np.ones(4)}, batch_size=4)"
  file.write_text(file.read_text().replace('is_training=True)]', f'is_training=True), {other}]'))
  told = fails(capsys, 'train', *flags)
  assert re.search(r'^eval/valid: scale \(Scale\.__call__\): .*ncompatible .*x_BD \[4, 5\], s \[6\]', told), told


def test_the_traceback_is_printed_on_request(capsys, own):
  flags = own(LOSS, 'return predictions + self.theta.bias')
  assert main(['train', '--nocompilation_cache', *flags, '--traceback']) == 2
  told = capsys.readouterr().err.splitlines()
  assert told[0].startswith('Traceback') and any('own.py", line 37, in compute_loss' in line for line in told)
  assert told[-1].startswith("praxis-lite train: error: Mine (Mine) has no variable 'bias'")


def test_what_a_model_raises_itself_is_told_with_its_line_and_keeps_its_traceback(capsys, own):
  flags = own(LOSS, "raise TypeError('mine')")
  assert fails(capsys, 'train', *flags) == 'TypeError: mine (own.py:37); --traceback shows how it got there'
  assert main(['train', '--nocompilation_cache', *flags, '--traceback']) == 2
  told = capsys.readouterr().err.splitlines()
  assert any('own.py", line 37, in compute_loss' in line for line in told)
  assert told[-1] == 'praxis-lite train: error: TypeError: mine (own.py:37)'


def test_a_mistake_of_this_package_keeps_its_traceback(capsys, own, monkeypatch):
  def broken(*_):
    raise IndexError('ours')

  monkeypatch.setattr('praxis_lite.training.task.SingleTask.create_mesh', broken)
  monkeypatch.setattr('praxis_lite.common.importing.is_library', lambda file: not file.endswith('own.py'))
  with pytest.raises(IndexError, match='ours'):
    main(['train', '--nocompilation_cache', *own(SETUP, 'super().setup()')])
