"""CLIP and SigLIP: embeddings are those of a forward pass in NumPy, on meshes; tensors come back as they were."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
import towers_by_hand
from checkpoints import assert_same_tensors, tensors_of, weight, write
from on_meshes import MESHES, load

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.inputs import write_tfrecords
from praxis_lite.models import TwoTowerModel, transformer_encoder, vision_transformer
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

V, T, END = 29, 7, 23
_SIZES = {'num_hidden_layers': 2, 'num_attention_heads': 3, 'layer_norm_eps': 1e-5}
_TEXT = _SIZES | {'hidden_size': 15, 'intermediate_size': 14, 'vocab_size': V, 'max_position_embeddings': T}
_VISION = _SIZES | {'hidden_size': 18, 'intermediate_size': 20, 'num_channels': 2}
_VISION |= {'image_size': [8, 12], 'patch_size': [3, 4]}
CASES = {
  'clip': {
    'model_type': 'clip',
    'architectures': ['CLIPModel'],
    'projection_dim': 10,
    'text_config': _TEXT | {'hidden_act': 'quick_gelu', 'eos_token_id': END, 'bos_token_id': 1, 'pad_token_id': 0},
    'vision_config': _VISION | {'hidden_act': 'quick_gelu'},
  },
  'siglip': {
    'model_type': 'siglip',
    'architectures': ['SiglipModel'],
    'text_config': _TEXT | {'hidden_act': 'gelu_pytorch_tanh', 'projection_size': 18},
    'vision_config': _VISION | {'hidden_act': 'gelu_pytorch_tanh'},
  },
}
IMAGES = np.random.default_rng(0).standard_normal((3, 8, 12, 2)).astype(np.float32)
IDS = np.random.default_rng(1).integers(1, END, (3, T)).astype(np.int32)
IDS[0, 4:], IDS[1, 2], IDS[2, -1] = END, END, END  # Padding of CLIP is the end token; the others end in a row once.


def linear(name, out, inward, use_bias=True):
  return {f'{name}.weight': (out, inward)} | ({f'{name}.bias': (out,)} if use_bias else {})


def norm(name, dims):
  return {f'{name}.weight': (dims,), f'{name}.bias': (dims,)}


def blocks(prefix, part):
  dims, hidden, shapes = part['hidden_size'], part['intermediate_size'], {}
  for i in range(part['num_hidden_layers']):
    layer = f'{prefix}.encoder.layers.{i}.'
    for name in ('q_proj', 'k_proj', 'v_proj', 'out_proj'):
      shapes |= linear(f'{layer}self_attn.{name}', dims, dims)
    shapes |= norm(f'{layer}layer_norm1', dims) | norm(f'{layer}layer_norm2', dims)
    shapes |= linear(f'{layer}mlp.fc1', hidden, dims) | linear(f'{layer}mlp.fc2', dims, hidden)
  return shapes


def shapes_of(config):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  text, vision, is_siglip = config['text_config'], config['vision_config'], config['model_type'] == 'siglip'
  (height, width), (h, w) = (np.broadcast_to(vision[name], 2).tolist() for name in ('image_size', 'patch_size'))
  D, D_text, patches = vision['hidden_size'], text['hidden_size'], (height // h) * (width // w)
  shapes = {
    'text_model.embeddings.token_embedding.weight': (text['vocab_size'], D_text),
    'text_model.embeddings.position_embedding.weight': (text['max_position_embeddings'], D_text),
    'vision_model.embeddings.patch_embedding.weight': (D, vision['num_channels'], h, w),
    'vision_model.embeddings.position_embedding.weight': (patches + (not is_siglip), D),
    'logit_scale': (1,) if is_siglip else (),
  }
  shapes |= blocks('text_model', text) | norm('text_model.final_layer_norm', D_text)
  shapes |= blocks('vision_model', vision) | norm('vision_model.post_layernorm', D)
  if not is_siglip:
    shapes |= {'vision_model.embeddings.class_embedding': (D,)} | norm('vision_model.pre_layrnorm', D)
    shapes |= linear('visual_projection', config['projection_dim'], D, use_bias=False)
    return shapes | linear('text_projection', config['projection_dim'], D_text, use_bias=False)
  shapes |= {'vision_model.embeddings.patch_embedding.bias': (D,), 'logit_bias': (1,)}
  shapes |= linear('text_model.head', text['projection_size'], D_text)
  head = 'vision_model.head.'
  shapes |= {f'{head}probe': (1, 1, D), f'{head}attention.in_proj_weight': (3 * D, D)}
  shapes |= {f'{head}attention.in_proj_bias': (3 * D,)} | linear(f'{head}attention.out_proj', D, D)
  shapes |= norm(f'{head}layernorm', D) | linear(f'{head}mlp.fc1', vision['intermediate_size'], D)
  return shapes | linear(f'{head}mlp.fc2', D, vision['intermediate_size'])


def make(folder, case, **changes):
  """Writes a checkpoint; returns its folder, config and tensors."""
  config = {**CASES[case], **changes}
  shapes = shapes_of(config)
  write(folder, config, shapes)
  return folder, config, {name: weight(name, shape, config['model_type']) for name, shape in shapes.items()}


def embeddings_of(there):
  def run(variables):
    batch = {'image': IMAGES, 'ids': IDS, 'weights': np.ones(len(IMAGES), np.float32)}
    variables = there.layout.unpad(variables)
    out, _ = there.model.apply(variables, batch, method='predict', do_eval=True)
    loss, _ = there.model.apply(variables, batch, method='compute_predictions', do_eval=True)
    return out['image_embedding'], out['text_embedding'], loss.loss

  return jax.tree.map(np.asarray, GuardedJit(bind_mesh(run, there.layout.mesh))(there.variables))


def losses_of(config, logits):
  """The loss of each pair, from the logits [texts, images]."""
  if config['model_type'] == 'siglip':
    signs = 2 * np.eye(len(logits)) - 1
    return np.log1p(np.exp(-signs * logits)).sum(0)
  own = np.diag(logits)
  return (np.log(np.exp(logits).sum(0)) + np.log(np.exp(logits).sum(1))) / 2 - own


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', MESHES, ids=str)
@pytest.mark.parametrize('case', CASES)
def test_embeddings_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source', case)
  there = load(folder, mesh)
  images, texts, logits = towers_by_hand.embeddings(config, tensors, IMAGES, IDS)
  assert min(np.abs(np.diff(images, axis=0)).max(), np.abs(np.diff(texts, axis=0)).max()) > 0.1
  found = embeddings_of(there)
  for one, other in zip(found, (images, texts, losses_of(config, logits))):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  for part in ('text_config', 'vision_config'):
    given = {name: x for name, x in config[part].items() if name not in ('bos_token_id', 'pad_token_id')}
    assert written[part].items() >= given.items()
  assert written.get('projection_dim') == config.get('projection_dim')


def test_old_files_of_clip_name_a_wrong_end_and_have_parts_twice_and_positions(tmp_path):
  text = CASES['clip']['text_config']
  other = {**text, 'hidden_size': 99, 'eos_token_id': 2}
  folder, config, tensors = make(tmp_path / 'plain', 'clip')
  config = {**config, 'text_config': other, 'text_config_dict': {'hidden_size': text['hidden_size']}}
  position_ids = {'text_model.embeddings.position_ids': np.arange(T, dtype=np.uint8)[None]}
  write(tmp_path / 'old', config, {}, **tensors, **position_ids)
  found = read_model(tmp_path / 'old')
  assert found.model.text_pooling == 'largest'
  there = load(tmp_path / 'old', MESHES[0])
  _, texts, _ = towers_by_hand.embeddings(config | {'text_config': text | {'eos_token_id': 2}}, tensors, IMAGES, IDS)
  assert (IDS.max(axis=1) < V - 1).all() and len(set(IDS.argmax(axis=1))) > 1
  np.testing.assert_allclose(embeddings_of(there)[1], texts, rtol=1e-5, atol=1e-5)
  there.write(tmp_path / 'out')
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['text_config']['eos_token_id'] == 2
  plain = read_model(folder)
  vars(plain.model)['end_id'] = 2
  with pytest.raises(ConfigError, match=r'end_id: 2 means the token with the largest id in files of CLIP'):
    write_model(tmp_path / 'new', plain.model, plain.variables)
  jax.tree.map(np.testing.assert_array_equal, found.variables, read_model(folder).variables)


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_a_run_trains_on_records_predicts_and_keeps_what_it_does_not_know(case, tmp_path, capsys):
  config = dict(CASES[case])
  # Three channels, and an id for each byte.
  config['vision_config'] = config['vision_config'] | {'num_channels': 3}
  config['text_config'] = config['text_config'] | {'vocab_size': 300, 'eos_token_id': 257, 'bos_token_id': 256}
  folder, config, _ = make(tmp_path / 'source', case, **config)
  run, out = str(tmp_path / 'run'), tmp_path / 'out'
  main(['import-hf', str(folder), f'--job_log_dir={run}'])
  capsys.readouterr()
  tf = pytest.importorskip('tensorflow')
  rng = np.random.default_rng(0)
  encoded = [tf.io.encode_png(x).numpy() for x in rng.integers(0, 256, (4, 20, 30, 3), np.uint8)]
  write_tfrecords(str(tmp_path / 'pairs.tfrecord'), {'image': encoded, 'text': [b'a cat', b'', b'a long text', b'dog']})
  overrides = {
    'datasets[*].file_pattern': f'{tmp_path}/pairs.tfrecord',
    'datasets[*].tokenizer_tpl': 'praxis_lite.inputs.ByteTokenizer',
    'datasets[*].tokenizer_tpl.bos_id': 256,
    'datasets[*].tokenizer_tpl.eos_id': 257,
    'datasets[*].tokenizer_tpl.pad_id': 258,
    'datasets[*].batch_size': 2,
    'task.train.num_train_steps': 2,
  }
  flags = [part for name, value in overrides.items() for part in ('--set', f'{name}={value}')]
  main(['train', f'--job_log_dir={run}', *flags])
  assert 'step 2' in capsys.readouterr().out
  (tmp_path / 'x.png').write_bytes(encoded[0])
  capsys.readouterr()
  main(['predict', f'--job_log_dir={run}', str(tmp_path / 'x.png')])
  embedding = json.loads(capsys.readouterr().out)['image_embedding']
  assert math.isclose(np.linalg.norm(embedding), 1, rel_tol=1e-5)
  main(['export-hf', f'--job_log_dir={run}', f'--out={out}'])
  written = json.loads((out / 'config.json').read_text())
  assert written['text_config']['bos_token_id'] == 256
  assert tensors_of(out).keys() == shapes_of(config).keys()


@pytest.mark.slow
def test_models_of_ours_are_written_and_read_again(tmp_path):
  sizes = {'num_layers': 1, 'num_heads': 2}
  image = vision_transformer(image_size=6, patch_size=3, model_dims=8, pooling='attention', **sizes)
  text = transformer_encoder(vocab_size=11, model_dims=6, max_len=5, style='pre_norm', num_token_types=0, **sizes)
  config = Config(TwoTowerModel, embedding_dims=8, image_tpl=image, text_tpl=text, text_pooling='last')
  config.set(has_image_projection=False)
  config.projection_tpl.use_bias = True
  config.loss_tpl.set(kind='sigmoid', initial_scale=3.0, chunk_size=2)
  model = config.instantiate()
  variables = model.init(jax.random.key(0))
  write_model(tmp_path / 'a', model, variables)
  assert json.loads((tmp_path / 'a' / 'config.json').read_text())['model_type'] == 'siglip'
  jax.tree.map(np.testing.assert_array_equal, read_model(tmp_path / 'a').variables, variables)
  config.text_pooling = 'mean'
  with pytest.raises(ConfigError, match=r'differs from siglip, the nearest, in .*text_pooling'):
    write_model(tmp_path / 'b', config.instantiate(), variables)


def test_sizes_of_a_config_make_an_experiment_to_plan():
  config = training_experiment(CASES['siglip'])
  towers = config.task.model.image_tpl, config.task.model.text_tpl
  assert [tower.transformer_tpl.remat for tower in towers] == ['full', 'full']


@pytest.mark.parametrize(
  ('case', 'changes', 'message'),
  [
    ('clip', {'architectures': ['CLIPTextModel']}, 'of clip, only CLIPModel is, which has both towers'),
    ('clip', {'text_config': 3}, 'text_config = 3; expected a JSON object'),
    (
      'clip',
      {'text_config': CASES['clip']['text_config'] | {'eos_token_id': V}},
      'eos_token_id gives 29; expected an id',
    ),
    (
      'clip',
      {'vision_config': CASES['clip']['vision_config'] | {'patch_size': 'x'}},
      "vision_config: patch_size = 'x'; expected a number of pixels",
    ),
    (
      'siglip',
      {'text_config': CASES['siglip']['text_config'] | {'projection_size': 17}},
      'hidden_size = 18 of vision_config, and those of texts 17; they must be as wide',
    ),
    (
      'siglip',
      {'vision_config': CASES['siglip']['vision_config'] | {'vision_use_head': False}},
      'vision_use_head = false is not supported; only true is',
    ),
  ],
)
def test_what_our_layers_cannot_compute_is_refused_by_name(case, changes, message, tmp_path):
  write(tmp_path / 'x', {**CASES[case], **changes}, {'logit_scale': (1,)})
  with pytest.raises((ConfigError, CheckpointError), match=message):
    read_model(tmp_path / 'x')
