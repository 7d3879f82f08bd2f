"""Weights in 4 bits, against the formula of such numbers."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import weight, write

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.families import FAMILIES
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.reader import open_checkpoint
from praxis_lite.bridges.hf.tensors import pieces
from praxis_lite.common.errors import CheckpointError

E, D, F = 3, 64, 32
CONFIG = {
  'model_type': 'gpt_oss',
  'vocab_size': 11,
  'hidden_size': D,
  'intermediate_size': F,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 4,
  'num_local_experts': E,
  'num_experts_per_tok': 2,
  'quantization_config': {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']},
}
EXPERTS = 'model.layers.0.mlp.experts.'


def number(bits, scale):
  """The value of a sign, two bits of an exponent and one bit of a mantissa, times a power of two."""
  sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
  size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
  return (-1) ** sign * size * 2.0 ** (int(scale) - 127)


def quantized(seed, outputs, inputs):
  """Blocks and scales, and the weight [E, inputs, outputs] that they stand for."""
  rng = np.random.default_rng(seed)
  blocks = rng.integers(0, 256, (E, outputs, inputs // 32, 16)).astype(np.uint8)
  scales = rng.integers(121, 129, (E, outputs, inputs // 32)).astype(np.uint8)
  stands_for = np.zeros((E, inputs, outputs), np.float32)
  for e, f, d in np.ndindex(E, outputs, inputs):
    pair = int(blocks[e, f, d // 32, d % 32 // 2])
    stands_for[e, d, f] = number(pair >> 4 if d % 2 else pair & 15, scales[e, f, d // 32])
  return blocks, scales, stands_for


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A folder, and the weights of its experts."""
  folder = tmp_path_factory.mktemp('mxfp4')
  family = FAMILIES['gpt_oss']
  weights = family.model(HfConfig(CONFIG)).instantiate(name='model').abstract_init()['lm']
  found = [piece for of_variable in pieces(family.table_of(weights), weights).values() for piece in of_variable]
  shapes = {piece.name: piece.view.their_shape for piece in found}
  values, experts = {}, {}
  for seed, (name, outputs, inputs) in enumerate((('gate_up_proj', 2 * F, D), ('down_proj', D, F))):
    del shapes[EXPERTS + name]
    blocks, scales, experts[name] = quantized(seed, outputs, inputs)
    values |= {f'{EXPERTS}{name}_blocks': blocks, f'{EXPERTS}{name}_scales': scales}
  return write(folder, CONFIG, shapes, **values), experts


def test_all_numbers_are_those_of_the_formula(checkpoint):
  folder, experts = checkpoint
  variables = read_model(folder).variables
  ff = variables['lm']['transformer']['layers']['ff']
  np.testing.assert_array_equal(ff['gate'][0], experts['gate_up_proj'][..., ::2])
  np.testing.assert_array_equal(ff['up'][0], experts['gate_up_proj'][..., 1::2])
  np.testing.assert_array_equal(ff['down'][0], experts['down_proj'])
  assert len(np.unique(experts['down_proj'])) > 40
  name = 'model.layers.0.mlp.router.weight'
  np.testing.assert_array_equal(ff['router']['w'][0].T, weight(name, (E, D), 'gpt_oss'))


def test_parts_are_parts_of_the_whole(checkpoint):
  folder, experts = checkpoint
  tensor = open_checkpoint(folder).tensors[f'{EXPERTS}gate_up_proj']
  assert (tensor.shape, tensor.dtype) == ((E, D, 2 * F), ml_dtypes.bfloat16)
  for index in (np.s_[1:2, 5:40, 3:9], np.s_[:, 32:64, :], np.s_[0:3, 63:64, 0:1], np.s_[2:2, 4:4, :]):
    np.testing.assert_array_equal(tensor.read(index).astype(np.float32), experts['gate_up_proj'][index])


def test_it_is_written_in_more_bits(checkpoint, tmp_path):
  model, variables = read_model(checkpoint[0])
  write_model(tmp_path / 'out', model, variables)
  again = read_model(tmp_path / 'out').variables
  jax.tree.map(np.testing.assert_array_equal, again, variables)
  assert 'quantization_config' not in open_checkpoint(tmp_path / 'out').config.values


@pytest.mark.parametrize('scales', [None, np.zeros((E, 2 * F, 1), np.uint8), np.zeros((E, 2 * F, 2), np.float32)])
def test_blocks_without_their_scales_are_refused(scales, tmp_path):
  name = f'{EXPERTS}gate_up_proj'
  values = {f'{name}_blocks': np.zeros((E, 2 * F, 2, 16), np.uint8)}
  values |= {} if scales is None else {f'{name}_scales': scales}
  with pytest.raises(
    CheckpointError, match=r'gate_up_proj_blocks has shape .* and model.*gate_up_proj_scales with bytes'
  ):
    open_checkpoint(write(tmp_path, CONFIG, {'model.norm.weight': (D,)}, **values))
