"""Adapters in the format of peft, against the weights of the model that has merged them."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from checkpoints import CASES
from drawn_state import drawn_variables

from praxis_lite.bridges.hf import read_adapter, write_adapter, write_model
from praxis_lite.bridges.hf.families import FAMILIES, describe_model
from praxis_lite.bridges.hf.files import Declared, StoredTensor, read_folder, read_header, write_safetensors
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.merged import merge_streamed
from praxis_lite.checkpoints.streamed import StreamedArray, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import leaves, path_name, select
from praxis_lite.layers import Dora, Ia3, Lora, MoeFeedForward
from praxis_lite.models import ADAPTER_VARIABLES, add_adapters, merge_adapters, remove_adapters, transformer_lm

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
EMBEDDING = Config(Lora, layers=r'lm\.embedding', rank=4)


def lm(*adapters, experts=False, **fields):
  sizes = {'vocab_size': 11, 'model_dims': 12, 'num_layers': 3, 'num_heads': 3, 'num_kv_heads': 1, 'hidden_dims': 5}
  mixture = Config(MoeFeedForward, num_experts=2) if experts else None
  return add_adapters(transformer_lm(**sizes, experts=mixture, **fields), *adapters)


ATTENTION = Config(Lora, layers=r'.*\.attention\.(query|key|value|out)', rank=3, alpha=6.0)
KINDS = {
  'llama': ({}, (EMBEDDING, ATTENTION, Config(Lora, rank=2, alpha=8.0))),
  'mixtral': ({'experts': True}, (ATTENTION, Config(Lora, rank=2, alpha=8.0))),
}


@pytest.mark.parametrize('kind', KINDS)
def test_adapters_are_those_of_peft(kind, tmp_path):
  """W + alpha / r B A of the files is the weight of the merged model, and reading returns what was written."""
  fields, adapters = KINDS[kind]
  config = lm(*adapters, **fields)
  model = config.instantiate()
  variables = drawn_variables(model.abstract_init())
  assert write_adapter(tmp_path / 'adapter', model, variables, base='some/model') == [CONFIG, TENSORS]
  base = select(variables, lambda path: not any('lora' in part for part in path))
  write_model(tmp_path / 'base', remove_adapters(config).instantiate(), base)
  write_model(tmp_path / 'merged', model, variables)
  before, after = read_folder(tmp_path / 'base'), read_folder(tmp_path / 'merged')
  stored, settings = (
    read_header(tmp_path / 'adapter' / TENSORS),
    json.loads((tmp_path / 'adapter' / CONFIG).read_text()),
  )
  assert settings['peft_type'] == 'LORA' and settings['base_model_name_or_path'] == 'some/model'
  assert before.keys() == after.keys()
  changed = 0
  for name, tensor in before.items():
    module, expected = name.removesuffix('.weight'), tensor.read_all()
    for a, b in (('lora_A.weight', 'lora_B.weight'), ('lora_embedding_A', 'lora_embedding_B')):
      if (of_a := stored.get(f'base_model.model.{module}.{a}')) is not None:
        of_b = stored[f'base_model.model.{module}.{b}']
        rank, alpha = settings['rank_pattern'].get(module, settings['r']), settings['alpha_pattern'].get(module)
        assert of_a.shape[0] == of_b.shape[1] == rank
        assert module in settings['target_modules'] or module.rpartition('.')[2] in settings['target_modules']
        update = (settings['lora_alpha'] if alpha is None else alpha) / rank * (of_b.read_all() @ of_a.read_all())
        expected, changed = expected + (update.T if 'embedding' in a else update), changed + 1
    np.testing.assert_allclose(after[name].read_all(), expected, atol=1e-6, err_msg=name)
  assert 2 * changed == len(stored)

  found = read_adapter(tmp_path / 'adapter', remove_adapters(config))
  written = select(variables, lambda path: any('lora' in part for part in path))
  assert jax.tree.structure(found.variables) == jax.tree.structure(written)
  jax.tree.map(np.testing.assert_array_equal, found.variables, written)
  assert leaves(found.model.instantiate().abstract_init()).keys() == leaves(model.abstract_init()).keys()


def test_names_and_settings_of_the_format(tmp_path):
  """As peft documents them: all modules of a name are named by it, others in full."""
  model = lm(Config(Lora, layers=r'.*\.(query|value)', rank=2)).instantiate()
  write_adapter(tmp_path, model, drawn_variables(model.abstract_init()))
  settings = json.loads((tmp_path / CONFIG).read_text())
  assert settings['target_modules'] == ['q_proj', 'v_proj'] and (settings['r'], settings['lora_alpha']) == (2, 16.0)
  assert settings['rank_pattern'] == settings['alpha_pattern'] == {} and settings['bias'] == 'none'
  shapes = {name: tensor.shape for name, tensor in read_header(tmp_path / TENSORS).items()}
  assert len(shapes) == 3 * 2 * 2
  layer = 'base_model.model.model.layers.1.self_attn'
  assert shapes[f'{layer}.q_proj.lora_A.weight'] == (2, 12) and shapes[f'{layer}.q_proj.lora_B.weight'] == (12, 2)
  assert shapes[f'{layer}.v_proj.lora_A.weight'] == (2, 12) and shapes[f'{layer}.v_proj.lora_B.weight'] == (4, 2)


def write(folder, tensors, **settings):
  folder.mkdir(exist_ok=True)
  content = {'peft_type': 'LORA', 'r': 2, 'lora_alpha': 4, 'target_modules': ['q_proj'], **settings}
  (folder / CONFIG).write_text(json.dumps(content))
  declared = {name: Declared(np.dtype(np.float32), x.shape) for name, x in tensors.items()}
  write_safetensors(str(folder / TENSORS), list(declared), declared, tensors.__getitem__)


def of_layers(*layers, rank=2):
  rng, prefix = np.random.default_rng(0), 'base_model.model.model.layers'
  shapes = {'A': (rank, 12), 'B': (12, rank)}
  return {
    f'{prefix}.{i}.self_attn.q_proj.lora_{x}.weight': rng.standard_normal(shape).astype(np.float32)
    for i in layers
    for x, shape in shapes.items()
  }


def test_layers_without_an_adapter_have_zeros(tmp_path):
  tensors = of_layers(0, 2)
  write(tmp_path, tensors, use_rslora=True, lora_dropout=0.1)
  model, variables = read_adapter(tmp_path, lm())
  ours = variables['lm']['transformer']['layers']['attention']['query']['lora']
  for i in (0, 2):
    name = f'base_model.model.model.layers.{i}.self_attn.q_proj.lora_'
    np.testing.assert_array_equal(ours['a'][i], tensors[f'{name}A.weight'].T)
    np.testing.assert_array_equal(ours['b'][i].reshape(2, 12), tensors[f'{name}B.weight'].T)
  assert not ours['a'][1].any() and not ours['b'][1].any()
  (adapter,) = model.adapters
  built = adapter.instantiate()
  assert (built.rank, built.dropout_rate) == (2, 0.1) and np.isclose(built.scale, 4 / 2**0.5)


def test_bad_adapters(tmp_path):
  for settings, message in (
    ({'peft_type': 'ADALORA'}, "peft_type = 'ADALORA' is not supported"),
    ({'bias': 'all'}, "bias = 'all' is not supported"),
    ({'modules_to_save': ['lm_head']}, 'modules_to_save'),
    ({'r': 0}, 'r must be a number above 0, got 0'),
    ({'lora_alpha': None}, 'lora_alpha must be a number above 0'),
    ({'init_lora_weights': 'pissa_niter_4'}, "init_lora_weights = 'pissa_niter_4' changes the weights of the base"),
    ({'alora_invocation_tokens': [1, 2]}, r'alora_invocation_tokens = \[1, 2\] is not supported'),
    ({'alpha_pattern': {'layers.0.self_attn.q_proj': 8}}, r'alpha_pattern gives different values to the layers of'),
  ):
    write(tmp_path, of_layers(0), **settings)
    with pytest.raises(ConfigError, match=message):
      read_adapter(tmp_path, lm())
  wrong = {name.replace('self_attn', 'other'): x for name, x in of_layers(0).items()}
  for tensors, message in (
    ({}, 'has no adapter of a layer of this model'),
    (wrong, 'has no adapter of a layer of this model'),
    (of_layers(0) | wrong, 'belong to no layer of this model: base_model.model.model.layers.0.other'),
    (of_layers(0) | of_layers(1, rank=3), 'all have one rank'),
    ({name: x[:, :2] for name, x in of_layers(0).items()}, 'has shape .*of this model'),
    (
      {name: x for name, x in of_layers(0).items() if 'lora_A' in name},
      'but not .*lora_B.weight; an adapter needs both',
    ),
  ):
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
      read_adapter(tmp_path, lm())
  (tmp_path / TENSORS).unlink()
  with pytest.raises(CheckpointError, match='save the adapter with peft as safetensors'):
    read_adapter(tmp_path, lm())
  with pytest.raises(CheckpointError, match='an adapter is a folder with this file'):
    read_adapter(tmp_path / 'nowhere', lm())
  model = lm().instantiate()
  with pytest.raises(ConfigError, match='has no adapters to write'):
    write_adapter(tmp_path, model, {})


def test_the_tables_that_peft_writes_beside_their_adapters_are_known(tmp_path):
  module, rng = 'base_model.model.model.embed_tokens', np.random.default_rng(1)
  shapes = {'lora_embedding_A': (2, 11), 'lora_embedding_B': (12, 2), 'base_layer.weight': (11, 12)}
  tensors = {f'{module}.{name}': rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
  write(tmp_path, tensors)
  _, variables = read_adapter(tmp_path, lm())
  ours = variables['lm']['embedding']['lora']
  np.testing.assert_array_equal(ours['a'], tensors[f'{module}.lora_embedding_A'].T)
  write(tmp_path, tensors | {f'{module}.base_layer.weight': np.zeros((13, 12), np.float32)})
  with pytest.raises(CheckpointError, match='an adapter of a resized vocabulary needs a model of that size'):
    read_adapter(tmp_path, lm())


def test_experts_with_adapters_of_some_weights_have_zeros_for_the_others(tmp_path):
  rng = np.random.default_rng(2)
  names = [f'base_model.model.model.layers.{i}.block_sparse_moe.experts.{e}.w1' for i in range(3) for e in range(2)]
  shapes = {'lora_A.weight': (2, 12), 'lora_B.weight': (5, 2)}
  tensors = {f'{n}.{x}': rng.standard_normal(s).astype(np.float32) for n in names for x, s in shapes.items()}
  write(tmp_path, tensors)
  model, variables = read_adapter(tmp_path, lm(experts=True))
  found = leaves(variables)
  expected = {path for path in leaves(model.instantiate().abstract_init()) if '_lora_' in path[-1]}
  assert found.keys() == expected
  assert {path[-1] for path, value in found.items() if value.any()} == {'gate_lora_a', 'gate_lora_b'}
  write(tmp_path, tensors, alpha_pattern={'w1': 8})
  write_again = {n.replace('.w1.', '.w3.'): x for n, x in tensors.items()}
  write(tmp_path, tensors | write_again, alpha_pattern={'w1': 8})
  with pytest.raises(ConfigError, match='have adapters of different ranks or alphas; experts have one'):
    read_adapter(tmp_path, lm(experts=True))


def test_adapters_of_all_experts_together_as_peft_saves_those_of_parameters(tmp_path, monkeypatch):
  """Expert e has rows e R + r of A, and columns r E + e of B; the gate has the first rows of B, and up the others."""
  rng = np.random.default_rng(3)
  shapes = {'': ((2 * 2, 5), (12, 2 * 2)), 'base_layer.': ((2 * 2, 12), (2 * 5, 2 * 2))}  # down_proj; gate_up_proj
  tensors = {
    f'base_model.model.model.layers.{i}.mlp.experts.{place}lora_{x}.weight': rng.standard_normal(s).astype(np.float32)
    for i in range(3)
    for place, both in shapes.items()
    for x, s in zip('AB', both)
  }
  parameters = ['mlp.experts.down_proj', 'mlp.experts.gate_up_proj']
  write(tmp_path, tensors, target_parameters=parameters)
  reads, read_all = [], StoredTensor.read_all
  monkeypatch.setattr(StoredTensor, 'read_all', lambda tensor: reads.append(tensor.name) or read_all(tensor))
  _, variables = read_adapter(tmp_path, lm(experts=True))
  assert sorted(reads) == sorted(tensors)  # Once for all experts.
  ff = variables['lm']['transformer']['layers']['ff']
  for layer in range(3):
    prefix = f'base_model.model.model.layers.{layer}.mlp.experts.'
    inner, outer = ([tensors[f'{prefix}{place}lora_{x}.weight'] for x in 'AB'] for place in ('base_layer.', ''))
    for e in range(2):
      update = inner[1].reshape(10, 2, 2)[:, :, e] @ inner[0].reshape(2, 2, 12)[e]
      for name, rows in (('gate', slice(0, 5)), ('up', slice(5, 10))):
        ours = ff[f'{name}_lora_a'][layer, e] @ ff[f'{name}_lora_b'][layer, e]
        np.testing.assert_allclose(ours, update[rows].T, atol=1e-5)
      update = outer[1].reshape(12, 2, 2)[:, :, e] @ outer[0].reshape(2, 2, 5)[e]
      np.testing.assert_allclose(ff['down_lora_a'][layer, e] @ ff['down_lora_b'][layer, e], update.T, atol=1e-5)
  for settings, message in (
    ({'target_parameters': ['lm_head.weight']}, r'target_parameters = .* is not supported; only those of experts'),
    (
      {'target_parameters': parameters, 'alpha_pattern': {'q_proj': 3}},
      'not supported together with target_parameters',
    ),
  ):
    write(tmp_path, tensors, **settings)
    with pytest.raises(ConfigError, match=message):
      read_adapter(tmp_path, lm(experts=True))


class InMemory(StreamedArray):
  """An array that is read in boxes."""

  def __init__(self, value):
    self.value, self.shape, self.dtype = value, value.shape, value.dtype

  def read(self, box):
    return self.value[box]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'model_type, adapter',
  [
    ('mixtral', Config(Lora, rank=2, alpha=3.0)),
    ('gpt_oss', Config(Lora, rank=2, alpha=3.0)),
    ('qwen3_next', Config(Lora, rank=2, alpha=3.0)),
    ('llama_with_biases', Config(Dora, rank=2, alpha=3.0)),
    ('llama_with_biases', Config(Ia3)),
  ],
  ids=['mixtral', 'gpt_oss', 'qwen3_next', 'dora', 'ia3'],
)
def test_weights_that_are_merged_in_parts_are_those_merged_at_once(model_type, adapter):
  """Whatever the family calls its tensors; gates, heads and stacks of experts included."""
  config = FAMILIES[CASES[model_type]['model_type']].model(HfConfig(CASES[model_type]))
  model = add_adapters(config, adapter).instantiate(name='model')
  family, _ = describe_model(model)
  variables = jax.tree.map(np.asarray, drawn_variables(model.abstract_init()))
  parts = merge_streamed(jax.tree.map(InMemory, family.part_of(variables)), model, family)
  expected = leaves(family.part_of(merge_adapters(model, variables)))
  found = leaves(parts)
  assert found.keys() == expected.keys()
  for path, value in expected.items():
    whole = whole_box(found[path].shape)
    np.testing.assert_allclose(found[path].read(whole), value, rtol=1e-5, atol=1e-6, err_msg=path_name(path))
    last = (*whole[:-1], slice(1, found[path].shape[-1]))
    np.testing.assert_allclose(found[path].read(last), value[..., 1:], rtol=1e-5, atol=1e-6, err_msg=path_name(path))


def is_adapter(path):
  return re.fullmatch(ADAPTER_VARIABLES, path_name(path)) is not None


@pytest.mark.parametrize('adapter', [Config(Dora, layers=r'.*\.(value|down)', rank=2), Config(Ia3)])
def test_dora_and_ia3_are_written_and_read(adapter, tmp_path):
  """peft stores (1 + m) |W| for each output; and factors as columns, or, for the inputs of `down`, as rows."""
  config = lm(adapter)
  model = config.instantiate()
  variables = drawn_variables(model.abstract_init())
  write_adapter(tmp_path, model, variables)
  settings, stored = json.loads((tmp_path / CONFIG).read_text()), read_header(tmp_path / TENSORS)
  layers, prefix = variables['lm']['transformer']['layers'], 'base_model.model.model.layers.1'
  value, down = layers['attention']['value'], layers['ff']['down']
  if 'dora_magnitude' in value:
    assert settings['use_dora'] and settings['target_modules'] == ['down_proj', 'v_proj']
    for name, own in (('self_attn.v_proj', value), ('mlp.down_proj', down)):
      lengths = np.linalg.norm(own['w'][1].reshape(own['w'].shape[1], -1), axis=0)
      expected = (1 + own['dora_magnitude'][1].reshape(-1)) * lengths
      np.testing.assert_allclose(stored[f'{prefix}.{name}.lora_magnitude_vector'].read_all(), expected, rtol=1e-5)
  else:
    assert (settings['peft_type'], len(settings['target_modules'])) == ('IA3', 3)
    assert settings['feedforward_modules'] == ['down_proj']
    found = [stored[f'{prefix}.{name}.ia3_l'].read_all() for name in ('self_attn.v_proj', 'mlp.down_proj')]
    np.testing.assert_array_equal(found[0], value['ia3_scale'][1].reshape(-1, 1))
    np.testing.assert_array_equal(found[1], down['ia3_scale'][1].reshape(1, -1))
  base = select(variables, lambda path: not is_adapter(path))
  read = read_adapter(tmp_path, remove_adapters(config), base)
  written = select(variables, is_adapter)
  assert jax.tree.structure(read.variables) == jax.tree.structure(written)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), read.variables, written)
  assert leaves(read.model.instantiate().abstract_init()).keys() == leaves(variables).keys()


def test_layers_that_a_folder_leaves_out_are_unchanged(tmp_path):
  rng, prefix = np.random.default_rng(0), 'base_model.model.model.layers'
  factors = rng.standard_normal((4, 1)).astype(np.float32)
  write(tmp_path / 'ia3', {f'{prefix}.1.self_attn.k_proj.ia3_l': factors}, peft_type='IA3')
  scale = read_adapter(tmp_path / 'ia3', lm()).variables['lm']['transformer']['layers']['attention']['key']['ia3_scale']
  np.testing.assert_array_equal(scale.reshape(3, 4), np.stack([np.ones(4), factors[:, 0], np.ones(4)]))
  lengths = {f'{prefix}.0.self_attn.q_proj.lora_magnitude_vector': np.ones(12, np.float32)}
  write(tmp_path / 'dora', of_layers(0) | lengths, use_dora=True)
  with pytest.raises(ConfigError, match='DoRA stores the lengths of weights, so reading it takes the weights'):
    read_adapter(tmp_path / 'dora', lm())
  variables = drawn_variables(lm().instantiate().abstract_init())
  _, found = read_adapter(tmp_path / 'dora', lm(), variables)
  magnitude = found['lm']['transformer']['layers']['attention']['query']['dora_magnitude']
  assert magnitude[0].all() and not magnitude[1:].any()
  half = {name: x for name, x in of_layers(0).items() if 'lora_A' in name}
  for left, missing in (
    (of_layers(0), 'lora_magnitude_vector'),
    (lengths, 'lora_A.weight'),
    (half | lengths, 'lora_B'),
  ):
    write(tmp_path / 'dora', left, use_dora=True)
    with pytest.raises(CheckpointError, match=rf'but not .*{missing}.*; an adapter needs all three'):
      read_adapter(tmp_path / 'dora', lm(), variables)


def test_adapters_that_peft_cannot_have_in_one_folder(tmp_path):
  model = lm(Config(Dora, layers=r'.*\.query'), Config(Lora, layers=r'.*\.key')).instantiate()
  variables = drawn_variables(model.abstract_init())
  with pytest.raises(
    ConfigError, match=r'query has an adapter of Dora, and .*key one of Lora; a folder of peft has one'
  ):
    write_adapter(tmp_path / 'adapter', model, variables)
  model = lm(Config(Dora, layers=r'.*\.query')).instantiate()
  with pytest.raises(ConfigError, match=r'query.w: peft stores the lengths .* pass variables with these'):
    write_adapter(tmp_path / 'adapter', model, select(variables, is_adapter))
  mixed = np.ones((4, 1), np.float32), np.ones((1, 12), np.float32)
  names = [f'base_model.model.model.layers.{i}.self_attn.k_proj.ia3_l' for i in (0, 1)]
  write(tmp_path / 'ia3', dict(zip(names, mixed)), peft_type='IA3')
  with pytest.raises(CheckpointError, match='and the same factors of other layers have shapes'):
    read_adapter(tmp_path / 'ia3', lm())
  write(tmp_path / 'none', of_layers(0), peft_type='IA3')
  with pytest.raises(CheckpointError, match='has no adapter of a layer of this model'):
    read_adapter(tmp_path / 'none', lm())
  assert not (tmp_path / 'adapter').exists()


@pytest.mark.parametrize(
  'case, message',
  [
    ('gpt_oss', r'_lora_[ab]: this family stores .* in a tensor that peft cannot adapt; write'),
    (
      'qwen3_next',
      r'are one tensor in this family, .*in_proj_\w+.lora_A.weight, and have adapters of their own, '
      '.* leave out --adapter, or',
    ),
  ],
)
def test_adapters_in_tensors_that_peft_cannot_adapt_are_not_left_out(case, message, tmp_path):
  config = FAMILIES[case].model(HfConfig(CASES[case]))
  model = add_adapters(config, Config(Lora, rank=2)).instantiate(name='model')
  with pytest.raises(ConfigError, match=message):
    write_adapter(tmp_path / 'adapter', model, drawn_variables(model.abstract_init()))
  assert not (tmp_path / 'adapter').exists()


def test_one_module_of_three_weights_is_read_and_not_written(tmp_path):
  """GPT-2 has one module for queries, keys and values: all of them get its A."""
  config = transformer_lm(style='gpt2', vocab_size=11, model_dims=12, num_layers=1, num_heads=3, max_len=8)
  rng, module = np.random.default_rng(0), 'base_model.model.transformer.h.0.attn.c_attn'
  shapes = {'lora_A': (2, 12), 'lora_B': (36, 2)}
  tensors = {f'{module}.{x}.weight': rng.standard_normal(s).astype(np.float32) for x, s in shapes.items()}
  write(tmp_path, tensors, fan_in_fan_out=True)
  model, variables = read_adapter(tmp_path, config)
  layers = variables['lm']['transformer']['layers']['attention']
  product = np.concatenate(
    [layers[name]['lora']['a'][0] @ layers[name]['lora']['b'][0].reshape(2, 12) for name in ('query', 'key', 'value')],
    1,
  )
  np.testing.assert_allclose(
    product, (tensors[f'{module}.lora_B.weight'] @ tensors[f'{module}.lora_A.weight']).T, atol=1e-6
  )
  with pytest.raises(ConfigError, match=r'are one tensor in this family, .*c_attn.*, and have adapters of their own'):
    write_adapter(tmp_path / 'out', model.instantiate(), variables)
