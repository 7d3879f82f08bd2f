"""Both ways with `peft` itself, where it is installed: adapters that we write, and those that it saves."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from checkpoints import IDS
from drawn_state import drawn_variables

from praxis_lite.bridges.hf import read_adapter, write_adapter, write_model
from praxis_lite.common.config import Config
from praxis_lite.common.trees import merge, path_name, select
from praxis_lite.layers import Dora, Ia3, Lora, MoeFeedForward
from praxis_lite.models import ADAPTER_VARIABLES, add_adapters, merge_adapters, remove_adapters, transformer_lm

torch = pytest.importorskip('torch', reason='needs PyTorch: pip install praxis_lite[hf-oracle]')
pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')
peft = pytest.importorskip('peft', reason='needs peft: pip install praxis_lite[hf-oracle]')
from theirs import loaded, logits_of  # noqa: E402

pytestmark = pytest.mark.slow

ATTENTION = Config(Lora, layers=r'.*\.attention\.(query|key|value|out)', rank=3, alpha=6.0)
KINDS = {
  'llama': (False, (ATTENTION, Config(Lora, rank=2, alpha=8.0))),
  'rslora': (False, (Config(Lora, rank=4, alpha=6.0, rank_stabilized=True),)),
  'embedding': (False, (Config(Lora, layers=r'lm\.embedding', rank=4), Config(Lora, layers=r'.*\.query', rank=2))),
  'mixtral': (True, (ATTENTION, Config(Lora, rank=2, alpha=8.0))),
  'dora': (False, (Config(Dora, layers=r'.*\.(query|key|value|down)', rank=2, alpha=3.0),)),
  'ia3': (False, (Config(Ia3),)),
  'mixtral, experts alone': (True, (Config(Lora, layers=r'.*\.ff', rank=2, alpha=8.0),)),
}


def lm(*adapters, experts=False):
  sizes = {'vocab_size': 37, 'model_dims': 12, 'num_layers': 3, 'num_heads': 3, 'num_kv_heads': 1, 'hidden_dims': 5}
  mixture = Config(MoeFeedForward, num_experts=3) if experts else None
  return add_adapters(transformer_lm(**sizes, experts=mixture), *adapters)


def logits_of_ours(model, variables):
  return np.asarray(jax.jit(lambda v: model.lm.apply(v['lm'], IDS, do_eval=True, method='logits')[0])(variables))


def is_adapter(path):
  return re.fullmatch(ADAPTER_VARIABLES, path_name(path)) is not None


@pytest.mark.parametrize('kind', KINDS)
def test_what_we_write(kind, tmp_path):
  experts, adapters = KINDS[kind]
  config = lm(*adapters, experts=experts)
  model = config.instantiate()
  variables = jax.tree.map(lambda x: 2 * x, drawn_variables(model.abstract_init()))
  base = remove_adapters(config).instantiate()
  of_base = select(variables, lambda path: not is_adapter(path))
  write_model(tmp_path / 'base', base, of_base)
  write_adapter(tmp_path / 'adapter', model, variables)
  expected = logits_of_ours(model, variables)
  assert abs(expected - logits_of_ours(base, of_base)).max() > 0.05
  theirs = peft.PeftModel.from_pretrained(loaded(tmp_path / 'base'), tmp_path / 'adapter').eval()
  np.testing.assert_allclose(logits_of(theirs), expected, rtol=0, atol=5e-4)
  np.testing.assert_allclose(logits_of_ours(base, merge_adapters(model, variables)), expected, rtol=0, atol=5e-4)


EXPERTS = ['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']
TARGETS = {
  'attention': (False, {'target_modules': ['q_proj', 'v_proj'], 'r': 3, 'lora_alpha': 5}),
  'all': (False, {'target_modules': 'all-linear', 'r': 2, 'use_rslora': True}),
  'patterns': (
    False,
    {
      'target_modules': ['q_proj', 'down_proj'],
      'r': 2,
      'rank_pattern': {'down_proj': 4},
      'alpha_pattern': {'q_proj': 3},
      'layers_to_transform': [0, 2],
    },
  ),
  'dora': (False, {'target_modules': ['q_proj', 'down_proj'], 'use_dora': True, 'layers_to_transform': [0, 2]}),
  'ia3': (False, {'target_modules': ['k_proj', 'up_proj', 'down_proj'], 'feedforward_modules': ['down_proj']}),
  'embedding': (False, {'target_modules': ['embed_tokens', 'o_proj'], 'r': 2}),
  'mixtral': (True, {'target_modules': ['q_proj', 'o_proj'], 'r': 2}),
  'experts': (True, {'target_modules': ['q_proj'], 'target_parameters': EXPERTS, 'r': 2}),
  'some experts': (True, {'target_modules': ['q_proj'], 'target_parameters': EXPERTS[1:], 'r': 2}),
}


@pytest.mark.parametrize('kind', TARGETS)
def test_what_they_save(kind, tmp_path):
  experts, settings = TARGETS[kind]
  config = lm(experts=experts)
  base = config.instantiate()
  variables = jax.tree.map(lambda x: 2 * x, drawn_variables(base.abstract_init()))
  write_model(tmp_path / 'base', base, variables)
  make = peft.IA3Config if kind == 'ia3' else peft.LoraConfig
  theirs = peft.get_peft_model(loaded(tmp_path / 'base'), make(task_type='CAUSAL_LM', **settings))
  torch.manual_seed(0)
  with torch.no_grad():
    for name, parameter in theirs.named_parameters():
      if 'ia3_' in name or 'magnitude' in name:
        parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
      elif 'lora_' in name:
        parameter.copy_(0.3 * torch.randn_like(parameter))
  theirs.save_pretrained(tmp_path / 'adapter')
  found = read_adapter(tmp_path / 'adapter', config, variables)
  ours = logits_of_ours(found.model.instantiate(), merge(variables, found.variables))
  np.testing.assert_allclose(ours, logits_of(theirs.eval()), rtol=0, atol=5e-4)
  assert abs(ours - logits_of_ours(base, variables)).max() > 0.01
