"""ViT: logits and features are those of a forward pass in NumPy, on meshes; tensors are written as they were read."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
import vit_by_hand
from checkpoints import assert_same_tensors, tensors_of, weight, write
from on_meshes import MESHES, load

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.inputs import write_tfrecords
from praxis_lite.models import ClassificationModel, ImageFeatureModel, image_classifier
from praxis_lite.runs import run_train
from praxis_lite.runs.records.record import read_record
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

D, F, C = 18, 20, 3
_VIT = {
  'model_type': 'vit',
  'image_size': [8, 12],
  'patch_size': [3, 4],
  'num_channels': 2,
  'hidden_size': D,
  'intermediate_size': F,
  'num_hidden_layers': 2,
  'num_attention_heads': 3,
  'layer_norm_eps': 1e-5,
  'hidden_act': 'gelu',
}
CASES = {
  'classes': _VIT | {'architectures': ['ViTForImageClassification'], 'num_labels': C},
  'features': _VIT | {'architectures': ['ViTModel']},
}
IMAGES = np.random.default_rng(0).standard_normal((3, 8, 12, 2)).astype(np.float32)


def linear(name, out, inward):
  return {f'{name}.weight': (out, inward), f'{name}.bias': (out,)}


def norm(name, dims=D):
  return {f'{name}.weight': (dims,), f'{name}.bias': (dims,)}


def shapes_of(config):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  (height, width), (h, w) = config['image_size'], config['patch_size']
  tokens = 1 + (height // h) * (width // w)
  embeddings = 'vit.embeddings.'
  shapes = {f'{embeddings}cls_token': (1, 1, D), f'{embeddings}position_embeddings': (1, tokens, D)}
  shapes[f'{embeddings}patch_embeddings.projection.weight'] = (D, config['num_channels'], h, w)
  shapes[f'{embeddings}patch_embeddings.projection.bias'] = (D,)
  for i in range(config['num_hidden_layers']):
    layer = f'vit.encoder.layer.{i}.'
    for name in ('attention.query', 'attention.key', 'attention.value', 'output.dense'):
      shapes |= linear(f'{layer}attention.{name}', D, D)
    shapes |= norm(f'{layer}layernorm_before') | norm(f'{layer}layernorm_after')
    shapes |= linear(f'{layer}intermediate.dense', F, D) | linear(f'{layer}output.dense', D, F)
  shapes |= norm('vit.layernorm')
  return shapes | (linear('classifier', C, D) if 'num_labels' in config else linear('vit.pooler.dense', D, D))


def make(folder, case, **changes):
  """Writes a checkpoint; returns its folder, config and tensors."""
  config = {**CASES[case], **changes}
  shapes = shapes_of(config)
  write(folder, config, shapes)
  return folder, config, {name: weight(name, shape, config['model_type']) for name, shape in shapes.items()}


def outputs_of(there):
  """Features, or log probabilities of classes."""

  def run(variables):
    batch = {'image': IMAGES, 'weights': np.ones(len(IMAGES), np.float32)}
    out, _ = there.model.apply(there.layout.unpad(variables), batch, method='predict', do_eval=True)
    return out['features'] if 'features' in out else jax.numpy.log(out['probabilities'])

  return np.asarray(GuardedJit(bind_mesh(run, there.layout.mesh))(there.variables))


def expected_of(config, tensors):
  found = vit_by_hand.outputs(config, tensors, IMAGES)
  if 'num_labels' in config:
    found = found - np.log(np.exp(found).sum(-1, keepdims=True))
  assert np.abs(np.diff(found, axis=0)).max() > 0.03
  return found


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', MESHES, ids=str)
@pytest.mark.parametrize('case', CASES)
def test_outputs_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source', case)
  there = load(folder, mesh)
  np.testing.assert_allclose(outputs_of(there), expected_of(config, tensors), rtol=1e-5, atol=1e-5)
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()).items() >= config.items()


def test_names_of_transformers_5_a_model_without_its_prefix_and_unused_parts(tmp_path):
  folder, config, tensors = make(tmp_path / 'plain', 'classes')
  plain = read_model(folder)
  renamed = {
    'attention.attention.query': 'attention.q_proj',
    'attention.attention.key': 'attention.k_proj',
    'attention.attention.value': 'attention.v_proj',
    'attention.output.dense': 'attention.o_proj',
    'intermediate.dense': 'mlp.fc1',
    'output.dense': 'mlp.fc2',
    'encoder.layer.': 'layers.',
  }
  new = {}
  for name, x in tensors.items():
    for old, now in renamed.items():
      name = name.replace(old, now)
    new[name] = x
  left_out = {'vit.pooler.dense.weight': np.ones((D, D), np.float32), 'vit.embeddings.mask_token': np.ones((1, 1, D))}
  write(tmp_path / 'new', config, {}, **new, **left_out)
  found = load(tmp_path / 'new')
  jax.tree.map(np.testing.assert_array_equal, found.true_variables, plain.variables)
  assert len(found.checkpoint.notes) == 1 and all(name in found.checkpoint.notes[0] for name in left_out)

  folder, config, tensors = make(tmp_path / 'features', 'features')
  write(tmp_path / 'bare', config, {}, **{name.removeprefix('vit.'): x for name, x in tensors.items()})
  bare = read_model(tmp_path / 'bare')
  assert isinstance(bare.model, ImageFeatureModel)
  jax.tree.map(np.testing.assert_array_equal, bare.variables, read_model(folder).variables)


@pytest.mark.slow
@pytest.mark.parametrize('repeat', [True, False])
def test_models_of_ours_are_written_and_read_again(repeat, tmp_path):
  sizes = {'image_size': 6, 'patch_size': 3, 'model_dims': 8, 'num_layers': 2, 'num_heads': 2, 'repeat': repeat}
  model = image_classifier(num_classes=4, **sizes).instantiate()
  write_model(tmp_path / 'a', model, model.init(jax.random.key(0)))
  written = json.loads((tmp_path / 'a' / 'config.json').read_text())
  assert (written['model_type'], written['image_size'], written['architectures']) == (
    *('vit', 6),
    ['ViTForImageClassification'],
  )
  found = read_model(tmp_path / 'a')
  assert type(found.model) is ClassificationModel
  write_model(tmp_path / 'b', found.model, found.variables)
  assert_same_tensors(tmp_path / 'b', tensors_of(tmp_path / 'a'))


@pytest.mark.parametrize(
  'change, says',
  [
    ({'pooling': 'mean', 'class_token': True}, r"network\.pooling, which is 'mean' here"),
    ({'positions': 'sinusoidal'}, 'learned positions'),
    ({'activation': 'softplus'}, 'softplus'),
    ({'representation': True}, 'network.representation_tpl'),
  ],
)
def test_a_model_of_no_family_is_told_why(change, says, tmp_path):
  sizes = {'image_size': 6, 'patch_size': 3, 'model_dims': 8, 'num_layers': 2, 'num_heads': 2}
  model = image_classifier(num_classes=4, **sizes, **change).instantiate()
  with pytest.raises(ConfigError, match=says):
    write_model(tmp_path, model, jax.eval_shape(model.init, jax.random.key(0)))
  with pytest.raises(ConfigError, match='a ClassificationModel has no counterpart in transformers'):
    mlp = Config(ClassificationModel, num_classes=3)
    mlp.network_tpl.set(input_dims=4, hidden_dims=(3,))
    write_model(tmp_path, mlp.instantiate(), {})


@pytest.mark.parametrize(
  'changes, says',
  [
    ({'qkv_bias': False}, 'qkv_bias = false is not supported; only true is'),
    ({'image_size': [8, 12, 3]}, r'image_size = \[8, 12, 3\]; expected a number of pixels, or \[height, width\]'),
    ({'patch_size': 0}, 'patch_size = 0; expected a number of pixels'),
    ({'hidden_act': 'softer'}, "hidden_act = 'softer' is not supported"),
    ({'architectures': ['ViTForMaskedImageModeling']}, 'of vit, ViTForImageClassification and ViTModel are'),
    ({'problem_type': 'regression'}, 'problem_type = "regression" is not supported'),
    ({'num_labels': 1}, 'a head with 1 label computes a number'),
  ],
)
def test_a_config_that_is_not_supported_is_named(changes, says, tmp_path):
  write(tmp_path, CASES['classes'] | changes, shapes_of(CASES['classes']))
  with pytest.raises(ConfigError, match=says):
    read_model(tmp_path)


def test_missing_and_other_tensors_are_named(tmp_path):
  _, config, tensors = make(tmp_path / 'a', 'classes')
  left = {name: x for name, x in tensors.items() if name != 'classifier.bias'}
  write(tmp_path / 'b', config, {}, **left)
  with pytest.raises(CheckpointError, match=r'lacks classifier\.bias$'):
    read_model(tmp_path / 'b')
  with pytest.raises(CheckpointError, match=r'position_embeddings has shape \[1, 7, 18\], and config\.json makes it'):
    write(tmp_path / 'c', config | {'image_size': [12, 12]}, {}, **tensors)
    read_model(tmp_path / 'c')


def test_features_have_no_loss(tmp_path):
  model = read_model(make(tmp_path, 'features')[0]).model
  with pytest.raises(ConfigError, match='has no head and no loss; train a ClassificationModel'):
    model.compute_predictions({})


def test_the_published_size_has_the_published_number_of_variables():
  found = training_experiment({'model_type': 'vit', 'architectures': ['ViTForImageClassification'], 'num_labels': 1000})
  weights = found.task.instantiate().model.abstract_init()
  assert sum(math.prod(w.full_shape) for w in jax.tree.leaves(weights)) == 86_567_656
  assert found.task.model.network_tpl.transformer_tpl.remat == 'full'
  assert {data.image_size for data in found.datasets} == {(224, 224)}


@pytest.mark.slow
def test_an_imported_classifier_predicts_files_trains_and_is_exported(tmp_path, capsys):
  import tensorflow as tf

  square = {'image_size': 8, 'patch_size': 4, 'num_channels': 3}
  sized = CASES['classes'] | square
  config = sized | {'image_size': [8, 8], 'patch_size': [4, 4]}
  tensors = {name: weight(name, shape, 'vit') for name, shape in shapes_of(config).items()}
  write(tmp_path / 'source', sized, {}, **tensors)
  preprocessor = {'image_mean': [0.1, 0.2, 0.3], 'image_std': [0.5, 0.6, 0.7], 'size': {'height': 8, 'width': 8}}
  (tmp_path / 'source' / 'preprocessor_config.json').write_text(json.dumps(preprocessor))
  run = tmp_path / 'run'
  folder = str(tmp_path / 'source')
  assert main(['import-hf', folder, f'--job_log_dir={run}', '--set', 'task.ici_mesh_shape=(1,2,1)']) == 0
  assert 'vit, ' in capsys.readouterr().out

  pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
  (tmp_path / 'a.png').write_bytes(tf.io.encode_png(pixels).numpy())
  assert main(['predict', f'--job_log_dir={run}', str(tmp_path / 'a.png')]) == 0
  printed = json.loads(capsys.readouterr().out.splitlines()[-1])
  logits = vit_by_hand.outputs(config, tensors, ((pixels / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7])[None])[0]
  expected = np.exp(logits) / np.exp(logits).sum()
  np.testing.assert_allclose(printed['probabilities'], expected, atol=1e-4)
  (tmp_path / 'c.png').write_bytes(tf.io.encode_png(255 - pixels).numpy())
  several = [str(tmp_path / f'{name}.png') for name in 'aca']
  assert main(['predict', f'--job_log_dir={run}', *several]) == 0
  rows = [json.loads(line)['probabilities'] for line in capsys.readouterr().out.splitlines()[-3:]]
  np.testing.assert_allclose(rows[::2], [expected] * 2, atol=1e-4)
  assert not np.allclose(rows[1], expected, atol=1e-3)
  (tmp_path / 'b.png').write_bytes(b'no image')
  assert main(['predict', f'--job_log_dir={run}', str(tmp_path / 'b.png')]) != 0
  assert 'b.png: is not a JPEG, PNG, BMP or GIF image: ' in capsys.readouterr().err

  write_tfrecords(str(tmp_path / 'a.tfrecord'), {'image': [(tmp_path / 'a.png').read_bytes()] * 2, 'label': [0, 2]})
  recorded = read_record(run).config
  for data in recorded.datasets:
    assert (data.mean, data.std, data.resize_to) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), 8)
    data.set(file_pattern=str(tmp_path / 'a.tfrecord'), batch_size=2)
  recorded.task.train.set(num_train_steps=1, save_interval_steps=1, eval_interval_steps=None)
  assert run_train(recorded, run).step == 1
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}']) == 0
  assert json.loads((tmp_path / 'out' / 'preprocessor_config.json').read_text()) == preprocessor
  assert read_model(tmp_path / 'out').model.num_classes == 3
