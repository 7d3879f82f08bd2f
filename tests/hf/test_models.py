"""Every family computes what transformers computes, as recorded, and is written as it was read."""

from __future__ import annotations

import math
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import CASES, IDS, D, V, golden, make, tensors_of, weight, write
from on_meshes import MESHES, load
from test_depth_of_programs import size_of_program

from praxis_lite.bridges.hf import writer
from praxis_lite.bridges.hf.families import FAMILIES, describe_model
from praxis_lite.bridges.hf.files import StoredTensor
from praxis_lite.bridges.hf.hf_config import HfConfig, rope_values
from praxis_lite.bridges.hf.reader import open_checkpoint
from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.layers.base import Layer
from praxis_lite.layers.positions import RotaryPositions, YarnRotaryScaling
from praxis_lite.models import transformer_lm

pytestmark = pytest.mark.usefixtures('shared_programs')
every_case = pytest.mark.parametrize('case', CASES)


@pytest.mark.slow_cases
@every_case
def test_logits_are_those_of_transformers(case, tmp_path):
  expected = golden(case)['logits']
  np.testing.assert_allclose(load(make(tmp_path, case)).logits(IDS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  'case, mesh',
  [
    ('gemma2', (1, 3, 1)),
    ('gpt2', (2, 2, 2)),
    ('mixtral', (2, 2, 2)),
    ('mamba2', (2, 2, 2)),
    ('recurrent_gemma', (1, 3, 1)),
    ('qwen3_next', (2, 2, 2)),
  ],
)
def test_greedy_tokens_are_those_of_transformers_on_uneven_meshes(case, mesh, tmp_path):
  there = load(make(tmp_path, case), mesh, expert_axis='data')
  np.testing.assert_array_equal(there.greedy(IDS, 5), golden(case)['greedy'])


@pytest.mark.slow_cases
@every_case
def test_variables_are_the_same_on_every_mesh_and_written_as_they_were(case, tmp_path):
  source = make(tmp_path / 'source', case)
  expected = tensors_of(source)
  on_meshes = [load(source, mesh) for mesh in MESHES]
  for i, there in enumerate(on_meshes):
    jax.tree.map(np.testing.assert_array_equal, there.true_variables, on_meshes[0].true_variables)
    written = tensors_of(there.write(tmp_path / str(i), max_file_bytes=5000))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
      np.testing.assert_array_equal(written[name], tensor, err_msg=name)


def test_layers_are_cut_out_on_the_device_where_numpy_does_not_see_its_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(writer, '_is_in_host_memory', lambda data: False)
  source = make(tmp_path / 'source', 'mixtral')
  expected, written = tensors_of(source), tensors_of(load(source, (1, 3, 1)).write(tmp_path / 'out'))
  assert written.keys() == expected.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(written[name], tensor, err_msg=name)


@pytest.mark.slow_cases
@pytest.mark.parametrize('case, mesh', [('llama', (1, 1, 1)), ('gpt2', (1, 3, 1))])
def test_large_variables_are_assembled_on_the_devices(case, mesh, tmp_path, monkeypatch):
  source = make(tmp_path, case)
  expected = load(source).true_variables
  sizes, read = [], StoredTensor.read

  def counted(tensor, index):
    block = read(tensor, index)
    sizes.append(block.nbytes)
    return block

  monkeypatch.setattr(StoredTensor, 'read', counted)
  in_blocks = load(source, mesh, block_bytes=700).true_variables
  jax.tree.map(np.testing.assert_array_equal, in_blocks, expected)
  assert max(sizes) <= 700


@every_case
def test_config_is_written_as_it_was(case):
  recorded = golden(case)['config']
  family = FAMILIES[recorded['model_type']]
  written = describe_model(family.model(HfConfig(recorded)).instantiate(name='model'), family.model_type)[1]
  for name in written.keys() & recorded.keys():
    assert recorded[name] in (written[name], None), name  # None: a default, which is written out.


def test_a_file_of_transformers_4_says_the_same():
  new = golden('llama')['config']
  rope = dict(new['rope_parameters'])
  old = {'rope_theta': rope.pop('rope_theta'), 'rope_scaling': {'type': rope.pop('rope_type'), **rope}}
  changed = {**new, **old}
  del changed['rope_parameters'], changed['attention_bias'], changed['mlp_bias']
  assert FAMILIES['llama'].model(HfConfig(new)) == FAMILIES['llama'].model(HfConfig(changed))


def test_tensors_without_the_prefix_of_the_head_and_old_buffers_are_accepted(tmp_path):
  recorded = golden('gpt2')
  names = {name.removeprefix('transformer.'): tuple(shape) for name, shape in recorded['tensors'].items()}
  mask = np.tri(8, dtype=np.float32)[None, None]
  buffers = {'h.0.attn.bias': mask, 'h.1.attn.bias': mask.astype(bool), 'h.0.attn.masked_bias': np.float32([-1e4])[0]}
  there = load(write(tmp_path / 'old', recorded['config'], names, **buffers))
  np.testing.assert_array_equal(there.true_variables['softmax']['w'], weight('wte.weight', names['wte.weight'], 'gpt2'))


@pytest.mark.parametrize(
  'case, name, value',
  [
    ('gpt2', 'transformer.h.0.attn.bias', np.ones((1, 1, 8, 8), np.float32)),
    ('gpt2', 'transformer.h.0.attn.masked_bias', np.float32([-1])[0]),
    ('gpt2', 'transformer.h.0.attn.rotary_emb.inv_freq', np.ones(3, np.float32)),
    ('llama', 'model.layers.1.self_attn.rotary_emb.inv_freq', 1e4 ** -np.array([0, 1 / 3, 2 / 3])),
    ('llama', 'model.layers.1.self_attn.rotary_emb.inv_freq', 50.0 ** -np.array([0, 1 / 2])),
  ],
)
def test_buffers_that_config_json_contradicts_are_refused(case, name, value, tmp_path):
  recorded = golden(case)
  shapes = {name: tuple(shape) for name, shape in recorded['tensors'].items()}
  with pytest.raises(CheckpointError, match=rf'has tensors that its config.json does not account for: {name}$'):
    load(write(tmp_path, recorded['config'], shapes, **{name: value}))


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize('factor', [1, 2])
def test_rates_of_old_checkpoints_are_accepted_if_they_are_those_of_config_json(dtype, factor, tmp_path):
  recorded = golden('llama_with_biases')  # Rates are divided by 2; old files have them as they are, or divided.
  shapes = {name: tuple(shape) for name, shape in recorded['tensors'].items()}
  rates = (100.0 ** -np.array([0, 1 / 3, 2 / 3]) / factor).astype(dtype)
  open_checkpoint(
    write(tmp_path, recorded['config'], shapes, **{'model.layers.0.self_attn.rotary_emb.inv_freq': rates})
  )


@pytest.mark.parametrize('case, is_tied', [('llama', True), ('gpt2', None)])
def test_a_head_of_its_own_is_not_tied_whatever_config_json_says(case, is_tied, tmp_path):
  recorded = golden(case)
  config = {**recorded['config'], **({} if is_tied is None else {'tie_word_embeddings': is_tied})}
  shapes = {name: tuple(shape) for name, shape in recorded['tensors'].items()} | {'lm_head.weight': (V, D)}
  there = load(write(tmp_path / 'differs', config, shapes))
  (note,) = there.checkpoint.notes
  assert 'tie_word_embeddings is true, but lm_head.weight differs from' in note
  np.testing.assert_array_equal(there.true_variables['softmax']['w'].T, weight('lm_head.weight', (V, D), case))
  if case == 'llama':  # Its golden logits are those of a head of its own.
    np.testing.assert_allclose(there.logits(IDS), recorded['logits'], rtol=1e-5, atol=1e-5)
  written = tensors_of(there.write(tmp_path / 'out'))
  np.testing.assert_array_equal(written['lm_head.weight'], weight('lm_head.weight', (V, D), case))


def test_a_head_that_repeats_the_embedding_is_tied(tmp_path):
  recorded = golden('qwen3')
  shapes = {name: tuple(shape) for name, shape in recorded['tensors'].items()}
  head = weight('model.embed_tokens.weight', (V, D), 'qwen3')
  there = load(write(tmp_path, recorded['config'], shapes, **{'lm_head.weight': head}))
  assert 'embedding' not in there.true_variables and not there.checkpoint.notes


@pytest.mark.parametrize('style, repeat', [('llama', True), ('llama', False), ('gpt2', True)])
def test_a_model_that_was_not_imported_is_of_the_family_that_computes_the_same(style, repeat):
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2, style=style, repeat=repeat)
  assert describe_model(model.instantiate())[0].model_type == style


def test_biases_that_are_asked_for_at_the_top_are_those_of_the_layers_below():
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2).set(use_bias=True)
  family, values = describe_model(model.instantiate())
  assert (family.model_type, values['attention_bias'], values['mlp_bias']) == ('llama', True, True)


def test_how_a_model_was_trained_and_decodes_is_not_part_of_it():
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2)
  attention = model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl
  attention.set(context_axis='context', context_method='all_to_all', block_size=64, dropout_rate=0.1)
  attention.set(implementation='blockwise', cache_dtype='int8', cache_page_size=128)
  assert describe_model(model.instantiate())[0].model_type == 'llama'


def test_what_no_family_computes_is_named():
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2)
  model.lm_tpl.transformer_tpl.layers_tpl.norm_policy = 'post'
  with pytest.raises(
    ConfigError, match=r"it differs from llama, .*, in lm.transformer.layers.norm_policy, which is 'post'"
  ):
    describe_model(model.instantiate())


@pytest.mark.parametrize('repeat', [True, False])
@pytest.mark.parametrize(
  ('style', 'changed', 'told'),
  [
    (
      'gpt2',
      {'lm_tpl.use_bias': False},
      r'lm\..*_norm\.use_bias, which is False here and True there; .*; and \d+ more',
    ),
    ('gpt2', {'lm_tpl.position_tpl': None}, r'lm\.position_tpl, which is None here and LearnedPositions there'),
    ('llama', {'lm_tpl.softmax_tpl.soft_cap': 4.0}, r'lm\.softmax\.soft_cap, which is 4\.0 here and None there'),
  ],
)
def test_the_family_that_is_named_is_that_with_most_layers_in_common(style, changed, told, repeat):
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2, style=style, repeat=repeat)
  apply_overrides({'model': model}, [f'model.{path}={value}' for path, value in changed.items()])
  with pytest.raises(ConfigError, match=rf'; it differs from {style}, the nearest, in {told}$'):
    describe_model(model.instantiate())


def test_an_activation_that_no_family_has_is_named():
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2, style='gpt2')
  model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl.activation = 'softplus'
  with pytest.raises(ConfigError, match=r"to none of the families .*: lm.*\.ff\.activation: .* no .* 'softplus'$"):
    describe_model(model.instantiate())


class OwnFeedForward(Layer):
  """A layer that no family has."""

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED

  def __call__(self, x):
    return x


def test_a_layer_of_a_user_is_named():
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2)
  model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl = Config(OwnFeedForward)
  with pytest.raises(ConfigError, match=r'families .*: none of them has lm\.transformer\..*ff, a OwnFeedForward$'):
    describe_model(model.instantiate())


@pytest.mark.parametrize(
  'model_type, sizes, variables',
  [
    (
      'phi3',
      {'hidden_size': 3072, 'intermediate_size': 8192, 'num_hidden_layers': 32, 'vocab_size': 32_064},
      3_821_079_552,
    ),
    (
      'gemma3_text',
      {'hidden_size': 1152, 'intermediate_size': 6912, 'num_hidden_layers': 26, 'vocab_size': 262_144}
      | {'num_attention_heads': 4, 'num_key_value_heads': 1},
      999_885_952,
    ),
    (
      'olmo2',
      {'hidden_size': 4096, 'intermediate_size': 11_008, 'num_hidden_layers': 32, 'vocab_size': 100_352},
      7_298_617_344,
    ),
    (
      'smollm3',
      {'hidden_size': 2048, 'intermediate_size': 11_008, 'num_hidden_layers': 36, 'vocab_size': 128_256}
      | {'num_attention_heads': 16},
      3_075_098_624,
    ),
    (
      'deepseek_v3',
      {'hidden_size': 7168, 'num_hidden_layers': 61, 'num_attention_heads': 128, 'vocab_size': 129_280},
      671_026_419_200,
    ),
    (
      'qwen3_next',
      {'hidden_size': 2048, 'num_hidden_layers': 48, 'num_attention_heads': 16, 'vocab_size': 151_936},
      79_674_391_296,
    ),
    ('mamba2', {}, 7_285_403_648),
    (
      'phi3',
      {'hidden_size': 3072, 'intermediate_size': 8192, 'num_hidden_layers': 32, 'vocab_size': 200_064}
      | {
        'num_attention_heads': 24,
        'num_key_value_heads': 8,
        'tie_word_embeddings': True,
        'partial_rotary_factor': 0.75,
      },
      3_836_021_760,
    ),
    (
      'recurrent_gemma',
      {'num_attention_heads': 10, 'num_key_value_heads': 1, 'intermediate_size': 15_360},
      2_682_862_080,
    ),
    ('gpt_oss', {'num_attention_heads': 64, 'num_hidden_layers': 24, 'num_local_experts': 32}, 20_914_757_184),
    ('gpt_oss', {'num_attention_heads': 64}, 116_829_156_672),
  ],
  ids=[
    'Phi-3-mini',
    'Gemma-3-1B',
    'OLMo-2-7B',
    'SmolLM3-3B',
    'DeepSeek-V3',
    'Qwen3-Next-80B-A3B',
    'Mamba-Codestral-7B',
    'Phi-4-mini',
    'RecurrentGemma-2B',
    'gpt-oss-20b',
    'gpt-oss-120b',
  ],
)
def test_published_sizes_have_as_many_variables(model_type, sizes, variables):
  """As many as in transformers, without memory for them."""
  hf = HfConfig({'model_type': model_type, 'num_attention_heads': 32, **sizes})
  weights = FAMILIES[model_type].model(hf).instantiate(name='model').abstract_init()
  assert sum(math.prod(weight.full_shape) for weight in leaves_by_path(weights).values()) == variables


def sizes_of_programs(case, num_layers):
  """Of the gradient in training, and of decoding."""
  fields = dict.fromkeys({'n_layer', 'num_hidden_layers'} & CASES[case].keys(), num_layers)
  config = {name: value for name, value in CASES[case].items() if name != 'layer_types'} | fields
  model = FAMILIES[config['model_type']].model(HfConfig(config)).instantiate(name='model')
  variables = jax.tree.map(lambda weight: weight.as_struct(), model.abstract_init())
  ids, key = jax.ShapeDtypeStruct((2, 8), 'int32'), jax.random.key(0)
  batch = {'ids': ids, 'labels': ids, 'weights': jax.ShapeDtypeStruct((2, 8), 'float32')}
  prompts = {'ids': ids, 'prompt_lengths': jax.ShapeDtypeStruct((2,), 'int32')}

  def loss(variables, batch):
    return model.apply(variables, batch, key=key)[0][0]['loss'][0]

  def decode(variables, prompts):
    return model.apply(variables, prompts, key=key, method='decode')

  programs = ((jax.grad(loss), batch), (decode, prompts))
  return [size_of_program(jax.make_jaxpr(program)(variables, x).jaxpr) for program, x in programs]


@pytest.mark.slow_cases
@pytest.mark.parametrize('case', ['llama', 'gpt2', 'gemma3', 'deepseek_v3', 'mamba2'])
def test_programs_do_not_grow_with_the_number_of_layers(case):
  """So the first step and the first token do not wait longer for a deeper import; up to 4 layers decode unrolled."""
  assert sizes_of_programs(case, 24) == sizes_of_programs(case, 12)


def test_the_guide_names_all_families_and_the_scalings_of_positions_that_are_imported():
  guide = (Path(__file__).parents[2] / 'docs' / 'hugging-face.md').read_text()
  rows = re.findall(r'^\| (`\w+`(?:, `\w+`)*) \|', guide, re.MULTILINE)
  assert {name for row in rows for name in re.findall(r'\w+', row)} >= FAMILIES.keys()
  (paragraph,) = re.findall(r'^Rotary positions may be scaled .*?is refused', guide, re.DOTALL | re.MULTILINE)
  with pytest.raises(ConfigError, match=r"'dynamic' is not supported; only default, linear, llama3, yarn and longro"):
    FAMILIES['llama'].model(HfConfig(CASES['llama'] | {'rope_parameters': {'rope_type': 'dynamic'}}))
  assert all(kind in paragraph.lower() for kind in ('linear', 'llama3', 'yarn', 'longrope'))


def test_exports_write_null_for_a_factor_of_yarn_that_the_model_computes():
  scaling = Config(YarnRotaryScaling, factor=4.0, original_max_len=16)
  rotary = Config(RotaryPositions, dims=8, scaling_tpl=scaling).instantiate()
  assert rope_values(rotary)['rope_scaling'] == {
    **{'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16},
    **{'beta_fast': 32.0, 'beta_slow': 1.0, 'attention_factor': None, 'truncate': True},
  }
