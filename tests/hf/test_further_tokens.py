"""Modules of DeepSeek-V3 that predict further tokens: read and written where the folder has them."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from checkpoints import CASES, IDS, D, V, golden, tensors_of, weight, write

from praxis_lite.bridges.hf import read_model, write_model
from praxis_lite.bridges.hf.reader import open_checkpoint
from praxis_lite.common.errors import CheckpointError

NUM_LAYERS = CASES['deepseek_v3']['num_hidden_layers']
PREFIX = f'model.layers.{NUM_LAYERS}.'


def shapes(with_modules=True):
  there = {name: tuple(shape) for name, shape in golden('deepseek_v3')['tensors'].items()}
  if with_modules:
    last = f'model.layers.{NUM_LAYERS - 1}.'
    there |= {name.replace(last, PREFIX): shape for name, shape in there.items() if name.startswith(last)}
    there |= {f'{PREFIX}{name}.weight': (D,) for name in ('enorm', 'hnorm', 'shared_head.norm')}
    there[f'{PREFIX}eh_proj.weight'] = (D, 2 * D)
  return there


def copies():
  tables = {'embed_tokens': 'model.embed_tokens.weight', 'shared_head.head': 'lm_head.weight'}
  return {f'{PREFIX}{name}.weight': weight(table, (V, D), 'deepseek_v3') for name, table in tables.items()}


def make(folder, with_modules=True, said=1, **tensors):
  config = {**golden('deepseek_v3')['config'], 'num_nextn_predict_layers': said}
  return write(folder, config, shapes(with_modules), **tensors)


@pytest.mark.slow
def test_modules_are_read_and_written_with_their_copies_of_the_tables(tmp_path):
  source = make(tmp_path / 'source', **copies())
  model, variables = read_model(source)
  own = variables['lm']['mtp']['modules_0']
  named = {'join': 'eh_proj', 'embedding_norm': 'enorm', 'hidden_norm': 'hnorm', 'norm': 'shared_head.norm'}
  for ours, theirs in named.items():
    (mine,) = jax.tree.leaves(own[ours])
    stored = weight(f'{PREFIX}{theirs}.weight', shapes()[f'{PREFIX}{theirs}.weight'], 'deepseek_v3')
    np.testing.assert_array_equal(mine, stored.T)
  write_model(tmp_path / 'out', model, variables)
  expected, written = tensors_of(source), tensors_of(tmp_path / 'out')
  assert written.keys() == expected.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(written[name], tensor, err_msg=name)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['num_nextn_predict_layers'] == 1
  logits = model.lm.apply(variables['lm'], IDS, method='logits', do_eval=True)[0]
  np.testing.assert_allclose(logits, golden('deepseek_v3')['logits'], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('with_modules, said, told', [(False, 1, 0), (True, 0, 1), (False, 0, 0)])
def test_a_folder_without_them_or_a_config_that_does_not_name_them(with_modules, said, told, tmp_path):
  """transformers writes config.json with the number, and no tensors of them."""
  checkpoint = open_checkpoint(make(tmp_path, with_modules, said))
  assert len(checkpoint.notes) == told
  assert checkpoint.family.model(checkpoint.config).lm_tpl.mtp_tpl is None


def test_a_table_of_its_own_is_refused(tmp_path):
  other = {f'{PREFIX}embed_tokens.weight': np.ones((V, D), np.float32)}
  with pytest.raises(CheckpointError, match=rf'does not account for: {PREFIX}embed_tokens.weight'):
    read_model(make(tmp_path, **other))
