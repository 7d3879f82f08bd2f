"""Weights in 8 bits with a scale for each block, as DeepSeek-V3 is published, against their product."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checkpoints import IDS, golden, weight, write

from praxis_lite.bridges.hf import read_model
from praxis_lite.bridges.hf.reader import open_checkpoint
from praxis_lite.common.errors import CheckpointError, ConfigError

BLOCK = (8, 5)  # No tensor has a multiple of it in both dimensions.
QUANTIZATION = {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [*BLOCK]}


def spread(scales, shape):
  """The scale of each value."""
  return np.kron(scales, np.ones(BLOCK, np.float32))[: shape[0], : shape[1]]


def make(folder, quantization=QUANTIZATION, without=''):
  """A checkpoint in 8 bits and one of bfloat16 with the same values."""
  shapes = {name: tuple(shape) for name, shape in golden('deepseek_v3')['tensors'].items()}
  stored, stands_for = {}, {}
  for name, shape in shapes.items():
    values = weight(name, shape, 'deepseek_v3')
    stored[name] = stands_for[name] = values.astype(ml_dtypes.bfloat16)
    if '_proj' in name and len(shape) == 2:
      rng = np.random.default_rng(len(stored))
      scales = rng.uniform(0.5, 2, [-(-n // b) for n, b in zip(shape, BLOCK)]).astype(np.float32)
      stored[name] = (values / spread(scales, shape)).astype(ml_dtypes.float8_e4m3fn)
      stored[f'{name}_scale_inv'] = scales
      stands_for[name] = (stored[name].astype(np.float32) * spread(scales, shape)).astype(ml_dtypes.bfloat16)
  config = golden('deepseek_v3')['config']
  there = {name: tensor for name, tensor in stored.items() if not without or without not in name}
  write(folder / 'eight', config | {'quantization_config': quantization}, {}, **there)
  write(folder / 'plain', config, {}, **stands_for)
  return folder / 'eight', folder / 'plain'


def test_a_checkpoint_in_8_bits_is_that_of_the_products(tmp_path):
  eight, plain = (open_checkpoint(folder) for folder in make(tmp_path))
  assert eight.tensors.keys() == plain.tensors.keys()
  for name, tensor in plain.tensors.items():
    whole, other = tuple(slice(0, n) for n in tensor.shape), eight.tensors[name]
    assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
    np.testing.assert_array_equal(other.read(whole), tensor.read(whole), err_msg=name)
    for part in (tuple(slice(3, 9) for _ in tensor.shape), whole[:1], tuple(slice(2, 2) for _ in tensor.shape)):
      np.testing.assert_array_equal(other.read(part), tensor.read(part), err_msg=name)


@pytest.mark.slow
def test_it_computes_the_same(tmp_path):
  (model, of_eight), (_, of_plain) = (read_model(folder) for folder in make(tmp_path))
  one, other = (model.lm.apply(v['lm'], IDS, method='logits', do_eval=True)[0] for v in (of_eight, of_plain))
  np.testing.assert_array_equal(one, other)


def test_scales_that_are_missing_are_named(tmp_path):
  eight, _ = make(tmp_path, without='layers.1.self_attn.o_proj.weight_scale_inv')
  with pytest.raises(
    CheckpointError, match=r'o_proj\.weight has 8 bits and shape \[18, 12\]; expected .*_scale_inv of sh'
  ):
    open_checkpoint(eight)


@pytest.mark.parametrize('change', [{'fmt': 'e5m2'}, {'weight_block_size': None}, {'weight_block_size': [8]}])
def test_other_formats_are_refused(change, tmp_path):
  eight, _ = make(tmp_path, quantization=QUANTIZATION | change)
  with pytest.raises(ConfigError, match=r'quantization_config = .* is not supported'):
    open_checkpoint(eight)
