"""Plans of models of Hugging Face from their config.json, and the experiments that they write."""

from __future__ import annotations

import json
import re

import pytest

from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.plan import plan

LLAMA = {
  'architectures': ['LlamaForCausalLM'],
  'model_type': 'llama',
  'hidden_act': 'silu',
  'hidden_size': 32,
  'intermediate_size': 64,
  'max_position_embeddings': 64,
  'num_attention_heads': 4,
  'num_hidden_layers': 2,
  'num_key_value_heads': 2,
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'vocab_size': 96,
}
PARAMETERS = 2 * 96 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32


@pytest.fixture
def config_file(tmp_path):
  file = tmp_path / 'config.json'
  file.write_text(json.dumps(LLAMA))
  return file


def run(capsys, *arguments):
  code = main(['plan', *map(str, arguments), '--topology=h100:1x4', '--nocompile'])
  captured = capsys.readouterr()
  return code, captured.out + captured.err


def figures(text):
  """The lines of a plan that say its parameters, mesh and memory."""
  return re.findall(r'^(?:model  |mesh|fits) .*', text, re.M)


@pytest.mark.slow
@pytest.mark.parametrize('what', ['file', 'folder'])
def test_a_config_json_is_planned_without_weights_and_the_written_experiment_has_the_same_plan(
  what, config_file, tmp_path, capsys
):
  file = tmp_path / 'mine.py'
  named = config_file if what == 'file' else tmp_path
  code, text = run(capsys, f'--hf={named}', '--set=datasets[*].seq_len=48', f'--write_experiment={file}')
  assert code == 0 and f'wrote {file}' in text
  assert f'{PARAMETERS:,} parameters' in text and 'replica 1 x data 4 x mdl 1' in text
  code, again = run(capsys, f'--exp={file}')
  assert code == 0 and figures(again) == figures(text) and len(figures(text)) == 3
  code, text = run(capsys, f'--exp={file}', '--set=datasets[*].batch_size=64')
  assert figures(text) != figures(again)  # It is an experiment like others.


@pytest.mark.parametrize(
  ('arguments', 'told'),
  [
    (['--hf=nowhere/config.json'], 'there is no file nowhere/config.json'),
    (['--hf=nowhere'], 'nowhere is not a folder'),
    (['--hf=config.json', '--exp=lm.StdlibLmTiny'], '--hf and --exp both name a model'),
    (['--exp=lm.StdlibLmTiny', '--write_experiment=x.py'], '--write_experiment needs --hf'),
    (['--hf=config.json', '--write_experiment=there.py'], '--write_experiment=there.py exists'),
    (['--hf=broken.json'], 'broken.json is not JSON'),
    (['--hf=other.json'], "model_type 'mamba' is not supported; supported: llama"),
  ],
)
def test_mistakes_are_told_before_anything_is_planned(arguments, told, config_file, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'there.py').touch()
  (tmp_path / 'broken.json').write_text('{')
  (tmp_path / 'other.json').write_text('{"model_type": "mamba"}')
  code, text = run(capsys, *arguments)
  assert code == 2 and told in text and (tmp_path / 'there.py').read_text() == ''


def test_only_supported_families_have_an_experiment():
  with pytest.raises(ConfigError, match="model_type 'mamba' is not supported"):
    training_experiment({'model_type': 'mamba'})


@pytest.mark.slow
def test_the_experiment_of_a_config_recomputes_and_splits_over_all_devices():
  experiment = training_experiment(LLAMA)
  for dataset in experiment.datasets:
    dataset.batch_size = 8
  found = plan(experiment, None, 'cpu:8', compile=False)
  assert found.mesh == {'replica': 1, 'data': 8, 'mdl': 1} and found.work.tokens == 8 * 64
  assert experiment.task.model.lm_tpl.transformer_tpl.remat == 'full'
