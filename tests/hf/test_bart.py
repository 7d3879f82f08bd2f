"""BART: logits and tokens are those of a forward pass in NumPy, on meshes; checkpoints are as read."""

from __future__ import annotations

import json

import bart_by_hand
import numpy as np
import pytest
from checkpoints import assert_same_tensors, golden, write
from on_meshes import load

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.cli.main import main
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.models import encoder_decoder
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.runs.records.record import read_record
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

V, D, F, N, P = 37, 18, 20, 3, 14
_SIZES = {
  'model_type': 'bart',
  'is_encoder_decoder': True,
  'vocab_size': V,
  'd_model': D,
  'encoder_layers': 3,
  'decoder_layers': 2,
  **{f'{stack}_attention_heads': N for stack in ('encoder', 'decoder')},
  **{f'{stack}_ffn_dim': F for stack in ('encoder', 'decoder')},
  'max_position_embeddings': P,
  'tie_word_embeddings': True,
  'eos_token_id': 2,
  'decoder_start_token_id': 2,
}
CASES = {
  'gelu': {'activation_function': 'gelu', 'scale_embedding': False},
  'scaled': {'activation_function': 'relu', 'scale_embedding': True},
}
RNG = np.random.default_rng(0)
SOURCES = RNG.integers(3, V, (2, 11)).astype(np.int32)
IS_SOURCE = np.arange(11) < np.array([[11], [7]])
IDS = np.concatenate([np.full((2, 1), 2), RNG.integers(3, V, (2, 8))], axis=1).astype(np.int32)


def shapes_of(config):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  shapes = {'model.shared.weight': (V, D), 'final_logits_bias': (1, V)}

  def linear(name, outputs, inputs):
    shapes.update({f'{name}.weight': (outputs, inputs), f'{name}.bias': (outputs,)})

  def norm(name):
    shapes.update({f'{name}.weight': (D,), f'{name}.bias': (D,)})

  for stack in ('encoder', 'decoder'):
    shapes[f'model.{stack}.embed_positions.weight'] = (P + 2, D)
    norm(f'model.{stack}.layernorm_embedding')
    for i in range(config[f'{stack}_layers']):
      layer = f'model.{stack}.layers.{i}.'
      for kind in ('self_attn', 'encoder_attn')[: 1 + (stack == 'decoder')]:
        for letter in ('q', 'k', 'v', 'out'):
          linear(f'{layer}{kind}.{letter}_proj', D, D)
        norm(f'{layer}{kind}_layer_norm')
      linear(f'{layer}fc1', F, D)
      linear(f'{layer}fc2', D, F)
      norm(f'{layer}final_layer_norm')
  return shapes


def make(folder, case, **changes):
  """Writes a checkpoint; returns its folder, its config and its tensors by name."""
  config = {**_SIZES, **CASES[case], **changes}
  rng = np.random.default_rng(1)
  tensors = {name: rng.normal(size=shape).astype(np.float32) * 0.4 for name, shape in shapes_of(config).items()}
  write(folder, config, shapes_of(config), **tensors)
  return folder, config, tensors


@pytest.mark.parametrize('case', CASES)
def test_the_pass_in_numpy_gives_what_transformers_gave(case, tmp_path):
  _, config, tensors = make(tmp_path, case)
  found = bart_by_hand.logits(config, tensors, SOURCES, IS_SOURCE, IDS)
  np.testing.assert_allclose(found, golden('bart')[case], rtol=1e-6, atol=1e-6)


@pytest.mark.slow_cases
@pytest.mark.parametrize('case, mesh', [('gelu', (1, 1, 1)), ('gelu', (2, 2, 2)), ('scaled', (1, 3, 1))])
def test_logits_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source', case)
  there = load(folder, mesh)
  expected = bart_by_hand.logits(config, tensors, SOURCES, IS_SOURCE, IDS)

  def logits(variables):
    arguments = there.layout.unpad(variables), SOURCES, IDS
    return there.model.lm.apply(*arguments, source_segment_ids=IS_SOURCE.astype(np.int32), method='logits')[0]

  found = np.asarray(GuardedJit(bind_mesh(logits, there.layout.mesh))(there.variables))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()).items() >= config.items()


@pytest.mark.slow
def test_an_imported_run_decodes_as_numpy_and_is_exported(tmp_path, capsys):
  folder, config, tensors = make(tmp_path / 'source', 'scaled')
  run = tmp_path / 'run'
  assert main(['import-hf', str(folder), f'--job_log_dir={run}', '--set', 'task.ici_mesh_shape=(1,2,1)']) == 0
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}']) == 0
  assert_same_tensors(tmp_path / 'out', tensors)
  recorded = read_record(run).config
  model = recorded.task.model
  assert (model.start_id, model.source_end_id, model.decoder_tpl.stop_ids) == (2, 2, (2,))
  model.decoder_tpl.set(max_decode_steps=5, stop_ids=())
  lengths = IS_SOURCE.sum(1)
  ended = np.pad(np.where(IS_SOURCE, SOURCES, 0), ((0, 0), (0, 1)))  # A prompt is a source, with an end token.
  ended[np.arange(2), lengths] = 2
  expected = bart_by_hand.greedy(config, tensors, ended, np.arange(12) <= lengths[:, None], 5)
  prompts = [row[:length].tolist() for row, length in zip(SOURCES, lengths)]
  np.testing.assert_array_equal(decode_prompts(recorded, run, prompts), expected)
  with pytest.raises(ConfigError, match='a prompt has 14 tokens, and the model reads at most 13; shorten it'):
    decode_prompts(recorded, run, [[3] * 14])


def test_copies_of_the_table_are_accepted_and_others_refused(tmp_path):
  folder, config, tensors = make(tmp_path / 'plain', 'gelu')
  table = tensors['model.shared.weight']
  names = ('model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight', 'lm_head.weight')
  old = write(tmp_path / 'old', config, shapes_of(config), **tensors, **dict.fromkeys(names, table))
  plain, again = read_model(folder), read_model(old)
  np.testing.assert_array_equal(again.variables['lm']['softmax']['w'], plain.variables['lm']['softmax']['w'])
  other = write(tmp_path / 'other', config, shapes_of(config), **tensors, **{names[1]: table + 1})
  with pytest.raises(CheckpointError, match=r'does not account for: model\.decoder\.embed_tokens\.weight'):
    read_model(other)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'tie_word_embeddings': False}, 'tie_word_embeddings'),
    ({'decoder_ffn_dim': 8}, 'decoder_ffn_dim'),
    ({'normalize_before': True}, 'normalize_before'),
    ({'decoder_start_token_id': V}, 'expected an id below vocab_size = 37'),
    ({'architectures': ['BartForSequenceClassification']}, 'a head that does not predict the next token'),
  ],
  ids=str,
)
def test_what_cannot_be_imported_is_named(changes, message, tmp_path):
  config = {**_SIZES, **CASES['gelu'], **changes}
  write(tmp_path, config, shapes_of(config))
  with pytest.raises(ConfigError, match=message):
    read_model(tmp_path)


@pytest.mark.slow
def test_a_model_of_this_style_is_exported_and_others_are_not(tmp_path):
  import jax

  sizes = {'vocab_size': 11, 'model_dims': 12, 'num_layers': 1, 'num_heads': 3}
  model = encoder_decoder(style='bart', max_len=9, **sizes).instantiate()
  write_model(tmp_path / 'out', model, model.init(jax.random.key(0)))
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (config['model_type'], config['max_position_embeddings'], config['encoder_ffn_dim']) == ('bart', 9, 48)
  with pytest.raises(ConfigError, match='BART has learned positions'):
    wide = encoder_decoder(style='bart', dims_per_head=5, **sizes).instantiate()
    write_model(tmp_path / 'wide', wide, wide.init(jax.random.key(0)))
