"""Masked autoencoders: predictions are those of a forward pass in NumPy, on meshes; tensors are written as read."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
import vit_mae_by_hand
from checkpoints import assert_same_tensors, tensors_of, weight, write
from on_meshes import MESHES, load
from test_vit import linear, norm

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.common.errors import ConfigError
from praxis_lite.models import masked_autoencoder
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

D, F, E, G, T = 20, 21, 12, 14, 9
CONFIG = {
  'model_type': 'vit_mae',
  'architectures': ['ViTMAEForPreTraining'],
  'image_size': 10,
  'patch_size': 3,
  'num_channels': 2,
  'hidden_size': D,
  'intermediate_size': F,
  'num_hidden_layers': 2,
  'num_attention_heads': 5,
  'layer_norm_eps': 1e-5,
  'hidden_act': 'gelu',
  'decoder_hidden_size': E,
  'decoder_intermediate_size': G,
  'decoder_num_hidden_layers': 3,
  'decoder_num_attention_heads': 3,
  'mask_ratio': 0.6,
  'norm_pix_loss': True,
}
IMAGES = np.random.default_rng(0).standard_normal((3, 10, 10, 2)).astype(np.float32)
NOISE = np.random.default_rng(1).uniform(size=(3, T)).astype(np.float32)


def block_shapes(layer, dims, hidden):
  shapes = {}
  for name in ('attention.query', 'attention.key', 'attention.value', 'output.dense'):
    shapes |= linear(f'{layer}attention.{name}', dims, dims)
  shapes |= norm(f'{layer}layernorm_before', dims) | norm(f'{layer}layernorm_after', dims)
  return shapes | linear(f'{layer}intermediate.dense', hidden, dims) | linear(f'{layer}output.dense', dims, hidden)


def shapes_of():
  """The names and shapes of the tensors of a checkpoint, as published ones have them."""
  shapes = {'vit.embeddings.cls_token': (1, 1, D), 'vit.embeddings.position_embeddings': (1, T + 1, D)}
  shapes['vit.embeddings.patch_embeddings.projection.weight'] = (D, 2, 3, 3)
  shapes['vit.embeddings.patch_embeddings.projection.bias'] = (D,)
  for i in range(2):
    shapes |= block_shapes(f'vit.encoder.layer.{i}.', D, F)
  shapes |= norm('vit.layernorm', D) | linear('decoder.decoder_embed', E, D)
  shapes |= {'decoder.mask_token': (1, 1, E), 'decoder.decoder_pos_embed': (1, T + 1, E)}
  for i in range(3):
    shapes |= block_shapes(f'decoder.decoder_layers.{i}.', E, G)
  return shapes | norm('decoder.decoder_norm', E) | linear('decoder.decoder_pred', 18, E)


def make(folder, **changes):
  """Writes a checkpoint; returns its folder, config and tensors."""
  write(folder, CONFIG | changes, shapes_of())
  return folder, CONFIG | changes, {name: weight(name, shape, 'vit_mae') for name, shape in shapes_of().items()}


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_predictions_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source')
  there = load(folder, mesh)

  def run(variables):
    return there.model.apply(there.layout.unpad(variables), IMAGES, NOISE, method='predict_hidden', do_eval=True)[0]

  found = GuardedJit(bind_mesh(run, there.layout.mesh))(there.variables)
  expected = vit_mae_by_hand.outputs(config, tensors, IMAGES, NOISE)
  assert np.abs(np.diff(expected, axis=0)).max() > 0.03
  np.testing.assert_allclose(found.output, expected, rtol=1e-5, atol=1e-5)
  assert np.asarray(found.is_hidden).sum(axis=1).tolist() == [6, 6, 6]
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()).items() >= config.items()


def test_names_that_transformers_5_writes_are_read(tmp_path):
  folder, config, tensors = make(tmp_path / 'plain')
  new = {name.replace('decoder_layers.', 'decoder_encoder.layer.'): x for name, x in tensors.items()}
  write(tmp_path / 'new', config, {}, **new)
  short = {}
  for name, x in tensors.items():
    for old, now in {'attention.attention.query': 'attention.q_proj', 'intermediate.dense': 'mlp.fc1'}.items():
      name = name.replace(old, now)
    short[name.replace('encoder.layer.', 'layers.')] = x
  write(tmp_path / 'short', config, {}, **short)
  plain = read_model(folder).variables
  for other in ('new', 'short'):
    jax.tree.map(np.testing.assert_array_equal, read_model(tmp_path / other).variables, plain)


@pytest.mark.slow
def test_models_of_ours_are_written_and_read_again(tmp_path):
  sizes = {'image_size': 6, 'patch_size': 3, 'model_dims': 8, 'num_layers': 2, 'num_heads': 2, 'decoder_layers': 1}
  model = masked_autoencoder(**sizes, decoder_dims=8, decoder_heads=2, positions='learned').instantiate()
  write_model(tmp_path / 'a', model, model.init(jax.random.key(0)))
  found = read_model(tmp_path / 'a')
  write_model(tmp_path / 'b', found.model, found.variables)
  assert_same_tensors(tmp_path / 'b', tensors_of(tmp_path / 'a'))
  other = masked_autoencoder(**sizes, decoder_dims=8, decoder_heads=2).instantiate()
  with pytest.raises(ConfigError, match=r'tables of positions|learned positions'):
    write_model(tmp_path / 'c', other, jax.eval_shape(other.init, jax.random.key(0)))
  for name, size in {'image_size': (6, 9), 'patch_size': (3, 2)}.items():
    other = masked_autoencoder(**{**sizes, name: size}, decoder_dims=8, decoder_heads=2, positions='learned')
    other = other.instantiate()
    with pytest.raises(ConfigError, match=rf'network\.{name} is {size[0]} x {size[1]}; .* square images and patches'):
      write_model(tmp_path / 'c', other, jax.eval_shape(other.init, jax.random.key(0)))
  assert not (tmp_path / 'c').exists()


def test_the_published_size_has_the_published_number_of_variables():
  found = training_experiment({'model_type': 'vit_mae', 'architectures': ['ViTMAEForPreTraining']})
  weights = found.task.instantiate().model.abstract_init()
  assert sum(math.prod(w.full_shape) for w in jax.tree.leaves(weights)) == 111_907_840
  assert found.task.train.learner.bprop_variable_exclusion == ('network.position.w', 'patch_decoder.position.w')
  assert {data.label_feature for data in found.datasets} == {None}


@pytest.mark.parametrize(
  'changes, says',
  [
    ({'architectures': ['ViTMAEModel']}, 'ViTMAEModel'),
    ({'norm_pix_loss': 'yes'}, 'norm_pix_loss = "yes" is not supported'),
    ({'mask_ratio': 1.0}, 'mask_ratio'),
    ({'image_size': [10, 13]}, r'config\.json: image_size is 10 x 13; .* square images and patches'),
    ({'patch_size': [3, 2]}, r'config\.json: patch_size is 3 x 2; .* square images and patches'),
  ],
)
def test_a_config_that_is_not_supported_is_named(changes, says, tmp_path):
  write(tmp_path, CONFIG | changes, shapes_of())
  with pytest.raises(ConfigError, match=says):
    read_model(tmp_path)
