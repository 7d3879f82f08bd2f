"""T5, Flan-T5 and mT5: logits and tokens are those of a forward pass in NumPy, on meshes; checkpoints are as read."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
import t5_by_hand
from checkpoints import assert_same_tensors, golden, tensors_of, weight, write
from on_meshes import MESHES, load

from praxis_lite.bridges.hf import export_run, read_model, write_model
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.inputs import ByteTokenizer, SentencePieceTokenizer
from praxis_lite.models import encoder_decoder
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.imported_files import tokenizer_in
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.runs.records.record import read_record
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

V, D, F, H, N = 37, 18, 20, 6, 3
_SIZES = {
  'vocab_size': V,
  'd_model': D,
  'd_kv': H,
  'd_ff': F,
  'num_heads': N,
  'num_layers': 3,
  'num_decoder_layers': 2,
  'relative_attention_num_buckets': 8,
  'relative_attention_max_distance': 9,
  'layer_norm_epsilon': 1e-6,
  'is_encoder_decoder': True,
  'pad_token_id': 0,
  'eos_token_id': 1,
  'decoder_start_token_id': 0,
}
CASES = {
  't5_v1_0': {'model_type': 't5', 'feed_forward_proj': 'relu', 'tie_word_embeddings': True},
  't5_v1_1': {'model_type': 't5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
  'mt5': {'model_type': 'mt5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
  'tied_gates': {'model_type': 't5', 'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': True},
}
every_case = pytest.mark.parametrize('case', CASES)
RNG = np.random.default_rng(0)
SOURCES = RNG.integers(2, V, (2, 11)).astype(np.int32)
IS_SOURCE = np.arange(11) < np.array([[11], [7]])
IDS = np.concatenate([np.zeros((2, 1), np.int64), RNG.integers(2, V, (2, 8))], axis=1).astype(np.int32)


def shapes_of(config):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  inner = config['num_heads'] * config['d_kv']
  D, F = config['d_model'], config['d_ff']
  shapes = {'shared.weight': (config['vocab_size'], D)}
  if not config['tie_word_embeddings']:
    shapes['lm_head.weight'] = (config['vocab_size'], D)
  inward = ('wi',) if config['feed_forward_proj'] == 'relu' else ('wi_0', 'wi_1')
  for stack, count, kinds in (
    ('encoder', config['num_layers'], ('SelfAttention', 'DenseReluDense')),
    ('decoder', config['num_decoder_layers'], ('SelfAttention', 'EncDecAttention', 'DenseReluDense')),
  ):
    for i in range(count):
      for number, kind in enumerate(kinds):
        layer = f'{stack}.block.{i}.layer.{number}.'
        shapes[f'{layer}layer_norm.weight'] = (D,)
        if kind == 'DenseReluDense':
          shapes |= {f'{layer}{kind}.{name}.weight': (F, D) for name in inward}
          shapes[f'{layer}{kind}.wo.weight'] = (D, F)
        else:
          shapes |= {f'{layer}{kind}.{name}.weight': (inner, D) for name in 'qkv'}
          shapes[f'{layer}{kind}.o.weight'] = (D, inner)
    table = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    shapes[table] = (config['relative_attention_num_buckets'], config['num_heads'])
    shapes[f'{stack}.final_layer_norm.weight'] = (D,)
  return shapes


def make(folder, case, **changes):
  """Writes a checkpoint; returns its folder, config and tensors."""
  config = {**_SIZES, **CASES[case], **changes}
  shapes = shapes_of(config)
  write(folder, config, shapes)
  return folder, config, {name: weight(name, shape, config['model_type']) for name, shape in shapes.items()}


def logits_of(there):
  def logits(variables):
    arguments = there.layout.unpad(variables), SOURCES, IDS
    return there.model.lm.apply(*arguments, source_segment_ids=IS_SOURCE.astype(np.int32), method='logits')[0]

  return np.asarray(GuardedJit(bind_mesh(logits, there.layout.mesh))(there.variables))


@every_case
def test_the_pass_in_numpy_gives_what_transformers_gave(case, tmp_path):
  _, config, tensors = make(tmp_path, case)
  found = t5_by_hand.logits(config, tensors, SOURCES, IS_SOURCE, IDS)
  np.testing.assert_allclose(found, golden('t5')[case], rtol=1e-5, atol=2e-5)  # Those of transformers are float32.


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', MESHES, ids=str)
@every_case
def test_logits_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source', case)
  there = load(folder, mesh)
  expected = t5_by_hand.logits(config, tensors, SOURCES, IS_SOURCE, IDS)
  assert np.abs(np.diff(expected, axis=1)).max() > 0.5
  np.testing.assert_allclose(logits_of(there), expected, rtol=1e-5, atol=1e-5)
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text()).items() >= config.items()


@pytest.mark.slow_cases
@pytest.mark.parametrize('case, mesh', [('t5_v1_0', (2, 2, 2)), ('t5_v1_1', (1, 3, 1))])
def test_greedy_tokens_are_those_of_numpy(case, mesh, tmp_path):
  folder, config, tensors = make(tmp_path, case)
  there = load(folder, mesh, new_tokens=5)
  batch = {'source_ids': SOURCES, 'source_lengths': IS_SOURCE.sum(1).astype(np.int32)}

  def decode(variables):
    variables = {'lm': there.layout.unpad(variables)}
    return there.model.apply(variables, batch, method='decode', do_eval=True)[0][1]['ids']

  found = np.asarray(GuardedJit(bind_mesh(decode, there.layout.mesh))(there.variables))
  np.testing.assert_array_equal(found, t5_by_hand.greedy(config, tensors, SOURCES, IS_SOURCE, 5))


def test_buckets_by_hand_are_those_of_the_paper():
  assert [t5_by_hand.bucket(-n, False, 32, 128) for n in (0, 1, 15, 16, 20, 127, 500)] == [0, 1, 15, 16, 17, 31, 31]
  assert [t5_by_hand.bucket(n, True, 32, 128) for n in (-500, -8, -1, 0, 1, 8, 500)] == [15, 8, 1, 0, 17, 24, 31]


def test_old_checkpoints_have_copies_and_an_unused_table(tmp_path):
  folder, config, tensors = make(tmp_path / 'plain', 't5_v1_0')
  unused = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
  names = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight')
  more = {unused: np.ones((8, N), np.float32), **dict.fromkeys(names, tensors['shared.weight'])}
  old = write(tmp_path / 'old', config, shapes_of(config), **more)
  plain, again = read_model(folder), read_model(old)
  jax.tree.map(np.testing.assert_array_equal, again.variables, plain.variables)
  other = write(tmp_path / 'other', config, shapes_of(config), **{names[1]: tensors['shared.weight'] + 1})
  with pytest.raises(CheckpointError, match=r'does not account for: decoder\.embed_tokens\.weight'):
    read_model(other)


@pytest.mark.slow
def test_an_imported_run_decodes_trains_and_is_exported(tmp_path, capsys):
  folder, config, tensors = make(tmp_path / 'source', 't5_v1_1', vocab_size=300)
  run = tmp_path / 'run'
  assert main(['import-hf', str(folder), f'--job_log_dir={run}', '--set', 'task.ici_mesh_shape=(1,2,1)']) == 0
  assert 't5, 25,' in capsys.readouterr().out
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}', '--max_file_gb=0.000008']) == 0
  assert_same_tensors(tmp_path / 'out', tensors)

  recorded = read_record(run).config
  model = recorded.task.model
  assert (model.start_id, model.source_end_id, model.decoder_tpl.stop_ids) == (0, 1, (1,))
  model.decoder_tpl.set(max_decode_steps=5, stop_ids=())
  lengths = IS_SOURCE.sum(1)
  prompts = [row[:length].tolist() for row, length in zip(SOURCES, lengths)]
  ended = np.pad(np.where(IS_SOURCE, SOURCES, 0), ((0, 0), (0, 1)))  # A prompt is a source, with an end token.
  ended[np.arange(2), lengths] = 1
  expected = t5_by_hand.greedy(config, tensors, ended, np.arange(12) <= lengths[:, None], 5)
  np.testing.assert_array_equal(decode_prompts(recorded, run, prompts), expected)

  (tmp_path / 'pairs.tsv').write_text('ab\tcd\nb\ta\n')
  for data in recorded.datasets:
    assert data.start_id == 0 and data.end_sources and data.truncate
    data.set(path=str(tmp_path / 'pairs.tsv'), source_len=8, target_len=6, batch_size=2)
    data.tokenizer_tpl = Config(ByteTokenizer, eos_id=1)
  recorded.task.train.set(num_train_steps=2, save_interval_steps=1)
  assert run_train(recorded, run).step == 2
  export_run(recorded, run, tmp_path / 'after')
  after = tensors_of(tmp_path / 'after')
  assert 0 < max(np.abs(after[name] - tensor).max() for name, tensor in tensors.items()) < 1e-3
  source = open_run(run).load().score([prompts[0]], [[5, 6]])[0]
  assert np.isfinite(source.log_prob) and source.ids == [5, 6]


def test_the_tokenizer_of_t5_has_another_name(tmp_path):
  assert tokenizer_in(tmp_path) is None
  (tmp_path / 'spiece.model').touch()
  found = tokenizer_in(tmp_path, tmp_path / 'kept')
  assert found == Config(SentencePieceTokenizer, model_path=str(tmp_path / 'kept' / 'spiece.model'))


def test_a_model_of_ours_is_written_and_read_again(tmp_path):
  for style in ('t5', 't5_v1_0'):
    sizes = {'vocab_size': 11, 'model_dims': 8, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 12}
    model = encoder_decoder(**sizes, style=style, start_id=3).set(source_end_id=2).instantiate()
    variables = model.init(jax.random.key(0))
    write_model(tmp_path / style, model, variables)
    found = read_model(tmp_path / style)
    assert (found.model.start_id, found.model.source_end_id) == (3, 2)
    jax.tree.map(np.testing.assert_array_equal, found.variables, variables)


def test_layers_apart_are_written_as_a_scan_over_them_is(tmp_path):
  sizes = {'vocab_size': 11, 'model_dims': 8, 'num_layers': 2, 'num_encoder_layers': 3, 'num_heads': 2}
  model = encoder_decoder(**sizes).instantiate()
  variables = model.init(jax.random.key(0))
  write_model(tmp_path / 'scan', model, variables)
  apart = dict(variables['lm'])
  for stack, count in (('encoder', 3), ('decoder', 2)):
    below = apart[stack]['layers']
    apart[stack] = {f'layers_{i}': jax.tree.map(lambda w, i=i: w[i], below) for i in range(count)}
  write_model(tmp_path / 'apart', encoder_decoder(**sizes, repeat=False).instantiate(), {'lm': apart})
  assert_same_tensors(tmp_path / 'apart', tensors_of(tmp_path / 'scan'))


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'style': 'classical'}, r'belongs to none of the families t5, mt5, bart'),
    ({'activation': 'gelu'}, r"with gates, T5 has 'gelu_tanh' but not 'gelu'"),
    ({'activation': 'softplus'}, r"transformers has no activation function 'softplus'"),
  ],
)
def test_a_model_of_no_family_is_told_why(fields, says, tmp_path):
  sizes = {'vocab_size': 11, 'model_dims': 8, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 12}
  model = encoder_decoder(**sizes, **fields).instantiate()
  with pytest.raises(ConfigError, match=says):
    write_model(tmp_path, model, model.init(jax.random.key(0)))


def test_a_model_with_other_positions_is_told_the_difference(tmp_path):
  config = encoder_decoder(vocab_size=11, model_dims=8, num_layers=2, num_heads=2)
  config.lm_tpl.decoder_tpl.layers_tpl.attention_tpl.logit_soft_cap = 2.0
  model = config.instantiate()
  with pytest.raises(ConfigError, match=r'it differs from t5, the nearest, in .*soft_cap'):
    write_model(tmp_path, model, model.init(jax.random.key(0)))


@pytest.mark.parametrize(
  'changes, says',
  [
    ({'feed_forward_proj': 'gated-swiglu'}, "feed_forward_proj = 'swiglu' is not supported"),
    ({'feed_forward_proj': None}, 'feed_forward_proj = None is not supported'),
    ({'is_encoder_decoder': False}, 'is_encoder_decoder = false is not supported'),
    ({'num_decoder_layers': 0}, 'num_decoder_layers = 0; expected an integer of at least 1'),
    ({'eos_token_id': 99}, 'gives 99; expected an id below vocab_size = 37'),
    ({'architectures': ['T5ForSequenceClassification']}, 'a head that does not predict the next token'),
  ],
)
def test_a_config_that_is_not_supported_is_named(changes, says, tmp_path):
  config = {**_SIZES, **CASES['t5_v1_1'], **changes}
  write(tmp_path, config, shapes_of({**_SIZES, **CASES['t5_v1_1']}))
  with pytest.raises(ConfigError, match=says):
    read_model(tmp_path)


def test_values_that_a_config_leaves_out_are_those_of_transformers(tmp_path):
  """config.json of google/t5-v1_1-base has no num_decoder_layers, and that of t5-small no feed_forward_proj."""
  folder, config, tensors = make(tmp_path / 'a', 't5_v1_0', num_layers=2)
  left_out = (
    'num_decoder_layers',
    'feed_forward_proj',
    'tie_word_embeddings',
    'decoder_start_token_id',
    'pad_token_id',
  )
  short = {name: value for name, value in config.items() if name not in {*left_out, 'pad_token_id'}}
  (folder / 'config.json').write_text(json.dumps({**short, 'architectures': ['T5WithLMHeadModel']}))
  np.testing.assert_allclose(
    logits_of(load(folder)), t5_by_hand.logits(config, tensors, SOURCES, IS_SOURCE, IDS), rtol=1e-5, atol=1e-5
  )


def test_an_experiment_of_published_sizes_from_its_config():
  found = training_experiment({**CASES['t5_v1_1'], 'd_model': 768, 'd_ff': 2048, 'num_layers': 12, 'num_heads': 12})
  weights = found.task.instantiate().model.abstract_init()
  assert sum(math.prod(w.full_shape) for w in jax.tree.leaves(weights)) == 247_577_856
  assert found.task.model.lm_tpl.encoder_tpl.remat == found.task.model.lm_tpl.decoder_tpl.remat == 'full'
  assert {data.source_len for data in found.datasets} == {512}
