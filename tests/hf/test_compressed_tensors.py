"""Weights in few bits as vLLM reads them: written, read, and by compressed-tensors itself where it is installed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import IDS, make
from drawn_state import drawn_variables

from praxis_lite.bridges.hf import export_run, import_run, read_model, write_model
from praxis_lite.bridges.hf.compressed_tensors import pack, unpack
from praxis_lite.bridges.hf.files import Declared, read_folder, write_folder
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.layers import MoeFeedForward, QuantizedWeights
from praxis_lite.models import dequantize_variables, quantize_variables, quantize_weights, transformer_lm
from praxis_lite.runs import open_run
from praxis_lite.runs.calibration import Calibration
from praxis_lite.runs.quantized import quantize_run
from praxis_lite.runs.records.record import read_record

RULES = {
  'int4': Config(QuantizedWeights, format='int4', group_size=4, scale_dtype='bfloat16'),
  'int8': Config(QuantizedWeights),
  'not symmetric': Config(QuantizedWeights, format='int4', group_size=2, symmetric=False),
}


def lm(experts=False):
  """D 12, 3 heads of 4 dims, F 20: no count is a multiple of 8 that need not be."""
  mixture = Config(MoeFeedForward, num_experts=3) if experts else None
  sizes = {'vocab_size': 37, 'model_dims': 12, 'num_layers': 2, 'num_heads': 3, 'num_kv_heads': 1, 'hidden_dims': 20}
  return transformer_lm(**sizes, experts=mixture)


def exported(tmp_path, *rules, experts=False):
  """Returns the folder of the export of a quantized run, and the run's variables, dequantized."""
  plain = lm(experts).instantiate()
  variables = drawn_variables(plain.abstract_init())
  write_model(tmp_path / 'hf', plain, variables)
  import_run(tmp_path / 'hf', tmp_path / 'run')
  quantize_run(read_record(tmp_path / 'run').config, tmp_path / 'run', tmp_path / 'few', *rules)
  export_run(read_record(tmp_path / 'few').config, tmp_path / 'few', tmp_path / 'out', quantized=True)
  model = quantize_weights(lm(experts), *rules).instantiate()
  return tmp_path / 'out', dequantize_variables(model, quantize_variables(model, variables))


@pytest.mark.parametrize('bits', [4, 8])
@pytest.mark.parametrize('shape', [(3, 5), (1, 1), (2, 16)])
def test_packing_there_and_back(bits, shape):
  half = 2 ** (bits - 1)
  q = np.random.default_rng(0).integers(-half, half, shape, np.int8)
  packed = pack(q, bits)
  assert packed.dtype == np.int32 and packed.shape == (shape[0], -(-shape[1] * bits // 32))
  np.testing.assert_array_equal(unpack(packed, bits, shape[1]), q)


def test_a_family_with_inputs_first_is_refused(tmp_path):
  model = transformer_lm(style='gpt2', vocab_size=7, model_dims=4, num_layers=1, num_heads=2, hidden_dims=6, max_len=8)
  plain = model.instantiate()
  write_model(tmp_path / 'hf', plain, drawn_variables(plain.abstract_init()))
  import_run(tmp_path / 'hf', tmp_path / 'run')
  quantize_run(read_record(tmp_path / 'run').config, tmp_path / 'run', tmp_path / 'few', Config(QuantizedWeights))
  with pytest.raises(ConfigError, match='--quantized: tensors of gpt2 have their inputs first'):
    export_run(read_record(tmp_path / 'few').config, tmp_path / 'few', tmp_path / 'out', quantized=True)


@pytest.mark.slow_cases
@pytest.mark.parametrize('name, experts', [('int4', False), ('not symmetric', True), ('int8', True)])
def test_an_export_is_read_again_with_the_same_values(name, experts, tmp_path):
  out, expected = exported(tmp_path, RULES[name], experts=experts)
  tensors = read_folder(out)
  packed = tensors['model.layers.0.self_attn.q_proj.weight_packed']
  assert packed.kind == 'I32' and packed.shape[0] == 12
  config = json.loads((out / 'config.json').read_text())['quantization_config']
  assert config['format'] == 'pack-quantized' and {'lm_head', 'model.embed_tokens'} <= {*config['ignore']}
  assert any('gate' in name for name in config['ignore']) == experts  # The routers.
  found = leaves(read_model(out).variables)
  for path, value in leaves(expected).items():
    # The file keeps scales, and so weights, in their dtype.
    np.testing.assert_allclose(found[path], value, rtol=0.01 if name == 'int4' else 1e-6, atol=1e-7)


def calibrated(tmp_path, family, method, rule):
  """Returns the config of a run whose weights in few bits have scales of inputs."""
  import_run(make(tmp_path / 'hf', family), tmp_path / 'run')
  config = read_record(tmp_path / 'run').config
  config.datasets = [Config(SyntheticLMInput, vocab_size=37, seq_len=8, batch_size=4)]
  quantize_run(config, tmp_path / 'run', tmp_path / 'few', rule, calibration=Calibration(method, 1))
  return read_record(tmp_path / 'few').config


@pytest.mark.slow
@pytest.mark.parametrize(
  'family, method, rule',
  [('llama_with_biases', 'awq', RULES['not symmetric']), ('gemma2', 'smooth', RULES['int8'])],
)
def test_scales_of_inputs_move_into_the_layers_before(family, method, rule, tmp_path):
  config = calibrated(tmp_path, family, method, rule)
  few = open_run(tmp_path / 'few').load()
  scales = [x for path, x in leaves(few.variables).items() if path[-1].endswith('input_scale')]
  assert scales and all(np.ptp(x) > 0.01 for x in scales)
  logits = [few.layer.lm.apply(few.variables['lm'], IDS, do_eval=True, method='logits')[0]]
  for quantized in (False, True):
    export_run(config, tmp_path / 'few', tmp_path / f'out-{quantized}', quantized=quantized)
    again = read_model(tmp_path / f'out-{quantized}')
    logits.append(again.model.lm.apply(again.variables['lm'], IDS, do_eval=True, method='logits')[0])
  for found in logits[1:]:
    np.testing.assert_allclose(found, logits[0], atol=2e-5 * np.abs(logits[0]).max())


@pytest.mark.slow_cases
@pytest.mark.parametrize('family, layer', [('mixtral', r'ff\.gate'), ('olmo2', r'attention\.query\.w')])
def test_scales_of_inputs_that_no_layer_takes(family, layer, tmp_path):
  config = calibrated(tmp_path, family, 'awq', RULES['not symmetric'])
  with pytest.raises(ConfigError, match=rf'--quantized: .*{layer}.*cannot be moved into the layer before'):
    export_run(config, tmp_path / 'few', tmp_path / 'out', quantized=True)


@pytest.mark.slow
def test_several_formats_name_their_modules(tmp_path):
  rules = Config(QuantizedWeights, layers=r'.*\.(gate|up|down)', format='int4', group_size=4), Config(QuantizedWeights)
  out, expected = exported(tmp_path, *rules)
  groups = json.loads((out / 'config.json').read_text())['quantization_config']['config_groups']
  assert [group['weights']['num_bits'] for group in groups.values()] == [8, 4]
  assert 'model.layers.1.mlp.up_proj' in groups['group_1']['targets']
  found = leaves(read_model(out).variables)
  for path, value in leaves(expected).items():
    np.testing.assert_allclose(found[path], value, rtol=1e-6, atol=1e-7)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'rule, text',
  [
    (Config(QuantizedWeights, format='nf4', group_size=4), "the format 'nf4'; compressed-tensors has int8 and int4"),
    (Config(QuantizedWeights, group_size=8), 'group_size = 8 does not divide 12, the last dimension'),
    (Config(QuantizedWeights, layers=r'.*\.(query|up)'), None),
  ],
)
def test_formats_that_have_no_counterpart(rule, text, tmp_path):
  if text is None:
    exported(tmp_path, rule)
    with pytest.raises(ConfigError, match='--quantized: the model has no weights in few bits'):
      export_run(read_record(tmp_path / 'run').config, tmp_path / 'run', tmp_path / 'no', quantized=True)
    return
  with pytest.raises(ConfigError, match=text):
    exported(tmp_path, rule)
  assert not (tmp_path / 'out').exists()


def a_checkpoint(folder, **tensors):
  """A folder of a small Llama's config.json, and of these tensors instead of the weight of the first query."""
  folder.mkdir()
  plain = lm().instantiate()
  write_model(folder, plain, drawn_variables(plain.abstract_init()))
  name = 'model.layers.0.self_attn.q_proj.weight'
  arrays = {n: t.read_all() for n, t in read_folder(folder).items() if n != name}
  arrays |= {f'{name}{suffix}': array for suffix, array in tensors.items()}
  write_folder(folder, {n: Declared(a.dtype, a.shape) for n, a in arrays.items()}, arrays.__getitem__, 10**9)
  config = json.loads((folder / 'config.json').read_text())
  config['quantization_config'] = {'quant_method': 'compressed-tensors', 'format': 'pack-quantized'}
  (folder / 'config.json').write_text(json.dumps(config))
  return folder


PACKED, SHAPE = np.zeros((12, 2), np.int32), np.array([12, 12])
SCALE = np.ones((12, 1), np.float32)


@pytest.mark.parametrize(
  'tensors, text',
  [
    ({'_packed': PACKED, '_shape': SHAPE}, 'which do not fit a weight of shape'),
    ({'_packed': PACKED, '_scale': SCALE}, 'has no .*weight_shape beside it'),
    ({'_packed': PACKED[:, :1], '_scale': SCALE, '_shape': SHAPE}, 'which do not fit a weight of shape'),
    ({'_packed': PACKED, '_scale': SCALE[:5], '_shape': SHAPE}, 'which do not fit a weight of shape'),
    ({'_packed': PACKED, '_scale': SCALE, '_shape': SHAPE, '_g_idx': np.arange(12)}, 'another order'),
    ({'_packed': PACKED, '_scale': SCALE, '_shape': SHAPE, '_zero_point': PACKED.astype(np.int8)}, 'only packed ones'),
  ],
)
def test_damaged_weights_are_named(tensors, text, tmp_path):
  with pytest.raises(CheckpointError, match=text):
    read_model(a_checkpoint(tmp_path / 'bad', **tensors))


def test_weights_of_8_bits_that_are_not_packed(tmp_path):
  q = np.random.default_rng(0).integers(-128, 128, (12, 12)).astype(np.int8)
  folder = a_checkpoint(tmp_path / 'w8', **{'': q, '_scale': 0.01 * SCALE})
  query = read_model(folder).variables['lm']['transformer']['layers']['attention']['query']['w'][0]
  np.testing.assert_allclose(np.asarray(query).reshape(12, 12).T, 0.01 * q, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('name', RULES)
def test_compressed_tensors_reads_what_we_write(name, tmp_path):
  torch = pytest.importorskip('torch', reason='needs PyTorch: pip install praxis_lite[hf-oracle]')
  pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')
  compressors = pytest.importorskip('compressed_tensors.compressors', reason='needs pip install compressed-tensors')
  quantization = pytest.importorskip('compressed_tensors.quantization', reason='needs pip install compressed-tensors')
  from theirs import loaded, logits_of

  rule = RULES[name]
  out, expected = exported(tmp_path, rule)
  weights = quantization.QuantizationArgs(
    **json.loads((out / 'config.json').read_text())['quantization_config']['config_groups']['group_0']['weights']
  )
  scheme = quantization.QuantizationScheme(targets=['Linear'], weights=weights)
  module = 'model.layers.1.mlp.down_proj.'
  stored = {n.removeprefix(module): t for n, t in read_folder(out).items() if n.startswith(module)}
  state = {
    n: torch.tensor(t.read((slice(None),) * 2).astype(np.float32) if 'scale' in n else t.read_integers((slice(None),)))
    for n, t in stored.items()
  }
  theirs = compressors.PackedQuantizationCompressor.decompress(state, scheme)['weight'].float().numpy()
  ours = expected['lm']['transformer']['layers']['ff']['down']['w'][1]
  np.testing.assert_allclose(theirs, np.asarray(ours).T, rtol=1e-6, atol=1e-7)
  if name == 'not symmetric':  # transformers 5.24 expects zero points that are not packed, unlike vLLM.
    return
  plain = lm().instantiate()
  logits = plain.lm.apply(expected['lm'], IDS, do_eval=True, method='logits')[0]
  np.testing.assert_allclose(logits_of(loaded(out)), logits, atol=2e-5 if name == 'int8' else 0.02)
